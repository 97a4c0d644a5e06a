//! The product's leases, and memory that loom checks in place of the product's mappings.

use crate::ids::{Generation, SlotId};

#[path = "../../../src/kv/lease.rs"]
pub mod lease;
#[path = "../../../src/kv/page_span.rs"]
pub mod page_span;

/// A lease as the page pool creates it.
pub fn lease(slot: SlotId, generation: Generation) -> lease::Lease {
    lease::Lease::new(slot, generation)
}

pub mod region {
    //! A region with the interface of the product's. Words are loom's atomics. Records are in
    //! loom's cells, which check the rule of the ring: a record is not written while it is read.

    use crate::stdx::sync::{AtomicU32, AtomicU64, Ordering, fence};
    use bytemuck::Pod;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use std::ffi::CStr;
    use std::io;

    /// The most words of a region that a model uses.
    const WORDS: usize = 64;

    struct Words {
        words: Vec<AtomicU64>,
        half_words: Vec<AtomicU32>,
        records: Vec<UnsafeCell<u64>>,
    }

    /// Memory of this process.
    #[derive(Clone)]
    pub struct Region(Arc<Words>);

    /// Memory of a peer.
    pub struct PeerRegion(Arc<Words>);

    /// Describes a region to a peer. Here it is the region itself.
    pub type Descriptor<'a> = &'a Region;

    impl Region {
        pub fn new(_name: &CStr, len: usize) -> io::Result<Region> {
            let words = WORDS.min(len / 8);
            Ok(Region(Arc::new(Words {
                words: (0..words).map(|_| AtomicU64::new(0)).collect(),
                half_words: (0..2 * words).map(|_| AtomicU32::new(0)).collect(),
                records: (0..words).map(|_| UnsafeCell::new(0)).collect(),
            })))
        }

        pub fn descriptor(&self) -> Descriptor<'_> {
            self
        }

        pub fn word(&self, offset: usize) -> &AtomicU64 {
            &self.0.words[offset / 8]
        }

        pub fn half_word(&self, offset: usize) -> &AtomicU32 {
            &self.0.half_words[offset / 4]
        }

        #[allow(unsafe_code)]
        pub fn store<T: Pod>(&self, offset: usize, record: &T, bytes: usize) {
            for (index, bytes) in bytemuck::bytes_of(record)[..bytes].chunks_exact(8).enumerate() {
                let word = u64::from_ne_bytes(bytes.try_into().expect("chunks of eight"));
                // SAFETY: loom fails the model if another thread can access the cell.
                self.0.records[offset / 8 + index].with_mut(|cell| unsafe { *cell = word });
            }
        }
    }

    impl PeerRegion {
        pub fn map(file: Descriptor<'_>, _len: usize) -> io::Result<PeerRegion> {
            Ok(PeerRegion(file.0.clone()))
        }

        pub fn load_word(&self, offset: usize) -> u64 {
            self.0.words[offset / 8].load(Ordering::Relaxed)
        }

        pub fn acquire_word(&self, offset: usize) -> u64 {
            let word = self.load_word(offset);
            fence(Ordering::Acquire);
            word
        }

        pub fn load_half_word(&self, offset: usize) -> u32 {
            self.0.half_words[offset / 4].load(Ordering::Relaxed)
        }

        #[allow(unsafe_code)]
        pub fn load<T: Pod>(&self, offset: usize, bytes: usize) -> T {
            let mut record = T::zeroed();
            for (index, bytes) in
                bytemuck::bytes_of_mut(&mut record)[..bytes].chunks_exact_mut(8).enumerate()
            {
                // SAFETY: as for `Region::store`.
                let word = self.0.records[offset / 8 + index].with(|cell| unsafe { *cell });
                bytes.copy_from_slice(&word.to_ne_bytes());
            }
            record
        }
    }

    impl std::fmt::Debug for Region {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("Region")
        }
    }

    impl std::fmt::Debug for PeerRegion {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("PeerRegion")
        }
    }
}
