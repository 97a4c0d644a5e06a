//! Compares samples with their distributions, and samples of the same seed with each other.

use super::*;
use proptest::prelude::*;

const FREE: TokenLimits<'_> = TokenLimits { mask: None, rules: None };

fn sample(logits: &[f32], params: SamplingParams, position: u32) -> Sampled {
    Sampler::new(logits.len()).sample(logits, FREE, &params, TokenHistory::default(), position, 0)
}

const WARM: SamplingParams = SamplingParams { temperature: 1.0, ..SamplingParams::GREEDY };

#[test]
fn greedy_takes_the_lowest_of_equals() {
    assert_eq!(sample(&[1.0, 3.0, 3.0, 2.0], SamplingParams::GREEDY, 0).token, 1);
    assert_eq!(sample(&[0.0, -0.0], SamplingParams::GREEDY, 0).token, 0);
}

#[test]
fn logprobs_are_of_the_unscaled_softmax() {
    let logits = [1.0, 2.0, 4.0];
    let total: f64 = logits.iter().map(|&l: &f32| f64::from(l).exp()).sum();
    let params = SamplingParams { temperature: 0.01, repetition_penalty: 9.0, ..WARM };
    let sampled = Sampler::new(3).sample(
        &logits,
        FREE,
        &params,
        TokenHistory { prompt: &[2], resumed: &[], output: &[2] },
        5,
        2,
    );
    assert_eq!(sampled.token, 1, "4 / 9 is below 2");
    let near =
        |ours: f32, logit: f64| assert!((f64::from(ours) - (logit - total.ln())).abs() < 1e-6);
    near(sampled.logprob, 2.0);
    let [(2, first), (1, second)] = sampled.top.as_slice() else { panic!("{:?}", sampled.top) };
    near(*first, 4.0);
    near(*second, 2.0);
}

#[test]
fn penalties_count_the_right_tokens() {
    let mut sampler = Sampler::new(4);
    let mut choose = |params, context| {
        sampler.sample(&[5.0, 4.9, 4.0, -1.0], FREE, &params, context, 0, 0).token
    };
    let output = TokenHistory { prompt: &[0, 0, 0], resumed: &[], output: &[1, 1, 7] };
    let frequency = SamplingParams { frequency_penalty: 0.5, ..SamplingParams::GREEDY };
    assert_eq!(choose(frequency, output), 0, "the prompt does not count");
    assert_eq!(choose(frequency, TokenHistory { prompt: &[], resumed: &[], output: &[0] }), 1);
    let presence = SamplingParams { presence_penalty: 1.05, ..SamplingParams::GREEDY };
    assert_eq!(choose(presence, TokenHistory { prompt: &[], resumed: &[], output: &[0, 0, 1] }), 2);
    assert_eq!(choose(presence, TokenHistory::default()), 0, "counts are cleared");
    let repetition = SamplingParams { repetition_penalty: 2.0, ..SamplingParams::GREEDY };
    assert_eq!(choose(repetition, output), 2, "the prompt counts, once");
}

#[test]
fn seed_and_position_decide() {
    let logits: Vec<f32> = (0..100).map(|i| (i % 10) as f32 * 0.1).collect();
    let logits = &logits[..];
    let tokens =
        |seed| (0..50).map(move |p| sample(logits, SamplingParams { seed, ..WARM }, p).token);
    assert!(tokens(1).eq(tokens(1)));
    assert!(!tokens(1).eq(tokens(2)));
    let distinct: std::collections::BTreeSet<_> = tokens(1).collect();
    assert!(distinct.len() > 25, "{distinct:?}");
    // Fixed values: they are equal on every machine and in every version.
    assert_eq!(tokens(7).take(8).collect::<Vec<_>>(), PINNED);
}

const PINNED: [u32; 8] = [73, 16, 88, 96, 11, 85, 45, 52];

#[test]
fn draws_follow_the_distribution() {
    let logits = [0.0, 1.0, 2.0];
    let total: f64 = logits.iter().map(|&l: &f32| f64::from(l).exp()).sum();
    let filtered = SamplingParams { min_p: 1e-9, ..WARM };
    for params in [WARM, filtered] {
        let mut counts = [0.0; 3];
        (0..30_000)
            .for_each(|p| counts[sample(&logits, params, p).token as usize] += 1.0 / 30_000.0);
        for (count, logit) in counts.iter().zip(logits) {
            assert!((count - f64::from(logit).exp() / total).abs() < 0.01, "{counts:?}");
        }
    }
}

#[test]
fn odd_logits_and_parameters_are_harmless() {
    let odd = [f32::NAN, f32::NEG_INFINITY, 1.0, f32::INFINITY, f32::MAX, f32::MIN, 0.0];
    let all_nan = [f32::NAN; 4];
    let numbers = [0.0, 1.0, -1.0, 1e-30, 1e30, f32::NAN, f32::INFINITY];
    for logits in [&odd[..], &odd[..3], &all_nan, &[f32::NEG_INFINITY]] {
        for a in numbers {
            for b in numbers {
                let params = SamplingParams {
                    temperature: a,
                    top_p: b,
                    top_k: 3,
                    min_p: a,
                    presence_penalty: b,
                    frequency_penalty: a,
                    repetition_penalty: b,
                    seed: 1,
                };
                let context =
                    TokenHistory { prompt: &[0, 3, 99], resumed: &[], output: &[1, 2, u32::MAX] };
                let sampled =
                    Sampler::new(logits.len()).sample(logits, FREE, &params, context, 0, 50);
                assert!((sampled.token as usize) < logits.len());
                assert!(sampled.logprob.is_finite() && sampled.logprob <= 1e-6);
                assert!(sampled.top.as_slice().iter().all(|(_, logprob)| logprob.is_finite()));
            }
        }
    }
}

/// The ids that the parameters keep, computed by a full sort, in descending order.
fn left_by_sorting(logits: &[f32], params: &SamplingParams) -> Vec<u32> {
    let max = logits.iter().copied().fold(f32::MIN, f32::max);
    let weight = |id: u32| f64::from(((logits[id as usize] - max) / params.temperature).exp());
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    ids.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
    if params.top_k > 0 {
        ids.truncate(params.top_k as usize);
    }
    let total: f64 = ids.iter().map(|&id| weight(id)).sum();
    let mut sum = 0.0;
    ids.retain(|&id| {
        let keep = sum == 0.0 || sum < f64::from(params.top_p) * total || params.top_p >= 1.0;
        sum += weight(id);
        keep
    });
    ids.retain(|&id| weight(id) >= f64::from(params.min_p));
    ids
}

proptest! {
    /// Logits on a grid, so that no limit lies between two roundings.
    #[test]
    fn filters_agree_with_a_full_sort(
        steps in prop::collection::vec(-40i32..40, 1..700),
        top_k in 0u32..300, top_p in 1u32..120, min_p in 0u32..50,
        temperature in 1u32..8, position in any::<u32>(),
    ) {
        let logits: Vec<f32> = steps.iter().map(|&s| s as f32 * 0.25).collect();
        let params = SamplingParams {
            temperature: temperature as f32 * 0.5,
            top_p: top_p as f32 * 0.01 + 0.000_037,
            top_k,
            min_p: min_p as f32 * 0.01 + 0.000_037,
            ..WARM
        };
        let left = left_by_sorting(&logits, &params);
        let mut sampler = Sampler::new(logits.len());
        let mut at = |share| {
            sampler.sample(&logits, FREE, &params, TokenHistory::default(), position, 0);
            sampler.logits.copy_from_slice(&logits);
            let max = argmax(&logits).1;
            sampler.draw(&params, max, share)
        };
        prop_assert_eq!(at(0.0), left[0]);
        prop_assert_eq!(at(1.0 - 1e-12), *left.last().unwrap());
        let history = TokenHistory::default();
        let token = sampler.sample(&logits, FREE, &params, history, position, 0).token;
        prop_assert!(left.contains(&token));
    }

    #[test]
    fn top_logprobs_agree_with_a_full_sort(
        steps in prop::collection::vec(-9i32..9, 1..200), count in 0usize..30,
    ) {
        let logits: Vec<f32> = steps.iter().map(|&s| s as f32).collect();
        let sampled = Sampler::new(logits.len())
            .sample(&logits, FREE, &SamplingParams::GREEDY, TokenHistory::default(), 0, count);
        let all = left_by_sorting(&logits, &SamplingParams { min_p: 0.0, ..WARM });
        let expected = &all[..count.min(20).min(all.len())];
        let ids: Vec<u32> = sampled.top.as_slice().iter().map(|entry| entry.0).collect();
        prop_assert_eq!(&ids[..], expected);
        if count > 0 {
            prop_assert_eq!(sampled.top.as_slice()[0], (sampled.token, sampled.logprob));
        }
    }
}

#[test]
fn a_mask_makes_the_other_tokens_impossible() {
    let mask = |ids: &[usize]| {
        let mut words = [0_u32; 2];
        ids.iter().for_each(|id| words[id / 32] |= 1 << (id % 32));
        words.map(AtomicU32::new)
    };
    let logits: Vec<f32> = (0..40).map(|id| id as f32 / 10.0).collect();
    let history = TokenHistory { prompt: &[5, 39], resumed: &[], output: &[5, 39, 35] };
    let cases = [
        SamplingParams::GREEDY,
        WARM,
        SamplingParams { top_k: 3, ..WARM },
        SamplingParams { top_p: 0.999, ..WARM },
        SamplingParams { min_p: 0.5, repetition_penalty: 1.5, frequency_penalty: 2.0, ..WARM },
    ];
    let mut sampler = Sampler::new(40);
    for params in cases {
        for seed in 0..200 {
            let params = SamplingParams { seed, ..params };
            let allowed = mask(&[3, 5, 35]);
            let sampled = sampler.sample(&logits, masked(&allowed), &params, history, 9, 4);
            assert!([3, 5, 35].contains(&sampled.token), "{params:?}: {}", sampled.token);
            // The logprobs are those of the tokens that are allowed.
            let total: f64 = [3, 5, 35].iter().map(|&id: &usize| f64::from(logits[id]).exp()).sum();
            let expected = f64::from(logits[sampled.token as usize]) - total.ln();
            assert!((f64::from(sampled.logprob) - expected).abs() < 1e-5);
            assert_eq!(sampled.top.as_slice()[3].1, LOGPROB_MIN, "the fourth is not allowed");
        }
    }
    // The only allowed token can have the lowest logit.
    let lowest = [f32::NEG_INFINITY, f32::NAN, 1.0];
    let sampled = Sampler::new(3).sample(&lowest, masked(&mask(&[1])[..1]), &WARM, history, 0, 0);
    assert_eq!(sampled.token, 1);
}

fn masked(mask: &[AtomicU32]) -> TokenLimits<'_> {
    TokenLimits { mask: Some(mask), rules: None }
}

#[test]
fn rules_limit_the_choice_and_not_the_logprobs() {
    let logits = [5.0, 4.0, 3.0, 2.0];
    let plain = sample(&logits, SamplingParams::GREEDY, 0);
    let history = TokenHistory { prompt: &[0], resumed: &[2], output: &[3] };
    let choose = |rules: TokenRules| {
        let limits = TokenLimits { mask: None, rules: Some(&rules) };
        let sampled =
            Sampler::new(4).sample(&logits, limits, &SamplingParams::GREEDY, history, 0, 4);
        assert_eq!(sampled.top.as_slice()[0], (0, plain.logprob), "{rules:?}");
        sampled.token
    };
    let none = TokenRules::default;
    assert!(none().is_empty());
    assert_eq!(choose(none()), 0);
    assert_eq!(choose(TokenRules { bias: vec![(2, 9.0), (77, 1.0)], ..none() }), 2);
    assert_eq!(choose(TokenRules { bias: vec![(0, -100.0)], ..none() }), 1);
    assert_eq!(choose(TokenRules { allowed: vec![0b1100], ..none() }), 2);
    assert_eq!(choose(TokenRules { banned: vec![vec![0], vec![3, 1]], ..none() }), 2);
    assert_eq!(choose(TokenRules { banned: vec![vec![2, 3, 0]], ..none() }), 1);
    assert_eq!(choose(TokenRules { banned: vec![vec![1, 3, 0], vec![0, 2, 3, 0]], ..none() }), 0);
    assert_eq!(choose(TokenRules { min_tokens: 3, ends: vec![0, 1], ..none() }), 2);
    assert_eq!(choose(TokenRules { min_tokens: 2, ends: vec![0, 1], ..none() }), 0);
    let all = vec![vec![0], vec![1], vec![2], vec![3]];
    assert_eq!(choose(TokenRules { banned: all, ..none() }), 0, "they leave no token");
}
