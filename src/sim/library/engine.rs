//! An engine that uses an agent as a guest does: it polls late, cancels at any time, forgets to
//! release, leases pages that it must not lease, and calls with slots of earlier requests.
//!
//! Invariants that it checks: each request gets one outcome, in time, then one end, and no event
//! after it. A request that has landed has the KV of its own prompt, and the bytes of its source. A
//! page that has come back is not written any more.

use super::memory::{EngineMemory, SimPrompt};
use super::plan::{Attempt, LeasePlan};
use crate::agent::client::{AgentClient, AgentError};
use crate::agent::requests::{AgentEvent, AgentEventKind, AuxPayload};
use crate::cause::Cause;
use crate::ids::{PageId, Role, Room};
use crate::stdx::event_queue::{MICRO, MILLI, Nanos, SECOND};
use crate::stdx::rng::Rng;
use crate::transfer::aux::AUX_PAYLOAD_BYTES;
use crate::transfer::manager::rooms::Slot;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

/// The longest time from the deadline of a request to its outcome, in turns of the agent.
const OUTCOME_MAX: Nanos = 200 * MILLI;
/// The longest time from an outcome to the end: of a NIC's writes, or of a silent link.
const END_MAX: Nanos = 20 * SECOND;
/// One in so many looks of an engine comes as late as this.
const LATE: (u64, Nanos) = (60, 2 * SECOND);
/// Slots of earlier requests that are tried again.
const STALE_MAX: usize = 4;

/// Bytes that a source sends with the last tokens of a room.
fn payload_of(room: Room) -> AuxPayload {
    let mut payload = [0x5a; AUX_PAYLOAD_BYTES];
    payload[..8].copy_from_slice(&room.0.to_le_bytes());
    payload
}

/// What has become of an attempt at one end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AttemptEnd {
    /// The attempt's number.
    pub attempt: usize,
    /// The end's role.
    pub role: Role,
    /// `None`: the KV was handed over.
    pub failure: Option<Cause>,
    /// Whether the other end was known.
    pub has_met: bool,
    /// When the engine read the outcome.
    pub at: Nanos,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Open,
    Landed(Nanos),
    Failed(Nanos),
    Ended,
}

#[derive(Debug)]
struct GuestRequest {
    number: usize,
    attempt: Attempt,
    slot: Slot,
    stage: Stage,
    began: Nanos,
    has_met: bool,
    /// Pages in the order of the prompt; empty until they are leased at a destination.
    pages: Vec<PageId>,
    /// Pages that are leased so far.
    leased: usize,
    computed: u32,
    computes_at: Nanos,
    has_last: bool,
    is_cancelled: bool,
    /// The pages belong to this other request.
    borrows_from: Option<Slot>,
    /// Another request was leased to the same pages, so that nothing is known about them.
    is_lent: bool,
}

/// An engine and its requests.
#[derive(Debug)]
pub struct GuestEngine {
    role: Role,
    client: AgentClient,
    memory: EngineMemory,
    requests: Vec<GuestRequest>,
    /// Attempts that it has not begun.
    waiting: VecDeque<(usize, Attempt)>,
    /// Ended requests that it forgets to release.
    forgotten: Vec<Slot>,
    stale: VecDeque<Slot>,
    lateness: Nanos,
    looks_at: Nanos,
    dice: Rng,
    /// Ends of attempts since the last [`GuestEngine::take_ends`].
    ends: Vec<AttemptEnd>,
}

impl GuestEngine {
    /// An engine with this memory, which looks after its agent in intervals of about `lateness`.
    pub fn new(
        role: Role,
        client: AgentClient,
        memory: EngineMemory,
        lateness: Nanos,
        dice: Rng,
    ) -> GuestEngine {
        GuestEngine {
            role,
            client,
            memory,
            requests: Vec::new(),
            waiting: VecDeque::new(),
            forgotten: Vec::new(),
            stale: VecDeque::new(),
            lateness,
            looks_at: 0,
            dice,
            ends: Vec::new(),
        }
    }

    /// Gives the engine an attempt.
    pub fn add(&mut self, number: usize, attempt: Attempt) {
        self.waiting.push_back((number, attempt));
    }

    /// Takes the outcomes that it has read.
    pub fn take_ends(&mut self) -> Vec<AttemptEnd> {
        std::mem::take(&mut self.ends)
    }

    /// The engine's memory, after its agent has ended.
    pub fn into_memory(self) -> EngineMemory {
        self.memory
    }

    /// Whether requests are open.
    pub fn is_busy(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Whether it has no request, and no attempt to begin.
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty() && self.waiting.is_empty()
    }

    /// Releases the slots that it has forgotten.
    pub fn remember_releases(&mut self) -> Result<(), String> {
        for slot in std::mem::take(&mut self.forgotten) {
            self.call("release", self.client.release(slot))?;
            self.note_stale(slot);
        }
        Ok(())
    }

    /// Whether nothing of any request is left.
    ///
    /// # Errors
    /// What is left.
    pub fn check_idle(&self) -> Result<(), String> {
        self.memory.check_guards()?;
        match (self.memory.used(), self.client.counts().open) {
            (0, 0) => Ok(()),
            (pages, slots) => Err(format!("{pages} pages and {slots} slots of the engine")),
        }
    }

    /// Looks after the agent, if it is time to. `agent` is the time of a turn of the agent, and
    /// `addresses` are those of the sources. Returns the time of the next look.
    ///
    /// # Errors
    /// A rule is broken.
    pub fn turn(
        &mut self,
        now: Nanos,
        agent: Nanos,
        addresses: &[SocketAddr],
    ) -> Result<Nanos, String> {
        if now < self.looks_at {
            return Ok(self.looks_at);
        }
        while let Some(event) = self.client.poll() {
            self.take(event, now)?;
        }
        self.check_times(agent)?;
        self.begin_attempts(now, addresses)?;
        for index in 0..self.requests.len() {
            self.advance(index, now)?;
        }
        self.release_ended()?;
        self.call_stale()?;
        let (one_in, late) = LATE;
        let most = if self.dice.one_in(one_in) { late } else { self.lateness };
        self.looks_at = now + self.dice.range_u64(MICRO, most);
        Ok(self.looks_at)
    }

    fn call(&self, name: &str, result: Result<(), AgentError>) -> Result<(), String> {
        result.map_err(|error| format!("{name} of a request that is open: {error}"))
    }

    /// Takes an event, and checks the order of the events of its request.
    fn take(&mut self, event: AgentEvent, now: Nanos) -> Result<(), String> {
        let AgentEvent { slot, room, kind } = event;
        let Some(index) = self.requests.iter().position(|one| one.slot == slot) else {
            return Err(format!("{kind:?} of {slot:?}, which has no request"));
        };
        let one = &mut self.requests[index];
        if one.attempt.room != room {
            return Err(format!("{kind:?} of {slot:?} has {room:?}"));
        }
        let stage = match (one.stage, &kind) {
            (Stage::Open, AgentEventKind::Met) if !one.has_met => {
                one.has_met = true;
                Stage::Open
            }
            (Stage::Open, AgentEventKind::Landed(payload)) => {
                let is_destination = self.role == Role::Decode;
                let expected = is_destination.then(|| payload_of(room));
                if *payload != expected {
                    return Err(format!("{room:?} has other bytes of its source"));
                }
                Stage::Landed(now)
            }
            (Stage::Open, AgentEventKind::Failed(_)) => Stage::Failed(now),
            (Stage::Landed(_) | Stage::Failed(_), AgentEventKind::Ended) => Stage::Ended,
            (stage, kind) => return Err(format!("{kind:?} of a request that is {stage:?}")),
        };
        let before = std::mem::replace(&mut one.stage, stage);
        match kind {
            AgentEventKind::Met => {}
            AgentEventKind::Landed(_) => self.note_outcome(index, None, now)?,
            AgentEventKind::Failed(cause) => self.note_outcome(index, Some(cause), now)?,
            AgentEventKind::Ended => self.take_end(index, matches!(before, Stage::Landed(_)))?,
        }
        Ok(())
    }

    fn note_outcome(
        &mut self,
        index: usize,
        failure: Option<Cause>,
        at: Nanos,
    ) -> Result<(), String> {
        let one = &self.requests[index];
        let has_met = one.has_met;
        let end = AttemptEnd { attempt: one.number, role: self.role, failure, has_met, at };
        let is_lender = |other: &GuestRequest| Some(other.slot) == one.borrows_from;
        let is_lender_open =
            self.requests.iter().any(|other| is_lender(other) && other.stage != Stage::Ended);
        let is_refused = failure.is_some();
        if !is_refused && is_lender_open {
            return Err(format!("{:?} has landed in pages of another request", one.attempt.room));
        }
        let has_twice = one.attempt.lease == LeasePlan::Twice && self.role == Role::Decode;
        if !is_refused && (has_twice || one.attempt.is_mismatch) {
            return Err(format!(
                "{:?} has landed at a {} worker, which must be refused: {:?}",
                one.attempt.room, self.role, one.attempt
            ));
        }
        self.ends.push(end);
        Ok(())
    }

    /// The pages of a request can be used again.
    fn take_end(&mut self, index: usize, has_landed: bool) -> Result<(), String> {
        let one = &mut self.requests[index];
        let (prompt, room) = (one.attempt.prompt, one.attempt.room);
        let pages = std::mem::take(&mut one.pages);
        // Nothing is known about pages that another request got meanwhile.
        if has_landed && self.role == Role::Decode && !one.is_lent && one.borrows_from.is_none() {
            let checked = self.memory.check(prompt, 0..prompt.tokens, &pages);
            checked.map_err(|why| format!("{room:?} has landed: {why}"))?;
        }
        let slot = one.slot;
        if one.borrows_from.is_some() {
            return Ok(());
        }
        // A borrower that is still open writes the pages.
        let is_borrowed =
            |other: &GuestRequest| other.borrows_from == Some(slot) && other.stage != Stage::Ended;
        match self.requests.iter_mut().find(|other| is_borrowed(other)) {
            Some(borrower) => {
                borrower.borrows_from = None;
                borrower.is_lent = true;
                let borrowed = borrower.pages.len();
                self.memory.give_back(&pages[borrowed..]);
            }
            None => self.memory.give_back(&pages),
        }
        Ok(())
    }

    /// Each request has an outcome soon after its deadline, and then an end.
    fn check_times(&self, agent: Nanos) -> Result<(), String> {
        for one in &self.requests {
            let until = match one.stage {
                Stage::Open => one.began + self.end_of(one).within + OUTCOME_MAX,
                Stage::Landed(at) | Stage::Failed(at) => at + END_MAX,
                Stage::Ended => continue,
            };
            if agent > until {
                let (room, stage) = (one.attempt.room, one.stage);
                return Err(format!("{room:?} is {stage:?} after its time"));
            }
        }
        Ok(())
    }

    fn end_of<'a>(&self, one: &'a GuestRequest) -> &'a super::plan::EndPlan {
        &one.attempt.ends[usize::from(self.role == Role::Decode)]
    }

    fn begin_attempts(&mut self, now: Nanos, addresses: &[SocketAddr]) -> Result<(), String> {
        for _ in 0..self.waiting.len() {
            let Some((number, attempt)) = self.waiting.pop_front() else { break };
            let end = attempt.ends[usize::from(self.role == Role::Decode)];
            match end.at {
                None => continue,
                Some(at) if at > now => self.waiting.push_back((number, attempt)),
                Some(_) => {
                    if let Some(attempt) = self.begin(number, attempt, now, addresses)? {
                        self.waiting.push_back((number, attempt));
                    }
                }
            }
        }
        Ok(())
    }

    /// Begins an attempt. Returns it if there is no slot, or there are no pages.
    fn begin(
        &mut self,
        number: usize,
        attempt: Attempt,
        now: Nanos,
        addresses: &[SocketAddr],
    ) -> Result<Option<Attempt>, String> {
        let tokens = attempt.prompt.tokens;
        let pages = match self.role {
            Role::Decode => Vec::new(),
            _ => match self.memory.take(tokens)? {
                Some(pages) => pages,
                None => return Ok(Some(attempt)),
            },
        };
        let seed =
            attempt.prompt.seed ^ u64::from(self.role == Role::Decode && attempt.is_mismatch);
        let ids = SimPrompt { seed, ..attempt.prompt }.ids();
        let end = attempt.ends[usize::from(self.role == Role::Decode)];
        let within = Duration::from_nanos(end.within);
        let entered = match self.role {
            Role::Decode => {
                self.client.wish(attempt.room, addresses[attempt.hosts[0]], &ids, within)
            }
            _ => self.client.offer(attempt.room, &ids, within),
        };
        let slot = match entered {
            Ok(slot) => slot,
            Err(AgentError::Full) => {
                self.memory.give_back(&pages);
                // Nothing else makes room.
                if self.requests.is_empty() {
                    self.remember_releases()?;
                }
                return Ok(Some(attempt));
            }
            Err(error) => return Err(format!("a request cannot begin: {error}")),
        };
        self.requests.push(GuestRequest {
            number,
            slot,
            stage: Stage::Open,
            began: now,
            has_met: false,
            pages,
            leased: 0,
            computed: 0,
            computes_at: now + attempt.step,
            has_last: false,
            is_cancelled: false,
            borrows_from: None,
            is_lent: false,
            attempt,
        });
        Ok(None)
    }

    /// Does what is next for a request.
    fn advance(&mut self, index: usize, now: Nanos) -> Result<(), String> {
        let one = &self.requests[index];
        if one.stage == Stage::Ended {
            return Ok(());
        }
        let (slot, end) = (one.slot, *self.end_of(one));
        if self.client.release(slot) != Err(AgentError::Open) {
            return Err("a request that has not ended is released".into());
        }
        if end.cancels_after.is_some_and(|after| one.began + after <= now) && !one.is_cancelled {
            self.requests[index].is_cancelled = true;
            self.call("cancel", self.client.cancel(slot))?;
            if self.client.cancel(slot) != Err(AgentError::Repeated) {
                return Err("a request is cancelled twice".into());
            }
        }
        match self.role {
            Role::Decode => self.lease_to_write(index),
            _ => self.compute(index, now),
        }
    }

    fn lease_to_write(&mut self, index: usize) -> Result<(), String> {
        let one = &self.requests[index];
        let (slot, tokens, prefix) = (one.slot, one.attempt.prompt.tokens, one.attempt.prefix);
        let plan = one.attempt.lease;
        if !one.pages.is_empty() || one.stage != Stage::Open || plan == LeasePlan::Never {
            return Ok(());
        }
        let wanted = self.memory.layout().pages_for(tokens) as usize;
        let is_lender = |other: &&GuestRequest| {
            let is_open = matches!(other.stage, Stage::Open | Stage::Landed(_) | Stage::Failed(_));
            let is_own = other.borrows_from.is_none() && other.pages.len() >= wanted;
            is_open && is_own && other.attempt.prefix == 0 && !other.is_lent
        };
        let lender = self.requests.iter().find(is_lender).filter(|_| prefix == 0);
        if let (LeasePlan::OfAnother, Some(lender)) = (plan, lender) {
            let (from, pages) = (lender.slot, lender.pages[..wanted].to_vec());
            self.call("lease", self.client.lease(slot, 0, &pages))?;
            let lender = self.requests.iter_mut().find(|one| one.slot == from);
            lender.expect("it was just found").is_lent = true;
            let one = &mut self.requests[index];
            (one.pages, one.borrows_from) = (pages, Some(from));
            return Ok(());
        }
        let Some(pages) = self.memory.take(tokens)? else { return Ok(()) };
        self.memory.compute(one.attempt.prompt, 0..prefix, &pages);
        let mut leased = pages.clone();
        if plan == LeasePlan::Twice {
            // A prompt of one page has no second one.
            if leased.len() as u32 - prefix / self.memory.layout().page_size < 2 {
                self.requests[index].attempt.lease = LeasePlan::Well;
            } else {
                leased[wanted - 2] = leased[wanted - 1];
            }
        }
        self.call("lease", self.client.lease(slot, prefix, &leased))?;
        if self.client.lease(slot, prefix, &leased) != Err(AgentError::Repeated) {
            return Err("a destination leases pages twice".into());
        }
        self.requests[index].pages = pages;
        Ok(())
    }

    /// Computes a chunk at a source.
    fn compute(&mut self, index: usize, now: Nanos) -> Result<(), String> {
        let one = &mut self.requests[index];
        let Attempt { prompt, chunk, step, .. } = one.attempt;
        let slot = one.slot;
        if one.stage != Stage::Open || one.computes_at > now {
            return Ok(());
        }
        if one.computed == prompt.tokens {
            if !std::mem::replace(&mut one.has_last, true) {
                let payload = payload_of(one.attempt.room);
                let given = self.client.send_last(slot, &payload);
                return self.call("send_last", given);
            }
            return Ok(());
        }
        let (from, until) = (one.computed, prompt.tokens.min(one.computed + chunk));
        let wanted = self.memory.layout().pages_for(until) as usize;
        let new = one.pages[one.leased..wanted].to_vec();
        (one.leased, one.computed, one.computes_at) = (wanted, until, now + step);
        let pages = one.pages.clone();
        if !new.is_empty() {
            if self.client.compute(slot, until) != Err(AgentError::Pages) {
                return Err("tokens without pages are computed".into());
            }
            self.call("lease", self.client.lease(slot, 0, &new))?;
        }
        self.memory.compute(prompt, from..until, &pages);
        self.call("compute", self.client.compute(slot, until))
    }

    fn release_ended(&mut self) -> Result<(), String> {
        let is_over = |one: &mut GuestRequest| one.stage == Stage::Ended;
        for one in self.requests.extract_if(.., is_over).collect::<Vec<_>>() {
            let end = self.end_of(&one);
            if end.forgets_release {
                self.forgotten.push(one.slot);
                continue;
            }
            self.call("release", self.client.release(one.slot))?;
            self.note_stale(one.slot);
        }
        Ok(())
    }

    fn note_stale(&mut self, slot: Slot) {
        self.stale.push_back(slot);
        if self.stale.len() > STALE_MAX {
            self.stale.pop_front();
        }
    }

    /// Calls with slots of earlier requests are errors.
    fn call_stale(&mut self) -> Result<(), String> {
        for &slot in &self.stale {
            let answers = [
                self.client.cancel(slot),
                self.client.release(slot),
                self.client.lease(slot, 0, &[PageId(0)]),
                self.client.status(slot).map(drop),
            ];
            if let Some(answer) = answers.iter().find(|answer| **answer != Err(AgentError::Slot)) {
                return Err(format!("a call with a slot of an earlier request: {answer:?}"));
            }
        }
        Ok(())
    }
}
