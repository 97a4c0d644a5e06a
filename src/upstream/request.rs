//! A request to another server: its head, its body, and the number of bytes already queued.
//!
//! Thread: `ctl`. Not here: the connection (`router::pool`, `worker::prefill_client`), the response
//! (`answer`).

use super::answer::CallError;
use crate::api::info::TAKEN_FOR;
use crate::http::client::{RequestLine, write_request};
use crate::http::{Method, REQUEST_TIMEOUT};
use crate::limits::{REQUEST_TIME_MAX, ROUTER_PIECE};
use crate::net::{ConnId, Reactor, SendError};
use std::sync::Arc;
use std::time::Duration;

/// A request without its body and host.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UpstreamHead {
    /// The method.
    pub method: Method,
    /// Path and query.
    pub target: String,
    /// Header fields, except the host and the body's length.
    pub headers: Vec<(&'static str, String)>,
}

impl UpstreamHead {
    /// A GET of `target`.
    pub fn get(target: &str) -> UpstreamHead {
        UpstreamHead { method: Method::Get, target: target.to_owned(), headers: Vec::new() }
    }

    /// The head for a client that has already waited for `waited`: its timeout is reduced by that
    /// time. `None` if no time is left. A timeout that is not a number stays, and the worker
    /// refuses it.
    pub fn after_wait(&self, waited: Duration) -> Option<UpstreamHead> {
        let mut order = self.clone();
        if let Some(patience) = self.patience() {
            let left = patience.checked_sub(waited).filter(|left| left.as_millis() > 0)?;
            let fields = order.headers.iter_mut().filter(|(name, _)| *name == REQUEST_TIMEOUT);
            fields.for_each(|(_, value)| *value = left.as_millis().to_string());
        }
        Some(order)
    }

    /// Limits the client's timeout to `most`. A timeout that is not a number stays, and the worker
    /// refuses it.
    pub fn cap_patience(&mut self, most: Duration) {
        if !self.headers.iter().any(|(name, _)| *name == REQUEST_TIMEOUT) {
            self.headers.push((REQUEST_TIMEOUT, most.as_millis().to_string()));
        } else if self.patience().is_some_and(|patience| patience > most) {
            let fields = self.headers.iter_mut().filter(|(name, _)| *name == REQUEST_TIMEOUT);
            fields.for_each(|(_, value)| *value = most.as_millis().to_string());
        }
    }

    /// The client's timeout, if it sent one.
    pub fn patience(&self) -> Option<Duration> {
        let (_, value) = self.headers.iter().find(|(name, _)| *name == REQUEST_TIMEOUT)?;
        let milliseconds = value.parse().ok().filter(|&milliseconds| milliseconds > 0)?;
        Some(Duration::from_millis(milliseconds).min(REQUEST_TIME_MAX))
    }
}

/// A request to send.
#[derive(Clone, Debug)]
pub struct UpstreamRequest {
    /// Empty after it is queued.
    head: Vec<u8>,
    /// The body, which both legs share.
    body: Arc<Vec<u8>>,
    /// Bytes of the body that are queued.
    sent: usize,
}

impl UpstreamRequest {
    /// A request with this head to the worker at `host`. `taken_for` is the role that the router
    /// expects.
    pub fn new(
        order: &UpstreamHead,
        host: &str,
        taken_for: Option<String>,
        body: Arc<Vec<u8>>,
    ) -> UpstreamRequest {
        let UpstreamHead { method, target, headers } = order;
        let length = body.len().to_string();
        let mut fields: Vec<(&str, &str)> =
            headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        fields.extend(taken_for.as_ref().map(|role| (TAKEN_FOR, role.as_str())));
        if *method == Method::Post {
            fields.push(("content-length", &length));
        }
        let mut head = Vec::with_capacity(512 + body.len().min(ROUTER_PIECE));
        write_request(&mut head, RequestLine { method: *method, target, host }, &fields, None);
        UpstreamRequest { head, body, sent: 0 }
    }

    /// Whether the whole body is queued.
    pub fn is_sent(&self) -> bool {
        self.sent == self.body.len()
    }

    /// Queues as many bytes as the connection takes now.
    ///
    /// # Errors
    /// [`CallError::Full`]: this process already holds too many unsent bytes.
    pub fn send_body(&mut self, reactor: &mut Reactor, conn: ConnId) -> Result<(), CallError> {
        loop {
            let rest = &self.body[self.sent..];
            let is_first = !self.head.is_empty();
            if reactor.queued(conn) >= ROUTER_PIECE || (rest.is_empty() && !is_first) {
                return Ok(());
            }
            let piece = &rest[..rest.len().min(ROUTER_PIECE)];
            let sent = if is_first {
                // Head and body go into one packet if they fit.
                self.head.extend_from_slice(piece);
                reactor.send(conn, &std::mem::take(&mut self.head))
            } else {
                reactor.send(conn, piece)
            };
            match sent {
                Ok(()) => self.sent += piece.len(),
                Err(SendError::Full) => return Err(CallError::Full),
                // The reactor is about to report it.
                Err(SendError::Closed) => return Ok(()),
            }
        }
    }
}
