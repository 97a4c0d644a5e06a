//! Registered memory: the NIC can read it, and peers with permission can write it.
//!
//! Thread: any that can block, because registration makes the kernel pin every page.
//! Invariants: a registration keeps its memory mapped. No reference into the memory is ever formed.
//! Not here: the right to write certain bytes, which the leases of `transfer` decide.
#![allow(unsafe_code)]

use super::abi::{self, Mr};
use super::device::{Domain, made};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::{fmt, io};

/// Memory that can be registered.
///
/// # Safety
/// All bytes from `base` stay mapped, readable and writable while the value lives, even if it is
/// moved. No references into them exist, because a NIC and its peers read and write them at any
/// time.
pub unsafe trait Backing: Send + Sync + 'static {
    /// The first byte.
    fn base(&self) -> NonNull<u8>;
    /// Number of bytes.
    fn len(&self) -> usize;
    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Access that the memory grants to peers. Reading for local posts is always allowed.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Access {
    /// Peers that know the key can WRITE.
    pub remote_write: bool,
    /// Writes can overtake each other on PCIe. Fast links to distant memory reach full speed only
    /// with that. A completion still comes after all its bytes. Devices without support ignore it.
    pub relaxed_ordering: bool,
}

/// Memory registered with a domain, until dropped.
pub struct Registration {
    mr: *mut Mr,
    local: Local,
    remote_key: u32,
    domain: Arc<Domain>,
    /// Keeps the memory mapped as long as the NIC can use it.
    backing: Arc<dyn Backing>,
}

/// The fields of a registration that posting needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Local {
    pub(super) address: u64,
    pub(super) len: usize,
    pub(super) key: u32,
}

// SAFETY: users see only numbers of the registration; the library allows any thread to end it.
unsafe impl Send for Registration {}
// SAFETY: as above; a shared one only returns its numbers.
unsafe impl Sync for Registration {}

impl Registration {
    /// Registers `range` of `backing`. The range must not exceed the device's `max_region`.
    pub fn new<B: Backing>(
        domain: &Arc<Domain>,
        backing: &Arc<B>,
        range: Range<usize>,
        access: Access,
    ) -> io::Result<Registration> {
        assert!(
            range.start < range.end && range.end <= backing.len(),
            "{range:?} of {}",
            backing.len()
        );
        let mut flags = 0;
        if access.remote_write {
            flags |= abi::ACCESS_LOCAL_WRITE | abi::ACCESS_REMOTE_WRITE;
        }
        if access.relaxed_ordering {
            flags |= abi::ACCESS_RELAXED_ORDERING;
        }
        // SAFETY: within the backing.
        let base = unsafe { backing.base().as_ptr().add(range.start) };
        let address = base.expose_provenance() as u64;
        // SAFETY: the memory stays mapped longer than the registration. Remote addresses are
        // addresses of this process.
        let mr = unsafe {
            (domain.library().reg_mr)(domain.pd, base.cast(), range.len(), address, flags)
        };
        let mr = made(mr)?;
        // SAFETY: just created; the library changes neither key.
        let (key, remote_key) = unsafe { ((*mr).lkey, (*mr).rkey) };
        let local = Local { address, len: range.len(), key };
        Ok(Registration { mr, local, remote_key, domain: domain.clone(), backing: backing.clone() })
    }

    /// The address that peers must use for its first byte.
    pub fn address(&self) -> u64 {
        self.local.address
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.local.len
    }

    /// Always false.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The key that peers need to write. Never log it.
    pub fn remote_key(&self) -> u32 {
        self.remote_key
    }

    pub(super) fn local(&self) -> Local {
        self.local
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: created by `new`, ended once. After this its keys are refused.
        let failed = unsafe { (self.domain.library().dereg_mr)(self.mr) } != 0;
        if failed {
            // The NIC can still use the memory, so it stays mapped.
            std::mem::forget(Arc::clone(&self.backing));
        }
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration").field("len", &self.local.len).finish_non_exhaustive()
    }
}
