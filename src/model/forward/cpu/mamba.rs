//! The scan of Mamba-2: state ← decay · state + step · x · B; y = C · state + skip · x.
//!
//! Thread: a task of the engine's team. One head over one run of tokens.

use super::element::{load_padded, store_padded};
use super::head_run::{Before, HeadRun, StateColumn, softplus};
use super::layer_weights::MambaHead;
use super::simd::{Kernel, LANES, Simd};

/// One task.
pub struct MambaScan<'a> {
    /// The scalars of the head.
    pub weights: MambaHead,
    /// Groups of heads that share B and C.
    pub groups: usize,
    /// The tokens. Channels are x, then B of each group, then C of each group; the scalars are time
    /// steps.
    pub run: HeadRun<'a>,
}

impl Kernel for MambaScan<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let MambaScan { weights, groups, mut run } = self;
        run.state.read(run.own);
        let (inner, dim, state) = (run.sizes.inner(), run.sizes.columns, run.sizes.rows);
        let (head, stride) = (run.head, run.sizes.state_stride());
        let shared = head / (run.sizes.heads / groups) * state;
        for token in 0..run.to.rows() {
            let row = &run.from.0[token * run.from.1..];
            let x = &row[head * dim..][..dim];
            let b = &row[inner + shared..][..state];
            let c = &row[inner + groups * state + shared..][..state];
            let step = softplus(run.scalars.0[token * run.scalars.1 + head] + weights.step_bias);
            let decay = f64::from(step * weights.decay).exp() as f32;
            let to = run.to.row(token);
            for at in (0..dim).step_by(LANES) {
                let x = load_padded(s, &x[at..]);
                let added = s.mul(x, s.splat(step));
                let mut column = StateColumn { own: run.own, at, stride };
                let sum = match run.state.before {
                    Before::Itself => column.read(s, c),
                    _ => advance(s, &mut column, (decay, added), (b, c)),
                };
                store_padded(s, s.fma(x, s.splat(weights.skip), sum), &mut to[at..]);
            }
        }
        run.state.write(run.own);
    }
}

/// state ← decay · state + B · added; returns C · state, with the sums of [`StateColumn::read`].
#[inline(always)]
fn advance<S: Simd>(
    s: S,
    column: &mut StateColumn<'_>,
    (decay, added): (f32, S::F),
    (b, c): (&[f32], &[f32]),
) -> S::F {
    let decay = s.splat(decay);
    let mut sums = [s.splat(0.0); 2];
    for (row, (b, c)) in b.iter().zip(c).enumerate() {
        let to = column.row(row);
        let state = s.fma(s.load(to), decay, s.mul(added, s.splat(*b)));
        s.store(state, to);
        sums[row % 2] = s.fma(state, s.splat(*c), sums[row % 2]);
    }
    s.add(sums[0], sums[1])
}
