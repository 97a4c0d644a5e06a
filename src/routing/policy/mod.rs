//! The choice of a worker among those of one role: pure functions over their load, one file each.
//!
//! A policy picks a worker if at least one is usable. `last` is the index of the previous choice.
//! The legs are chosen one after the other. The cost of a pair is the sum of the costs of its
//! workers and the link. The cheapest worker of each role therefore gives the cheapest pair.

pub mod cache_aware;
pub mod conditional;
pub mod least_loaded;
pub mod lmetric;
pub mod power_of_two;
pub mod random;
pub mod round_robin;
pub mod slo;

use crate::config::{CacheAwareConfig, Policy};
use crate::routing::demand::Demand;
use crate::routing::forecast::Forecast;

/// The part of a request for which a worker is chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// Compute the prompt for another worker.
    Prefill,
    /// Generate after a prompt that another worker computes.
    Decode,
    /// Both.
    Whole,
}

/// The values of a worker that policies compare. They are compact in memory, because a choice reads
/// up to a thousand of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Candidate {
    /// Whether it can be chosen.
    pub usable: bool,
    /// Sequences that it has.
    pub sequences: u32,
    /// Prompt tokens that it has not computed.
    pub total_uncomputed: u32,
    /// Predicted time at which it has computed them: nanoseconds as in [`PolicyInput::now`].
    pub prefill_done_ns: u64,
    /// Prompt tokens of its sequences.
    pub total_context: u32,
    /// Blocks of the prompt that it probably has, if it has more than all workers have.
    pub cached: u32,
    /// Blocks that it probably has in total.
    pub held: u32,
}

/// The input of a choice.
#[derive(Clone, Copy, Debug)]
pub struct PolicyInput<'a> {
    /// The leg.
    pub leg: Purpose,
    /// The demand of the request.
    pub demand: &'a Demand,
    /// The workers of the role.
    pub workers: &'a [Candidate],
    /// Blocks of the prompt that all workers probably have.
    pub common: u32,
    /// The index of the previous choice.
    pub last: usize,
    /// A random number for this choice.
    pub chance: u64,
    /// Nanoseconds since a base that is the same for all workers.
    pub now: u64,
    /// Predicts times.
    pub forecast: &'a Forecast,
    /// Thresholds of [`cache_aware`].
    pub cache: CacheAwareConfig,
}

/// What the balancer prepares for a policy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PolicyNeeds {
    /// Reports of the workers' loads.
    pub loads: bool,
    /// The cached part of the prompt of each worker, when the leg computes a prompt.
    pub caches: bool,
    /// The same, when the leg only generates.
    pub decode_caches: bool,
    /// A record of the prompts that a decode leg gets, because its worker can compute prompts.
    pub decode_record: bool,
    /// A prediction of latencies. A request that would miss its limits is refused.
    pub forecast: bool,
}

impl PolicyNeeds {
    /// The needs of this policy.
    pub const fn of(policy: Policy) -> PolicyNeeds {
        let nothing = PolicyNeeds {
            loads: false,
            caches: false,
            decode_caches: false,
            decode_record: false,
            forecast: false,
        };
        let loads = PolicyNeeds { loads: true, ..nothing };
        let caches = PolicyNeeds { caches: true, ..loads };
        match policy {
            Policy::RoundRobin | Policy::Random => nothing,
            Policy::LeastLoaded | Policy::PowerOfTwo => loads,
            Policy::Lmetric => caches,
            Policy::CacheAware => PolicyNeeds { decode_caches: true, ..caches },
            Policy::Slo => PolicyNeeds { forecast: true, ..caches },
            Policy::Conditional => PolicyNeeds { forecast: true, decode_record: true, ..caches },
        }
    }

    /// Whether the policy compares the cached part of the prompt of each worker for this leg.
    pub fn compares_caches(&self, leg: Purpose) -> bool {
        if leg == Purpose::Decode { self.decode_caches } else { self.caches }
    }

    /// Whether the router records the prompts that it sends for this leg.
    pub fn records_prompts(&self, leg: Purpose) -> bool {
        self.compares_caches(leg) || (leg == Purpose::Decode && self.decode_record)
    }
}

/// The index of the worker to choose.
pub fn pick(policy: Policy, question: &PolicyInput<'_>) -> Option<usize> {
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

impl PolicyInput<'_> {
    /// The indexes of all usable workers, starting after the last choice.
    fn usable(&self) -> impl Iterator<Item = usize> {
        let (last, count) = (self.last, self.workers.len());
        let after = (last + 1).min(count);
        (after..count).chain(0..after).filter(|&place| self.workers[place].usable)
    }

    /// The usable worker with the least cost; among equal workers, the first after the last choice.
    fn cheapest<K: PartialOrd>(&self, cost: impl Fn(&Candidate) -> K) -> Option<usize> {
        let after = (self.last + 1).min(self.workers.len());
        let mut best: Option<(usize, K)> = None;
        // Two plain loops: a chain of iterators with a filter costs a call for each row.
        for (begin, end) in [(after, self.workers.len()), (0, after)] {
            for (place, worker) in self.workers[begin..end].iter().enumerate() {
                if worker.usable {
                    better(&mut best, begin + place, cost(worker));
                }
            }
        }
        best.map(|(place, _)| place)
    }

    /// The worker of these with the least cost; among equal workers, the first.
    fn cheapest_of<K: PartialOrd>(
        &self,
        places: impl Iterator<Item = usize>,
        cost: impl Fn(&Candidate) -> K,
    ) -> Option<usize> {
        let mut best: Option<(usize, K)> = None;
        places.for_each(|place| better(&mut best, place, cost(&self.workers[place])));
        best.map(|(place, _)| place)
    }

    /// Nanoseconds until a worker has computed its prompts.
    fn queue(&self, worker: &Candidate) -> u64 {
        worker.prefill_done_ns.saturating_sub(self.now)
    }

    /// Blocks of the prompt that a worker probably has.
    fn cached(&self, worker: &Candidate) -> u32 {
        worker.cached.max(self.common)
    }

    /// Prompt tokens that a worker must compute.
    pub fn missing(&self, worker: &Candidate) -> u32 {
        self.demand.missing(self.cached(worker))
    }
}

/// Keeps the index with the lower cost; among equal costs, the first.
fn better<K: PartialOrd>(best: &mut Option<(usize, K)>, place: usize, cost: K) {
    if best.as_ref().is_none_or(|(_, least)| cost < *least) {
        *best = Some((place, cost));
    }
}

#[cfg(test)]
pub(crate) mod asked {
    //! Inputs for the tests of policies.

    use super::*;

    pub fn load(usable: bool, sequences: u32) -> Candidate {
        Candidate { usable, sequences, ..Candidate::default() }
    }

    /// 1000 tokens in ten blocks.
    pub fn work() -> Demand {
        Demand { sequences: 1, samples: 1, tokens: 1000, block: 100, blocks: (0..10).collect() }
    }

    pub fn ask<R>(
        workers: &[Candidate],
        last: usize,
        change: impl FnOnce(&mut PolicyInput<'_>),
        pick: impl FnOnce(&PolicyInput<'_>) -> R,
    ) -> R {
        let (work, forecast) = (work(), Forecast::default());
        let mut question = PolicyInput {
            leg: Purpose::Prefill,
            demand: &work,
            workers,
            common: 0,
            last,
            chance: 0,
            now: 0,
            forecast: &forecast,
            cache: CacheAwareConfig::default(),
        };
        change(&mut question);
        pick(&question)
    }
}
