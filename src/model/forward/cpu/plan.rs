//! Divides a step into blocks of tokens, and each block into spans of positions of one sequence.
//!
//! Invariants: no result depends on the division. It only decides which thread computes a result,
//! and when.

use crate::model::forward::batch::{Batch, BatchLimits, Logits};
use std::ops::Range;

/// Tokens that run through a layer together. They are enough to make every product compute-bound,
/// and few enough that intermediate data stays in the second-level cache.
pub const BLOCK_TOKENS: usize = 256;

/// The place of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenPosition {
    /// Its sequence's row in the batch.
    pub row: u32,
    /// Its position in the sequence.
    pub position: u32,
}

/// The division of one step.
pub struct StepPlan {
    /// One for each token.
    pub places: Vec<TokenPosition>,
    /// Tokens with logits, in order.
    pub picked: Vec<u32>,
    /// Token range of a block, and range of its spans.
    pub blocks: Vec<(Range<usize>, Range<usize>)>,
    /// Token ranges inside their block. A span has tokens of one sequence, so that attention shares
    /// keys.
    pub spans: Vec<Range<usize>>,
    /// The same without a bound, for state that goes from token to token.
    pub runs: Vec<Range<usize>>,
    /// By block: range of its runs.
    pub block_runs: Vec<Range<usize>>,
}

impl StepPlan {
    /// Room for any batch within the limits.
    pub fn new(limits: &BatchLimits) -> StepPlan {
        StepPlan {
            places: Vec::with_capacity(limits.tokens),
            picked: Vec::with_capacity(limits.logits),
            blocks: Vec::with_capacity(limits.tokens.div_ceil(BLOCK_TOKENS)),
            spans: Vec::with_capacity(limits.tokens),
            runs: Vec::with_capacity(limits.rows + limits.tokens.div_ceil(BLOCK_TOKENS)),
            block_runs: Vec::with_capacity(limits.tokens.div_ceil(BLOCK_TOKENS)),
        }
    }

    /// Cuts `batch`; spans have at most `span` tokens.
    pub fn cut(&mut self, batch: &Batch, span: usize) {
        self.places.clear();
        self.picked.clear();
        self.blocks.clear();
        self.spans.clear();
        self.runs.clear();
        self.block_runs.clear();
        for (index, row) in batch.rows().iter().enumerate() {
            let tokens = batch.token_range(row);
            match row.logits {
                Logits::None => {}
                Logits::Last => self.picked.push(tokens.end as u32 - 1),
                Logits::All => self.picked.extend(tokens.start as u32..tokens.end as u32),
            }
            let positions = row.start..row.start + tokens.len() as u32;
            self.places
                .extend(positions.map(|position| TokenPosition { row: index as u32, position }));
        }
        let mut start = 0;
        while start < self.places.len() {
            let end = (start + BLOCK_TOKENS).min(self.places.len());
            let block = &self.places[start..end];
            let (first_span, first_run) = (self.spans.len(), self.runs.len());
            cut_block(block, span, &mut self.spans);
            cut_block(block, BLOCK_TOKENS, &mut self.runs);
            self.blocks.push((start..end, first_span..self.spans.len()));
            self.block_runs.push(first_run..self.runs.len());
            start = end;
        }
    }
}

/// Appends ranges of at most `most` tokens of one sequence, which cover `block`.
fn cut_block(block: &[TokenPosition], most: usize, ranges: &mut Vec<Range<usize>>) {
    let mut first = 0;
    while first < block.len() {
        let row = block[first].row;
        let left = &block[first..(first + most).min(block.len())];
        let len = left.iter().take_while(|place| place.row == row).count();
        ranges.push(first..first + len);
        first += len;
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
        let mut plan = StepPlan::new(&limits);
        plan.cut(&batch, 16);
        assert_eq!(plan.picked, [0, 1, 2, 272]);
        assert_eq!(plan.blocks.len(), 2);
        assert_eq!(plan.places[3], TokenPosition { row: 1, position: 100 });
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
        assert_eq!(plan.runs, [0..3, 3..256, 0..17, 17..18]);
        assert_eq!(plan.block_runs, [0..2, 2..4]);
    }
}
