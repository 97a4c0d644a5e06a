//! What is heard of workers: probes that end, what they report, requests that fail there or go well.
//!
//! Invariant: a choice sees a worker as usable while its last probes say so; who is not so any more has no prompts in mind and
//! nothing of others, since who comes back may be another process.

use super::{Member, Router};
use crate::cluster::health::{Change, Health};
use crate::cluster::loads::{Others, Report, WorkerNumber};
use crate::stdx::planted::is_planted;
use std::time::Instant;

impl Router {
    /// The next worker that is to be probed now; what comes of it is told by [`Router::probed`].
    pub fn begin_probe(&mut self, now: Instant) -> Option<WorkerNumber> {
        // Clients wait for some of those that leave.
        let tables = &self.tables;
        let is_loaded = |member: &Member| {
            tables[member.role as usize].load(member.number).is_some_and(|load| load.booked > 0)
        };
        let mut asked =
            self.members.iter_mut().filter(|member| !member.is_leaving || is_loaded(member));
        asked.find_map(|member| member.health.begin_probe(now).then_some(member.number))
    }

    /// A worker's next probe is due now: there is reason to think that it has changed.
    pub fn hasten_probe(&mut self, worker: WorkerNumber, now: Instant) {
        if let Some(place) = self.place(worker) {
            self.members[place].health.hasten(now);
        }
    }

    /// A probe has ended.
    pub fn probed(&mut self, worker: WorkerNumber, is_well: bool, now: Instant) -> Option<Change> {
        self.turn(worker, |health| health.probed(is_well, now))
    }

    /// A probe has ended: the worker is there, and takes nothing new.
    pub fn declined(&mut self, worker: WorkerNumber, now: Instant) -> Option<Change> {
        self.turn(worker, |health| health.declined(now))
    }

    /// A worker was asked who it is, before a probe, and has not answered.
    pub fn unanswered(&mut self, worker: WorkerNumber) {
        if let Some(place) = self.place(worker) {
            self.members[place].health.unanswered();
        }
    }

    /// Whether a choice asks how much work workers have.
    pub fn compares_loads(&self) -> bool {
        self.policies.prefill.compares_loads() || self.policies.decode.compares_loads()
    }

    /// A worker is asked now what it has; what it says is told by [`Router::reported`].
    pub fn ask_report(&mut self, worker: WorkerNumber) {
        let booked = self.load(worker).map(|load| load.booked());
        if let Some(place) = self.place(worker) {
            self.members[place].asked = booked;
        }
    }

    /// A worker has said what it has, or nothing: what it has of others is that much from now on, until the next report.
    pub fn reported(&mut self, worker: WorkerNumber, report: Option<Report>, now: Instant) {
        let Some(place) = self.place(worker) else { return };
        let before = self.members[place].asked.take();
        let role = self.members[place].role;
        self.tables[role as usize].change(worker, |load| {
            let others = report
                .zip(before)
                .map(|(report, before)| report.beyond(before, load))
                .unwrap_or_default();
            let tokens = u32::try_from(others.unread).unwrap_or(u32::MAX);
            load.set_others(Others { reading: self.forecast.reading(tokens, 0), ..others }, now);
        });
    }

    /// Whether a worker has failed as many probes in a row as make it down.
    pub fn is_silent(&self, worker: WorkerNumber) -> bool {
        !is_planted("silent worker is waited for")
            && self.member(worker).is_some_and(|member| member.health.is_silent())
    }

    /// A worker did not take a connection.
    pub fn refused(&mut self, worker: WorkerNumber) -> Option<Change> {
        self.turn(worker, Health::refused)
    }

    /// The next worker that is given up now: it was never well for as long as it may take.
    pub fn give_up(&mut self, now: Instant) -> Option<WorkerNumber> {
        let late = self
            .members
            .iter_mut()
            .find_map(|member| member.health.give_up(now).then_some(member.number));
        late.filter(|&worker| self.has(worker))
    }

    /// A worker is never given up, however long it takes.
    pub fn keep_looking(&mut self, worker: WorkerNumber) {
        if let Some(place) = self.place(worker) {
            self.members[place].health.keep_looking();
        }
    }

    /// Somebody says that this worker is there. Whether it was given up, and is looked for anew.
    pub fn await_anew(&mut self, worker: WorkerNumber, now: Instant) -> bool {
        self.place(worker).is_some_and(|place| self.members[place].health.await_anew(now))
    }

    /// A request failed at this worker, or because of it.
    pub fn accuse(&mut self, worker: WorkerNumber, now: Instant) {
        let Some(place) = self.place(worker) else { return };
        let member = &mut self.members[place];
        if let Some(until) = member.breaker.failed(now) {
            self.tables[member.role as usize].suspect(worker, until);
        }
    }

    /// A request went well there.
    pub fn acquit(&mut self, worker: WorkerNumber) {
        let Some(place) = self.place(worker) else { return };
        let member = &mut self.members[place];
        if member.breaker.answered() {
            self.change(worker, |load| load.suspect = None);
        }
    }

    fn turn(
        &mut self,
        worker: WorkerNumber,
        step: impl FnOnce(&mut Health) -> Option<Change>,
    ) -> Option<Change> {
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
                // Who comes back may be another process, which knows nothing.
                load.others = Others::default();
            }
            has_gone
        });
        if has_gone? {
            self.prefixes[role].empty(worker);
            self.tables[role].set_held(worker, 0);
        }
        change
    }
}
