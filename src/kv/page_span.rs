//! A part of the pages of a sequence, with its place in the sequence, and the pages of its state.

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

/// The pages of a sequence's recurrent state in a step.
#[derive(Clone, Copy, Debug, Default)]
pub struct SequenceState<'a> {
    /// The step writes these pages. Empty for a model without state.
    pub pages: &'a [PageId],
    /// The step reads the state on these pages: the same ones, or those of a checkpoint.
    pub origin: &'a [PageId],
    /// Tokens that the state has seen. With 0, what is on the pages does not count.
    pub seen: u32,
}

impl<'a> SequenceState<'a> {
    /// State that a step reads and writes on these pages.
    pub fn in_place(pages: &'a [PageId], seen: u32) -> SequenceState<'a> {
        SequenceState { pages, origin: pages, seen }
    }
}
