//! placeholder merged later
#![allow(missing_docs)]
use super::logprobs::{Sampled, TopLogprobs};
/// Sampling parameters.
#[derive(Clone, Debug)]
pub struct SamplingParams {}

#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    pub prompt: &'a [u32],
    pub output: &'a [u32],
}

#[derive(Debug)]
pub struct Sampler {}

impl Sampler {
    pub fn new(_vocab: usize) -> Sampler {
        Sampler {}
    }
    pub fn sample(
        &mut self,
        logits: &[f32],
        _params: &SamplingParams,
        _context: Context<'_>,
        _position: u32,
        _top: usize,
    ) -> Sampled {
        let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap_or(0);
        Sampled { token: best as u32, logprob: logits[best], top: TopLogprobs::EMPTY }
    }
}
