//! One request behind a router: when its legs are sent, when it is tried again, and how it ends.
//!
//! ```text
//!             both legs' connections stand     decode's first bytes
//! Connecting ─────────────────────────▶ Sent ─────────────────────▶ Passing ──▶ landed
//!    ▲  │ a worker takes none             │ a leg fails               │ decode is lost
//!    │  ▼                                 ▼                           ▼
//!    └─ Pausing ◀─── may be tried again ──┴─── and what the client has is known
//!                                         └────────── else ───────────┴────▶ failed
//! ```
//! A try whose prefill leg comes first ([`Flight::in_turn`]) has two stages more, between Connecting and Sent:
//! ```text
//!             prefill's connection stands       it has answered           decode's connection stands
//! Connecting ───────────────────────────▶ Reading ──────────▶ Joining ─────────────────────────────▶ Sent
//!                                            │ it fails           │ decode takes none, and there is no other
//!                                            └────────────────────┴──▶ Pausing or failed
//! ```
//! Who fails there has failed alone: the other worker has not been asked. What prefill keeps is nobody's yet: it is as good
//! for another decode worker.
//!
//! Owns: that table ([`Flight::take`], and `take_in_turn` of these two); whom a try must do without. Invariants: nothing is sent before the connections
//! of the legs that leave stand, so that a worker that takes none costs no room anywhere (but for prefill's work in a
//! try in turn); each try has a room of its own; a flight ends once. Without I/O, clock and chance; the router and the simulator carry out the same [`Next`].
//! Not here: who is chosen (`router`), how many tries there are in all (`retries`).

use super::loads::WorkerNumber;
use super::retries::Retries;
use super::router::Role;
use crate::cause::Cause;
use crate::limits::{RETRY_TIME_MAX, ROUTER_LOST_PREFILL_TIME, ROUTER_PAIRS_MAX};
use crate::stdx::planted::is_planted;
use std::time::Instant;

/// Whom a request is not sent to again.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Avoid {
    /// Those that failed it: others are better, if there are any.
    pub failed: Vec<WorkerNumber>,
    /// Those that will not serve it, as they said.
    pub unwilling: Vec<WorkerNumber>,
}

impl Avoid {
    /// Whether the request has failed nowhere so far.
    pub fn is_empty(&self) -> bool {
        self.failed.is_empty() && self.unwilling.is_empty()
    }
}

/// What happens to a flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum News {
    /// Connections were asked for; so many do not stand yet.
    Opened(u32),
    /// One of them stands.
    Connected,
    /// One of them was refused; nothing was sent over it.
    Refused(Role),
    /// Prefill, asked first, has read the prompt, and said where its KV is kept.
    Read,
    /// The client got something of decode's answer.
    Passes {
        /// Whether what it has is known, so that it can go on elsewhere.
        resumable: bool,
    },
    /// The client got what prefill sampled, and that is known; decode has said nothing yet.
    Told,
    /// A leg ended with an error that it told.
    Failed(Role, Cause),
    /// A leg's connection broke, or it took too long.
    Lost(Role, Cause),
    /// Decode's answer is whole.
    Landed,
}

/// What is to be done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Next {
    /// Nothing.
    On,
    /// The requests of the legs whose turn it is leave: both, or the only one that is connected.
    Send,
    /// A connection to decode is asked for; [`News::Opened`] follows.
    Join,
    /// Another decode worker is chosen for what prefill keeps, [`Flight::rejoin`], and a connection to it asked for; where
    /// there is none, [`News::Lost`] says so.
    Rejoin,
    /// Decode has until then to decide.
    Hurry(Instant),
    /// Decode has decided and may take its time again.
    Calm,
    /// What runs is cancelled; at that time, workers are chosen anew.
    Again(Instant),
    /// The answer is whole; what prefill still does is left alone.
    Land,
    /// What runs is cancelled, and the client is told why.
    Fail(Cause),
}

/// Where it stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// So many connections do not stand, and nothing was sent;
    Connecting(u32),
    /// prefill alone was asked;
    Reading,
    /// it has answered, and decode's connection does not stand;
    Joining,
    /// it was sent, and the client has heard nothing of this try;
    Sent,
    /// the client gets the answer piece by piece;
    Passing,
    /// waits for the next try;
    Pausing,
    /// has ended.
    Over,
}

/// One request.
#[derive(Clone, Debug)]
pub struct Flight {
    stage: Stage,
    /// Who serves this try: of which prefill and decode worker, where both roles take part.
    legs: [Option<WorkerNumber>; 2],
    avoid: Avoid,
    /// By role: who had to do with its last failure.
    accused: [Option<WorkerNumber>; 2],
    /// Times it was sent since the client last got something.
    tries: u32,
    /// Pairs of this try that took no connection.
    refusals: u32,
    /// Times it waited since then.
    waits: u32,
    /// Since a leg failed: when no further try is worth while, and why it failed.
    failing: Option<(Instant, Cause)>,
    /// Whether the client has some of the answer.
    begun: bool,
    resumable: bool,
    /// Whether the prefill leg broke, so that decode has little time left.
    prefill_lost: bool,
    /// Whether this try's prefill leg is sent first, and decode's when it has answered.
    in_turn: bool,
}

/// The clock and chance of a step, and the turns of all.
#[derive(Debug)]
pub struct Terms<'a> {
    /// The turn's time.
    pub now: Instant,
    /// A number drawn for this step.
    pub chance: u64,
    /// When the client waits no longer, if it has said.
    pub deadline: Option<Instant>,
    /// How many tries there are.
    pub retries: &'a mut Retries,
}

impl Default for Flight {
    fn default() -> Self {
        Self {
            stage: Stage::Pausing,
            legs: [None; 2],
            avoid: Avoid::default(),
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

impl Flight {
    /// One that does without these from the start.
    pub fn without(avoid: Avoid) -> Flight {
        Flight { avoid, ..Flight::default() }
    }

    /// Whom the next try must do without.
    pub fn avoid(&self) -> &Avoid {
        &self.avoid
    }

    /// Who may be to blame for its last failure.
    pub fn accused(&self) -> impl Iterator<Item = WorkerNumber> {
        self.accused.into_iter().flatten()
    }

    /// Whether this try was sent and has not come to anything.
    pub fn is_waiting(&self) -> bool {
        self.stage == Stage::Sent
    }

    /// Whether decode has little time left, since prefill was lost.
    pub fn has_lost_prefill(&self) -> bool {
        self.prefill_lost
    }

    /// Whether it is not its first try.
    pub fn is_retry(&self) -> bool {
        self.failing.is_some()
    }

    /// Who serves a leg of this try.
    pub fn worker(&self, role: Role) -> Option<WorkerNumber> {
        self.legs[role as usize]
    }

    /// These workers were chosen.
    pub fn choose(&mut self, prefill: Option<WorkerNumber>, decode: Option<WorkerNumber>) {
        self.legs = [prefill, decode];
        (self.prefill_lost, self.accused) = (false, [None; 2]);
        self.in_turn &= is_planted("turns outlive their try");
        self.stage = Stage::Connecting(0);
    }

    /// The pair that was just chosen is asked one after the other: prefill, and decode once that has answered.
    pub fn in_turn(&mut self) {
        self.in_turn = true;
    }

    /// This decode worker was chosen for what prefill keeps.
    pub fn rejoin(&mut self, decode: WorkerNumber) {
        self.legs[Role::Decode as usize] = Some(decode);
        self.accused = [None; 2];
    }

    /// Nobody can be chosen; `may_come` says whether that may change by itself.
    pub fn nobody(&mut self, may_come: bool, terms: &Terms<'_>) -> Next {
        match self.failing {
            Some((until, cause)) if may_come => self.wait(until, cause, terms),
            Some((_, cause)) => self.end(Next::Fail(cause)),
            None => self.end(Next::Fail(Cause::PeerLost)),
        }
    }

    /// All who can be chosen are foretold to be too late: it ends, before anybody has worked for it.
    pub fn late(&mut self) -> Next {
        self.end(Next::Fail(Cause::Overloaded))
    }

    /// What follows from what happened.
    pub fn take(&mut self, news: News, terms: &mut Terms<'_>) -> Next {
        match (self.stage, news) {
            (Stage::Over | Stage::Pausing, _) => Next::On,
            (Stage::Connecting(_), News::Opened(0)) => self.send(),
            (Stage::Connecting(_), News::Opened(awaited)) => {
                self.stage = Stage::Connecting(awaited);
                Next::On
            }
            (Stage::Connecting(awaited), News::Connected) if awaited > 1 => {
                let stands = u32::from(!is_planted("connection is not counted"));
                self.stage = Stage::Connecting(awaited - stands);
                Next::On
            }
            (Stage::Connecting(_), News::Connected) => self.send(),
            (
                Stage::Connecting(_),
                News::Refused(role) | News::Lost(role, _) | News::Failed(role, _),
            ) => self.refused(role, terms),
            (Stage::Reading | Stage::Joining, news) => self.take_in_turn(news, terms),
            (Stage::Sent | Stage::Passing, News::Passes { resumable }) => {
                self.stage = Stage::Passing;
                self.begun = true;
                self.resumable &= resumable;
                // From here on it is as good as new.
                (self.tries, self.waits, self.failing) = (1, 0, None);
                self.avoid = Avoid::default();
                match std::mem::take(&mut self.prefill_lost) {
                    true => Next::Calm,
                    false => Next::On,
                }
            }
            (Stage::Sent, News::Told) => {
                // The tries are not forgotten: a pair that hands nothing over may tell a token each time.
                self.begun = true;
                Next::On
            }
            (Stage::Sent | Stage::Passing, News::Landed) => self.end(Next::Land),
            // Decode goes on without prefill.
            (Stage::Passing, News::Failed(Role::Prefill, _) | News::Lost(Role::Prefill, _)) => {
                Next::On
            }
            (Stage::Sent, News::Lost(Role::Prefill, _)) => {
                self.shun(Role::Prefill);
                self.prefill_lost = true;
                // Decode learns of it by itself, or has everything and answers.
                Next::Hurry(terms.now + ROUTER_LOST_PREFILL_TIME)
            }
            (Stage::Sent | Stage::Passing, News::Lost(Role::Decode, Cause::Deadline))
                if self.prefill_lost
                    && terms.deadline.is_none_or(|deadline| terms.now < deadline) =>
            {
                self.failed(Role::Decode, Cause::PeerLost, terms)
            }
            // Its client had no more time than that, whoever would have served it.
            (Stage::Sent | Stage::Passing, News::Lost(_, cause @ Cause::Deadline)) => {
                self.again(cause, terms)
            }
            (Stage::Sent | Stage::Passing, News::Lost(role, cause)) => {
                self.shun(role);
                self.again(cause, terms)
            }
            (Stage::Sent | Stage::Passing, News::Failed(role, cause)) => {
                self.failed(role, cause, terms)
            }
            (Stage::Connecting(_) | Stage::Sent | Stage::Passing, _) => Next::On,
        }
    }

    /// The two stages of a try in turn.
    fn take_in_turn(&mut self, news: News, terms: &mut Terms<'_>) -> Next {
        match (self.stage, news) {
            (Stage::Reading, News::Read) => {
                self.stage = Stage::Joining;
                Next::Join
            }
            (Stage::Joining, News::Opened(0) | News::Connected) => {
                self.stage = Stage::Sent;
                Next::Send
            }
            (Stage::Joining, News::Refused(Role::Decode)) if self.refusals < ROUTER_PAIRS_MAX => {
                self.shun(Role::Decode);
                self.refusals += 1;
                Next::Rejoin
            }
            // It was not asked yet, and is not to blame for that it is going.
            (Stage::Joining, News::Failed(Role::Decode, Cause::Draining))
                if self.refusals < ROUTER_PAIRS_MAX =>
            {
                self.avoid.unwilling.extend(self.worker(Role::Decode));
                self.refusals += 1;
                if is_planted("kept KV waits for a decode worker that goes") {
                    Next::On
                } else {
                    Next::Rejoin
                }
            }
            // There is no other one; what this one did was said before.
            (Stage::Joining, News::Lost(Role::Decode, cause)) => {
                self.accused = [None; 2];
                self.again(cause, terms)
            }
            (_, News::Lost(role, cause) | News::Failed(role, cause)) => {
                self.failed_alone(role, cause, terms)
            }
            (_, News::Refused(role)) => self.failed_alone(role, Cause::PeerLost, terms),
            _ => Next::On,
        }
    }

    fn send(&mut self) -> Next {
        self.stage = if self.in_turn { Stage::Reading } else { Stage::Sent };
        self.tries += 1;
        self.refusals = 0;
        Next::Send
    }

    /// Nothing was sent to anybody, so another pair is as good.
    fn refused(&mut self, role: Role, terms: &mut Terms<'_>) -> Next {
        self.shun(role);
        self.refusals += 1;
        if self.refusals < ROUTER_PAIRS_MAX {
            self.stage = Stage::Pausing;
            return Next::Again(terms.now);
        }
        match self.failing {
            Some((until, cause)) => {
                self.refusals = 0;
                self.wait(until, cause, terms)
            }
            None => self.end(Next::Fail(Cause::PeerLost)),
        }
    }

    /// Of a try in turn the one worker that was asked has failed it, or the second one takes no connection.
    fn failed_alone(&mut self, role: Role, cause: Cause, terms: &mut Terms<'_>) -> Next {
        // Its client is here, whatever the worker saw.
        let cause = if cause == Cause::ClientGone { Cause::PeerLost } else { cause };
        match cause {
            Cause::Overloaded | Cause::Draining | Cause::Incompatible => {
                self.avoid.unwilling.extend(self.worker(role));
            }
            cause if cause.may_be_retried() => self.shun(role),
            _ => {}
        }
        self.again(cause, terms)
    }

    /// A leg has said why it failed, which says whom to do without.
    fn failed(&mut self, role: Role, cause: Cause, terms: &mut Terms<'_>) -> Next {
        let other = role.other();
        match cause {
            Cause::Overloaded | Cause::Draining => self.avoid.unwilling.extend(self.worker(role)),
            Cause::Incompatible => self.avoid.unwilling.extend(self.worker(other)),
            Cause::ClientGone if !is_planted("lost leg is its client's end") => {
                // Whose client is here: the other leg's connection was lost.
                self.shun(other);
                return self.again(Cause::PeerLost, terms);
            }
            Cause::Internal => self.shun(role),
            cause if cause.may_be_retried() => {
                // The other one was lost to it, which of them so ever has lost the network.
                self.shun(other);
                self.shun(role);
            }
            _ => {}
        }
        self.again(cause, terms)
    }

    fn shun(&mut self, role: Role) {
        let worker = self.worker(role);
        self.avoid.failed.extend(worker);
        self.accused[role as usize] = worker;
    }

    fn again(&mut self, cause: Cause, terms: &mut Terms<'_>) -> Next {
        let most = match cause {
            // Most likely it is the request's own doing, and would be again.
            Cause::Internal => terms.retries.most().min(1),
            _ => terms.retries.most(),
        };
        let lost = self.begun && !self.resumable;
        if !cause.may_be_retried() || lost || self.tries > most {
            return self.end(Next::Fail(cause));
        }
        let until = self.failing.map_or(terms.now + RETRY_TIME_MAX, |(until, _)| until);
        let until = terms.deadline.map_or(until, |deadline| until.min(deadline));
        match terms.retries.grant(self.waits, terms.now, until, terms.chance) {
            Some(at) => self.pause(at, until, cause),
            None => self.end(Next::Fail(cause)),
        }
    }

    /// Looks again later for somebody; nothing was sent since the last time.
    fn wait(&mut self, until: Instant, cause: Cause, terms: &Terms<'_>) -> Next {
        match terms.now + terms.retries.delay(self.waits, terms.chance) {
            at if at <= until => self.pause(at, until, cause),
            _ => self.end(Next::Fail(cause)),
        }
    }

    fn pause(&mut self, at: Instant, until: Instant, cause: Cause) -> Next {
        self.waits += 1;
        self.failing = Some((until, cause));
        self.stage = Stage::Pausing;
        Next::Again(at)
    }

    fn end(&mut self, next: Next) -> Next {
        self.stage = Stage::Over;
        next
    }
}

#[cfg(test)]
#[path = "flight_tests.rs"]
mod tests;
