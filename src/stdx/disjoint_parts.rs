//! Disjoint mutable parts of one buffer, one for each task of a [`super::team::Team`].
//!
//! Invariant: parts of different indices never overlap, and a team hands out each index once.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Range;

/// A buffer cut into parts.
///
/// # Safety
/// Parts of different indices share no memory that either may write.
pub unsafe trait DisjointParts: Sync {
    /// What a task receives.
    type Part;

    /// How many parts there are.
    fn count(&self) -> usize;

    /// The part with this index, which is below `count`.
    ///
    /// # Safety
    /// Each index is taken at most once while the value lives.
    unsafe fn part(&self, index: usize) -> Self::Part;
}

/// Consecutive pieces of equal length. The last may be shorter.
pub struct Chunks<'a, T> {
    base: *mut T,
    len: usize,
    chunk: usize,
    _buffer: PhantomData<&'a mut [T]>,
}

impl<'a, T> Chunks<'a, T> {
    /// Cuts `buffer` into pieces of `chunk` elements.
    pub fn new(buffer: &'a mut [T], chunk: usize) -> Chunks<'a, T> {
        assert!(chunk > 0);
        Chunks { base: buffer.as_mut_ptr(), len: buffer.len(), chunk, _buffer: PhantomData }
    }
}

// SAFETY: passing pieces to other threads is passing them `&mut [T]`.
unsafe impl<T: Send> Sync for Chunks<'_, T> {}

// SAFETY: pieces are consecutive.
unsafe impl<'a, T: Send> DisjointParts for Chunks<'a, T> {
    type Part = &'a mut [T];

    fn count(&self) -> usize {
        self.len.div_ceil(self.chunk)
    }

    unsafe fn part(&self, index: usize) -> &'a mut [T] {
        let first = index * self.chunk;
        assert!(first < self.len);
        let len = self.chunk.min(self.len - first);
        // SAFETY: in bounds; exclusive by the trait's contract.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(first), len) }
    }
}

/// A row-major matrix cut into bands of rows, and each band into windows of equal width. Part `band
/// · across + column` is one window.
pub struct Grid<'a> {
    base: *mut f32,
    stride: usize,
    bands: &'a [Range<usize>],
    width: usize,
    across: usize,
    columns: usize,
    _buffer: PhantomData<&'a mut [f32]>,
}

/// One part of a [`Grid`]: some columns of some rows.
pub struct Window<'a> {
    base: *mut f32,
    stride: usize,
    rows: usize,
    columns: usize,
    _buffer: PhantomData<&'a mut [f32]>,
}

impl<'a> Grid<'a> {
    /// Cuts the first `columns` columns of a matrix with rows of length `stride`. Bands ascend and
    /// do not overlap.
    pub fn new(
        buffer: &'a mut [f32],
        stride: usize,
        bands: &'a [Range<usize>],
        columns: usize,
        width: usize,
    ) -> Grid<'a> {
        assert!(width > 0 && columns <= stride);
        let mut end = 0;
        for band in bands {
            assert!(band.start >= end && band.end >= band.start);
            end = band.end;
        }
        assert!(end.checked_mul(stride).is_some_and(|needed| needed <= buffer.len()));
        let across = columns.div_ceil(width);
        Grid {
            base: buffer.as_mut_ptr(),
            stride,
            bands,
            width,
            across,
            columns,
            _buffer: PhantomData,
        }
    }

    /// Parts in one band.
    pub fn across(&self) -> usize {
        self.across
    }
}

// SAFETY: a window gives `&mut` access to its own elements only.
unsafe impl Sync for Grid<'_> {}

// SAFETY: bands do not overlap, and neither do columns.
unsafe impl<'a> DisjointParts for Grid<'a> {
    type Part = Window<'a>;

    fn count(&self) -> usize {
        self.bands.len() * self.across
    }

    unsafe fn part(&self, index: usize) -> Window<'a> {
        let band = &self.bands[index / self.across];
        let first = index % self.across * self.width;
        Window {
            // SAFETY: `new` checked that the buffer holds all bands.
            base: unsafe { self.base.add(band.start * self.stride + first) },
            stride: self.stride,
            rows: band.len(),
            columns: self.width.min(self.columns - first),
            _buffer: PhantomData,
        }
    }
}

impl Window<'_> {
    /// Number of rows.
    #[inline(always)]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    #[inline(always)]
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// The columns of this window in its `row`-th row.
    #[inline(always)]
    pub fn row(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows);
        // SAFETY: inside the buffer, and no other window has these columns of this row.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(row * self.stride), self.columns) }
    }
}

/// A number of tasks that write to no buffer.
pub struct Count(pub usize);

// SAFETY: there is no memory.
unsafe impl DisjointParts for Count {
    type Part = ();

    fn count(&self) -> usize {
        self.0
    }

    unsafe fn part(&self, _index: usize) {}
}

// SAFETY: parts of the inner value are disjoint by its contract; `None` has no memory.
unsafe impl<P: DisjointParts> DisjointParts for Option<P> {
    type Part = Option<P::Part>;

    fn count(&self) -> usize {
        self.as_ref().map_or(usize::MAX, P::count)
    }

    unsafe fn part(&self, index: usize) -> Self::Part {
        // SAFETY: the caller's contract.
        self.as_ref().map(|parts| unsafe { parts.part(index) })
    }
}

// SAFETY: both are disjoint by themselves, and two `&mut` buffers do not overlap.
unsafe impl<A: DisjointParts, B: DisjointParts> DisjointParts for (A, B) {
    type Part = (A::Part, B::Part);

    fn count(&self) -> usize {
        self.0.count().min(self.1.count())
    }

    unsafe fn part(&self, index: usize) -> Self::Part {
        // SAFETY: the caller's contract.
        unsafe { (self.0.part(index), self.1.part(index)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_covers_each_element_once() {
        let mut buffer = vec![0.0f32; 7 * 10];
        let bands = [0..2, 2..3, 5..7];
        let grid = Grid::new(&mut buffer, 10, &bands, 9, 4);
        assert_eq!(grid.count(), 9);
        for index in 0..grid.count() {
            // SAFETY: each index once.
            let mut window = unsafe { grid.part(index) };
            for row in 0..window.rows() {
                window.row(row).iter_mut().for_each(|x| *x += 1.0);
            }
        }
        for (i, value) in buffer.iter().enumerate() {
            let (row, column) = (i / 10, i % 10);
            let covered = column < 9 && !(3..5).contains(&row);
            assert_eq!(*value, covered as u8 as f32, "row {row} column {column}");
        }
    }

    #[test]
    #[should_panic]
    fn overlapping_bands_are_refused() {
        Grid::new(&mut [0.0; 40], 10, &[0..2, 1..3], 10, 10);
    }

    #[test]
    fn chunks_cover_the_tail() {
        let mut buffer = [0u8; 10];
        let chunks = Chunks::new(&mut buffer, 4);
        assert_eq!(chunks.count(), 3);
        for index in 0..3 {
            // SAFETY: each index once.
            unsafe { chunks.part(index) }.fill(index as u8 + 1);
        }
        assert_eq!(buffer, [1, 1, 1, 1, 2, 2, 2, 2, 3, 3]);
    }
}
