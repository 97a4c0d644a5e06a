//! How a worker is chosen among those of one role: pure functions over their loads, one file each.
//!
//! `last` is the place of the worker chosen before; a policy names a usable worker whenever there is one, but where it
//! lets nobody in that the forecast says comes to nothing ([`slo`]). Legs are chosen one after the other: what a pair
//! costs is the sum of what its workers and the link of its decode worker cost, so that the cheapest of each make the
//! cheapest pair.

pub mod cache_aware;
pub mod conditional;
pub mod least_loaded;
pub mod lmetric;
pub mod power_of_two;
pub mod random;
pub mod round_robin;
pub mod slo;

use super::forecast::Forecast;
use super::work::Work;
use crate::config::resolved::{CacheTerms, Policy};

/// What is chosen for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Leg {
    /// To read the prompt for another worker.
    Prefill,
    /// To generate behind a prompt that another reads.
    Decode,
    /// Both.
    Whole,
}

/// What of a worker is compared, close together: a choice goes through a thousand.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Candidate {
    /// Whether it may be chosen.
    pub usable: bool,
    /// Sequences that it has.
    pub sequences: u32,
    /// Tokens of prompts that it has not read,
    pub to_read: u32,
    /// and when it has, by the forecast: nanoseconds as in [`Question::now`].
    pub has_read: u64,
    /// Tokens that its sequences stand on.
    pub stands_on: u32,
    /// Blocks of the prompt that it is thought to have, where those are more than all have.
    pub cached: u32,
    /// Blocks that it is thought to have in all.
    pub held: u32,
}

/// A choice to be made.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// Of a leg
    pub leg: Leg,
    /// of this,
    pub work: &'a Work,
    /// among these.
    pub workers: &'a [Candidate],
    /// Blocks of the prompt that all are thought to have.
    pub common: u32,
    /// The place of who was chosen before.
    pub last: usize,
    /// Drawn for this choice.
    pub chance: u64,
    /// Nanoseconds since a time that is the same for all workers.
    pub now: u64,
    /// How long things take.
    pub forecast: &'a Forecast,
    /// When [`cache_aware`] goes where a prompt is cached.
    pub cache: CacheTerms,
}

/// Whether workers differ for this policy by what they have of the prompt.
pub fn compares_caches(policy: Policy, leg: Leg) -> bool {
    match policy {
        Policy::LeastLoaded | Policy::RoundRobin | Policy::Random | Policy::PowerOfTwo => false,
        Policy::CacheAware => true,
        Policy::Lmetric | Policy::Slo | Policy::Conditional => leg != Leg::Decode,
    }
}

/// Whether a router keeps in mind what prompt it has sent for this leg: what a decode worker is handed counts only where it
/// may read itself, or is chosen for it.
pub fn keeps_in_mind(policy: Policy, leg: Leg) -> bool {
    match policy {
        Policy::CacheAware | Policy::Conditional => true,
        _ => compares_caches(policy, leg),
    }
}

/// The place of the worker to choose.
pub fn pick(policy: Policy, question: &Question<'_>) -> Option<usize> {
    match policy {
        Policy::LeastLoaded => least_loaded::pick(question),
        Policy::RoundRobin => round_robin::pick(question),
        Policy::Random => random::pick(question),
        Policy::PowerOfTwo => power_of_two::pick(question),
        Policy::CacheAware => cache_aware::pick(question),
        Policy::Lmetric => lmetric::pick(question),
        Policy::Slo | Policy::Conditional => slo::pick(question),
    }
}

impl Question<'_> {
    /// All places, beginning with the one after the last, of workers that may be chosen.
    fn usable(&self) -> impl Iterator<Item = usize> {
        let (last, count) = (self.last, self.workers.len());
        let after = (last + 1).min(count);
        (after..count).chain(0..after).filter(|&place| self.workers[place].usable)
    }

    /// The usable one of the least cost, the first of equals after the last.
    fn cheapest<K: PartialOrd>(&self, cost: impl Fn(&Candidate) -> K) -> Option<usize> {
        let after = (self.last + 1).min(self.workers.len());
        let mut best: Option<(usize, K)> = None;
        // Two plain loops: in a chain of iterators with a filter each row is a call.
        for (begin, end) in [(after, self.workers.len()), (0, after)] {
            for (place, worker) in self.workers[begin..end].iter().enumerate() {
                if worker.usable {
                    better(&mut best, begin + place, cost(worker));
                }
            }
        }
        best.map(|(place, _)| place)
    }

    /// The one of the least cost of these, the first of equals.
    fn cheapest_of<K: PartialOrd>(
        &self,
        places: impl Iterator<Item = usize>,
        cost: impl Fn(&Candidate) -> K,
    ) -> Option<usize> {
        let mut best: Option<(usize, K)> = None;
        places.for_each(|place| better(&mut best, place, cost(&self.workers[place])));
        best.map(|(place, _)| place)
    }

    /// Nanoseconds that a worker still reads what it was given.
    fn queue(&self, worker: &Candidate) -> u64 {
        worker.has_read.saturating_sub(self.now)
    }

    /// Blocks of the prompt that a worker is thought to have.
    fn cached(&self, worker: &Candidate) -> u32 {
        worker.cached.max(self.common)
    }

    /// Tokens of the prompt that it would have to compute.
    pub fn missing(&self, worker: &Candidate) -> u32 {
        self.work.missing(self.cached(worker))
    }
}

/// Keeps the place of less cost, the first of equals.
fn better<K: PartialOrd>(best: &mut Option<(usize, K)>, place: usize, cost: K) {
    if best.as_ref().is_none_or(|(_, least)| cost < *least) {
        *best = Some((place, cost));
    }
}

#[cfg(test)]
pub(super) mod asked {
    //! Questions for the tests of policies.

    use super::*;

    pub fn load(usable: bool, sequences: u32) -> Candidate {
        Candidate { usable, sequences, ..Candidate::default() }
    }

    /// For 1000 tokens in ten blocks.
    pub fn work() -> Work {
        Work { sequences: 1, samples: 1, tokens: 1000, block: 100, blocks: (0..10).collect() }
    }

    pub fn ask<R>(
        workers: &[Candidate],
        last: usize,
        change: impl FnOnce(&mut Question<'_>),
        pick: impl FnOnce(&Question<'_>) -> R,
    ) -> R {
        let (work, forecast) = (work(), Forecast::default());
        let mut question = Question {
            leg: Leg::Prefill,
            work: &work,
            workers,
            common: 0,
            last,
            chance: 0,
            now: 0,
            forecast: &forecast,
            cache: CacheTerms::default(),
        };
        change(&mut question);
        pick(&question)
    }
}
