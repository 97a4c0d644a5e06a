//! One head of a recurrent layer over some tokens of a sequence: what every kind of scan works on.

use super::paged_kv::StatePiece;
use super::simd::{Lanes, Simd};
use crate::model::recurrent_config::RecurrentSizes;
use crate::stdx::disjoint_parts::Window;

/// One head over the tokens of one run.
pub struct HeadRun<'a> {
    /// The layer's sizes.
    pub sizes: &'a RecurrentSizes,
    /// The head.
    pub head: usize,
    /// Its state, `[rows][state_stride]`.
    pub state: StateStep<'a>,
    /// Working memory for the state.
    pub own: &'a mut [f32],
    /// Channels from the first token on, and the stride of their rows.
    pub from: (&'a [f32], usize),
    /// Scalars of all heads, in the same way.
    pub scalars: (&'a [f32], usize),
    /// The outputs of the head.
    pub to: Window<'a>,
}

/// A piece of state over the tokens of one run.
pub struct StateStep<'a> {
    /// Where the run finds it.
    pub from: StatePiece<'a>,
    /// Where the run leaves it.
    pub to: StatePiece<'a>,
    /// What it has seen.
    pub before: Before,
}

impl StateStep<'_> {
    /// Reads the state before the run.
    #[inline(always)]
    pub fn read(&self, own: &mut [f32]) {
        match self.before {
            Before::Nothing => own.fill(0.0),
            Before::Others | Before::Itself => self.from.read(own),
        }
    }

    /// Writes the state behind the run, unless it had seen the tokens.
    #[inline(always)]
    pub fn write(&self, own: &[f32]) {
        if self.before != Before::Itself {
            self.to.write(own);
        }
    }
}

/// Sixteen elements of each row of a head's state.
pub struct StateColumn<'a> {
    /// The state.
    pub own: &'a mut [f32],
    /// The first of the elements.
    pub at: usize,
    /// Elements from a row to the next.
    pub stride: usize,
}

impl StateColumn<'_> {
    /// The elements of a row.
    #[inline(always)]
    pub fn row(&mut self, row: usize) -> &mut Lanes {
        self.own[row * self.stride + self.at..].first_chunk_mut().expect("rows are padded")
    }

    /// x · state. Rows with even and with odd numbers have a sum each, because one chain of sums
    /// would wait for each result.
    #[inline(always)]
    pub fn read<S: Simd>(&mut self, s: S, x: &[f32]) -> S::F {
        let mut sums = [s.splat(0.0); 2];
        for (row, x) in x.iter().enumerate() {
            sums[row % 2] = s.fma(s.load(self.row(row)), s.splat(*x), sums[row % 2]);
        }
        s.add(sums[0], sums[1])
    }
}

/// What a state has seen before some tokens of its sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Before {
    /// Nothing: the tokens are the first ones.
    Nothing,
    /// All tokens before them.
    Others,
    /// The token itself, too: it is computed again.
    Itself,
}

/// Softplus is the identity above this, as in PyTorch.
const SOFTPLUS_THRESHOLD: f32 = 20.0;

/// ln(1 + eˣ). The static binary brings its own libm, so hosts do not differ.
pub fn softplus(x: f32) -> f32 {
    if x > SOFTPLUS_THRESHOLD { x } else { f64::from(x).exp().ln_1p() as f32 }
}
