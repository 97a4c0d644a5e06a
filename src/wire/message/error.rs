//! What is wrong with a message; each of these costs its sender the connection.

use std::fmt;

/// A message that cannot be accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MessageError {
    /// It is not one of ours.
    Magic(u16),
    /// It is of another major version.
    Version {
        /// The sender's; ours is [`VERSION`](super::VERSION).
        theirs: u8,
    },
    /// Its kind is unknown here and says that it must be understood.
    Kind(u8),
    /// It has another number of parts than it says or its kind has.
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
        /// What it was.
        value: u64,
    },
    /// A list or text has an impossible length or encoding.
    Content {
        /// Which list or text.
        what: &'static str,
        /// Its bytes.
        len: usize,
    },
    /// Its seal is missing or wrong: forged, repeated, left out or out of order.
    Seal,
}

impl fmt::Display for MessageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MessageError::Magic(magic) => write!(f, "not a message of ours (magic {magic:#06x})"),
            MessageError::Version { theirs } => {
                write!(
                    f,
                    "peer's messages are of version {theirs}, ours of version {}",
                    super::VERSION
                )
            }
            MessageError::Kind(kind) => {
                write!(f, "message of unknown kind {kind} must be understood")
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
