//! The operator: changes the roles of workers, and flushes caches, by the interface that operators
//! have. It lists the workers, and measures how long the router takes to follow roles and keys.
//!
//! Invariant: the operator asks again until the worker has the ordered role. A later order for the
//! same worker takes the place of the former one.

use super::keys::{ClusterKeys, KeyAge};
use super::names::is_url_of;
use crate::http::client::{RequestLine, ResponseDecoder, ResponseEvent, write_request};
use crate::http::{HttpLimits, Method};
use crate::ids::Role;
use crate::net::{ConnId, Event, MemoryKernel, Reactor};
use crate::server::role_change::RoleChangeRequest;
use crate::stdx::event_queue::{MILLI, Nanos, SECOND};
use crate::stdx::rng::Rng;
use serde_json::Value;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Time between two requests for the same order.
const AGAIN: Nanos = 500 * MILLI;
/// The operator can leave a flush so long after it was sent.
const SOON: Nanos = 3 * MILLI;
/// How long the running requests of a worker may take.
pub const PATIENCE: Duration = Duration::from_secs(8);

/// The operator, on a host of its own.
pub struct Operator {
    kernel: MemoryKernel,
    reactor: Reactor,
    /// By worker: the role that it must have, and when to ask next.
    orders: BTreeMap<SocketAddr, (Role, Nanos)>,
    keys: ClusterKeys,
    /// Which of the keys it sends.
    key_age: KeyAge,
    open: BTreeMap<ConnId, Request>,
    /// The router's list of workers, as last read.
    pub listed: Option<Value>,
    /// The routers with caches to flush.
    flushes: Vec<SocketAddr>,
    /// Connections that end without an answer, and when.
    leaves: BTreeMap<ConnId, Nanos>,
    /// What was answered and must not be.
    pub wrong: Option<String>,
    dice: Rng,
    /// The router to list workers, and when to ask next.
    lists: Option<(SocketAddr, Nanos)>,
    /// Workers with a new role, and since when, until the router lists them in it.
    unlisted: BTreeMap<SocketAddr, (Role, Nanos)>,
    /// The longest time until the router has listed a worker in its new role.
    pub longest_unlisted: Nanos,
    /// Workers that the router lists without a pair because of their cluster keys, and since when.
    /// A worker of the other role is up.
    unpaired: BTreeMap<String, Nanos>,
    /// The longest time in which a worker has been one of them.
    pub longest_unpaired: Nanos,
    now: Nanos,
    /// Orders after which the worker had the role.
    pub done: usize,
}

/// A request that is under way.
struct Request {
    about: About,
    decoder: ResponseDecoder,
    status: u16,
    body: Vec<u8>,
}

/// What a request is for.
#[derive(Clone, Copy)]
enum About {
    /// A worker must have a role.
    Role(SocketAddr, Role),
    /// The router lists its workers.
    Workers,
    /// All workers empty their caches.
    Flush,
    /// The key is not enough, so the answer must be 403.
    Refusal,
}

impl Operator {
    /// An operator without orders, with the keys that the processes ask for at first.
    pub fn new(kernel: MemoryKernel, keys: ClusterKeys, dice: Rng) -> Operator {
        let reactor = Reactor::in_memory(kernel.clone()).expect("memory cannot fail");
        Operator {
            kernel,
            reactor,
            keys,
            key_age: KeyAge::Old,
            orders: BTreeMap::new(),
            open: BTreeMap::new(),
            flushes: Vec::new(),
            leaves: BTreeMap::new(),
            wrong: None,
            dice,
            listed: None,
            lists: None,
            unlisted: BTreeMap::new(),
            longest_unlisted: 0,
            unpaired: BTreeMap::new(),
            longest_unpaired: 0,
            now: 0,
            done: 0,
        }
    }

    /// Orders a role for the worker at this address.
    pub fn order(&mut self, worker: SocketAddr, role: Role, now: Nanos) {
        self.orders.insert(worker, (role, now));
        self.unlisted.remove(&worker);
    }

    /// Sends these keys from now on.
    pub fn set_key_age(&mut self, age: KeyAge) {
        self.key_age = age;
    }

    /// Reads the list of workers of the router at this address.
    pub fn list_workers(&mut self, router: SocketAddr) {
        self.lists.get_or_insert((router, 0));
    }

    /// Flushes the caches of all workers of the router at this address.
    pub fn flush(&mut self, router: SocketAddr) {
        self.flushes.push(router);
    }

    /// Whether each worker has the role that was ordered last.
    pub fn is_done(&self) -> bool {
        self.orders.is_empty()
    }

    /// Sends due requests and reads answers. Returns the time of the next turn.
    pub fn turn(&mut self, now: Nanos, base: Instant) -> Nanos {
        self.kernel.set_now(base + Duration::from_nanos(now));
        self.now = now;
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
        if let Some((router, at)) = self.lists.as_mut().filter(|(_, at)| *at <= now) {
            let router = *router;
            *at = now + AGAIN;
            self.send(router, About::Workers, Method::Get, "/workers", None);
        }
        for router in std::mem::take(&mut self.flushes) {
            let conn = self.send(router, About::Flush, Method::Post, "/flush_cache", None);
            if self.dice.one_in(2) {
                self.leaves.insert(conn, now + self.dice.range_u64(0, SOON));
            }
        }
        let left = self.leaves.iter().filter(|(_, at)| **at <= now).map(|(&conn, _)| conn);
        for conn in left.collect::<Vec<_>>() {
            self.end(conn);
        }
        let until = self.reactor.prepare(None).map(|until| (until - base).as_nanos() as Nanos);
        let orders = self.orders.values().map(|(_, at)| *at);
        let next = orders.chain(self.leaves.values().copied()).chain(until).min();
        next.unwrap_or(now + SECOND)
    }

    fn ask(&mut self, worker: SocketAddr, role: Role) {
        let body = RoleChangeRequest { role, patience: PATIENCE }.to_json();
        if self.keys.low_key(self.key_age).is_some() {
            self.send(worker, About::Refusal, Method::Post, "/role", Some(&body));
        }
        self.send(worker, About::Role(worker, role), Method::Post, "/role", Some(&body));
    }

    fn send(
        &mut self,
        to: SocketAddr,
        about: About,
        method: Method,
        target: &str,
        body: Option<&[u8]>,
    ) -> ConnId {
        let until = self.reactor.now() + Duration::from_nanos(AGAIN);
        let conn = self.reactor.connect(&to.into(), until).expect("few connections");
        let line = RequestLine { method, target, host: "baton" };
        let mut bytes = Vec::new();
        let key = match about {
            About::Refusal => self.keys.low_key(self.key_age),
            About::Role(..) | About::Workers | About::Flush => self.keys.operator_key(self.key_age),
        };
        let bearer = key.map(|key| format!("Bearer {key}"));
        let key = bearer.as_deref().map(|bearer| ("authorization", bearer));
        let fields: Vec<_> = [("connection", "close")].into_iter().chain(key).collect();
        write_request(&mut bytes, line, &fields, body);
        self.reactor.send(conn, &bytes).expect("a short request");
        let decoder = ResponseDecoder::new(method, HttpLimits::default());
        self.open.insert(conn, Request { about, decoder, status: 0, body: Vec::new() });
        conn
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
                ResponseEvent::Body(piece) => request.body.extend(piece),
                ResponseEvent::End { .. } => {
                    let (about, status) = (request.about, request.status);
                    let body = std::mem::take(&mut request.body);
                    self.end(conn);
                    return match about {
                        About::Role(worker, role) => self.hear(worker, role, status),
                        About::Workers => self.read_list(&body),
                        About::Flush => {}
                        About::Refusal if status == 403 => {}
                        About::Refusal => {
                            self.wrong = Some(format!("an order with an API key gets {status}"));
                        }
                    };
                }
            }
        }
    }

    /// Handles the router's list.
    fn read_list(&mut self, body: &[u8]) {
        self.listed = serde_json::from_slice(body).ok();
        let Some(Value::Array(listed)) = self.listed.as_ref().map(|list| &list["workers"]) else {
            return;
        };
        // The router compares with the last known keys of a worker that is down.
        let has_partner = |entry: &Value| {
            let is_other = |other: &Value| other["worker_type"] != entry["worker_type"];
            listed.iter().any(|other| is_other(other) && other["is_healthy"] == true)
        };
        let unpaired = listed.iter().filter(|entry| has_misfit_keys(entry) && has_partner(entry));
        let since = |url: &str| self.unpaired.get(url).map_or(self.now, |&since| since);
        let unpaired = unpaired.filter_map(|entry| entry["url"].as_str());
        self.unpaired = unpaired.map(|url| (url.to_owned(), since(url))).collect();
        let times = self.unpaired.values().map(|since| self.now - since);
        self.longest_unpaired = times.fold(self.longest_unpaired, Nanos::max);
        let (now, longest) = (self.now, &mut self.longest_unlisted);
        self.unlisted.retain(|&worker, &mut (role, since)| {
            let is_listed = listed.iter().any(|entry| is_ready(entry, worker, role));
            *longest = (*longest).max(now - since);
            !is_listed
        });
    }

    /// Handles the answer of a worker to an order.
    fn hear(&mut self, worker: SocketAddr, role: Role, status: u16) {
        // A request for an older order can still arrive, and change the role again.
        let is_of_worker =
            |open: &Request| matches!(open.about, About::Role(at, _) if at == worker);
        let is_last = !self.open.values().any(is_of_worker);
        let is_order = self.orders.get(&worker).is_some_and(|order| order.0 == role);
        // 202: the change goes on. 200: the worker has the role.
        if status == 200 && is_last && is_order {
            self.orders.remove(&worker);
            self.unlisted.insert(worker, (role, self.now));
            self.done += 1;
        }
    }

    fn end(&mut self, conn: ConnId) {
        self.reactor.close(conn);
        self.open.remove(&conn);
        self.leaves.remove(&conn);
    }
}

/// Whether this entry of the router's list is a worker that fits no other because of its keys.
fn has_misfit_keys(entry: &Value) -> bool {
    entry["status"] == "unpaired"
        && entry["reason"].as_str().is_some_and(|reason| reason.contains("cluster key differs"))
}

/// Whether this entry of the router's list is a worker that is used in this role.
pub fn is_ready(entry: &Value, worker: SocketAddr, role: Role) -> bool {
    let role = role.to_string();
    entry["url"].as_str().is_some_and(|url| is_url_of(url, worker))
        && entry["worker_type"] == *role
        && entry["status"] == "ready"
}
