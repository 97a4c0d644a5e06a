//! The input of one step, in arrays of fixed capacity that the engine fills anew each turn.

use crate::ids::PageId;
use std::ops::Range;

/// Which positions of a row need logits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Logits {
    /// None: a chunk that is not the last.
    None,
    /// The last token's.
    Last,
    /// Every token's (tests and scoring).
    All,
}

/// Capacities; what they cost in scratch memory is the forward pass's to say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchLimits {
    /// Tokens of one step, over all rows.
    pub tokens: usize,
    /// Sequences of one step.
    pub rows: usize,
    /// Positions with logits of one step.
    pub logits: usize,
    /// Tokens of one sequence, prompt and output.
    pub context: usize,
    /// Page references of one step, over all rows.
    pub pages: usize,
}

/// One sequence's part of a step.
#[derive(Clone, Debug)]
pub struct Row {
    tokens: Range<usize>,
    pages: Range<usize>,
    /// Position of the first token; earlier ones are in KV already.
    pub start: u32,
    /// Positions that need logits.
    pub logits: Logits,
}

/// The batch does not take another row; which capacity is spent.
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

/// Sequences to run together. Holds at least one token per row.
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

    /// Adds a sequence: run `tokens` at positions `start..`, with `pages` in order of position
    /// covering at least `start + tokens.len()` tokens. Nothing is added when it does not fit.
    pub fn push(
        &mut self,
        tokens: &[u32],
        start: u32,
        pages: &[PageId],
        logits: Logits,
    ) -> Result<(), BatchFull> {
        self.push_joined([tokens, &[]], start, pages, logits)
    }

    /// The same of tokens that lie in two parts.
    pub fn push_joined(
        &mut self,
        parts: [&[u32]; 2],
        start: u32,
        pages: &[PageId],
        logits: Logits,
    ) -> Result<(), BatchFull> {
        let tokens = parts[0].len() + parts[1].len();
        debug_assert!(tokens > 0);
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
        if self.pages.len() + pages.len() > self.limits.pages {
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
        self.pages.extend_from_slice(pages);
        self.logits += wanted;
        self.rows.push(Row {
            tokens: first_token..self.tokens.len(),
            pages: first_page..self.pages.len(),
            start,
            logits,
        });
        Ok(())
    }

    /// Sequences in order of `push`.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// All tokens, row after row.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Where a row's tokens stand in [`Batch::tokens`].
    pub fn token_range(&self, row: &Row) -> Range<usize> {
        row.tokens.clone()
    }

    /// A row's pages in order of position.
    pub fn pages(&self, row: &Row) -> &[PageId] {
        &self.pages[row.pages.clone()]
    }

    /// Positions with logits so far.
    pub fn wanted_logits(&self) -> usize {
        self.logits
    }

    /// The capacities.
    pub fn limits(&self) -> &BatchLimits {
        &self.limits
    }
}
