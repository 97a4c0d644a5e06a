//! Why a request may fail: what the faults that were carried out can do, to whom, and from when to when.
//!
//! A fault has a place, and effects from its beginning until whoever is concerned has noticed and what broke stands
//! again. A request fails for a reason only if it was at that place in that time. What merely takes longer is no
//! reason but for whose time is up; nor is a silence that is shorter than what peers put up with.

use crate::limits::{DIAL_HOLD_OFF, PEER_PROOF_TIME_MAX, PEER_SILENCE_MAX};
use crate::sim::agenda::{Nanos, SECOND};
use crate::sim::faults::ROUTER;
use std::ops::Range;

/// What some messages in a row take at most where now and then one is lost and threads lag.
const WEATHER: Nanos = SECOND;
/// From a fault's end until all have noticed that something was lost, and have dialled anew.
const REPAIRED: Nanos =
    (PEER_SILENCE_MAX.as_nanos() + DIAL_HOLD_OFF.as_nanos() + PEER_PROOF_TIME_MAX.as_nanos()) as Nanos
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

/// All that was done so far.
#[derive(Debug, Default)]
pub struct Reasons(Vec<Reason>);

impl Reasons {
    /// A fault at `place`, from now until `over`.
    pub fn add(&mut self, effect: Effect, place: Place, now: Nanos, over: Nanos) {
        self.0.push(Reason { effect, place, time: (now, over), until: over + REPAIRED });
    }

    /// When nothing is felt any more.
    pub fn quiet_from(&self) -> Nanos {
        self.0.iter().map(|reason| reason.until).max().unwrap_or(0)
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
            Effect::Skips(by) => by >= LOST_AFTER,
            Effect::Silences | Effect::Delays => false,
        };
        if self.0.iter().any(|reason| breaks(reason) && felt(reason)) {
            return true;
        }
        // Silences one after the other are one.
        let silences = self.0.iter().filter(|reason| reason.effect == Effect::Silences && felt(reason));
        let mut silences: Vec<(Nanos, Nanos)> = silences.map(|reason| reason.time).collect();
        silences.sort_unstable();
        let mut run = (0, 0);
        silences.into_iter().any(|(from, over)| {
            run = if from <= run.1 + WEATHER { (run.0, over.max(run.1)) } else { (from, over) };
            run.1 - run.0 >= LOST_AFTER
        })
    }

    /// How much of its time a request of this life may have missed.
    pub fn skipped(&self, life: &Range<Nanos>, pairs: &[[usize; 2]]) -> Nanos {
        let skips = self.0.iter().filter(|reason| (life.start..=life.end).contains(&reason.time.0));
        let skips = skips.filter(|reason| pairs.iter().any(|&pair| reason.place.concerns(pair)));
        skips.map(|reason| if let Effect::Skips(by) = reason.effect { by } else { 0 }).sum()
    }
}
