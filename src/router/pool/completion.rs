//! The end of calls to workers, and the resulting state of the worker: it has answered, drains, has
//! broken the connection, or hangs.
//!
//! Thread: `ctl`.
//! Invariants: every end of a call releases its reservation. Its connection is kept if another call
//! can use it.
//! Not here: the effect on the request (`requests`), the decision that a worker is down
//! (`routing::health`).

use super::{CallEvent, PoolEvent, WorkerPool};
use crate::limits::{ROUTER_CATCH_UP_TIME, ROUTER_IDLE_MAX};
use crate::net::{CloseReason, ConnId, Reactor, TlsError};
use crate::obs::log::event;
use crate::router::call::{Call, Owner};
use crate::router::target::Idle;
use crate::routing::balancer::Reservation;
use crate::routing::load::WorkerNumber;
use crate::stdx::failpoint::is_failpoint_active;
use crate::upstream::answer::CallError;
use std::time::Instant;

impl WorkerPool {
    pub(super) fn closed(
        &mut self,
        reactor: &mut Reactor,
        conn: ConnId,
        reason: CloseReason,
        now: Instant,
    ) {
        let Some(call) = self.calls.get(&conn) else { return };
        let (owner, worker) = (call.owner, call.reservation.worker());
        let (connected, begun) = (call.connected, call.is_begun());
        if !connected {
            let change = self.balancer.refused(worker);
            self.ails(
                worker,
                match reason {
                    CloseReason::Tls(_) => format!("TLS failed: {reason}"),
                    _ => format!("it accepts no connection: {reason}"),
                },
            );
            if let Some(target) = self.targets.get_mut(&worker) {
                // The next worker at this address may be able to change its role.
                target.keeps_role = false;
            }
            self.log_health_change(worker, change, &reason);
            self.log_drain_end(worker);
            self.look_up_again(worker, now);
            let is_shown = matches!(reason, CloseReason::Tls(why) if why.is_of_certificate());
            if matches!(owner, Owner::IdentityQuery | Owner::Probe)
                && is_shown
                && self.serves(worker)
            {
                return self.distrusted(reactor, conn, now);
            }
        }
        if begun {
            self.lose(reactor, conn, CallError::Closed, now);
        } else {
            self.refuse(reactor, conn, now);
        }
    }

    /// The answer of a call is complete.
    pub(super) fn end(
        &mut self,
        reactor: &mut Reactor,
        conn: ConnId,
        keep_alive: bool,
        now: Instant,
    ) {
        let Some(mut call) = self.calls.remove(&conn) else { return };
        let is_reusable =
            keep_alive && call.is_sent() && !call.eof && reactor.received(conn).is_empty();
        let (owner, worker, answer) = (call.owner, call.reservation.worker(), call.answer.take());
        let is_outdated = call.is_outdated;
        self.settle(reactor, conn, call, is_reusable, now);
        let Some(answer) = answer else { return };
        let drains = answer.reports_drain();
        if drains {
            self.mark_draining(reactor, worker);
        }
        match owner {
            Owner::Probe if drains => self.declined(worker, answer.is_role_mismatch(), now),
            Owner::IdentityQuery | Owner::Probe if is_outdated && answer.is_success() => {
                // A success from before the drain says nothing about the present, so the worker is
                // probed at once.
                self.balancer.declined(worker, now);
                self.balancer.hasten_probe(worker, now);
            }
            Owner::IdentityQuery => self.handle_identity(reactor, worker, Ok(answer), now),
            Owner::Probe if answer.is_success() => {
                self.probed(worker, true, now);
                self.ask_report(reactor, worker, now);
            }
            Owner::Report => self.reported(worker, &answer, now),
            // The worker itself reports that it hangs.
            Owner::Probe => {
                let path = &self.health.0;
                let reason = format!("{path} {}", answer.complaint());
                self.ails(worker, reason);
                self.unwell(reactor, worker, now);
            }
            _ => self.news.push_back(PoolEvent { owner, conn, event: CallEvent::Ended(answer) }),
        }
    }

    pub(super) fn lose(
        &mut self,
        reactor: &mut Reactor,
        conn: ConnId,
        lost: CallError,
        now: Instant,
    ) {
        let Some(call) = self.calls.remove(&conn) else { return };
        let (owner, worker, connected) = (call.owner, call.reservation.worker(), call.connected);
        let (begun, held_back, is_greeting) =
            (call.is_begun(), call.held_back, reactor.is_greeting(conn));
        self.settle(reactor, conn, call, false, now);
        match owner {
            Owner::IdentityQuery if connected => {
                self.balancer.unanswered(worker);
                self.handle_identity(reactor, worker, Err(lost.to_string()), now);
            }
            // Its load is unknown. Only probes decide about its health.
            Owner::Report => self.balancer.reported(worker, None, now),
            Owner::IdentityQuery | Owner::Probe => {
                // The reason why there is no connection is more precise.
                if is_greeting {
                    self.ails(worker, format!("no answer to a probe: {}", TlsError::Slow));
                } else if connected || lost == CallError::Deadline {
                    self.ails(worker, format!("no answer to a probe: {lost}"));
                }
                self.unwell(reactor, worker, now);
            }
            _ => {
                // A close arrives after all data that was sent before it. If the worker were gone,
                // a probe would have found that by now.
                let is_up = self.balancer.load(worker).is_some_and(|load| load.usable);
                let is_behind = held_back.is_some_and(|at| now < at + ROUTER_CATCH_UP_TIME);
                let lost = if lost == CallError::Closed && is_behind && is_up {
                    CallError::SlowClient
                } else {
                    lost
                };
                let what = if begun { CallEvent::Lost(lost) } else { CallEvent::Refused };
                self.news.push_back(PoolEvent { owner, conn, event: what });
            }
        }
    }

    /// Handles a failed probe. After enough failures in a row, the worker is down, and all calls to
    /// it fail.
    pub(super) fn unwell(&mut self, reactor: &mut Reactor, worker: WorkerNumber, now: Instant) {
        self.probed(worker, false, now);
        if self.balancer.is_silent(worker) {
            self.log_drain_end(worker);
            self.give_up(reactor, worker, now);
        }
    }

    /// Handles a probe that found an untrusted certificate. The worker is reachable and can be the
    /// same as before. Its open calls continue on their established connections.
    fn distrusted(&mut self, reactor: &mut Reactor, conn: ConnId, now: Instant) {
        let Some(call) = self.calls.remove(&conn) else { return };
        let worker = call.reservation.worker();
        self.settle(reactor, conn, call, false, now);
        self.balancer.declined(worker, now);
        self.tell_why_not(worker);
    }

    /// Whether the worker has calls of clients' requests.
    pub(super) fn serves(&self, worker: WorkerNumber) -> bool {
        self.calls.values().any(|call| call.is_leg_of(worker))
    }

    /// Fails all clients' calls at a worker.
    pub(super) fn give_up(&mut self, reactor: &mut Reactor, worker: WorkerNumber, now: Instant) {
        let is_waiting = |call: &Call| call.is_leg_of(worker);
        let waiting = self.calls.iter().filter(|(_, call)| is_waiting(call));
        for conn in waiting.map(|(&conn, _)| conn).collect::<Vec<_>>() {
            self.lose(reactor, conn, CallError::Silent, now);
        }
        debug_assert!(!self.serves(worker), "a worker that is given up has no calls of clients");
    }

    /// Marks a worker that drains: it is not chosen from now on. Its idle connections are closed,
    /// so that no request arrives at its end. Probes detect another process in its place.
    pub(in crate::router) fn mark_draining(&mut self, reactor: &mut Reactor, worker: WorkerNumber) {
        if self.balancer.refused(worker).is_some()
            && let (Some(role), Some(target)) = (self.role_name(worker), self.targets.get(&worker))
        {
            event!(Info, "router", "worker drains", role = role, worker = target.url);
        }
        let idle = self.targets.get_mut(&worker).map(|target| {
            // The next answer can come from another process.
            (target.drains, target.is_identified) = (true, false);
            std::mem::take(&mut target.idle)
        });
        for call in self.calls.values_mut().filter(|call| call.reservation.worker() == worker) {
            call.is_outdated = true;
        }
        for Idle { conn, .. } in idle.into_iter().flatten() {
            self.kept.remove(&conn);
            reactor.close(conn);
        }
    }

    /// Ends a call that has lost its connection before any data was sent.
    pub(super) fn refuse(&mut self, reactor: &mut Reactor, conn: ConnId, now: Instant) {
        let Some(call) = self.calls.remove(&conn) else { return };
        let owner = call.owner;
        self.settle(reactor, conn, call, false, now);
        self.news.push_back(PoolEvent { owner, conn, event: CallEvent::Refused });
    }

    pub(super) fn settle(
        &mut self,
        reactor: &mut Reactor,
        conn: ConnId,
        call: Call,
        is_reusable: bool,
        now: Instant,
    ) {
        debug_assert!(!self.calls.contains_key(&conn), "a call that has ended is not known");
        let worker = call.reservation.worker();
        let is_reusable = is_reusable && !call.is_last;
        if is_reusable || !is_failpoint_active("lost call keeps its reservation") {
            self.release(call.reservation, now);
        }
        let stays = is_reusable && self.balancer.has(worker) && self.kept.len() < ROUTER_IDLE_MAX;
        match self.targets.get_mut(&worker).filter(|_| stays) {
            Some(target) => {
                target.idle.push(Idle { conn, since: now });
                let before = self.kept.insert(conn, worker);
                debug_assert!(before.is_none(), "a connection becomes idle once");
            }
            None => reactor.close(conn),
        }
    }

    /// Records that the worker of a call has computed the prompt and now generates.
    pub fn mark_read(&mut self, conn: ConnId, now: Instant) {
        if let Some(call) = self.calls.get_mut(&conn) {
            self.balancer.mark_read(&mut call.reservation, now);
        }
    }

    /// Ends a reservation. A worker that has left is forgotten after its last reservation.
    pub fn release(&mut self, reservation: Reservation, now: Instant) {
        let worker = reservation.worker();
        self.balancer.release(reservation, now);
        if !self.balancer.knows(worker) {
            let target = self.targets.remove(&worker);
            debug_assert!(
                target.is_none_or(|target| target.idle.is_empty()),
                "a worker that is forgotten has no connection"
            );
        }
    }

    pub(super) fn drop_idle(
        &mut self,
        reactor: &mut Reactor,
        conn: ConnId,
    ) -> Option<WorkerNumber> {
        let worker = self.kept.remove(&conn)?;
        if let Some(target) = self.targets.get_mut(&worker)
            && !is_failpoint_active("idle connection stays listed")
        {
            target.idle.retain(|idle| idle.conn != conn);
        }
        reactor.close(conn);
        Some(worker)
    }
}
