//! A sequence of requests to a registry, one at a time, without a socket. The runner sends what
//! [`RegistryTask::poll`] returns, and reports the answer or the failure.
//!
//! ```text
//!        poll: a request                   answered, or failed
//!  idle ────────────────▶ under way ───────────────────────────▶ idle, until the next is due
//! ```

use std::time::Instant;

/// HTTP method of a request to a registry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verb {
    /// POST.
    Post,
    /// PUT.
    Put,
    /// DELETE.
    Delete,
}

impl Verb {
    /// The name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Verb::Post => "POST",
            Verb::Put => "PUT",
            Verb::Delete => "DELETE",
        }
    }
}

/// An HTTP request to a registry.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RegistryRequest {
    /// HTTP method.
    pub verb: Verb,
    /// Path of the request.
    pub path: &'static str,
    /// Header fields beside those that every request has.
    pub headers: Vec<(&'static str, String)>,
    /// JSON, or empty.
    pub body: Vec<u8>,
    /// Whether the answer lasts as long as the connection and is handled piece by piece.
    pub is_stream: bool,
}

impl RegistryRequest {
    /// A request with one complete answer.
    pub fn new(verb: Verb, path: &'static str, body: Vec<u8>) -> RegistryRequest {
        RegistryRequest { verb, path, headers: Vec::new(), body, is_stream: false }
    }
}

/// A task that keeps something up to date at a registry.
pub trait RegistryTask {
    /// The URL scheme of the registry's hosts, as `--registry` names them.
    fn scheme(&self) -> &'static str;

    /// The next request that is due. `None` while a request is under way.
    fn poll(&mut self, now: Instant) -> Option<RegistryRequest>;

    /// The request has this answer.
    ///
    /// # Errors
    /// Why the answer is refused. The task has then already done what
    /// [`RegistryTask::handle_failure`] does.
    fn handle_answer(&mut self, status: u16, body: &[u8], now: Instant) -> Result<(), String>;

    /// Handles a piece of a stream's answer.
    ///
    /// # Errors
    /// Why the piece is refused. The stream must end; [`RegistryTask::handle_failure`] follows.
    fn handle_piece(&mut self, bytes: &[u8], now: Instant) -> Result<(), String>;

    /// Whether the task has reached its goal for the first time since the last call.
    fn is_first_kept(&mut self) -> bool {
        false
    }

    /// The request has no answer, or its stream has ended.
    fn handle_failure(&mut self, now: Instant);
}
