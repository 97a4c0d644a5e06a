//! Where a prefill worker's control port is: its host's name is resolved, its registry asked, and the answer
//! remembered until the link fails.
//!
//! Thread: `ctl`. `bootstrap_host` comes from a request body, so only hosts inside the configured networks
//! are dialled, whatever a name's addresses are. Bounded: one look-up per source at a time, each with a deadline
//! and a short answer.

use crate::cluster::registry::Topology;
use crate::config::values::Cidr;
use crate::front::handoff::Source;
use crate::front::http::client::{self, RequestLine, ResponseDecoder};
use crate::front::http::{Limits, Method};
use crate::front::resolver::{Addresses, Resolver};
use crate::ids::WorkerId;
use crate::limits::{REGISTRY_ANSWER_MAX, SESSION_SETUP_DEADLINE};
use crate::net::{ConnId, Event, Reactor};
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

const TARGET: &str = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1";

/// A look-up's outcome.
#[derive(Debug)]
pub struct Found {
    /// The decode worker that asked.
    pub worker: WorkerId,
    /// Whom it wants to reach.
    pub source: Source,
    /// Where to dial, or why not.
    pub control: Result<SocketAddr, String>,
}

#[derive(Debug)]
struct LookUp {
    worker: WorkerId,
    source: Source,
    registry: SocketAddr,
    decoder: ResponseDecoder,
    status: u16,
    body: Vec<u8>,
    until: Instant,
}

/// A look-up whose host's name is being resolved.
#[derive(Debug)]
struct Named {
    worker: WorkerId,
    source: Source,
    name: String,
    port: u16,
}

/// Look-ups under way, and what is known.
#[derive(Debug)]
pub struct Directory {
    allowed: Vec<Cidr>,
    /// `None` where nobody is looked up.
    names: Option<Resolver>,
    known: HashMap<Source, SocketAddr>,
    named: Vec<Named>,
    asking: HashMap<ConnId, LookUp>,
}

impl Directory {
    /// Nothing is known yet; hosts inside `allowed` may be dialled.
    pub fn new(allowed: Vec<Cidr>, names: Resolver) -> Directory {
        Directory { allowed, names: Some(names), ..Directory::closed() }
    }

    /// Of a process that looks nobody up.
    pub fn closed() -> Directory {
        Directory {
            allowed: Vec::new(),
            names: None,
            known: HashMap::new(),
            named: Vec::new(),
            asking: HashMap::new(),
        }
    }

    /// Whether a name was resolved.
    pub fn has_news(&self) -> bool {
        self.names.as_ref().is_some_and(Resolver::has_news)
    }

    /// Whether an event is of one of these connections.
    pub fn owns(&self, event: &Event) -> bool {
        match event {
            Event::Connected(conn) | Event::Received(conn) | Event::Eof(conn) | Event::Drained(conn) => {
                self.asking.contains_key(conn)
            }
            Event::Closed { conn, .. } => self.asking.contains_key(conn),
            Event::Accepted { .. } | Event::Woken | Event::Terminate => false,
        }
    }

    /// Looks a source up; the answer comes now, or from [`Directory::resolved`], [`Directory::handle`] or
    /// [`Directory::expire`].
    pub fn look_up(
        &mut self,
        worker: WorkerId,
        source: Source,
        reactor: &mut Reactor,
        now: Instant,
    ) -> Option<Found> {
        if let Some(&control) = self.known.get(&source) {
            return Some(Found { worker, source, control: Ok(control) });
        }
        let (name, port) = match &source {
            Source::Remote { host, port } => (host.clone(), *port),
            Source::Local(_) | Source::Fake => {
                return Some(Found { worker, source, control: Err("not in another process".into()) });
            }
        };
        let named = Named { worker, source, name, port };
        let addresses = match (named.name.parse().ok(), &mut self.names) {
            (Some(ip), _) => Ok(vec![ip]),
            (None, Some(names)) => match names.resolve(&named.name, now) {
                Some(addresses) => addresses,
                None => {
                    self.named.push(named);
                    return None;
                }
            },
            (None, None) => Err("nobody is looked up here".into()),
        };
        self.ask_at(named, addresses, reactor, now)
    }

    /// Goes on with look-ups whose names were resolved.
    pub fn resolved(&mut self, reactor: &mut Reactor, now: Instant) -> Vec<Found> {
        let mut found = Vec::new();
        while let Some((name, addresses)) = self.names.as_mut().and_then(|names| names.poll(now)) {
            self.go_on(&name, &addresses, reactor, now, &mut found);
        }
        found
    }

    fn go_on(
        &mut self,
        name: &str,
        addresses: &Addresses,
        reactor: &mut Reactor,
        now: Instant,
        found: &mut Vec<Found>,
    ) {
        let waited = std::mem::take(&mut self.named);
        let (ready, others) = waited.into_iter().partition(|named| named.name == name);
        self.named = others;
        let ready: Vec<Named> = ready;
        for named in ready {
            found.extend(self.ask_at(named, addresses.clone(), reactor, now));
        }
    }

    /// Dials the registry at the first address that may be dialled.
    fn ask_at(
        &mut self,
        named: Named,
        addresses: Addresses,
        reactor: &mut Reactor,
        now: Instant,
    ) -> Option<Found> {
        let Named { worker, source, name, port } = named;
        let asked = addresses
            .map_err(|why| format!("bootstrap_host `{name}`: {why}"))
            .and_then(|addresses| self.allowed_of(&name, &addresses))
            .and_then(|ip| {
                let (registry, until) = (SocketAddr::new(ip, port), now + SESSION_SETUP_DEADLINE);
                let conn = reactor.connect(&registry.into(), until).map_err(|reason| reason.to_string())?;
                Ok((conn, registry, until))
            });
        match asked {
            Ok((conn, registry, until)) => {
                let limits = Limits { body: REGISTRY_ANSWER_MAX, ..Limits::default() };
                let decoder = ResponseDecoder::new(Method::Get, limits);
                let body = Vec::new();
                self.asking
                    .insert(conn, LookUp { worker, source, registry, decoder, status: 0, body, until });
                None
            }
            Err(why) => Some(Found { worker, source, control: Err(why) }),
        }
    }

    /// A link to this source has failed: what was known of it may be wrong.
    pub fn forget(&mut self, source: &Source) {
        self.known.remove(source);
        if let (Source::Remote { host, .. }, Some(names)) = (source, &mut self.names) {
            names.forget(host);
        }
    }

    /// Takes an event of one of these connections.
    pub fn handle(&mut self, event: Event, reactor: &mut Reactor) -> Option<Found> {
        let (conn, over) = match event {
            Event::Connected(conn) => {
                self.ask(conn, reactor);
                return None;
            }
            Event::Received(conn) => (conn, self.read(conn, reactor)),
            Event::Eof(conn) => (conn, Some(Err("the registry closed the connection".to_string()))),
            Event::Closed { conn, reason } => (conn, Some(Err(reason.to_string()))),
            Event::Accepted { .. } | Event::Drained(_) | Event::Woken | Event::Terminate => return None,
        };
        let control = over?;
        reactor.close(conn);
        let LookUp { worker, source, .. } = self.asking.remove(&conn)?;
        match control {
            Ok(control) => drop(self.known.insert(source.clone(), control)),
            Err(_) => self.forget(&source),
        }
        Some(Found { worker, source, control })
    }

    /// Ends look-ups that take too long.
    pub fn expire(&mut self, reactor: &mut Reactor, now: Instant) -> Vec<Found> {
        let mut found = Vec::new();
        while let Some((name, addresses)) = self.names.as_mut().and_then(|names| names.expire(now)) {
            self.go_on(&name, &addresses, reactor, now, &mut found);
        }
        let late: Vec<ConnId> =
            self.asking.iter().filter(|(_, asking)| asking.until <= now).map(|(&conn, _)| conn).collect();
        for conn in late {
            reactor.close(conn);
            if let Some(LookUp { worker, source, .. }) = self.asking.remove(&conn) {
                let control = Err("the registry did not answer in time".into());
                found.push(Found { worker, source, control });
            }
        }
        found
    }

    fn allowed_of(&self, name: &str, addresses: &[IpAddr]) -> Result<IpAddr, String> {
        let allowed = |ip: &IpAddr| self.allowed.iter().any(|network| network.contains(*ip));
        addresses.iter().copied().find(allowed).ok_or_else(|| {
            format!("bootstrap_host {name} ({addresses:?}) lies in no network of --bootstrap-allow")
        })
    }

    fn ask(&self, conn: ConnId, reactor: &mut Reactor) {
        let Some(asking) = self.asking.get(&conn) else { return };
        let host = asking.registry.to_string();
        let mut out = Vec::new();
        let line = RequestLine { method: Method::Get, target: TARGET, host: &host };
        client::write_request(&mut out, line, &[("connection", "close")], None);
        // A connection that takes no bytes tells of its end by an event.
        let _ = reactor.send(conn, &out);
    }

    /// The answer, once it is whole.
    fn read(&mut self, conn: ConnId, reactor: &mut Reactor) -> Option<Result<SocketAddr, String>> {
        let asking = self.asking.get_mut(&conn)?;
        loop {
            let (used, event) = match asking.decoder.read(reactor.received(conn)) {
                Ok(read) => read,
                Err(error) => return Some(Err(error.to_string())),
            };
            let mut whole = false;
            match event {
                Some(client::Event::Head(head)) => asking.status = head.status,
                Some(client::Event::Body(piece))
                    if asking.body.len() + piece.len() <= REGISTRY_ANSWER_MAX =>
                {
                    asking.body.extend_from_slice(piece);
                }
                Some(client::Event::Body(_)) => return Some(Err("the registry's answer is too long".into())),
                Some(client::Event::End { .. }) => whole = true,
                None => {
                    reactor.consume(conn, used);
                    return None;
                }
            }
            reactor.consume(conn, used);
            if whole {
                return Some(asking.control());
            }
        }
    }
}

impl LookUp {
    fn control(&self) -> Result<SocketAddr, String> {
        if self.status != 200 {
            let text = String::from_utf8_lossy(&self.body);
            return Err(format!("the registry answers {}: {}", self.status, text.trim()));
        }
        let topology: Topology =
            serde_json::from_slice(&self.body).map_err(|error| format!("the registry's answer: {error}"))?;
        let port =
            topology.control_port.ok_or("the registry's worker does not speak this hand-off protocol")?;
        let ip = match &topology.control_host {
            None => self.registry.ip(),
            // A name stands for the address at which the registry, of the same process, was reached.
            Some(host) => host.parse().unwrap_or(self.registry.ip()),
        };
        Ok(SocketAddr::new(ip, port))
    }
}
