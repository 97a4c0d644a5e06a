//! One request to one worker: what is still to be sent, what has come of the answer.
//!
//! Invariant: nothing has been sent while `outgoing` was never set, so that such a call can be given up
//! without a trace. Not here: which connection (`fleet`), what the answer is for (`flights`, `fanout`).

use crate::cause::Cause;
use crate::cluster::loads::WorkerNumber;
use crate::cluster::router::Booking;
use crate::front::connections::{Answer, JSON};
use crate::front::http::client::{
    Event, RequestLine, ResponseDecoder, ResponseHead, write_request,
};
use crate::front::http::{HttpError, Limits, Method, REQUEST_TIMEOUT, sse};
use crate::front::openai::ApiError;
use crate::front::openai::info::DRAINING;
use crate::front::router::failure::Failure;
use crate::front::turning::TAKEN_FOR;
use crate::limits::{REQUEST_TIME_MAX, ROUTER_ANSWER_MAX, ROUTER_PIECE};
use crate::net::{ConnId, HTTPS_ALONE, Reactor, SendError};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Whom a call is for; a client's connection names what runs for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Owner {
    /// Asks a worker who it is.
    Introduction,
    /// Asks a worker how it is.
    Probe,
    /// Asks a worker what it has to do.
    Report,
    /// Its answer is the client's.
    Lead(ConnId),
    /// The prefill leg beside it.
    Prefill(ConnId),
    /// The prefill leg before it, whose answer says where the KV is kept.
    Reader(ConnId),
    /// One of those that are all asked the same.
    Part(ConnId),
    /// Has a worker change its role, for an operator.
    Turn(ConnId),
    /// The same, for the balance of roles.
    Balance,
    /// What comes is of no interest any more; the connection is.
    Nobody,
}

/// What is asked of a worker, its body apart.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Order {
    /// What to do.
    pub method: Method,
    /// Path and query.
    pub target: String,
    /// Header fields beside the host and the body's length.
    pub headers: Vec<(&'static str, String)>,
}

impl Order {
    /// A GET of `target`.
    pub fn get(target: &str) -> Order {
        Order { method: Method::Get, target: target.to_owned(), headers: Vec::new() }
    }

    /// The same after its client has waited so long: what it says of its patience is what is left of it. `None` where
    /// nothing is; what is no number is left to the worker to refuse.
    pub fn after(&self, waited: Duration) -> Option<Order> {
        let mut order = self.clone();
        if let Some(patience) = self.patience() {
            let left = patience.checked_sub(waited).filter(|left| left.as_millis() > 0)?;
            let fields = order.headers.iter_mut().filter(|(name, _)| *name == REQUEST_TIMEOUT);
            fields.for_each(|(_, value)| *value = left.as_millis().to_string());
        }
        Some(order)
    }

    /// Its client waits no longer than this; what it says that is no number is left to the worker to refuse.
    pub fn limit(&mut self, most: Duration) {
        if !self.headers.iter().any(|(name, _)| *name == REQUEST_TIMEOUT) {
            self.headers.push((REQUEST_TIMEOUT, most.as_millis().to_string()));
        } else if self.patience().is_some_and(|patience| patience > most) {
            let fields = self.headers.iter_mut().filter(|(name, _)| *name == REQUEST_TIMEOUT);
            fields.for_each(|(_, value)| *value = most.as_millis().to_string());
        }
    }

    /// How long its client waits, if it has said.
    pub fn patience(&self) -> Option<Duration> {
        let (_, value) = self.headers.iter().find(|(name, _)| *name == REQUEST_TIMEOUT)?;
        let milliseconds = value.parse().ok().filter(|&milliseconds| milliseconds > 0)?;
        Some(Duration::from_millis(milliseconds).min(REQUEST_TIME_MAX))
    }
}

/// A request to be sent.
#[derive(Clone, Debug)]
pub struct Outgoing {
    /// Until it is queued.
    head: Vec<u8>,
    /// Both legs send the same.
    body: Arc<Vec<u8>>,
    /// Bytes of the body that were queued.
    sent: usize,
}

impl Outgoing {
    /// This order to the worker at `host`, which is told what it is taken for.
    pub fn new(
        order: &Order,
        host: &str,
        taken_for: Option<String>,
        body: Arc<Vec<u8>>,
    ) -> Outgoing {
        let Order { method, target, headers } = order;
        let length = body.len().to_string();
        let mut fields: Vec<(&str, &str)> =
            headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        fields.extend(taken_for.as_ref().map(|role| (TAKEN_FOR, role.as_str())));
        if *method == Method::Post {
            fields.push(("content-length", &length));
        }
        let mut head = Vec::with_capacity(512 + body.len().min(ROUTER_PIECE));
        write_request(&mut head, RequestLine { method: *method, target, host }, &fields, None);
        Outgoing { head, body, sent: 0 }
    }

    /// Queues what the connection takes now.
    ///
    /// # Errors
    /// Too many bytes wait to be sent already.
    pub fn pump(&mut self, reactor: &mut Reactor, conn: ConnId) -> Result<(), Lost> {
        loop {
            let rest = &self.body[self.sent..];
            let is_first = !self.head.is_empty();
            if reactor.queued(conn) >= ROUTER_PIECE || (rest.is_empty() && !is_first) {
                return Ok(());
            }
            let piece = &rest[..rest.len().min(ROUTER_PIECE)];
            let sent = if is_first {
                // Head and body in one packet where they fit.
                self.head.extend_from_slice(piece);
                reactor.send(conn, &std::mem::take(&mut self.head))
            } else {
                reactor.send(conn, piece)
            };
            match sent {
                Ok(()) => self.sent += piece.len(),
                Err(SendError::Full) => return Err(Lost::Full),
                // The reactor is about to tell.
                Err(SendError::Closed) => return Ok(()),
            }
        }
    }
}

/// An answer as far as it has come.
#[derive(Clone, Debug)]
pub struct WorkerAnswer {
    /// HTTP status.
    pub status: u16,
    /// Media type.
    pub media: String,
    /// Seconds after which another try makes sense.
    pub retry_after: Option<u32>,
    /// What was not taken yet.
    pub body: Vec<u8>,
    /// What happened, where no worker said this.
    pub own: Option<String>,
}

impl WorkerAnswer {
    fn new(head: &ResponseHead) -> WorkerAnswer {
        WorkerAnswer {
            status: head.status,
            media: head.headers.get("content-type").unwrap_or(JSON).to_owned(),
            retry_after: head.headers.get("retry-after").and_then(|value| value.parse().ok()),
            body: Vec::new(),
            own: None,
        }
    }

    /// Of the router's own.
    pub fn error(error: &ApiError) -> WorkerAnswer {
        WorkerAnswer {
            status: error.status,
            media: JSON.to_owned(),
            retry_after: error.retry_after,
            body: error.to_json(),
            own: Some(error.message.clone()),
        }
    }

    /// 2xx.
    pub fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// Whether it is a stream of events.
    pub fn is_stream(&self) -> bool {
        let media = self.media.split(';').next().unwrap_or_default();
        self.is_success() && media.trim().eq_ignore_ascii_case(sse::CONTENT_TYPE)
    }

    /// Whether the worker says, of itself, that it begins nothing new: as its health, or as the reason for which it
    /// refuses a request. Where its partner drains it names the field of the request that chose that one.
    pub fn is_of_drain(&self) -> bool {
        if self.is_success() {
            return self.body == DRAINING.as_bytes();
        }
        let failure = Failure::of(self);
        failure.cause == Cause::Draining && failure.is_told() && !failure.is_partners()
    }

    /// Whether the worker says that it is another than the router takes it for.
    pub fn is_of_role(&self) -> bool {
        !self.is_success() && Failure::of(self).is_of_role()
    }

    /// What is wrong with it, which is no success, for operators.
    pub fn complaint(&self) -> String {
        let status = self.status;
        match Failure::of(self).has_code(HTTPS_ALONE) {
            true => {
                format!(
                    "answers with status {status}: it speaks HTTPS alone, name it as https://HOST:PORT"
                )
            }
            false => format!("answers with status {status}"),
        }
    }

    /// For a client.
    pub fn whole(&self) -> Answer<'_> {
        Answer {
            status: self.status,
            media: &self.media,
            body: &self.body,
            retry_after: self.retry_after,
        }
    }
}

/// Why no (further) answer will come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lost {
    /// The worker closed the connection.
    Closed,
    /// What it sent is not HTTP.
    Http(HttpError),
    /// An answer longer than is gathered.
    TooLong,
    /// It took too long.
    Deadline,
    /// The worker answers no probe either.
    Silent,
    /// The worker, which is well, has closed the connection after it was not read from for want of a client that reads.
    Behind,
    /// The request cannot be sent: this process holds too many unsent bytes.
    Full,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Lost::Closed => f.write_str("its connection was lost"),
            Lost::Http(error) => write!(f, "its answer cannot be read: {error}"),
            Lost::TooLong => write!(f, "its answer is longer than {ROUTER_ANSWER_MAX} bytes"),
            Lost::Deadline => f.write_str("it took too long"),
            Lost::Silent => f.write_str("its worker stands still"),
            Lost::Behind => f.write_str("more is waiting for its client than a worker keeps"),
            Lost::Full => f.write_str("too many bytes wait to be sent"),
        }
    }
}

/// One request to one worker.
#[derive(Debug)]
pub struct Call {
    /// Whom it is for.
    pub owner: Owner,
    /// Charged to the worker while the call is open.
    pub booking: Booking,
    /// When it is given up.
    pub until: Instant,
    /// Whether the connection stands.
    pub connected: bool,
    /// Whether the worker has closed its end.
    pub eof: bool,
    /// Whether its connection is used for nothing else behind it.
    pub is_last: bool,
    /// Whether its worker has become another since it was asked how it is.
    pub is_outdated: bool,
    /// When it was last not read from, since too much waited for its client.
    pub held_back: Option<Instant>,
    /// Once its head has come.
    pub answer: Option<WorkerAnswer>,
    outgoing: Option<Outgoing>,
    decoder: ResponseDecoder,
}

impl Call {
    /// Nothing is sent yet.
    pub fn new(owner: Owner, booking: Booking, until: Instant, connected: bool) -> Call {
        // What is not gathered may have any length.
        let limits = Limits { body: usize::MAX, ..Limits::default() };
        let decoder = ResponseDecoder::new(Method::Get, limits);
        Call {
            owner,
            booking,
            until,
            connected,
            eof: false,
            is_last: false,
            is_outdated: false,
            held_back: None,
            answer: None,
            outgoing: None,
            decoder,
        }
    }

    /// Whether it is a part of a client's request, and this worker's.
    pub fn is_leg_of(&self, worker: WorkerNumber) -> bool {
        matches!(self.owner, Owner::Lead(_) | Owner::Prefill(_) | Owner::Reader(_))
            && self.booking.worker() == worker
    }

    /// Whether anything of the request may have reached the worker.
    pub fn is_begun(&self) -> bool {
        self.outgoing.is_some()
    }

    /// Whether the whole request was queued.
    pub fn is_sent(&self) -> bool {
        self.outgoing.as_ref().is_some_and(|outgoing| outgoing.sent == outgoing.body.len())
    }

    /// Sends this from now on.
    pub fn begin(
        &mut self,
        reactor: &mut Reactor,
        conn: ConnId,
        outgoing: Outgoing,
    ) -> Result<(), Lost> {
        self.outgoing = Some(outgoing);
        self.pump(reactor, conn)
    }

    /// Queues what the connection takes now.
    pub fn pump(&mut self, reactor: &mut Reactor, conn: ConnId) -> Result<(), Lost> {
        self.outgoing.as_mut().map_or(Ok(()), |outgoing| outgoing.pump(reactor, conn))
    }

    /// Takes from `input` up to the next event: how many bytes, and whether to go on or how it ended.
    pub fn read(&mut self, input: &[u8]) -> Result<(usize, Read), Lost> {
        let (used, event) = self.decoder.read(input).map_err(Lost::Http)?;
        let read = match event {
            None => Read::Nothing,
            Some(Event::Head(head)) => {
                self.answer = Some(WorkerAnswer::new(&head));
                Read::Something
            }
            Some(Event::Body(piece)) => {
                self.gather(piece)?;
                Read::Something
            }
            Some(Event::End { keep_alive }) => Read::End { keep_alive },
        };
        Ok((used, read))
    }

    /// Whether the worker has said, since this was last asked, that it makes an answer that comes whole.
    pub fn take_processing(&mut self) -> bool {
        self.decoder.take_processing()
    }

    /// The worker has closed its end and all input was read.
    pub fn close(&mut self) -> Result<(), Lost> {
        match self.decoder.close() {
            Ok(Some(_)) => Ok(()),
            Ok(None) | Err(HttpError::Truncated) => Err(Lost::Closed),
            Err(error) => Err(Lost::Http(error)),
        }
    }

    fn gather(&mut self, piece: &[u8]) -> Result<(), Lost> {
        let Some(answer) = &mut self.answer else { return Ok(()) };
        match self.owner {
            // Passed on turn by turn; what says why there is none is read when it is whole.
            Owner::Lead(_) if answer.is_success() => answer.body.extend_from_slice(piece),
            Owner::Nobody => {}
            // Only a stream may have what is of use before its end; that is taken turn by turn, too.
            Owner::Prefill(_) if answer.is_success() && answer.is_stream() => {
                answer.body.extend_from_slice(piece)
            }
            Owner::Prefill(_) if answer.is_success() => {}
            _ if answer.body.len() + piece.len() > ROUTER_ANSWER_MAX => return Err(Lost::TooLong),
            Owner::Introduction
            | Owner::Probe
            | Owner::Report
            | Owner::Lead(_)
            | Owner::Prefill(_)
            | Owner::Reader(_)
            | Owner::Part(_)
            | Owner::Turn(_)
            | Owner::Balance => answer.body.extend_from_slice(piece),
        }
        Ok(())
    }
}

/// What reading brought.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Read {
    /// All input was taken.
    Nothing,
    /// A part of the answer.
    Something,
    /// The answer is whole.
    End {
        /// Whether the connection can carry another request.
        keep_alive: bool,
    },
}
