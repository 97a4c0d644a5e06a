//! What workers do, and how hard they are pressed.

use super::Fleet;
use crate::cluster::loads::{Load, WorkerNumber};
use crate::cluster::roles::{Room, Row};
use crate::cluster::router::Role;
use crate::wire::message as wire;
use std::time::Instant;

/// A worker that has told that its role is another one now.
#[derive(Clone, Copy, Debug)]
pub struct Turned {
    /// Which.
    pub worker: WorkerNumber,
    /// What it is.
    pub role: Role,
    /// Whether it did not tell so the last time.
    pub is_news: bool,
}

impl Fleet {
    /// What a worker is to the router, by the name of that role.
    pub fn role_name(&self, worker: WorkerNumber) -> Option<String> {
        let role = self.router.role(worker)?;
        let is_mixed = self.targets.get(&worker).is_some_and(|target| target.is_mixed);
        Some(if is_mixed { wire::Role::Mixed.to_string() } else { role.to_string() })
    }

    /// The same as the worker is told; a role that has changed and changed back has other ports.
    pub(super) fn taken_for(&self, worker: WorkerNumber) -> Option<String> {
        let name = self.role_name(worker)?;
        let changes = self.targets.get(&worker).and_then(|target| target.role_changes);
        Some(match changes {
            Some(changes) => format!("{name}/{changes}"),
            None => name,
        })
    }

    /// How hard the workers are pressed, as far as this router knows.
    pub fn rows(&self, now: Instant) -> Vec<Row> {
        let is_ready = self.router.is_ready();
        let row = |(worker, role, load): (WorkerNumber, Role, Load)| {
            // Who does both is on neither side.
            let target = self.targets.get(&worker).filter(|target| !target.is_mixed)?;
            Some(Row {
                worker,
                role,
                usable: load.usable,
                leaves: target.drains,
                can_turn: target.role_changes.is_some()
                    && !target.keeps_role
                    && is_ready
                    && self.router.is_ready_without(worker),
                sequences: load.booked,
                queue: load.queue(now),
                unread: load.unread,
                context: load.context,
                room: target.room,
            })
        };
        self.router.workers().filter_map(row).collect()
    }

    /// What those who generate have room for, of those that may be chosen; `None` where one does not tell.
    pub fn room(&self) -> Option<Room> {
        let mut all: Option<Room> = None;
        let usable =
            self.router.workers().filter(|(_, role, load)| *role == Role::Decode && load.usable);
        for (worker, ..) in usable {
            let Room { sequences, tokens } = self.targets.get(&worker)?.room?;
            let before = all.unwrap_or(Room { sequences: 0, tokens: 0 });
            all = Some(Room {
                sequences: before.sequences.saturating_add(sequences),
                tokens: before.tokens.saturating_add(tokens),
            });
        }
        all
    }

    /// Tokens of KV that are in use at those, by what they said last; `None` where one does not tell, or nobody asks for that.
    pub fn used(&self) -> Option<u64> {
        let usable =
            self.router.workers().filter(|(_, role, load)| *role == Role::Decode && load.usable);
        let used = usable.map(|(worker, ..)| self.targets.get(&worker)?.used);
        used.reduce(|all, one| Some(all?.saturating_add(one?)))?
    }

    /// A worker cannot have another role than it has: it is not asked for that again, until it is something else.
    pub fn keeps_role(&mut self, worker: WorkerNumber) {
        if let Some(target) = self.targets.get_mut(&worker) {
            target.keeps_role = true;
        }
    }

    /// A worker whose role is another one now.
    pub fn turned(&mut self) -> Option<Turned> {
        self.turned.pop_front()
    }
}
