//! Feedback about workers: results of probes, load reports, requests that fail or succeed.
//!
//! Invariants: a worker can be chosen while its last probes succeed. When it becomes unusable, its
//! known prompts and foreign load are cleared, because it can return as another process.

use super::{LoadBalancer, Member};
use crate::routing::health::{Health, HealthChange};
use crate::routing::load::{ForeignLoad, LoadReport, WorkerNumber};
use crate::routing::policy::PolicyNeeds;
use crate::stdx::failpoint::is_failpoint_active;
use std::time::Instant;

impl LoadBalancer {
    /// The next worker to probe now. The caller reports the result with [`LoadBalancer::probed`].
    pub fn begin_probe(&mut self, now: Instant) -> Option<WorkerNumber> {
        // A leaving worker is still probed while clients wait for it.
        let tables = &self.tables;
        let is_loaded = |member: &Member| {
            tables[member.role as usize].load(member.number).is_some_and(|load| load.reserved > 0)
        };
        let mut asked =
            self.members.iter_mut().filter(|member| !member.is_leaving || is_loaded(member));
        asked.find_map(|member| member.health.begin_probe(now).then_some(member.number))
    }

    /// Makes a worker's next probe due now, because the worker has probably changed.
    pub fn hasten_probe(&mut self, worker: WorkerNumber, now: Instant) {
        if let Some(place) = self.place(worker) {
            self.members[place].health.hasten(now);
        }
    }

    /// Applies the result of a probe.
    pub fn probed(
        &mut self,
        worker: WorkerNumber,
        is_well: bool,
        now: Instant,
    ) -> Option<HealthChange> {
        self.turn(worker, |health| health.probed(is_well, now))
    }

    /// Applies the result of a probe: the worker is alive, but takes no new requests.
    pub fn declined(&mut self, worker: WorkerNumber, now: Instant) -> Option<HealthChange> {
        self.turn(worker, |health| health.declined(now))
    }

    /// Records that a worker did not answer the identity query before a probe.
    pub fn unanswered(&mut self, worker: WorkerNumber) {
        if let Some(place) = self.place(worker) {
            self.members[place].health.unanswered();
        }
    }

    /// Whether a policy compares the load of workers.
    pub fn compares_loads(&self) -> bool {
        self.policies.all().into_iter().any(|policy| PolicyNeeds::of(policy).loads)
    }

    /// Records that a load report is requested now. The caller passes it to
    /// [`LoadBalancer::reported`].
    pub fn ask_report(&mut self, worker: WorkerNumber) {
        let reserved = self.load(worker).map(|load| load.reserved());
        if let Some(place) = self.place(worker) {
            self.members[place].asked = reserved;
        }
    }

    /// Applies a load report, or its absence. The result is the worker's foreign load until the
    /// next report.
    pub fn reported(&mut self, worker: WorkerNumber, report: Option<LoadReport>, now: Instant) {
        let Some(place) = self.place(worker) else { return };
        let before = self.members[place].asked.take();
        let role = self.members[place].role;
        self.tables[role as usize].change(worker, |load| {
            let others = report
                .zip(before)
                .map(|(report, before)| report.beyond(before, load))
                .unwrap_or_default();
            let tokens = u32::try_from(others.uncomputed).unwrap_or(u32::MAX);
            load.set_others(
                ForeignLoad { reading: self.forecast.reading(tokens, 0), ..others },
                now,
            );
        });
    }

    /// Whether a worker has failed enough probes in a row to be down.
    pub fn is_silent(&self, worker: WorkerNumber) -> bool {
        !is_failpoint_active("silent worker is waited for")
            && self.member(worker).is_some_and(|member| member.health.is_silent())
    }

    /// Records that a worker refused a connection.
    pub fn refused(&mut self, worker: WorkerNumber) -> Option<HealthChange> {
        self.turn(worker, Health::refused)
    }

    /// The next worker that did not come up in time. It is not probed any more.
    pub fn give_up(&mut self, now: Instant) -> Option<WorkerNumber> {
        let late = self
            .members
            .iter_mut()
            .find_map(|member| member.health.give_up(now).then_some(member.number));
        let is_down = |worker| self.load(worker).is_some_and(|load| !load.usable);
        debug_assert!(late.is_none_or(is_down), "a worker that is up is not given up");
        late.filter(|&worker| self.has(worker))
    }

    /// Keeps probing this worker, even if it takes long to come up.
    pub fn keep_looking(&mut self, worker: WorkerNumber) {
        if let Some(place) = self.place(worker) {
            self.members[place].health.keep_looking();
        }
    }

    /// Probes this worker again if the router had stopped to probe it. Returns whether it had.
    /// Called when the worker is announced again.
    pub fn await_anew(&mut self, worker: WorkerNumber, now: Instant) -> bool {
        self.place(worker).is_some_and(|place| self.members[place].health.await_anew(now))
    }

    /// Records a request that failed at this worker, or because of it.
    pub fn record_failure(&mut self, worker: WorkerNumber, now: Instant) {
        let Some(place) = self.place(worker) else { return };
        let member = &mut self.members[place];
        if let Some(until) = member.breaker.failed(now) {
            self.tables[member.role as usize].suspect(worker, until);
        }
    }

    /// Records a request that succeeded at this worker.
    pub fn record_success(&mut self, worker: WorkerNumber) {
        let Some(place) = self.place(worker) else { return };
        let member = &mut self.members[place];
        if member.breaker.answered() {
            self.change(worker, |load| load.suspect = None);
        }
    }

    fn turn(
        &mut self,
        worker: WorkerNumber,
        step: impl FnOnce(&mut Health) -> Option<HealthChange>,
    ) -> Option<HealthChange> {
        let place = self.place(worker)?;
        let member = &mut self.members[place];
        let change = step(&mut member.health);
        if member.is_leaving {
            return None;
        }
        let (role, is_usable) = (member.role as usize, member.health.is_up());
        let has_gone = self.tables[role].change(worker, |load| {
            let was_usable = std::mem::replace(&mut load.usable, is_usable);
            let has_gone = was_usable && !is_usable;
            if has_gone {
                // The worker can return as another process, without the load of this one.
                load.others = ForeignLoad::default();
            }
            has_gone
        });
        if has_gone? {
            if !is_failpoint_active("prompts of a dead worker stay known") {
                self.prefixes[role].empty(worker);
            }
            self.tables[role].set_held(worker, 0);
        }
        change
    }
}
