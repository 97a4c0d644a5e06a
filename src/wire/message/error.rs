//! Errors of a message; each of them closes the sender's connection.

use std::fmt;

/// A message that cannot be accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MessageError {
    /// The magic number is wrong.
    Magic(u16),
    /// The major version differs.
    Version {
        /// The sender's; ours is [`VERSION`](super::VERSION).
        theirs: u8,
    },
    /// The kind is unknown to this version, and its flag says that the receiver must understand it.
    Kind(u8),
    /// The number of parts differs from the header's, or from what the kind requires.
    Parts {
        /// Parts expected.
        said: usize,
        /// Parts received.
        found: usize,
    },
    /// A body is shorter than its fields.
    Short {
        /// Which body.
        what: &'static str,
        /// Bytes received.
        len: usize,
        /// Bytes needed.
        needed: usize,
    },
    /// A number is out of its range.
    Value {
        /// Which number.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// A list or text has an impossible length or encoding.
    Content {
        /// Which list or text.
        what: &'static str,
        /// Its bytes.
        len: usize,
    },
    /// The seal is missing or wrong: the message was forged, repeated or reordered, or one was
    /// lost.
    Seal,
}

impl fmt::Display for MessageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MessageError::Magic(magic) => write!(f, "not a Baton message (magic {magic:#06x})"),
            MessageError::Version { theirs } => {
                write!(
                    f,
                    "peer's messages are of version {theirs}, ours of version {}",
                    super::VERSION
                )
            }
            MessageError::Kind(kind) => {
                write!(f, "unknown message kind {kind} is marked mandatory")
            }
            MessageError::Parts { said, found } => {
                write!(f, "message of {found} parts, {said} expected")
            }
            MessageError::Short { what, len, needed } => {
                write!(f, "{what} has {len} bytes, at least {needed} are needed")
            }
            MessageError::Value { what, value } => write!(f, "{what} cannot be {value}"),
            MessageError::Content { what, len } => {
                write!(f, "{what} of {len} bytes cannot be read")
            }
            MessageError::Seal => write!(f, "seal is missing or wrong"),
        }
    }
}

impl std::error::Error for MessageError {}
