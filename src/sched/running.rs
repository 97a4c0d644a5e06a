//! The running batch: one token per request and step, and the rules by which a request ends.

use crate::ids::{SlotId, WorkerId};
use crate::kv::pool::PagePool;
use crate::model::forward::StepEnd;
use crate::model::forward::batch::Logits;
use crate::model::logprobs::Sampled;
use crate::sched::mail::Mail;
use crate::sched::mailbox::{Event, Outcome};
use crate::sched::request::Request;
use crate::sched::slots::Slots;
use crate::sched::worker::{KvMemory, Turn};
use std::time::Instant;

/// Requests that decode together, in order of joining.
#[derive(Debug)]
pub struct Running {
    slots: Vec<SlotId>,
    ended: Vec<(SlotId, Outcome)>,
}

impl Running {
    /// For at most `max_running` requests.
    pub fn new(max_running: usize) -> Running {
        Running { slots: Vec::with_capacity(max_running), ended: Vec::with_capacity(max_running) }
    }

    /// How many run.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether none runs.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// A request whose prompt is in place and whose last token is not.
    pub fn join(&mut self, slot: SlotId, request: &mut Request, now: Instant) {
        debug_assert!(self.slots.len() < self.slots.capacity() && !request.output.is_empty());
        request.stamps.joined.get_or_insert(now);
        self.slots.push(slot);
    }

    /// A request is over.
    pub fn leave(&mut self, slot: SlotId) {
        self.slots.retain(|&running| running != slot);
    }

    /// Who runs.
    pub fn slots(&self) -> &[SlotId] {
        &self.slots
    }

    /// Pages that the next step takes beyond those that are held.
    pub fn missing<S>(&self, slots: &Slots<S>, page_size: u32) -> u32 {
        self.slots.iter().map(|&slot| missing(&slots[slot].request, page_size)).sum()
    }

    /// One step of all; the pages it takes are free. Tokens generated, or none when
    /// nobody runs. Ended requests are for [`Running::next_ended`].
    pub fn step<S>(
        &mut self,
        worker: WorkerId,
        slots: &mut Slots<S>,
        pool: &mut PagePool,
        kv: &KvMemory,
        turn: &mut Turn<'_>,
    ) -> Option<u32> {
        if self.slots.is_empty() {
            return None;
        }
        turn.batch.clear();
        for &slot in &self.slots {
            push_row(&mut slots[slot].request, pool, kv.layout.page_size, turn);
        }
        let gone = |mail: &mut Mail| {
            self.slots.iter().all(|&slot| mail.aborts(worker, slot, slots[slot].request.generation))
        };
        if turn.forward(kv.pool(), gone) == StepEnd::Stopped {
            return Some(0);
        }
        for (index, &slot) in self.slots.iter().enumerate() {
            let request = &mut *slots[slot].request;
            let sampled = turn.sample(index, request);
            if let Some(outcome) = accept(request, sampled, turn.mail, turn.clock) {
                self.ended.push((slot, outcome));
            }
        }
        Some(self.slots.len() as u32)
    }

    /// A request that the last step ended.
    pub fn next_ended(&mut self) -> Option<(SlotId, Outcome)> {
        self.ended.pop()
    }
}

/// Pages that a request's next token takes beyond those that it holds.
fn missing(request: &Request, page_size: u32) -> u32 {
    let tokens = (request.prompt.len() + request.output.len()) as u32;
    tokens.div_ceil(page_size).saturating_sub(request.pages.len() as u32)
}

/// The last token goes in at its position, on a page that was made free.
fn push_row(request: &mut Request, pool: &mut PagePool, page_size: u32, turn: &mut Turn<'_>) {
    let position = (request.prompt.len() + request.output.len() - 1) as u32;
    assert!(
        pool.allocate(missing(request, page_size), &mut request.pages),
        "no page was made free"
    );
    let last = &request.output[request.output.len() - 1..];
    let pages = (position + 1).div_ceil(page_size) as usize;
    let pushed = turn.batch.push(last, position, &request.pages[..pages], Logits::Last);
    assert!(pushed.is_ok(), "a running request does not fit the batch: {pushed:?}");
}

/// Adds a token to a request and tells of it; how the request ends when that was its last.
pub fn accept(
    request: &mut Request,
    sampled: Sampled,
    mail: &mut Mail,
    clock: &dyn Fn() -> Instant,
) -> Option<Outcome> {
    let first = request.output.is_empty().then(|| {
        request.stamps.first_token = Some(clock());
        request.stamps
    });
    request.output.push(sampled.token);
    mail.tell(Event::Token { request: request.id, sampled, first });
    if request.stop_tokens.contains(&sampled.token) {
        Some(Outcome::Stop)
    } else if request.output.len() >= request.max_new as usize {
        Some(Outcome::Length)
    } else {
        None
    }
}
