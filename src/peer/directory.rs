//! Finds the control port of a prefill worker. It resolves the host name, asks the bootstrap
//! registry, and keeps the answer until the link fails.
//!
//! Thread: `ctl`. Invariants: this worker dials only hosts inside the configured networks, because
//! the hosts come from request bodies and registries. Each source has one look-up at a time. A
//! look-up has the deadline of its dial and a bounded answer. Not here: DNS (`net::resolver`), the
//! link (`control`).

use crate::http::client::{self, RequestLine, ResponseDecoder};
use crate::http::{HttpLimits, Method};
use crate::ids::WorkerId;
use crate::limits::REGISTRY_ANSWER_MAX;
use crate::link::handoff::Source;
use crate::link::lookup::{LookupResult, SourceLookup};
use crate::net::resolver::{Addresses, Resolver};
use crate::net::{ConnId, Event, Reactor};
use crate::registry::bootstrap::Topology;
use crate::stdx::cidr::Cidr;
use crate::stdx::failpoint::is_failpoint_active;
use crate::stdx::hash_map::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

const TARGET: &str =
    "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1";

#[derive(Debug)]
struct Lookup {
    worker: WorkerId,
    source: Source,
    registry: SocketAddr,
    decoder: ResponseDecoder,
    status: u16,
    body: Vec<u8>,
    until: Instant,
}

/// Look-ups in progress, and their cached answers.
#[derive(Debug)]
pub struct Directory {
    allowed: Vec<Cidr>,
    names: Resolver,
    known: HashMap<Source, SocketAddr>,
    lookups: HashMap<ConnId, Lookup>,
}

impl SourceLookup for Directory {
    fn look_up(
        &mut self,
        worker: WorkerId,
        source: Source,
        until: Instant,
        reactor: &mut Reactor,
    ) -> Option<LookupResult> {
        if let Some(&control) = self.known.get(&source) {
            return Some(LookupResult { worker, source, control: Ok(control), until });
        }
        if self.lookups.values().any(|asking| asking.worker == worker && asking.source == source) {
            return None;
        }
        let asked = match source {
            Source::Remote(registry) => {
                self.dial(registry, until, reactor).map(|conn| (conn, registry))
            }
            Source::Local(_) | Source::Fake | Source::Named { .. } => {
                Err("the source has no address of another process".into())
            }
        };
        match asked {
            Ok((conn, registry)) => {
                let limits = HttpLimits { body: REGISTRY_ANSWER_MAX, ..HttpLimits::default() };
                let decoder = ResponseDecoder::new(Method::Get, limits);
                let body = Vec::new();
                self.lookups.insert(
                    conn,
                    Lookup { worker, source, registry, decoder, status: 0, body, until },
                );
                None
            }
            Err(why) => Some(LookupResult { worker, source, control: Err(why), until }),
        }
    }

    fn allows(&self, ip: IpAddr) -> bool {
        self.allowed.iter().any(|network| network.contains(ip))
    }

    fn forget(&mut self, source: &Source) {
        if !is_failpoint_active("address of a lost source stays known") {
            self.known.remove(source);
        }
        if let Source::Remote(registry) = source {
            self.names.forget(registry.ip());
        }
    }

    fn resolve(&mut self, name: &str, now: Instant) -> Option<Result<IpAddr, String>> {
        let addresses = self.names.resolve(name, now)?;
        Some(self.choose(name, addresses))
    }

    fn resolved(&mut self, now: Instant) -> Option<(String, Result<IpAddr, String>)> {
        let (name, addresses) = self.names.poll(now).or_else(|| self.names.expire(now))?;
        let address = self.choose(&name, addresses);
        Some((name, address))
    }

    fn has_events(&self) -> bool {
        self.names.has_events()
    }

    fn owns(&self, event: &Event) -> bool {
        match event {
            Event::Connected(conn)
            | Event::Received(conn)
            | Event::Eof(conn)
            | Event::Drained(conn) => self.lookups.contains_key(conn),
            Event::Closed { conn, .. } => self.lookups.contains_key(conn),
            Event::Accepted { .. } | Event::Woken | Event::Terminate | Event::Hangup => false,
        }
    }

    fn handle(&mut self, event: Event, reactor: &mut Reactor) -> Option<LookupResult> {
        let (conn, over) = match event {
            Event::Connected(conn) => {
                self.ask(conn, reactor);
                return None;
            }
            Event::Received(conn) => (conn, self.read(conn, reactor)),
            Event::Eof(conn) => (conn, Some(Err("the registry closed the connection".to_string()))),
            Event::Closed { conn, reason } => (conn, Some(Err(reason.to_string()))),
            Event::Accepted { .. }
            | Event::Drained(_)
            | Event::Woken
            | Event::Terminate
            | Event::Hangup => {
                return None;
            }
        };
        let control = over?.and_then(|control| match self.allows(control.ip()) {
            true => Ok(control),
            false => Err(format!(
                "the registry's control_host {} lies in no network of --bootstrap-allow",
                control.ip()
            )),
        });
        reactor.close(conn);
        let Lookup { worker, source, until, .. } = self.lookups.remove(&conn)?;
        match control {
            Ok(control) => drop(self.known.insert(source.clone(), control)),
            Err(_) => self.forget(&source),
        }
        Some(LookupResult { worker, source, control, until })
    }

    fn expire(&mut self, reactor: &mut Reactor, now: Instant) -> Vec<LookupResult> {
        let mut found = Vec::new();
        let late: Vec<ConnId> = self
            .lookups
            .iter()
            .filter(|(_, asking)| asking.until <= now)
            .map(|(&conn, _)| conn)
            .collect();
        for conn in late {
            reactor.close(conn);
            if let Some(Lookup { worker, source, until, .. }) = self.lookups.remove(&conn) {
                let control = Err("the registry did not answer in time".into());
                found.push(LookupResult { worker, source, control, until });
            }
        }
        found
    }

    fn close(&mut self, reactor: &mut Reactor) {
        self.lookups.drain().for_each(|(conn, _)| reactor.close(conn));
    }
}

impl Directory {
    /// An empty directory. Hosts inside `allowed` can be dialled.
    pub fn new(allowed: Vec<Cidr>, names: Resolver) -> Directory {
        Directory { allowed, names, known: HashMap::default(), lookups: HashMap::default() }
    }

    /// Chooses the lowest address that can be dialled. This way, a worker with several addresses
    /// always has the same one.
    fn choose(&self, name: &str, addresses: Addresses) -> Result<IpAddr, String> {
        let addresses = addresses?;
        let canonical = addresses.iter().map(|ip| ip.to_canonical());
        canonical.filter(|&ip| self.allows(ip)).min().ok_or_else(|| {
            format!("bootstrap_host {name} ({addresses:?}) lies in no network of --bootstrap-allow")
        })
    }

    fn dial(
        &self,
        registry: SocketAddr,
        until: Instant,
        reactor: &mut Reactor,
    ) -> Result<ConnId, String> {
        if !self.allows(registry.ip()) {
            let ip = registry.ip();
            return Err(format!("bootstrap_host {ip} lies in no network of --bootstrap-allow"));
        }
        reactor.connect(&registry.into(), until).map_err(|reason| reason.to_string())
    }

    fn ask(&self, conn: ConnId, reactor: &mut Reactor) {
        let Some(asking) = self.lookups.get(&conn) else { return };
        let host = asking.registry.to_string();
        let mut out = Vec::new();
        let line = RequestLine { method: Method::Get, target: TARGET, host: &host };
        client::write_request(&mut out, line, &[("connection", "close")], None);
        // If the connection takes no bytes, its end arrives as an event.
        let _ = reactor.send(conn, &out);
    }

    /// The result, when the answer is complete.
    fn read(&mut self, conn: ConnId, reactor: &mut Reactor) -> Option<Result<SocketAddr, String>> {
        let asking = self.lookups.get_mut(&conn)?;
        loop {
            let (used, event) = match asking.decoder.read(reactor.received(conn)) {
                Ok(read) => read,
                Err(error) => return Some(Err(error.to_string())),
            };
            let mut whole = false;
            match event {
                Some(client::ResponseEvent::Head(head)) => asking.status = head.status,
                Some(client::ResponseEvent::Body(piece))
                    if asking.body.len() + piece.len() <= REGISTRY_ANSWER_MAX =>
                {
                    asking.body.extend_from_slice(piece);
                }
                Some(client::ResponseEvent::Body(_)) => {
                    return Some(Err("the registry's answer is too long".into()));
                }
                Some(client::ResponseEvent::End { .. }) => whole = true,
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

impl Lookup {
    fn control(&self) -> Result<SocketAddr, String> {
        if self.status != 200 {
            let text = String::from_utf8_lossy(&self.body);
            return Err(format!("the registry answers {}: {}", self.status, text.trim()));
        }
        let topology: Topology = serde_json::from_slice(&self.body)
            .map_err(|error| format!("the registry's answer: {error}"))?;
        let port = topology
            .control_port
            .ok_or("the registry's worker does not speak this hand-off protocol")?;
        let ip = match &topology.control_host {
            None => self.registry.ip(),
            // If the host is a name, the registry's address is used, because the registry and the
            // control port are in the same process.
            Some(host) => host.parse().unwrap_or(self.registry.ip()),
        };
        Ok(SocketAddr::new(ip, port))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::time::Duration;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn directory() -> Directory {
        let names = Resolver::over(|_| Ok(Vec::new()), || {}).unwrap();
        Directory::new(Cidr::LOOPBACK.to_vec(), names)
    }

    /// A registry that answers once, with this control host.
    fn registry(control_host: Option<&str>) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let body = serde_json::json!({
            "attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "page_size": 16,
            "kv_cache_dtype": "f16", "follow_bootstrap_room": true,
            "decode_allocation_policy": "early",
            "prefill_http_port": 1, "control_host": control_host, "control_port": 7,
        })
        .to_string();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut asked = [0; 4096];
            let _ = stream.read(&mut asked);
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
            stream.write_all((head + &body).as_bytes()).unwrap();
        });
        address
    }

    fn found(
        directory: &mut Directory,
        reactor: &mut Reactor,
        registry: SocketAddr,
    ) -> LookupResult {
        let until = Instant::now() + PATIENCE;
        let source = Source::Remote(registry);
        assert!(directory.look_up(WorkerId(0), source, until, reactor).is_none());
        loop {
            assert!(Instant::now() < until, "no answer");
            reactor.poll(Some(Instant::now() + Duration::from_millis(50))).unwrap();
            while let Some(event) = reactor.next_event() {
                if let Some(found) = directory.handle(event, reactor) {
                    return found;
                }
            }
        }
    }

    #[test]
    fn a_host_that_a_registry_names_outside_the_allowed_networks_is_refused() {
        let (mut directory, mut reactor) = (directory(), Reactor::new().unwrap());
        for host in [None, Some("127.0.0.2"), Some("a-name")] {
            let at = registry(host);
            let ip = host.and_then(|host| host.parse().ok()).unwrap_or(at.ip());
            let found = found(&mut directory, &mut reactor, at);
            assert_eq!(found.control, Ok(SocketAddr::new(ip, 7)));
        }
        let found = found(&mut directory, &mut reactor, registry(Some("192.0.2.1")));
        let why = found.control.unwrap_err();
        assert!(why.contains("192.0.2.1") && why.contains("--bootstrap-allow"), "{why}");
    }

    #[test]
    fn a_source_is_looked_up_once_at_a_time_and_no_longer_than_its_dial() {
        let (mut directory, mut reactor) = (directory(), Reactor::new().unwrap());
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let source = Source::Remote(silent.local_addr().unwrap());
        let now = Instant::now();
        let until = now + Duration::from_secs(1);
        for _ in 0..3 {
            assert!(directory.look_up(WorkerId(0), source.clone(), until, &mut reactor).is_none());
        }
        assert_eq!(directory.lookups.len(), 1);
        assert!(directory.expire(&mut reactor, now).is_empty());
        let late = directory.expire(&mut reactor, until);
        assert!(late.len() == 1 && late[0].control.is_err() && directory.lookups.is_empty());
    }
}
