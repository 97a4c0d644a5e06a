//! A decode worker's HTTP requests to prefill workers (flow `decode-first`). It sends one for each
//! of its own requests, and the first event of the answer says where the KV will be.
//!
//! Owns: one connection per request. Thread: `ctl`. Invariants: each request gets one
//! [`PrefillReply`] that says where its KV is, or that it failed; then at most one that says how
//! prefill ended. Requests, bytes and times are bounded; hosts must be allowed by
//! `--bootstrap-allow`. Not here: what a reply means (`routing::remote_prefill`), the table of
//! requests, the hand-off. It uses HTTP because a prefill worker checks and counts HTTP requests
//! already, and long prompts would delay messages on the control link.

use crate::api::{KvTransferParams, PrefillAddress};
use crate::cause::Cause;
use crate::http::client::{ResponseDecoder, ResponseEvent as Part};
use crate::http::response::JSON;
use crate::http::{HttpLimits, Method};
use crate::ids::Role;
use crate::limits::{ASKED_ANSWER_MAX, ASKED_SILENCE_MAX, PREFILL_ASKS_MAX, ROUTER_CONNECT_TIME};
use crate::net::{Authorities, CloseReason, ConnId, Event, Reactor};
use crate::obs::log::event;
use crate::peer::directory::Directory;
use crate::peer::handoff::Source;
use crate::upstream::answer::UpstreamReply;
use crate::upstream::failure::{UpstreamFailure, cause_in};
use crate::upstream::request::{UpstreamHead, UpstreamRequest};
use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

/// Prefix of an event's data line.
const DATA: &[u8] = b"data: ";

/// A request to a prefill worker.
#[derive(Clone, Debug)]
pub struct PrefillRequest {
    /// Key of this worker's request that it belongs to.
    pub key: u64,
    /// The prefill worker.
    pub address: PrefillAddress,
    /// Path and header fields.
    pub head: UpstreamHead,
    /// Body from [`crate::api::routed::RoutedBody::keep`].
    pub body: Arc<Vec<u8>>,
    /// When it is given up.
    pub until: Instant,
}

/// A reply of prefill.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PrefillReply {
    /// The KV will be at this place.
    Kept(KvTransferParams),
    /// It has failed, or could not be asked.
    Failed(Cause),
    /// It refuses the request as invalid.
    Refused(PrefillRefusal),
    /// It was not asked, because too many requests are open here.
    NotSent,
    /// It is done, or time is up after [`PrefillReply::Kept`]. The hand-off reports what becomes of
    /// the KV.
    Ended,
    /// Its connection was lost after [`PrefillReply::Kept`].
    Lost,
}

/// Prefill's answer to an invalid request (400).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PrefillRefusal {
    /// Media type.
    pub media: String,
    /// At most [`ASKED_ANSWER_MAX`] bytes.
    pub body: Vec<u8>,
}

#[derive(Debug)]
struct PrefillCall {
    exchange: u64,
    /// Host and port of its worker.
    at: String,
    outgoing: UpstreamRequest,
    decoder: ResponseDecoder,
    status: u16,
    media: String,
    /// Bytes of the answer that are not parsed yet.
    body: Vec<u8>,
    /// Whether prefill has said where the KV will be.
    told: bool,
    /// When prefill last accepted bytes of the request.
    silent: Instant,
    until: Instant,
}

/// All open requests to prefill workers.
#[derive(Debug, Default)]
pub struct PrefillClient {
    /// CA certificates for prefill workers with TLS.
    authorities: Option<Authorities>,
    /// Requests that are not dialled yet.
    queued: VecDeque<PrefillRequest>,
    /// Requests that wait for the address of their worker's name.
    unresolved: Vec<PrefillRequest>,
    open: HashMap<ConnId, PrefillCall>,
    words: VecDeque<(u64, PrefillReply)>,
}

impl PrefillClient {
    /// Sets the CA certificates for prefill workers with TLS.
    pub fn trust(&mut self, authorities: Authorities) {
        self.authorities = Some(authorities);
    }

    /// Whether an event belongs to one of these connections.
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

    /// The next reply and the key of its request.
    pub fn poll_reply(&mut self) -> Option<(u64, PrefillReply)> {
        self.words.pop_front()
    }

    /// Whether a reply waits for [`PrefillClient::poll_reply`].
    pub fn has_news(&self) -> bool {
        !self.words.is_empty()
    }

    /// Queues a request for the next [`PrefillClient::dial_queued`].
    pub fn send_request(&mut self, ask: PrefillRequest) {
        if self.open.len() + self.unresolved.len() + self.queued.len() >= PREFILL_ASKS_MAX {
            return self.words.push_back((ask.key, PrefillReply::NotSent));
        }
        self.queued.push_back(ask);
    }

    /// Dials the workers of queued requests. `directory` says which hosts can be dialled.
    pub fn dial_queued(&mut self, directory: &mut Directory, reactor: &mut Reactor, now: Instant) {
        while let Some(ask) = self.queued.pop_front() {
            let address = match Source::remote(&ask.address.host, ask.address.port) {
                Source::Remote(address) if directory.allows(address.ip()) => Ok(address.ip()),
                Source::Remote(address) => {
                    Err(format!("{} lies in no network of --bootstrap-allow", address.ip()))
                }
                _ => match directory.resolve(&ask.address.host.to_ascii_lowercase(), now) {
                    Some(found) => found,
                    None => {
                        self.unresolved.push(ask);
                        continue;
                    }
                },
            };
            self.dial(ask, address, reactor, now);
        }
    }

    /// A name is resolved, or cannot be.
    pub fn resolved(
        &mut self,
        name: &str,
        address: &Result<IpAddr, String>,
        reactor: &mut Reactor,
        now: Instant,
    ) {
        let is_meant = |ask: &PrefillRequest| ask.address.host.eq_ignore_ascii_case(name);
        let (named, others) = std::mem::take(&mut self.unresolved).into_iter().partition(is_meant);
        self.unresolved = others;
        let named: Vec<PrefillRequest> = named;
        for ask in named {
            self.dial(ask, address.clone(), reactor, now);
        }
    }

    fn dial(
        &mut self,
        ask: PrefillRequest,
        address: Result<IpAddr, String>,
        reactor: &mut Reactor,
        now: Instant,
    ) {
        let PrefillRequest { key: exchange, address: at, head: order, body, until } = ask;
        let dialled = address.and_then(|ip| {
            let until = until.min(now + ROUTER_CONNECT_TIME);
            let address = SocketAddr::new(ip, at.port).into();
            let conn = match &self.authorities {
                _ if !at.tls => reactor.connect(&address, until),
                Some(authorities) => {
                    reactor.connect_secured(&address, (authorities, at.bare_host()), until)
                }
                None => {
                    return Err("it needs TLS, and this worker has no --tls-ca-file".to_owned());
                }
            };
            conn.map_err(|reason| reason.to_string())
        });
        match dialled {
            Ok(conn) => {
                let limits = HttpLimits { body: usize::MAX, ..HttpLimits::default() };
                let at = at.authority();
                let asked = PrefillCall {
                    exchange,
                    outgoing: UpstreamRequest::new(
                        &order,
                        &at,
                        Some(Role::Prefill.to_string()),
                        body,
                    ),
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
                self.words.push_back((exchange, PrefillReply::Failed(Cause::PeerLost)));
            }
        }
    }

    /// Closes the connection of a request that is not needed any more. Prefill then ends its leg.
    pub fn cancel_request(&mut self, exchange: u64, reactor: &mut Reactor) {
        self.queued.retain(|ask| ask.key != exchange);
        self.unresolved.retain(|ask| ask.key != exchange);
        let found =
            self.open.iter().find(|(_, asked)| asked.exchange == exchange).map(|(&conn, _)| conn);
        if let Some(conn) = found {
            self.open.remove(&conn);
            reactor.close(conn);
        }
    }

    /// Ends all requests, without replies.
    pub fn close(&mut self, reactor: &mut Reactor) {
        self.open.drain().for_each(|(conn, _)| reactor.close(conn));
        self.queued.clear();
        self.unresolved.clear();
        self.words.clear();
    }

    /// Gives up requests that take too long.
    pub fn expire(&mut self, reactor: &mut Reactor, now: Instant) {
        let late: Vec<ConnId> = self
            .open
            .iter()
            .filter(|(_, asked)| asked.until <= now)
            .map(|(&conn, _)| conn)
            .collect();
        for conn in late {
            self.over(conn, PrefillReply::Failed(Cause::Deadline), reactor);
        }
        self.give_up_silent(reactor, now);
        let words = &mut self.words;
        let mut stays = |ask: &PrefillRequest| {
            let is_late = ask.until <= now;
            if is_late {
                words.push_back((ask.key, PrefillReply::Failed(Cause::Deadline)));
            }
            !is_late
        };
        self.unresolved.retain(&mut stays);
        self.queued.retain(&mut stays);
    }

    /// Gives up prefill workers that hang before they say where the KV is. Later the control link
    /// detects that.
    fn give_up_silent(&mut self, reactor: &mut Reactor, now: Instant) {
        let is_silent =
            |asked: &PrefillCall| !asked.told && asked.silent + ASKED_SILENCE_MAX <= now;
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
            self.over(conn, PrefillReply::Failed(Cause::PeerLost), reactor);
        }
    }

    /// Takes an event of one of these connections.
    pub fn handle(&mut self, event: Event, reactor: &mut Reactor, now: Instant) {
        match event {
            Event::Connected(conn) | Event::Drained(conn) => {
                let Some(asked) = self.open.get_mut(&conn) else { return };
                asked.silent = now;
                if asked.outgoing.send_body(reactor, conn).is_err() {
                    self.over(conn, PrefillReply::NotSent, reactor);
                }
            }
            Event::Received(conn) => self.read(conn, reactor),
            Event::Eof(conn) => {
                self.read(conn, reactor);
                self.over(conn, PrefillReply::Failed(Cause::PeerLost), reactor);
            }
            Event::Closed { conn, reason } => {
                if let (CloseReason::Tls(why), Some(asked)) = (reason, self.open.get(&conn)) {
                    let at = &asked.at;
                    event!(
                        Warn,
                        "asking",
                        "TLS connection to a prefill worker failed",
                        worker = at,
                        why = why
                    );
                }
                self.over(conn, PrefillReply::Failed(Cause::PeerLost), reactor);
            }
            Event::Accepted { .. } | Event::Woken | Event::Terminate | Event::Hangup => {}
        }
    }

    fn read(&mut self, conn: ConnId, reactor: &mut Reactor) {
        loop {
            let Some(asked) = self.open.get_mut(&conn) else { return };
            let Ok((used, part)) = asked.decoder.read(reactor.received(conn)) else {
                return self.over(conn, PrefillReply::Failed(Cause::PeerLost), reactor);
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
            let (exchange, words) = (asked.exchange, asked.parse_replies(end == Some(true)));
            let last = words.into_iter().find_map(|word| match word {
                PrefillReply::Kept(_) => {
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

    /// Ends a request with its last reply. After the place of the KV is known, a lost connection
    /// becomes [`PrefillReply::Lost`] and an expired time [`PrefillReply::Ended`].
    fn over(&mut self, conn: ConnId, word: PrefillReply, reactor: &mut Reactor) {
        let Some(asked) = self.open.remove(&conn) else { return };
        reactor.close(conn);
        let word = match word {
            PrefillReply::Failed(Cause::PeerLost) if asked.told => PrefillReply::Lost,
            PrefillReply::Failed(Cause::Deadline) if asked.told => PrefillReply::Ended,
            word => word,
        };
        self.words.push_back((asked.exchange, word));
    }
}

impl PrefillCall {
    /// Parses the answer so far into replies, in order. Any reply but [`PrefillReply::Kept`] is the
    /// last.
    fn parse_replies(&mut self, is_whole: bool) -> Vec<PrefillReply> {
        let mut words = Vec::new();
        let answer = UpstreamReply {
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
            words.push(PrefillReply::Failed(Cause::Internal));
        } else if is_whole {
            words.push(if self.told {
                PrefillReply::Ended
            } else {
                PrefillReply::Failed(Cause::Incompatible)
            });
        }
        words
    }

    /// Parses one event without its empty line. The first says where the KV will be; of the others
    /// only a failure counts.
    fn event(&mut self, event: &[u8]) -> Option<PrefillReply> {
        let line = event.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(DATA))?;
        if let Some(cause) = cause_in(line) {
            return Some(PrefillReply::Failed(as_partners(cause)));
        }
        if std::mem::replace(&mut self.told, true) {
            return None;
        }
        Some(
            KvTransferParams::of(line)
                .map_or(PrefillReply::Failed(Cause::Incompatible), PrefillReply::Kept),
        )
    }
}

/// The reply that an unsuccessful answer means.
fn word_of(answer: &UpstreamReply) -> PrefillReply {
    match UpstreamFailure::from_reply(answer).cause {
        Cause::Refused
            if answer.status == Cause::Refused.http_status()
                && answer.body.len() <= ASKED_ANSWER_MAX =>
        {
            let UpstreamReply { media, body, .. } = answer.clone();
            PrefillReply::Refused(PrefillRefusal { media, body })
        }
        cause => PrefillReply::Failed(as_partners(cause)),
    }
}

/// Prefill's `client_gone` means that prefill lost this worker, which is still here.
fn as_partners(cause: Cause) -> Cause {
    if cause == Cause::ClientGone { Cause::PeerLost } else { cause }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(status: u16, media: &str) -> PrefillCall {
        let order =
            UpstreamHead { method: Method::Post, target: "/generate".into(), headers: Vec::new() };
        PrefillCall {
            exchange: 1,
            at: "h:1".into(),
            outgoing: UpstreamRequest::new(&order, "h:1", None, Arc::default()),
            decoder: ResponseDecoder::new(Method::Post, HttpLimits::default()),
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

    /// All replies to an answer that arrives byte by byte.
    fn words(status: u16, media: &str, answer: &str) -> Vec<PrefillReply> {
        let mut asked = asked(status, media);
        let mut words = Vec::new();
        for byte in answer.bytes() {
            asked.body.push(byte);
            words.extend(asked.parse_replies(false));
        }
        words.extend(asked.parse_replies(true));
        words
    }

    #[test]
    fn the_first_event_says_where_the_kv_is_and_a_later_one_that_it_failed() {
        let kept = PrefillReply::Kept(KvTransferParams {
            params: "{\"bootstrap_room\":7}".into(),
            room: Some(crate::ids::Room(7)),
        });
        let rest = ": {\"created\":1,\"choice\":0}\ndata: {\"choices\":[]}\n\ndata: [DONE]\n\n";
        assert_eq!(
            words(200, STREAM, &format!("{KEPT}{rest}")),
            [kept.clone(), PrefillReply::Ended]
        );
        let error = "data: {\"error\":{\"code\":\"overloaded\"}}\n\n";
        let failed = PrefillReply::Failed(Cause::Overloaded);
        assert_eq!(words(200, STREAM, &format!("{KEPT}{error}"))[..2], [kept, failed.clone()]);
        assert_eq!(words(200, STREAM, error)[0], failed);
        let gone = error.replace("overloaded", "client_gone");
        assert_eq!(
            words(200, STREAM, &gone)[0],
            PrefillReply::Failed(Cause::PeerLost),
            "this client has not gone"
        );
    }

    #[test]
    fn whatever_else_comes_is_a_failure() {
        let told = r#"{"error":{"code":"draining"}}"#;
        assert_eq!(words(503, JSON, told)[0], PrefillReply::Failed(Cause::Draining));
        assert_eq!(words(404, JSON, "{}")[0], PrefillReply::Failed(Cause::Refused));
        let refusal =
            PrefillRefusal { media: JSON.into(), body: told.replace("draining", "x").into() };
        let wrong = words(400, JSON, &told.replace("draining", "x"));
        assert_eq!(wrong[0], PrefillReply::Refused(refusal), "the refusal is passed on");
        // Engines that ignore the request to keep KV answer it in full.
        for (media, answer) in
            [(JSON, "{\"choices\":[]}"), (STREAM, "data: {\"choices\":[]}\n\n"), (STREAM, "")]
        {
            assert_eq!(
                words(200, media, answer)[0],
                PrefillReply::Failed(Cause::Incompatible),
                "{answer}"
            );
        }
        let mut endless = asked(200, STREAM);
        endless.body = vec![b'x'; ASKED_ANSWER_MAX + 1];
        assert_eq!(endless.parse_replies(false), [PrefillReply::Failed(Cause::Internal)]);
    }
}
