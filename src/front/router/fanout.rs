//! What is asked of every worker: one answer to the client once all have answered.
//!
//! Thread: `ctl`. A worker that answers with an error makes the whole an error, as does that none is reached;
//! all others have been asked all the same. Those that were not reached are named: what they ran is over.

use crate::cause::Cause;
use crate::cluster::loads::WorkerNumber;
use crate::front::connections::Answer;
use crate::front::openai::ApiError;
use crate::front::router::call::{Order, Owner};
use crate::front::router::fleet::What;
use crate::front::router::flights::Way;
use crate::limits::ROUTER_FANOUT_TIME;
use crate::net::ConnId;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::Arc;

#[derive(Debug, Default)]
struct Fan {
    /// With their names, since they may leave meanwhile.
    open: Vec<(ConnId, WorkerNumber, String)>,
    /// Workers that answered well.
    done: usize,
    /// Of an abort: requests of the router's own clients that have ended by it,
    aborted: Option<usize>,
    /// and those that workers say they ended.
    aborted_at_workers: usize,
    /// The others.
    unreached: Vec<(WorkerNumber, String)>,
    /// What went wrong first with one that was reached.
    failure: Option<String>,
}

/// All that is being asked of every worker, by client.
#[derive(Debug, Default)]
pub struct Fanout {
    open: HashMap<ConnId, Fan>,
}

impl Fanout {
    /// Whether nothing is being asked.
    pub fn is_idle(&self) -> bool {
        self.open.is_empty()
    }

    /// Asks every worker. `aborted` is of an abort: how many requests the router has ended itself; where it has, it is no
    /// failure that no worker is reached.
    pub fn begin(
        &mut self,
        client: ConnId,
        order: &Order,
        body: Vec<u8>,
        aborted: Option<usize>,
        way: &mut Way<'_>,
    ) {
        let body = Arc::new(body);
        let mut fan = Fan { aborted, ..Fan::default() };
        let workers: Vec<WorkerNumber> =
            way.fleet.router().workers().map(|(worker, ..)| worker).collect();
        for worker in workers {
            let url = way.fleet.url(worker);
            let booking = way.fleet.router().visit(worker);
            let until = way.now + ROUTER_FANOUT_TIME;
            match way.fleet.open(way.reactor, Owner::Part(client), booking, until, way.now) {
                Ok((conn, _)) => {
                    way.fleet.begin(way.reactor, conn, order, &body, way.now);
                    fan.open.push((conn, worker, url));
                }
                Err(_) => fan.unreached.push((worker, url)),
            }
        }
        self.go_on(client, fan, way);
    }

    /// News of one of the calls.
    pub fn part(&mut self, client: ConnId, conn: ConnId, what: &What, way: &mut Way<'_>) {
        let Some(mut fan) = self.open.remove(&client) else { return };
        let at = fan.open.iter().position(|&(open, ..)| open == conn);
        let Some(at) =
            at.filter(|_| !matches!(what, What::Ready | What::Processing | What::Arrived))
        else {
            return drop(self.open.insert(client, fan));
        };
        let (_, worker, url) = fan.open.swap_remove(at);
        match what {
            What::Ended(answer) if answer.is_success() => {
                fan.done += 1;
                let told = serde_json::from_slice::<Part>(&answer.body).unwrap_or_default();
                fan.aborted_at_workers += told.aborted;
            }
            What::Ended(answer) => {
                fan.failure.get_or_insert(format!("{url} answered with status {}", answer.status));
            }
            _ => fan.unreached.push((worker, url)),
        }
        self.go_on(client, fan, way);
    }

    /// A client has gone away; workers carry out what they were asked.
    pub fn gone(&mut self, client: ConnId, way: &mut Way<'_>) {
        let Some(fan) = self.open.remove(&client) else { return };
        for (conn, ..) in fan.open {
            way.fleet.leave(conn);
        }
    }

    fn go_on(&mut self, client: ConnId, mut fan: Fan, way: &mut Way<'_>) {
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
            let cause = Cause::PeerLost;
            return way.refuse(client, &ApiError::new(cause.http_status(), cause.name(), failure));
        }
        let told = Told {
            success: unreached.is_empty(),
            aborted: fan.aborted,
            aborted_at_workers: fan.aborted.map(|_| fan.aborted_at_workers),
            workers: fan.done,
            unreached,
        };
        let body = serde_json::to_vec(&told).expect("plain structs are JSON");
        way.connections.answer(way.reactor, client, &Answer::json(&body), way.now);
    }
}

/// What counts of a worker's answer; other engines tell nothing of it.
#[derive(Deserialize, Default)]
struct Part {
    #[serde(default)]
    aborted: usize,
}

/// What a client hears.
#[derive(Serialize)]
struct Told {
    /// Whether all workers have done it.
    success: bool,
    /// Requests of this router's clients that it has ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    aborted: Option<usize>,
    /// Parts of requests that workers have ended, whoever sent them: of a request that is handed over there are two.
    #[serde(skip_serializing_if = "Option::is_none")]
    aborted_at_workers: Option<usize>,
    /// How many have.
    workers: usize,
    /// Those that were not reached.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    unreached: Vec<String>,
}
