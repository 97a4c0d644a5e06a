//! The requests of clients, and the expected answers. The tokens depend only on the prompt and the
//! hash, not on pages, chunks and workers.

use super::model::{END, Fold, SimLayers, VOCAB};
use crate::kv::page_key::Salt;
use crate::model::grammar::{GrammarCompiler, GrammarContext, GrammarSource, GrammarState};
use crate::model::sampler::{Sampler, SamplingParams, TokenHistory, TokenLimits};
use crate::model::tokenizer::Tokenizer;
use crate::stdx::rng::Rng;
use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::AtomicU32;

/// Longest prompt, in tokens.
pub const PROMPT_MAX: u32 = 127;
/// Longest answer, in tokens.
pub const ANSWER_MAX: u32 = 31;

/// A token in an answer of `/generate`: its logprob if it has one, its id, its text if asked for.
pub type LogprobEntry = (Option<f32>, u32, Option<String>);

/// Logprobs of a prompt.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct SimLogprobs {
    /// The tokens of the prompt from the first one that is asked for.
    pub tokens: Vec<LogprobEntry>,
    /// The likeliest tokens of each position; `None` at the first token of the prompt.
    pub top: Vec<Option<Vec<LogprobEntry>>>,
}

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
    /// The regular expression that its answer obeys, if any.
    pub grammar: Option<&'static str>,
    /// Whether its client has a deadline.
    pub is_hurried: bool,
    /// Its answer if it succeeds.
    pub expected: Vec<u32>,
    /// The first token of the prompt of which it asks for logprobs, and the number of alternatives.
    pub logprobs_from: Option<(u32, usize)>,
    /// The logprobs of its prompt if it succeeds; none if it does not ask for them.
    pub expected_logprobs: SimLogprobs,
}

/// Regular expressions over the bytes of the vocabulary. Each mask depends on the tokens before.
/// Answers can end where a text is complete.
const GRAMMARS: [&str; 3] = [r"([ !]{2}[#-&]{1,3})*", r"(!(##)*\$)*", r"([ -&]%[!-$])*"];
/// One in so many requests has a grammar.
const GRAMMAR_SHARE: u64 = 6;
/// One in so many requests asks for logprobs of its prompt.
const LOGPROBS_SHARE: u64 = 6;
/// In one of so many runs, some requests have another first id than a prompt that they share.
const BEGINNING_RUNS: u64 = 4;
/// One in so many requests of such a run does.
const BEGINNING_SHARE: u64 = 8;
/// The most alternatives of a token that it asks for.
const ALTERNATIVES_MAX: u32 = 3;

/// Conversations that can continue.
const CONVERSATIONS: usize = 16;

/// Draws requests. Many share a prefix, and some continue an earlier conversation.
#[derive(Debug)]
pub struct Workload {
    dice: Rng,
    /// The model's layers.
    layers: SimLayers,
    stems: Vec<Vec<u32>>,
    /// Prompts with their answers and salts, the oldest first.
    past: VecDeque<(Vec<u32>, Salt)>,
    sampler: Sampler,
    /// Draws the requests that have a grammar. Other draws do not depend on it.
    grammar_dice: Rng,
    /// Draws the requests for logprobs. Other draws do not depend on it.
    logprobs_dice: Rng,
    /// Draws the requests with another first id than a prompt that they share. Other draws do not
    /// depend on it.
    beginning_dice: Rng,
    has_beginnings: bool,
    /// The states of [`GRAMMARS`] before the first token.
    grammars: Vec<GrammarState>,
}

impl Workload {
    /// A workload without earlier conversations, for a model with these layers.
    pub fn new(mut dice: Rng, layers: SimLayers) -> Workload {
        let names = ["grammars", "logprobs", "beginnings"];
        let [grammar_dice, logprobs_dice, mut beginning_dice] = names.map(|name| dice.fork(name));
        let has_beginnings = beginning_dice.one_in(BEGINNING_RUNS);
        let stems = (0..3).map(|_| ids(&mut dice, PROMPT_MAX)).collect();
        let sampler = Sampler::new(VOCAB as usize);
        let grammars = compile_grammars();
        let past = VecDeque::new();
        Workload {
            dice,
            layers,
            stems,
            past,
            sampler,
            grammar_dice,
            logprobs_dice,
            beginning_dice,
            has_beginnings,
            grammars,
        }
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
        if self.has_beginnings && self.beginning_dice.one_in(BEGINNING_SHARE) {
            // Its later pages have the ids of other prompts, and other KV.
            prompt[0] = (prompt[0] + 1) % VOCAB;
        }
        let mut order = SimRequest {
            prompt,
            max_new,
            sampling,
            stop_tokens,
            salt,
            grammar: None,
            is_hurried: dice.one_in(4),
            expected: Vec::new(),
            logprobs_from: None,
            expected_logprobs: SimLogprobs::default(),
        };
        let (first, alternatives) = (
            self.logprobs_dice.range_u32(0, order.prompt.len() as u32 - 1),
            self.logprobs_dice.range_u32(0, ALTERNATIVES_MAX) as usize,
        );
        if self.logprobs_dice.one_in(LOGPROBS_SHARE) {
            order.logprobs_from = Some((first, alternatives));
            order.expected_logprobs = self.score(&order.prompt, first, alternatives);
        }
        let grammar = self.grammar_dice.range_u64(0, GRAMMARS.len() as u64 - 1) as usize;
        let grammar = self.grammar_dice.one_in(GRAMMAR_SHARE).then_some(grammar);
        order.grammar = grammar.map(|grammar| GRAMMARS[grammar]);
        order.expected = self.answer(&order, grammar);
        self.past.push_back((order.prompt.iter().chain(&order.expected).copied().collect(), salt));
        if self.past.len() > CONVERSATIONS {
            self.past.pop_front();
        }
        order
    }

    /// Logprobs of the tokens of a prompt from the `first` one on, which has none itself.
    fn score(&mut self, prompt: &[u32], first: u32, alternatives: usize) -> SimLogprobs {
        let mut fold = Fold::new(self.layers);
        let mut scores = SimLogprobs::default();
        for (position, &token) in (0..).zip(prompt) {
            let scored = (position > first).then(|| {
                let logits: Vec<f32> = fold.logits().collect();
                self.sampler.score(&logits, token, alternatives)
            });
            if position >= first {
                let entry = |&(id, logprob): &(u32, f32)| (Some(logprob), id, None);
                let top = scored.map(|scored| scored.top.as_slice().iter().map(entry).collect());
                scores.tokens.push((scored.map(|scored| scored.logprob), token, None));
                scores.top.extend((alternatives > 0).then_some(top));
            }
            fold.add(token, position);
        }
        scores
    }

    fn answer(&mut self, order: &SimRequest, grammar: Option<usize>) -> Vec<u32> {
        let mut grammar = grammar.map(|grammar| self.grammars[grammar].fork());
        let mut fold = Fold::new(self.layers);
        let mut position = 0;
        for &token in &order.prompt {
            fold.add(token, position);
            position += 1;
        }
        let mut output = Vec::new();
        loop {
            let logits: Vec<f32> = fold.logits().collect();
            let context = TokenHistory { prompt: &order.prompt, resumed: &[], output: &output };
            let mask = grammar.as_mut().map(|state| {
                let mask = state.compute_mask().expect("a small grammar");
                mask.into_iter().map(AtomicU32::new).collect::<Vec<_>>()
            });
            let limits = TokenLimits { mask: mask.as_deref(), rules: None };
            let sampled =
                self.sampler.sample(&logits, limits, &order.sampling, context, position, 0);
            let token = sampled.token;
            output.push(token);
            if let Some(state) = &mut grammar {
                state.advance(token).expect("the mask allows the token");
            }
            let is_end = token == END && grammar.is_some();
            let is_end = is_end || order.stop_tokens.contains(&token);
            if is_end || output.len() == order.max_new as usize {
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

/// The grammars as the workers compile them.
fn compile_grammars() -> Vec<GrammarState> {
    let tokenizer = Tokenizer::of_bytes(VOCAB as usize, Path::new("the pseudo-model"));
    let tokenizer = tokenizer.expect("bytes are a vocabulary");
    let compiler = GrammarCompiler::new(VOCAB as usize, &[END]);
    let compile = |regex: &&str| {
        let source = GrammarSource::Regex((*regex).to_owned());
        compiler.compile(&tokenizer, &source, GrammarContext::default())
    };
    GRAMMARS.iter().map(|regex| compile(regex).expect("a small grammar")).collect()
}
