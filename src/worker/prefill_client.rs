//! A decode worker's HTTP requests to prefill workers (flow `decode-first`): one for each of its
//! own requests. The first event of the answer says where the KV will be.
//!
//! Owns: one connection per request. Thread: `ctl`. Invariants: each request gets one
//! [`PrefillReply`] with the place of its KV or a failure, and then at most one about the end of
//! prefill. Requests, bytes and times are bounded; `--bootstrap-allow` must allow the host. Not
//! here: the meaning of a reply (`routing::remote_prefill`). Why HTTP: a prefill worker already
//! checks and counts HTTP requests, and long prompts would delay messages on the control link.

use crate::api::{KvTransferParams, PrefillAddress};
use crate::cause::Cause;
use crate::http::client::{ResponseDecoder, ResponseEvent as Part};
use crate::http::response::JSON;
use crate::http::{HttpLimits, Method};
use crate::ids::{RequestKey, Role};
use crate::limits::{
    PREFILL_ASKS_MAX, PREFILL_REPLY_MAX, PREFILL_SILENCE_MAX, ROUTER_CONNECT_TIME,
};
use crate::link::handoff::Source;
use crate::link::lookup::SourceLookup;
use crate::net::{Authorities, CloseReason, ConnId, Event, Reactor};
use crate::obs::log::event;
use crate::stdx::failpoint::is_failpoint_active;
use crate::stdx::hash_map::HashMap;
use crate::upstream::answer::UpstreamReply;
use crate::upstream::failure::{UpstreamFailure, cause_in};
use crate::upstream::request::{UpstreamHead, UpstreamRequest};
use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

/// Prefix of an event's data line.
const DATA: &[u8] = b"data: ";

/// A request to a prefill worker.
#[derive(Clone, Debug)]
pub struct PrefillRequest {
    /// Key of the request of this worker that needs it.
    pub key: RequestKey,
    /// The prefill worker.
    pub address: PrefillAddress,
    /// Path and header fields.
    pub head: UpstreamHead,
    /// Body from [`crate::api::routed_body::RoutedBody::keep`].
    pub body: Arc<Vec<u8>>,
    /// Deadline of the request.
    pub until: Instant,
}

/// A reply of prefill.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PrefillReply {
    /// Prefill keeps the KV at this place.
    Kept(KvTransferParams),
    /// Prefill has failed, or the request could not reach it.
    Failed(Cause),
    /// Prefill refuses the request as invalid.
    Refused(PrefillRefusal),
    /// The request was not sent, because too many requests are open here.
    NotSent,
    /// Prefill is done, or the deadline has passed after [`PrefillReply::Kept`]. The hand-off
    /// reports the fate of the KV.
    Ended,
    /// The connection was lost after [`PrefillReply::Kept`].
    Lost,
}

/// Prefill's answer to an invalid request (400).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PrefillRefusal {
    /// Media type.
    pub media: String,
    /// At most [`PREFILL_REPLY_MAX`] bytes.
    pub body: Vec<u8>,
}

#[derive(Debug)]
struct PrefillCall {
    key: RequestKey,
    /// Host and port of its worker.
    at: String,
    outgoing: UpstreamRequest,
    decoder: ResponseDecoder,
    status: u16,
    media: String,
    /// Bytes of the answer that are not parsed yet.
    body: Vec<u8>,
    /// Whether prefill has sent the place of the KV.
    is_kept: bool,
    /// Time at which prefill last accepted bytes of the request.
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
    replies: VecDeque<(RequestKey, PrefillReply)>,
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
    pub fn poll_reply(&mut self) -> Option<(RequestKey, PrefillReply)> {
        self.replies.pop_front()
    }

    /// Whether a reply waits for [`PrefillClient::poll_reply`].
    pub fn has_events(&self) -> bool {
        !self.replies.is_empty()
    }

    /// Number of calls that are queued or open.
    pub fn count(&self) -> usize {
        self.open.len() + self.unresolved.len() + self.queued.len()
    }

    /// Queues a request for the next [`PrefillClient::dial_queued`].
    pub fn send_request(&mut self, ask: PrefillRequest) {
        if self.count() >= PREFILL_ASKS_MAX {
            return self.replies.push_back((ask.key, PrefillReply::NotSent));
        }
        self.queued.push_back(ask);
    }

    /// Dials the workers of queued requests. `lookup` says which hosts can be dialled.
    pub fn dial_queued(
        &mut self,
        lookup: &mut dyn SourceLookup,
        reactor: &mut Reactor,
        now: Instant,
    ) {
        while let Some(ask) = self.queued.pop_front() {
            let address = match Source::remote(&ask.address.host, ask.address.port) {
                Source::Remote(address) if lookup.allows(address.ip()) => Ok(address.ip()),
                Source::Remote(address) => {
                    Err(format!("{} lies in no network of --bootstrap-allow", address.ip()))
                }
                _ => match lookup.resolve(&ask.address.host.to_ascii_lowercase(), now) {
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

    /// Takes the outcome of a name's resolution.
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
        let PrefillRequest { key, address: at, head: order, body, until } = ask;
        let dialled = address.and_then(|ip| {
            let until = until.min(now + ROUTER_CONNECT_TIME);
            let address = SocketAddr::new(ip, at.port).into();
            let conn = match &self.authorities {
                _ if !at.tls => reactor.connect(&address, until),
                Some(authorities) => {
                    reactor.connect_secured(&address, (authorities, at.bare_host()), until)
                }
                None => {
                    return Err("its URL is https://; this worker has no --tls-ca-file".to_owned());
                }
            };
            conn.map_err(|reason| reason.to_string())
        });
        match dialled {
            Ok(conn) => {
                let limits = HttpLimits { body: usize::MAX, ..HttpLimits::default() };
                let at = at.authority();
                let call = PrefillCall {
                    key,
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
                    is_kept: false,
                    silent: now,
                    until,
                };
                self.open.insert(conn, call);
            }
            Err(why) => {
                event!(
                    Warn,
                    "prefill_client",
                    "prefill worker cannot be asked",
                    host = at.host,
                    port = at.port,
                    why = why
                );
                self.replies.push_back((key, PrefillReply::Failed(Cause::PeerLost)));
            }
        }
    }

    /// Closes the connection of a request that is no longer needed. Prefill then ends its leg.
    pub fn cancel_request(&mut self, key: RequestKey, reactor: &mut Reactor) {
        self.queued.retain(|ask| ask.key != key);
        self.unresolved.retain(|ask| ask.key != key);
        let found = self.open.iter().find(|(_, call)| call.key == key).map(|(&conn, _)| conn);
        if let Some(conn) =
            found.filter(|_| !is_failpoint_active("call to prefill outlives its request"))
        {
            self.open.remove(&conn);
            reactor.close(conn);
        }
    }

    /// Ends all requests, without replies.
    pub fn close(&mut self, reactor: &mut Reactor) {
        self.open.drain().for_each(|(conn, _)| reactor.close(conn));
        self.queued.clear();
        self.unresolved.clear();
        self.replies.clear();
    }

    /// Ends requests that are past their deadlines.
    pub fn expire(&mut self, reactor: &mut Reactor, now: Instant) {
        let late: Vec<ConnId> =
            self.open.iter().filter(|(_, call)| call.until <= now).map(|(&conn, _)| conn).collect();
        for conn in late {
            self.over(conn, PrefillReply::Failed(Cause::Deadline), reactor);
        }
        self.give_up_silent(reactor, now);
        let replies = &mut self.replies;
        let mut stays = |ask: &PrefillRequest| {
            let is_late = ask.until <= now;
            if is_late {
                replies.push_back((ask.key, PrefillReply::Failed(Cause::Deadline)));
            }
            !is_late
        };
        self.unresolved.retain(&mut stays);
        self.queued.retain(&mut stays);
    }

    /// Ends requests to prefill workers that hang before they send the place of the KV. After that,
    /// the control link detects a hang.
    fn give_up_silent(&mut self, reactor: &mut Reactor, now: Instant) {
        let is_silent =
            |call: &PrefillCall| !call.is_kept && call.silent + PREFILL_SILENCE_MAX <= now;
        let silent: Vec<ConnId> =
            self.open.iter().filter(|(_, call)| is_silent(call)).map(|(&conn, _)| conn).collect();
        for conn in silent {
            if let Some(call) = self.open.get(&conn) {
                event!(
                    Warn,
                    "prefill_client",
                    "prefill worker did not name the kept KV in time",
                    request = call.key
                );
            }
            self.over(conn, PrefillReply::Failed(Cause::PeerLost), reactor);
        }
    }

    /// Takes an event of one of these connections.
    pub fn handle(&mut self, event: Event, reactor: &mut Reactor, now: Instant) {
        match event {
            Event::Connected(conn) | Event::Drained(conn) => {
                let Some(call) = self.open.get_mut(&conn) else { return };
                call.silent = now;
                if call.outgoing.send_body(reactor, conn).is_err() {
                    self.over(conn, PrefillReply::NotSent, reactor);
                }
            }
            Event::Received(conn) => self.read(conn, reactor),
            Event::Eof(conn) => {
                self.read(conn, reactor);
                self.over(conn, PrefillReply::Failed(Cause::PeerLost), reactor);
            }
            Event::Closed { conn, reason } => {
                if let (CloseReason::Tls(why), Some(call)) = (reason, self.open.get(&conn)) {
                    let at = &call.at;
                    event!(
                        Warn,
                        "prefill_client",
                        "TLS connection to a prefill worker failed",
                        worker = at,
                        why = why
                    );
                }
                if !is_failpoint_active("broken call to prefill is awaited") {
                    self.over(conn, PrefillReply::Failed(Cause::PeerLost), reactor);
                }
            }
            Event::Accepted { .. } | Event::Woken | Event::Terminate | Event::Hangup => {}
        }
    }

    fn read(&mut self, conn: ConnId, reactor: &mut Reactor) {
        loop {
            let Some(call) = self.open.get_mut(&conn) else { return };
            let Ok((used, part)) = call.decoder.read(reactor.received(conn)) else {
                return self.over(conn, PrefillReply::Failed(Cause::PeerLost), reactor);
            };
            let mut end = part.is_none().then_some(false);
            match part {
                Some(Part::Head(head)) => {
                    call.status = head.status;
                    call.media = head.headers.get("content-type").unwrap_or(JSON).to_owned();
                }
                Some(Part::Body(piece)) => call.body.extend_from_slice(piece),
                Some(Part::End { .. }) => end = Some(true),
                None => {}
            }
            reactor.consume(conn, used);
            let (key, replies) = (call.key, call.parse_replies(end == Some(true)));
            let last = replies.into_iter().find_map(|reply| match reply {
                PrefillReply::Kept(_) => {
                    self.replies.push_back((key, reply));
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
    fn over(&mut self, conn: ConnId, reply: PrefillReply, reactor: &mut Reactor) {
        let Some(call) = self.open.remove(&conn) else { return };
        reactor.close(conn);
        let reply = match reply {
            PrefillReply::Failed(Cause::PeerLost) if call.is_kept => PrefillReply::Lost,
            PrefillReply::Failed(Cause::Deadline) if call.is_kept => PrefillReply::Ended,
            reply => reply,
        };
        self.replies.push_back((call.key, reply));
    }
}

impl PrefillCall {
    /// Parses the answer so far into replies, in order. Any reply but [`PrefillReply::Kept`] is the
    /// last.
    fn parse_replies(&mut self, is_whole: bool) -> Vec<PrefillReply> {
        let mut replies = Vec::new();
        let answer = UpstreamReply {
            status: self.status,
            media: std::mem::take(&mut self.media),
            retry_after: None,
            body: std::mem::take(&mut self.body),
            ignored_fields: None,
            own: None,
        };
        let is_stream = answer.is_stream();
        if is_stream {
            let mut from = 0;
            while let Some(length) = answer.body[from..].windows(2).position(|pair| pair == b"\n\n")
            {
                replies.extend(self.event(&answer.body[from..from + length]));
                from += length + 2;
            }
            if !is_failpoint_active("first piece of an event is dropped") {
                self.body.extend_from_slice(&answer.body[from..]);
            }
        } else if is_whole && self.status > 0 && !answer.is_success() {
            replies.push(word_of(&answer));
        } else {
            self.body = answer.body;
        }
        self.media = answer.media;
        if self.body.len() > PREFILL_REPLY_MAX {
            replies.push(PrefillReply::Failed(Cause::Internal));
        } else if is_whole {
            replies.push(if self.is_kept {
                PrefillReply::Ended
            } else {
                PrefillReply::Failed(Cause::Incompatible)
            });
        }
        replies
    }

    /// Parses one event, without its empty line. The first event has the place of the KV. Of the
    /// later events, only a failure matters.
    fn event(&mut self, event: &[u8]) -> Option<PrefillReply> {
        let line = event.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(DATA))?;
        if let Some(cause) = cause_in(line) {
            return Some(PrefillReply::Failed(as_partners(cause)));
        }
        if std::mem::replace(&mut self.is_kept, true) {
            return None;
        }
        Some(
            KvTransferParams::of(line)
                .map_or(PrefillReply::Failed(Cause::Incompatible), PrefillReply::Kept),
        )
    }
}

/// The reply for an unsuccessful answer.
fn word_of(answer: &UpstreamReply) -> PrefillReply {
    match UpstreamFailure::from_reply(answer).cause {
        Cause::Refused
            if answer.status == Cause::Refused.http_status()
                && answer.body.len() <= PREFILL_REPLY_MAX =>
        {
            let UpstreamReply { media, body, .. } = answer.clone();
            PrefillReply::Refused(PrefillRefusal { media, body })
        }
        cause => PrefillReply::Failed(as_partners(cause)),
    }
}

/// Translates prefill's cause: `client_gone` means that prefill lost its connection to this worker.
fn as_partners(cause: Cause) -> Cause {
    if cause == Cause::ClientGone { Cause::PeerLost } else { cause }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(status: u16, media: &str) -> PrefillCall {
        let order =
            UpstreamHead { method: Method::Post, target: "/generate".into(), headers: Vec::new() };
        PrefillCall {
            key: RequestKey(1),
            at: "h:1".into(),
            outgoing: UpstreamRequest::new(&order, "h:1", None, Arc::default()),
            decoder: ResponseDecoder::new(Method::Post, HttpLimits::default()),
            status,
            media: media.into(),
            body: Vec::new(),
            is_kept: false,
            silent: Instant::now(),
            until: Instant::now(),
        }
    }

    const STREAM: &str = "text/event-stream; charset=utf-8";
    const KEPT: &str = "data: {\"kv_transfer_params\":{\"bootstrap_room\":7}}\n\n";

    /// All replies to an answer that arrives byte by byte.
    fn replies(status: u16, media: &str, answer: &str) -> Vec<PrefillReply> {
        let mut call = call(status, media);
        let mut replies = Vec::new();
        for byte in answer.bytes() {
            call.body.push(byte);
            replies.extend(call.parse_replies(false));
        }
        replies.extend(call.parse_replies(true));
        replies
    }

    #[test]
    fn the_first_event_locates_the_kv_and_a_later_one_reports_a_failure() {
        let kept = PrefillReply::Kept(KvTransferParams {
            params: "{\"bootstrap_room\":7}".into(),
            room: Some(crate::ids::Room(7)),
        });
        let rest = ": {\"created\":1,\"choice\":0}\ndata: {\"choices\":[]}\n\ndata: [DONE]\n\n";
        assert_eq!(
            replies(200, STREAM, &format!("{KEPT}{rest}")),
            [kept.clone(), PrefillReply::Ended]
        );
        let error = "data: {\"error\":{\"code\":\"overloaded\"}}\n\n";
        let failed = PrefillReply::Failed(Cause::Overloaded);
        assert_eq!(replies(200, STREAM, &format!("{KEPT}{error}"))[..2], [kept, failed.clone()]);
        assert_eq!(replies(200, STREAM, error)[0], failed);
        let gone = error.replace("overloaded", "client_gone");
        assert_eq!(
            replies(200, STREAM, &gone)[0],
            PrefillReply::Failed(Cause::PeerLost),
            "this client has not gone"
        );
    }

    #[test]
    fn any_other_answer_is_a_failure() {
        let draining = r#"{"error":{"code":"draining"}}"#;
        assert_eq!(replies(503, JSON, draining)[0], PrefillReply::Failed(Cause::Draining));
        assert_eq!(replies(404, JSON, "{}")[0], PrefillReply::Failed(Cause::Refused));
        let refusal =
            PrefillRefusal { media: JSON.into(), body: draining.replace("draining", "x").into() };
        let wrong = replies(400, JSON, &draining.replace("draining", "x"));
        assert_eq!(wrong[0], PrefillReply::Refused(refusal), "the refusal is passed on");
        // An engine that ignores the request to keep KV sends a full answer.
        for (media, answer) in
            [(JSON, "{\"choices\":[]}"), (STREAM, "data: {\"choices\":[]}\n\n"), (STREAM, "")]
        {
            assert_eq!(
                replies(200, media, answer)[0],
                PrefillReply::Failed(Cause::Incompatible),
                "{answer}"
            );
        }
        let mut endless = call(200, STREAM);
        endless.body = vec![b'x'; PREFILL_REPLY_MAX + 1];
        assert_eq!(endless.parse_replies(false), [PrefillReply::Failed(Cause::Internal)]);
    }
}
