//! The operator: changes the roles of workers, by the interface that operators have.
//!
//! Invariant: the operator asks again until the worker has the ordered role. A later order for the
//! same worker takes the place of the former one.

use crate::http::client::{RequestLine, ResponseDecoder, ResponseEvent, write_request};
use crate::http::{HttpLimits, Method};
use crate::ids::Role;
use crate::net::{ConnId, Event, MemoryKernel, Reactor};
use crate::server::role_change::RoleChangeRequest;
use crate::stdx::event_queue::{MILLI, Nanos, SECOND};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Time between two requests for the same order.
const AGAIN: Nanos = 500 * MILLI;
/// How long the running requests of a worker may take.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// The operator, on a host of its own.
pub struct Operator {
    kernel: MemoryKernel,
    reactor: Reactor,
    /// By worker: the role that it must have, and when to ask next.
    orders: BTreeMap<SocketAddr, (Role, Nanos)>,
    /// The key that workers ask for.
    bearer: Option<String>,
    open: BTreeMap<ConnId, Request>,
    /// Orders after which the worker had the role.
    pub done: usize,
}

/// A request that is under way.
struct Request {
    worker: SocketAddr,
    role: Role,
    decoder: ResponseDecoder,
    status: u16,
}

impl Operator {
    /// An operator without orders, with this key.
    pub fn new(kernel: MemoryKernel, key: Option<&str>) -> Operator {
        let reactor = Reactor::in_memory(kernel.clone()).expect("memory cannot fail");
        let bearer = key.map(|key| format!("Bearer {key}"));
        let (orders, open) = (BTreeMap::new(), BTreeMap::new());
        Operator { kernel, reactor, orders, bearer, open, done: 0 }
    }

    /// Orders a role for the worker at this address.
    pub fn order(&mut self, worker: SocketAddr, role: Role, now: Nanos) {
        self.orders.insert(worker, (role, now));
    }

    /// Whether each worker has the role that was ordered last.
    pub fn is_done(&self) -> bool {
        self.orders.is_empty()
    }

    /// Sends due requests and reads answers. Returns the time of the next turn.
    pub fn turn(&mut self, now: Nanos, base: Instant) -> Nanos {
        self.kernel.set_now(base + Duration::from_nanos(now));
        self.reactor.wait(None).expect("memory cannot fail");
        while let Some(event) = self.reactor.next_event() {
            match event {
                Event::Received(conn) => self.read(conn),
                Event::Eof(conn) | Event::Closed { conn, .. } => self.end(conn),
                _ => {}
            }
        }
        let due = self.orders.iter_mut().filter(|(_, (_, at))| *at <= now);
        let due = due.map(|(&worker, (role, at))| {
            *at = now + AGAIN;
            (worker, *role)
        });
        for (worker, role) in due.collect::<Vec<_>>() {
            self.ask(worker, role);
        }
        let until = self.reactor.prepare(None).map(|until| (until - base).as_nanos() as Nanos);
        let next = self.orders.values().map(|(_, at)| *at).chain(until).min();
        next.unwrap_or(now + SECOND)
    }

    fn ask(&mut self, worker: SocketAddr, role: Role) {
        let until = self.reactor.now() + Duration::from_nanos(AGAIN);
        let conn = self.reactor.connect(&worker.into(), until).expect("few connections");
        let body = RoleChangeRequest { role, patience: PATIENCE }.to_json();
        let line = RequestLine { method: Method::Post, target: "/role", host: "worker" };
        let mut bytes = Vec::new();
        let key = self.bearer.as_deref().map(|bearer| ("authorization", bearer));
        let fields: Vec<_> = [("connection", "close")].into_iter().chain(key).collect();
        write_request(&mut bytes, line, &fields, Some(&body));
        self.reactor.send(conn, &bytes).expect("a short request");
        let decoder = ResponseDecoder::new(Method::Post, HttpLimits::default());
        self.open.insert(conn, Request { worker, role, decoder, status: 0 });
    }

    fn read(&mut self, conn: ConnId) {
        let bytes = self.reactor.received(conn).to_vec();
        self.reactor.consume(conn, bytes.len());
        let Some(request) = self.open.get_mut(&conn) else { return };
        let mut rest = &bytes[..];
        while let Ok((used, Some(event))) = request.decoder.read(rest) {
            rest = &rest[used..];
            match event {
                ResponseEvent::Head(head) => request.status = head.status,
                ResponseEvent::Body(_) => {}
                ResponseEvent::End { .. } => {
                    // 202: the change goes on. 200: the worker has the role.
                    let has_role = request.status == 200;
                    let (worker, role) = (request.worker, request.role);
                    self.end(conn);
                    // A request for an older order can still arrive, and change the role again.
                    let is_last = self.open.values().all(|open| open.worker != worker);
                    let is_order = self.orders.get(&worker).is_some_and(|order| order.0 == role);
                    if has_role && is_last && is_order {
                        self.orders.remove(&worker);
                        self.done += 1;
                    }
                    return;
                }
            }
        }
    }

    fn end(&mut self, conn: ConnId) {
        self.reactor.close(conn);
        self.open.remove(&conn);
    }
}
