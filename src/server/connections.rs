//! HTTP connections of clients: requests from bytes, and bytes from responses.
//!
//! Thread: `ctl`. A connection has one request at a time; pipelined ones wait in the socket. The
//! server closes a client that is idle, or leaves a request incomplete, for too long. A client that
//! disconnects while its response is due causes [`ClientEvent::Disconnected`]. A client that only
//! closed its sending side still gets its response. The server tells the two apart by bytes without
//! meaning: a disconnected client refuses them. Invariant: the total size of held bodies,
//! unanswered requests included, is bounded.

use super::client::Client;
use super::key_limits::{KeyLimits, KeyRefusals};
use super::origins::AllowedOrigins;
use super::pending_response::{PendingResponse, is_between_events, note_tail};
use crate::api::{AnswerTranslator, ApiError, ErrorCode, TranslatedEndpoint};
use crate::cause::Cause;
use crate::http::response::{CONTINUE, JSON, PROCESSING, Response};
use crate::http::{Exchange, HttpError, HttpLimits, Method, Request, ResponseWriter, Version, sse};
use crate::limits::{
    HTTP_BODIES_MAX, HTTP_BODY_BYTES_PER_SECOND, HTTP_BODY_USUAL, HTTP_IDLE_MAX,
    HTTP_REQUEST_TIME_MAX, TRANSLATED_ANSWER_MAX,
};
use crate::net::{ConnId, Event, Reactor, SendError};
use crate::stdx::failpoint::is_failpoint_active;
use crate::stdx::hash_map::HashMap;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The header field with a client's key.
const BEARER: &str = "authorization";
/// The field in which clients of Anthropic's API send their key.
const API_KEY: &str = "x-api-key";

/// Events from clients.
#[derive(Debug)]
pub enum ClientEvent {
    /// A whole request. The caller must answer by [`Connections::send_response`] or
    /// [`Connections::open_stream`].
    Request(ConnId, Box<Request>),
    /// The client left while its response was due.
    Disconnected(ConnId),
}

/// All client connections of one listener.
#[derive(Debug)]
pub struct Connections {
    limits: HttpLimits,
    /// Header fields with a client's request id; if empty, `x-request-id`.
    id_headers: Vec<String>,
    /// Origins of web pages that can read answers.
    origins: AllowedOrigins,
    clients: HashMap<ConnId, Client>,
    incoming: VecDeque<ClientEvent>,
    /// Bytes of bodies that are held; `held_max` is their limit.
    held: usize,
    held_max: usize,
    draining: bool,
    /// The limits of their API keys.
    pub key_limits: KeyLimits,
}

impl Default for Connections {
    fn default() -> Connections {
        Connections::with_limits(HttpLimits::default())
    }
}

impl Connections {
    /// Creates the state without connections. `limits` apply to their requests.
    pub fn with_limits(limits: HttpLimits) -> Connections {
        Connections {
            limits,
            id_headers: Vec::new(),
            origins: AllowedOrigins::default(),
            clients: HashMap::default(),
            incoming: VecDeque::new(),
            held: 0,
            held_max: HTTP_BODIES_MAX,
            draining: false,
            key_limits: KeyLimits::default(),
        }
    }

    /// Whether no response is due. A body can be on its way.
    ///
    /// # Errors
    /// The number of responses.
    pub fn check_idle(&self) -> Result<(), String> {
        match self.clients.values().filter(|client| client.due.is_some()).count() {
            0 => Ok(()),
            due => Err(format!("{due} responses that are due")),
        }
    }

    /// Asserts the rules that hold between turns.
    ///
    /// # Panics
    /// The count of held bytes is wrong, or a charge has no response that is due.
    pub fn invariants(&self) {
        assert!(self.key_limits.charged().all(|conn| self.is_due(conn)), "a charge is answered");
        let held: usize = self.clients.values().map(|client| client.held).sum();
        assert_eq!(self.held, held, "each held byte of a body has its client");
    }

    /// Limits the bodies of all unanswered requests to `held_max` bytes in total. Bodies of usual
    /// length are always accepted.
    pub fn holding(self, held_max: usize) -> Connections {
        Connections { held_max, ..self }
    }

    /// Limits API keys.
    pub fn limiting(self, key_limits: KeyLimits) -> Connections {
        Connections { key_limits, ..self }
    }

    /// Lets web pages of these origins read answers.
    pub fn allowing(self, origins: Vec<String>) -> Connections {
        Connections { origins: AllowedOrigins::new(origins), ..self }
    }

    /// Takes a request's id from the first of these header fields that it has.
    pub fn named_by(self, id_headers: Vec<String>) -> Connections {
        Connections { id_headers, ..self }
    }

    /// Handles a reactor event of one of these connections.
    pub fn handle(&mut self, reactor: &mut Reactor, event: Event, now: Instant) {
        match event {
            Event::Accepted { conn, .. } => {
                self.clients.insert(conn, Client::new(self.limits, now));
            }
            Event::Received(conn) => self.read(reactor, conn, now),
            Event::Eof(conn) => match self.clients.get(&conn).map(|client| client.due.is_some()) {
                Some(true) => self.half_closed(reactor, conn),
                Some(false) => self.end(reactor, conn),
                None => {}
            },
            Event::Closed { conn, .. } => {
                if is_failpoint_active("broken connection stays known") {
                    return;
                }
                if self.forget(conn).is_some_and(|client| client.due.is_some()) {
                    self.incoming.push_back(ClientEvent::Disconnected(conn));
                }
            }
            Event::Connected(_)
            | Event::Drained(_)
            | Event::Woken
            | Event::Terminate
            | Event::Hangup => {}
        }
    }

    /// Whether a connection belongs to this listener.
    pub fn owns(&self, conn: ConnId) -> bool {
        self.clients.contains_key(&conn)
    }

    /// Number of open connections.
    pub fn count(&self) -> usize {
        self.clients.len()
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<ClientEvent> {
        self.incoming.pop_front()
    }

    /// Whether all events were taken.
    pub fn is_settled(&self) -> bool {
        self.incoming.is_empty()
    }

    /// From now on, closes each connection after its response.
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// Closes all connections after their queued bytes.
    pub fn close(&mut self, reactor: &mut Reactor) {
        for (conn, _) in self.clients.drain() {
            self.key_limits.end(conn);
            reactor.close_after_flush(conn);
        }
        self.incoming.clear();
        self.held = 0;
    }

    /// Sends a whole response.
    pub fn send_response(
        &mut self,
        reactor: &mut Reactor,
        conn: ConnId,
        answer: &Response<'_>,
        now: Instant,
    ) {
        self.answer_allowing(reactor, conn, answer, None, now);
    }

    fn answer_allowing(
        &mut self,
        reactor: &mut Reactor,
        conn: ConnId,
        answer: &Response<'_>,
        allow: Option<&str>,
        now: Instant,
    ) {
        let Response { status, media, retry_after, .. } = *answer;
        let Some(due) = self.clients.get_mut(&conn).and_then(|client| client.due.as_mut()) else {
            return;
        };
        let exchange = due.exchange;
        let body = &*due.translate(status, answer.body);
        let mut out = Vec::with_capacity(body.len() + 256);
        let mut writer = due.begin_response(&mut out, status);
        if let Some(seconds) = retry_after {
            writer = writer.retry_after(seconds);
        }
        if let Some(methods) = allow {
            writer = writer.header("allow", methods);
        }
        writer.body(media, body);
        self.key_limits.settle(conn, status, now);
        self.send(reactor, conn, &out);
        self.answered(reactor, conn, exchange.keep_alive, now);
    }

    /// Sends an error as the response.
    pub fn send_error(
        &mut self,
        reactor: &mut Reactor,
        conn: ConnId,
        error: &ApiError,
        now: Instant,
    ) {
        let ApiError { status, retry_after, .. } = *error;
        let answer = Response { status, media: JSON, body: &error.to_json(), retry_after };
        self.answer_allowing(reactor, conn, &answer, error.allow.as_deref(), now);
    }

    /// Translates the request with a due response, if its endpoint needs that. Its caller has
    /// checked its key.
    ///
    /// # Errors
    /// The body is not a request of that endpoint.
    pub fn translate(
        &mut self,
        conn: ConnId,
        request: &Request,
    ) -> Result<Option<Request>, ApiError> {
        let endpoint = TranslatedEndpoint::at(request.head.path());
        let Some(endpoint) = endpoint.filter(|_| request.head.method == Method::Post) else {
            return Ok(None);
        };
        let (body, translator) = endpoint.translate(&request.body)?;
        if let Some(due) = self.clients.get_mut(&conn).and_then(|client| client.due.as_mut()) {
            due.translator = Some(translator);
        }
        Ok(Some(Request { head: request.head.with_path(endpoint.target()), body }))
    }

    fn is_due(&self, conn: ConnId) -> bool {
        self.clients.get(&conn).is_some_and(|client| client.due.is_some())
    }

    /// Charges the request with a due response, and this many tokens, to the API key with this
    /// index. The answer shows the limits of the key.
    ///
    /// # Errors
    /// A limit of the key refuses it.
    pub fn charge(
        &mut self,
        conn: ConnId,
        (key, tokens): (usize, u64),
        refusals: &KeyRefusals,
        now: Instant,
    ) -> Result<(), ApiError> {
        // The client can have left in the turn that brought its request.
        if !self.is_due(conn) {
            return Ok(());
        }
        let admitted = self.key_limits.admit(conn, key, tokens, now);
        for (name, value) in self.key_limits.fields(key).collect::<Vec<_>>() {
            self.add_header(conn, name, value);
        }
        admitted.inspect_err(|(limit, _)| refusals.count(*limit)).map_err(|(_, error)| error)
    }

    /// Assigns an id to the request with a due response: the client's own, or `made`.
    pub fn assign_request_id(&mut self, conn: ConnId, made: impl FnOnce() -> String) -> String {
        let Some(due) = self.clients.get_mut(&conn).and_then(|client| client.due.as_mut()) else {
            return made();
        };
        if due.request_id.is_empty() {
            due.request_id = made();
        }
        due.request_id.clone()
    }

    /// Adds a header field to the due response. It has no effect if the response has begun or has
    /// the field.
    pub fn add_header(&mut self, conn: ConnId, name: &'static str, value: String) {
        let due = self.clients.get_mut(&conn).and_then(|client| client.due.as_mut());
        if let Some(due) = due
            && due.headers.iter().all(|(known, _)| *known != name)
        {
            due.headers.push((name, value));
        }
    }

    /// Tells the client that its response is in progress, before any part of it can be sent.
    pub fn processing(&mut self, reactor: &mut Reactor, conn: ConnId) {
        let due = self.clients.get(&conn).and_then(|client| client.due.as_ref());
        if due.is_some_and(|due| due.stream.is_none() && due.exchange.version == Version::Http11) {
            self.send(reactor, conn, PROCESSING);
        }
    }

    /// Begins a stream of server-sent events.
    pub fn open_stream(&mut self, reactor: &mut Reactor, conn: ConnId) {
        self.open_body(reactor, conn, 200, sse::CONTENT_TYPE);
    }

    /// Begins a response with a body in pieces, sent by [`Connections::send_chunk`].
    pub fn open_body(&mut self, reactor: &mut Reactor, conn: ConnId, status: u16, media: &str) {
        let Some(client) = self.clients.get_mut(&conn) else { return };
        let Some(due) = client.due.as_mut() else { return };
        due.is_events = media.starts_with(sse::CONTENT_TYPE);
        if due.translator.is_some() && !due.is_events {
            due.collected = Some((status, Vec::new()));
            return;
        }
        let mut out = Vec::new();
        let writer = due.begin_response(&mut out, status);
        due.stream = Some(writer.stream(media));
        self.send(reactor, conn, &out);
    }

    /// Ends a collected response, of which the client has nothing yet, with an error.
    fn refuse_collected(&mut self, reactor: &mut Reactor, conn: ConnId, why: &str) {
        let due = self.clients.get_mut(&conn).and_then(|client| client.due.as_mut());
        let Some(due) = due.filter(|due| due.collected.is_some()) else { return };
        due.collected = None;
        let error = ApiError::from_cause(Cause::PeerLost, why);
        let (mut out, body) = (Vec::new(), error.to_json());
        let body = due.translate(error.status, &body);
        due.begin_response(&mut out, error.status).body(JSON, &body);
        let _ = reactor.send(conn, &out);
    }

    /// Aborts a response that has begun and cannot be completed, so that its client can tell.
    pub fn cut_response(&mut self, reactor: &mut Reactor, conn: ConnId) {
        self.refuse_collected(reactor, conn, "the worker was lost before its answer was complete");
        if self.forget(conn).is_some() {
            reactor.close_after_flush(conn);
        }
    }

    /// Sends a piece of a stream.
    pub fn send_chunk(&mut self, reactor: &mut Reactor, conn: ConnId, piece: &[u8]) {
        let due = self.clients.get_mut(&conn).and_then(|client| client.due.as_mut());
        let Some(due) = due else { return };
        if let Some((_, body)) = &mut due.collected {
            body.extend_from_slice(piece);
            if body.len() > TRANSLATED_ANSWER_MAX {
                let why = format!("the answer has more than {TRANSLATED_ANSWER_MAX} bytes");
                self.refuse_collected(reactor, conn, &why);
                self.gone(reactor, conn);
            }
            return;
        }
        let mut translated = Vec::new();
        let piece = match &mut due.translator {
            None => piece,
            Some(translator) => {
                translator.translate_events(piece, &mut translated);
                &translated
            }
        };
        let PendingResponse { stream: Some(stream), tail, .. } = due else { return };
        if piece.is_empty() {
            return;
        }
        note_tail(tail, piece);
        let mut out = Vec::with_capacity(piece.len() + 16);
        stream.write(&mut out, piece);
        self.send(reactor, conn, &out);
    }

    /// Ends a stream.
    pub fn end_stream(&mut self, reactor: &mut Reactor, conn: ConnId, now: Instant) {
        let due = self.clients.get_mut(&conn).and_then(|client| client.due.as_mut());
        if let Some((status, body)) = due.and_then(|due| due.collected.take()) {
            let answer = Response { status, media: JSON, body: &body, retry_after: None };
            return self.send_response(reactor, conn, &answer, now);
        }
        let due = self.clients.get(&conn).and_then(|client| client.due.as_ref());
        let Some((exchange, stream)) = due.and_then(|due| Some((due.exchange, due.stream?))) else {
            return;
        };
        let mut out = Vec::new();
        stream.end(&mut out);
        self.send(reactor, conn, &out);
        self.answered(reactor, conn, exchange.keep_alive && !stream.must_close(), now);
    }

    /// Closes connections that were idle, or had an incomplete request, for too long.
    pub fn expire(&mut self, reactor: &mut Reactor, now: Instant) {
        let late: Vec<ConnId> = self
            .clients
            .iter()
            .filter(|(_, client)| client.due.is_none() && client.is_late(now))
            .filter(|_| !is_failpoint_active("late request is waited for"))
            .map(|(&conn, _)| conn)
            .collect();
        for conn in late {
            match self.clients.get(&conn).is_some_and(|client| !client.decoder.is_idle()) {
                true => {
                    let (most, rate) =
                        (HTTP_REQUEST_TIME_MAX.as_secs(), HTTP_BODY_BYTES_PER_SECOND);
                    let why = format!(
                        "the request did not arrive in time: it has {most} s, and one more second \
                         for each {rate} bytes of its body, and must not pause for {most} s"
                    );
                    self.turn_away(reactor, conn, &ApiError::from_cause(Cause::Deadline, why));
                }
                false => self.end(reactor, conn),
            }
        }
    }

    fn read(&mut self, reactor: &mut Reactor, conn: ConnId, now: Instant) {
        let Some(client) = self.clients.get_mut(&conn) else { return };
        if client.due.is_some() {
            return;
        }
        let idle = client.decoder.is_idle();
        match client.decoder.read(reactor.received(conn)) {
            Ok((used, request)) => {
                reactor.consume(conn, used);
                let held = client.decoder.held()
                    + request.as_ref().map_or(0, |request| request.body.len());
                let before = std::mem::replace(&mut client.held, held);
                self.held = self.held - before + held;
                // Bodies of usual length are always accepted, so that a few large bodies do not
                // block other clients.
                if held > HTTP_BODY_USUAL && self.held > self.held_max {
                    let why =
                        format!("the bodies of all requests are more than {} bytes", self.held_max);
                    return self.turn_away(reactor, conn, &ApiError::busy(why));
                }
                if idle && !client.decoder.is_idle() {
                    client.until = now + HTTP_REQUEST_TIME_MAX;
                }
                let micros =
                    held.saturating_sub(before) as u64 * 1_000_000 / HTTP_BODY_BYTES_PER_SECOND;
                client.until += Duration::from_micros(micros);
                client.heard = now;
                if client.decoder.take_continue() {
                    let _ = reactor.send(conn, CONTINUE);
                }
                if let Some(request) = request {
                    self.begin(reactor, conn, request, now);
                }
            }
            Err(error) => self.reject(reactor, conn, error),
        }
    }

    fn begin(&mut self, reactor: &mut Reactor, conn: ConnId, mut request: Request, now: Instant) {
        let Some(client) = self.clients.get_mut(&conn) else { return };
        let mut exchange = request.head.exchange();
        exchange.keep_alive &= !self.draining;
        // From here on, there is one field with the key.
        let headers = &mut request.head.headers;
        if let (None, Some(key)) = (headers.get(BEARER), headers.get(API_KEY)) {
            let bearer = format!("Bearer {key}");
            headers.add(BEARER, &bearer);
        }
        let headers = &request.head.headers;
        let named = match &self.id_headers[..] {
            [] => headers.get("x-request-id"),
            names => names.iter().find_map(|name| headers.get(name)),
        };
        let request_id = named.unwrap_or_default().to_owned();
        let headers = self.origins.headers(&request);
        let is_preflight = self.origins.is_preflight(&request);
        client.due = Some(PendingResponse {
            exchange,
            request_id,
            stream: None,
            is_events: false,
            tail: *b"\0\0\n\n",
            headers,
            translator: TranslatedEndpoint::at(request.head.path())
                .map(AnswerTranslator::of_refusals),
            collected: None,
        });
        if is_preflight {
            let answer =
                Response { status: 200, media: "text/plain", body: b"", retry_after: None };
            return self.send_response(reactor, conn, &answer, now);
        }
        self.incoming.push_back(ClientEvent::Request(conn, Box::new(request)));
    }

    fn reject(&mut self, reactor: &mut Reactor, conn: ConnId, error: HttpError) {
        let mut message = error.to_string();
        if matches!(error, HttpError::BodyTooLarge { .. }) {
            message.push_str(" (--max-payload-size)");
        }
        self.turn_away(reactor, conn, &ApiError::new(error.status(), ErrorCode::BadHttp, message));
    }

    /// Answers a request that was not read completely, and closes the connection, because its next
    /// bytes have no known meaning.
    fn turn_away(&mut self, reactor: &mut Reactor, conn: ConnId, error: &ApiError) {
        let mut out = Vec::new();
        let mut writer = ResponseWriter::new(&mut out, Exchange::last(), error.status);
        if let Some(seconds) = error.retry_after {
            writer = writer.retry_after(seconds);
        }
        writer.body(JSON, &error.to_json());
        let _ = reactor.send(conn, &out);
        self.cut_response(reactor, conn);
    }

    fn send(&mut self, reactor: &mut Reactor, conn: ConnId, bytes: &[u8]) {
        match reactor.send(conn, bytes) {
            Ok(()) => {}
            // A client that does not read counts as gone.
            Err(SendError::Full | SendError::Closed) => self.gone(reactor, conn),
        }
    }

    /// A client closed its sending side while its response is due.
    fn half_closed(&mut self, reactor: &mut Reactor, conn: ConnId) {
        let Some(client) = self.clients.get_mut(&conn) else { return };
        client.half_closed = true;
        match &client.due {
            Some(PendingResponse { stream: None, exchange, .. })
                if exchange.version == Version::Http11 =>
            {
                self.send(reactor, conn, CONTINUE);
            }
            Some(PendingResponse { stream: Some(stream), is_events: true, tail, .. })
                if is_between_events(tail) =>
            {
                let mut out = Vec::new();
                stream.write(&mut out, sse::NOTHING);
                self.send(reactor, conn, &out);
            }
            // The response comes in pieces, and each piece shows whether the client is there.
            // Inside an event, every byte has a meaning.
            Some(PendingResponse { stream: Some(_), .. }) => {}
            _ => self.gone(reactor, conn),
        }
    }

    fn answered(&mut self, reactor: &mut Reactor, conn: ConnId, keep_alive: bool, now: Instant) {
        let Some(client) = self.clients.get_mut(&conn) else { return };
        client.due = None;
        self.key_limits.end(conn);
        client.until = now + HTTP_IDLE_MAX;
        let held = std::mem::take(&mut client.held);
        if keep_alive || !is_failpoint_active("body of a last request stays counted") {
            self.held -= held;
        }
        if keep_alive {
            self.read(reactor, conn, now);
        }
        // Pipelined requests of a half-closed client are still served.
        let waits = |client: &Client| client.due.is_none() && (client.half_closed || !keep_alive);
        if self.clients.get(&conn).is_some_and(waits) {
            self.cut_response(reactor, conn);
        }
    }

    fn gone(&mut self, reactor: &mut Reactor, conn: ConnId) {
        self.incoming.push_back(ClientEvent::Disconnected(conn));
        self.end(reactor, conn);
    }

    fn end(&mut self, reactor: &mut Reactor, conn: ConnId) {
        self.forget(conn);
        reactor.close(conn);
    }

    fn forget(&mut self, conn: ConnId) -> Option<Client> {
        let client = self.clients.remove(&conn)?;
        self.key_limits.end(conn);
        if !is_failpoint_active("body of a client that left stays counted") {
            self.held -= client.held;
        }
        Some(client)
    }
}

#[cfg(test)]
#[path = "connections_tests.rs"]
mod tests;
