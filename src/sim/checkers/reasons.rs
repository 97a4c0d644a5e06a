//! Why a request may fail: what the faults that were carried out can do, to whom, and from when to when.
//!
//! A fault has a place, and effects from its beginning until whoever is concerned has noticed and what broke stands
//! again. A request fails for a reason only if it was at that place in that time. What merely takes longer is no
//! reason but for whose time is up; nor is a silence that is shorter than what peers put up with.

use crate::limits::{DIAL_HOLD_OFF, PEER_PROOF_TIME_MAX, PEER_SILENCE_MAX};
use crate::sim::agenda::{Nanos, SECOND};
use crate::sim::faults::ROUTER;
use crate::sim::machines::Machines;
use std::ops::Range;

/// What some messages in a row take at most where now and then one is lost and threads lag.
pub const WEATHER: Nanos = SECOND;
/// From a fault's end until all have noticed that something was lost, and have dialled anew.
const REPAIRED: Nanos = (PEER_SILENCE_MAX.as_nanos()
    + DIAL_HOLD_OFF.as_nanos()
    + PEER_PROOF_TIME_MAX.as_nanos()) as Nanos
    + WEATHER;
/// The shortest silence that looks like death: of a process that is being dialled.
const LOST_AFTER: Nanos = PEER_PROOF_TIME_MAX.as_nanos() as Nanos;

/// Where something goes wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// In a process.
    Host(usize),
    /// Between two.
    Way(usize, usize),
}

impl Place {
    /// Whether requests of this pair go there.
    fn concerns(self, pair: [usize; 2]) -> bool {
        let goes = |host: usize| host == ROUTER || pair.contains(&host);
        match self {
            Place::Host(host) => goes(host),
            Place::Way(one, other) => goes(one) && goes(other),
        }
    }
}

/// What a fault does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    /// Connections break.
    Breaks,
    /// Nothing is heard from there.
    Silences,
    /// What NICs write, or streams carry, is held back.
    Holds,
    /// All takes longer.
    Delays,
    /// Time that there was is over.
    Skips(Nanos),
}

#[derive(Clone, Copy, Debug)]
struct Reason {
    effect: Effect,
    place: Place,
    /// The fault's.
    time: (Nanos, Nanos),
    /// Requests may feel it until then.
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
    /// Whose connections stand when it has, so that it waits for nobody who may ask it still.
    turns: bool,
    from: Nanos,
    /// It has finished what it had, and ended.
    ended: Option<Nanos>,
    /// Another one is there.
    until: Option<Nanos>,
}

/// All that was done so far.
#[derive(Debug)]
pub struct Reasons {
    machines: Machines,
    faults: Vec<Reason>,
    leaves: Vec<Leave>,
}

impl Reasons {
    /// Nothing yet, to a cluster on these machines.
    pub fn new(machines: Machines) -> Reasons {
        Reasons { machines, faults: Vec::new(), leaves: Vec::new() }
    }

    /// A fault at `place`, from now until `over`.
    pub fn add(&mut self, effect: Effect, place: Place, now: Nanos, over: Nanos) {
        self.faults.push(Reason { effect, place, time: (now, over), until: over + REPAIRED });
    }

    /// A worker drains from now on, or (`turns`) is about to have another role.
    pub fn leaves(&mut self, host: usize, turns: bool, now: Nanos) {
        self.leaves.push(Leave { host, turns, from: now, ended: None, until: None });
    }

    /// It has ended.
    pub fn ends(&mut self, host: usize, now: Nanos) {
        for leave in self.leaves.iter_mut().filter(|leave| leave.host == host) {
            leave.ended.get_or_insert(now);
        }
    }

    /// Another one is in its place.
    pub fn returns(&mut self, host: usize, now: Nanos) {
        for leave in self.leaves.iter_mut().filter(|leave| leave.host == host) {
            leave.until.get_or_insert(now);
        }
    }

    /// Workers that drain, or are not back, and since when.
    pub fn leaving(&self) -> impl Iterator<Item = (usize, Nanos)> {
        let leaving = self.leaves.iter().filter(|leave| leave.until.is_none());
        leaving.map(|leave| (leave.host, leave.from))
    }

    /// When nothing is felt any more of what is over.
    pub fn quiet_from(&self) -> Nanos {
        let faults = self.faults.iter().map(|reason| reason.until);
        let leaves =
            self.leaves.iter().filter_map(|leave| leave.until).map(|until| until + REPAIRED);
        faults.chain(leaves).max().unwrap_or(0)
    }

    /// Whether a request that these were chosen for then may have come to one that had ended, or to peers that do not know yet
    /// who is in its place; before that, its end may cost nobody anything. One of them may be asked first when the other one
    /// has answered, so `late`. Who turns waits for nobody who may ask it still: there it counts when a leg `came`.
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

    /// Whether one of these, chosen then, takes nothing of what comes to it; what comes in `slack` does.
    pub fn takes_nothing(&self, pair: [usize; 2], chosen: Nanos, slack: Nanos) -> bool {
        let is_felt = |leave: &Leave| {
            leave.from <= chosen.saturating_add(slack)
                && leave.until.is_none_or(|until| until + REPAIRED >= chosen)
        };
        self.leaves.iter().any(|leave| pair.contains(&leave.host) && is_felt(leave))
    }

    /// Whether a worker was leaving in this life.
    pub fn may_miss(&self, life: &Range<Nanos>) -> bool {
        let is_felt = |leave: &Leave| {
            leave.from <= life.end && leave.until.is_none_or(|until| until + REPAIRED >= life.start)
        };
        self.leaves.iter().any(is_felt)
    }

    /// Whether a request of this life that was with these pairs may have lost a peer.
    pub fn may_lose(&self, life: &Range<Nanos>, pairs: &[[usize; 2]]) -> bool {
        let felt = |reason: &Reason| {
            // Who found no pair may have missed any worker.
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
        // Silences one after the other are one.
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

    /// Whether queue pairs between workers that such a request was with may have broken: one of them has died, or what
    /// one wrote was not acknowledged for as long as its NIC tries.
    pub fn may_break(&self, life: &Range<Nanos>, pairs: &[[usize; 2]]) -> bool {
        self.faults.iter().filter(|reason| reason.is_felt(life)).any(|reason| {
            let concerned = pairs.iter().filter(|&&pair| reason.place.concerns(pair));
            let mut patience =
                concerned.filter_map(|&[one, other]| self.machines.patience(one, other));
            let time = reason.time.1 - reason.time.0;
            match (reason.effect, reason.place) {
                (Effect::Breaks, _) => patience.next().is_some(),
                // What has waited for a while before may count, too.
                (Effect::Silences | Effect::Holds, Place::Way(..)) => {
                    patience.any(|patience| time >= patience / 2)
                }
                _ => false,
            }
        })
    }

    /// Whether lanes of tcp between workers that such a request was with may have broken.
    pub fn may_break_lanes(&self, life: &Range<Nanos>, pairs: &[[usize; 2]]) -> bool {
        let mut felt = self.faults.iter().filter(|reason| reason.is_felt(life));
        felt.any(|reason| self.breaks_lanes(reason, pairs))
    }

    fn breaks_lanes(&self, reason: &Reason, pairs: &[[usize; 2]]) -> bool {
        let mut concerned = pairs.iter().filter(|&&pair| reason.place.concerns(pair));
        let breaks = match reason.effect {
            Effect::Breaks => true,
            // A lane on which nothing comes for so long does not prove itself, also where so long was but a moment.
            Effect::Holds => reason.time.1 - reason.time.0 >= LOST_AFTER,
            Effect::Silences => {
                matches!(reason.place, Place::Way(..))
                    && reason.time.1 - reason.time.0 >= LOST_AFTER
            }
            Effect::Skips(by) => by >= LOST_AFTER,
            Effect::Delays => false,
        };
        breaks && concerned.any(|&[one, other]| self.machines.may_stream(one, other))
    }

    /// How much of its time a request of this life may have missed.
    pub fn skipped(&self, life: &Range<Nanos>, pairs: &[[usize; 2]]) -> Nanos {
        let skips =
            self.faults.iter().filter(|reason| (life.start..=life.end).contains(&reason.time.0));
        let skips = skips.filter(|reason| pairs.iter().any(|&pair| reason.place.concerns(pair)));
        skips.map(|reason| if let Effect::Skips(by) = reason.effect { by } else { 0 }).sum()
    }
}
