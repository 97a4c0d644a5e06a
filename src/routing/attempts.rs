//! The attempts of one request in a router: when it sends the legs, when it retries, and how it
//! ends.
//!
//! ```text
//!             both legs connected      first bytes of decode
//! Connecting ───────────────────▶ Sent ──────────────────────▶ Passing ──▶ finished
//!    ▲  │ a worker refuses          │ a leg fails                │ decode is lost
//!    │  ▼                           ▼                            ▼
//!    └─ Pausing ◀── retry allowed ──┴── and the client's tokens are known
//!                                   └────────── otherwise ───────┴────▶ failed
//! ```
//! A prefill-first attempt ([`Attempts::in_turn`]) has two more stages before Sent:
//! ```text
//!             prefill connected        prefill answered      decode connected
//! Connecting ─────────────────▶ Reading ──────────────▶ Joining ─────────────▶ Sent
//!                                  │ prefill fails         │ no decode worker can be reached
//!                                  └───────────────────────┴──▶ Pausing or failed
//! ```
//! In these two stages, only one worker has the request, so only that worker can be at fault.
//! Another decode worker can still claim the KV that prefill keeps.
//! Owns: these transitions and the workers that the next attempt avoids. Pure; router and simulator
//! perform the same [`AttemptAction`]s.
//! Invariants: legs that are sent together are sent only when the connections of all of them are
//! open. Each attempt has its own room. A request ends once.
//! Not here: the choice of workers (`balancer`), the retry limits of all requests (`retries`).

use crate::cause::{Cause, Retry};
use crate::ids::Leg;
use crate::limits::{RETRY_TIME_MAX, ROUTER_LOST_PREFILL_TIME, ROUTER_PAIRS_MAX};
use crate::routing::load::WorkerNumber;
use crate::routing::retries::{RetryBudget, RetryLimit};
use crate::stdx::failpoint::is_failpoint_active;
use std::time::Instant;

/// The workers that a request avoids.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct AvoidList {
    /// Workers that failed the request. They are chosen only if no other worker is left.
    pub failed: Vec<WorkerNumber>,
    /// Workers that refused the request. They are never chosen for it again.
    pub unwilling: Vec<WorkerNumber>,
    /// The unwilling workers that refused because they drain. They count as absent.
    pub draining: Vec<WorkerNumber>,
}

impl AvoidList {
    /// Whether no worker has failed or refused the request.
    pub fn is_empty(&self) -> bool {
        self.failed.is_empty() && self.unwilling.is_empty()
    }
}

/// An event of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AttemptEvent {
    /// Connections were requested. This many are not open yet.
    Opened(u32),
    /// One of them is open.
    Connected,
    /// One of them was refused. Nothing was sent over it.
    Refused(Leg),
    /// Prefill-first: prefill has computed the prompt and named the KV that it keeps.
    PrefillDone,
    /// The client has received a part of decode's answer.
    Passes {
        /// Whether the router knows the client's tokens, so that another pair can continue the
        /// answer.
        resumable: bool,
    },
    /// The client has the token that prefill sampled, and the router knows it. Decode has sent
    /// nothing yet.
    FirstTokenPassed,
    /// A leg reported an error.
    Failed(Leg, Cause),
    /// A leg's connection broke, or the leg exceeded its deadline.
    Lost(Leg, Cause),
    /// Decode's answer is complete.
    Finished,
}

/// What the caller must do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum AttemptAction {
    /// Nothing.
    Wait,
    /// Send the requests of the legs that are connected: both legs, or the only one.
    Send,
    /// Request a connection to decode. [`AttemptEvent::Opened`] follows.
    StartDecode,
    /// Choose another decode worker for the KV that prefill keeps, call [`Attempts::rejoin`], and
    /// request a connection to that worker. If no worker can be chosen, report
    /// [`AttemptEvent::Lost`].
    ReplaceDecode,
    /// Give decode this deadline.
    ShortenDeadline(Instant),
    /// Decode has answered: restore its earlier deadline.
    RestoreDeadline,
    /// Cancel the legs now, and choose workers again at this time.
    Retry(Instant),
    /// The answer is complete. Give prefill some time to end.
    Finish,
    /// Cancel the legs and report the failure to the client.
    Fail(Cause),
}

/// The stage of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// This many connections are not open yet. Nothing was sent.
    Connecting(u32),
    /// The request was sent to prefill only.
    Reading,
    /// Prefill has answered; decode's connection is not open.
    Joining,
    /// The request was sent. The client has nothing of this attempt.
    Sent,
    /// The client receives the answer.
    Passing,
    /// Waits for the next attempt.
    Pausing,
    /// Has ended.
    Over,
}

/// One request.
#[derive(Clone, Debug)]
pub struct Attempts {
    stage: Stage,
    /// By role: the workers of this attempt. An entry is `None` if the role takes no part.
    legs: [Option<WorkerNumber>; 2],
    avoid: AvoidList,
    /// By role: the worker at fault for the last failure.
    accused: [Option<WorkerNumber>; 2],
    /// Attempts sent since the client last received data.
    tries: u32,
    /// Pairs in a row that refused a connection.
    refusals: u32,
    /// Waits since the client last received data.
    waits: u32,
    /// After a failure: the time until which another attempt can start, and the cause.
    failing: Option<(Instant, Cause)>,
    /// Whether the client has some of the answer.
    begun: bool,
    resumable: bool,
    /// Whether the prefill leg was lost, so that decode has a short deadline.
    prefill_lost: bool,
    /// Whether the attempt is prefill-first: the router sends the decode leg only after prefill has
    /// answered.
    in_turn: bool,
}

/// Time and randomness of a step, and the retry limits of all requests.
#[derive(Debug)]
pub struct AttemptContext<'a> {
    /// The time of the step.
    pub now: Instant,
    /// A random number for this step.
    pub chance: u64,
    /// The client's deadline, if it has set one.
    pub deadline: Option<Instant>,
    /// The retry limits of all requests.
    pub retries: &'a mut RetryBudget,
}

impl Default for Attempts {
    fn default() -> Self {
        Self {
            stage: Stage::Pausing,
            legs: [None; 2],
            avoid: AvoidList::default(),
            accused: [None; 2],
            tries: 0,
            refusals: 0,
            waits: 0,
            failing: None,
            begun: false,
            resumable: true,
            prefill_lost: false,
            in_turn: false,
        }
    }
}

impl Attempts {
    /// A request that avoids these workers from the start.
    pub fn without(avoid: AvoidList) -> Attempts {
        Attempts { avoid, ..Attempts::default() }
    }

    /// The workers that the next attempt avoids.
    pub fn avoid(&self) -> &AvoidList {
        &self.avoid
    }

    /// The workers at fault for the last failure.
    pub fn accused(&self) -> impl Iterator<Item = WorkerNumber> {
        self.accused.into_iter().flatten()
    }

    /// Whether this attempt was sent and the client has received nothing of it.
    pub fn is_waiting(&self) -> bool {
        self.stage == Stage::Sent
    }

    /// Whether decode has a short deadline because prefill was lost.
    pub fn has_lost_prefill(&self) -> bool {
        self.prefill_lost
    }

    /// Whether an earlier attempt of the request failed.
    pub fn is_retry(&self) -> bool {
        self.failing.is_some()
    }

    /// The worker of a leg in this attempt.
    pub fn worker(&self, role: Leg) -> Option<WorkerNumber> {
        self.legs[role as usize]
    }

    /// Starts an attempt with these workers.
    pub fn set_workers(&mut self, prefill: Option<WorkerNumber>, decode: Option<WorkerNumber>) {
        self.legs = [prefill, decode];
        (self.prefill_lost, self.accused) = (false, [None; 2]);
        self.in_turn &= is_failpoint_active("turns outlive their try");
        self.stage = Stage::Connecting(0);
    }

    /// Makes the attempt that was just started prefill-first: the router sends the decode leg after
    /// prefill has answered.
    pub fn in_turn(&mut self) {
        self.in_turn = true;
    }

    /// Sets another decode worker for the KV that prefill keeps.
    pub fn rejoin(&mut self, decode: WorkerNumber) {
        self.legs[Leg::Decode as usize] = Some(decode);
        self.accused = [None; 2];
    }

    /// Handles that no worker can be chosen. `may_come` says whether a worker can return by itself.
    pub fn handle_no_worker(
        &mut self,
        may_come: bool,
        terms: &AttemptContext<'_>,
    ) -> AttemptAction {
        match self.failing {
            Some((until, cause)) if may_come => self.wait(until, cause, terms),
            Some((_, cause)) => self.end(AttemptAction::Fail(cause)),
            None => self.end(AttemptAction::Fail(Cause::PeerLost)),
        }
    }

    /// Ends a request if its predicted time exceeds the limit. No worker has received it.
    pub fn late(&mut self) -> AttemptAction {
        self.end(AttemptAction::Fail(Cause::Overloaded))
    }

    /// Applies an event and returns what the caller must do.
    pub fn apply_event(
        &mut self,
        news: AttemptEvent,
        terms: &mut AttemptContext<'_>,
    ) -> AttemptAction {
        match self.stage {
            Stage::Over | Stage::Pausing => AttemptAction::Wait,
            Stage::Connecting(awaited) => self.take_while_connecting(awaited, news, terms),
            Stage::Reading | Stage::Joining => self.take_in_turn(news, terms),
            Stage::Sent | Stage::Passing => self.take_after_send(news, terms),
        }
    }

    /// Events of a pair that has connections which are not open yet.
    fn take_while_connecting(
        &mut self,
        awaited: u32,
        news: AttemptEvent,
        terms: &mut AttemptContext<'_>,
    ) -> AttemptAction {
        match news {
            AttemptEvent::Opened(0) => self.send(),
            AttemptEvent::Opened(awaited) => {
                self.stage = Stage::Connecting(awaited);
                AttemptAction::Wait
            }
            AttemptEvent::Connected if awaited > 1 => {
                let stands = u32::from(!is_failpoint_active("connection is not counted"));
                self.stage = Stage::Connecting(awaited - stands);
                AttemptAction::Wait
            }
            AttemptEvent::Connected => self.send(),
            AttemptEvent::Refused(role)
            | AttemptEvent::Lost(role, _)
            | AttemptEvent::Failed(role, _) => self.refused(role, terms),
            _ => AttemptAction::Wait,
        }
    }

    /// Events of a pair that has the request.
    fn take_after_send(
        &mut self,
        news: AttemptEvent,
        terms: &mut AttemptContext<'_>,
    ) -> AttemptAction {
        match (self.stage, news) {
            (_, AttemptEvent::Passes { resumable }) => self.pass(resumable),
            (Stage::Sent, AttemptEvent::FirstTokenPassed) => {
                // The count of attempts continues, because each pair that fails in the hand-off can
                // send one token.
                self.begun = true;
                AttemptAction::Wait
            }
            (_, AttemptEvent::Finished) => self.end(AttemptAction::Finish),
            // Decode continues without prefill.
            (
                Stage::Passing,
                AttemptEvent::Failed(Leg::Prefill, _) | AttemptEvent::Lost(Leg::Prefill, _),
            ) => AttemptAction::Wait,
            (Stage::Sent, AttemptEvent::Lost(Leg::Prefill, _)) => {
                self.shun(Leg::Prefill);
                self.prefill_lost = true;
                // Decode detects the loss itself, or it already has all the KV and answers.
                AttemptAction::ShortenDeadline(terms.now + ROUTER_LOST_PREFILL_TIME)
            }
            (_, AttemptEvent::Lost(Leg::Decode, Cause::Deadline))
                if self.prefill_lost
                    && terms.deadline.is_none_or(|deadline| terms.now < deadline) =>
            {
                self.failed(Leg::Decode, Cause::PeerLost, terms)
            }
            // The client's own deadline has passed. No worker is at fault.
            (_, AttemptEvent::Lost(_, cause @ Cause::Deadline)) => self.again(cause, terms),
            (_, AttemptEvent::Lost(role, cause)) => {
                self.shun(role);
                self.again(cause, terms)
            }
            (_, AttemptEvent::Failed(role, cause)) => self.failed(role, cause, terms),
            _ => AttemptAction::Wait,
        }
    }

    /// The client has received data, so the limits of attempts start again.
    fn pass(&mut self, resumable: bool) -> AttemptAction {
        self.stage = Stage::Passing;
        self.begun = true;
        self.resumable &= resumable;
        (self.tries, self.waits, self.failing) = (1, 0, None);
        self.avoid = AvoidList::default();
        match std::mem::take(&mut self.prefill_lost) {
            true => AttemptAction::RestoreDeadline,
            false => AttemptAction::Wait,
        }
    }

    /// Events of the two prefill-first stages.
    fn take_in_turn(
        &mut self,
        news: AttemptEvent,
        terms: &mut AttemptContext<'_>,
    ) -> AttemptAction {
        match (self.stage, news) {
            (Stage::Reading, AttemptEvent::PrefillDone) => {
                self.stage = Stage::Joining;
                AttemptAction::StartDecode
            }
            (Stage::Joining, AttemptEvent::Opened(0) | AttemptEvent::Connected) => {
                self.stage = Stage::Sent;
                AttemptAction::Send
            }
            (Stage::Joining, AttemptEvent::Refused(Leg::Decode))
                if self.refusals < ROUTER_PAIRS_MAX =>
            {
                self.shun(Leg::Decode);
                self.refusals += 1;
                AttemptAction::ReplaceDecode
            }
            // The worker drains. It has not received the request, so it is not at fault.
            (Stage::Joining, AttemptEvent::Failed(Leg::Decode, Cause::Draining))
                if self.refusals < ROUTER_PAIRS_MAX =>
            {
                self.note_refusal(Leg::Decode, Cause::Draining);
                self.refusals += 1;
                if is_failpoint_active("kept KV waits for a decode worker that goes") {
                    AttemptAction::Wait
                } else {
                    AttemptAction::ReplaceDecode
                }
            }
            // There is no other decode worker. The failure of this worker is already recorded.
            (Stage::Joining, AttemptEvent::Lost(Leg::Decode, cause)) => {
                self.accused = [None; 2];
                self.again(cause, terms)
            }
            (_, AttemptEvent::Lost(role, cause) | AttemptEvent::Failed(role, cause)) => {
                self.failed_alone(role, cause, terms)
            }
            (_, AttemptEvent::Refused(role)) => self.failed_alone(role, Cause::PeerLost, terms),
            _ => AttemptAction::Wait,
        }
    }

    fn send(&mut self) -> AttemptAction {
        self.stage = if self.in_turn { Stage::Reading } else { Stage::Sent };
        self.tries += 1;
        self.refusals = 0;
        AttemptAction::Send
    }

    /// Nothing was sent to a worker, so another pair can be tried.
    fn refused(&mut self, role: Leg, terms: &mut AttemptContext<'_>) -> AttemptAction {
        self.shun(role);
        self.refusals += 1;
        if self.refusals < ROUTER_PAIRS_MAX {
            self.stage = Stage::Pausing;
            return AttemptAction::Retry(terms.now);
        }
        match self.failing {
            Some((until, cause)) => {
                self.refusals = 0;
                self.wait(until, cause, terms)
            }
            None => self.end(AttemptAction::Fail(Cause::PeerLost)),
        }
    }

    /// Handles a failure of a prefill-first attempt: the only worker with the request has failed
    /// it, or decode refuses the connection.
    fn failed_alone(
        &mut self,
        role: Leg,
        cause: Cause,
        terms: &mut AttemptContext<'_>,
    ) -> AttemptAction {
        // The client is still connected, so the worker lost its connection to the router.
        let cause = if cause == Cause::ClientGone { Cause::PeerLost } else { cause };
        match cause {
            Cause::Overloaded | Cause::Draining | Cause::Incompatible => {
                self.note_refusal(role, cause);
            }
            cause if cause.retry() != Retry::Never => self.shun(role),
            _ => {}
        }
        self.again(cause, terms)
    }

    /// Handles a failure that a leg reports. The cause decides which worker to avoid.
    fn failed(&mut self, role: Leg, cause: Cause, terms: &mut AttemptContext<'_>) -> AttemptAction {
        let other = role.other();
        match cause {
            Cause::Draining if is_failpoint_active("worker that drains ends its requests") => {
                return self.end(AttemptAction::Fail(cause));
            }
            Cause::Overloaded | Cause::Draining => self.note_refusal(role, cause),
            Cause::Incompatible => self.note_refusal(other, cause),
            Cause::ClientGone => {
                // The client is still connected: the other leg's connection was lost.
                self.shun(other);
                return self.again(Cause::PeerLost, terms);
            }
            Cause::Internal => self.shun(role),
            cause if cause.retry() != Retry::Never => {
                // The leg lost the other worker. The network fault can be at either of them.
                self.shun(other);
                self.shun(role);
            }
            _ => {}
        }
        self.again(cause, terms)
    }

    fn note_refusal(&mut self, role: Leg, cause: Cause) {
        let worker = self.worker(role);
        self.avoid.unwilling.extend(worker);
        if cause == Cause::Draining {
            self.avoid.draining.extend(worker);
        }
    }

    fn shun(&mut self, role: Leg) {
        let worker = self.worker(role);
        self.avoid.failed.extend(worker);
        self.accused[role as usize] = worker;
    }

    fn again(&mut self, cause: Cause, terms: &mut AttemptContext<'_>) -> AttemptAction {
        let most = match cause.retry() {
            Retry::Never => return self.end(AttemptAction::Fail(cause)),
            Retry::Once => terms.retries.most().min(1),
            Retry::Allowed => terms.retries.most(),
        };
        let is_resumable =
            self.resumable && !is_failpoint_active("stream that has begun is not resumed");
        let lost = self.begun && !is_resumable;
        if lost || self.tries > most {
            return self.end(AttemptAction::Fail(cause));
        }
        let until = self.failing.map_or(terms.now + RETRY_TIME_MAX, |(until, _)| until);
        let limit = RetryLimit { until, deadline: terms.deadline };
        match terms.retries.grant(self.waits, terms.now, limit, terms.chance) {
            Some(at) => self.pause(at, until, cause),
            None => self.end(AttemptAction::Fail(cause)),
        }
    }

    /// Tries to choose workers again later. Nothing was sent since the last wait.
    fn wait(&mut self, until: Instant, cause: Cause, terms: &AttemptContext<'_>) -> AttemptAction {
        let limit = RetryLimit { until, deadline: terms.deadline };
        match terms.retries.end_of_wait(self.waits, terms.now, limit, terms.chance) {
            Some(at) => self.pause(at, until, cause),
            None => self.end(AttemptAction::Fail(cause)),
        }
    }

    fn pause(&mut self, at: Instant, until: Instant, cause: Cause) -> AttemptAction {
        self.waits += 1;
        self.failing = Some((until, cause));
        self.stage = Stage::Pausing;
        AttemptAction::Retry(at)
    }

    fn end(&mut self, next: AttemptAction) -> AttemptAction {
        self.stage = Stage::Over;
        next
    }
}

#[cfg(test)]
#[path = "attempts_tests.rs"]
mod tests;
