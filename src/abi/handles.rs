//! Handles: numbers for objects that a caller cannot free twice.

use super::types::BatonError;
use crate::limits::ABI_HANDLES_MAX;
use crate::stdx::failpoint::is_failpoint_active;
use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};

/// Objects by handle. A handle is an index and the number of its use, never 0.
#[derive(Debug)]
pub(super) struct HandleTable<T>(RwLock<Vec<HandleEntry<T>>>);

#[derive(Debug)]
struct HandleEntry<T> {
    /// How often this entry was used. The last use of all is never given again.
    uses: u32,
    object: HandleState<T>,
}

#[derive(Debug)]
enum HandleState<T> {
    Free,
    Live(Arc<T>),
    /// A call ends the object. The handle is not free, because the end can fail.
    Ending,
}

fn split(handle: u64) -> (usize, u32) {
    (handle as u32 as usize, (handle >> 32) as u32)
}

impl<T> HandleEntry<T> {
    fn is_of(&self, uses: u32) -> bool {
        self.uses == uses || is_failpoint_active("handle of a freed object names the next one")
    }
}

impl<T> HandleTable<T> {
    pub(super) const fn new() -> HandleTable<T> {
        HandleTable(RwLock::new(Vec::new()))
    }

    /// Gives an object a handle.
    ///
    /// # Errors
    /// [`BatonError::Full`].
    pub(super) fn add(&self, object: T) -> Result<u64, BatonError> {
        let mut entries = self.write();
        let is_free = |entry: &HandleEntry<T>| {
            matches!(entry.object, HandleState::Free) && entry.uses < u32::MAX
        };
        let index = match entries.iter().position(is_free) {
            Some(index) => index,
            None if entries.len() < ABI_HANDLES_MAX => {
                entries.push(HandleEntry { uses: 0, object: HandleState::Free });
                entries.len() - 1
            }
            None => return Err(BatonError::Full),
        };
        let entry = &mut entries[index];
        (entry.uses, entry.object) = (entry.uses + 1, HandleState::Live(Arc::new(object)));
        Ok(u64::from(entry.uses) << 32 | index as u64)
    }

    /// The object of a handle.
    ///
    /// # Errors
    /// [`BatonError::Handle`].
    pub(super) fn get(&self, handle: u64) -> Result<Arc<T>, BatonError> {
        let (index, uses) = split(handle);
        let entries = self.0.read().unwrap_or_else(PoisonError::into_inner);
        match entries.get(index).filter(|entry| entry.is_of(uses)).map(|entry| &entry.object) {
            Some(HandleState::Live(object)) => Ok(Arc::clone(object)),
            _ => Err(BatonError::Handle),
        }
    }

    /// Takes the object of a handle out.
    ///
    /// # Errors
    /// [`BatonError::Handle`].
    pub(super) fn remove(&self, handle: u64) -> Result<Arc<T>, BatonError> {
        self.take(handle, HandleState::Free, |_| true)
    }

    /// Ends an object that nothing else uses, and drops it. If the end fails, the handle stays. The
    /// end can take long, so it does not hold up calls for other objects.
    ///
    /// # Errors
    /// [`BatonError::Handle`], [`BatonError::Busy`], or the error of `end`.
    pub(super) fn end_unused<E: From<BatonError>>(
        &self,
        handle: u64,
        end: impl FnOnce(&mut T) -> Result<(), E>,
    ) -> Result<(), E> {
        let is_unused = |object: &Arc<T>| Arc::strong_count(object) == 1;
        let mut object = self.take(handle, HandleState::Ending, is_unused)?;
        // Nothing else has the object: the table gives it to no other call now.
        let ended = Arc::get_mut(&mut object).ok_or(BatonError::Busy.into()).and_then(end);
        let mut entries = self.write();
        let entry = entry_of(&mut entries, handle)?;
        if ended.is_err() {
            entry.object = HandleState::Live(object);
            return ended;
        }
        entry.object = HandleState::Free;
        drop(entries);
        drop(object);
        ended
    }

    fn take(
        &self,
        handle: u64,
        rest: HandleState<T>,
        can: impl FnOnce(&Arc<T>) -> bool,
    ) -> Result<Arc<T>, BatonError> {
        let mut entries = self.write();
        let entry = entry_of(&mut entries, handle)?;
        match std::mem::replace(&mut entry.object, rest) {
            HandleState::Live(object) if can(&object) => Ok(object),
            other => {
                let is_live = matches!(other, HandleState::Live(_));
                entry.object = other;
                Err(if is_live { BatonError::Busy } else { BatonError::Handle })
            }
        }
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<HandleEntry<T>>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

fn entry_of<T>(
    entries: &mut [HandleEntry<T>],
    handle: u64,
) -> Result<&mut HandleEntry<T>, BatonError> {
    let (index, uses) = split(handle);
    entries.get_mut(index).filter(|entry| entry.is_of(uses)).ok_or(BatonError::Handle)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_void_after_its_object_is_removed() {
        let table = HandleTable::new();
        let first = table.add(1).unwrap();
        assert_eq!(table.get(first).as_deref(), Ok(&1));
        assert_eq!(table.remove(first).as_deref(), Ok(&1));
        let second = table.add(2).unwrap();
        for gone in [first, 0, u64::MAX] {
            assert_eq!(table.get(gone), Err(BatonError::Handle));
            assert_eq!(table.remove(gone), Err(BatonError::Handle));
            let ended = table.end_unused(gone, |_| Ok::<(), BatonError>(()));
            assert_eq!(ended, Err(BatonError::Handle));
        }
        assert_eq!(table.get(second).as_deref(), Ok(&2));
        for number in 1..ABI_HANDLES_MAX {
            table.add(number as i32).unwrap();
        }
        assert_eq!(table.add(3), Err(BatonError::Full));
    }

    #[test]
    fn a_handle_stays_if_its_object_is_in_use_or_cannot_end() {
        let table = HandleTable::new();
        let handle = table.add(1).unwrap();
        let used = table.get(handle).unwrap();
        assert_eq!(table.end_unused(handle, |_| Ok(())), Err(BatonError::Busy));
        drop(used);
        assert_eq!(table.end_unused(handle, |_| Err(BatonError::System)), Err(BatonError::System));
        assert_eq!(table.get(handle).as_deref(), Ok(&1));
        let ended: Result<(), BatonError> = table.end_unused(handle, |_| {
            // The handle is neither free nor of use meanwhile.
            assert_eq!(table.get(handle), Err(BatonError::Handle));
            assert_eq!(table.remove(handle), Err(BatonError::Handle));
            assert_ne!(table.add(2).unwrap() as u32, handle as u32);
            Ok(())
        });
        assert_eq!((ended, table.get(handle)), (Ok(()), Err(BatonError::Handle)));
    }
}
