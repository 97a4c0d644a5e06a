//! A mapping that can be shared with other processes: an anonymous memory file. It is sealed
//! against shrinking, growing and new writable mappings, so that a peer with its descriptor can
//! only read.
//!
//! Owns: the mapping. Memory of another engine can be a region, too.
//! Thread: any can hold the pointer. The leases of `transfer` and the scheduler decide which thread
//! can write which bytes, not this module.
//! Invariants: the only references into the memory are to atomics, because others may write it. A
//! read-only mapping is read by Relaxed loads alone.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::adopted_memory::{Adopted, Claim};
use super::memory_file::{PAGE, make_file, seal};
use crate::sys::verbs::Backing;
use bytemuck::Pod;

/// The descriptor that gives a peer access to a region.
pub type Descriptor<'a> = BorrowedFd<'a>;

/// Readable and writable memory of this process, usually a mapping of its own memory file.
#[derive(Debug)]
pub struct Region {
    map: Mapping,
    source: RegionSource,
    /// The right to memory of another engine. It ends after the memory is private again.
    _claim: Option<Claim>,
}

/// Where the memory of a region comes from.
#[derive(Debug)]
enum RegionSource {
    File(File),
    Adopted(Adopted),
    /// Memory of another engine as it is. Peers cannot map it.
    Borrowed,
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
    /// The bytes before `base` that are mapped with it, and whether this value unmaps all.
    skew: usize,
    is_owned: bool,
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
        let len = len.max(1).next_multiple_of(PAGE);
        let file = make_file(name, len)?;
        let map = Mapping::new(file.as_fd(), len, 0, libc::PROT_READ | libc::PROT_WRITE)?;
        seal(&file)?;
        Ok(Region { map, source: RegionSource::File(file), _claim: None })
    }

    /// Makes a region of memory that another engine allocated. If it is to be `shared`, its whole
    /// memory pages move onto a memory file, in place and with their content, so that peers can map
    /// them. After [`Region::make_private`] or the drop of the region, the memory is private again.
    /// The move and the way back need as much memory as the pages that are not zero.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`]: address or length is no multiple of 8, another adopted
    /// region has some of the bytes, or memory to be `shared` is not private and anonymous. Other
    /// kinds: the system refuses. Nothing has changed then.
    ///
    /// # Safety
    /// The bytes are readable and writable until the region is dropped. No reference to them exists
    /// while a transfer uses them. If they are `shared`, no thread writes them during this call,
    /// [`Region::make_private`] and the drop, and no device has their physical pages then.
    pub unsafe fn adopt(base: NonNull<u8>, len: usize, shared: bool) -> io::Result<Region> {
        // Both kinds need it: access is by words.
        let is_aligned = base.as_ptr().addr().is_multiple_of(8) && len.is_multiple_of(8);
        if len == 0 || !is_aligned {
            let why = "address and length must be multiples of 8";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let claim = Claim::new(base, len)?;
        let source = match shared {
            // SAFETY: the caller's promise.
            true => RegionSource::Adopted(unsafe { Adopted::new(base, len)? }),
            false => RegionSource::Borrowed,
        };
        let map = Mapping { base, len, skew: 0, is_owned: false };
        Ok(Region { map, source, _claim: Some(claim) })
    }

    /// Makes the memory of another engine private again, as the drop does. Peers that have mapped
    /// the region see no later change. Other regions stay as they are.
    ///
    /// # Errors
    /// The system has no more memory. Nothing has changed then, and the call can be repeated.
    pub fn make_private(&mut self) -> io::Result<()> {
        match &mut self.source {
            RegionSource::Adopted(adopted) => adopted.give_back(),
            RegionSource::File(_) | RegionSource::Borrowed => Ok(()),
        }
    }

    /// Whether peers on this host can map it.
    pub fn is_shareable(&self) -> bool {
        !matches!(self.source, RegionSource::Borrowed)
    }

    /// Makes all bytes visible to peers that have mapped the region. Only adopted memory needs it,
    /// before an offer of its pages.
    pub fn publish(&self) {
        if let RegionSource::Adopted(adopted) = &self.source {
            adopted.publish();
        }
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
    ///
    /// # Panics
    /// The region is not [`Region::is_shareable`].
    pub fn descriptor(&self) -> Descriptor<'_> {
        match &self.source {
            RegionSource::File(file) => file.as_fd(),
            RegionSource::Adopted(adopted) => adopted.file().as_fd(),
            RegionSource::Borrowed => panic!("peers cannot map this region"),
        }
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

// SAFETY: the memory stays at its address as long as the region; no reference into it is formed.
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
        PeerRegion::map_from(file, len, 1)
    }

    /// The same for memory that the peer may have adopted. It can begin anywhere in the first
    /// memory page of the file, and it ends with the file.
    pub fn map_adopted(file: Descriptor<'_>, len: usize) -> io::Result<PeerRegion> {
        PeerRegion::map_from(file, len, PAGE)
    }

    /// Maps the last `len` bytes of a file. Fewer than `skews` bytes are before them.
    fn map_from(file: Descriptor<'_>, len: usize, skews: usize) -> io::Result<PeerRegion> {
        // SAFETY: `fcntl` on an open descriptor.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "peer's memory file is not sealed against shrinking",
            ));
        }
        let size = File::from(file.try_clone_to_owned()?).metadata()?.len();
        let skew = size.checked_sub(len as u64).filter(|&skew| skew < skews as u64);
        let Some(skew) = skew.filter(|skew| skew.is_multiple_of(8) && size > 0) else {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("peer's memory file has {size} bytes, announced {len}"),
            ));
        };
        Ok(PeerRegion { map: Mapping::new(file, len, skew as usize, libc::PROT_READ)? })
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
    /// Maps `len` bytes of a file that begin `skew` bytes after its first one.
    fn new(
        file: BorrowedFd<'_>,
        len: usize,
        skew: usize,
        protection: libc::c_int,
    ) -> io::Result<Mapping> {
        let (anywhere, fd) = (std::ptr::null_mut(), file.as_raw_fd());
        // SAFETY: a fresh mapping at an address the kernel chooses.
        let base = unsafe { libc::mmap(anywhere, skew + len, protection, libc::MAP_SHARED, fd, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base =
            NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at address zero"))?;
        // SAFETY: the mapping has `skew + len` bytes.
        Ok(Mapping { base: unsafe { base.add(skew) }, len, skew, is_owned: true })
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
        // SAFETY: in bounds and aligned, because each base is a multiple of 8. An atomic may be
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
        if self.is_owned {
            // SAFETY: `new` mapped the range, and no pointer to it outlives `self`.
            unsafe {
                let first = self.base.as_ptr().sub(self.skew);
                libc::munmap(first.cast(), self.skew + self.len);
            }
        }
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
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let writable = Mapping::new(region.descriptor(), 8192, 0, protection);
        assert_eq!(writable.unwrap_err().raw_os_error(), Some(libc::EPERM));
    }

    /// A block of memory between two neighbours that a thread writes all the time.
    struct Neighbourhood {
        words: Vec<AtomicU64>,
        first: usize,
        len: usize,
    }

    impl Neighbourhood {
        fn new(first: usize, len: usize) -> Neighbourhood {
            let words = (0..first + len + 600).map(|word| AtomicU64::new(word as u64)).collect();
            Neighbourhood { words, first, len }
        }

        fn adopt(&self) -> Region {
            let base = NonNull::from(&self.words[self.first]).cast();
            // SAFETY: the words live longer than the region, and only atomics are used.
            unsafe { Region::adopt(base, 8 * self.len, true).unwrap() }
        }
    }

    #[test]
    fn adopted_memory_is_shown_and_its_neighbours_are_neither_shown_nor_changed() {
        // One page and less, some pages, many pages; at several places of a page.
        for (first, len) in [(3, 5), (8, 509), (1, 1024), (700, 5000), (511, 513), (513, 40_000)] {
            let near = Neighbourhood::new(first, len);
            let (before, after) = (&near.words[first - 1], &near.words[first + len]);
            let is_over = std::sync::atomic::AtomicBool::new(false);
            let counted = std::thread::scope(|scope| {
                let counter = scope.spawn(|| {
                    let mut count = 0;
                    while count == 0 || !is_over.load(Ordering::Relaxed) {
                        count += 1;
                        before.store(count, Ordering::Relaxed);
                        after.store(count, Ordering::Relaxed);
                        assert_eq!(before.load(Ordering::Relaxed), count);
                        assert_eq!(after.load(Ordering::Relaxed), count);
                    }
                    count
                });
                for _ in 0..3 {
                    let region = near.adopt();
                    let bytes = region.len();
                    assert_eq!(bytes, 8 * len);
                    let peer = PeerRegion::map_adopted(region.descriptor(), bytes).unwrap();
                    assert_eq!(peer.load_word(0), near.words[first].load(Ordering::Relaxed));
                    for word in 0..len {
                        near.words[first + word].fetch_add(7, Ordering::Relaxed);
                    }
                    region.publish();
                    for word in 0..len {
                        let held = near.words[first + word].load(Ordering::Relaxed);
                        assert_eq!(peer.load_word(8 * word), held, "{first} {len} {word}");
                    }
                    let file = File::from(region.descriptor().try_clone_to_owned().unwrap());
                    let skew = file.metadata().unwrap().len() as usize - bytes;
                    let mut beside = vec![0; skew];
                    std::os::unix::fs::FileExt::read_exact_at(&file, &mut beside, 0).unwrap();
                    assert!(beside.iter().all(|&byte| byte == 0), "a neighbour is shown");
                    assert!(Mapping::new(file.as_fd(), 8, 0, libc::PROT_WRITE).is_err());
                }
                is_over.store(true, Ordering::Relaxed);
                counter.join().unwrap()
            });
            assert_eq!(before.load(Ordering::Relaxed), counted);
            for word in 0..len {
                let held = near.words[first + word].load(Ordering::Relaxed);
                assert_eq!(held, (first + word + 21) as u64, "{first} {len} {word}");
            }
            // Only private memory can be adopted: it is private again.
            drop(near.adopt());
        }
    }

    #[test]
    fn a_late_publication_does_not_restore_old_bytes() {
        let near = Neighbourhood::new(3, 1);
        let region = near.adopt();
        let peer = PeerRegion::map_adopted(region.descriptor(), region.len()).unwrap();
        let is_over = std::sync::atomic::AtomicBool::new(false);
        let old = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    region.publish();
                }
            });
            let old = (1..2_000_000).find(|&value| {
                near.words[3].store(value, Ordering::Relaxed);
                region.publish();
                // The offer of the page follows, so the word must be there from now on.
                (0..50).any(|_| peer.load_word(0) != value)
            });
            is_over.store(true, Ordering::Relaxed);
            old
        });
        assert_eq!(old, None);
    }

    /// Anonymous memory of four pages, private or shared with forked children.
    struct Pages(NonNull<u8>);

    impl Pages {
        fn new(kind: libc::c_int) -> Pages {
            let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, kind | libc::MAP_ANONYMOUS);
            // SAFETY: a fresh mapping at an address the kernel chooses.
            let base = unsafe { libc::mmap(std::ptr::null_mut(), 4 * PAGE, rights, flags, -1, 0) };
            assert_ne!(base, libc::MAP_FAILED);
            Pages(NonNull::new(base.cast()).unwrap())
        }

        fn adopt(&self, first: usize, bytes: usize, shared: bool) -> io::Result<Region> {
            assert!(first + bytes <= 4 * PAGE);
            // SAFETY: the bytes are mapped until the value is dropped, and nothing else uses them.
            unsafe { Region::adopt(self.0.add(first), bytes, shared) }
        }
    }

    impl Drop for Pages {
        fn drop(&mut self) {
            // SAFETY: the value made the mapping, and the regions of the test are gone.
            unsafe { libc::munmap(self.0.as_ptr().cast(), 4 * PAGE) };
        }
    }

    #[test]
    fn bytes_of_another_region_are_refused() {
        let pages = Pages::new(libc::MAP_PRIVATE);
        for first_is_shared in [true, false] {
            let region = pages.adopt(PAGE, PAGE, first_is_shared).unwrap();
            for shared in [true, false] {
                for (first, bytes) in [(0, 4 * PAGE), (PAGE, PAGE), (2 * PAGE - 8, 8)] {
                    let error = pages.adopt(first, bytes, shared).unwrap_err();
                    assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
                }
                let beside = [(0, PAGE), (2 * PAGE, 100 * 8)];
                let beside = beside.map(|(first, bytes)| pages.adopt(first, bytes, shared));
                assert!(beside.iter().all(Result::is_ok));
            }
            drop(region);
            pages.adopt(0, 4 * PAGE, true).unwrap();
        }
    }

    #[test]
    fn memory_that_is_not_private_is_not_remapped() {
        let pages = Pages::new(libc::MAP_SHARED);
        let error = pages.adopt(0, PAGE, true).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
        assert!(pages.adopt(0, PAGE, false).is_ok());
        let pages = Pages::new(libc::MAP_PRIVATE);
        // SAFETY: the page is that of the test.
        assert_eq!(unsafe { libc::mprotect(pages.0.as_ptr().cast(), PAGE, libc::PROT_READ) }, 0);
        assert!(pages.adopt(0, 2 * PAGE, true).is_err());
        assert!(pages.adopt(PAGE, 2 * PAGE, true).is_ok());
    }

    #[test]
    fn memory_is_private_before_its_region_is_dropped() {
        let pages = Pages::new(libc::MAP_PRIVATE);
        let mut region = pages.adopt(0, 2 * PAGE, true).unwrap();
        let peer = PeerRegion::map_adopted(region.descriptor(), 2 * PAGE).unwrap();
        region.word(8).store(7, Ordering::Relaxed);
        region.make_private().unwrap();
        region.word(8).store(8, Ordering::Relaxed);
        region.make_private().unwrap();
        assert_eq!(peer.load_word(8), 7, "a peer sees no later change");
        drop(region);
        // SAFETY: the memory is that of the test.
        assert_eq!(unsafe { pages.0.cast::<u64>().add(1).read() }, 8);
    }

    #[test]
    fn memory_that_cannot_be_adopted_is_refused() {
        let words = [0u64; 4];
        let base = NonNull::from(&words).cast::<u8>();
        // SAFETY: the second half of the first word.
        let odd = unsafe { base.add(4) };
        for (base, len) in [(base, 0), (base, 12), (odd, 16)] {
            for shared in [true, false] {
                // SAFETY: the words outlive the region, which does not come into being.
                assert!(unsafe { Region::adopt(base, len, shared) }.is_err());
            }
        }
        // SAFETY: as above; nothing writes the words.
        let borrowed = unsafe { Region::adopt(base, 32, false) }.unwrap();
        assert!(!borrowed.is_shareable() && borrowed.len() == 32);
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
