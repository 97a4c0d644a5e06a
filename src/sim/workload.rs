//! What clients ask for, and what they must get: tokens follow from the prompt by the hash alone, whatever
//! pages, chunks and workers they go through.

use super::agenda::Nanos;
use super::dice::Dice;
use super::model::{Fold, VOCAB};
use super::plan::{ANSWER_MAX, PROMPT_MAX};
use crate::kv::prefix::Salt;
use crate::model::sampler::{Context, Sampler, SamplingParams};
use std::collections::VecDeque;

/// One request.
#[derive(Clone, Debug)]
pub struct Order {
    /// Ids of its prompt.
    pub prompt: Vec<u32>,
    /// Most ids of its answer.
    pub max_new: u32,
    /// How they are chosen.
    pub sampling: SamplingParams,
    /// Ids that end it.
    pub stop_tokens: Vec<u32>,
    /// How many of the last ids of `prompt` its client has as an answer.
    pub resumed: u32,
    /// Whose prefix cache it shares.
    pub salt: Salt,
    /// How long it may take.
    pub patience: Nanos,
    /// Its answer, if it gets one.
    pub expected: Vec<u32>,
}

impl Order {
    /// Whether its client has all of it, and waits but to hear so: by its length, or its last token.
    pub fn is_whole(&self) -> bool {
        let last = self.prompt.last().filter(|_| self.resumed > 0);
        self.max_new == 0 || last.is_some_and(|last| self.stop_tokens.contains(last))
    }

    /// What is left of it for a client that has `answer` and has waited so long; `None` if it waits no longer.
    pub fn after(&self, answer: &[u32], waited: Nanos) -> Option<Order> {
        let patience = self.patience.checked_sub(waited).filter(|&left| left > 0)?;
        Some(Order {
            prompt: [&self.prompt[..], answer].concat(),
            max_new: self.max_new - answer.len() as u32,
            resumed: answer.len() as u32,
            patience,
            expected: self.expected[answer.len()..].to_vec(),
            ..self.clone()
        })
    }
}

/// Conversations that may go on.
const CONVERSATIONS: usize = 16;

/// Draws requests, many of which begin alike, and some of which go on where an answer has ended.
#[derive(Debug)]
pub struct Workload {
    dice: Dice,
    stems: Vec<Vec<u32>>,
    /// Prompts with their answers, the oldest first, and whose they are.
    past: VecDeque<(Vec<u32>, Salt)>,
    sampler: Sampler,
    patience: Nanos,
    haste: Nanos,
}

impl Workload {
    /// Of requests that wait as long as `patience`, one in four as long as `haste`.
    pub fn new(mut dice: Dice, patience: Nanos, haste: Nanos) -> Workload {
        let stems = (0..3).map(|_| ids(&mut dice, PROMPT_MAX)).collect();
        Workload {
            dice,
            stems,
            past: VecDeque::new(),
            sampler: Sampler::new(VOCAB as usize),
            patience,
            haste,
        }
    }

    /// The next request.
    pub fn draw(&mut self) -> Order {
        let dice = &mut self.dice;
        let tokens = dice.number(1, PROMPT_MAX);
        let shared = if dice.one_in(2) { dice.number(0, tokens) } else { 0 };
        let stem = dice.draw() as usize % self.stems.len();
        let mut prompt = self.stems[stem][..shared as usize].to_vec();
        prompt.extend(ids(dice, tokens - shared));
        let (temperature, seed) = if dice.one_in(3) { (0.8, dice.draw()) } else { (0.0, 0) };
        // With a penalty the answer depends on which tokens are its own.
        let frequency_penalty = dice.pick(&[0.0, 1.0]);
        let sampling =
            SamplingParams { temperature, seed, frequency_penalty, ..SamplingParams::GREEDY };
        let stop_tokens = if dice.one_in(4) { ids(dice, 2) } else { Vec::new() };
        let mut salt = Salt(if dice.one_in(5) { dice.within(1, 2).into() } else { 0 });
        let max_new = dice.number(1, ANSWER_MAX);
        if dice.one_in(3)
            && let Some((past, whose)) = self.past.get(dice.draw() as usize % CONVERSATIONS)
            && past.len() < PROMPT_MAX as usize
        {
            let said = dice.number(1, PROMPT_MAX - past.len() as u32);
            prompt = past.clone();
            prompt.extend(ids(dice, said));
            salt = *whose;
        }
        let mut order = Order {
            prompt,
            max_new,
            sampling,
            stop_tokens,
            resumed: 0,
            salt,
            patience: if dice.one_in(4) { self.haste } else { self.patience },
            expected: Vec::new(),
        };
        order.expected = self.answer(&order);
        self.past.push_back((order.prompt.iter().chain(&order.expected).copied().collect(), salt));
        if self.past.len() > CONVERSATIONS {
            self.past.pop_front();
        }
        order
    }

    fn answer(&mut self, order: &Order) -> Vec<u32> {
        let mut fold = Fold::default();
        let mut position = 0;
        for &token in &order.prompt {
            fold.add(token, position);
            position += 1;
        }
        let mut output = Vec::new();
        loop {
            let logits: Vec<f32> = fold.logits().collect();
            let context = Context { prompt: &order.prompt, resumed: &[], output: &output };
            let token = self.sampler.sample(&logits, &order.sampling, context, position, 0).token;
            output.push(token);
            if order.stop_tokens.contains(&token) || output.len() == order.max_new as usize {
                return output;
            }
            fold.add(token, position);
            position += 1;
        }
    }
}

fn ids(dice: &mut Dice, count: u32) -> Vec<u32> {
    (0..count).map(|_| dice.number(0, VOCAB - 1)).collect()
}
