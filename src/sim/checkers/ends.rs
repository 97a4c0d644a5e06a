//! Every request ends, once and in time; and well, unless something that was done to it explains how it failed.

use super::reasons::{Reasons, WEATHER};
use super::{Checked, Checker, Finding};
use crate::cause::Cause;
use crate::cluster::router::Role;
use crate::config::resolved::Flow;
use crate::limits::KEPT_KV_LIFE;
use crate::sched::mailbox::Outcome;
use crate::sim::agenda::{MILLI, Nanos, SECOND};
use crate::sim::plan::Plan;
use crate::sim::router::LegName;

/// How long a request takes at most where nothing goes wrong, and how much longer for each that came before it and has
/// not ended.
const SERVED: (Nanos, Nanos) = (10 * SECOND, 50 * MILLI);
/// From the end of a request's time until its client has heard of that.
const ANSWERED: Nanos = 2 * SECOND;

/// Two workers that were chosen for a request.
#[derive(Clone, Debug)]
struct Try {
    /// Which of its tries: another decode worker may claim what was read in the same one.
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
    /// How long it may take in calm.
    served: Nanos,
    over: bool,
    tries: Vec<Try>,
    /// One of its legs was sent twice.
    doubled: bool,
    /// Its client went away.
    left: bool,
    /// Somebody had it end.
    aborted: bool,
    /// It has left the router.
    sent: bool,
    /// A worker that drains, or hangs, took nothing of it.
    turned_away: bool,
    /// Nobody else is in its way, either.
    must_succeed: bool,
}

impl Try {
    /// By role: when its leg came to the worker, or will have come.
    fn came(&self) -> [Nanos; 2] {
        let taken = match self.pair {
            // Who serves alone takes one leg.
            [one, other] if one == other => [self.taken[Role::Decode as usize]; 2],
            _ => self.taken,
        };
        taken.map(|taken| taken.unwrap_or(Nanos::MAX))
    }
}

impl Entry {
    /// Until when it has to be over.
    fn due(&self, reasons: &Reasons) -> Nanos {
        self.begun.max(reasons.quiet_from()) + self.served.min(self.patience + ANSWERED)
    }
}

/// What a plan excuses.
#[derive(Clone, Copy, Debug)]
struct Slack {
    /// Workers have places for all requests.
    ample: bool,
    /// How long places may be taken by nobody: by KV that waits for whoever claims it late.
    unclaimed: Nanos,
    /// How long after it was chosen a worker may be asked first.
    late: Nanos,
}

/// All requests so far.
#[derive(Debug)]
pub struct Ends {
    entries: Vec<Entry>,
    open: usize,
    /// Workers that serve without a second one.
    lone: Vec<usize>,
    slack: Slack,
    /// When the last one ended.
    last: Nanos,
}

impl Ends {
    /// No requests.
    pub fn new(plan: &Plan) -> Ends {
        let late = if plan.flow == Flow::Dual { 0 } else { WEATHER };
        let slack = Slack { ample: plan.is_ample(), unclaimed: plan.unclaimed(), late };
        Ends { entries: Vec::new(), open: 0, lone: Vec::new(), slack, last: 0 }
    }

    /// Whether a worker serves without a second one from now on, where it must be.
    pub fn set_lone(&mut self, worker: usize, is_lone: bool) {
        self.lone.retain(|&lone| lone != worker);
        self.lone.extend(is_lone.then_some(worker));
    }

    /// The next request has begun, and waits so long.
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

    /// These workers were chosen for a request, in this one of its tries.
    pub fn chosen(&mut self, id: usize, attempt: u32, pair: [usize; 2], now: Nanos) {
        let tries = &mut self.entries[id].tries;
        // Prefill may have read for it before decode is chosen anew.
        let before = tries.last().filter(|last| last.attempt == attempt);
        let read = before.and_then(|last| last.taken[Role::Prefill as usize]);
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

    /// One of its legs was sent twice: a room that is open is refused to the newcomer.
    pub fn doubled(&mut self, id: usize) {
        self.entries[id].doubled = true;
    }

    /// Its client goes away.
    pub fn left(&mut self, id: usize) {
        self.entries[id].left = true;
    }

    /// Somebody has it end.
    pub fn aborted(&mut self, id: usize) {
        self.entries[id].aborted = true;
    }

    /// It is sent to its workers, which is not done once it was aborted.
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

    /// A worker that takes nothing new has said so.
    pub fn turned_away(&mut self, id: usize) {
        self.entries[id].turned_away = true;
    }

    /// A request is over for its client.
    pub fn ended(
        &mut self,
        id: usize,
        how: Result<Outcome, Cause>,
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
                    "request {id} found nobody, and a worker that reads prompts alone was well"
                ))
            }
            Err(cause) if !entry.is_explained(cause, now, self.slack, reasons) => wrong(format!(
                "request {id} failed ({cause}), which nothing that was done to it explains"
            )),
            _ => Ok(()),
        }
    }

    /// From when on nothing of requests that are over takes a place, if no other ends.
    pub fn cleared_from(&self) -> Nanos {
        self.last + self.slack.unclaimed
    }

    /// Requests that are not over.
    pub fn open(&self) -> usize {
        self.open
    }

    /// Whether one should be over.
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
    /// Whether nobody was chosen for it, where one that reads alone has met nothing.
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
        // Legs find out by themselves that time is up, and one of them may hear it of the other.
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
            // Who has little time left is turned away from a line in which it would not last.
            Cause::Overloaded => !ample || gone + self.served > self.patience,
            Cause::Refused => self.doubled,
            Cause::Deadline => is_up(),
            // What a worker has taken it finishes before it ends; what it has not found no other.
            Cause::PeerLost => lost() || !self.sent && reasons.may_miss(&life),
            // Of a request that somebody ended before this leg came, it was over at the other; and what was kept for a decode
            // worker that had no pages for so long is gone.
            Cause::OtherLeg => {
                let is_late = unclaimed > 0 && now - self.begun >= KEPT_KV_LIFE.as_nanos() as Nanos;
                self.doubled || self.aborted || is_late || is_up() || lost()
            }
            // Of a leg that came too late, or found no place, decode hears as of one that never will.
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
