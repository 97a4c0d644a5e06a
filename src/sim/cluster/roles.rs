//! Role changes of workers: the order to change, the rebuild in the same process, or the return to
//! the old role.
//!
//! For peers, the new worker is another process at the same place: links, lanes and queue pairs of
//! the old one are closed. For routers, it is the same process: their connections stay open, and
//! their requests wait. Not here: the end of a change (`server::role_change`), refusals during a
//! change (`edge::roles`).

use super::{Cluster, Finding};
use crate::ids::Leg;
use crate::limits::DRAIN_DONE_TIME;
use crate::server::role_change::RoleChangeRequest;
use crate::sim::checkers::{Checked, Checker, idle};
use crate::sim::edge::{Input, name_of};
use crate::stdx::event_queue::{Nanos, SECOND};
use std::time::Duration;

/// Time from a change's deadline until it is cancelled,
const GIVEN_UP: Nanos = 2 * SECOND;
/// or until it succeeds after all. In that case, the worker waits only for the confirmation of its
/// writes.
const HEARD: Nanos = GIVEN_UP + DRAIN_DONE_TIME.as_nanos() as Nanos;

/// The order to change the role.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingRoleChange {
    /// The deadline.
    until: Nanos,
    /// Duration of the rebuild.
    still: Nanos,
}

impl Cluster<'_> {
    /// Workers that have this role now, including workers without a running process.
    pub(super) fn hosts_of(&self, role: Leg) -> Vec<usize> {
        (0..self.hosts.len()).filter(|&host| self.hosts[host].role == role).collect()
    }

    /// Orders a worker to change its role, unless it is already changing or draining.
    pub(super) fn tell_to_turn(&mut self, index: usize, patience: Nanos, still: Nanos) {
        let now = self.agenda.now();
        let host = &mut self.hosts[index];
        if host.process.is_some() && host.leaves.is_none() && host.turns.is_none() {
            host.turns = Some(PendingRoleChange { until: now + patience, still });
            let (life, to) = (host.life, host.role.other());
            self.reasons.leaves(index, true, now);
            self.trace.record(now, "process", index, "starts to change its role", None, to as u64);
            let wanted =
                RoleChangeRequest { role: name_of(to), patience: Duration::from_nanos(patience) };
            self.deliver(index, life, Input::Turn(wanted));
        }
    }

    /// Replaces a worker that has finished its old role by a worker of the new role.
    ///
    /// # Errors
    /// The old worker still holds something.
    pub(super) fn turn_role(&mut self, index: usize, to: Leg) -> Checked {
        let now = self.agenda.now();
        let host = &mut self.hosts[index];
        let Some(process) = host.process.take() else { return Ok(()) };
        idle::holds_nothing(index, &process)?;
        let (life, still) = (host.life, host.turns.map_or(0, |turn| turn.still));
        self.trace.record(now, "process", index, "is put together anew", None, to as u64);
        self.close_links(index, life, false);
        self.close_asked(index, life, false, now);
        let process = process.turned(index, to, &self.plan.size(to), self.site(index));
        let process = process.expect("memory for a process");
        // The connections of the old worker close with it.
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

    /// Ends a role change: the worker keeps its role.
    pub(super) fn keep_role(&mut self, index: usize) {
        let now = self.agenda.now();
        let host = &mut self.hosts[index];
        if host.turns.take().is_some() {
            self.trace.record(now, "process", index, "keeps its role", None, 0);
            self.report.stayed += 1;
            if host.leaves.is_none() {
                self.reasons.returns(index, now);
            }
        }
    }

    /// Fails if a role change is neither finished nor cancelled in time.
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
                let what = format!("process {index} goes on emptying after its deadline");
                Err(Finding::new(Checker::Roles, what))
            }
        }
    }
}
