//! Divides a pool into slabs for registration. All slabs have the same power of two of bytes; the
//! last one can be shorter.
//!
//! Arithmetic only.
//! Invariants: the [`Slabs::left`] bytes from an offset lie in the slab that [`Slabs::slab`]
//! returns, so a piece of that length fits one registration.
//! Not here: the registration of slabs, and their keys.

use crate::wire::message::RailGrant;
use std::ops::Range;

/// A pool's slabs on one NIC.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slabs {
    shift: u32,
}

impl Slabs {
    /// Cuts a pool of `bytes` for a device with regions of at most `region_max`. There is one slab
    /// if the pool fits, else slabs of the largest size that the device accepts.
    ///
    /// # Errors
    /// The reason, if the pool needs too many slabs.
    pub fn cut(bytes: u64, region_max: u64) -> Result<Slabs, String> {
        let whole = bytes.checked_next_power_of_two().filter(|_| bytes <= region_max);
        let shift = whole.or(Some(region_max)).and_then(u64::checked_ilog2);
        let (most, slabs) = (RailGrant::SLABS_MAX, shift.map(|shift| Slabs { shift }));
        slabs.filter(|slabs| slabs.count(bytes) <= most).ok_or_else(|| {
            let slab = slabs.map_or(0, Slabs::bytes);
            format!(
                "a region has at most {region_max} bytes, \
                 and {most} slabs of {slab} do not hold a pool of {bytes}"
            )
        })
    }

    /// The slabs of a peer. Its grant was checked: `bytes` is a power of two.
    pub fn of(bytes: u64) -> Slabs {
        Slabs { shift: bytes.trailing_zeros() }
    }

    /// Bytes of each slab except the last.
    pub fn bytes(self) -> u64 {
        1 << self.shift
    }

    /// Number of slabs of a pool of `bytes`.
    pub fn count(self, bytes: u64) -> usize {
        bytes.div_ceil(self.bytes()) as usize
    }

    /// The range of each slab in a pool of `bytes`.
    pub fn ranges(self, bytes: u64) -> impl Iterator<Item = Range<u64>> {
        (0..bytes).step_by(self.bytes() as usize).map(move |at| at..(at + self.bytes()).min(bytes))
    }

    /// The slab that contains `offset`.
    #[inline]
    pub fn slab(self, offset: u64) -> usize {
        (offset >> self.shift) as usize
    }

    /// The offset inside its slab.
    #[inline]
    pub fn within(self, offset: u64) -> u64 {
        offset & (self.bytes() - 1)
    }

    /// Bytes from `offset` to the end of its slab.
    #[inline]
    pub fn left(self, offset: u64) -> u64 {
        self.bytes() - self.within(offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slabs_are_the_largest_that_the_device_takes() {
        let cut =
            |bytes, most| Slabs::cut(bytes, most).map(|slabs| (slabs.bytes(), slabs.count(bytes)));
        assert_eq!(cut(1 << 30, u64::MAX), Ok((1 << 30, 1)));
        assert_eq!(cut(3 << 30, 3 << 30), Ok((4 << 30, 1)), "where it fits there is one");
        assert_eq!(cut((3 << 30) + 1, 3 << 30), Ok((2 << 30, 2)));
        assert_eq!(cut(64 << 20, (2 << 20) - 1), Ok((1 << 20, 64)));
        let why = cut((64 << 20) + 1, (2 << 20) - 1).unwrap_err();
        assert!(why.contains("2097151") && why.contains("67108865"), "{why}");
        assert!(cut(4096, 0).is_err() && cut(u64::MAX, 1).is_err());
        assert_eq!(cut(u64::MAX, u64::MAX), Ok((1 << 63, 2)), "no power of two is above it");
    }

    #[test]
    fn slabs_cover_the_pool_exactly_once() {
        for (bytes, most) in [(1, 1), (4096, 4096), (4097, 4096), (10_000, 1000), (63 << 9, 513)] {
            let slabs = Slabs::cut(bytes, most).unwrap();
            let mut at = 0;
            for (index, range) in slabs.ranges(bytes).enumerate() {
                assert_eq!(
                    (range.start, slabs.slab(range.start), slabs.within(range.start)),
                    (at, index, 0)
                );
                assert!(range.end - range.start <= most);
                let last = range.end - 1;
                assert_eq!((slabs.slab(last), slabs.within(last)), (index, last - range.start));
                assert!(slabs.left(last) == 1 || range.end == bytes);
                at = range.end;
            }
            assert_eq!((at, slabs.ranges(bytes).count()), (bytes, slabs.count(bytes)));
            assert_eq!(Slabs::of(slabs.bytes()), slabs);
        }
    }
}
