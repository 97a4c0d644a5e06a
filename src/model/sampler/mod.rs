//! Logits to the next token.
//!
//! Thread: the engine's. Owns scratch of the size of the vocabulary and allocates nothing after
//! construction. Invariants: the choice is a function of logits, parameters, context and position
//! alone: random numbers come from (seed, position), sums have a fixed order, ties go to the lower id.
//! Not finite logits never panic and never make a number that is not finite.

use crate::limits::TOP_LOGPROBS_MAX;
use crate::model::logprobs::{Sampled, TopLogprobs};

mod exp;

/// What a request asks for. The order of application: penalties, temperature, top-k, top-p of what
/// is left, min-p.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SamplingParams {
    /// Divisor of logits; 0 takes the likeliest token.
    pub temperature: f32,
    /// Smallest set of likeliest tokens that holds this share; 1 and above keep all.
    pub top_p: f32,
    /// How many of the likeliest tokens stay; 0 keeps all.
    pub top_k: u32,
    /// Tokens less likely than this share of the likeliest go; 0 keeps all.
    pub min_p: f32,
    /// Taken once from the logit of each token in the output.
    pub presence_penalty: f32,
    /// Taken from the logit of a token for each time it is in the output.
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or output; 1 does nothing.
    pub repetition_penalty: f32,
    /// With the position, the only source of chance.
    pub seed: u64,
}

impl SamplingParams {
    /// The likeliest token, unchanged by anything.
    pub const GREEDY: SamplingParams = SamplingParams {
        temperature: 0.0,
        top_p: 1.0,
        top_k: 0,
        min_p: 0.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        repetition_penalty: 1.0,
        seed: 0,
    };
}

/// The tokens before the one to choose.
#[derive(Clone, Copy, Debug, Default)]
pub struct Context<'a> {
    /// Ids of the prompt.
    pub prompt: &'a [u32],
    /// Ids generated so far.
    pub output: &'a [u32],
}

/// What is said of a token without any likelihood, as vLLM says it.
const LOGPROB_MIN: f32 = -9999.0;

/// Scratch for one choice at a time.
#[derive(Debug)]
pub struct Sampler {
    /// Logits after penalties.
    logits: Vec<f32>,
    /// Exponentials, by id.
    weights: Vec<f32>,
    /// Sortable (logit, id) pairs of candidates.
    ranked: Vec<u64>,
    /// How often an id stands in the context; zero between calls.
    counts: Vec<u32>,
}

impl Sampler {
    /// For a vocabulary of `vocab` ids, at least one.
    pub fn new(vocab: usize) -> Sampler {
        assert!(vocab > 0);
        Sampler {
            logits: vec![0.0; vocab],
            weights: vec![0.0; vocab],
            ranked: Vec::with_capacity(vocab),
            counts: vec![0; vocab],
        }
    }

    /// Chooses the token at `position` (of the whole sequence) from `logits`, one per id, and gives
    /// the `top_logprobs` likeliest ones with it.
    pub fn sample(
        &mut self,
        logits: &[f32],
        params: &SamplingParams,
        context: Context<'_>,
        position: u32,
        top_logprobs: usize,
    ) -> Sampled {
        assert_eq!(logits.len(), self.logits.len());
        for (to, &from) in self.logits.iter_mut().zip(logits) {
            *to = finite(from);
        }
        let (likeliest, max) = argmax(&self.logits);
        let log_total = exp::sum(&self.logits, max, 1.0, &mut self.weights).ln();
        let logprob = |logit: f32| ((f64::from(logit) - f64::from(max) - log_total) as f32).max(LOGPROB_MIN);
        let mut top = top(&self.logits, top_logprobs.min(TOP_LOGPROBS_MAX));
        top.as_mut_slice().iter_mut().for_each(|entry| entry.1 = logprob(entry.1));

        let penalised = params.repetition_penalty != 1.0
            || params.presence_penalty != 0.0
            || params.frequency_penalty != 0.0;
        if penalised {
            self.penalise(params, context);
        }
        let (likeliest, max) = if penalised { argmax(&self.logits) } else { (likeliest, max) };
        let token = if params.temperature > 0.0 {
            self.draw(params, max, uniform(params.seed, position))
        } else {
            likeliest
        };
        Sampled { token, logprob: logprob(finite(logits[token as usize])), top }
    }

    fn penalise(&mut self, params: &SamplingParams, context: Context<'_>) {
        let vocab = self.logits.len();
        let output = || known(context.output, vocab);
        let all = || known(context.prompt, vocab).chain(output());
        if params.repetition_penalty != 1.0 {
            let factor = params.repetition_penalty;
            for id in all() {
                if std::mem::replace(&mut self.counts[id], 1) == 0 {
                    let logit = &mut self.logits[id];
                    *logit = if *logit > 0.0 { *logit / factor } else { *logit * factor };
                }
            }
            all().for_each(|id| self.counts[id] = 0);
        }
        output().for_each(|id| self.counts[id] += 1);
        for id in output() {
            let count = std::mem::take(&mut self.counts[id]);
            if count > 0 {
                self.logits[id] -= params.presence_penalty + params.frequency_penalty * count as f32;
            }
        }
        all().for_each(|id| self.logits[id] = finite(self.logits[id]));
    }

    /// Draws by `share` in [0, 1) among the tokens that the parameters leave.
    fn draw(&mut self, params: &SamplingParams, max: f32, share: f64) -> u32 {
        let total = exp::sum(&self.logits, max, params.temperature, &mut self.weights);
        let vocab = self.logits.len();
        let top_k = if params.top_k == 0 { vocab } else { vocab.min(params.top_k as usize) };
        if top_k == vocab && params.top_p >= 1.0 && params.min_p <= 0.0 {
            let weights = self.weights.iter().map(|&weight| f64::from(weight));
            return pick(weights, total * share).unwrap_or_else(|| argmax(&self.logits).0 as usize) as u32;
        }
        self.ranked.clear();
        self.ranked.extend((0..).zip(&self.logits).map(|(id, &logit)| rank(logit, id)));
        let mut sorted = 0;
        let mut limit = f64::from(params.top_p) * total;
        if top_k < vocab {
            sort_next(&mut self.ranked, 0, top_k);
            sorted = top_k;
            let weights = self.ranked[..top_k].iter().map(|&rank| self.weights[id_of(rank) as usize]);
            limit = f64::from(params.top_p) * weights.map(f64::from).sum::<f64>();
        }
        // The likeliest token has weight 1 and always stays.
        let (mut kept, mut sum) = (0, 0.0);
        while kept < top_k {
            if kept == sorted {
                let more = (top_k - sorted).min(64.max(sorted * 3));
                sort_next(&mut self.ranked, sorted, more);
                sorted += more;
            }
            let weight = self.weights[id_of(self.ranked[kept]) as usize];
            if kept > 0 && (weight < params.min_p || params.top_p < 1.0 && sum >= limit) {
                break;
            }
            sum += f64::from(weight);
            kept += 1;
        }
        let weights = self.ranked[..kept].iter().map(|&rank| f64::from(self.weights[id_of(rank) as usize]));
        id_of(self.ranked[pick(weights, sum * share).unwrap_or(0)])
    }
}

/// The logit, the least one for NaN.
fn finite(logit: f32) -> f32 {
    if logit > f32::MIN { logit.min(f32::MAX) } else { f32::MIN }
}

/// The ids that the vocabulary has, as indices.
fn known(ids: &[u32], vocab: usize) -> impl Iterator<Item = usize> {
    ids.iter().map(|&id| id as usize).filter(move |&id| id < vocab)
}

/// Brings the `count` highest of `ranked[sorted..]` to its front, in descending order.
fn sort_next(ranked: &mut [u64], sorted: usize, count: usize) {
    let rest = &mut ranked[sorted..];
    if count < rest.len() {
        rest.select_nth_unstable_by(count, |a, b| b.cmp(a));
    }
    rest[..count].sort_unstable_by(|a, b| b.cmp(a));
}

/// The index at which the running sum passes `target`, or the last that weighs anything.
fn pick(weights: impl Iterator<Item = f64>, target: f64) -> Option<usize> {
    let (mut sum, mut last) = (0.0, None);
    for (index, weight) in weights.enumerate() {
        if weight > 0.0 {
            sum += weight;
            last = Some(index);
            if sum > target {
                break;
            }
        }
    }
    last
}

/// The lowest id of the highest logit: two passes without branches are faster than one with.
fn argmax(logits: &[f32]) -> (u32, f32) {
    let mut lanes = [f32::MIN; 16];
    for chunk in logits.chunks(lanes.len()) {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane = if logit > *lane { logit } else { *lane };
        }
    }
    let max = lanes.iter().copied().fold(f32::MIN, f32::max);
    let id = logits.iter().position(|&logit| logit == max).unwrap_or(0);
    (id as u32, max)
}

/// A number that sorts as the logit does, then the lower id above the higher. Not for NaN.
fn rank(logit: f32, id: u32) -> u64 {
    // Both zeros are one.
    let bits = (logit + 0.0).to_bits();
    let ordered = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
    u64::from(ordered) << 32 | u64::from(!id)
}

fn id_of(rank: u64) -> u32 {
    !(rank as u32)
}

/// The `count` highest logits in descending order.
fn top(logits: &[f32], count: usize) -> TopLogprobs {
    let mut top = TopLogprobs::EMPTY;
    if count == 0 {
        return top;
    }
    for (id, &logit) in (0..).zip(logits) {
        top.insert(id, logit, count);
    }
    top
}

/// A number in [0, 1) that depends on seed and position alone: two rounds of SplitMix64.
fn uniform(seed: u64, position: u32) -> f64 {
    let mixed = split_mix(split_mix(seed).wrapping_add(position.into()));
    (mixed >> 11) as f64 / (1u64 << 53) as f64
}

fn split_mix(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests;
