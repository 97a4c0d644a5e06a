//! The scan of a gated delta net: state ← decay · state; the part of it that k reads is replaced
//! by v, by a share; y = q · state. q and k have unit length, and q is divided by the root of its
//! size.
//!
//! Thread: a task of the engine's team. One value head over one run of tokens.

use super::element::{load_padded, store_padded};
use super::head_run::{Before, HeadRun, StateColumn, softplus};
use super::layer_weights::DeltaHead;
use super::simd::{Kernel, LANES, Simd};

/// Added to the squared length of q and k.
const EPSILON: f32 = 1e-6;

/// One task.
pub struct DeltaScan<'a> {
    /// The scalars of the head.
    pub weights: DeltaHead,
    /// Heads of q and k.
    pub key_heads: usize,
    /// The first channels of k and of v. Those of q are before.
    pub channels_at: [usize; 2],
    /// The tokens. The scalars are shares of all heads, padded, then time steps.
    pub run: HeadRun<'a>,
}

impl Kernel for DeltaScan<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let DeltaScan { weights, key_heads, channels_at: [keys_at, values_at], mut run } = self;
        run.state.read(run.own);
        let sizes = run.sizes;
        let (rows, columns, stride) = (sizes.rows, sizes.columns, sizes.state_stride());
        let key_head = run.head / (sizes.heads / key_heads);
        for token in 0..run.to.rows() {
            let row = &run.from.0[token * run.from.1..];
            let q = &row[key_head * rows..][..rows];
            let k = &row[keys_at + key_head * rows..][..rows];
            let v = &row[values_at + run.head * columns..][..columns];
            let scalars = &run.scalars.0[token * run.scalars.1..][..sizes.scalars];
            let share = 1.0 / (1.0 + (-f64::from(scalars[run.head])).exp());
            let step = softplus(scalars[sizes.scalars / 2 + run.head] + weights.step_bias);
            let decay = f64::from(step * weights.decay).exp() as f32;
            let (q, k) = (Unit::new(s, q, (rows as f32).sqrt()), Unit::new(s, k, 1.0));
            let to = run.to.row(token);
            for at in (0..columns).step_by(LANES) {
                let mut column = StateColumn { own: run.own, at, stride };
                let v = load_padded(s, &v[at..]);
                let sum = match run.state.before {
                    Before::Itself => q.scale(s, column.read(s, q.elements)),
                    _ => advance(s, &mut column, (decay, share as f32), (&q, &k), v),
                };
                store_padded(s, sum, &mut to[at..]);
            }
        }
        run.state.write(run.own);
    }
}

/// A vector, and the factor that gives it its length.
struct Unit<'a> {
    elements: &'a [f32],
    factor: f32,
}

impl<'a> Unit<'a> {
    /// With the length 1 / `divisor`.
    #[inline(always)]
    fn new<S: Simd>(s: S, elements: &'a [f32], divisor: f32) -> Unit<'a> {
        let mut sum = s.splat(0.0);
        for at in (0..elements.len()).step_by(LANES) {
            let x = load_padded(s, &elements[at..]);
            sum = s.fma(x, x, sum);
        }
        Unit { elements, factor: 1.0 / (s.sum(sum) + EPSILON).sqrt() / divisor }
    }

    /// The product with this vector, from that with its elements.
    #[inline(always)]
    fn scale<S: Simd>(&self, s: S, product: S::F) -> S::F {
        s.mul(product, s.splat(self.factor))
    }
}

/// state ← decay · state + share · k · (v − k · decay · state); returns q · state, with the sums of
/// [`StateColumn::read`].
#[inline(always)]
fn advance<S: Simd>(
    s: S,
    column: &mut StateColumn<'_>,
    (decay, share): (f32, f32),
    (q, k): (&Unit<'_>, &Unit<'_>),
    v: S::F,
) -> S::F {
    let found = s.mul(k.scale(s, column.read(s, k.elements)), s.splat(decay));
    let missing = s.fma(found, s.splat(-1.0), v);
    let added = s.mul(missing, s.splat(share * k.factor));
    let mut sums = [s.splat(0.0); 2];
    for (row, (q, k)) in q.elements.iter().zip(k.elements).enumerate() {
        let to = column.row(row);
        let kept = s.mul(s.load(to), s.splat(decay));
        let state = s.fma(added, s.splat(*k), kept);
        s.store(state, to);
        sums[row % 2] = s.fma(state, s.splat(*q), sums[row % 2]);
    }
    q.scale(s, s.add(sums[0], sums[1]))
}
