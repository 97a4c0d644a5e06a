//! The HTTP server of the bootstrap registry, on the bootstrap port of a prefill worker.
//!
//! Thread: `ctl`. Paths, fields and codes are those of SGLang's bootstrap server. If there is a
//! cluster key, writes carry its proof over a nonce from `POST /challenge` (`registry::proof`). Not
//! here: the table of ranks (`registry::bootstrap`).

use crate::config::secret::Secret;
use crate::http::response::{JSON, Response};
use crate::http::{HttpLimits, Method, Request};
use crate::limits::REGISTRY_REQUEST_MAX;
use crate::net::{ConnId, Event, ListenerId, Reactor};
use crate::registry::bootstrap::{BootstrapError, BootstrapRegistry, RankId, RankRegistration};
use crate::registry::proof::{NONCE, Nonces, PROOF, SignedRequest};
use crate::server::connections::{ClientEvent, Connections};
use serde::Deserialize;
use std::time::Instant;

/// The registry and its connections.
#[derive(Debug)]
pub struct BootstrapServer {
    listener: ListenerId,
    connections: Connections,
    registry: BootstrapRegistry,
    keys: Vec<Secret>,
    nonces: Nonces,
}

struct HttpReply {
    status: u16,
    media: &'static str,
    body: Vec<u8>,
}

impl BootstrapServer {
    /// Serves `registry` on `listener`. If there are `keys`, writes must prove one of them.
    pub fn new(
        listener: ListenerId,
        registry: BootstrapRegistry,
        keys: Vec<Secret>,
        reactor: &mut Reactor,
    ) -> BootstrapServer {
        let limits = HttpLimits { body: REGISTRY_REQUEST_MAX, ..HttpLimits::default() };
        BootstrapServer {
            listener,
            connections: Connections::with_limits(limits),
            registry,
            keys,
            nonces: Nonces::new(reactor.entropy().bytes(), reactor.now()),
        }
    }

    /// Writes must prove one of these keys from now on.
    pub fn set_keys(&mut self, keys: Vec<Secret>) {
        self.keys = keys;
    }

    /// Whether an event belongs to one of these connections.
    pub fn owns(&self, event: &Event) -> bool {
        match *event {
            Event::Accepted { listener, .. } => listener == self.listener,
            Event::Connected(conn)
            | Event::Received(conn)
            | Event::Eof(conn)
            | Event::Drained(conn)
            | Event::Closed { conn, .. } => self.connections.owns(conn),
            Event::Woken | Event::Terminate | Event::Hangup => false,
        }
    }

    /// Takes an event of one of these connections and answers complete requests.
    pub fn handle(&mut self, event: Event, reactor: &mut Reactor, now: Instant) {
        self.connections.handle(reactor, event, now);
        while let Some(incoming) = self.connections.poll_event() {
            if let ClientEvent::Request(conn, request) = incoming {
                self.serve(conn, &request, reactor, now);
            }
        }
    }

    /// Sends pending answers and stops listening.
    pub fn close(mut self, reactor: &mut Reactor) {
        self.connections.close(reactor);
        reactor.stop_listening(self.listener);
    }

    /// Closes connections that are past their deadlines.
    pub fn expire(&mut self, reactor: &mut Reactor, now: Instant) {
        self.connections.expire(reactor, now);
    }

    fn serve(&mut self, conn: ConnId, request: &Request, reactor: &mut Reactor, now: Instant) {
        let HttpReply { status, media, body } = self.reply(request, now);
        let answer = Response { status, media, body: &body, retry_after: None };
        self.connections.send_response(reactor, conn, &answer, now);
    }

    fn reply(&mut self, request: &Request, now: Instant) -> HttpReply {
        use Method::{Get, Post, Put};
        match (request.head.method, request.head.path()) {
            (Get, "/health") => text(200, "OK"),
            (Get, "/route") => self.route(request),
            (Post, "/challenge") => json(&self.nonces.invite(now)),
            (Put, "/route") => self.write(request, now, |registry, body| {
                let rank: RankRegistration = parse(body)?;
                registry.register(rank).map_err(refusal)?;
                Ok(text(200, "OK"))
            }),
            (Post, "/register_dp_rank") => self.write(request, now, |registry, body| {
                let asked: Placement = parse(body)?;
                registry.place(asked.bootstrap_room, asked.dp_rank, now);
                Ok(text(200, "OK"))
            }),
            (Post, "/query_dp_ranks") => match parse::<Rooms>(&request.body) {
                Ok(asked) => {
                    let placed = self.registry.placed(&asked.bootstrap_rooms, now);
                    let ranks: serde_json::Map<_, _> = placed
                        .into_iter()
                        .map(|(room, rank)| (room.to_string(), rank.into()))
                        .collect();
                    json(&ranks)
                }
                Err(reply) => reply,
            },
            (_, "/route" | "/health" | "/challenge" | "/register_dp_rank" | "/query_dp_ranks") => {
                text(405, "Method not allowed")
            }
            _ => text(404, "Not found"),
        }
    }

    fn route(&self, request: &Request) -> HttpReply {
        let mut asked = [None::<i64>; 4];
        const NAMES: [&str; 4] =
            ["prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"];
        for (name, value) in request.head.query_pairs() {
            if let Some(index) = NAMES.iter().position(|known| *known == name) {
                asked[index] = value.parse().ok();
            }
        }
        let [Some(dp), Some(cp), Some(tp), Some(pp)] = asked else {
            return text(400, "Missing or malformed rank parameters.");
        };
        if [dp, cp, tp, pp] == [-1; 4] {
            return self.registry.topology().map_or_else(refusal, |topology| json(&topology));
        }
        let rank = |value: i64| u32::try_from(value).unwrap_or(u32::MAX);
        let id = RankId { dp: rank(dp), cp: rank(cp), tp: rank(tp), pp: rank(pp) };
        self.registry.rank(id).map_or_else(refusal, |rank| {
            json(&serde_json::json!({ "rank_ip": rank.rank_ip, "rank_port": rank.rank_port }))
        })
    }

    fn write(
        &mut self,
        request: &Request,
        now: Instant,
        action: impl FnOnce(&mut BootstrapRegistry, &[u8]) -> Result<HttpReply, HttpReply>,
    ) -> HttpReply {
        if !self.proven(request, now) {
            return text(401, "Writes to this registry need a proof of the cluster key.");
        }
        action(&mut self.registry, &request.body).unwrap_or_else(|reply| reply)
    }

    fn proven(&mut self, request: &Request, now: Instant) -> bool {
        if self.keys.is_empty() {
            return true;
        }
        let head = &request.head;
        let asked =
            SignedRequest { method: head.method.as_str(), path: head.path(), body: &request.body };
        let (nonce, proof) = (head.headers.get(NONCE), head.headers.get(PROOF));
        self.nonces.verify_request(&self.keys, asked, nonce, proof, now).is_ok()
    }
}

#[derive(Deserialize)]
struct Placement {
    bootstrap_room: u64,
    dp_rank: u32,
}

#[derive(Deserialize)]
struct Rooms {
    bootstrap_rooms: Vec<u64>,
}

fn parse<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, HttpReply> {
    serde_json::from_slice(body).map_err(|error| text(400, &error.to_string()))
}

fn refusal(refusal: BootstrapError) -> HttpReply {
    match refusal {
        BootstrapError::Contradiction(what) => text(400, &what),
        BootstrapError::NotReady(count) => text(
            503,
            &format!("Prefill server not fully registered yet ({count} workers registered)."),
        ),
        BootstrapError::UnknownRank => text(404, "Unknown rank."),
    }
}

fn text(status: u16, body: &str) -> HttpReply {
    HttpReply { status, media: "text/plain", body: body.as_bytes().to_vec() }
}

fn json(body: &impl serde::Serialize) -> HttpReply {
    match serde_json::to_vec(body) {
        Ok(body) => HttpReply { status: 200, media: JSON, body },
        Err(error) => text(500, &error.to_string()),
    }
}
