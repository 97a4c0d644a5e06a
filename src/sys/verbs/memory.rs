//! Registered memory: what a NIC may read, and where peers may write if it is allowed.
//!
//! Register on threads that may wait: the kernel pins every page. A registration keeps its memory mapped; who
//! may write which bytes is decided by the leases of `transfer`, not here, and no reference into the memory is
//! ever formed.
#![allow(unsafe_code)]

use super::abi::{self, Mr};
use super::device::{Domain, made};
use std::fmt;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

/// Memory that can be registered.
///
/// # Safety
/// All bytes from `base` stay mapped, readable and writable, as long as the value, wherever it is moved; and
/// nobody has references into them, since a NIC and its peers read and write them at any time.
pub unsafe trait Backing: Send + Sync + 'static {
    /// First byte.
    fn base(&self) -> NonNull<u8>;
    /// Bytes.
    fn len(&self) -> usize;
    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What others than this process may do with memory. Reading for what this process posts is always allowed.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Access {
    /// Peers that know the key may WRITE.
    pub remote_write: bool,
    /// Writes may pass each other on PCIe, which fast links to distant memory need; a completion still comes
    /// after all of its bytes. Devices that do not know it ignore it.
    pub relaxed_ordering: bool,
}

/// Memory registered with a domain, until dropped.
pub struct Registration {
    mr: *mut Mr,
    local: Local,
    remote_key: u32,
    domain: Arc<Domain>,
    /// Mapped for as long as the NIC may look.
    _backing: Arc<dyn Backing>,
}

/// What posting needs of a registration, side by side.
#[derive(Clone, Copy, Debug)]
pub(super) struct Local {
    pub(super) address: u64,
    pub(super) len: usize,
    pub(super) key: u32,
}

// SAFETY: the registration is a number to whoever uses it; the library allows any thread to end it.
unsafe impl Send for Registration {}
// SAFETY: as above; a shared one only tells its numbers.
unsafe impl Sync for Registration {}

impl Registration {
    /// Registers `range` of `backing`, which is no longer than the device's `max_region`.
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
        // SAFETY: memory that stays mapped longer than the registration; remote addresses are this process's.
        let mr = unsafe {
            (domain.library().reg_mr)(domain.pd, base.cast(), range.len(), address, flags)
        };
        let mr = made(mr)?;
        // SAFETY: just made; the library changes neither key.
        let (key, remote_key) = unsafe { ((*mr).lkey, (*mr).rkey) };
        let local = Local { address, len: range.len(), key };
        Ok(Registration {
            mr,
            local,
            remote_key,
            domain: domain.clone(),
            _backing: backing.clone(),
        })
    }

    /// Where it begins, as peers must say.
    pub fn address(&self) -> u64 {
        self.local.address
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.local.len
    }

    /// Never.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// What peers must know to write. Not for logs.
    pub fn remote_key(&self) -> u32 {
        self.remote_key
    }

    pub(super) fn local(&self) -> Local {
        self.local
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: made by `new`, ended once. From here on its keys are refused.
        unsafe { (self.domain.library().dereg_mr)(self.mr) };
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration").field("len", &self.local.len).finish_non_exhaustive()
    }
}
