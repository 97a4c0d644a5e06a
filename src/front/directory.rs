//! Where a prefill worker's control port is: asked of its registry, remembered until the link fails.
//!
//! Thread: `ctl`. `bootstrap_host` comes from a request body, so only hosts inside the configured networks
//! are dialled. Bounded: one look-up per source at a time, each with a deadline and a short answer.

use crate::cluster::registry::Topology;
use crate::config::values::Cidr;
use crate::front::handoff::Source;
use crate::front::http::client::{self, RequestLine, ResponseDecoder};
use crate::front::http::{Limits, Method};
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

/// Look-ups under way, and what is known.
#[derive(Debug)]
pub struct Directory {
    allowed: Vec<Cidr>,
    known: HashMap<Source, SocketAddr>,
    asking: HashMap<ConnId, LookUp>,
}

impl Directory {
    /// Nothing is known yet; hosts inside `allowed` may be dialled.
    pub fn new(allowed: Vec<Cidr>) -> Directory {
        Directory { allowed, known: HashMap::new(), asking: HashMap::new() }
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

    /// Looks a source up; the answer comes now or from [`Directory::handle`].
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
        let asked = self.address_of(&source).and_then(|registry| {
            let until = now + SESSION_SETUP_DEADLINE;
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
    }

    /// Takes an event of one of these connections.
    pub fn handle(&mut self, event: Event, reactor: &mut Reactor, now: Instant) -> Option<Found> {
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
        let _ = now;
        let control = over?;
        reactor.close(conn);
        let LookUp { worker, source, .. } = self.asking.remove(&conn)?;
        if let Ok(control) = control {
            self.known.insert(source.clone(), control);
        }
        Some(Found { worker, source, control })
    }

    /// Ends look-ups that take too long.
    pub fn expire(&mut self, reactor: &mut Reactor, now: Instant) -> Vec<Found> {
        let late: Vec<ConnId> =
            self.asking.iter().filter(|(_, asking)| asking.until <= now).map(|(&conn, _)| conn).collect();
        late.into_iter()
            .filter_map(|conn| {
                reactor.close(conn);
                let LookUp { worker, source, .. } = self.asking.remove(&conn)?;
                Some(Found { worker, source, control: Err("the registry did not answer in time".into()) })
            })
            .collect()
    }

    fn address_of(&self, source: &Source) -> Result<SocketAddr, String> {
        let Source::Remote { host, port } = source else { return Err("not in another process".into()) };
        let ip: IpAddr = host.parse().map_err(|_| format!("bootstrap_host `{host}` is not an IP address"))?;
        if !self.allowed.iter().any(|network| network.contains(ip)) {
            return Err(format!("bootstrap_host {ip} lies in no network of --bootstrap-allow"));
        }
        Ok(SocketAddr::new(ip, *port))
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
            Some(host) => host.parse().map_err(|_| format!("control host `{host}` is not an IP address"))?,
        };
        Ok(SocketAddr::new(ip, port))
    }
}
