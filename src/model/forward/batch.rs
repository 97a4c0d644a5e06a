//! The input of one step, in arrays of fixed capacity that the engine refills each turn.

use crate::ids::PageId;
use crate::kv::page_span::{PageSpan, SequenceState};
use std::iter;
use std::ops::Range;

/// Which positions of a row need logits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Logits {
    /// None, because the row is a chunk of a prompt that is not the last.
    None,
    /// Those of the last token.
    Last,
    /// Those of every token (tests and scoring).
    All,
}

/// Capacities of a batch. The forward pass decides how much scratch memory they need.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchLimits {
    /// Most tokens of one step, over all rows.
    pub tokens: usize,
    /// Most sequences of one step.
    pub rows: usize,
    /// Most positions with logits of one step.
    pub logits: usize,
    /// Most tokens of one sequence, prompt and output.
    pub context: usize,
    /// Most page references of one step, over all rows.
    pub pages: usize,
}

/// The part of one sequence in a step.
#[derive(Clone, Debug)]
pub struct Row {
    tokens: Range<usize>,
    /// The first page of its first group.
    pages: usize,
    /// Pages of each group.
    pages_per_group: usize,
    /// The pages of its state.
    state_pages: Range<usize>,
    /// The pages on which the step finds the state.
    origin_pages: Range<usize>,
    /// Tokens that its state has seen: `start`, or one more if the row computes the last of them
    /// again.
    pub seen: u32,
    /// Position of the first token. The KV of earlier ones is in place.
    pub start: u32,
    /// Positions that need logits.
    pub logits: Logits,
}

/// The capacity that is exhausted if a row does not fit into the batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BatchFull {
    /// [`BatchLimits::tokens`].
    Tokens,
    /// [`BatchLimits::rows`].
    Rows,
    /// [`BatchLimits::logits`].
    Logits,
    /// [`BatchLimits::context`].
    Context,
    /// [`BatchLimits::pages`].
    Pages,
}

/// Sequences to run together, with at least one token per row.
#[derive(Debug)]
pub struct Batch {
    limits: BatchLimits,
    tokens: Vec<u32>,
    pages: Vec<PageId>,
    rows: Vec<Row>,
    logits: usize,
}

impl Batch {
    /// An empty batch that never grows past `limits`.
    pub fn new(limits: BatchLimits) -> Batch {
        Batch {
            limits,
            tokens: Vec::with_capacity(limits.tokens),
            pages: Vec::with_capacity(limits.pages),
            rows: Vec::with_capacity(limits.rows),
            logits: 0,
        }
    }

    /// Removes all rows.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.pages.clear();
        self.rows.clear();
        self.logits = 0;
    }

    /// Adds a sequence: run `tokens` at positions `start..`. `pages` are in order of position and
    /// cover at least `start + tokens.len()` tokens. Adds nothing if the sequence does not fit.
    pub fn push(
        &mut self,
        tokens: &[u32],
        start: u32,
        pages: &[PageId],
        logits: Logits,
    ) -> Result<(), BatchFull> {
        let groups = iter::once(PageSpan::whole(pages));
        self.push_joined([tokens, &[]], start, (groups, SequenceState::default()), logits)
    }

    /// Like [`Batch::push`], for tokens in two parts, and with the pages of each group of layers
    /// and of the state. All groups have pages up to the same end. In its layers, no token sees a
    /// token on the pages before the span of a group.
    pub fn push_joined<'a>(
        &mut self,
        parts: [&[u32]; 2],
        start: u32,
        (groups, state): (impl ExactSizeIterator<Item = PageSpan<'a>> + Clone, SequenceState<'a>),
        logits: Logits,
    ) -> Result<(), BatchFull> {
        let tokens = parts[0].len() + parts[1].len();
        let pages_per_group = groups.clone().next().map_or(0, |span| span.end());
        let state_pages = state.pages.len();
        debug_assert!(tokens > 0, "a row has tokens");
        debug_assert!(pages_per_group + state_pages > 0, "a row has pages");
        debug_assert!(
            state_pages == 0 || state.seen == start || tokens == 1 && state.seen == start + 1,
            "state after {} tokens, a row from {start} on",
            state.seen
        );
        let wanted = match logits {
            Logits::None => 0,
            Logits::Last => 1,
            Logits::All => tokens,
        };
        if self.rows.len() == self.limits.rows {
            return Err(BatchFull::Rows);
        }
        if self.tokens.len() + tokens > self.limits.tokens {
            return Err(BatchFull::Tokens);
        }
        assert_eq!(state.origin.len(), state_pages, "a state has one size");
        let pages = groups.len() * pages_per_group + 2 * state_pages;
        if self.pages.len() + pages > self.limits.pages {
            return Err(BatchFull::Pages);
        }
        if self.logits + wanted > self.limits.logits {
            return Err(BatchFull::Logits);
        }
        if start as usize + tokens > self.limits.context {
            return Err(BatchFull::Context);
        }
        let (first_token, first_page) = (self.tokens.len(), self.pages.len());
        parts.iter().for_each(|part| self.tokens.extend_from_slice(part));
        for span in groups {
            assert_eq!(span.end(), pages_per_group, "the groups of a row end at one position");
            // Attention can read bytes behind the window, and ignores them. It must not read them
            // from a page that another request writes.
            self.pages.extend(iter::repeat_n(span.pages[0], span.first));
            self.pages.extend_from_slice(span.pages);
        }
        let first_of_state = self.pages.len();
        self.pages.extend_from_slice(state.pages);
        let first_of_origin = self.pages.len();
        self.pages.extend_from_slice(state.origin);
        self.logits += wanted;
        self.rows.push(Row {
            tokens: first_token..self.tokens.len(),
            pages: first_page,
            pages_per_group,
            state_pages: first_of_state..first_of_origin,
            origin_pages: first_of_origin..self.pages.len(),
            seen: state.seen,
            start,
            logits,
        });
        Ok(())
    }

    /// Sequences in the order in which they were added.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// All tokens, row after row.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The range of a row's tokens in [`Batch::tokens`].
    pub fn token_range(&self, row: &Row) -> Range<usize> {
        row.tokens.clone()
    }

    /// A row's pages of a group of layers, in order of position.
    pub fn pages(&self, row: &Row, group: usize) -> &[PageId] {
        &self.pages[row.pages + group * row.pages_per_group..][..row.pages_per_group]
    }

    /// The pages of a row's state.
    pub fn state_pages(&self, row: &Row) -> &[PageId] {
        &self.pages[row.state_pages.clone()]
    }

    /// The pages on which a row's first token finds the state. [`Batch::state_pages`] get it.
    pub fn origin_pages(&self, row: &Row) -> &[PageId] {
        &self.pages[row.origin_pages.clone()]
    }

    /// Number of positions with logits so far.
    pub fn wanted_logits(&self) -> usize {
        self.logits
    }

    /// Number of positions with logits that still fit.
    pub fn free_logits(&self) -> usize {
        self.limits.logits - self.logits
    }

    /// The capacities of the batch.
    pub fn limits(&self) -> &BatchLimits {
        &self.limits
    }
}
