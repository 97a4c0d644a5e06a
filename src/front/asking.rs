//! A decode worker's requests to prefill workers, where a router leaves them to it: one for each of its own, whose first
//! event says where the KV will be.
//!
//! Over HTTP, and not over the control link: what is asked is the client's request, which a prefill worker's front reads,
//! bounds, counts and refuses by name already. On the link it would be a second interface to all of that, and prompts of
//! megabytes would stand before the messages of others' transfers. Everything from the room on is the link's.
//!
//! Thread: `ctl`. Owns: connections to prefill workers' fronts, one per request, and what was read of their answers. Hosts
//! are dialled that the directory allows (`--bootstrap-allow`), since requests name them. Invariants: of each request there
//! is one [`Word`] that says where its KV is, or that it failed; after that one at most, which says how prefill ended.
//! Bounded: requests, the part of an answer that is kept, and each in time; until it says where the KV is, by how long it takes
//! nothing in and says nothing, since a process that stands still closes nothing. Not here: what a word means (`generations`).

use crate::cause::Cause;
use crate::front::connections::JSON;
use crate::front::directory::Directory;
use crate::front::handoff::Source;
use crate::front::http::client::{Event as Part, ResponseDecoder};
use crate::front::http::{Limits, Method};
use crate::front::openai::{PrefillAddress, ToldKv};
use crate::front::router::call::{Order, Outgoing, WorkerAnswer};
use crate::front::router::failure::{Failure, cause_in};
use crate::limits::{ASKED_ANSWER_MAX, ASKED_SILENCE_MAX, PREFILL_ASKS_MAX, ROUTER_CONNECT_TIME};
use crate::net::{Authorities, CloseReason, ConnId, Event, Reactor};
use crate::obs::log::event;
use crate::wire::message::Role;
use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

/// How the line of an event begins that says something.
const DATA: &[u8] = b"data: ";

/// What is asked of a prefill worker.
#[derive(Clone, Debug)]
pub struct Ask {
    /// For which of this worker's requests.
    pub exchange: u64,
    /// Whom.
    pub address: PrefillAddress,
    /// Path and header fields.
    pub order: Order,
    /// As [`crate::front::openai::routed::Routed::keep`] writes it.
    pub body: Arc<Vec<u8>>,
    /// When it is given up.
    pub until: Instant,
}

/// What prefill says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Word {
    /// The KV will be there.
    Kept(ToldKv),
    /// It has failed, or could not be asked.
    Failed(Cause),
    /// It refuses the request, as any other would.
    Refused(Refusal),
    /// It was not asked, for want of room here.
    Unasked,
    /// It is done, or time is up behind [`Word::Kept`]: what becomes of the KV the hand-off tells.
    Ended,
    /// Its connection was lost behind that.
    Lost,
}

/// What prefill says of a request that is wrong itself (400).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal {
    /// Media type.
    pub media: String,
    /// At most [`ASKED_ANSWER_MAX`] bytes.
    pub body: Vec<u8>,
}

#[derive(Debug)]
struct Asked {
    exchange: u64,
    /// Host and port of its worker.
    at: String,
    outgoing: Outgoing,
    decoder: ResponseDecoder,
    status: u16,
    media: String,
    /// Of the answer, what was not understood yet.
    body: Vec<u8>,
    /// Whether it has said where the KV will be.
    told: bool,
    /// Since when it has taken nothing in, while it has not.
    silent: Instant,
    until: Instant,
}

/// All that prefill workers are being asked.
#[derive(Debug, Default)]
pub struct Asking {
    /// Who vouches for those that are asked over TLS.
    authorities: Option<Authorities>,
    /// Those whose worker has but a name yet.
    unresolved: Vec<Ask>,
    open: HashMap<ConnId, Asked>,
    words: VecDeque<(u64, Word)>,
}

impl Asking {
    /// Prefill workers that are asked over TLS must be vouched for by these from now on.
    pub fn trust(&mut self, authorities: Authorities) {
        self.authorities = Some(authorities);
    }

    /// Whether an event is of one of these connections.
    pub fn owns(&self, event: &Event) -> bool {
        match event {
            Event::Connected(conn)
            | Event::Received(conn)
            | Event::Eof(conn)
            | Event::Drained(conn)
            | Event::Closed { conn, .. } => self.open.contains_key(conn),
            Event::Accepted { .. } | Event::Woken | Event::Terminate | Event::Hangup => false,
        }
    }

    /// What has been said of which request.
    pub fn poll(&mut self) -> Option<(u64, Word)> {
        self.words.pop_front()
    }

    /// Asks.
    pub fn begin(
        &mut self,
        ask: Ask,
        directory: &mut Directory,
        reactor: &mut Reactor,
        now: Instant,
    ) {
        if self.open.len() + self.unresolved.len() >= PREFILL_ASKS_MAX {
            return self.words.push_back((ask.exchange, Word::Unasked));
        }
        let address = match Source::remote(&ask.address.host, ask.address.port) {
            Source::Remote(address) if directory.allows(address.ip()) => Ok(address.ip()),
            Source::Remote(address) => {
                Err(format!("{} lies in no network of --bootstrap-allow", address.ip()))
            }
            _ => match directory.resolve(&ask.address.host.to_ascii_lowercase(), now) {
                Some(found) => found,
                None => return self.unresolved.push(ask),
            },
        };
        self.dial(ask, address, reactor, now);
    }

    /// A name is resolved, or cannot be.
    pub fn resolved(
        &mut self,
        name: &str,
        address: &Result<IpAddr, String>,
        reactor: &mut Reactor,
        now: Instant,
    ) {
        let is_meant = |ask: &Ask| ask.address.host.eq_ignore_ascii_case(name);
        let (named, others) = std::mem::take(&mut self.unresolved).into_iter().partition(is_meant);
        self.unresolved = others;
        let named: Vec<Ask> = named;
        for ask in named {
            self.dial(ask, address.clone(), reactor, now);
        }
    }

    fn dial(
        &mut self,
        ask: Ask,
        address: Result<IpAddr, String>,
        reactor: &mut Reactor,
        now: Instant,
    ) {
        let Ask { exchange, address: at, order, body, until } = ask;
        let dialled = address.and_then(|ip| {
            let until = until.min(now + ROUTER_CONNECT_TIME);
            let address = SocketAddr::new(ip, at.port).into();
            let conn = match &self.authorities {
                _ if !at.tls => reactor.connect(&address, until),
                Some(authorities) => {
                    reactor.connect_secured(&address, (authorities, at.bare_host()), until)
                }
                None => {
                    return Err("it is asked over TLS, which takes --tls-ca-file here".to_owned());
                }
            };
            conn.map_err(|reason| reason.to_string())
        });
        match dialled {
            Ok(conn) => {
                let limits = Limits { body: usize::MAX, ..Limits::default() };
                let at = at.authority();
                let asked = Asked {
                    exchange,
                    outgoing: Outgoing::new(&order, &at, Some(Role::Prefill.to_string()), body),
                    at,
                    decoder: ResponseDecoder::new(Method::Post, limits),
                    status: 0,
                    media: String::new(),
                    body: Vec::new(),
                    told: false,
                    silent: now,
                    until,
                };
                self.open.insert(conn, asked);
            }
            Err(why) => {
                event!(
                    Warn,
                    "asking",
                    "prefill worker cannot be asked",
                    host = at.host,
                    port = at.port,
                    why = why
                );
                self.words.push_back((exchange, Word::Failed(Cause::PeerLost)));
            }
        }
    }

    /// Nobody waits any more for what was asked for this request: prefill, which sees its client leave, ends it.
    pub fn cancel(&mut self, exchange: u64, reactor: &mut Reactor) {
        self.unresolved.retain(|ask| ask.exchange != exchange);
        let found =
            self.open.iter().find(|(_, asked)| asked.exchange == exchange).map(|(&conn, _)| conn);
        if let Some(conn) = found {
            self.open.remove(&conn);
            reactor.close(conn);
        }
    }

    /// Nobody is asked any more.
    pub fn close(self, reactor: &mut Reactor) {
        self.open.into_keys().for_each(|conn| reactor.close(conn));
    }

    /// Gives up what takes too long.
    pub fn expire(&mut self, reactor: &mut Reactor, now: Instant) {
        let late: Vec<ConnId> = self
            .open
            .iter()
            .filter(|(_, asked)| asked.until <= now)
            .map(|(&conn, _)| conn)
            .collect();
        for conn in late {
            self.over(conn, Word::Failed(Cause::Deadline), reactor);
        }
        self.give_up_silent(reactor, now);
        let (late, waiting) =
            std::mem::take(&mut self.unresolved).into_iter().partition(|ask| ask.until <= now);
        self.unresolved = waiting;
        let late: Vec<Ask> = late;
        self.words.extend(late.iter().map(|ask| (ask.exchange, Word::Failed(Cause::Deadline))));
    }

    /// Gives up those that stand still before they have said where the KV is; behind that it is the link's to find out.
    fn give_up_silent(&mut self, reactor: &mut Reactor, now: Instant) {
        let is_silent = |asked: &Asked| !asked.told && asked.silent + ASKED_SILENCE_MAX <= now;
        let silent: Vec<ConnId> =
            self.open.iter().filter(|(_, asked)| is_silent(asked)).map(|(&conn, _)| conn).collect();
        for conn in silent {
            if let Some(asked) = self.open.get(&conn) {
                event!(
                    Warn,
                    "asking",
                    "prefill worker does not say where the KV will be",
                    exchange = asked.exchange
                );
            }
            self.over(conn, Word::Failed(Cause::PeerLost), reactor);
        }
    }

    /// Takes an event of one of these connections.
    pub fn handle(&mut self, event: Event, reactor: &mut Reactor, now: Instant) {
        match event {
            Event::Connected(conn) | Event::Drained(conn) => {
                let Some(asked) = self.open.get_mut(&conn) else { return };
                asked.silent = now;
                if asked.outgoing.pump(reactor, conn).is_err() {
                    self.over(conn, Word::Unasked, reactor);
                }
            }
            Event::Received(conn) => self.read(conn, reactor),
            Event::Eof(conn) => {
                self.read(conn, reactor);
                self.over(conn, Word::Failed(Cause::PeerLost), reactor);
            }
            Event::Closed { conn, reason } => {
                if let (CloseReason::Tls(why), Some(asked)) = (reason, self.open.get(&conn)) {
                    let at = &asked.at;
                    event!(
                        Warn,
                        "asking",
                        "prefill worker is not spoken to",
                        worker = at,
                        why = why
                    );
                }
                self.over(conn, Word::Failed(Cause::PeerLost), reactor);
            }
            Event::Accepted { .. } | Event::Woken | Event::Terminate | Event::Hangup => {}
        }
    }

    fn read(&mut self, conn: ConnId, reactor: &mut Reactor) {
        loop {
            let Some(asked) = self.open.get_mut(&conn) else { return };
            let Ok((used, part)) = asked.decoder.read(reactor.received(conn)) else {
                return self.over(conn, Word::Failed(Cause::PeerLost), reactor);
            };
            let mut end = part.is_none().then_some(false);
            match part {
                Some(Part::Head(head)) => {
                    asked.status = head.status;
                    asked.media = head.headers.get("content-type").unwrap_or(JSON).to_owned();
                }
                Some(Part::Body(piece)) => asked.body.extend_from_slice(piece),
                Some(Part::End { .. }) => end = Some(true),
                None => {}
            }
            reactor.consume(conn, used);
            let (exchange, words) = (asked.exchange, asked.understand(end == Some(true)));
            let last = words.into_iter().find_map(|word| match word {
                Word::Kept(_) => {
                    self.words.push_back((exchange, word));
                    None
                }
                last => Some(last),
            });
            match (last, end) {
                (Some(last), _) => return self.over(conn, last, reactor),
                (None, Some(_)) => return,
                (None, None) => {}
            }
        }
    }

    /// The connection has nothing more to say but this; of one that was lost only where nothing was said.
    fn over(&mut self, conn: ConnId, word: Word, reactor: &mut Reactor) {
        let Some(asked) = self.open.remove(&conn) else { return };
        reactor.close(conn);
        let word = match word {
            Word::Failed(Cause::PeerLost) if asked.told => Word::Lost,
            Word::Failed(Cause::Deadline) if asked.told => Word::Ended,
            word => word,
        };
        self.words.push_back((asked.exchange, word));
    }
}

impl Asked {
    /// What has come of the answer means, in order; nothing follows behind what is not [`Word::Kept`].
    fn understand(&mut self, is_whole: bool) -> Vec<Word> {
        let mut words = Vec::new();
        let answer = WorkerAnswer {
            status: self.status,
            media: std::mem::take(&mut self.media),
            retry_after: None,
            body: std::mem::take(&mut self.body),
            own: None,
        };
        let is_stream = answer.is_stream();
        if is_stream {
            let mut from = 0;
            while let Some(length) = answer.body[from..].windows(2).position(|pair| pair == b"\n\n")
            {
                words.extend(self.event(&answer.body[from..from + length]));
                from += length + 2;
            }
            self.body.extend_from_slice(&answer.body[from..]);
        } else if is_whole && self.status > 0 && !answer.is_success() {
            words.push(word_of(&answer));
        } else {
            self.body = answer.body;
        }
        self.media = answer.media;
        if self.body.len() > ASKED_ANSWER_MAX {
            words.push(Word::Failed(Cause::Internal));
        } else if is_whole {
            words.push(if self.told { Word::Ended } else { Word::Failed(Cause::Incompatible) });
        }
        words
    }

    /// One event, less the empty line behind it: the first says where the KV will be, and of the others only a failure is
    /// of use.
    fn event(&mut self, event: &[u8]) -> Option<Word> {
        let line = event.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(DATA))?;
        if let Some(cause) = cause_in(line) {
            return Some(Word::Failed(as_partners(cause)));
        }
        if std::mem::replace(&mut self.told, true) {
            return None;
        }
        Some(ToldKv::of(line).map_or(Word::Failed(Cause::Incompatible), Word::Kept))
    }
}

/// What an answer that is none of success says.
fn word_of(answer: &WorkerAnswer) -> Word {
    match Failure::of(answer).cause {
        Cause::Refused
            if answer.status == Cause::Refused.http_status()
                && answer.body.len() <= ASKED_ANSWER_MAX =>
        {
            let WorkerAnswer { media, body, .. } = answer.clone();
            Word::Refused(Refusal { media, body })
        }
        cause => Word::Failed(as_partners(cause)),
    }
}

/// That its client has gone, as prefill may think, is not for one that is here.
fn as_partners(cause: Cause) -> Cause {
    if cause == Cause::ClientGone { Cause::PeerLost } else { cause }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(status: u16, media: &str) -> Asked {
        let order = Order { method: Method::Post, target: "/generate".into(), headers: Vec::new() };
        Asked {
            exchange: 1,
            at: "h:1".into(),
            outgoing: Outgoing::new(&order, "h:1", None, Arc::default()),
            decoder: ResponseDecoder::new(Method::Post, Limits::default()),
            status,
            media: media.into(),
            body: Vec::new(),
            told: false,
            silent: Instant::now(),
            until: Instant::now(),
        }
    }

    const STREAM: &str = "text/event-stream; charset=utf-8";
    const KEPT: &str = "data: {\"kv_transfer_params\":{\"bootstrap_room\":7}}\n\n";

    /// All words of an answer, whose bytes come one by one.
    fn words(status: u16, media: &str, answer: &str) -> Vec<Word> {
        let mut asked = asked(status, media);
        let mut words = Vec::new();
        for byte in answer.bytes() {
            asked.body.push(byte);
            words.extend(asked.understand(false));
        }
        words.extend(asked.understand(true));
        words
    }

    #[test]
    fn the_first_event_says_where_the_kv_is_and_a_later_one_that_it_failed() {
        let kept = Word::Kept(ToldKv {
            params: "{\"bootstrap_room\":7}".into(),
            room: Some(crate::ids::Room(7)),
        });
        let rest = ": {\"created\":1,\"choice\":0}\ndata: {\"choices\":[]}\n\ndata: [DONE]\n\n";
        assert_eq!(words(200, STREAM, &format!("{KEPT}{rest}")), [kept.clone(), Word::Ended]);
        let error = "data: {\"error\":{\"code\":\"overloaded\"}}\n\n";
        let failed = Word::Failed(Cause::Overloaded);
        assert_eq!(words(200, STREAM, &format!("{KEPT}{error}"))[..2], [kept, failed.clone()]);
        assert_eq!(words(200, STREAM, error)[0], failed);
        let gone = error.replace("overloaded", "client_gone");
        assert_eq!(words(200, STREAM, &gone)[0], Word::Failed(Cause::PeerLost), "it is here");
    }

    #[test]
    fn whatever_else_comes_is_a_failure() {
        let told = r#"{"error":{"code":"draining"}}"#;
        assert_eq!(words(503, JSON, told)[0], Word::Failed(Cause::Draining));
        assert_eq!(words(404, JSON, "{}")[0], Word::Failed(Cause::Refused));
        let refusal = Refusal { media: JSON.into(), body: told.replace("draining", "x").into() };
        let wrong = words(400, JSON, &told.replace("draining", "x"));
        assert_eq!(wrong[0], Word::Refused(refusal), "as any other would say it");
        // Engines that know no such request answer it.
        for (media, answer) in
            [(JSON, "{\"choices\":[]}"), (STREAM, "data: {\"choices\":[]}\n\n"), (STREAM, "")]
        {
            assert_eq!(words(200, media, answer)[0], Word::Failed(Cause::Incompatible), "{answer}");
        }
        let mut endless = asked(200, STREAM);
        endless.body = vec![b'x'; ASKED_ANSWER_MAX + 1];
        assert_eq!(endless.understand(false), [Word::Failed(Cause::Internal)]);
    }
}
