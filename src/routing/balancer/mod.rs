//! The router's decisions: which pair serves a request, and which workers are probed.
//!
//! Owns: the known workers, their load and health.
//! Invariants: a worker's load is the sum of its open reservations and its foreign load. A leaving
//! worker is not chosen again, and stays known until its last reservation is released. A worker's
//! number is never reused.
//! Not here: choices (`selection`), the rows of workers (`table`).

mod feedback;
mod reservation;
mod selection;
mod table;
#[cfg(test)]
mod tests;

use crate::config::{BreakerConfig, CacheAwareConfig, HealthConfig, Policies};
use crate::ids::Leg;
use crate::limits::ROUTER_PREFIX_BLOCKS_MAX;
use crate::routing::attempts::AvoidList;
use crate::routing::breaker::Breaker;
use crate::routing::compatibility::{CompatDigest, Compatibility, CompatibilityMatrix, Difference};
use crate::routing::forecast::Forecast;
use crate::routing::health::Health;
use crate::routing::load::{ReservedLoad, WorkerLoad, WorkerNumber};
use crate::routing::policy::PolicyNeeds;
use crate::routing::prefixes::Prefixes;
use crate::stdx::failpoint::is_failpoint_active;
pub use reservation::{NoWorker, Reservation, ReservedPair};
use selection::Scratch;
use std::time::{Duration, Instant};
use table::{LoadTable, WorkerRow};

/// A worker that is present, or that is leaving and still has reservations.
#[derive(Debug)]
struct Member {
    number: WorkerNumber,
    role: Leg,
    /// Its reported properties, from its entry and its answers. A worker that reports nothing fits
    /// every other.
    kind: Compatibility,
    health: Health,
    breaker: Breaker,
    /// Open reservations, including those without weight.
    reservations: u32,
    /// Its reservations at the time when a load report was requested.
    asked: Option<ReservedLoad>,
    /// Whether it is leaving, and known only because of its reservations.
    is_leaving: bool,
}

/// All decisions of the router, without a socket.
#[derive(Debug)]
pub struct LoadBalancer {
    policies: Policies,
    health: HealthConfig,
    breaker: BreakerConfig,
    /// Sorted by number.
    members: Vec<Member>,
    /// The same workers by role, in the form that choices need.
    tables: [LoadTable; 2],
    kinds: CompatibilityMatrix,
    /// The number of the next worker.
    next: usize,
    /// The last choice, by role.
    last: [Option<WorkerNumber>; 2],
    /// The prompts of which each worker probably has KV, by role.
    prefixes: [Prefixes; 2],
    forecast: Forecast,
    cache: CacheAwareConfig,
    /// Seed of all random numbers, and the number of draws.
    seed: u64,
    drawn: u64,
    /// Reused by the next choice.
    scratch: Scratch,
}

impl LoadBalancer {
    /// A balancer without workers.
    pub fn new(policies: impl Into<Policies>) -> LoadBalancer {
        LoadBalancer {
            policies: policies.into(),
            health: HealthConfig::default(),
            breaker: BreakerConfig::default(),
            members: Vec::new(),
            tables: Default::default(),
            kinds: CompatibilityMatrix::default(),
            next: 0,
            last: [None; 2],
            prefixes: [(); 2]
                .map(|()| Prefixes::new(ROUTER_PREFIX_BLOCKS_MAX, ROUTER_PREFIX_BLOCKS_MAX)),
            forecast: Forecast::default(),
            cache: CacheAwareConfig::default(),
            seed: 0,
            drawn: 0,
            scratch: Scratch::default(),
        }
    }

    /// Sets the forecast.
    pub fn with_forecast(self, forecast: Forecast) -> LoadBalancer {
        LoadBalancer { forecast, ..self }
    }

    /// Sets the thresholds of the `cache_aware` policy.
    pub fn weighing(self, cache: CacheAwareConfig) -> LoadBalancer {
        LoadBalancer { cache, ..self }
    }

    /// Sets the seed of the random numbers.
    pub fn seeded(self, seed: u64) -> LoadBalancer {
        LoadBalancer { seed, ..self }
    }

    /// Sets the number of prompt blocks that each worker's cache holds.
    pub fn over_caches(self, blocks: usize) -> LoadBalancer {
        let mut prefixes = [(); 2].map(|()| Prefixes::new(ROUTER_PREFIX_BLOCKS_MAX, blocks));
        for member in self.members.iter().filter(|member| !member.is_leaving) {
            prefixes[member.role as usize].join(member.number);
        }
        LoadBalancer { prefixes, ..self }
    }

    /// Whether a policy compares the beginnings of prompts.
    pub fn reads_prompts(&self) -> bool {
        self.policies.all().into_iter().any(|policy| PolicyNeeds::of(policy).caches)
    }

    /// Sets the limits of health probes and circuit breakers.
    pub fn on(self, health: HealthConfig, breaker: BreakerConfig) -> LoadBalancer {
        LoadBalancer { health, breaker, ..self }
    }

    /// Adds a worker. It is unusable until a probe has succeeded.
    pub fn join(&mut self, role: Leg, now: Instant) -> WorkerNumber {
        let number = WorkerNumber(self.next);
        self.next += 1;
        self.prefixes[role as usize].join(number);
        self.tables[role as usize].join(number, now);
        self.members.push(Member {
            number,
            role,
            kind: Compatibility::default(),
            health: Health::new(self.health, now),
            breaker: Breaker::new(self.breaker),
            reservations: 0,
            asked: None,
            is_leaving: false,
        });
        self.sort();
        number
    }

    /// Sets the compatibility digest of a worker's entry.
    pub fn entered(&mut self, worker: WorkerNumber, digest: CompatDigest) {
        if let Some(place) = self.place(worker) {
            self.members[place].kind = Compatibility::entered(digest);
            self.sort();
        }
    }

    /// Sets the properties that a worker reported. Returns the first worker of the other role that
    /// does not fit, and the difference. Mixed workers do not count, because they never hand over.
    pub fn set_compatibility(
        &mut self,
        worker: WorkerNumber,
        kind: Compatibility,
    ) -> Option<(WorkerNumber, Difference)> {
        let place = self.place(worker)?;
        self.members[place].health.record_identified();
        let kind = kind.with_entry_of(&self.members[place].kind);
        if self.members[place].kind != kind {
            self.members[place].kind = kind;
            self.sort();
        }
        let one = &self.members[place];
        let others =
            self.members.iter().filter(|member| member.role != one.role && !member.is_leaving);
        let difference = |other: &Member| match one.kind.difference(&other.kind)? {
            Difference::Alone => None,
            difference => Some((other.number, difference)),
        };
        others.into_iter().find_map(difference)
    }

    /// The first worker of the other role and the reason why the two do not fit; mixed workers come
    /// last. The result is `None` if a worker fits, or if there is no worker of the other role.
    pub fn misfit(&self, worker: WorkerNumber) -> Option<(WorkerNumber, Difference)> {
        let one = self.member(worker)?;
        let others =
            || self.members.iter().filter(|member| member.role != one.role && !member.is_leaving);
        if others().any(|other| self.fit(self.class(one), self.class(other))) {
            return None;
        }
        let first = others().min_by_key(|other| other.kind.is_alone())?;
        Some((first.number, one.kind.difference(&first.kind)?))
    }

    /// Whether the worker and a worker of the other role would fit if their cluster keys did.
    pub fn differs_by_keys(&self, worker: WorkerNumber) -> bool {
        let Some(one) = self.member(worker).filter(|_| !self.kinds.all_fit()) else { return false };
        let (class, mut others) = (self.class(one), self.members.iter());
        others.any(|other| {
            other.role != one.role
                && !other.is_leaving
                && self.kinds.differ_by_keys(class, self.class(other))
        })
    }

    /// Whether the worker needs a worker of the other role and there is none.
    pub fn is_lonely(&self, worker: WorkerNumber) -> bool {
        let local_prefill =
            |one: &Member| one.role == Leg::Decode && self.worker_row(one).local_prefill;
        let is_only = |one: &Member| self.here(one.role.other()).next().is_none();
        self.member(worker).is_some_and(|one| is_only(one) && !local_prefill(one))
    }

    /// Sets whether a decode worker serves requests alone if no prefill worker is left.
    pub fn set_local_prefill(&mut self, worker: WorkerNumber, local_prefill: bool) {
        self.tables[Leg::Decode as usize].set_local_prefill(worker, local_prefill);
    }

    /// Compares the reported properties of all workers. It runs after each report, so that choices
    /// need no comparison.
    fn sort(&mut self) {
        let (kinds, classes) =
            CompatibilityMatrix::of(self.members.iter().map(|member| &member.kind));
        self.kinds = kinds;
        for (member, class) in self.members.iter().zip(classes) {
            self.tables[member.role as usize].set_class(member.number, class);
        }
    }

    fn worker_row(&self, member: &Member) -> &WorkerRow {
        let table = &self.tables[member.role as usize];
        &table.workers()[table.place(member.number).expect("a member has a row")]
    }

    fn class(&self, member: &Member) -> usize {
        self.worker_row(member).class
    }

    fn fit(&self, one: usize, other: usize) -> bool {
        self.kinds.fit(one, other)
    }

    /// Removes a worker. Its reservations stay.
    pub fn leave(&mut self, worker: WorkerNumber) {
        let Some(place) = self.place(worker) else { return };
        let member = &mut self.members[place];
        member.is_leaving = true;
        let role = member.role as usize;
        if !is_failpoint_active("leaving worker stays usable") {
            self.tables[role].change(worker, |load| load.usable = false);
        }
        self.prefixes[role].forget(worker);
        if !is_failpoint_active("leaving worker keeps its blocks") {
            self.tables[role].set_held(worker, 0);
        }
        self.remove_if_over(place);
    }

    /// Forgets a worker that is leaving and has no reservation.
    fn remove_if_over(&mut self, place: usize) {
        let Member { number, role, reservations, is_leaving, .. } = self.members[place];
        if is_leaving && reservations == 0 {
            self.members.remove(place);
            self.tables[role as usize].remove(number);
        }
    }

    /// Whether a worker is present or still has reservations.
    pub fn knows(&self, worker: WorkerNumber) -> bool {
        self.place(worker).is_some()
    }

    /// Whether a worker is present and not leaving.
    pub fn has(&self, worker: WorkerNumber) -> bool {
        self.member(worker).is_some_and(|member| !member.is_leaving)
    }

    /// A reservation without weight, for a request to this one worker.
    pub fn reserve_visit(&mut self, worker: WorkerNumber) -> Reservation {
        if let Some(place) = self.place(worker) {
            self.members[place].reservations += 1;
        }
        Reservation { worker, weight: 0, uncomputed: 0, reading: Duration::ZERO, context: 0 }
    }

    /// A usable worker of either role that has not refused the request. Prefill workers come first;
    /// within a role, the worker that joined first. A worker that failed the request comes last.
    ///
    /// # Errors
    /// No worker is usable, or all have refused the request.
    pub fn first(&self, avoid: &AvoidList) -> Result<WorkerNumber, NoWorker> {
        let usable = [Leg::Prefill, Leg::Decode]
            .into_iter()
            .flat_map(|role| self.usable(role).map(move |seat| (role, seat.number)))
            .filter(|(_, number)| !avoid.unwilling.contains(number));
        let first =
            usable.min_by_key(|&(role, number)| (avoid.failed.contains(&number), role, number));
        first.map(|(_, number)| number).ok_or_else(|| {
            let mut here =
                [Leg::Prefill, Leg::Decode].into_iter().flat_map(|role| self.here(role)).peekable();
            let is_unwilling = |member: &Member| avoid.unwilling.contains(&member.number);
            let may_come = here.peek().is_none() || !here.all(is_unwilling);
            NoWorker::Of { role: Leg::Prefill, may_come }
        })
    }

    /// Forgets all prompts, because all workers were ordered to flush their caches.
    pub fn forget_prompts(&mut self) {
        for member in &self.members {
            self.prefixes[member.role as usize].empty(member.number);
            self.tables[member.role as usize].set_held(member.number, 0);
        }
    }

    /// Records that a worker has computed the prompt of a reservation and now generates.
    pub fn mark_read(&mut self, reservation: &mut Reservation, now: Instant) {
        let (uncomputed, reading) =
            (std::mem::take(&mut reservation.uncomputed), std::mem::take(&mut reservation.reading));
        if uncomputed > 0 {
            self.change(reservation.worker, |load| load.complete_prefill(uncomputed, reading, now));
        }
    }

    /// Ends a reservation.
    pub fn release(&mut self, reservation: Reservation, now: Instant) {
        let Some(place) = self.place(reservation.worker) else { return };
        debug_assert!(self.members[place].reservations > 0, "a reservation is released once");
        self.change(reservation.worker, |load| {
            load.reserved -= reservation.weight;
            let is_computed = reservation.uncomputed == 0;
            if is_computed || !is_failpoint_active("context of an unread prompt stays booked") {
                load.context -= reservation.context;
            }
            if !is_computed && !is_failpoint_active("tokens of an unread prompt stay booked") {
                load.complete_prefill(reservation.uncomputed, reservation.reading, now);
            }
        });
        self.members[place].reservations -= 1;
        self.remove_if_over(place);
    }

    /// Asserts the rules that hold between calls.
    ///
    /// # Panics
    /// A worker has no row in the table of its role, or a row has no worker. A leaving worker can
    /// be chosen, or is still known without reservations. A worker without reservations has a load.
    /// A row does not agree with the health or the known prompts of its worker.
    pub fn invariants(&self) {
        assert!(self.members.is_sorted_by_key(|member| member.number), "members are sorted");
        for member in &self.members {
            assert!(member.number.0 < self.next, "a number is never given twice");
            let load = self.tables[member.role as usize].load(member.number);
            let load = load.expect("a member has a row");
            if member.is_leaving {
                assert!(!load.usable, "a worker that leaves is not chosen");
                assert!(member.reservations > 0, "a worker is known for its reservations");
            } else {
                assert_eq!(load.usable, member.health.is_up(), "usable workers are up");
            }
            if member.reservations == 0 {
                let own = (load.reserved, load.uncomputed, load.context);
                assert_eq!(own, (0, 0, 0), "a worker's load comes from its reservations");
            }
        }
        for (table, prefixes) in self.tables.iter().zip(&self.prefixes) {
            prefixes.invariants();
            for (seat, row) in table.workers().iter().zip(table.candidates()) {
                let held = prefixes.held(seat.number);
                assert_eq!(row.held as usize, held, "a row has the blocks that its worker holds");
            }
        }
        let rows: usize = self.tables.iter().map(LoadTable::invariants).sum();
        assert_eq!(rows, self.members.len(), "each row has a member");
    }

    /// Whether there is a usable pair, or a usable decode worker that serves requests alone.
    pub fn is_ready(&self) -> bool {
        self.has_pair(&[]) || self.usable(Leg::Decode).any(|decode| decode.local_prefill)
    }

    /// The same, but without this worker.
    pub fn is_ready_without(&self, worker: WorkerNumber) -> bool {
        let others = |role| self.usable(role).filter(move |seat| seat.number != worker);
        let fits = |prefill: &WorkerRow| {
            others(Leg::Decode).any(|decode| self.fit(prefill.class, decode.class))
        };
        others(Leg::Prefill).any(fits) || others(Leg::Decode).any(|decode| decode.local_prefill)
    }

    /// Whether there is a usable pair without these workers.
    fn has_pair(&self, without: &[WorkerNumber]) -> bool {
        let usable = |role| self.usable(role).filter(move |seat| !without.contains(&seat.number));
        let mut prefill = usable(Leg::Prefill);
        prefill
            .any(|prefill| usable(Leg::Decode).any(|decode| self.fit(prefill.class, decode.class)))
    }

    /// The present workers, by number.
    pub fn workers(&self) -> impl Iterator<Item = (WorkerNumber, Leg, WorkerLoad)> {
        let here = self.members.iter().filter(|member| !member.is_leaving);
        here.map(|member| (member.number, member.role, self.load_of(member)))
    }

    /// A worker's load, while it is known.
    pub fn load(&self, worker: WorkerNumber) -> Option<WorkerLoad> {
        self.member(worker).map(|member| self.load_of(member))
    }

    /// A worker's role, while it is known.
    pub fn role(&self, worker: WorkerNumber) -> Option<Leg> {
        self.member(worker).map(|member| member.role)
    }

    fn place(&self, worker: WorkerNumber) -> Option<usize> {
        self.members.binary_search_by_key(&worker, |member| member.number).ok()
    }

    fn member(&self, worker: WorkerNumber) -> Option<&Member> {
        self.place(worker).map(|place| &self.members[place])
    }

    fn here(&self, role: Leg) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(move |member| member.role == role && !member.is_leaving)
    }

    fn usable(&self, role: Leg) -> impl Iterator<Item = &WorkerRow> {
        self.tables[role as usize].usable()
    }

    fn load_of(&self, member: &Member) -> WorkerLoad {
        *self.tables[member.role as usize].load(member.number).expect("a member has a row")
    }

    /// A number is in only one of the tables.
    fn change(&mut self, worker: WorkerNumber, change: impl Fn(&mut WorkerLoad)) {
        self.tables.iter_mut().find_map(|table| table.change(worker, &change));
    }
}
