//! A client's request, and the kind of worker that serves it.

use crate::api::routed_body::RoutedBody;
use crate::upstream::request::UpstreamHead;

/// The content of a request. It decides which workers serve it.
#[derive(Clone, Debug)]
pub enum Payload {
    /// Served by a pair.
    Routed(RoutedBody),
    /// Served by only a decode worker.
    Decode(Vec<u8>),
    /// Served by any worker; has no body.
    Any,
}

impl Payload {
    /// Number of choices that are generated in parallel.
    pub(super) fn choices(&self) -> usize {
        if let Payload::Routed(body) = self { body.choices() as usize } else { 1 }
    }
}

/// A request to be served.
#[derive(Clone, Debug)]
pub struct ClientRequest {
    /// Method, target and header fields.
    pub head: UpstreamHead,
    /// The body.
    pub payload: Payload,
    /// Its ID in the log.
    pub id: String,
}
