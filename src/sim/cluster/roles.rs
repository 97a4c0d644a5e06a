//! Workers that change their roles: told to, put together anew in the same process, or what they were before, after all.
//!
//! To peers the new worker is another process at the same place: links, lanes and queue pairs of the old one are closed.
//! To routers it is the same one: their connections stand, and what comes on them waits until it goes on. Not here: when
//! it is enough (`front::turning`), what it refuses meanwhile (`edge::roles`).

use super::{Cluster, Finding};
use crate::cluster::router::Role;
use crate::front::turning::Wanted;
use crate::limits::DRAIN_DONE_TIME;
use crate::sim::agenda::{Nanos, SECOND};
use crate::sim::checkers::{Checked, Checker, idle};
use crate::sim::edge::{Input, name_of};
use std::time::Duration;

/// From the end of a change's time until it is given up,
const GIVEN_UP: Nanos = 2 * SECOND;
/// or comes about after all, where nothing is left but to hear that what was written has been read.
const HEARD: Nanos = GIVEN_UP + DRAIN_DONE_TIME.as_nanos() as Nanos;

/// What a worker was told.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn {
    /// When its time is up.
    until: Nanos,
    /// How long it is put together anew.
    still: Nanos,
}

impl Cluster<'_> {
    /// Workers that have this role now, also those whose process is not there.
    pub(super) fn hosts_of(&self, role: Role) -> Vec<usize> {
        (0..self.hosts.len()).filter(|&host| self.hosts[host].role == role).collect()
    }

    /// A worker is told to have the other role, unless it is on its way to that, or to its end.
    pub(super) fn tell_to_turn(&mut self, index: usize, patience: Nanos, still: Nanos) {
        let now = self.agenda.now();
        let host = &mut self.hosts[index];
        if host.process.is_some() && host.leaves.is_none() && host.turns.is_none() {
            host.turns = Some(Turn { until: now + patience, still });
            let (life, to) = (host.life, host.role.other());
            self.reasons.leaves(index, true, now);
            self.story.tell(
                now,
                "process",
                index,
                "is told to have the other role",
                None,
                to as u64,
            );
            let wanted = Wanted { role: name_of(to), patience: Duration::from_nanos(patience) };
            self.deliver(index, life, Input::Turn(wanted));
        }
    }

    /// Nothing is left of a worker's role: another worker comes in its place.
    ///
    /// # Errors
    /// Something is left.
    pub(super) fn turn_role(&mut self, index: usize, to: Role) -> Checked {
        let now = self.agenda.now();
        let host = &mut self.hosts[index];
        let Some(process) = host.process.take() else { return Ok(()) };
        idle::holds_nothing(index, &process)?;
        let (life, still) = (host.life, host.turns.map_or(0, |turn| turn.still));
        self.story.tell(now, "process", index, "is put together anew", None, to as u64);
        self.close_links(index, life, false);
        self.close_asked(index, life, false, now);
        let process = process.turned(index, to, &self.plan.size(to), self.site(index));
        let process = process.expect("memory for a process");
        // What the old one had open is closed with it.
        self.leave_lanes(index, life, false);
        self.reasons.ends(index, now);
        self.reasons.returns(index, now + still);
        self.report.turned += 1;
        let host = &mut self.hosts[index];
        host.paused_until = host.paused_until.max(now + still);
        let begins = host.paused_until;
        self.begin_worker(index, to, process, begins);
        Ok(())
    }

    /// A worker stays what it is.
    pub(super) fn keep_role(&mut self, index: usize) {
        let now = self.agenda.now();
        let host = &mut self.hosts[index];
        if host.turns.take().is_some() {
            self.story.tell(now, "process", index, "keeps its role", None, 0);
            self.report.stayed += 1;
            if host.leaves.is_none() {
                self.reasons.returns(index, now);
            }
        }
    }

    /// Who is to change does so in its time, or goes back to what it was.
    pub(super) fn turned(&self, now: Nanos) -> Checked {
        let is_late = |index: usize| {
            let host = &self.hosts[index];
            let Some((process, turn)) = host.process.as_ref().zip(host.turns) else { return false };
            let slack = if process.edge.is_busy() { GIVEN_UP } else { HEARD };
            turn.until.max(host.kept_until()) + slack < now
        };
        match (0..self.hosts.len()).find(|&index| is_late(index)) {
            None => Ok(()),
            Some(index) => {
                let what = format!("process {index} goes on emptying when the time for that is up");
                Err(Finding::new(Checker::Roles, what))
            }
        }
    }
}
