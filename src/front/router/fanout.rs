//! What is asked of every worker: one answer to the client once all have answered.
//!
//! Thread: `ctl`. A worker that cannot be reached, or answers with an error, makes the whole an error; the
//! others have been asked all the same.

use crate::cause::Cause;
use crate::cluster::loads::WorkerNumber;
use crate::front::connections::Answer;
use crate::front::openai::ApiError;
use crate::front::router::call::{Order, Owner};
use crate::front::router::fleet::What;
use crate::front::router::flights::Way;
use crate::limits::ROUTER_FANOUT_TIME;
use crate::net::ConnId;
use std::collections::HashMap;
use std::sync::Arc;

#[derive(Debug, Default)]
struct Fan {
    open: Vec<ConnId>,
    asked: usize,
    /// What went wrong first.
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

    /// Asks every worker.
    pub fn begin(&mut self, client: ConnId, order: &Order, body: Vec<u8>, way: &mut Way<'_>) {
        let body = Arc::new(body);
        let mut fan = Fan { asked: way.fleet.targets().len(), ..Fan::default() };
        for worker in (0..fan.asked).map(WorkerNumber) {
            let booking = way.fleet.router().visit(worker);
            let until = way.now + ROUTER_FANOUT_TIME;
            match way.fleet.open(way.reactor, Owner::Part(client), booking, until, way.now) {
                Ok((conn, _)) => {
                    way.fleet.begin(way.reactor, conn, order, &body, way.now);
                    fan.open.push(conn);
                }
                Err(reason) => fan.fail(format!("a worker cannot be reached: {reason}")),
            }
        }
        self.go_on(client, fan, way);
    }

    /// News of one of the calls.
    pub fn part(&mut self, client: ConnId, conn: ConnId, what: &What, way: &mut Way<'_>) {
        let Some(mut fan) = self.open.remove(&client) else { return };
        match what {
            What::Ready | What::Arrived => return drop(self.open.insert(client, fan)),
            What::Ended(answer) if answer.is_success() => {}
            What::Ended(answer) => fan.fail(format!("a worker answered with status {}", answer.status)),
            What::Lost(lost) => fan.fail(format!("a worker did not answer: {lost}")),
            What::Refused => fan.fail("a worker cannot be reached".into()),
        }
        fan.open.retain(|&open| open != conn);
        self.go_on(client, fan, way);
    }

    /// A client has gone away; workers carry out what they were asked.
    pub fn gone(&mut self, client: ConnId, way: &mut Way<'_>) {
        let Some(fan) = self.open.remove(&client) else { return };
        for conn in fan.open {
            way.fleet.leave(conn);
        }
    }

    fn go_on(&mut self, client: ConnId, fan: Fan, way: &mut Way<'_>) {
        if !fan.open.is_empty() {
            self.open.insert(client, fan);
        } else if let Some(failure) = fan.failure {
            let cause = Cause::PeerLost;
            way.refuse(client, &ApiError::new(cause.http_status(), cause.name(), failure));
        } else {
            let body = format!("{{\"success\":true,\"workers\":{}}}", fan.asked);
            way.connections.answer(way.reactor, client, &Answer::json(body.as_bytes()), way.now);
        }
    }
}

impl Fan {
    fn fail(&mut self, why: String) {
        self.failure.get_or_insert(why);
    }
}
