//! Handles: numbers for objects that a caller cannot free twice.

use super::types::BatonError;
use crate::limits::ABI_HANDLES_MAX;
use std::sync::{Arc, PoisonError, RwLock};

/// Objects by handle. A handle is an index and the number of its use, never 0.
#[derive(Debug)]
pub(super) struct HandleTable<T>(RwLock<Vec<HandleEntry<T>>>);

#[derive(Debug)]
struct HandleEntry<T> {
    /// How often this entry was used. The last use of all is never given again.
    uses: u32,
    object: Option<Arc<T>>,
}

fn split(handle: u64) -> (usize, u32) {
    (handle as u32 as usize, (handle >> 32) as u32)
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
        let mut entries = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let is_free = |entry: &HandleEntry<T>| entry.object.is_none() && entry.uses < u32::MAX;
        let index = match entries.iter().position(is_free) {
            Some(index) => index,
            None if entries.len() < ABI_HANDLES_MAX => {
                entries.push(HandleEntry { uses: 0, object: None });
                entries.len() - 1
            }
            None => return Err(BatonError::Full),
        };
        let entry = &mut entries[index];
        (entry.uses, entry.object) = (entry.uses + 1, Some(Arc::new(object)));
        Ok(u64::from(entry.uses) << 32 | index as u64)
    }

    /// The object of a handle.
    ///
    /// # Errors
    /// [`BatonError::Handle`].
    pub(super) fn get(&self, handle: u64) -> Result<Arc<T>, BatonError> {
        let (index, uses) = split(handle);
        let entries = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let entry = entries.get(index).filter(|entry| entry.uses == uses);
        entry.and_then(|entry| entry.object.clone()).ok_or(BatonError::Handle)
    }

    /// Takes the object of a handle out, if `can` permits it.
    ///
    /// # Errors
    /// [`BatonError::Handle`], or the error of `can`.
    pub(super) fn remove(
        &self,
        handle: u64,
        can: impl FnOnce(&Arc<T>) -> Result<(), BatonError>,
    ) -> Result<Arc<T>, BatonError> {
        let (index, uses) = split(handle);
        let mut entries = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let entry = entries.get_mut(index).filter(|entry| entry.uses == uses);
        let object = &mut entry.ok_or(BatonError::Handle)?.object;
        can(object.as_ref().ok_or(BatonError::Handle)?)?;
        object.take().ok_or(BatonError::Handle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_void_after_its_object_is_removed() {
        let table = HandleTable::new();
        let first = table.add(1).unwrap();
        assert_eq!(table.get(first).as_deref(), Ok(&1));
        assert_eq!(table.remove(first, |_| Err(BatonError::Busy)), Err(BatonError::Busy));
        assert_eq!(table.remove(first, |_| Ok(())).as_deref(), Ok(&1));
        let second = table.add(2).unwrap();
        for gone in [first, 0, u64::MAX] {
            assert_eq!(table.get(gone), Err(BatonError::Handle));
            assert_eq!(table.remove(gone, |_| Ok(())), Err(BatonError::Handle));
        }
        assert_eq!(table.get(second).as_deref(), Ok(&2));
        for number in 1..ABI_HANDLES_MAX {
            table.add(number as i32).unwrap();
        }
        assert_eq!(table.add(3), Err(BatonError::Full));
    }
}
