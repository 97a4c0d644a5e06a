//! An exponential with the same bits on every machine, and sums in a fixed order.

/// Parallel sums; wide enough for any vector unit.
const LANES: usize = 16;
/// Elements that are summed in single precision before their sum is added to the total.
const BLOCK: usize = 64 * LANES;

/// `e^x` for `x <= 0` within two units in the last place; 0 below -87.
#[inline]
fn exp(x: f32) -> f32 {
    // The unit in the last place of this number is 1. So a sum with it has the rounded integer in
    // its low bits.
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.max(-88.0);
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let turns = shifted - ROUND;
    let rest = clamped - turns * 0.693_359_4 - turns * -2.121_944_4e-4;
    let mut series = 1.987_569_2e-4;
    for coefficient in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_6e-1, 0.5] {
        series = series * rest + coefficient;
    }
    let mantissa = series * rest * rest + rest + 1.0;
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    if x < -87.0 { 0.0 } else { mantissa * scale }
}

/// Writes `e^((logit - max) / temperature)` for every logit and returns their sum.
pub(super) fn sum(logits: &[f32], max: f32, temperature: f32, weights: &mut [f32]) -> f64 {
    let mut total = 0.0;
    for (logits, weights) in logits.chunks(BLOCK).zip(weights.chunks_mut(BLOCK)) {
        for (weight, &logit) in weights.iter_mut().zip(logits) {
            *weight = exp(((logit - max) / temperature).min(0.0));
        }
        let mut sums = [0.0; LANES];
        for chunk in weights.chunks(LANES) {
            for (sum, weight) in sums.iter_mut().zip(chunk) {
                *sum += weight;
            }
        }
        total += sums.iter().map(|&sum| f64::from(sum)).sum::<f64>();
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_to_the_true_exponential() {
        for step in 0..870_000 {
            let x = -(step as f32) * 1e-4;
            let (ours, truth) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((ours - truth).abs() <= 2.4e-7 * truth, "{x}: {ours} {truth}");
        }
        assert_eq!([exp(0.0), exp(-87.5), exp(f32::NEG_INFINITY)], [1.0, 0.0, 0.0]);
    }

    #[test]
    fn sums_all_lengths() {
        for length in [1, 15, 16, 17, 1023, 1024, 1025, 5000] {
            let logits: Vec<f32> = (0..length).map(|i| (i % 7) as f32).collect();
            let mut weights = vec![0.0; length];
            let max = 6.0;
            let truth: f64 = logits.iter().map(|&l| ((f64::from(l) - 6.0) / 0.5).exp()).sum();
            let ours = sum(&logits, max, 0.5, &mut weights);
            assert!((ours - truth).abs() < 1e-5 * truth.max(1e-3), "{length}");
        }
    }
}
