//! Causal attention of a few query positions over the paged keys and values of one KV head.
//!
//! Absolute positions cut the context into segments. For each segment, it computes scores with
//! tokens as lanes, their maximum, their exponentials, and one sequential sum over tokens. Then it
//! folds the segments in order.
//! Invariants: the result does not depend on chunk, batch, page size or thread. Tokens behind the
//! window of all queries can have any bytes.
// The loops index registers on purpose.
#![allow(clippy::needless_range_loop)]

use super::paged_kv::Strip;
use super::simd::{Kernel, LANES, Lanes, Simd};
use crate::stdx::disjoint_parts::Window;
use std::ops::Range;

/// Tokens of a segment. Another value would change the bits of results.
const SEGMENT: usize = 256;
/// Tokens converted at once. Their keys or values stay in the first-level cache.
const TILE: usize = 64;
/// Query heads, over all positions of a task, that share one conversion of keys and values.
const QUERIES: usize = 96;

/// Number of positions of one task.
pub fn span_tokens(group: usize) -> usize {
    (QUERIES / group).clamp(1, 32)
}

/// A thread's working memory.
pub struct AttentionScratch {
    /// `[query][padded]`
    queries: Vec<f32>,
    /// `[tile of 16 tokens][padded][16]`
    keys: Vec<Lanes>,
    /// `[token][padded]`: values, or keys before transposition.
    rows: Vec<f32>,
    /// `[query][SEGMENT]`: scores, then their exponentials.
    scores: Vec<f32>,
    /// `[query][padded]`: sums of this segment.
    sums: Vec<f32>,
    /// `[query][padded]`: sums of all segments so far.
    folded: Vec<f32>,
    /// Per query: weight of this segment.
    now: Vec<Weight>,
    /// Per query: weight of all segments so far.
    total: Vec<Weight>,
    padded: usize,
}

/// Maximum score and the sum of exponentials relative to it.
#[derive(Clone, Copy)]
struct Weight {
    largest: f32,
    sum: f32,
}

/// The score of a masked token; its exponential is zero.
const UNSEEN: f32 = -1e30;
const NOTHING: Weight = Weight { largest: f32::NEG_INFINITY, sum: 0.0 };

impl AttentionScratch {
    /// For heads of `head_dim` elements and `group` query heads per KV head.
    pub fn new(head_dim: usize, group: usize) -> AttentionScratch {
        let padded = head_dim.next_multiple_of(LANES);
        let queries = span_tokens(group) * group;
        AttentionScratch {
            queries: vec![0.0; queries * padded],
            keys: vec![[0.0; LANES]; TILE / LANES * padded],
            rows: vec![0.0; TILE * padded],
            scores: vec![0.0; queries * SEGMENT],
            sums: vec![0.0; queries * padded],
            folded: vec![0.0; queries * padded],
            now: vec![NOTHING; queries],
            total: vec![NOTHING; queries],
            padded,
        }
    }

    /// Bytes held.
    pub fn memory(&self) -> usize {
        let floats = [&self.queries, &self.rows, &self.scores, &self.sums, &self.folded];
        floats.iter().map(|v| size_of_val(&***v)).sum::<usize>()
            + size_of_val(&*self.keys)
            + 2 * size_of_val(&*self.now)
    }
}

/// One attention task.
pub struct Attend<'a> {
    /// Working memory.
    pub scratch: &'a mut AttentionScratch,
    /// Keys of this head.
    pub keys: Strip<'a>,
    /// Values of this head.
    pub values: Strip<'a>,
    /// Queries, rotated and scaled so that scores are exponents of two. Each position has `group`
    /// heads; rows are `stride` apart.
    pub queries: &'a [f32],
    /// See `queries`.
    pub stride: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Query heads per KV head.
    pub group: usize,
    /// Position of the first query.
    pub start: u32,
    /// Tokens that a query sees at most, its own included.
    pub window: u32,
    /// The output: a row for each position, `group` heads wide.
    pub to: Window<'a>,
}

impl Kernel for Attend<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        self.take_queries();
        let context = self.start as usize + self.to.rows();
        let earliest = self.earliest(0);
        let mut first = earliest / SEGMENT * SEGMENT;
        self.keys.prefetch(earliest as u32, (context - earliest).min(TILE));
        while first < context {
            self.segment(s, first, (context - first).min(SEGMENT), context);
            first += SEGMENT;
        }
        self.give(s);
    }
}

impl Attend<'_> {
    fn count(&self) -> usize {
        self.to.rows() * self.group
    }

    #[inline(always)]
    fn take_queries(&mut self) {
        let padded = self.scratch.padded;
        let count = self.count();
        let heads = self
            .queries
            .chunks(self.stride)
            .flat_map(|row| row[..self.group * self.head_dim].chunks_exact(self.head_dim));
        for (to, head) in self.scratch.queries.chunks_exact_mut(padded).zip(heads) {
            to[..self.head_dim].copy_from_slice(head);
        }
        self.scratch.total[..count].fill(NOTHING);
    }

    /// The first token that query `query` sees.
    #[inline(always)]
    fn earliest(&self, query: usize) -> usize {
        (self.start as usize + query / self.group + 1).saturating_sub(self.window as usize)
    }

    /// The tokens of the segment that query `query` sees.
    #[inline(always)]
    fn visible(&self, query: usize, first: usize, tokens: usize) -> Range<usize> {
        let end = (self.start as usize + query / self.group + 1).saturating_sub(first).min(tokens);
        self.earliest(query).saturating_sub(first).min(end)..end
    }

    #[inline(always)]
    fn segment<S: Simd>(&mut self, s: S, first: usize, tokens: usize, context: usize) {
        let hidden = self.earliest(0).saturating_sub(first);
        let tiles = hidden / TILE * TILE;
        for tile in (tiles..tokens).step_by(TILE) {
            self.turn_keys(s, first + tile, (tokens - tile).min(TILE));
            // Prefetches the next data during this computation; values follow the last keys.
            match tokens.saturating_sub(tile + TILE) {
                0 => self.values.prefetch((first + tiles) as u32, (tokens - tiles).min(TILE)),
                left => self.keys.prefetch((first + tile + TILE) as u32, left.min(TILE)),
            }
            self.score(s, tile);
        }
        let count = self.count();
        for query in 0..count {
            let visible = self.visible(query, first, tokens);
            let scores = &mut self.scratch.scores[query * SEGMENT..][..SEGMENT];
            self.scratch.now[query] = softmax(s, scores, visible, tokens);
        }
        let padded = self.scratch.padded;
        self.scratch.sums[..count * padded].fill(0.0);
        for tile in (tiles..tokens).step_by(TILE) {
            let here = (tokens - tile).min(TILE);
            self.values.read(s, (first + tile) as u32, here, &mut self.scratch.rows, padded);
            let next = first + tile + here;
            match tokens - tile - here {
                0 => self.keys.prefetch(next as u32, (context - next).min(TILE)),
                left => self.values.prefetch(next as u32, left.min(TILE)),
            }
            self.gather(s, tile, hidden.saturating_sub(tile)..here);
        }
        for query in 0..count {
            fold(s, self.scratch, query);
        }
    }

    /// Reads the keys of up to [`TILE`] tokens and transposes them, so that tokens are lanes.
    #[inline(always)]
    fn turn_keys<S: Simd>(&mut self, s: S, first: usize, tokens: usize) {
        let AttentionScratch { rows, keys, padded, .. } = &mut *self.scratch;
        self.keys.read(s, first as u32, tokens, rows, *padded);
        for tile in 0..tokens.div_ceil(LANES) {
            for column in (0..*padded).step_by(LANES) {
                let mut square = [[0.0; LANES]; LANES];
                for (token, row) in square.iter_mut().enumerate() {
                    let at = (tile * LANES + token) * *padded + column;
                    *row = *rows[at..].first_chunk().expect("padded");
                }
                let to = keys[tile * *padded + column..].first_chunk_mut().expect("padded");
                s.transpose(&square, to);
            }
        }
    }

    /// Computes the scores of all queries against the transposed keys.
    #[inline(always)]
    fn score<S: Simd>(&mut self, s: S, tile: usize) {
        let count = self.count();
        let mut query = 0;
        while query < count {
            query += match count - query {
                4.. => self.score_rows::<S, 4>(s, query, tile),
                3 => self.score_rows::<S, 3>(s, query, tile),
                2 => self.score_rows::<S, 2>(s, query, tile),
                _ => self.score_rows::<S, 1>(s, query, tile),
            };
        }
    }

    #[inline(always)]
    fn score_rows<S: Simd, const R: usize>(&mut self, s: S, query: usize, tile: usize) -> usize {
        let AttentionScratch { queries, keys, scores, padded, .. } = &mut *self.scratch;
        let q: [&[f32]; R] =
            std::array::from_fn(|r| &queries[(query + r) * *padded..][..self.head_dim]);
        for lane_tile in 0..TILE / LANES {
            let keys: &[Lanes] = &keys[lane_tile * *padded..][..self.head_dim];
            let mut sums = [s.splat(0.0); R];
            for (d, lanes) in keys.iter().enumerate() {
                let lanes = s.load(lanes);
                for r in 0..R {
                    sums[r] = s.fma(s.splat(q[r][d]), lanes, sums[r]);
                }
            }
            for (r, sum) in sums.into_iter().enumerate() {
                let at = (query + r) * SEGMENT + tile + lane_tile * LANES;
                s.store(sum, scores[at..].first_chunk_mut().expect("whole tiles"));
            }
        }
        R
    }

    /// Adds the values in `rows` of some tokens of a tile, weighted by their exponentials.
    #[inline(always)]
    fn gather<S: Simd>(&mut self, s: S, tile: usize, tokens: Range<usize>) {
        let count = self.count();
        let mut query = 0;
        while query < count {
            query += match count - query {
                2.. => self.gather_rows::<S, 2>(s, query, tile, &tokens),
                _ => self.gather_rows::<S, 1>(s, query, tile, &tokens),
            };
        }
    }

    #[inline(always)]
    fn gather_rows<S: Simd, const R: usize>(
        &mut self,
        s: S,
        query: usize,
        tile: usize,
        tokens: &Range<usize>,
    ) -> usize {
        let chunks = self.scratch.padded / LANES;
        let mut chunk = 0;
        while chunk < chunks {
            chunk += match chunks - chunk {
                2.. => self.gather_chunks::<S, R, 2>(s, query, tile, tokens, chunk),
                _ => self.gather_chunks::<S, R, 1>(s, query, tile, tokens, chunk),
            };
        }
        R
    }

    #[inline(always)]
    fn gather_chunks<S: Simd, const R: usize, const C: usize>(
        &mut self,
        s: S,
        query: usize,
        tile: usize,
        tokens: &Range<usize>,
        chunk: usize,
    ) -> usize {
        let AttentionScratch { rows, scores, sums, padded, .. } = &mut *self.scratch;
        let weights: [&[f32]; R] =
            std::array::from_fn(|r| &scores[(query + r) * SEGMENT + tile..][..tokens.end]);
        let mut acc = [[s.splat(0.0); C]; R];
        for r in 0..R {
            for c in 0..C {
                acc[r][c] = s.load(piece(sums, *padded, query + r, chunk + c));
            }
        }
        let rows = rows.chunks_exact(*padded).enumerate();
        for (token, row) in rows.take(tokens.end).skip(tokens.start) {
            let values: [S::F; C] = std::array::from_fn(|c| s.load(piece(row, 0, 0, chunk + c)));
            for r in 0..R {
                let weight = s.splat(weights[r][token]);
                for c in 0..C {
                    acc[r][c] = s.fma(weight, values[c], acc[r][c]);
                }
            }
        }
        for r in 0..R {
            for c in 0..C {
                s.store(acc[r][c], piece_mut(sums, *padded, query + r, chunk + c));
            }
        }
        C
    }

    /// Divides by the sums of exponentials and writes the output.
    #[inline(always)]
    fn give<S: Simd>(&mut self, _s: S) {
        let padded = self.scratch.padded;
        for position in 0..self.to.rows() {
            let row = self.to.row(position);
            for (head, to) in row.chunks_exact_mut(self.head_dim).enumerate() {
                let query = position * self.group + head;
                let inverse = 1.0 / self.scratch.total[query].sum;
                let from = &self.scratch.folded[query * padded..][..self.head_dim];
                to.iter_mut().zip(from).for_each(|(to, from)| *to = from * inverse);
            }
        }
    }
}

#[inline(always)]
fn piece(rows: &[f32], padded: usize, row: usize, chunk: usize) -> &Lanes {
    rows[row * padded + chunk * LANES..].first_chunk().expect("padded")
}

#[inline(always)]
fn piece_mut(rows: &mut [f32], padded: usize, row: usize, chunk: usize) -> &mut Lanes {
    rows[row * padded + chunk * LANES..].first_chunk_mut().expect("padded")
}

/// Turns the scores of `visible` into exponentials relative to their maximum, and all others of the
/// first `tokens` into zeros.
#[inline(always)]
fn softmax<S: Simd>(s: S, scores: &mut [f32], visible: Range<usize>, tokens: usize) -> Weight {
    if visible.is_empty() {
        scores[..tokens.next_multiple_of(LANES)].fill(0.0);
        return NOTHING;
    }
    let seen = visible.start / LANES * LANES..visible.end.next_multiple_of(LANES);
    scores[..seen.start].fill(0.0);
    scores[seen.start..visible.start].fill(UNSEEN);
    scores[visible.end..seen.end].fill(UNSEEN);
    scores[seen.end..tokens.next_multiple_of(LANES)].fill(0.0);
    let tiles = &mut scores[seen];
    let mut largest = s.splat(f32::NEG_INFINITY);
    for lanes in tiles.chunks_exact(LANES) {
        largest = s.max(largest, s.load(lanes.first_chunk().expect("exact")));
    }
    let largest = s.largest(largest);
    let mut sum = s.splat(0.0);
    for lanes in tiles.chunks_exact_mut(LANES) {
        let lanes: &mut Lanes = lanes.first_chunk_mut().expect("exact");
        let p = s.exp2(s.add(s.load(lanes), s.splat(-largest)));
        sum = s.add(sum, p);
        s.store(p, lanes);
    }
    Weight { largest, sum: s.sum(sum) }
}

/// Folds a query's segment into the earlier segments.
#[inline(always)]
fn fold<S: Simd>(s: S, scratch: &mut AttentionScratch, query: usize) {
    let (total, now) = (&mut scratch.total[query], scratch.now[query]);
    if now.sum == 0.0 {
        return;
    }
    let padded = scratch.padded;
    let sums = &scratch.sums[query * padded..][..padded];
    let folded = &mut scratch.folded[query * padded..][..padded];
    if total.sum == 0.0 {
        *total = now;
        folded.copy_from_slice(sums);
        return;
    }
    let largest = if total.largest > now.largest { total.largest } else { now.largest };
    let mut factors = [0.0; LANES];
    factors[0] = total.largest - largest;
    factors[1] = now.largest - largest;
    let exponentials = s.exp2(s.load(&factors));
    s.store(exponentials, &mut factors);
    let [old, new, ..] = factors;
    *total = Weight { largest, sum: total.sum * old + now.sum * new };
    for (a, b) in folded.iter_mut().zip(sums) {
        *a = *a * old + *b * new;
    }
}
