//! Queries or changes the role of a worker: for an operator, or by the role balancer
//! (`routing::role_balancer`). An operator gets the answer of the worker's own `/role`.
//!
//! Thread: `ctl`.
//! Invariants: after the order, the worker gets no new requests until it has reported its role. A
//! worker that refuses is usable again after its next probe. If a worker cannot change, the
//! balancer does not order it again.
//! Not here: the check that the worker can be spared (`workers`; for the balancer
//! `pool::pressure`), the effects on the worker (`pool`, `registry::membership`).

use crate::api::{ApiError, ErrorCode};
use crate::cause::Cause;
use crate::http::Method;
use crate::http::response::JSON;
use crate::ids::{Leg, Role};
use crate::limits::{BALANCE_CHANGE_TIME, BALANCE_INTERVAL, ROUTER_FANOUT_TIME};
use crate::net::{CloseReason, ConnId};
use crate::obs::log::event;
use crate::router::call::Owner;
use crate::router::pool::CallEvent;
use crate::router::requests::RouterContext;
use crate::routing::load::WorkerNumber;
use crate::routing::role_balancer::{BalanceConfig, RoleBalancer, RoleChangeOrder};
use crate::server::role_change::RoleChangeRequest;
use crate::stdx::hash_map::HashMap;
use crate::upstream::failure::UpstreamFailure;
use crate::upstream::request::UpstreamHead;
use std::sync::Arc;
use std::time::Instant;

/// Path of a worker's role.
const PATH: &str = "/role";

/// The clients that wait for an answer, with the connections of their calls.
#[derive(Debug, Default)]
pub struct RoleAdmin {
    open: HashMap<ConnId, ConnId>,
    /// The role balancer, if it is on, and the time of its next poll.
    balance: Option<(RoleBalancer, Instant)>,
    /// The worker that the balancer has ordered to change, until it has answered.
    ordered: Option<(ConnId, WorkerNumber)>,
}

impl RoleAdmin {
    /// Starts with a role balancer that has these settings.
    pub fn balancing(terms: BalanceConfig, now: Instant) -> RoleAdmin {
        RoleAdmin { balance: Some((RoleBalancer::new(terms), now)), ..RoleAdmin::default() }
    }

    /// Whether no client waits.
    pub fn is_idle(&self) -> bool {
        self.open.is_empty()
    }

    /// Orders a role change for a client.
    pub fn begin(
        &mut self,
        client: ConnId,
        worker: WorkerNumber,
        wanted: RoleChangeRequest,
        cx: &mut RouterContext<'_>,
    ) {
        match ask(Owner::RoleChange(client), worker, wanted, cx) {
            Ok(conn) => drop(self.open.insert(client, conn)),
            Err(reason) => cx.refuse(client, &lost(reason.to_string())),
        }
    }

    /// Queries a worker's role for a client.
    pub fn query_role(&mut self, client: ConnId, worker: WorkerNumber, cx: &mut RouterContext<'_>) {
        let mut order = UpstreamHead::get(PATH);
        order.headers.extend(cx.pool.bearer());
        let reservation = cx.pool.balancer().reserve_visit(worker);
        let until = cx.now + ROUTER_FANOUT_TIME;
        match cx.pool.open_call(cx.reactor, Owner::RoleChange(client), reservation, until, cx.now) {
            Ok((conn, _)) => {
                cx.pool.send_request(cx.reactor, conn, &order, &Arc::default(), cx.now);
                self.open.insert(client, conn);
            }
            Err(reason) => cx.refuse(client, &lost(reason.to_string())),
        }
    }

    /// Handles an event of a call for a client.
    pub fn handle_call_event(
        &mut self,
        client: ConnId,
        conn: ConnId,
        what: &CallEvent,
        cx: &mut RouterContext<'_>,
    ) {
        if self.open.get(&client) != Some(&conn)
            || matches!(what, CallEvent::Ready | CallEvent::Processing | CallEvent::Arrived)
        {
            return;
        }
        self.open.remove(&client);
        match what {
            CallEvent::Ended(answer) => {
                cx.connections.send_response(cx.reactor, client, &answer.whole(), cx.now);
            }
            _ => cx.refuse(client, &lost("it was unreachable or did not answer".into())),
        }
    }

    /// Forgets a client that has disconnected. The worker still performs the order.
    pub fn handle_disconnect(&mut self, client: ConnId, cx: &mut RouterContext<'_>) {
        if let Some(conn) = self.open.remove(&client) {
            cx.pool.detach_call(conn);
        }
    }

    /// Polls the role balancer, if it is on and due.
    pub fn poll_balancer(&mut self, cx: &mut RouterContext<'_>) {
        let now = cx.now;
        let Some((balance, next)) = self.balance.as_mut().filter(|(_, next)| *next <= now) else {
            return;
        };
        *next = now + BALANCE_INTERVAL;
        if self.ordered.is_some() {
            return;
        }
        let rows = cx.pool.rows(now);
        let Some(RoleChangeOrder { worker, to, pressure: [prefill, decode] }) =
            balance.poll_order(&rows, now)
        else {
            return;
        };
        event!(
            Info,
            "router",
            "changing the role of a worker",
            worker = cx.pool.url(worker),
            to = to,
            prefill_pressure = format!("{prefill:.2}"),
            decode_pressure = format!("{decode:.2}")
        );
        let role = match to {
            Leg::Prefill => Role::Prefill,
            Leg::Decode => Role::Decode,
        };
        match ask(
            Owner::Balance,
            worker,
            RoleChangeRequest { role, patience: BALANCE_CHANGE_TIME },
            cx,
        ) {
            Ok(conn) => self.ordered = Some((conn, worker)),
            Err(reason) => keeps(worker, &format!("cannot connect: {reason}"), cx),
        }
    }

    /// Handles an event of the balancer's call.
    pub fn handle_balancer_event(
        &mut self,
        conn: ConnId,
        what: &CallEvent,
        cx: &mut RouterContext<'_>,
    ) {
        let ordered = self.ordered.filter(|&(ordered, _)| {
            ordered == conn
                && !matches!(what, CallEvent::Ready | CallEvent::Processing | CallEvent::Arrived)
        });
        let Some((_, worker)) = ordered else { return };
        self.ordered = None;
        let why = match what {
            CallEvent::Ended(answer) if answer.is_success() => return,
            CallEvent::Ended(answer) => {
                let failure = UpstreamFailure::from_reply(answer);
                if failure.has_code(ErrorCode::RoleNotPossible) {
                    cx.pool.mark_role_fixed(worker);
                }
                format!("it answers with {failure}")
            }
            _ => "it was unreachable or did not answer".into(),
        };
        keeps(worker, &why, cx);
    }
}

/// Logs that a worker keeps its role, and why.
fn keeps(worker: WorkerNumber, why: &str, cx: &RouterContext<'_>) {
    event!(Warn, "router", "a worker keeps its role", worker = cx.pool.url(worker), why = why);
}

/// Orders a worker to take a role. Returns the connection of the call. From now on, the worker gets
/// no other requests, unless it already has that role.
fn ask(
    owner: Owner,
    worker: WorkerNumber,
    wanted: RoleChangeRequest,
    cx: &mut RouterContext<'_>,
) -> Result<ConnId, CloseReason> {
    let mut order = UpstreamHead::get(PATH);
    order.method = Method::Post;
    order.headers = vec![("content-type", JSON.to_owned())];
    order.headers.extend(cx.pool.admin_bearer().or_else(|| cx.pool.bearer()));
    let is_other = cx.pool.role_name(worker).is_some_and(|role| role != wanted.role.to_string());
    let reservation = cx.pool.balancer().reserve_visit(worker);
    let (conn, _) =
        cx.pool.open_call(cx.reactor, owner, reservation, cx.now + ROUTER_FANOUT_TIME, cx.now)?;
    cx.pool.send_request(cx.reactor, conn, &order, &Arc::new(wanted.to_json()), cx.now);
    if is_other {
        cx.pool.mark_draining(cx.reactor, worker);
    }
    Ok(conn)
}

fn lost(why: String) -> ApiError {
    ApiError::from_cause(Cause::PeerLost, format!("the worker's role is unknown: {why}"))
}
