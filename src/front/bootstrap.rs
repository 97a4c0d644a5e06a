//! The registry's HTTP face, on the bootstrap port of a prefill worker.
//!
//! Thread: `ctl`. Routes, fields and codes of SGLang's bootstrap server (`cluster::registry` keeps the table).
//! Writes carry proof of the cluster key where there is one, over a nonce from `POST /challenge` (`cluster::proof`).

use crate::cluster::proof::{Asked, NONCE, Nonces, PROOF};
use crate::cluster::registry::{RankId, Refusal, Registration, Registry};
use crate::config::secret::Secret;
use crate::front::connections::{Answer, Connections, Incoming, JSON};
use crate::front::handoff::random;
use crate::front::http::{Limits, Method, Request};
use crate::limits::REGISTRY_REQUEST_MAX;
use crate::net::{ConnId, Event, ListenerId, Reactor};
use serde::Deserialize;
use std::time::Instant;

/// The registry and its connections.
#[derive(Debug)]
pub struct Bootstrap {
    listener: ListenerId,
    connections: Connections,
    registry: Registry,
    keys: Vec<Secret>,
    nonces: Nonces,
}

struct Reply {
    status: u16,
    media: &'static str,
    body: Vec<u8>,
}

impl Bootstrap {
    /// Serves `registry` on `listener`; writes prove one of `keys`, where there are some.
    pub fn new(listener: ListenerId, registry: Registry, keys: Vec<Secret>) -> Bootstrap {
        let limits = Limits { body: REGISTRY_REQUEST_MAX, ..Limits::default() };
        Bootstrap {
            listener,
            connections: Connections::within(limits),
            registry,
            keys,
            nonces: Nonces::new(random(), Instant::now()),
        }
    }

    /// Writes prove one of these from now on.
    pub fn set_keys(&mut self, keys: Vec<Secret>) {
        self.keys = keys;
    }

    /// Whether an event is of one of these connections.
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

    /// Takes an event of one of these connections and answers what is whole.
    pub fn handle(&mut self, event: Event, reactor: &mut Reactor, now: Instant) {
        self.connections.handle(reactor, event, now);
        while let Some(incoming) = self.connections.poll() {
            if let Incoming::Request(conn, request) = incoming {
                self.serve(conn, &request, reactor, now);
            }
        }
    }

    /// Answers what was asked, and listens no more.
    pub fn close(mut self, reactor: &mut Reactor) {
        self.connections.close(reactor);
        reactor.stop_listening(self.listener);
    }

    /// Closes what is overdue.
    pub fn expire(&mut self, reactor: &mut Reactor, now: Instant) {
        self.connections.expire(reactor, now);
    }

    fn serve(&mut self, conn: ConnId, request: &Request, reactor: &mut Reactor, now: Instant) {
        let Reply { status, media, body } = self.reply(request, now);
        let answer = Answer { status, media, body: &body, retry_after: None };
        self.connections.answer(reactor, conn, &answer, now);
    }

    fn reply(&mut self, request: &Request, now: Instant) -> Reply {
        use Method::{Get, Post, Put};
        match (request.head.method, request.head.path()) {
            (Get, "/health") => text(200, "OK"),
            (Get, "/route") => self.route(request),
            (Post, "/challenge") => json(&self.nonces.invite(now)),
            (Put, "/route") => self.write(request, now, |registry, body| {
                let rank: Registration = parse(body)?;
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

    fn route(&self, request: &Request) -> Reply {
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
        action: impl FnOnce(&mut Registry, &[u8]) -> Result<Reply, Reply>,
    ) -> Reply {
        if !self.proven(request, now) {
            return text(401, "Writes to this registry need the cluster key's proof.");
        }
        action(&mut self.registry, &request.body).unwrap_or_else(|reply| reply)
    }

    fn proven(&mut self, request: &Request, now: Instant) -> bool {
        if self.keys.is_empty() {
            return true;
        }
        let head = &request.head;
        let asked = Asked { method: head.method.as_str(), path: head.path(), body: &request.body };
        let (nonce, proof) = (head.headers.get(NONCE), head.headers.get(PROOF));
        self.nonces.take(&self.keys, asked, nonce, proof, now).is_ok()
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

fn parse<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Reply> {
    serde_json::from_slice(body).map_err(|error| text(400, &error.to_string()))
}

fn refusal(refusal: Refusal) -> Reply {
    match refusal {
        Refusal::Contradiction(what) => text(400, &what),
        Refusal::NotReady(count) => text(
            503,
            &format!("Prefill server not fully registered yet ({count} workers registered)."),
        ),
        Refusal::UnknownRank => text(404, "Unknown rank."),
    }
}

fn text(status: u16, body: &str) -> Reply {
    Reply { status, media: "text/plain", body: body.as_bytes().to_vec() }
}

fn json(body: &impl serde::Serialize) -> Reply {
    match serde_json::to_vec(body) {
        Ok(body) => Reply { status: 200, media: JSON, body },
        Err(error) => text(500, &error.to_string()),
    }
}
