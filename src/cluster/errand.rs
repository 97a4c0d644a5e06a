//! What is asked of a registry, one request after the other, without a socket: the one who runs it sends what
//! [`Errand::poll`] gives and says what came of it.
//!
//! ```text
//!        poll: a request                   answered, or failed
//!  idle ────────────────▶ under way ───────────────────────────▶ idle, until the next is due
//! ```

use std::time::Instant;

/// What to do with a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verb {
    /// Do.
    Post,
    /// Store.
    Put,
    /// Remove.
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

/// A request over HTTP.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    /// What to do.
    pub verb: Verb,
    /// With what.
    pub path: &'static str,
    /// Beside those that every request has.
    pub headers: Vec<(&'static str, String)>,
    /// JSON, or nothing.
    pub body: Vec<u8>,
    /// Whether its answer goes on for as long as the connection stands, and is told piece by piece.
    pub is_stream: bool,
}

impl Request {
    /// One with a whole answer.
    pub fn new(verb: Verb, path: &'static str, body: Vec<u8>) -> Request {
        Request { verb, path, headers: Vec::new(), body, is_stream: false }
    }
}

/// Something that is to be kept up at a registry.
pub trait Errand {
    /// Of the registry's hosts, as `--registry` names them.
    fn scheme(&self) -> &'static str;

    /// The next request, once it is due. None while one is under way.
    fn poll(&mut self, now: Instant) -> Option<Request>;

    /// The request has this answer.
    ///
    /// # Errors
    /// The answer is no good, and why; that was [`Errand::failed`], too.
    fn answered(&mut self, status: u16, body: &[u8], now: Instant) -> Result<(), String>;

    /// A piece of the answer to a stream has come.
    ///
    /// # Errors
    /// It is no good, and the stream is to end; [`Errand::failed`] follows.
    fn piece(&mut self, bytes: &[u8], now: Instant) -> Result<(), String>;

    /// Whether what is to be kept up has been since the last call, for the first time.
    fn is_first_kept(&mut self) -> bool {
        false
    }

    /// The request has no (further) answer.
    fn failed(&mut self, now: Instant);
}
