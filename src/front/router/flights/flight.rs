//! One request on its way: what it has on connections, and what its client has of the answer.
//!
//! Invariant: it has at most one call of each leg. Not here: what follows from what happens (`cluster::flight`).

use super::{Load, Request, Way};
use crate::cause::Cause;
use crate::cluster::flight::{Flight as Core, News};
use crate::cluster::router::{Booking, Role};
use crate::config::resolved::LogLevel;
use crate::front::openai::ToldKv;
use crate::front::router::call::{Owner, WorkerAnswer};
use crate::front::router::failure::Failure;
use crate::front::router::relay::Relay;
use crate::limits::{REQUEST_TIME_MAX, ROUTER_GRACE};
use crate::net::{CloseReason, ConnId};
use crate::obs::log;
use std::fmt;
use std::time::Instant;

#[derive(Debug)]
pub(super) struct Flight {
    pub(super) request: Request,
    pub(super) begun: Instant,
    pub(super) core: Core,
    pub(super) relay: Relay,
    /// The call whose answer is the client's.
    pub(super) lead: Option<ConnId>,
    /// The prefill leg, while it can still fail the request.
    pub(super) prefill: Option<ConnId>,
    /// Charged to the worker of this try that has no call: prefill, which decode asks, or decode until prefill has
    /// answered.
    pub(super) held: Option<Booking>,
    /// Where its KV is kept for decode, by this try's prefill worker.
    pub(super) kept: Option<ToldKv>,
    /// When it is tried again.
    pub(super) due: Option<Instant>,
    /// How its client gets the answer, once it does.
    pub(super) body: Option<Body>,
    /// What it is told if no other try comes to more.
    pub(super) last: Option<WorkerAnswer>,
}

/// How an answer that has begun is passed on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Body {
    Stream,
    Long,
}

impl Flight {
    /// A leg has told a failure in its stream.
    pub(super) fn told(&mut self, role: Role, cause: Cause, error: Vec<u8>) -> News {
        let media = crate::front::connections::JSON.to_owned();
        let status = cause.http_status();
        let told = WorkerAnswer { status, media, retry_after: None, body: error, own: None };
        let news = match Failure::of(&told).news(role) {
            News::Failed(role, _) => News::Failed(role, cause),
            news => news,
        };
        self.last = Some(told);
        news
    }

    /// When its legs are given up: a worker keeps the client's time itself, unless it stands still.
    pub(super) fn until(&self) -> Instant {
        self.deadline().map_or(self.begun + REQUEST_TIME_MAX, |deadline| deadline + ROUTER_GRACE)
    }

    /// When its client waits no longer, if it has said.
    pub(super) fn deadline(&self) -> Option<Instant> {
        Some(self.begun + self.request.order.patience()?)
    }

    /// Whether it is one of those that metrics are about: requests for text.
    pub(super) fn is_counted(&self) -> bool {
        matches!(self.request.load, Load::Routed(_))
    }

    /// Asks for connections; says how many do not stand yet.
    pub(super) fn open(
        &mut self,
        calls: impl IntoIterator<Item = (Owner, Booking)>,
        way: &mut Way<'_>,
    ) -> Result<u32, CloseReason> {
        let until = self.until();
        let mut result = Ok(0);
        for (owner, booking) in calls {
            let Ok(awaited) = &mut result else {
                way.fleet.release(booking, way.now);
                continue;
            };
            match way.fleet.open(way.reactor, owner, booking, until, way.now) {
                Ok((conn, stands)) => {
                    *awaited += u32::from(!stands);
                    let leg = if matches!(owner, Owner::Lead(_)) {
                        &mut self.lead
                    } else {
                        &mut self.prefill
                    };
                    *leg = Some(conn);
                }
                Err(reason) => result = Err(reason),
            }
        }
        result
    }

    /// Whether decode has begun to answer, well or not, so that prefill's outcome no longer counts.
    pub(super) fn has_begun(&self, way: &mut Way<'_>) -> bool {
        let answer = self.lead.and_then(|lead| way.fleet.answer(lead));
        !self.core.is_waiting() || answer.is_some_and(|a| !a.body.is_empty() || !a.is_success())
    }

    /// Logs how a request fared, and at which worker where it was one; what is the client's making is no news.
    pub(super) fn tell(&self, what: &str, role: Role, cause: Cause, way: &Way<'_>) {
        let level = match cause {
            Cause::Refused | Cause::Aborted => LogLevel::Debug,
            _ => LogLevel::Warn,
        };
        if log::is_logged(level) {
            let accused: Vec<_> = self.core.accused().map(|worker| way.fleet.url(worker)).collect();
            let chosen =
                || self.core.worker(role).map_or("none".into(), |worker| way.fleet.url(worker));
            let worker = if accused.is_empty() { chosen() } else { accused.join(", ") };
            let why = self.last.as_ref().map(Failure::of);
            let why: &dyn fmt::Display = match &why {
                Some(failure) => failure,
                None => &"unknown",
            };
            let fields: [log::Field; 4] = [
                ("request", &self.request.id),
                ("worker", &worker),
                ("cause", &cause),
                ("why", why),
            ];
            log::write(level, "router", what, &fields);
        }
    }

    /// Both workers have done their part.
    pub(super) fn acquit(&self, way: &mut Way<'_>) {
        let workers =
            [Role::Prefill, Role::Decode].into_iter().filter_map(|role| self.core.worker(role));
        workers.for_each(|worker| way.fleet.router().acquit(worker));
    }

    pub(super) fn cancel(&mut self, way: &mut Way<'_>) {
        way.cancel(self.lead.take());
        way.cancel(self.prefill.take());
        self.release(way);
        self.give_up_kept(way);
    }

    /// Nobody waits any more for the worker that it is charged to without a call.
    pub(super) fn release(&mut self, way: &mut Way<'_>) {
        if let Some(held) = self.held.take() {
            way.fleet.release(held, way.now);
        }
    }
}
