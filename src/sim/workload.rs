//! The requests of clients, and the expected answers. The tokens depend only on the prompt and the
//! hash, not on pages, chunks and workers.

use super::model::{Fold, VOCAB};
use crate::kv::prefix::Salt;
use crate::model::sampler::{Sampler, SamplingParams, TokenHistory, TokenLimits};
use crate::stdx::rng::Rng;
use std::collections::VecDeque;

/// Longest prompt, in tokens.
pub const PROMPT_MAX: u32 = 127;
/// Longest answer, in tokens.
pub const ANSWER_MAX: u32 = 31;

/// One request.
#[derive(Clone, Debug)]
pub struct SimRequest {
    /// Token ids of its prompt.
    pub prompt: Vec<u32>,
    /// Maximum number of ids in its answer.
    pub max_new: u32,
    /// Sampling parameters.
    pub sampling: SamplingParams,
    /// Ids that end the answer.
    pub stop_tokens: Vec<u32>,
    /// The salt of its prefix cache.
    pub salt: Salt,
    /// Whether its client has a deadline.
    pub is_hurried: bool,
    /// Its answer if it succeeds.
    pub expected: Vec<u32>,
}

/// Conversations that can continue.
const CONVERSATIONS: usize = 16;

/// Draws requests. Many share a prefix, and some continue an earlier conversation.
#[derive(Debug)]
pub struct Workload {
    dice: Rng,
    stems: Vec<Vec<u32>>,
    /// Prompts with their answers and salts, the oldest first.
    past: VecDeque<(Vec<u32>, Salt)>,
    sampler: Sampler,
}

impl Workload {
    /// A workload without earlier conversations.
    pub fn new(mut dice: Rng) -> Workload {
        let stems = (0..3).map(|_| ids(&mut dice, PROMPT_MAX)).collect();
        Workload { dice, stems, past: VecDeque::new(), sampler: Sampler::new(VOCAB as usize) }
    }

    /// The next request.
    pub fn draw(&mut self) -> SimRequest {
        let dice = &mut self.dice;
        let tokens = dice.range_u32(1, PROMPT_MAX);
        let shared = if dice.one_in(2) { dice.range_u32(0, tokens) } else { 0 };
        let stem = dice.next_u64() as usize % self.stems.len();
        let mut prompt = self.stems[stem][..shared as usize].to_vec();
        prompt.extend(ids(dice, tokens - shared));
        let (temperature, seed) = if dice.one_in(3) { (0.8, dice.next_u64()) } else { (0.0, 0) };
        // With a penalty, the answer depends on the generated tokens.
        let frequency_penalty = dice.pick(&[0.0, 1.0]);
        let sampling =
            SamplingParams { temperature, seed, frequency_penalty, ..SamplingParams::GREEDY };
        let stop_tokens = if dice.one_in(4) { ids(dice, 2) } else { Vec::new() };
        let mut salt = Salt(if dice.one_in(5) { dice.range_u64(1, 2).into() } else { 0 });
        let max_new = dice.range_u32(1, ANSWER_MAX);
        if dice.one_in(3)
            && let Some((past, whose)) = self.past.get(dice.next_u64() as usize % CONVERSATIONS)
            && past.len() < PROMPT_MAX as usize
        {
            let said = dice.range_u32(1, PROMPT_MAX - past.len() as u32);
            prompt = past.clone();
            prompt.extend(ids(dice, said));
            salt = *whose;
        }
        let mut order = SimRequest {
            prompt,
            max_new,
            sampling,
            stop_tokens,
            salt,
            is_hurried: dice.one_in(4),
            expected: Vec::new(),
        };
        order.expected = self.answer(&order);
        self.past.push_back((order.prompt.iter().chain(&order.expected).copied().collect(), salt));
        if self.past.len() > CONVERSATIONS {
            self.past.pop_front();
        }
        order
    }

    fn answer(&mut self, order: &SimRequest) -> Vec<u32> {
        let mut fold = Fold::default();
        let mut position = 0;
        for &token in &order.prompt {
            fold.add(token, position);
            position += 1;
        }
        let mut output = Vec::new();
        loop {
            let logits: Vec<f32> = fold.logits().collect();
            let context = TokenHistory { prompt: &order.prompt, resumed: &[], output: &output };
            let token = self
                .sampler
                .sample(&logits, TokenLimits::default(), &order.sampling, context, position, 0)
                .token;
            output.push(token);
            if order.stop_tokens.contains(&token) || output.len() == order.max_new as usize {
                return output;
            }
            fold.add(token, position);
            position += 1;
        }
    }
}

fn ids(dice: &mut Rng, count: u32) -> Vec<u32> {
    (0..count).map(|_| dice.range_u32(0, VOCAB - 1)).collect()
}
