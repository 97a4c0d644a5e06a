//! Errors of an HTTP message, and the status for each.

use std::fmt;

/// A message that cannot be read. Its connection must be closed, because the start of the next
/// message is not known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HttpError {
    /// The message is not HTTP/1, or it is ambiguous. The text names the part.
    Malformed(&'static str),
    /// An `Expect` other than `100-continue`.
    Expectation,
    /// The body is longer than the limit in bytes, or announces such a length.
    BodyTooLarge {
        /// The limit.
        limit: usize,
    },
    /// The head or the trailers are longer than the limit in bytes.
    HeadTooLarge {
        /// The limit.
        limit: usize,
    },
    /// More header lines than the limit.
    TooManyHeaders {
        /// The limit.
        limit: usize,
    },
    /// An unsupported method or transfer coding.
    Unsupported(&'static str),
    /// An HTTP version other than 1.0 and 1.1.
    Version,
    /// The connection ended inside a message.
    Truncated,
}

impl HttpError {
    /// The status that a server answers with before it closes the connection.
    pub fn status(self) -> u16 {
        match self {
            Self::Malformed(_) | Self::Truncated => 400,
            Self::BodyTooLarge { .. } => 413,
            Self::Expectation => 417,
            Self::HeadTooLarge { .. } | Self::TooManyHeaders { .. } => 431,
            Self::Unsupported(_) => 501,
            Self::Version => 505,
        }
    }
}

impl fmt::Display for HttpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed(what) => write!(f, "malformed HTTP message: {what}"),
            Self::Expectation => f.write_str("only `Expect: 100-continue` is supported"),
            Self::BodyTooLarge { limit } => write!(f, "the body is longer than {limit} bytes"),
            Self::HeadTooLarge { limit } => write!(f, "the HTTP head is longer than {limit} bytes"),
            Self::TooManyHeaders { limit } => write!(f, "more than {limit} HTTP headers"),
            Self::Unsupported(what) => write!(f, "not supported: {what}"),
            Self::Version => f.write_str("only HTTP/1.0 and HTTP/1.1 are supported"),
            Self::Truncated => f.write_str("the connection ended inside an HTTP message"),
        }
    }
}

impl std::error::Error for HttpError {}
