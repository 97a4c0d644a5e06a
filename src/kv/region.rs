//! A mapping that can be shared with other processes: an anonymous memory file. It is sealed
//! against shrinking, growing and new writable mappings, so that a peer with its descriptor can
//! only read.
//!
//! Owns: the mapping.
//! Thread: any can hold the pointer. The leases of `transfer` and the scheduler decide which thread
//! can write which bytes, not this module.
//! Invariants: the only references into the memory are to atomics, because others may write it. A
//! read-only mapping is read by Relaxed loads alone.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use crate::sys::verbs::Backing;
use bytemuck::Pod;

/// The descriptor that gives a peer access to a region.
pub type Descriptor<'a> = BorrowedFd<'a>;

/// A shared mapping of this process's own memory file, readable and writable.
#[derive(Debug)]
pub struct Region {
    map: Mapping,
    file: File,
}

/// A read-only mapping of a memory file that a peer owns.
#[derive(Debug)]
pub struct PeerRegion {
    map: Mapping,
}

#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory that lives as long as the value; access goes through raw
// pointers, and their users prevent races.
unsafe impl Send for Mapping {}
// SAFETY: as above; no method of a shared `Mapping` touches the memory.
unsafe impl Sync for Mapping {}

impl Region {
    /// Makes a zeroed region of `len` bytes, rounded up to whole memory pages. `name` is visible in
    /// `/proc/PID/maps`.
    pub fn new(name: &std::ffi::CStr, len: usize) -> io::Result<Region> {
        let len = len.max(1).next_multiple_of(4096);
        // SAFETY: `name` is a C string; the flags are valid.
        let fd = unsafe {
            libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `fd` was just made and has no other owner.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        file.set_len(len as u64)?;
        let map = Mapping::new(file.as_fd(), len, libc::PROT_READ | libc::PROT_WRITE)?;
        let seals =
            libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_SEAL;
        // SAFETY: `fcntl` with integer arguments on an open descriptor.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Region { map, file })
    }

    /// First byte. Stays valid as long as the region.
    #[inline]
    pub fn base(&self) -> NonNull<u8> {
        self.map.base
    }

    /// Bytes mapped.
    #[inline]
    pub fn len(&self) -> usize {
        self.map.len
    }

    /// Always false: a region holds at least one memory page.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The descriptor for a peer; because of its seals it can only be mapped read-only.
    pub fn descriptor(&self) -> Descriptor<'_> {
        self.file.as_fd()
    }

    /// A word shared with peers. Panics unless `offset` is a multiple of 8 inside the region:
    /// offsets are this process's own arithmetic.
    #[inline]
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        self.map.word(offset)
    }

    /// A half word shared with peers, as [`Region::word`].
    #[inline]
    pub fn half_word(&self, offset: usize) -> &AtomicU32 {
        self.map.half_word(offset)
    }

    /// Loads a record that a peer's NIC has written, as [`PeerRegion::load`].
    #[inline]
    pub fn read<T: Pod>(&self, offset: usize) -> T {
        self.map.load(offset, size_of::<T>())
    }

    /// Stores the first `bytes` of a record in words, each atomic; a later Release store publishes
    /// them. `offset` and `bytes` are multiples of 8.
    #[inline]
    pub fn store<T: Pod>(&self, offset: usize, record: &T, bytes: usize) {
        for (i, bytes) in bytemuck::bytes_of(record)[..bytes].chunks_exact(8).enumerate() {
            let word = u64::from_ne_bytes(bytes.try_into().expect("chunks of eight"));
            self.word(offset + 8 * i).store(word, Ordering::Relaxed);
        }
    }

    /// Copies `bytes` bytes from another region. Only `kv` can call it, for pages of one request
    /// that no transfer reads or writes. Panics if a range leaves its region: offsets are this
    /// process's own arithmetic.
    pub(super) fn copy_from(&self, to: usize, source: &Region, from: usize, bytes: usize) {
        let within =
            |start: usize, len: usize| start.checked_add(bytes).is_some_and(|end| end <= len);
        assert!(within(to, self.len()) && within(from, source.len()), "a copy leaves its region");
        assert!(self.base() != source.base(), "a copy is between two regions");
        // SAFETY: both ranges lie in their mappings, which are different. The only caller is
        // the host tier: the engine's thread copies pages that one request holds without a lease.
        unsafe {
            let from = source.base().as_ptr().add(from);
            from.copy_to_nonoverlapping(self.base().as_ptr().add(to), bytes);
        }
    }
}

// SAFETY: the mapping stays at its address as long as the region; no reference into it is formed.
unsafe impl Backing for Region {
    fn base(&self) -> NonNull<u8> {
        self.map.base
    }

    fn len(&self) -> usize {
        self.map.len
    }
}

impl PeerRegion {
    /// Maps a peer's memory file read-only. Refuses a file with another size than `len`, or without
    /// a seal against shrinking, because a shrinking file could make reads here fault.
    pub fn map(file: Descriptor<'_>, len: usize) -> io::Result<PeerRegion> {
        // SAFETY: `fcntl` on an open descriptor.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "peer's memory file is not sealed against shrinking",
            ));
        }
        let size = File::from(file.try_clone_to_owned()?).metadata()?.len();
        if size != len as u64 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("peer's memory file has {size} bytes, announced {len}"),
            ));
        }
        Ok(PeerRegion { map: Mapping::new(file, len, libc::PROT_READ)? })
    }

    /// First byte; read-only memory.
    #[inline]
    pub fn base(&self) -> NonNull<u8> {
        self.map.base
    }

    /// Bytes mapped.
    #[inline]
    pub fn len(&self) -> usize {
        self.map.len
    }

    /// Always false: an empty file is not mapped.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// A word that the peer may write concurrently. Panics like [`Region::word`].
    #[inline]
    pub fn load_word(&self, offset: usize) -> u64 {
        self.map.word(offset).load(Ordering::Relaxed)
    }

    /// The same, before reads of what the peer has written before it stored the word with Release.
    #[inline]
    pub fn acquire_word(&self, offset: usize) -> u64 {
        let word = self.load_word(offset);
        fence(Ordering::Acquire);
        word
    }

    /// A half word that the peer may write concurrently.
    #[inline]
    pub fn load_half_word(&self, offset: usize) -> u32 {
        self.map.half_word(offset).load(Ordering::Relaxed)
    }

    /// Loads the first `bytes` of a record word by word; the rest is zero. Before the call, the
    /// caller has called [`PeerRegion::acquire_word`] for a word that says whether they are
    /// complete. Their values are not trusted in either case.
    #[inline]
    pub fn load<T: Pod>(&self, offset: usize, bytes: usize) -> T {
        self.map.load(offset, bytes)
    }
}

impl Mapping {
    fn new(file: BorrowedFd<'_>, len: usize, protection: libc::c_int) -> io::Result<Mapping> {
        // SAFETY: a fresh mapping at an address the kernel chooses.
        let base = unsafe {
            libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base =
            NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at address zero"))?;
        Ok(Mapping { base, len })
    }

    fn load<T: Pod>(&self, offset: usize, bytes: usize) -> T {
        let mut record = T::zeroed();
        for (i, bytes) in
            bytemuck::bytes_of_mut(&mut record)[..bytes].chunks_exact_mut(8).enumerate()
        {
            let word = self.word(offset + 8 * i).load(Ordering::Relaxed);
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
        record
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(
            offset.is_multiple_of(8) && offset < self.len - 7,
            "word at {offset} of {}",
            self.len
        );
        // SAFETY: in bounds and aligned, because mappings begin at a memory page. An atomic may be
        // shared with any process that maps the file. Of read-only memory, std allows Relaxed
        // loads of at most a machine word; `PeerRegion` offers no others.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    fn half_word(&self, offset: usize) -> &AtomicU32 {
        assert!(
            offset.is_multiple_of(4) && offset < self.len - 3,
            "half word at {offset} of {}",
            self.len
        );
        // SAFETY: as for `word`.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `new` mapped the range, and no pointer to it outlives `self`.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_sees_writes_and_cannot_map_writable() {
        let region = Region::new(c"test", 5000).unwrap();
        assert_eq!(region.len(), 8192);
        let peer = PeerRegion::map(region.descriptor(), 8192).unwrap();
        // SAFETY: both mappings are live, and no other thread touches them.
        unsafe {
            region.base().write(7);
            assert_eq!(peer.base().read(), 7);
        }
        let writable = Mapping::new(region.descriptor(), 8192, libc::PROT_READ | libc::PROT_WRITE);
        assert_eq!(writable.unwrap_err().raw_os_error(), Some(libc::EPERM));
    }

    #[test]
    fn a_wrong_size_or_unsealed_file_is_refused() {
        let region = Region::new(c"test", 4096).unwrap();
        let error = PeerRegion::map(region.descriptor(), 8192).unwrap_err();
        assert!(error.to_string().contains("4096 bytes, announced 8192"), "{error}");
        let plain = File::open("/dev/null").unwrap();
        assert!(PeerRegion::map(plain.as_fd(), 4096).is_err());
    }
}
