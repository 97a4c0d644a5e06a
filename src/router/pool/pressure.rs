//! The roles of workers, and their load for the role balancer.

use super::WorkerPool;
use crate::ids::{Leg, Role};
use crate::routing::load::{WorkerLoad, WorkerNumber};
use crate::routing::role_balancer::{DecodeCapacity, WorkerSnapshot};
use std::time::Instant;

/// A worker's report that its role is another one.
#[derive(Clone, Copy, Debug)]
pub struct RoleReport {
    /// The worker.
    pub worker: WorkerNumber,
    /// Its new role.
    pub role: Leg,
    /// Whether this is its first report of that role.
    pub is_news: bool,
}

impl WorkerPool {
    /// The role name of a worker: prefill, decode or mixed.
    pub fn role_name(&self, worker: WorkerNumber) -> Option<String> {
        let role = self.balancer.role(worker)?;
        let is_mixed = self.targets.get(&worker).is_some_and(|target| target.is_mixed);
        Some(if is_mixed { Role::Mixed.to_string() } else { role.to_string() })
    }

    /// The role that a request to the worker names. It includes the number of role changes, because
    /// ports differ after a change and a change back.
    pub(super) fn taken_for(&self, worker: WorkerNumber) -> Option<String> {
        let name = self.role_name(worker)?;
        let changes = self.targets.get(&worker).and_then(|target| target.role_changes);
        Some(match changes {
            Some(changes) => format!("{name}/{changes}"),
            None => name,
        })
    }

    /// A snapshot of all workers for the role balancer, from this router's knowledge.
    pub fn rows(&self, now: Instant) -> Vec<WorkerSnapshot> {
        let is_ready = self.balancer.is_ready();
        let row = |(worker, role, load): (WorkerNumber, Leg, WorkerLoad)| {
            // A mixed worker belongs to neither role.
            let target = self.targets.get(&worker).filter(|target| !target.is_mixed)?;
            debug_assert!(!(target.drains && load.usable), "a worker that drains is not chosen");
            Some(WorkerSnapshot {
                worker,
                role,
                usable: load.usable,
                leaves: target.drains,
                can_change_role: target.role_changes.is_some()
                    && !target.keeps_role
                    && is_ready
                    && self.balancer.is_ready_without(worker),
                sequences: load.reserved,
                queue: load.queue(now),
                uncomputed: load.uncomputed,
                context: load.context,
                capacity: target.capacity,
            })
        };
        self.balancer.workers().filter_map(row).collect()
    }

    /// The total capacity of the usable decode workers. `None` if a worker does not report it.
    pub fn decode_capacity(&self) -> Option<DecodeCapacity> {
        let mut all: Option<DecodeCapacity> = None;
        let usable =
            self.balancer.workers().filter(|(_, role, load)| *role == Leg::Decode && load.usable);
        for (worker, ..) in usable {
            let DecodeCapacity { sequences, tokens } = self.targets.get(&worker)?.capacity?;
            let before = all.unwrap_or(DecodeCapacity { sequences: 0, tokens: 0 });
            all = Some(DecodeCapacity {
                sequences: before.sequences.saturating_add(sequences),
                tokens: before.tokens.saturating_add(tokens),
            });
        }
        all
    }

    /// Tokens of KV in use at the usable decode workers, by their last reports. The result is
    /// `None` if a worker does not report them, or if the router requests no reports.
    pub fn used(&self) -> Option<u64> {
        let usable =
            self.balancer.workers().filter(|(_, role, load)| *role == Leg::Decode && load.usable);
        let used = usable.map(|(worker, ..)| self.targets.get(&worker)?.used);
        used.reduce(|all, one| Some(all?.saturating_add(one?)))?
    }

    /// Marks that a worker cannot change its role. It gets no further order until its identity
    /// changes.
    pub fn mark_role_fixed(&mut self, worker: WorkerNumber) {
        if let Some(target) = self.targets.get_mut(&worker) {
            target.keeps_role = true;
        }
    }

    /// The next worker that has reported another role.
    pub fn turned(&mut self) -> Option<RoleReport> {
        self.turned.pop_front()
    }
}
