//! One attempt of one choice of one HTTP request, as `ctl` makes it and the engine works on it.
//!
//! All vectors are allocated by `ctl` with the capacity they will ever need; the box travels to the
//! engine and comes back with [`super::mailbox::Event::Released`], so the engine neither allocates nor frees.

use crate::ids::{Generation, PageId, RequestId, Room, SlotId, WorkerId};
use crate::kv::prefix::{Salt, Sequence};
use crate::model::sampler::SamplingParams;
use crate::stdx::planted::is_planted;
use std::ops::Range;
use std::time::Instant;

/// What the engine is asked to do.
#[derive(Debug)]
pub struct Request {
    /// Names it in every event.
    pub id: RequestId,
    /// Which worker of this process.
    pub worker: WorkerId,
    /// The attempt; meaningless where nothing is handed over.
    pub room: Room,
    /// Decode: it reads the prompt itself, and nobody hands its KV over.
    pub alone: bool,
    /// Prefill: it is computed at once, and its KV kept for a decode leg that may come later, within
    /// [`KEPT_KV_LIFE`](crate::limits::KEPT_KV_LIFE).
    pub keep: bool,
    /// Entry of the worker's status table, opened by `ctl`.
    pub slot: SlotId,
    /// Its generation.
    pub generation: Generation,
    /// Ids to go on from, at least one, checked against the vocabulary; with `max_new` they fit the context.
    pub prompt: Vec<u32>,
    /// How many of the last of them an earlier attempt has generated: output, as far as penalties go.
    pub resumed: u32,
    /// Ids generated so far; capacity `max_new`.
    pub output: Vec<u32>,
    /// Pages held, in order of position; capacity for prompt + `max_new`.
    pub pages: Vec<PageId>,
    /// Whose prefix cache it uses and fills; none: nobody's.
    pub salt: Option<Salt>,
    /// How to choose tokens.
    pub sampling: SamplingParams,
    /// Alternatives per position, 0 to 20.
    pub top_logprobs: usize,
    /// Most ids to generate, at least 1. A prefill worker generates one whatever this says.
    pub max_new: u32,
    /// Ids that end generation (end of sequence unless ignored, stop ids of the request).
    pub stop_tokens: Vec<u32>,
    /// End of sequence does not end it: its length is certain, which admission uses.
    pub ignore_eos: bool,
    /// It fails when not finished by then.
    pub deadline: Instant,
    /// When things happened to it.
    pub stamps: Stamps,
}

impl Request {
    /// Its ids so far, for the prefix cache if it uses one.
    pub fn sequence(&self) -> Option<Sequence<'_>> {
        let salt = self
            .salt
            .map(|salt| if is_planted("salt is not compared") { Salt::default() } else { salt });
        salt.map(|salt| Sequence { salt, prompt: &self.prompt, output: &self.output })
    }

    /// Its ids at these positions: of the prompt, and generated ones behind them.
    pub fn tokens(&self, positions: Range<u32>) -> [&[u32]; 2] {
        let (prompt, output) = (self.prompt.len(), self.output.len());
        let (start, end) = (positions.start as usize, positions.end as usize);
        [
            &self.prompt[start.min(prompt)..end.min(prompt)],
            &self.output[start.saturating_sub(prompt).min(output)..end.saturating_sub(prompt)],
        ]
    }
}

/// Times of one request on one worker; unset ones have not happened.
#[derive(Clone, Copy, Debug)]
pub struct Stamps {
    /// `ctl` had read the request.
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
    /// Prefill's share of the time to first token as it told in the aux record: (queue, prefill) in µs.
    pub prefill_us: Option<(u32, u32)>,
    /// Tokens of the prompt that were not computed for it, once it is admitted; decode: once its KV is there.
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
