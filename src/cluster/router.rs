//! The router's decisions: which pair serves a request, and which workers are asked how they are.
//!
//! Owns: loads and health of all workers. Invariant: a worker's load is the sum of its open bookings.

use super::flight::Avoid;
use super::health::{Change, Health};
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

/// No worker of this role can be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoWorker {
    /// Which.
    pub role: Role,
    /// Whether one that cannot be reached now would do.
    pub may_come: bool,
}

impl fmt::Display for NoWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no {} worker can be reached", self.role)
    }
}

impl std::error::Error for NoWorker {}

/// All that is decided without a socket.
#[derive(Debug)]
pub struct Router {
    policy: Policy,
    loads: Vec<Load>,
    health: Vec<Health>,
    /// How many of them are prefill workers; they come first.
    prefill: usize,
    /// Places chosen last, by role.
    last: [usize; 2],
}

impl Router {
    /// Over so many prefill and decode workers, at least one of each; none is usable yet.
    pub fn new(policy: Policy, prefill: usize, decode: usize, now: Instant) -> Router {
        let count = prefill + decode;
        Router {
            policy,
            loads: vec![Load::default(); count],
            health: vec![Health::new(now); count],
            prefill,
            // The first turn is the first worker's.
            last: [prefill.saturating_sub(1), decode.saturating_sub(1)],
        }
    }

    /// Chooses a pair for `weight` sequences and books them on both.
    ///
    /// # Errors
    /// One of the roles has no usable worker; nothing is booked then.
    pub fn choose(&mut self, weight: u32, avoid: &Avoid, now: Instant) -> Result<Pair, NoWorker> {
        let prefill = self.pick(Role::Prefill, avoid, now)?;
        let decode = self.pick(Role::Decode, avoid, now)?;
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
        let place = self.pick(role, avoid, now)?;
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
        first.ok_or(NoWorker { role: Role::Prefill, may_come: true })
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
        let usable = |role| self.loads[self.members(role)].iter().any(|load| load.usable);
        usable(Role::Prefill) && usable(Role::Decode)
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

    /// One at which nothing fails, rather than one where another request just did, rather than one where this one did;
    /// and never one that will not serve it.
    fn pick(&self, role: Role, avoid: &Avoid, now: Instant) -> Result<usize, NoWorker> {
        let (members, last) = (self.members(role), self.last[role as usize]);
        let loads = &self.loads[members.clone()];
        let is_suspect = |place: usize| loads[place].suspect.is_some_and(|until| now < until);
        if avoid.is_empty() && !(0..loads.len()).any(is_suspect) {
            let chosen = policy::pick(self.policy, loads, last);
            return chosen.ok_or(NoWorker { role, may_come: true });
        }
        let is_in = |list: &[WorkerNumber], place: usize| list.contains(&WorkerNumber(members.start + place));
        let without = |shunned: &dyn Fn(usize) -> bool| {
            let usable =
                |(place, load): (usize, &Load)| Load { usable: load.usable && !shunned(place), ..*load };
            let loads: Vec<Load> = loads.iter().enumerate().map(usable).collect();
            policy::pick(self.policy, &loads, last)
        };
        let is_unwilling = |place| is_in(&avoid.unwilling, place);
        let has_failed = |place| is_unwilling(place) || is_in(&avoid.failed, place);
        without(&|place| has_failed(place) || is_suspect(place))
            .or_else(|| without(&has_failed))
            .or_else(|| without(&is_unwilling))
            .ok_or(NoWorker { role, may_come: !(0..loads.len()).all(is_unwilling) })
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
            Err(NoWorker { role: Role::Decode, may_come: true })
        );
        assert_eq!(router.loads()[0].booked, 0);
        assert_eq!(router.first(), Ok(WorkerNumber(0)));
        router.refused(WorkerNumber(0));
        assert_eq!(
            router.choose(1, &Avoid::default(), Instant::now()),
            Err(NoWorker { role: Role::Prefill, may_come: true })
        );
        assert_eq!(router.first(), Err(NoWorker { role: Role::Prefill, may_come: true }));
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
            Err(NoWorker { role: Role::Decode, may_come: true })
        );
        avoid.unwilling.push(WorkerNumber(1));
        assert_eq!(
            router.choose(1, &avoid, Instant::now()),
            Err(NoWorker { role: Role::Decode, may_come: false })
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

    #[test]
    fn every_worker_is_probed_once_and_unusable_until_then() {
        let now = Instant::now();
        let mut router = Router::new(Policy::RoundRobin, 1, 1, now);
        assert!(!router.is_ready());
        let probed: Vec<_> = std::iter::from_fn(|| router.begin_probe(now)).map(|worker| worker.0).collect();
        assert_eq!(probed, [0, 1]);
    }
}
