//! Runs a [`RegistryTask`] over the reactor. It has one connection to one of the registry's hosts,
//! and one request at a time, with a deadline.
//!
//! Thread: `ctl`.
//! Invariants: at most one connection per task. If a host does not answer, the task tries the next
//! host later. Nothing waits for a registry.
//! Not here: the requests themselves (`registry::call`).

use crate::config::values::WorkerUrl;
use crate::http::client::{self, RequestLine, ResponseDecoder};
use crate::http::response::JSON;
use crate::http::{HttpLimits, Method};
use crate::limits::{REGISTRY_ANSWER_TIME, REGISTRY_STREAM_LIFE, REGISTRY_TASK_ANSWER_MAX};
use crate::net::resolver::Resolver;
use crate::net::{Authorities, ConnId, Event, Reactor};
use crate::obs::log::event;
use crate::registry::call::{RegistryRequest, RegistryTask, Verb};
use crate::stdx::failpoint::is_failpoint_active;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

/// A request without a complete answer.
#[derive(Debug)]
struct Open {
    request: RegistryRequest,
    decoder: ResponseDecoder,
    status: u16,
    body: Vec<u8>,
    until: Instant,
    /// Whether the request is sent; that needs an established connection.
    sent: bool,
}

impl Open {
    fn is_streaming(&self) -> bool {
        self.request.is_stream && self.status == 200
    }
}

/// A task and its connection.
#[derive(Debug)]
pub struct RegistryClient<E> {
    task: E,
    hosts: Vec<WorkerUrl>,
    /// Certificate authorities for hosts that are reached over TLS.
    authorities: Option<Authorities>,
    /// Index of the current host.
    at: usize,
    /// Number of failed tries. A name can have several addresses, and some of them can be
    /// unreachable.
    given_up: usize,
    conn: Option<ConnId>,
    open: Option<Open>,
    /// The state in the last log line: true if the registry answered. Each change is logged once.
    logged: Option<bool>,
    /// The path that the registry refuses, and why, as last logged.
    refused: Option<(&'static str, String)>,
}

impl<E: RegistryTask> RegistryClient<E> {
    /// Runs a task at a registry with these hosts. There must be at least one.
    pub fn new(task: E, hosts: Vec<WorkerUrl>) -> RegistryClient<E> {
        RegistryClient {
            task,
            hosts,
            authorities: None,
            at: 0,
            given_up: 0,
            conn: None,
            open: None,
            logged: None,
            refused: None,
        }
    }

    /// Sets the certificate authorities for hosts that are reached over TLS.
    pub fn trust(&mut self, authorities: Authorities) {
        self.authorities = Some(authorities);
    }

    /// The task.
    pub fn task(&mut self) -> &mut E {
        &mut self.task
    }

    /// Cancels the request in progress, and lets the task start again.
    pub fn begin_anew(&mut self, reactor: &mut Reactor, now: Instant) {
        if self.open.take().is_some() {
            self.close(reactor);
            self.task.handle_failure(now);
        }
    }

    /// Whether an event belongs to this connection.
    pub fn owns(&self, event: &Event) -> bool {
        match *event {
            Event::Connected(conn)
            | Event::Received(conn)
            | Event::Eof(conn)
            | Event::Drained(conn)
            | Event::Closed { conn, .. } => self.conn == Some(conn),
            Event::Accepted { .. } | Event::Woken | Event::Terminate | Event::Hangup => false,
        }
    }

    /// Handles an event of this connection.
    pub fn handle(&mut self, event: Event, reactor: &mut Reactor, now: Instant) {
        match event {
            Event::Connected(_) => self.send(reactor, now),
            Event::Received(_) => self.read(reactor, now),
            Event::Eof(_) => self.lose(reactor, "it closed the connection", now),
            Event::Closed { reason, .. } => self.lose(reactor, &reason.to_string(), now),
            Event::Drained(_)
            | Event::Accepted { .. }
            | Event::Woken
            | Event::Terminate
            | Event::Hangup => {}
        }
    }

    /// Starts a request that is due and ends one that is overdue.
    pub fn step(&mut self, names: &mut Option<Resolver>, reactor: &mut Reactor, now: Instant) {
        match self.open.take_if(|open| open.until <= now) {
            // A stream is restarted from time to time, so that a missed change is found soon.
            Some(open) if open.is_streaming() => {
                self.close(reactor);
                self.task.handle_failure(now);
            }
            Some(open) => {
                self.open = Some(open);
                self.lose(reactor, "it does not answer in time", now);
            }
            None => {}
        }
        if self.open.is_none() {
            let Some(request) = self.task.poll(now) else { return };
            let decoder = ResponseDecoder::new(
                Method::Post,
                HttpLimits { body: usize::MAX, ..HttpLimits::default() },
            );
            let until = now + REGISTRY_ANSWER_TIME;
            self.open =
                Some(Open { request, decoder, status: 0, body: Vec::new(), until, sent: false });
        }
        if self.open.as_ref().is_some_and(|open| open.sent) {
            return;
        }
        if self.conn.is_some() {
            return;
        }
        match self.address(names, now) {
            // A name is being resolved. The deadline includes that time.
            None => {}
            Some(Err(why)) => self.lose(reactor, &why, now),
            Some(Ok(address)) => {
                let (WorkerUrl { host, tls, .. }, until) =
                    (&self.hosts[self.at], now + REGISTRY_ANSWER_TIME);
                let dialled = match (&self.authorities, *tls) {
                    (Some(authorities), true) => {
                        reactor.connect_secured(&address.into(), (authorities, host), until)
                    }
                    (_, false) => reactor.connect(&address.into(), until),
                    // The configuration refuses such a host without authorities.
                    (None, true) => return self.lose(reactor, "no CA is configured for it", now),
                };
                match dialled {
                    Ok(conn) => self.conn = Some(conn),
                    Err(reason) => self.lose(reactor, &reason.to_string(), now),
                }
            }
        }
    }

    fn address(
        &self,
        names: &mut Option<Resolver>,
        now: Instant,
    ) -> Option<Result<SocketAddr, String>> {
        let WorkerUrl { host, port, .. } = &self.hosts[self.at];
        if let Ok(ip) = host.parse::<IpAddr>() {
            return Some(Ok(SocketAddr::new(ip, *port)));
        }
        let names = names.as_mut()?;
        let found = names.resolve(host, now)?;
        // After one try of every host, the next round uses the next address of each host.
        let turn = self.given_up / self.hosts.len();
        Some(found.map(|addresses| SocketAddr::new(addresses[turn % addresses.len()], *port)))
    }

    /// Sends the request over the established connection.
    fn send(&mut self, reactor: &mut Reactor, now: Instant) {
        let (Some(conn), Some(open)) = (self.conn, self.open.as_mut()) else { return };
        let host = self.hosts[self.at].authority();
        let RegistryRequest { verb, path, headers, body, .. } = &open.request;
        let mut fields: Vec<(&str, &str)> =
            headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        fields.push(("content-type", JSON));
        let method = match verb {
            Verb::Post => Method::Post,
            Verb::Put => Method::Put,
            Verb::Delete => Method::Delete,
        };
        let line = RequestLine { method, target: path, host: &host };
        let mut out = Vec::new();
        client::write_request(&mut out, line, &fields, Some(body.as_slice()));
        open.sent = true;
        if let Err(error) = reactor.send(conn, &out) {
            self.lose(reactor, &error.to_string(), now);
        }
    }

    fn read(&mut self, reactor: &mut Reactor, now: Instant) {
        loop {
            let (Some(conn), Some(open)) = (self.conn, self.open.as_mut()) else {
                // The bytes answer no request.
                return self.close(reactor);
            };
            let (used, event) = match open.decoder.read(reactor.received(conn)) {
                Ok(read) => read,
                Err(error) => return self.lose(reactor, &error.to_string(), now),
            };
            let mut whole = None;
            let mut bad = None;
            let is_last = event.is_none();
            match event {
                Some(client::ResponseEvent::Head(head)) => {
                    open.status = head.status;
                    if open.is_streaming() {
                        open.until = now + REGISTRY_STREAM_LIFE;
                    }
                }
                Some(client::ResponseEvent::Body(piece)) if open.is_streaming() => {
                    bad = self.task.handle_piece(piece, now).err();
                }
                Some(client::ResponseEvent::Body(piece))
                    if open.body.len() + piece.len() <= REGISTRY_TASK_ANSWER_MAX =>
                {
                    open.body.extend_from_slice(piece);
                }
                Some(client::ResponseEvent::Body(_)) => bad = Some("its answer is too long".into()),
                Some(client::ResponseEvent::End { keep_alive }) => whole = Some(keep_alive),
                None => {}
            }
            reactor.consume(conn, used);
            if let Some(why) = bad {
                return self.lose(reactor, &why, now);
            }
            if let Some(keep_alive) = whole {
                return self.answered(keep_alive, reactor, now);
            }
            if is_last {
                return;
            }
        }
    }

    /// The answer is complete.
    fn answered(&mut self, keep_alive: bool, reactor: &mut Reactor, now: Instant) {
        let Some(open) = self.open.take() else { return };
        if !keep_alive {
            self.close(reactor);
        }
        if open.is_streaming() {
            self.task.handle_failure(now);
            return self.tell(Err("its stream has ended"));
        }
        match self.task.handle_answer(open.status, &open.body, now) {
            Ok(()) => {
                self.tell(Ok(()));
                self.refused.take_if(|(path, _)| *path == open.request.path);
                if self.task.is_first_kept() {
                    event!(Info, "registry", "registry entry added", registry = self.host());
                }
            }
            Err(why) => {
                self.close(reactor);
                self.tell(Ok(()));
                self.tell_refusal(open.request.path, why);
                self.next_host();
            }
        }
        self.go_on(reactor, now);
    }

    /// Sends the next request over the same connection if it is due at once.
    fn go_on(&mut self, reactor: &mut Reactor, now: Instant) {
        if self.conn.is_some() && self.open.is_none() {
            self.step(&mut None, reactor, now);
            if self.open.is_some() {
                self.send(reactor, now);
            } else {
                // A kept connection would fail after a restart of the registry, and that would cost
                // a renewal.
                self.close(reactor);
            }
        }
    }

    fn lose(&mut self, reactor: &mut Reactor, why: &str, now: Instant) {
        self.close(reactor);
        if self.open.take().is_some() {
            self.tell(Err(why));
            self.next_host();
            if is_failpoint_active("lost request to the registry stays open") {
                return;
            }
            self.task.handle_failure(now);
        }
    }

    /// Closes the connection. No request follows.
    pub fn end(mut self, reactor: &mut Reactor) {
        self.close(reactor);
    }

    fn close(&mut self, reactor: &mut Reactor) {
        if let Some(conn) = self.conn.take() {
            reactor.close(conn);
        }
    }

    fn next_host(&mut self) {
        self.at = (self.at + 1) % self.hosts.len();
        self.given_up = self.given_up.wrapping_add(1);
    }

    /// The current host, with the scheme of `--registry`. The scheme on the wire can differ.
    fn host(&self) -> String {
        self.hosts[self.at].to_string().replacen("http", self.task.scheme(), 1)
    }

    /// Logs why the registry refuses a request: once, until it accepts such a request.
    fn tell_refusal(&mut self, path: &'static str, why: String) {
        let refused = Some((path, why));
        if self.refused != refused {
            let host = self.host();
            let why = refused.as_ref().map_or("", |(_, why)| why);
            event!(Warn, "registry", "registry refuses the request", registry = host, why = why);
            self.refused = refused;
        }
    }

    fn tell(&mut self, how: Result<(), &str>) {
        if self.logged == Some(how.is_ok()) {
            return;
        }
        self.logged = Some(how.is_ok());
        let host = self.host();
        match how {
            Ok(()) => event!(Info, "registry", "registry is reachable", registry = host),
            Err(why) => {
                event!(Warn, "registry", "registry is unreachable", registry = host, why = why)
            }
        }
    }
}
