//! Requests that go to every worker. The client gets one answer when all have answered.
//!
//! Thread: `ctl`. The answer is an error if a worker answers with an error or if no worker is
//! reached. The other workers still get the request. The answer lists workers that were not
//! reached.

use crate::api::ApiError;
use crate::cause::Cause;
use crate::http::response::Response;
use crate::limits::ROUTER_FANOUT_TIME;
use crate::net::ConnId;
use crate::router::call::Owner;
use crate::router::pool::CallEvent;
use crate::router::requests::RouterContext;
use crate::routing::load::WorkerNumber;
use crate::stdx::failpoint::is_failpoint_active;
use crate::stdx::hash_map::HashMap;
use crate::upstream::request::UpstreamHead;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

#[derive(Debug, Default)]
struct Fan {
    /// Open calls, with the URLs of their workers, because a worker can leave during the call.
    open: Vec<(ConnId, WorkerNumber, String)>,
    /// Workers that answered with success.
    done: usize,
    /// For an abort: number of requests of its own clients that this router has ended.
    aborted: Option<usize>,
    /// For an abort: number of requests that workers report as ended.
    aborted_at_workers: usize,
    /// Workers that were not reached.
    unreached: Vec<(WorkerNumber, String)>,
    /// The first error of a worker that was reached.
    failure: Option<String>,
}

/// All open requests to every worker, by client.
#[derive(Debug, Default)]
pub struct Fanout {
    open: HashMap<ConnId, Fan>,
}

impl Fanout {
    /// Whether no request is open.
    pub fn is_idle(&self) -> bool {
        self.open.is_empty()
    }

    /// Sends a request to every worker. `aborted` is set for an abort: the number of requests that
    /// the router has ended itself. If it is above zero, the answer is no error even if no worker
    /// is reached.
    pub fn begin(
        &mut self,
        client: ConnId,
        order: &UpstreamHead,
        body: Vec<u8>,
        aborted: Option<usize>,
        cx: &mut RouterContext<'_>,
    ) {
        let body = Arc::new(body);
        let mut fan = Fan { aborted, ..Fan::default() };
        let workers: Vec<WorkerNumber> =
            cx.pool.balancer().workers().map(|(worker, ..)| worker).collect();
        for worker in workers {
            let url = cx.pool.url(worker);
            let reservation = cx.pool.balancer().reserve_visit(worker);
            let until = cx.now + ROUTER_FANOUT_TIME;
            match cx.pool.open_call(cx.reactor, Owner::Fanout(client), reservation, until, cx.now) {
                Ok((conn, _)) => {
                    cx.pool.send_request(cx.reactor, conn, order, &body, cx.now);
                    fan.open.push((conn, worker, url));
                }
                Err(_) => fan.unreached.push((worker, url)),
            }
        }
        self.go_on(client, fan, cx);
    }

    /// Handles an event of one of the calls.
    pub fn handle_call_event(
        &mut self,
        client: ConnId,
        conn: ConnId,
        what: &CallEvent,
        cx: &mut RouterContext<'_>,
    ) {
        let Some(mut fan) = self.open.remove(&client) else { return };
        let at = fan.open.iter().position(|&(open, ..)| open == conn);
        let Some(at) = at.filter(|_| {
            !matches!(what, CallEvent::Ready | CallEvent::Processing | CallEvent::Arrived)
        }) else {
            return drop(self.open.insert(client, fan));
        };
        let (_, worker, url) = fan.open.swap_remove(at);
        match what {
            CallEvent::Ended(answer) if answer.is_success() => {
                fan.done += 1;
                let reply = serde_json::from_slice::<WorkerReply>(&answer.body).unwrap_or_default();
                fan.aborted_at_workers += reply.aborted;
            }
            CallEvent::Ended(answer) => {
                fan.failure.get_or_insert(format!("{url} answered with status {}", answer.status));
            }
            _ if is_failpoint_active("lost call of a fan-out is awaited") => {
                fan.open.push((conn, worker, url));
            }
            _ => fan.unreached.push((worker, url)),
        }
        self.go_on(client, fan, cx);
    }

    /// Forgets a client that has disconnected. The workers still perform the request.
    pub fn handle_disconnect(&mut self, client: ConnId, cx: &mut RouterContext<'_>) {
        let Some(fan) = self.open.remove(&client) else { return };
        for (conn, ..) in fan.open {
            cx.pool.detach_call(conn);
        }
    }

    fn go_on(&mut self, client: ConnId, mut fan: Fan, cx: &mut RouterContext<'_>) {
        if !fan.open.is_empty() {
            self.open.insert(client, fan);
            return;
        }
        fan.unreached.sort_unstable_by_key(|(worker, _)| *worker);
        let unreached: Vec<String> = fan.unreached.into_iter().map(|(_, url)| url).collect();
        let failure = match fan.failure {
            None if fan.done == 0 && fan.aborted.is_none_or(|aborted| aborted == 0) => {
                Some("no worker was reached".to_owned())
            }
            Some(failure) if !unreached.is_empty() => {
                Some(format!("{failure}; not reached: {}", unreached.join(", ")))
            }
            failure => failure,
        };
        if let Some(failure) = failure {
            return cx.refuse(client, &ApiError::from_cause(Cause::PeerLost, failure));
        }
        let reply = FanoutReply {
            success: unreached.is_empty(),
            aborted: fan.aborted,
            aborted_at_workers: fan.aborted.map(|_| fan.aborted_at_workers),
            workers: fan.done,
            unreached,
        };
        let body = serde_json::to_vec(&reply).expect("plain structs are JSON");
        cx.connections.send_response(cx.reactor, client, &Response::json(&body), cx.now);
    }
}

/// The relevant part of a worker's answer. Other engines do not send it.
#[derive(Deserialize, Default)]
struct WorkerReply {
    #[serde(default)]
    aborted: usize,
}

/// The answer to the client.
#[derive(Serialize)]
struct FanoutReply {
    /// Whether all workers have succeeded.
    success: bool,
    /// Requests of this router's clients that it has ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    aborted: Option<usize>,
    /// Legs that workers have ended, including legs of other routers. A request with a hand-off has
    /// two legs.
    #[serde(skip_serializing_if = "Option::is_none")]
    aborted_at_workers: Option<usize>,
    /// Number of workers that have succeeded.
    workers: usize,
    /// Workers that were not reached.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    unreached: Vec<String>,
}
