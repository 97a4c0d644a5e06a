//! One client: its connection, the request that arrives, the response that is due.
//!
//! Thread: `ctl`. Not here: all clients of a listener (`connections`).

use super::pending_response::PendingResponse;
use crate::http::{HttpLimits, RequestDecoder};
use crate::limits::{HTTP_IDLE_MAX, HTTP_REQUEST_TIME_MAX};
use std::time::Instant;

/// A client and its present request.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) decoder: RequestDecoder,
    /// The response that is due.
    pub(super) due: Option<PendingResponse>,
    /// Deadline for the next request, or for the rest of an incomplete one.
    pub(super) until: Instant,
    /// Time of its last bytes.
    pub(super) heard: Instant,
    /// Whether the client has closed its sending side.
    pub(super) half_closed: bool,
    /// Bytes of its body that are held.
    pub(super) held: usize,
}

impl Client {
    /// A client that has just connected.
    pub(super) fn new(limits: HttpLimits, now: Instant) -> Client {
        Client {
            decoder: RequestDecoder::new(limits),
            due: None,
            until: now + HTTP_IDLE_MAX,
            heard: now,
            half_closed: false,
            held: 0,
        }
    }

    /// Whether it was idle, or its request was incomplete, for too long.
    pub(super) fn is_late(&self, now: Instant) -> bool {
        let stands_still = !self.decoder.is_idle() && self.heard + HTTP_REQUEST_TIME_MAX <= now;
        self.until <= now || stands_still
    }
}
