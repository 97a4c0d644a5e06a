//! How calls to workers end, and what that says of the worker: it has answered, told that it drains, broken off, or stood still.
//!
//! Thread: `ctl`. Invariants: a call's booking is released when it ends, however it ends; its connection is kept where another
//! call may use it. Not here: what follows for the request (`flights`), whether the worker is down by that (`cluster::health`).

use super::{Fleet, News, What};
use crate::cluster::loads::WorkerNumber;
use crate::cluster::router::Booking;
use crate::front::router::call::{Call, Lost, Owner};
use crate::front::router::target::Idle;
use crate::limits::{ROUTER_CATCH_UP_TIME, ROUTER_IDLE_MAX};
use crate::net::{CloseReason, ConnId, Distrust, Reactor};
use crate::obs::log::event;
use std::time::Instant;

impl Fleet {
    pub(super) fn closed(
        &mut self,
        reactor: &mut Reactor,
        conn: ConnId,
        reason: CloseReason,
        now: Instant,
    ) {
        let Some(call) = self.calls.get(&conn) else { return };
        let (owner, worker) = (call.owner, call.booking.worker());
        let (connected, begun) = (call.connected, call.is_begun());
        if !connected {
            let change = self.router.refused(worker);
            self.ails(
                worker,
                match reason {
                    CloseReason::Tls(_) => format!("it is not spoken to: {reason}"),
                    _ => format!("it takes no connection: {reason}"),
                },
            );
            if let Some(target) = self.targets.get_mut(&worker) {
                // Who answers there next may be somebody who can.
                target.keeps_role = false;
            }
            self.tell(worker, change, &reason);
            self.is_gone(worker);
            self.look_up_again(worker, now);
            let is_shown = matches!(reason, CloseReason::Tls(why) if why.is_of_certificate());
            if matches!(owner, Owner::Introduction | Owner::Probe)
                && is_shown
                && self.serves(worker)
            {
                return self.distrusted(reactor, conn, now);
            }
        }
        if begun {
            self.lose(reactor, conn, Lost::Closed, now);
        } else {
            self.refuse(reactor, conn, now);
        }
    }

    /// The answer of a call is whole.
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
        let (owner, worker, answer) = (call.owner, call.booking.worker(), call.answer.take());
        let is_outdated = call.is_outdated;
        self.settle(reactor, conn, call, is_reusable, now);
        let Some(answer) = answer else { return };
        let drains = answer.is_of_drain();
        if drains {
            self.drains(reactor, worker);
        }
        match owner {
            Owner::Probe if drains => self.declined(worker, answer.is_of_role(), now),
            Owner::Introduction | Owner::Probe if is_outdated && answer.is_success() => {
                // What was well before it was to drain is not well again for that. How it is now is asked at once.
                self.router.declined(worker, now);
                self.router.hasten_probe(worker, now);
            }
            Owner::Introduction => self.introduced(reactor, worker, Ok(answer), now),
            Owner::Probe if answer.is_success() => {
                self.probed(worker, true, now);
                self.ask_report(reactor, worker, now);
            }
            Owner::Report => self.reported(worker, &answer, now),
            // It says itself that it stands still.
            Owner::Probe => {
                self.ails(worker, format!("/health {}", answer.complaint()));
                self.unwell(reactor, worker, now);
            }
            _ => self.news.push_back(News { owner, conn, what: What::Ended(answer) }),
        }
    }

    pub(super) fn lose(&mut self, reactor: &mut Reactor, conn: ConnId, lost: Lost, now: Instant) {
        let Some(call) = self.calls.remove(&conn) else { return };
        let (owner, worker, connected) = (call.owner, call.booking.worker(), call.connected);
        let (begun, held_back, is_greeting) =
            (call.is_begun(), call.held_back, reactor.is_greeting(conn));
        self.settle(reactor, conn, call, false, now);
        match owner {
            Owner::Introduction if connected => {
                self.router.unanswered(worker);
                self.introduced(reactor, worker, Err(lost.to_string()), now);
            }
            // What it has is not known; whether it is well is for probes to say.
            Owner::Report => self.router.reported(worker, None, now),
            Owner::Introduction | Owner::Probe => {
                // Why there is no connection is known better.
                if is_greeting {
                    self.ails(worker, format!("no answer to a probe: {}", Distrust::Slow));
                } else if connected || lost == Lost::Deadline {
                    self.ails(worker, format!("no answer to a probe: {lost}"));
                }
                self.unwell(reactor, worker, now);
            }
            _ => {
                // Its end comes behind what it had sent by then. A worker that is gone was found to be meanwhile.
                let is_up = self.router.load(worker).is_some_and(|load| load.usable);
                let is_behind = held_back.is_some_and(|at| now < at + ROUTER_CATCH_UP_TIME);
                let lost =
                    if lost == Lost::Closed && is_behind && is_up { Lost::Behind } else { lost };
                let what = if begun { What::Lost(lost) } else { What::Refused };
                self.news.push_back(News { owner, conn, what });
            }
        }
    }

    /// A probe has failed. With as many in a row as make a worker down, it stands still, and so does all that it was
    /// asked, whatever was thought of it before.
    pub(super) fn unwell(&mut self, reactor: &mut Reactor, worker: WorkerNumber, now: Instant) {
        self.probed(worker, false, now);
        if self.router.is_silent(worker) {
            self.is_gone(worker);
            self.give_up(reactor, worker, now);
        }
    }

    /// A probe has met a certificate that is not believed. Who shows it is there, and may be whom it was believed to be
    /// until now: what it was asked then goes on, over connections that stood then.
    fn distrusted(&mut self, reactor: &mut Reactor, conn: ConnId, now: Instant) {
        let Some(call) = self.calls.remove(&conn) else { return };
        let worker = call.booking.worker();
        self.settle(reactor, conn, call, false, now);
        self.router.declined(worker, now);
        self.tell_why_not(worker);
    }

    /// Whether it has requests of clients.
    pub(super) fn serves(&self, worker: WorkerNumber) -> bool {
        self.calls.values().any(|call| call.is_leg_of(worker))
    }

    /// What waits for a worker waits for nothing.
    pub(super) fn give_up(&mut self, reactor: &mut Reactor, worker: WorkerNumber, now: Instant) {
        let is_waiting = |call: &Call| call.is_leg_of(worker);
        let waiting = self.calls.iter().filter(|(_, call)| is_waiting(call));
        for conn in waiting.map(|(&conn, _)| conn).collect::<Vec<_>>() {
            self.lose(reactor, conn, Lost::Silent, now);
        }
    }

    /// A worker takes nothing new: it is not chosen from now on, and its end meets no request that is on its way to
    /// it. Probes tell whether another one has come in its place.
    pub(in crate::front::router) fn drains(&mut self, reactor: &mut Reactor, worker: WorkerNumber) {
        if self.router.refused(worker).is_some()
            && let (Some(role), Some(target)) = (self.role_name(worker), self.targets.get(&worker))
        {
            event!(Info, "router", "worker drains", role = role, worker = target.url);
        }
        let idle = self.targets.get_mut(&worker).map(|target| {
            // Who answers there next may be somebody else, or something else.
            (target.drains, target.introduced) = (true, false);
            std::mem::take(&mut target.idle)
        });
        for call in self.calls.values_mut().filter(|call| call.booking.worker() == worker) {
            call.is_outdated = true;
        }
        for Idle { conn, .. } in idle.into_iter().flatten() {
            self.kept.remove(&conn);
            reactor.close(conn);
        }
    }

    /// A call over which nothing was sent has lost its connection.
    pub(super) fn refuse(&mut self, reactor: &mut Reactor, conn: ConnId, now: Instant) {
        let Some(call) = self.calls.remove(&conn) else { return };
        let owner = call.owner;
        self.settle(reactor, conn, call, false, now);
        self.news.push_back(News { owner, conn, what: What::Refused });
    }

    pub(super) fn settle(
        &mut self,
        reactor: &mut Reactor,
        conn: ConnId,
        call: Call,
        is_reusable: bool,
        now: Instant,
    ) {
        let worker = call.booking.worker();
        let is_reusable = is_reusable && !call.is_last;
        self.release(call.booking, now);
        let stays = is_reusable && self.router.has(worker) && self.kept.len() < ROUTER_IDLE_MAX;
        match self.targets.get_mut(&worker).filter(|_| stays) {
            Some(target) => {
                target.idle.push(Idle { conn, since: now });
                self.kept.insert(conn, worker);
            }
            None => reactor.close(conn),
        }
    }

    /// The worker of a call has read what it was to, and generates.
    pub fn has_read(&mut self, conn: ConnId, now: Instant) {
        if let Some(call) = self.calls.get_mut(&conn) {
            self.router.has_read(&mut call.booking, now);
        }
    }

    /// Ends a booking, and with the last one of a worker that has left what was known of it.
    pub fn release(&mut self, booking: Booking, now: Instant) {
        let worker = booking.worker();
        self.router.release(booking, now);
        if !self.router.knows(worker) {
            self.targets.remove(&worker);
        }
    }

    pub(super) fn drop_idle(
        &mut self,
        reactor: &mut Reactor,
        conn: ConnId,
    ) -> Option<WorkerNumber> {
        let worker = self.kept.remove(&conn)?;
        if let Some(target) = self.targets.get_mut(&worker) {
            target.idle.retain(|idle| idle.conn != conn);
        }
        reactor.close(conn);
        Some(worker)
    }
}
