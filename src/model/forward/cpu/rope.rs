//! Rotary embedding: the frequencies, computed as in transformers, and the rotation. It pairs an
//! element of the first half of a head with one of the second half.

use crate::model::config::{GemmaConfig, ModelConfig, RopeScaling};
use std::f64::consts::PI;

/// Frequencies of one model.
pub struct Rope {
    /// Radians per position, one for each pair of elements.
    frequencies: Vec<f32>,
    /// Multiplier of cos and sin.
    factor: f32,
}

impl Rope {
    /// The frequencies of all layers of a checked configuration, or of the full ones.
    pub fn new(config: &ModelConfig) -> Rope {
        Rope::with(config.rotary_dim(), config.rope_theta, config.rope_scaling)
    }

    /// The frequencies of window layers, if they differ.
    pub fn of_windows(config: &ModelConfig, gemma: &GemmaConfig) -> Rope {
        Rope::with(config.head_dim, gemma.window_rope_theta, RopeScaling::None)
    }

    fn with(dim: usize, theta: f32, scaling: RopeScaling) -> Rope {
        let base = theta as f64;
        // Rounded in the same places as transformers: the power, then its inverse, in single
        // precision.
        let powers: Vec<f32> =
            (0..dim / 2).map(|i| base.powf((2 * i) as f64 / dim as f64) as f32).collect();
        let plain: Vec<f32> = powers.iter().map(|power| 1.0 / power).collect();
        match scaling {
            RopeScaling::None => Rope { frequencies: plain, factor: 1.0 },
            RopeScaling::Linear { factor } => {
                Rope { frequencies: plain.iter().map(|f| f / factor).collect(), factor: 1.0 }
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let old = original_context as f32;
                let scale = |f: f32| llama3(f, factor, low_freq_factor, high_freq_factor, old);
                Rope { frequencies: plain.into_iter().map(scale).collect(), factor: 1.0 }
            }
            RopeScaling::Yarn {
                factor,
                original_context,
                beta_fast,
                beta_slow,
                attention_factor,
            } => {
                let ramp =
                    yarn_ramp(dim, base, original_context, beta_fast as f64, beta_slow as f64);
                let frequencies = powers
                    .iter()
                    .zip(ramp)
                    .map(|(power, interpolated)| {
                        let kept = 1.0 - interpolated;
                        1.0 / (factor * power) * (1.0 - kept) + 1.0 / power * kept
                    })
                    .collect();
                let given = attention_factor;
                let usual = if factor <= 1.0 { 1.0 } else { 0.1 * (factor as f64).ln() + 1.0 };
                Rope { frequencies, factor: given.unwrap_or(usual as f32) }
            }
        }
    }

    /// Writes cos, then sin, of all pairs at a position; `to` has `rotary_dim` elements.
    pub fn fill(&self, position: u32, to: &mut [f32]) {
        let (cos, sin) = to.split_at_mut(self.frequencies.len());
        for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(&self.frequencies) {
            // The product is in single precision as in transformers. The sine and cosine are in
            // double precision, so that all math libraries give the same bits.
            let (s, c) = ((position as f32 * frequency) as f64).sin_cos();
            (*cos, *sin) = (c as f32 * self.factor, s as f32 * self.factor);
        }
    }
}

fn llama3(frequency: f32, factor: f32, low: f32, high: f32, old_context: f32) -> f32 {
    let wavelength = 2.0 * std::f32::consts::PI / frequency;
    if wavelength < old_context / high {
        frequency
    } else if wavelength > old_context / low {
        frequency / factor
    } else {
        let smooth = (old_context / wavelength - low) / (high - low);
        (1.0 - smooth) * frequency / factor + smooth * frequency
    }
}

/// The degree of interpolation for each pair: 0 for fast rotations, 1 for slow ones.
fn yarn_ramp(
    dim: usize,
    base: f64,
    context: u32,
    fast: f64,
    slow: f64,
) -> impl Iterator<Item = f32> {
    let dimension = |rotations: f64| {
        dim as f64 * (context as f64 / (rotations * 2.0 * PI)).ln() / (2.0 * base.ln())
    };
    let low = dimension(fast).floor().max(0.0) as f32;
    let high = dimension(slow).ceil().min(dim as f64 - 1.0) as f32;
    let high = if low == high { high + 0.001 } else { high };
    (0..dim / 2).map(move |i| ((i as f32 - low) / (high - low)).clamp(0.0, 1.0))
}

/// Rotates one head in place by the cosines and sines of [`Rope::fill`], then multiplies by
/// `scale`.
#[inline(always)]
pub fn rotate(head: &mut [f32], angles: &[f32], scale: f32) {
    let half = head.len() / 2;
    let (low, high) = head.split_at_mut(half);
    let (cos, sin) = angles.split_at(half);
    for (((a, b), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        let (x, y) = (*a, *b);
        *a = (x * cos - y * sin) * scale;
        *b = (y * cos + x * sin) * scale;
    }
}
