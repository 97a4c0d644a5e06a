//! A sequence of requests to a registry, one at a time, without a socket. The runner sends the
//! request that [`RegistryTask::poll`] returns, and reports its answer or its failure.
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
    /// Header fields, in addition to those of every request.
    pub headers: Vec<(&'static str, String)>,
    /// JSON, or empty.
    pub body: Vec<u8>,
    /// Whether the answer is a stream: it lasts as long as the connection, and each piece is
    /// handled when it arrives.
    pub is_stream: bool,
}

impl RegistryRequest {
    /// A request with one complete answer.
    pub fn new(verb: Verb, path: &'static str, body: Vec<u8>) -> RegistryRequest {
        RegistryRequest { verb, path, headers: Vec::new(), body, is_stream: false }
    }
}

/// A task that keeps an entry or a view up to date.
pub trait RegistryTask {
    /// The URL scheme of the registry's hosts, as `--registry` names them.
    fn scheme(&self) -> &'static str;

    /// The next request that is due. `None` while a request is under way.
    fn poll(&mut self, now: Instant) -> Option<RegistryRequest>;

    /// Handles the answer to the request.
    ///
    /// # Errors
    /// Why the answer is refused. The task has then already handled the failure, as in
    /// [`RegistryTask::handle_failure`].
    fn handle_answer(&mut self, status: u16, body: &[u8], now: Instant) -> Result<(), String>;

    /// Handles a piece of a stream's answer.
    ///
    /// # Errors
    /// Why the piece is refused. The stream must end; [`RegistryTask::handle_failure`] follows.
    fn handle_piece(&mut self, bytes: &[u8], now: Instant) -> Result<(), String>;

    /// Whether the task has reached its goal for the first time. A task returns true at most once.
    fn is_first_kept(&mut self) -> bool {
        false
    }

    /// Handles a request without an answer, or the end of its stream.
    fn handle_failure(&mut self, now: Instant);
}
