//! HTTP/1.1 as bytes: decoders that take arriving bytes, and writers that append to a buffer.
//!
//! Thread: any. Owns: message framing in both directions ([`request`] and [`response`] for a
//! server, [`client`] for the router and the registry client) and server-sent events ([`sse`]).
//! Invariants: no I/O, no clock; [`HttpLimits`] bounds the memory for any input; a message with an
//! ambiguous end is refused. Not here: sockets and deadlines (`net`), routes.

mod body;
pub mod client;
mod error;
mod head;
pub mod request;
pub mod response;
pub mod sse;

pub use error::HttpError;
pub use head::{Headers, Version};
pub use request::{Method, Request, RequestDecoder};
pub use response::{BodyStream, Exchange, ResponseWriter};

use crate::limits;

/// Header field of a generation request: how many milliseconds the client waits.
pub const REQUEST_TIMEOUT: &str = "x-request-timeout-ms";

/// Limits of one message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HttpLimits {
    /// Bytes of the head.
    pub head: usize,
    /// Header lines.
    pub headers: usize,
    /// Bytes of the body, without chunk framing.
    pub body: usize,
}

impl Default for HttpLimits {
    fn default() -> Self {
        Self {
            head: limits::HTTP_HEAD_MAX,
            headers: limits::HTTP_HEADERS_MAX,
            body: limits::HTTP_BODY_DEFAULT,
        }
    }
}
