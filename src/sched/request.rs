//! One attempt of one choice of an HTTP request, as `ctl` creates it and the engine runs it.
//!
//! `ctl` allocates all vectors with their final capacity. The box goes to the engine and returns
//! with [`super::messages::RequestEvent::Released`]. So the engine neither allocates nor frees.

use crate::ids::{Generation, RequestId, Room, SlotId, WorkerId};
use crate::kv::page_key::{PageKey, Salt, Sequence};
use crate::kv::request_pages::RequestPages;
use crate::model::logprobs::PromptLogprobs;
use crate::model::sampler::{SamplingParams, TokenRules};
use crate::sched::masks::RequestGrammar;
use crate::stdx::failpoint::is_failpoint_active;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// A request to the engine.
#[derive(Debug)]
pub struct EngineRequest {
    /// Its id in every event.
    pub id: RequestId,
    /// The worker of this process that runs it.
    pub worker: WorkerId,
    /// The attempt; meaningless without a hand-off.
    pub room: Room,
    /// Decode: the worker computes the prompt itself, without a prefill worker.
    pub alone: bool,
    /// Prefill: the prompt is computed at once. Its KV is kept for a decode leg that may come
    /// within [`KEPT_KV_LIFE`](crate::limits::KEPT_KV_LIFE).
    pub keep: bool,
    /// Slot in the worker's status table, opened by `ctl`.
    pub slot: SlotId,
    /// Its generation.
    pub generation: Generation,
    /// Input ids, at least one, checked against the vocabulary. With `max_new` they fit the
    /// context.
    pub prompt: Vec<u32>,
    /// Number of ids at the end of `prompt` that an earlier attempt has generated. Penalties treat
    /// them as output.
    pub resumed: u32,
    /// Ids generated so far; capacity `max_new`.
    pub output: Vec<u32>,
    /// Its pages; capacity for prompt + `max_new`.
    pub pages: RequestPages,
    /// Keys of its full pages in the prefix cache, from its first page on; capacity as `pages`. The
    /// engine computes them.
    pub keys: Vec<PageKey>,
    /// Salt of the prefix cache that it uses and fills; `None`: it uses no cache.
    pub salt: Option<Salt>,
    /// Sampling parameters.
    pub sampling: SamplingParams,
    /// The grammar that limits its tokens, if it has one.
    pub grammar: Option<RequestGrammar>,
    /// Rules about its tokens.
    pub rules: Option<Arc<TokenRules>>,
    /// Alternatives per position, 0 to 20.
    pub top_logprobs: usize,
    /// Logprobs of the prompt, if this worker computes them. The engine fills them, and sends them
    /// with the first token.
    pub prompt_logprobs: Option<Box<PromptLogprobs>>,
    /// Order in the queues: the lowest number is the first.
    pub priority: i32,
    /// Most ids to generate, at least 1. A prefill worker always generates one.
    pub max_new: u32,
    /// Ids that end generation (end of sequence unless ignored, stop ids of the request).
    pub stop_tokens: Vec<u32>,
    /// End of sequence does not end it. Admission then knows its length.
    pub ignore_eos: bool,
    /// The request fails if it has not finished by then.
    pub deadline: Instant,
    /// Times of its stages.
    pub stamps: Stamps,
}

impl EngineRequest {
    /// Its ids so far, for the prefix cache; `None` if it uses no cache.
    pub fn sequence(&self) -> Option<Sequence<'_>> {
        let salt = self.salt.map(|salt| {
            if is_failpoint_active("salt is not compared") { Salt::default() } else { salt }
        });
        salt.map(|salt| Sequence { salt, prompt: &self.prompt, output: &self.output })
    }

    /// Position of the next token of the prompt that must get a logprob.
    pub fn next_scored(&self) -> Option<u32> {
        let scored = self.prompt_logprobs.as_ref().filter(|scored| !scored.is_complete());
        scored.map(|scored| scored.next_position())
    }

    /// Its ids at these positions: those of the prompt, then generated ones.
    pub fn tokens(&self, positions: Range<u32>) -> [&[u32]; 2] {
        let (prompt, output) = (self.prompt.len(), self.output.len());
        let (start, end) = (positions.start as usize, positions.end as usize);
        [
            &self.prompt[start.min(prompt)..end.min(prompt)],
            &self.output[start.saturating_sub(prompt).min(output)..end.saturating_sub(prompt)],
        ]
    }
}

/// Times of one request on one worker. A time is unset until its event occurs.
#[derive(Clone, Copy, Debug)]
pub struct Stamps {
    /// `ctl` had parsed the request.
    pub arrived: Instant,
    /// Prefill: a checked Destination was there. Decode: its session was ready.
    pub bootstrapped: Option<Instant>,
    /// Prefill: first chunk began. Decode: pages leased.
    pub admitted: Option<Instant>,
    /// Prefill: last layer of the last chunk. Decode: KV arrived.
    pub filled: Option<Instant>,
    /// Decode and mixed: joined the running batch.
    pub joined: Option<Instant>,
    /// First token left the engine.
    pub first_token: Option<Instant>,
    /// The parts of the time to first token that passed on prefill, from the aux record: (queue,
    /// prefill) in µs.
    pub prefill_us: Option<(u32, u32)>,
    /// Prompt tokens that were not computed for it. Set at admission; on decode, when its KV
    /// arrives.
    pub cached: u32,
}

impl Stamps {
    /// Stamps of a request that has just arrived.
    pub fn new(arrived: Instant) -> Stamps {
        Stamps {
            arrived,
            bootstrapped: None,
            admitted: None,
            filled: None,
            joined: None,
            first_token: None,
            prefill_us: None,
            cached: 0,
        }
    }
}
