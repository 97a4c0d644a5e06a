//! Has a worker tell or change its role: for an operator, who gets the answer of the worker's own `/role`, or where one side stays
//! short of workers and the other can spare one (`cluster::roles`).
//!
//! Thread: `ctl`. Invariants: the worker gets nothing new from the moment it is asked, until it has said what it is; one that
//! refuses is well again with the next look at it, and one that cannot change is not asked again. Not here: whether it may be
//! spared (`workers`; of those that change by themselves `fleet::roles`), what becomes of it then
//! (`fleet`, `cluster::membership`).

use crate::cause::Cause;
use crate::cluster::loads::WorkerNumber;
use crate::cluster::roles::{Balance, BalanceTerms, Turn};
use crate::cluster::router::Role;
use crate::front::connections::JSON;
use crate::front::http::Method;
use crate::front::openai::ApiError;
use crate::front::router::call::{Order, Owner};
use crate::front::router::failure::Failure;
use crate::front::router::fleet::What;
use crate::front::router::flights::Way;
use crate::front::turning::{NOT_POSSIBLE, Wanted};
use crate::limits::{BALANCE_CHANGE_TIME, BALANCE_INTERVAL, ROUTER_FANOUT_TIME};
use crate::net::{CloseReason, ConnId};
use crate::obs::log::event;
use crate::wire::message as wire;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// Where a worker is told of its role.
const PATH: &str = "/role";

/// All who wait for an answer, and the connection that it comes by.
#[derive(Debug, Default)]
pub struct Turns {
    open: HashMap<ConnId, ConnId>,
    /// Where workers change by themselves; when it is looked at next.
    balance: Option<(Balance, Instant)>,
    /// The worker that was told so, until it has answered.
    told: Option<(ConnId, WorkerNumber)>,
}

impl Turns {
    /// Workers change their roles by themselves, on these terms.
    pub fn balancing(terms: BalanceTerms, now: Instant) -> Turns {
        Turns { balance: Some((Balance::new(terms), now)), ..Turns::default() }
    }

    /// Whether nobody waits.
    pub fn is_idle(&self) -> bool {
        self.open.is_empty()
    }

    /// Asks a worker for a client.
    pub fn begin(
        &mut self,
        client: ConnId,
        worker: WorkerNumber,
        wanted: Wanted,
        way: &mut Way<'_>,
    ) {
        match ask(Owner::Turn(client), worker, wanted, way) {
            Ok(conn) => drop(self.open.insert(client, conn)),
            Err(reason) => way.refuse(client, &lost(reason.to_string())),
        }
    }

    /// Asks a worker for a client what its role is.
    pub fn look_at(&mut self, client: ConnId, worker: WorkerNumber, way: &mut Way<'_>) {
        let mut order = Order::get(PATH);
        order.headers.extend(way.fleet.bearer());
        let booking = way.fleet.router().visit(worker);
        let until = way.now + ROUTER_FANOUT_TIME;
        match way.fleet.open(way.reactor, Owner::Turn(client), booking, until, way.now) {
            Ok((conn, _)) => {
                way.fleet.begin(way.reactor, conn, &order, &Arc::default(), way.now);
                self.open.insert(client, conn);
            }
            Err(reason) => way.refuse(client, &lost(reason.to_string())),
        }
    }

    /// News of a call for a client.
    pub fn news(&mut self, client: ConnId, conn: ConnId, what: &What, way: &mut Way<'_>) {
        if self.open.get(&client) != Some(&conn)
            || matches!(what, What::Ready | What::Processing | What::Arrived)
        {
            return;
        }
        self.open.remove(&client);
        match what {
            What::Ended(answer) => {
                way.connections.answer(way.reactor, client, &answer.whole(), way.now);
            }
            _ => way.refuse(client, &lost("it was not reached, or did not answer".into())),
        }
    }

    /// A client has gone away; the worker does what it was told.
    pub fn gone(&mut self, client: ConnId, way: &mut Way<'_>) {
        if let Some(conn) = self.open.remove(&client) {
            way.fleet.leave(conn);
        }
    }

    /// Looks whether a worker is to change, where they do so by themselves and it is time.
    pub fn look(&mut self, way: &mut Way<'_>) {
        let now = way.now;
        let Some((balance, next)) = self.balance.as_mut().filter(|(_, next)| *next <= now) else {
            return;
        };
        *next = now + BALANCE_INTERVAL;
        if self.told.is_some() {
            return;
        }
        let rows = way.fleet.rows(now);
        let Some(Turn { worker, to, pressure: [prefill, decode] }) = balance.look(&rows, now)
        else {
            return;
        };
        event!(
            Info,
            "router",
            "a worker is to have another role",
            worker = way.fleet.url(worker),
            to = to,
            prefill_pressure = format!("{prefill:.2}"),
            decode_pressure = format!("{decode:.2}")
        );
        let role = match to {
            Role::Prefill => wire::Role::Prefill,
            Role::Decode => wire::Role::Decode,
        };
        match ask(Owner::Balance, worker, Wanted { role, patience: BALANCE_CHANGE_TIME }, way) {
            Ok(conn) => self.told = Some((conn, worker)),
            Err(reason) => keeps(worker, &format!("there is no connection to it: {reason}"), way),
        }
    }

    /// News of the call to a worker that is to change by itself.
    pub fn balanced(&mut self, conn: ConnId, what: &What, way: &mut Way<'_>) {
        let told = self.told.filter(|&(told, _)| {
            told == conn && !matches!(what, What::Ready | What::Processing | What::Arrived)
        });
        let Some((_, worker)) = told else { return };
        self.told = None;
        let why = match what {
            What::Ended(answer) if answer.is_success() => return,
            What::Ended(answer) => {
                let failure = Failure::of(answer);
                if failure.has_code(NOT_POSSIBLE) {
                    way.fleet.keeps_role(worker);
                }
                format!("it answers with {failure}")
            }
            _ => "it was not reached, or did not answer".into(),
        };
        keeps(worker, &why, way);
    }
}

/// A worker that was to change does not, for this reason.
fn keeps(worker: WorkerNumber, why: &str, way: &Way<'_>) {
    event!(Warn, "router", "a worker keeps its role", worker = way.fleet.url(worker), why = why);
}

/// Asks a worker to have a role; the connection that its answer comes by. It is asked for nothing else from now on, unless it
/// has that role.
fn ask(
    owner: Owner,
    worker: WorkerNumber,
    wanted: Wanted,
    way: &mut Way<'_>,
) -> Result<ConnId, CloseReason> {
    let mut order = Order::get(PATH);
    order.method = Method::Post;
    order.headers = vec![("content-type", JSON.to_owned())];
    order.headers.extend(way.fleet.bearer());
    let is_other = way.fleet.role_name(worker).is_some_and(|role| role != wanted.role.to_string());
    let booking = way.fleet.router().visit(worker);
    let (conn, _) =
        way.fleet.open(way.reactor, owner, booking, way.now + ROUTER_FANOUT_TIME, way.now)?;
    way.fleet.begin(way.reactor, conn, &order, &Arc::new(wanted.to_json()), way.now);
    if is_other {
        way.fleet.drains(way.reactor, worker);
    }
    Ok(conn)
}

fn lost(why: String) -> ApiError {
    let cause = Cause::PeerLost;
    ApiError::new(
        cause.http_status(),
        cause.name(),
        format!("there is no word of the worker's role: {why}"),
    )
}
