//! The response of another server, which can be incomplete, and the reason if it failed.
//!
//! Thread: `ctl`. Not here: the cause of an error response (`failure`).

use crate::api::{ApiError, IGNORED_FIELDS};
use crate::http::client::ResponseHead;
use crate::http::response::{JSON, Response};
use crate::http::{HttpError, sse};
use crate::limits::ROUTER_ANSWER_MAX;
use std::fmt;

/// A response, of which the body can still be arriving.
#[derive(Clone, Debug)]
pub struct UpstreamReply {
    /// HTTP status.
    pub status: u16,
    /// Media type.
    pub media: String,
    /// Seconds after which a retry makes sense.
    pub retry_after: Option<u32>,
    /// The part of the body that was not taken yet.
    pub body: Vec<u8>,
    /// The names of the request's fields that the worker ignored.
    pub ignored_fields: Option<String>,
    /// The message, if the error comes from this process and not from a worker.
    pub own: Option<String>,
}

impl UpstreamReply {
    /// A response with only its head so far.
    pub fn new(head: &ResponseHead) -> UpstreamReply {
        UpstreamReply {
            status: head.status,
            media: head.headers.get("content-type").unwrap_or(JSON).to_owned(),
            retry_after: head.headers.get("retry-after").and_then(|value| value.parse().ok()),
            body: Vec::new(),
            ignored_fields: head.headers.get(IGNORED_FIELDS).map(str::to_owned),
            own: None,
        }
    }

    /// An error of this process.
    pub fn error(error: &ApiError) -> UpstreamReply {
        UpstreamReply {
            status: error.status,
            media: JSON.to_owned(),
            retry_after: error.retry_after,
            body: error.to_json(),
            ignored_fields: None,
            own: Some(error.message.clone()),
        }
    }

    /// Whether the status is 2xx.
    pub fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// Whether it is a stream of server-sent events.
    pub fn is_stream(&self) -> bool {
        let media = self.media.split(';').next().unwrap_or_default();
        self.is_success() && media.trim().eq_ignore_ascii_case(sse::CONTENT_TYPE)
    }

    /// The response for a client.
    pub fn whole(&self) -> Response<'_> {
        Response {
            status: self.status,
            media: &self.media,
            body: &self.body,
            retry_after: self.retry_after,
        }
    }
}

/// The reason why the response does not come, or ends early.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CallError {
    /// The worker closed the connection.
    Closed,
    /// It sent invalid HTTP.
    Http(HttpError),
    /// The response is longer than the limit.
    TooLong,
    /// It took too long.
    Deadline,
    /// The worker does not answer its health probes, too.
    Silent,
    /// A healthy worker closed the connection, because this process had stopped reading from it
    /// while a slow client was behind.
    SlowClient,
    /// The request cannot be sent: this process holds too many unsent bytes.
    Full,
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CallError::Closed => f.write_str("its connection was lost"),
            CallError::Http(error) => write!(f, "its answer cannot be read: {error}"),
            CallError::TooLong => write!(f, "its answer is longer than {ROUTER_ANSWER_MAX} bytes"),
            CallError::Deadline => f.write_str("the call took too long"),
            CallError::Silent => f.write_str("the worker does not respond"),
            CallError::SlowClient => {
                f.write_str("the client reads too slowly, and the worker cannot buffer more")
            }
            CallError::Full => f.write_str("too many bytes wait to be sent"),
        }
    }
}
