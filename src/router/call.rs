//! One request to one worker: the unsent rest of the request, and the answer so far.
//!
//! Thread: `ctl`.
//! Invariants: while `outgoing` is not set, nothing was sent, so the call can be dropped without
//! any effect on the worker.
//! Not here: the choice of the connection (`pool`), the use of the answer (`requests`, `fanout`).

use crate::http::client::{ResponseDecoder, ResponseEvent};
use crate::http::{HttpError, HttpLimits, Method};
use crate::limits::ROUTER_ANSWER_MAX;
use crate::net::{ConnId, Reactor};
use crate::routing::balancer::Reservation;
use crate::routing::load::WorkerNumber;
use crate::upstream::answer::{CallError, UpstreamReply};
use crate::upstream::request::UpstreamRequest;
use std::time::Instant;

/// The purpose of a call. A client's connection identifies its request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Owner {
    /// Query of a worker's identity.
    IdentityQuery,
    /// Health probe.
    Probe,
    /// Query of a worker's load.
    Report,
    /// The call that brings the client's answer.
    Lead(ConnId),
    /// The prefill leg that runs at the same time as the lead.
    Prefill(ConnId),
    /// The prefill leg before the lead. Its answer names the kept KV.
    PrefillFirst(ConnId),
    /// One of the calls to all workers.
    Fanout(ConnId),
    /// A role query or change for an operator.
    RoleChange(ConnId),
    /// A role change by the role balancer.
    Balance,
    /// None: the answer is ignored, and only the connection matters.
    Detached,
}

impl Owner {
    /// The client of a prefill leg.
    pub fn prefill_client(self) -> Option<ConnId> {
        match self {
            Owner::Prefill(client) | Owner::PrefillFirst(client) => Some(client),
            _ => None,
        }
    }

    /// Whether it is a leg of a client's request.
    pub fn is_leg(self) -> bool {
        matches!(self, Owner::Lead(_)) || self.prefill_client().is_some()
    }
}

/// One request to one worker.
#[derive(Debug)]
pub struct Call {
    /// Its purpose.
    pub owner: Owner,
    /// The work that is charged to the worker while the call is open.
    pub reservation: Reservation,
    /// Deadline of the call.
    pub until: Instant,
    /// Whether the connection is established.
    pub connected: bool,
    /// Whether the worker has closed its end.
    pub eof: bool,
    /// Whether the connection is closed after this call.
    pub is_last: bool,
    /// Whether the worker began to drain after the router had sent this call.
    pub is_outdated: bool,
    /// Time at which reading last paused because too many bytes waited for the client.
    pub held_back: Option<Instant>,
    /// The answer, from its head on.
    pub answer: Option<UpstreamReply>,
    outgoing: Option<UpstreamRequest>,
    decoder: ResponseDecoder,
}

impl Call {
    /// A call without a request yet.
    pub fn new(owner: Owner, reservation: Reservation, until: Instant, connected: bool) -> Call {
        // A relayed body can have any length.
        let limits = HttpLimits { body: usize::MAX, ..HttpLimits::default() };
        let decoder = ResponseDecoder::new(Method::Get, limits);
        Call {
            owner,
            reservation,
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

    /// Whether it is a leg of a client's request at this worker.
    pub fn is_leg_of(&self, worker: WorkerNumber) -> bool {
        self.owner.is_leg() && self.reservation.worker() == worker
    }

    /// Whether a part of the request can have reached the worker.
    pub fn is_begun(&self) -> bool {
        self.outgoing.is_some()
    }

    /// Whether the complete request was queued for sending.
    pub fn is_sent(&self) -> bool {
        self.outgoing.as_ref().is_some_and(UpstreamRequest::is_sent)
    }

    /// Starts to send this request.
    pub fn begin(
        &mut self,
        reactor: &mut Reactor,
        conn: ConnId,
        outgoing: UpstreamRequest,
    ) -> Result<(), CallError> {
        let before = self.outgoing.replace(outgoing);
        debug_assert!(before.is_none(), "a call carries one request");
        self.pump(reactor, conn)
    }

    /// Queues as much of the request as the connection takes now.
    pub fn pump(&mut self, reactor: &mut Reactor, conn: ConnId) -> Result<(), CallError> {
        self.outgoing.as_mut().map_or(Ok(()), |outgoing| outgoing.send_body(reactor, conn))
    }

    /// Reads one event from `input`. Returns the number of bytes that it used, and the result.
    pub fn read(&mut self, input: &[u8]) -> Result<(usize, Read), CallError> {
        let (used, event) = self.decoder.read(input).map_err(CallError::Http)?;
        let read = match event {
            None => Read::Nothing,
            Some(ResponseEvent::Head(head)) => {
                self.answer = Some(UpstreamReply::new(&head));
                Read::Something
            }
            Some(ResponseEvent::Body(piece)) => {
                self.gather(piece)?;
                Read::Something
            }
            Some(ResponseEvent::End { keep_alive }) => Read::End { keep_alive },
        };
        Ok((used, read))
    }

    /// Whether the worker has sent `102 Processing` since the last call. It then generates an
    /// answer that it sends as a whole.
    pub fn take_processing(&mut self) -> bool {
        self.decoder.take_processing()
    }

    /// Handles the end of input: the worker has closed its end, and everything was read.
    pub fn close(&mut self) -> Result<(), CallError> {
        match self.decoder.close() {
            Ok(Some(_)) => Ok(()),
            Ok(None) | Err(HttpError::Truncated) => Err(CallError::Closed),
            Err(error) => Err(CallError::Http(error)),
        }
    }

    fn gather(&mut self, piece: &[u8]) -> Result<(), CallError> {
        let Some(answer) = &mut self.answer else { return Ok(()) };
        match self.owner {
            // The body is relayed in pieces. An error body is read as a whole.
            Owner::Lead(_) if answer.is_success() => answer.body.extend_from_slice(piece),
            Owner::Detached => {}
            // Of prefill's answers, only a stream can have tokens before its end. It is also
            // relayed in pieces.
            Owner::Prefill(_) if answer.is_success() && answer.is_stream() => {
                answer.body.extend_from_slice(piece)
            }
            Owner::Prefill(_) if answer.is_success() => {}
            _ if answer.body.len() + piece.len() > ROUTER_ANSWER_MAX => {
                return Err(CallError::TooLong);
            }
            Owner::IdentityQuery
            | Owner::Probe
            | Owner::Report
            | Owner::Lead(_)
            | Owner::Prefill(_)
            | Owner::PrefillFirst(_)
            | Owner::Fanout(_)
            | Owner::RoleChange(_)
            | Owner::Balance => answer.body.extend_from_slice(piece),
        }
        Ok(())
    }
}

/// The result of reading.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Read {
    /// All input was read.
    Nothing,
    /// A part of the answer was read.
    Something,
    /// The answer is complete.
    End {
        /// Whether the connection can carry another request.
        keep_alive: bool,
    },
}
