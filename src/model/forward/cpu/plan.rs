//! How a step is cut into blocks of tokens, and blocks into spans of one sequence's positions.
//!
//! Invariant: no number depends on the cut; it only decides who computes what, and when.

use crate::model::forward::batch::{Batch, BatchLimits, Logits};
use std::ops::Range;

/// Tokens that run through a layer together: enough for every product to be bound by compute, few
/// enough that what lies between two products stays in the second-level cache.
pub const BLOCK_TOKENS: usize = 256;

/// Where a token stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its sequence's row in the batch.
    pub row: u32,
    /// Its position in the sequence.
    pub position: u32,
}

/// The cut of one step.
pub struct Plan {
    /// One for each token.
    pub places: Vec<Place>,
    /// Tokens with logits, in order.
    pub picked: Vec<u32>,
    /// Tokens of a block, and its spans.
    pub blocks: Vec<(Range<usize>, Range<usize>)>,
    /// Token ranges inside their block; one sequence's, for attention to share keys.
    pub spans: Vec<Range<usize>>,
}

impl Plan {
    /// Room for any batch within the limits.
    pub fn new(limits: &BatchLimits) -> Plan {
        Plan {
            places: Vec::with_capacity(limits.tokens),
            picked: Vec::with_capacity(limits.logits),
            blocks: Vec::with_capacity(limits.tokens.div_ceil(BLOCK_TOKENS)),
            spans: Vec::with_capacity(limits.tokens),
        }
    }

    /// Cuts `batch`; spans have at most `span` tokens.
    pub fn cut(&mut self, batch: &Batch, span: usize) {
        self.places.clear();
        self.picked.clear();
        self.blocks.clear();
        self.spans.clear();
        for (index, row) in batch.rows().iter().enumerate() {
            let tokens = batch.token_range(row);
            match row.logits {
                Logits::None => {}
                Logits::Last => self.picked.push(tokens.end as u32 - 1),
                Logits::All => self.picked.extend(tokens.start as u32..tokens.end as u32),
            }
            let positions = row.start..row.start + tokens.len() as u32;
            self.places.extend(positions.map(|position| Place { row: index as u32, position }));
        }
        let mut start = 0;
        while start < self.places.len() {
            let end = (start + BLOCK_TOKENS).min(self.places.len());
            let first_span = self.spans.len();
            self.cut_block(start, end, span);
            self.blocks.push((start..end, first_span..self.spans.len()));
            start = end;
        }
    }

    fn cut_block(&mut self, start: usize, end: usize, span: usize) {
        let mut first = start;
        while first < end {
            let row = self.places[first].row;
            let most = (first + span).min(end);
            let len = self.places[first..most].iter().take_while(|place| place.row == row).count();
            self.spans.push(first - start..first - start + len);
            first += len;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::PageId;

    #[test]
    fn spans_stay_inside_sequences_and_blocks() {
        let limits = BatchLimits { tokens: 600, rows: 4, logits: 8, context: 1000, pages: 100 };
        let mut batch = Batch::new(limits);
        let pages: Vec<PageId> = (0..30).map(PageId).collect();
        batch.push(&[0; 3], 7, &pages[..1], Logits::All).unwrap();
        batch.push(&[0; 270], 100, &pages, Logits::Last).unwrap();
        batch.push(&[0], 5, &pages[..1], Logits::None).unwrap();
        let mut plan = Plan::new(&limits);
        plan.cut(&batch, 16);
        assert_eq!(plan.picked, [0, 1, 2, 272]);
        assert_eq!(plan.blocks.len(), 2);
        assert_eq!(plan.places[3], Place { row: 1, position: 100 });
        for (tokens, spans) in &plan.blocks {
            let mut at = 0;
            for span in &plan.spans[spans.clone()] {
                assert_eq!(span.start, at);
                assert!(!span.is_empty() && span.len() <= 16);
                let places = &plan.places[tokens.start + span.start..tokens.start + span.end];
                assert!(places.windows(2).all(|p| p[0].row == p[1].row));
                at = span.end;
            }
            assert_eq!(at, tokens.len());
        }
    }
}
