//! The router's decisions: which pair serves a request, and which workers are asked how they are.
//!
//! Owns: loads and health of all workers. Invariant: a worker's load is the sum of its open bookings.

use super::flight::Avoid;
use super::health::{Change, Health};
use super::kinds::{Difference, Kind, Kinds};
use super::loads::{Load, WorkerNumber};
use super::policy;
use crate::config::resolved::Policy;
use crate::limits::ROUTER_SUSPECT_TIME;
use std::fmt;
use std::ops::Range;
use std::time::Instant;

/// What a worker does.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Role {
    /// Reads prompts.
    Prefill,
    /// Generates.
    Decode,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        })
    }
}

/// Work that is charged to a worker until it is given back to [`Router::release`].
#[must_use = "it stays charged until it is released"]
#[derive(PartialEq, Eq, Debug)]
pub struct Booking {
    worker: WorkerNumber,
    weight: u32,
}

impl Booking {
    /// The worker.
    pub fn worker(&self) -> WorkerNumber {
        self.worker
    }
}

/// The workers that serve a request.
#[derive(PartialEq, Eq, Debug)]
pub struct Pair {
    /// Reads its prompt.
    pub prefill: Booking,
    /// Generates its answer.
    pub decode: Booking,
}

/// Nobody can serve.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoWorker {
    /// No worker of this role can be used.
    Up {
        /// Which.
        role: Role,
        /// Whether one that cannot be reached now would do.
        may_come: bool,
    },
    /// There are some of each, and none that fit each other.
    Fits,
}

impl NoWorker {
    /// Whether somebody may do who cannot be reached now.
    pub fn may_come(self) -> bool {
        matches!(self, NoWorker::Up { may_come: true, .. } | NoWorker::Fits)
    }
}

impl fmt::Display for NoWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoWorker::Up { role, .. } => write!(f, "no {role} worker can be reached"),
            NoWorker::Fits => f.write_str("no prefill worker that can be reached fits a decode worker"),
        }
    }
}

impl std::error::Error for NoWorker {}

/// All that is decided without a socket.
#[derive(Debug)]
pub struct Router {
    policy: Policy,
    loads: Vec<Load>,
    health: Vec<Health>,
    kinds: Kinds,
    /// How many of them are prefill workers; they come first.
    prefill: usize,
    /// Places chosen last, by role.
    last: [usize; 2],
}

impl Role {
    /// That of the worker at the other end of a hand-off.
    pub fn other(self) -> Role {
        match self {
            Role::Prefill => Role::Decode,
            Role::Decode => Role::Prefill,
        }
    }
}

impl Router {
    /// Over so many prefill and decode workers, at least one of each; none is usable yet.
    pub fn new(policy: Policy, prefill: usize, decode: usize, now: Instant) -> Router {
        let count = prefill + decode;
        Router {
            policy,
            loads: vec![Load::default(); count],
            health: vec![Health::new(now); count],
            kinds: Kinds::new(count),
            prefill,
            // The first turn is the first worker's.
            last: [prefill.saturating_sub(1), decode.saturating_sub(1)],
        }
    }

    /// Chooses a pair for `weight` sequences and books them on both.
    ///
    /// # Errors
    /// One of the roles has no usable worker, or none that fits one of the other; nothing is booked then.
    pub fn choose(&mut self, weight: u32, avoid: &Avoid, now: Instant) -> Result<Pair, NoWorker> {
        // Who is missing altogether is named first.
        let mut prefill = self.pick(Role::Prefill, avoid, now, |_| true)?;
        let mut decode = self.pick(Role::Decode, avoid, now, |_| true)?;
        if !self.kinds.all_fit() {
            let is_met = |one| self.usable(Role::Decode, avoid).any(|other| self.kinds.fit(one, other));
            prefill = self.pick(Role::Prefill, avoid, now, is_met).map_err(|_| NoWorker::Fits)?;
            let fits = |other| self.kinds.fit(WorkerNumber(prefill), other);
            decode = self.pick(Role::Decode, avoid, now, fits).map_err(|_| NoWorker::Fits)?;
        }
        Ok(Pair {
            prefill: self.book(Role::Prefill, prefill, weight),
            decode: self.book(Role::Decode, decode, weight),
        })
    }

    /// Chooses a worker of one role.
    ///
    /// # Errors
    /// None is usable.
    pub fn choose_one(
        &mut self,
        role: Role,
        weight: u32,
        avoid: &Avoid,
        now: Instant,
    ) -> Result<Booking, NoWorker> {
        let place = self.pick(role, avoid, now, |_| true)?;
        Ok(self.book(role, place, weight))
    }

    /// A booking of no weight, for what is asked of this very worker.
    pub fn visit(&self, worker: WorkerNumber) -> Booking {
        Booking { worker, weight: 0 }
    }

    /// The first usable worker, whatever its role.
    ///
    /// # Errors
    /// None is usable.
    pub fn first(&self) -> Result<WorkerNumber, NoWorker> {
        let first = self.loads.iter().position(|load| load.usable).map(WorkerNumber);
        first.ok_or(NoWorker::Up { role: Role::Prefill, may_come: true })
    }

    /// Ends a booking.
    pub fn release(&mut self, booking: Booking) {
        self.loads[booking.worker.0].booked -= booking.weight;
    }

    /// The next worker that is to be probed now; what comes of it is told by [`Router::probed`].
    pub fn begin_probe(&mut self, now: Instant) -> Option<WorkerNumber> {
        self.health.iter_mut().position(|health| health.begin_probe(now)).map(WorkerNumber)
    }

    /// A probe has ended.
    pub fn probed(&mut self, worker: WorkerNumber, is_well: bool, now: Instant) -> Option<Change> {
        let change = self.health[worker.0].probed(is_well, now);
        self.turned(worker, change)
    }

    /// A worker did not take a connection.
    pub fn refused(&mut self, worker: WorkerNumber) -> Option<Change> {
        let change = self.health[worker.0].refused();
        self.turned(worker, change)
    }

    /// A request failed at this worker, or because of it.
    pub fn accuse(&mut self, worker: WorkerNumber, now: Instant) {
        self.loads[worker.0].suspect = Some(now + ROUTER_SUSPECT_TIME);
    }

    /// A request went well there.
    pub fn acquit(&mut self, worker: WorkerNumber) {
        self.loads[worker.0].suspect = None;
    }

    /// Whether there is a usable pair.
    pub fn is_ready(&self) -> bool {
        let anybody = Avoid::default();
        let is_met = |one| self.usable(Role::Decode, &anybody).any(|other| self.kinds.fit(one, other));
        self.usable(Role::Prefill, &anybody).any(is_met)
    }

    /// A worker has told what it is; what keeps it from the first of the other role that it does not fit.
    pub fn introduced(&mut self, worker: WorkerNumber, kind: Kind) -> Option<(WorkerNumber, Difference)> {
        self.kinds.set(worker, kind);
        let others = self.role(worker).other();
        let differs = |other| Some((other, self.kinds.difference(worker, other)?));
        self.members(others).map(WorkerNumber).find_map(differs)
    }

    /// Loads by worker number.
    pub fn loads(&self) -> &[Load] {
        &self.loads
    }

    /// What a worker does.
    pub fn role(&self, worker: WorkerNumber) -> Role {
        if worker.0 < self.prefill { Role::Prefill } else { Role::Decode }
    }

    fn members(&self, role: Role) -> Range<usize> {
        match role {
            Role::Prefill => 0..self.prefill,
            Role::Decode => self.prefill..self.loads.len(),
        }
    }

    fn usable<'a>(&'a self, role: Role, avoid: &'a Avoid) -> impl Iterator<Item = WorkerNumber> {
        let is_usable =
            |worker: &WorkerNumber| self.loads[worker.0].usable && !avoid.unwilling.contains(worker);
        self.members(role).map(WorkerNumber).filter(is_usable)
    }

    /// One of those that fit at which nothing fails, rather than one where another request just did, rather than one
    /// where this one did; and never one that will not serve it.
    fn pick(
        &self,
        role: Role,
        avoid: &Avoid,
        now: Instant,
        fits: impl Fn(WorkerNumber) -> bool,
    ) -> Result<usize, NoWorker> {
        let (members, last) = (self.members(role), self.last[role as usize]);
        let is_unwilling = |worker: WorkerNumber| avoid.unwilling.contains(&worker);
        let has_failed = |worker: WorkerNumber| avoid.failed.contains(&worker);
        let is_suspect = |worker: WorkerNumber| self.loads[worker.0].suspect.is_some_and(|until| now < until);
        let among = |shunned: &dyn Fn(WorkerNumber) -> bool| {
            let load = |at: usize| {
                let (load, worker) = (self.loads[at], WorkerNumber(at));
                Load {
                    usable: load.usable && fits(worker) && !is_unwilling(worker) && !shunned(worker),
                    ..load
                }
            };
            let loads: Vec<Load> = members.clone().map(load).collect();
            policy::pick(self.policy, &loads, last)
        };
        among(&|worker| has_failed(worker) || is_suspect(worker))
            .or_else(|| among(&has_failed))
            .or_else(|| among(&|_| false))
            .ok_or_else(|| NoWorker::Up {
                role,
                may_come: !members.clone().map(WorkerNumber).all(is_unwilling),
            })
    }

    fn book(&mut self, role: Role, place: usize, weight: u32) -> Booking {
        self.last[role as usize] = place;
        let worker = WorkerNumber(self.members(role).start + place);
        self.loads[worker.0].booked += weight;
        Booking { worker, weight }
    }

    fn turned(&mut self, worker: WorkerNumber, change: Option<Change>) -> Option<Change> {
        self.loads[worker.0].usable = self.health[worker.0].is_up();
        change
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn router(policy: Policy, prefill: usize, decode: usize) -> Router {
        let now = Instant::now();
        let mut router = Router::new(policy, prefill, decode, now);
        for worker in 0..prefill + decode {
            assert_eq!(router.probed(WorkerNumber(worker), true, now), Some(Change::Up));
        }
        router
    }

    fn numbers(pair: &Pair) -> (usize, usize) {
        (pair.prefill.worker().0, pair.decode.worker().0)
    }

    #[test]
    fn legs_are_chosen_apart_and_numbered_together() {
        let mut router = router(Policy::RoundRobin, 2, 3);
        let chosen: Vec<_> =
            (0..4).map(|_| numbers(&router.choose(1, &Avoid::default(), Instant::now()).unwrap())).collect();
        assert_eq!(chosen, [(0, 2), (1, 3), (0, 4), (1, 2)]);
        assert_eq!(
            (router.role(WorkerNumber(1)), router.role(WorkerNumber(2))),
            (Role::Prefill, Role::Decode)
        );
    }

    #[test]
    fn a_burst_spreads_by_what_is_booked_and_a_release_makes_room() {
        let mut router = router(Policy::LeastLoaded, 1, 2);
        let heavy = router.choose(5, &Avoid::default(), Instant::now()).unwrap();
        let light: Vec<Pair> =
            (0..3).map(|_| router.choose(1, &Avoid::default(), Instant::now()).unwrap()).collect();
        assert!(light.iter().all(|pair| numbers(pair) == (0, 2)));
        router.release(heavy.decode);
        assert_eq!(numbers(&router.choose(1, &Avoid::default(), Instant::now()).unwrap()), (0, 1));
        router.release(heavy.prefill);
        for pair in light {
            router.release(pair.prefill);
            router.release(pair.decode);
        }
        assert_eq!(router.loads().iter().map(|load| load.booked).collect::<Vec<_>>(), [1, 1, 0]);
    }

    #[test]
    fn nothing_is_booked_without_a_pair() {
        let mut router = router(Policy::LeastLoaded, 1, 1);
        assert!(router.is_ready());
        assert_eq!(router.refused(WorkerNumber(1)), Some(Change::Down));
        assert!(!router.is_ready());
        assert_eq!(
            router.choose(1, &Avoid::default(), Instant::now()),
            Err(NoWorker::Up { role: Role::Decode, may_come: true })
        );
        assert_eq!(router.loads()[0].booked, 0);
        assert_eq!(router.first(), Ok(WorkerNumber(0)));
        router.refused(WorkerNumber(0));
        assert_eq!(
            router.choose(1, &Avoid::default(), Instant::now()),
            Err(NoWorker::Up { role: Role::Prefill, may_come: true })
        );
        assert_eq!(router.first(), Err(NoWorker::Up { role: Role::Prefill, may_come: true }));
    }

    #[test]
    fn who_failed_a_request_is_asked_last_and_who_refused_it_never() {
        let mut router = router(Policy::RoundRobin, 1, 3);
        let mut avoid =
            Avoid { failed: vec![WorkerNumber(0), WorkerNumber(1)], unwilling: vec![WorkerNumber(2)] };
        for _ in 0..3 {
            assert_eq!(
                numbers(&router.choose(1, &avoid, Instant::now()).unwrap()),
                (0, 3),
                "there is one prefill worker"
            );
        }
        avoid.unwilling.push(WorkerNumber(3));
        assert_eq!(numbers(&router.choose(1, &avoid, Instant::now()).unwrap()), (0, 1));
        router.refused(WorkerNumber(1));
        assert_eq!(
            router.choose(1, &avoid, Instant::now()),
            Err(NoWorker::Up { role: Role::Decode, may_come: true })
        );
        avoid.unwilling.push(WorkerNumber(1));
        assert_eq!(
            router.choose(1, &avoid, Instant::now()),
            Err(NoWorker::Up { role: Role::Decode, may_come: false })
        );
    }

    #[test]
    fn who_fails_at_once_does_not_draw_all_requests() {
        let mut router = router(Policy::LeastLoaded, 1, 2);
        let now = Instant::now();
        let chosen = |router: &mut Router, now| {
            let pair = router.choose(1, &Avoid::default(), now).unwrap();
            let decode = pair.decode.worker();
            router.release(pair.prefill);
            if decode == WorkerNumber(1) {
                // It fails.
                router.release(pair.decode);
                router.accuse(decode, now);
            }
            decode.0
        };
        let first: Vec<usize> = (0..6).map(|_| chosen(&mut router, now)).collect();
        assert_eq!(first, [1, 2, 2, 2, 2, 2]);
        let later = now + ROUTER_SUSPECT_TIME;
        assert_eq!((chosen(&mut router, later), chosen(&mut router, later)), (1, 2), "tried once more");
        router.acquit(WorkerNumber(1));
        assert_eq!(chosen(&mut router, later), 1);
    }

    /// A change that rolls through: two of the old kind, then one of each, then the new alone.
    #[test]
    fn those_that_do_not_fit_are_never_paired() {
        let kind = |weights: &str| Kind::told(&serde_json::json!({ "weights": weights }));
        let mut router = router(Policy::RoundRobin, 2, 2);
        let [old, new, other_new, other_old] = [0, 1, 2, 3].map(WorkerNumber);
        for worker in [old, new, other_new, other_old] {
            assert_eq!(router.introduced(worker, kind("old")), None);
        }
        assert_eq!(router.introduced(new, kind("new")).map(|(worker, _)| worker), Some(other_new));
        let chosen: Vec<_> =
            (0..4).map(|_| numbers(&router.choose(1, &Avoid::default(), Instant::now()).unwrap())).collect();
        assert_eq!(chosen, [(0, 2), (0, 3), (0, 2), (0, 3)], "none for the new one yet");
        router.introduced(other_new, kind("new"));
        let chosen: Vec<_> =
            (0..4).map(|_| numbers(&router.choose(1, &Avoid::default(), Instant::now()).unwrap())).collect();
        assert_eq!(chosen, [(1, 2), (0, 3), (1, 2), (0, 3)]);
        router.refused(other_old);
        assert!(router.is_ready());
        assert_eq!(numbers(&router.choose(1, &Avoid::default(), Instant::now()).unwrap()), (1, 2));
        router.refused(new);
        assert!(!router.is_ready());
        assert_eq!(router.choose(1, &Avoid::default(), Instant::now()), Err(NoWorker::Fits));
    }

    #[test]
    fn every_worker_is_probed_once_and_unusable_until_then() {
        let now = Instant::now();
        let mut router = Router::new(Policy::RoundRobin, 1, 1, now);
        assert!(!router.is_ready());
        let probed: Vec<_> = std::iter::from_fn(|| router.begin_probe(now)).map(|worker| worker.0).collect();
        assert_eq!(probed, [0, 1]);
    }
}
