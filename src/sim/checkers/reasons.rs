//! The reasons for which a request can fail: the effects of the injected faults, their places and
//! times.
//!
//! A fault has a place. Its effects last from its start until all affected parties have noticed and
//! repaired it. A request can fail for this reason only if it was at that place in that time. A
//! delay alone is no reason, unless the request's deadline has passed. A silence shorter than the
//! peers' timeouts is also no reason.

use crate::limits::{DIAL_HOLD_OFF, PEER_PROOF_TIME_MAX, PEER_SILENCE_MAX};
use crate::sim::faults::ROUTER;
use crate::sim::machines::Machines;
use crate::stdx::event_queue::{Nanos, SECOND};
use std::ops::Range;

/// Longest time of a few messages in a row, with some loss of packets and slow threads.
pub const WEATHER: Nanos = SECOND;
/// Time from a fault's end until all parties have noticed the loss and have dialled again.
const REPAIRED: Nanos = (PEER_SILENCE_MAX.as_nanos()
    + DIAL_HOLD_OFF.as_nanos()
    + PEER_PROOF_TIME_MAX.as_nanos()) as Nanos
    + WEATHER;
/// The shortest silence that looks like a dead peer: a process that is dialled and does not answer.
const LOST_AFTER: Nanos = PEER_PROOF_TIME_MAX.as_nanos() as Nanos;

/// The place of a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultSite {
    /// In a process.
    Host(usize),
    /// Between two processes.
    Way(usize, usize),
}

impl FaultSite {
    /// Whether requests of this pair use this place.
    fn concerns(self, pair: [usize; 2]) -> bool {
        let goes = |host: usize| host == ROUTER || pair.contains(&host);
        match self {
            FaultSite::Host(host) => goes(host),
            FaultSite::Way(one, other) => goes(one) && goes(other),
        }
    }
}

/// The effect of a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    /// Connections break.
    Breaks,
    /// The place is silent.
    Silences,
    /// Writes of NICs or bytes of streams are held back.
    Holds,
    /// All work takes longer.
    Delays,
    /// The clock skips time.
    Skips(Nanos),
}

#[derive(Clone, Copy, Debug)]
struct Reason {
    effect: Effect,
    place: FaultSite,
    /// When the fault began and ended.
    time: (Nanos, Nanos),
    /// When its last effect on a request ends.
    until: Nanos,
}

impl Reason {
    fn is_felt(&self, life: &Range<Nanos>) -> bool {
        self.time.0 <= life.end && self.until >= life.start
    }
}

/// A worker that drains, or changes its role.
#[derive(Clone, Copy, Debug)]
struct Leave {
    host: usize,
    /// Whether it changes its role. Its connections stay open, so it does not wait for clients that
    /// can still send requests.
    turns: bool,
    from: Nanos,
    /// Time at which it had finished its requests and ended.
    ended: Option<Nanos>,
    /// Time at which its successor serves.
    until: Option<Nanos>,
}

/// All faults injected so far.
#[derive(Debug)]
pub struct Reasons {
    machines: Machines,
    faults: Vec<Reason>,
    leaves: Vec<Leave>,
}

impl Reasons {
    /// Creates the state without faults, for a cluster on these machines.
    pub fn new(machines: Machines) -> Reasons {
        Reasons { machines, faults: Vec::new(), leaves: Vec::new() }
    }

    /// A fault at `place`, from now until `over`.
    pub fn add(&mut self, effect: Effect, place: FaultSite, now: Nanos, over: Nanos) {
        self.faults.push(Reason { effect, place, time: (now, over), until: over + REPAIRED });
    }

    /// A worker drains from now on, or (`turns`) starts to change its role.
    pub fn leaves(&mut self, host: usize, turns: bool, now: Nanos) {
        self.leaves.push(Leave { host, turns, from: now, ended: None, until: None });
    }

    /// It has ended.
    pub fn ends(&mut self, host: usize, now: Nanos) {
        for leave in self.leaves.iter_mut().filter(|leave| leave.host == host) {
            leave.ended.get_or_insert(now);
        }
    }

    /// Its successor serves.
    pub fn returns(&mut self, host: usize, now: Nanos) {
        for leave in self.leaves.iter_mut().filter(|leave| leave.host == host) {
            leave.until.get_or_insert(now);
        }
    }

    /// Workers that drain or have no successor yet, with the time since which they do.
    pub fn leaving(&self) -> impl Iterator<Item = (usize, Nanos)> {
        let leaving = self.leaves.iter().filter(|leave| leave.until.is_none());
        leaving.map(|leave| (leave.host, leave.from))
    }

    /// Time at which the effects of all ended faults are over.
    pub fn quiet_from(&self) -> Nanos {
        let faults = self.faults.iter().map(|reason| reason.until);
        let leaves =
            self.leaves.iter().filter_map(|leave| leave.until).map(|until| until + REPAIRED);
        faults.chain(leaves).max().unwrap_or(0)
    }

    /// Whether a request can have reached a worker that had ended, or peers that do not know its
    /// successor yet. At the time `chosen`, `pair` was chosen for it. A worker that ended later has
    /// finished its requests first. If one worker gets the request only after the other has
    /// answered, `late` is that delay. A worker that changes its role does not wait for clients
    /// that can still send requests. For such a worker, the time at which a leg `came` counts.
    pub fn has_changed(
        &self,
        pair: [usize; 2],
        chosen: Nanos,
        late: Nanos,
        came: [Nanos; 2],
    ) -> bool {
        self.leaves.iter().any(|leave| {
            let came = pair.into_iter().zip(came).filter(|&(host, _)| host == leave.host);
            let Some(came) = came.map(|(_, came)| came).max() else { return false };
            let came = if leave.turns { came } else { chosen + late };
            leave.ended.is_some_and(|ended| ended <= came)
                && leave.until.is_none_or(|until| until + REPAIRED >= chosen)
        })
    }

    /// Whether one of these workers, chosen at `chosen`, refuses everything that arrives, or starts
    /// to do so within `slack`.
    pub fn takes_nothing(&self, pair: [usize; 2], chosen: Nanos, slack: Nanos) -> bool {
        let is_felt = |leave: &Leave| {
            leave.from <= chosen.saturating_add(slack)
                && leave.until.is_none_or(|until| until + REPAIRED >= chosen)
        };
        self.leaves.iter().any(|leave| pair.contains(&leave.host) && is_felt(leave))
    }

    /// Whether a worker was leaving during this life.
    pub fn may_miss(&self, life: &Range<Nanos>) -> bool {
        let is_felt = |leave: &Leave| {
            leave.from <= life.end && leave.until.is_none_or(|until| until + REPAIRED >= life.start)
        };
        self.leaves.iter().any(is_felt)
    }

    /// Whether a request with this life and these pairs can have lost a peer.
    pub fn may_lose(&self, life: &Range<Nanos>, pairs: &[[usize; 2]]) -> bool {
        let felt = |reason: &Reason| {
            // For a request that found no pair, any worker can have been missing.
            reason.is_felt(life)
                && (pairs.is_empty() || pairs.iter().any(|&pair| reason.place.concerns(pair)))
        };
        let breaks = |reason: &Reason| match reason.effect {
            Effect::Breaks => true,
            Effect::Holds => self.breaks_lanes(reason, pairs),
            Effect::Skips(by) => by >= LOST_AFTER,
            Effect::Silences | Effect::Delays => false,
        };
        if self.faults.iter().any(|reason| breaks(reason) && felt(reason))
            || self.may_break(life, pairs)
        {
            return true;
        }
        // Consecutive silences count as one.
        let silences =
            self.faults.iter().filter(|reason| reason.effect == Effect::Silences && felt(reason));
        let mut silences: Vec<(Nanos, Nanos)> = silences.map(|reason| reason.time).collect();
        silences.sort_unstable();
        let mut run = (0, 0);
        silences.into_iter().any(|(from, over)| {
            run = if from <= run.1 + WEATHER { (run.0, over.max(run.1)) } else { (from, over) };
            run.1 - run.0 >= LOST_AFTER
        })
    }

    /// Whether queue pairs between workers of such a request can have broken. Either one of them
    /// has died, or a write stayed unacknowledged for as long as its NIC retries.
    pub fn may_break(&self, life: &Range<Nanos>, pairs: &[[usize; 2]]) -> bool {
        self.faults.iter().filter(|reason| reason.is_felt(life)).any(|reason| {
            let concerned = pairs.iter().filter(|&&pair| reason.place.concerns(pair));
            let mut patience =
                concerned.filter_map(|&[one, other]| self.machines.patience(one, other));
            let time = reason.time.1 - reason.time.0;
            match (reason.effect, reason.place) {
                (Effect::Breaks, _) => patience.next().is_some(),
                // A write that already waited can also count.
                (Effect::Silences | Effect::Holds, FaultSite::Way(..)) => {
                    patience.any(|patience| time >= patience / 2)
                }
                _ => false,
            }
        })
    }

    /// Whether TCP lanes between workers of such a request can have broken.
    pub fn may_break_lanes(&self, life: &Range<Nanos>, pairs: &[[usize; 2]]) -> bool {
        let mut felt = self.faults.iter().filter(|reason| reason.is_felt(life));
        felt.any(|reason| self.breaks_lanes(reason, pairs))
    }

    fn breaks_lanes(&self, reason: &Reason, pairs: &[[usize; 2]]) -> bool {
        let mut concerned = pairs.iter().filter(|&&pair| reason.place.concerns(pair));
        let breaks = match reason.effect {
            Effect::Breaks => true,
            // A lane that receives nothing for this long does not prove itself, even if its host's
            // clock advanced only for a moment.
            Effect::Holds => reason.time.1 - reason.time.0 >= LOST_AFTER,
            Effect::Silences => {
                matches!(reason.place, FaultSite::Way(..))
                    && reason.time.1 - reason.time.0 >= LOST_AFTER
            }
            Effect::Skips(by) => by >= LOST_AFTER,
            Effect::Delays => false,
        };
        breaks && concerned.any(|&[one, other]| self.machines.may_stream(one, other))
    }

    /// The time that a request with this life can have lost because of clock skips.
    pub fn skipped(&self, life: &Range<Nanos>, pairs: &[[usize; 2]]) -> Nanos {
        let skips =
            self.faults.iter().filter(|reason| (life.start..=life.end).contains(&reason.time.0));
        let skips = skips.filter(|reason| pairs.iter().any(|&pair| reason.place.concerns(pair)));
        skips.map(|reason| if let Effect::Skips(by) = reason.effect { by } else { 0 }).sum()
    }
}
