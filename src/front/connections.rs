//! HTTP connections of clients: bytes in, requests out; answers in, bytes out.
//!
//! Thread: `ctl`. One request at a time per connection; pipelined ones wait in the socket. A client that
//! sends half a request, or nothing, for too long is closed; one that goes away while its answer is due is told
//! as [`Incoming::Gone`]. One that has only closed its own end gets its answers: something without a meaning is sent to it,
//! which tells the two apart, since who is gone refuses it.
//! Invariant: bodies that are held, of requests that are not answered too, are bounded in total.

use crate::front::http::{
    BodyStream, Decoder, Exchange, HttpError, Limits, Request, ResponseWriter, Version,
    response::{CONTINUE, PROCESSING},
    sse,
};
use crate::front::openai::ApiError;
use crate::limits::{
    HTTP_BODIES_MAX, HTTP_BODY_BYTES_PER_SECOND, HTTP_BODY_USUAL, HTTP_IDLE_MAX,
    HTTP_REQUEST_TIME_MAX,
};
use crate::net::{ConnId, Event, Reactor, SendError};
use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

/// Media type of most answers.
pub const JSON: &str = "application/json";

/// A whole answer.
#[derive(Clone, Copy, Debug)]
pub struct Answer<'a> {
    /// HTTP status.
    pub status: u16,
    /// Media type.
    pub media: &'a str,
    /// The body.
    pub body: &'a [u8],
    /// Seconds after which another try makes sense.
    pub retry_after: Option<u32>,
}

impl<'a> Answer<'a> {
    /// 200 with a JSON body.
    pub fn json(body: &'a [u8]) -> Answer<'a> {
        Answer { status: 200, media: JSON, body, retry_after: None }
    }
}

/// What clients do.
#[derive(Debug)]
pub enum Incoming {
    /// A whole request; [`Connections::answer`] or [`Connections::open_stream`] is due.
    Request(ConnId, Box<Request>),
    /// The client went away while an answer was due.
    Gone(ConnId),
}

#[derive(Debug)]
struct Client {
    decoder: Decoder,
    /// The answer that is due.
    due: Option<Due>,
    /// When it is closed: idle, or its request not whole.
    until: Instant,
    /// When something came of that last.
    heard: Instant,
    /// It sends nothing more.
    half_closed: bool,
    /// Bytes of a body that are held for it.
    held: usize,
}

impl Client {
    fn is_late(&self, now: Instant) -> bool {
        let stands_still = !self.decoder.is_idle() && self.heard + HTTP_REQUEST_TIME_MAX <= now;
        self.until <= now || stands_still
    }
}

#[derive(Debug)]
struct Due {
    exchange: Exchange,
    request_id: String,
    stream: Option<BodyStream>,
    /// Whether that is one of events.
    is_events: bool,
    /// The last bytes of it.
    tail: [u8; 4],
}

/// All client connections of one listener.
#[derive(Debug)]
pub struct Connections {
    limits: Limits,
    /// Where clients name their requests; none: in `x-request-id`.
    id_headers: Vec<String>,
    clients: HashMap<ConnId, Client>,
    incoming: VecDeque<Incoming>,
    /// Bytes of bodies that are held, and that may be.
    held: usize,
    held_max: usize,
    draining: bool,
}

impl Default for Connections {
    fn default() -> Connections {
        Connections::within(Limits::default())
    }
}

impl Connections {
    /// None yet; their requests keep these limits.
    pub fn within(limits: Limits) -> Connections {
        Connections {
            limits,
            id_headers: Vec::new(),
            clients: HashMap::new(),
            incoming: VecDeque::new(),
            held: 0,
            held_max: HTTP_BODIES_MAX,
            draining: false,
        }
    }

    /// The bodies of all requests that are not answered have so many bytes at most, but for those of usual length.
    pub fn holding(self, held_max: usize) -> Connections {
        Connections { held_max, ..self }
    }

    /// Clients name their requests in the first of these header fields that is there.
    pub fn named_by(self, id_headers: Vec<String>) -> Connections {
        Connections { id_headers, ..self }
    }

    /// Takes a reactor's event of one of these connections.
    pub fn handle(&mut self, reactor: &mut Reactor, event: Event, now: Instant) {
        match event {
            Event::Accepted { conn, .. } => {
                let client = Client {
                    decoder: Decoder::new(self.limits),
                    due: None,
                    until: now + HTTP_IDLE_MAX,
                    heard: now,
                    half_closed: false,
                    held: 0,
                };
                self.clients.insert(conn, client);
            }
            Event::Received(conn) => self.read(reactor, conn, now),
            Event::Eof(conn) => match self.clients.get(&conn).map(|client| client.due.is_some()) {
                Some(true) => self.half_closed(reactor, conn),
                Some(false) => self.end(reactor, conn),
                None => {}
            },
            Event::Closed { conn, .. } => {
                if self.forget(conn).is_some_and(|client| client.due.is_some()) {
                    self.incoming.push_back(Incoming::Gone(conn));
                }
            }
            Event::Connected(_)
            | Event::Drained(_)
            | Event::Woken
            | Event::Terminate
            | Event::Hangup => {}
        }
    }

    /// Whether a connection is one of these.
    pub fn owns(&self, conn: ConnId) -> bool {
        self.clients.contains_key(&conn)
    }

    /// How many stand.
    pub fn count(&self) -> usize {
        self.clients.len()
    }

    /// What has come.
    pub fn poll(&mut self) -> Option<Incoming> {
        self.incoming.pop_front()
    }

    /// Whether all that has come was taken.
    pub fn is_settled(&self) -> bool {
        self.incoming.is_empty()
    }

    /// Connections are closed after their answer from now on.
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// Ends all of them, after what was said on them.
    pub fn close(&mut self, reactor: &mut Reactor) {
        self.clients.drain().for_each(|(conn, _)| reactor.close_after_flush(conn));
        self.incoming.clear();
        self.held = 0;
    }

    /// Answers whole.
    pub fn answer(
        &mut self,
        reactor: &mut Reactor,
        conn: ConnId,
        answer: &Answer<'_>,
        now: Instant,
    ) {
        self.answer_allowing(reactor, conn, answer, None, now);
    }

    fn answer_allowing(
        &mut self,
        reactor: &mut Reactor,
        conn: ConnId,
        answer: &Answer<'_>,
        allow: Option<&str>,
        now: Instant,
    ) {
        let Some(due) = self.clients.get(&conn).and_then(|client| client.due.as_ref()) else {
            return;
        };
        let exchange = due.exchange;
        let mut out = Vec::with_capacity(answer.body.len() + 256);
        let mut writer = ResponseWriter::new(&mut out, exchange, answer.status);
        if !due.request_id.is_empty() {
            writer = writer.header("x-request-id", &due.request_id);
        }
        if let Some(seconds) = answer.retry_after {
            writer = writer.retry_after(seconds);
        }
        if let Some(methods) = allow {
            writer = writer.header("allow", methods);
        }
        writer.body(answer.media, answer.body);
        self.send(reactor, conn, &out);
        self.answered(reactor, conn, exchange.keep_alive, now);
    }

    /// Answers with an error.
    pub fn refuse(&mut self, reactor: &mut Reactor, conn: ConnId, error: &ApiError, now: Instant) {
        let ApiError { status, retry_after, .. } = *error;
        let answer = Answer { status, media: JSON, body: &error.to_json(), retry_after };
        self.answer_allowing(reactor, conn, &answer, error.allow.as_deref(), now);
    }

    /// Names the request whose answer is due: its client's name for it, or `made`.
    pub fn name(&mut self, conn: ConnId, made: impl FnOnce() -> String) -> String {
        let Some(due) = self.clients.get_mut(&conn).and_then(|client| client.due.as_mut()) else {
            return made();
        };
        if due.request_id.is_empty() {
            due.request_id = made();
        }
        due.request_id.clone()
    }

    /// Says that an answer is being made, of which nothing can be sent yet.
    pub fn processing(&mut self, reactor: &mut Reactor, conn: ConnId) {
        let due = self.clients.get(&conn).and_then(|client| client.due.as_ref());
        if due.is_some_and(|due| due.stream.is_none() && due.exchange.version == Version::Http11) {
            self.send(reactor, conn, PROCESSING);
        }
    }

    /// Begins a stream of events.
    pub fn open_stream(&mut self, reactor: &mut Reactor, conn: ConnId) {
        self.open_body(reactor, conn, 200, sse::CONTENT_TYPE);
    }

    /// Begins an answer whose body comes in pieces, by [`Connections::stream`].
    pub fn open_body(&mut self, reactor: &mut Reactor, conn: ConnId, status: u16, media: &str) {
        let Some(client) = self.clients.get_mut(&conn) else { return };
        let Some(due) = client.due.as_mut() else { return };
        let mut out = Vec::new();
        let writer = ResponseWriter::new(&mut out, due.exchange, status)
            .header("x-request-id", &due.request_id);
        due.is_events = media.starts_with(sse::CONTENT_TYPE);
        due.stream = Some(writer.stream(media));
        self.send(reactor, conn, &out);
    }

    /// Gives up an answer that has begun and cannot be ended properly, so that its client can tell.
    pub fn cut(&mut self, reactor: &mut Reactor, conn: ConnId) {
        if self.forget(conn).is_some() {
            reactor.close_after_flush(conn);
        }
    }

    /// Sends a piece of a stream.
    pub fn stream(&mut self, reactor: &mut Reactor, conn: ConnId, piece: &[u8]) {
        let due = self.clients.get_mut(&conn).and_then(|client| client.due.as_mut());
        let Some(Due { stream: Some(stream), tail, .. }) = due else { return };
        for &byte in &piece[piece.len().saturating_sub(tail.len())..] {
            tail.rotate_left(1);
            tail[3] = byte;
        }
        let mut out = Vec::with_capacity(piece.len() + 16);
        stream.write(&mut out, piece);
        self.send(reactor, conn, &out);
    }

    /// Ends a stream.
    pub fn end_stream(&mut self, reactor: &mut Reactor, conn: ConnId, now: Instant) {
        let due = self.clients.get(&conn).and_then(|client| client.due.as_ref());
        let Some((exchange, stream)) = due.and_then(|due| Some((due.exchange, due.stream?))) else {
            return;
        };
        let mut out = Vec::new();
        stream.end(&mut out);
        self.send(reactor, conn, &out);
        self.answered(reactor, conn, exchange.keep_alive && !stream.must_close(), now);
    }

    /// Closes what has been idle or incomplete for too long.
    pub fn expire(&mut self, reactor: &mut Reactor, now: Instant) {
        let late: Vec<ConnId> = self
            .clients
            .iter()
            .filter(|(_, client)| client.due.is_none() && client.is_late(now))
            .map(|(&conn, _)| conn)
            .collect();
        for conn in late {
            match self.clients.get(&conn).is_some_and(|client| !client.decoder.is_idle()) {
                true => {
                    let (most, rate) =
                        (HTTP_REQUEST_TIME_MAX.as_secs(), HTTP_BODY_BYTES_PER_SECOND);
                    let why = format!(
                        "the request did not come in time: {most} s, and a second for each {rate} bytes of its body, \
                         of which some come every {most} s"
                    );
                    self.turn_away(reactor, conn, &ApiError::new(408, "deadline", why));
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
                // What is usual is always taken, so that few who send much keep nobody else out.
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
                    self.begin(conn, request);
                }
            }
            Err(error) => self.reject(reactor, conn, error),
        }
    }

    fn begin(&mut self, conn: ConnId, request: Request) {
        let Some(client) = self.clients.get_mut(&conn) else { return };
        let mut exchange = request.head.exchange();
        exchange.keep_alive &= !self.draining;
        let headers = &request.head.headers;
        let named = match &self.id_headers[..] {
            [] => headers.get("x-request-id"),
            names => names.iter().find_map(|name| headers.get(name)),
        };
        let request_id = named.unwrap_or_default().to_owned();
        client.due =
            Some(Due { exchange, request_id, stream: None, is_events: false, tail: *b"\0\0\n\n" });
        self.incoming.push_back(Incoming::Request(conn, Box::new(request)));
    }

    fn reject(&mut self, reactor: &mut Reactor, conn: ConnId, error: HttpError) {
        let mut message = error.to_string();
        if matches!(error, HttpError::BodyTooLarge { .. }) {
            message.push_str(" (--max-payload-size)");
        }
        self.turn_away(reactor, conn, &ApiError::new(error.status(), "bad_http", message));
    }

    /// Answers what is not read to its end; nothing behind it can be understood.
    fn turn_away(&mut self, reactor: &mut Reactor, conn: ConnId, error: &ApiError) {
        let mut out = Vec::new();
        let mut writer = ResponseWriter::new(&mut out, Exchange::last(), error.status);
        if let Some(seconds) = error.retry_after {
            writer = writer.retry_after(seconds);
        }
        writer.body(JSON, &error.to_json());
        let _ = reactor.send(conn, &out);
        self.cut(reactor, conn);
    }

    fn send(&mut self, reactor: &mut Reactor, conn: ConnId, bytes: &[u8]) {
        match reactor.send(conn, bytes) {
            Ok(()) => {}
            // Somebody who does not read: gone for us.
            Err(SendError::Full | SendError::Closed) => self.gone(reactor, conn),
        }
    }

    /// A client has closed its end while its answer is due.
    fn half_closed(&mut self, reactor: &mut Reactor, conn: ConnId) {
        let Some(client) = self.clients.get_mut(&conn) else { return };
        client.half_closed = true;
        match &client.due {
            Some(Due { stream: None, exchange, .. }) if exchange.version == Version::Http11 => {
                self.send(reactor, conn, CONTINUE);
            }
            Some(Due { stream: Some(stream), is_events: true, tail, .. })
                if is_between_events(tail) =>
            {
                let mut out = Vec::new();
                stream.write(&mut out, sse::NOTHING);
                self.send(reactor, conn, &out);
            }
            // The answer comes piece by piece, and each tells as much; in an event nothing is without a meaning.
            Some(Due { stream: Some(_), .. }) => {}
            _ => self.gone(reactor, conn),
        }
    }

    fn answered(&mut self, reactor: &mut Reactor, conn: ConnId, keep_alive: bool, now: Instant) {
        let Some(client) = self.clients.get_mut(&conn) else { return };
        client.due = None;
        client.until = now + HTTP_IDLE_MAX;
        self.held -= std::mem::take(&mut client.held);
        if keep_alive {
            self.read(reactor, conn, now);
        }
        // Of who sends nothing more, what was pipelined is still served.
        let waits = |client: &Client| client.due.is_none() && (client.half_closed || !keep_alive);
        if self.clients.get(&conn).is_some_and(waits) {
            self.cut(reactor, conn);
        }
    }

    fn gone(&mut self, reactor: &mut Reactor, conn: ConnId) {
        self.incoming.push_back(Incoming::Gone(conn));
        self.end(reactor, conn);
    }

    fn end(&mut self, reactor: &mut Reactor, conn: ConnId) {
        self.forget(conn);
        reactor.close(conn);
    }

    fn forget(&mut self, conn: ConnId) -> Option<Client> {
        let client = self.clients.remove(&conn)?;
        self.held -= client.held;
        Some(client)
    }
}

/// Whether these are the last bytes of an event.
fn is_between_events(tail: &[u8]) -> bool {
    [&b"\n\n"[..], b"\r\r", b"\r\n\r\n"].iter().any(|end| tail.ends_with(end))
}

#[cfg(test)]
#[path = "connections_tests.rs"]
mod tests;
