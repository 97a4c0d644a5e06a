//! A part of the pages of a sequence, with its place in the sequence.

use crate::ids::PageId;

/// A part of the pages of a sequence.
#[derive(Clone, Copy, Debug)]
pub struct PageSpan<'a> {
    /// Number of pages of the sequence before these.
    pub first: usize,
    /// The pages from there on.
    pub pages: &'a [PageId],
}

impl<'a> PageSpan<'a> {
    /// The pages of a sequence from its beginning.
    pub fn whole(pages: &'a [PageId]) -> PageSpan<'a> {
        PageSpan { first: 0, pages }
    }

    /// Number of pages up to its end, with those before it.
    pub fn end(&self) -> usize {
        self.first + self.pages.len()
    }
}
