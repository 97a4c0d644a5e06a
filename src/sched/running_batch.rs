//! The running batch. Each step generates one token per request. This module also decides when a
//! request ends.

use crate::cause::Cause;
use crate::ids::{SlotId, WorkerId};
use crate::kv::pool::PagePool;
use crate::model::forward::StepEnd;
use crate::model::forward::batch::Logits;
use crate::model::logprobs::Sampled;
use crate::sched::channel::EngineChannel;
use crate::sched::config::SchedConfig;
use crate::sched::messages::{FinishReason, RequestEvent};
use crate::sched::request::EngineRequest;
use crate::sched::slots::Slots;
use crate::sched::worker::{KvMemory, NoToken, TurnContext};
use crate::stdx::failpoint::is_failpoint_active;
use std::time::Instant;

/// Requests that decode together, in order of joining.
#[derive(Debug)]
pub struct Running {
    config: SchedConfig,
    slots: Vec<SlotId>,
    /// Those of the current step.
    rows: Vec<SlotId>,
    ended: Vec<(SlotId, FinishReason)>,
}

impl Running {
    /// Makes an empty batch.
    pub fn new(config: SchedConfig) -> Running {
        let max_running = config.max_running;
        Running {
            config,
            slots: Vec::with_capacity(max_running),
            rows: Vec::with_capacity(max_running),
            ended: Vec::with_capacity(max_running),
        }
    }

    /// Number of running requests.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether no request runs.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Adds a request. Its KV is in place for all tokens except the last one.
    pub fn join(&mut self, slot: SlotId, request: &mut EngineRequest, now: Instant) {
        debug_assert!(self.slots.len() < self.slots.capacity() && !request.output.is_empty());
        request.stamps.joined.get_or_insert(now);
        self.slots.push(slot);
    }

    /// Removes an ended request.
    pub fn leave(&mut self, slot: SlotId) {
        self.slots.retain(|&running| running != slot);
    }

    /// The slots of the running requests.
    pub fn slots(&self) -> &[SlotId] {
        &self.slots
    }

    /// Pages that the next step needs beyond the held ones.
    pub fn missing<S>(&self, slots: &Slots<S>) -> u32 {
        let page_size = self.config.page_size;
        self.slots.iter().map(|&slot| missing(&slots[slot].request, page_size)).sum()
    }

    /// Runs one step of all requests. A request stays out if its mask was late in the step before
    /// and is still not there. The pages that the step needs must be free. Returns the number of
    /// generated tokens, or `None` if nothing was computed. [`Running::next_ended`] returns the
    /// ended requests.
    pub fn step<S>(
        &mut self,
        worker: WorkerId,
        slots: &mut Slots<S>,
        pool: &mut PagePool,
        kv: &KvMemory,
        turn: &mut TurnContext<'_>,
    ) -> Option<u32> {
        turn.batch.clear();
        self.rows.clear();
        for &slot in &self.slots {
            let request = &mut slots[slot].request;
            let tokens = request.output.len();
            let grammar = request.grammar.as_ref();
            if !grammar.is_some_and(|grammar| grammar.is_still_late(tokens)) {
                push_row(request, pool, self.config.page_size, turn);
                self.rows.push(slot);
            }
        }
        if self.rows.is_empty() {
            return None;
        }
        let gone = |channel: &mut EngineChannel| {
            self.rows
                .iter()
                .all(|&slot| channel.aborts(worker, slot, slots[slot].request.generation))
        };
        if turn.forward(kv.pool(), gone) == StepEnd::Stopped {
            return Some(0);
        }
        let mut generated = 0;
        for (index, &slot) in self.rows.iter().enumerate() {
            let request = &mut *slots[slot].request;
            let outcome = match turn.sample_next(index, request) {
                Ok(sampled) => {
                    generated += 1;
                    accept(request, sampled, turn)
                }
                Err(NoToken::MaskIsLate) => {
                    // A later step computes the same row again.
                    if let Some(grammar) = &mut request.grammar {
                        grammar.note_late();
                    }
                    None
                }
                Err(NoToken::GrammarFailed) => Some(FinishReason::Failed(Cause::Grammar)),
            };
            self.ended.extend(outcome.map(|outcome| (slot, outcome)));
            slots[slot].give_back_pages(&self.config, pool);
        }
        Some(generated)
    }

    /// Returns a request that the last step ended.
    pub fn next_ended(&mut self) -> Option<(SlotId, FinishReason)> {
        self.ended.pop()
    }
}

/// Pages that a request's next token needs beyond the held ones.
fn missing(request: &EngineRequest, page_size: u32) -> u32 {
    let tokens = (request.prompt.len() + request.output.len()) as u32;
    request.pages.count_missing(tokens.div_ceil(page_size) as usize)
}

/// Adds the last token at its position, on a page that was made free.
fn push_row(
    request: &mut EngineRequest,
    pool: &mut PagePool,
    page_size: u32,
    turn: &mut TurnContext<'_>,
) {
    let position = (request.prompt.len() + request.output.len() - 1) as u32;
    let pages = (position + 1).div_ceil(page_size) as usize;
    assert!(request.pages.extend_to(pool, pages), "no page was made free");
    debug_assert!(!request.pages.has_checkpoint(), "the last chunk writes the request's own pages");
    // If the mask of this row was late, the state has seen the last token already.
    let mut seen = request.pages.set_state_tokens(position + 1);
    if is_failpoint_active("state advances for a late token") {
        seen = position;
    }
    let last = &request.output[request.output.len() - 1..];
    let pages = (request.pages.up_to(pages), request.pages.state(seen));
    let pushed = turn.batch.push_joined([last, &[]], position, pages, Logits::Last);
    assert!(pushed.is_ok(), "a running request does not fit the batch: {pushed:?}");
}

/// Adds a token to a request and sends it. Returns the reason if the request ends with it.
pub fn accept(
    request: &mut EngineRequest,
    sampled: Sampled,
    turn: &mut TurnContext<'_>,
) -> Option<FinishReason> {
    let first = request.output.is_empty().then(|| {
        request.stamps.first_token = Some((turn.clock)());
        request.stamps
    });
    request.output.push(sampled.token);
    let prompt = request.prompt_logprobs.take();
    debug_assert!(prompt.as_ref().is_none_or(|prompt| prompt.is_complete()), "all are computed");
    turn.channel.send_event(RequestEvent::Token { request: request.id, sampled, first, prompt });
    if request.stop_tokens.contains(&sampled.token) {
        Some(FinishReason::Stop)
    } else if request.output.len() >= request.max_new as usize {
        Some(FinishReason::Length)
    } else {
        if let Some(grammar) = &mut request.grammar {
            grammar.report(sampled.token);
        }
        None
    }
}
