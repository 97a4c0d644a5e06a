//! Every request ends once and in time. It succeeds, unless an injected fault explains its failure.

use super::reasons::{Reasons, WEATHER};
use super::{Checked, Checker, Finding};
use crate::cause::Cause;
use crate::config::Flow;
use crate::ids::Leg;
use crate::limits::KEPT_KV_LIFE;
use crate::sched::messages::FinishReason;
use crate::sim::plan::Plan;
use crate::sim::router::LegName;
use crate::stdx::event_queue::{MILLI, Nanos, SECOND};

/// Longest time of a request without faults, and the additional time for each earlier request that
/// has not ended.
const SERVED: (Nanos, Nanos) = (10 * SECOND, 50 * MILLI);
/// Time from a request's deadline until its client learns of it.
const ANSWERED: Nanos = 2 * SECOND;

/// The two workers of an attempt.
#[derive(Clone, Debug)]
struct Try {
    /// Number of the attempt. Within one attempt, another decode worker can claim the KV.
    attempt: u32,
    pair: [usize; 2],
    chosen: Nanos,
    /// By role: when the worker took its leg, if it did.
    taken: [Option<Nanos>; 2],
}

#[derive(Clone, Debug)]
struct Entry {
    begun: Nanos,
    patience: Nanos,
    /// Longest time of the request without faults.
    served: Nanos,
    over: bool,
    tries: Vec<Try>,
    /// One of its legs was sent twice.
    doubled: bool,
    /// Its client went away.
    left: bool,
    /// It was aborted.
    aborted: bool,
    /// The router has sent it.
    sent: bool,
    /// A worker that drains or hangs has refused it.
    turned_away: bool,
    /// Whether it must succeed, because no other request competes with it.
    must_succeed: bool,
}

impl Try {
    /// By role: the time at which the leg arrived at the worker; `Nanos::MAX` if it has not
    /// arrived.
    fn came(&self) -> [Nanos; 2] {
        let taken = match self.pair {
            // A worker that serves alone takes one leg.
            [one, other] if one == other => [self.taken[Leg::Decode as usize]; 2],
            _ => self.taken,
        };
        taken.map(|taken| taken.unwrap_or(Nanos::MAX))
    }
}

impl Entry {
    /// Time by which it must have ended.
    fn due(&self, reasons: &Reasons) -> Nanos {
        self.begun.max(reasons.quiet_from()) + self.served.min(self.patience + ANSWERED)
    }
}

/// The exceptions that a plan allows.
#[derive(Clone, Copy, Debug)]
struct Slack {
    /// Workers have slots for all requests.
    ample: bool,
    /// Longest time for which unclaimed KV can occupy a slot.
    unclaimed: Nanos,
    /// Longest time from the choice of a worker to the first request to it.
    late: Nanos,
}

/// All requests so far.
#[derive(Debug)]
pub struct Ends {
    entries: Vec<Entry>,
    open: usize,
    /// Workers that can serve without a second one.
    lone: Vec<usize>,
    slack: Slack,
    /// When the last one ended.
    last: Nanos,
}

impl Ends {
    /// Creates the state without requests.
    pub fn new(plan: &Plan) -> Ends {
        let late = if plan.flow == Flow::Dual { 0 } else { WEATHER };
        let slack = Slack { ample: plan.is_ample(), unclaimed: plan.unclaimed(), late };
        Ends { entries: Vec::new(), open: 0, lone: Vec::new(), slack, last: 0 }
    }

    /// Sets whether a worker can serve without a second worker.
    pub fn set_lone(&mut self, worker: usize, is_lone: bool) {
        self.lone.retain(|&lone| lone != worker);
        self.lone.extend(is_lone.then_some(worker));
    }

    /// The next request has begun. Its client waits for `patience`.
    pub fn begun(&mut self, begun: Nanos, patience: Nanos, must_succeed: bool) {
        let served = SERVED.0 + SERVED.1 * self.open as Nanos + self.slack.unclaimed;
        self.entries.push(Entry {
            begun,
            patience,
            served,
            over: false,
            tries: Vec::new(),
            doubled: false,
            left: false,
            aborted: false,
            sent: false,
            turned_away: false,
            must_succeed,
        });
        self.open += 1;
    }

    /// This pair was chosen for a request in this attempt.
    pub fn chosen(&mut self, id: usize, attempt: u32, pair: [usize; 2], now: Nanos) {
        let tries = &mut self.entries[id].tries;
        // Prefill can have finished before another decode worker is chosen.
        let before = tries.last().filter(|last| last.attempt == attempt);
        let read = before.and_then(|last| last.taken[Leg::Prefill as usize]);
        tries.push(Try { attempt, pair, chosen: now, taken: [read, None] });
    }

    /// A worker has taken its leg.
    pub fn taken(&mut self, leg: LegName, now: Nanos) {
        let mut tries = self.entries[leg.flight].tries.iter_mut().rev();
        if let Some(of_leg) = tries.find(|one| one.attempt == leg.attempt).filter(|_| leg.copy == 0)
        {
            of_leg.taken[leg.role as usize].get_or_insert(now);
        }
    }

    /// Records that one of its legs was sent twice. A worker refuses the second copy if the room is
    /// open.
    pub fn doubled(&mut self, id: usize) {
        self.entries[id].doubled = true;
    }

    /// Its client disconnects.
    pub fn left(&mut self, id: usize) {
        self.entries[id].left = true;
    }

    /// It is aborted.
    pub fn aborted(&mut self, id: usize) {
        self.entries[id].aborted = true;
    }

    /// It is sent to its workers. An aborted request must not be sent.
    pub fn sent(&mut self, id: usize) -> Checked {
        let entry = &mut self.entries[id];
        entry.sent = true;
        match entry.aborted {
            true => Err(Finding::about(
                Checker::Ends,
                id,
                format!("request {id} was sent after it was aborted"),
            )),
            false => Ok(()),
        }
    }

    /// Records that a worker that takes no new requests has refused it.
    pub fn turned_away(&mut self, id: usize) {
        self.entries[id].turned_away = true;
    }

    /// A request has ended for its client.
    pub fn ended(
        &mut self,
        id: usize,
        how: Result<FinishReason, Cause>,
        now: Nanos,
        reasons: &Reasons,
    ) -> Checked {
        let wrong = |what: String| Err(Finding::about(Checker::Ends, id, what));
        let entry = &mut self.entries[id];
        if std::mem::replace(&mut entry.over, true) {
            return wrong(format!("request {id} ended twice"));
        }
        self.open -= 1;
        self.last = now;
        if entry.due(reasons) < now {
            return wrong(format!("request {id} ended too late"));
        }
        match how {
            Err(cause)
                if entry.must_succeed && !entry.left && entry.begun >= reasons.quiet_from() =>
            {
                wrong(format!("request {id} failed ({cause}), and nothing was done to it"))
            }
            Err(Cause::PeerLost) if entry.is_left_alone(now, &self.lone, reasons) => {
                wrong(format!(
                    "request {id} found no worker, and a worker that reads prompts alone was well"
                ))
            }
            Err(cause) if !entry.is_explained(cause, now, self.slack, reasons) => {
                wrong(format!("request {id} failed ({cause}), which no injected fault explains"))
            }
            _ => Ok(()),
        }
    }

    /// Time from which ended requests hold no slot, if no other request ends.
    pub fn cleared_from(&self) -> Nanos {
        self.last + self.slack.unclaimed
    }

    /// Number of requests that have not ended.
    pub fn open(&self) -> usize {
        self.open
    }

    /// Fails if a request should have ended before now.
    pub fn overdue(&self, now: Nanos, reasons: &Reasons) -> Checked {
        let late = |entry: &Entry| !entry.over && entry.due(reasons) < now;
        match self.entries.iter().position(late) {
            Some(id) => Err(Finding::about(
                Checker::Ends,
                id,
                format!("request {id} has not ended in time"),
            )),
            None => Ok(()),
        }
    }
}

impl Entry {
    /// Whether no worker was chosen although a healthy worker could serve alone.
    fn is_left_alone(&self, now: Nanos, lone: &[usize], reasons: &Reasons) -> bool {
        let life = self.begun..now;
        let is_well = |worker: usize| {
            let pair = [worker; 2];
            !reasons.may_lose(&life, &[pair])
                && !reasons.takes_nothing(pair, self.begun, now - self.begun)
        };
        self.tries.is_empty() && lone.iter().any(|&worker| is_well(worker))
    }

    fn is_explained(&self, cause: Cause, now: Nanos, slack: Slack, reasons: &Reasons) -> bool {
        let Slack { ample, unclaimed, late } = slack;
        let life = self.begun..now;
        // Each leg detects the deadline itself, and one leg can learn of it from the other.
        let pairs: Vec<[usize; 2]> = self.tries.iter().map(|one| one.pair).collect();
        let gone = now - self.begun + reasons.skipped(&life, &pairs);
        let is_up = || gone >= self.patience;
        let lost = || {
            self.turned_away
                || reasons.may_lose(&life, &pairs)
                || self
                    .tries
                    .iter()
                    .any(|one| reasons.has_changed(one.pair, one.chosen, late, one.came()))
        };
        match cause {
            Cause::ClientGone => self.left,
            // A request with little time left is refused if its deadline would pass in the queue.
            Cause::Overloaded => !ample || gone + self.served > self.patience,
            Cause::Refused => self.doubled,
            Cause::Deadline => is_up(),
            // A worker finishes its requests before it ends. A request that was not sent found no
            // other worker.
            Cause::PeerLost => lost() || !self.sent && reasons.may_miss(&life),
            // If the request was aborted before this leg arrived, the other leg ended it. If decode
            // had no pages for too long, the kept KV is gone.
            Cause::OtherLeg => {
                let is_late = unclaimed > 0 && now - self.begun >= KEPT_KV_LIFE.as_nanos() as Nanos;
                self.doubled || self.aborted || is_late || is_up() || lost()
            }
            // If a leg arrives too late or finds no slot, decode gets the same answer as for a leg
            // that never arrives.
            Cause::Draining => {
                let slack = if ample { WEATHER } else { Nanos::MAX };
                self.turned_away
                    || reasons.may_lose(&life, &pairs)
                    || self
                        .tries
                        .iter()
                        .any(|one| reasons.takes_nothing(one.pair, one.chosen, slack))
            }
            Cause::Aborted => self.aborted,
            Cause::Unreachable => reasons.may_break(&life, &pairs),
            Cause::Flushed => {
                reasons.may_break(&life, &pairs) || reasons.may_break_lanes(&life, &pairs)
            }
            Cause::Mismatch
            | Cause::Corrupt
            | Cause::Internal
            | Cause::Incompatible
            | Cause::Denied => false,
        }
    }
}
