//! Protocol errors of a peer, and the reasons why a message is not queued.

use std::fmt;

/// The peer broke the protocol or a bound; its connection must be closed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ZmtpError {
    /// The first bytes are not ZMTP's: the peer speaks another protocol.
    Signature,
    /// The peer speaks a version older than 3.0.
    Version {
        /// Offered major version; 0 to 2 are laid out differently.
        major: u8,
    },
    /// The peer requires a security mechanism other than NULL.
    Mechanism,
    /// The as-server byte is not zero, which NULL requires.
    AsServer,
    /// Reserved flag bits are set, or a command has the MORE flag.
    Flags(u8),
    /// A message came before READY, or READY twice.
    OutOfOrder,
    /// A command is longer than allowed.
    CommandTooLong {
        /// Announced bytes.
        len: u64,
        /// Bytes allowed.
        limit: usize,
    },
    /// All parts of a message together exceed its bound.
    MessageTooLong {
        /// Bytes with the frame just announced.
        len: u64,
        /// Bytes allowed.
        limit: usize,
    },
    /// A message has too many parts.
    TooManyParts {
        /// Parts allowed.
        limit: usize,
    },
    /// A command's body is malformed.
    Command(&'static str),
    /// READY names no socket type, or one that does not match ours.
    SocketType,
    /// The peer refused the connection with ERROR and this reason.
    Refused(String),
    /// The peer requests answers and does not read them.
    OutputFull {
        /// Bytes allowed.
        limit: usize,
    },
}

impl fmt::Display for ZmtpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ZmtpError::Signature => write!(f, "peer does not speak ZMTP"),
            ZmtpError::Version { major } => {
                write!(f, "peer speaks ZMTP {major}, at least 3 is needed")
            }
            ZmtpError::Mechanism => write!(f, "peer asks for a ZMTP mechanism other than NULL"),
            ZmtpError::AsServer => write!(f, "peer's greeting sets as-server, which NULL forbids"),
            ZmtpError::Flags(flags) => write!(f, "frame has invalid flags {flags:#04x}"),
            ZmtpError::OutOfOrder => write!(f, "frame out of order with READY"),
            ZmtpError::CommandTooLong { len, limit } => {
                write!(f, "command of {len} bytes, at most {limit} are allowed")
            }
            ZmtpError::MessageTooLong { len, limit } => {
                write!(f, "message of {len} bytes or more, at most {limit} are allowed")
            }
            ZmtpError::TooManyParts { limit } => write!(f, "message of more than {limit} parts"),
            ZmtpError::Command(name) => write!(f, "malformed command {name}"),
            ZmtpError::SocketType => write!(f, "peer's socket type is neither DEALER nor ROUTER"),
            ZmtpError::Refused(reason) => write!(f, "peer refused the connection: {reason}"),
            ZmtpError::OutputFull { limit } => {
                write!(f, "peer does not read: more than {limit} bytes wait for it")
            }
        }
    }
}

impl std::error::Error for ZmtpError {}

/// A message was not queued.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ZmtpSendError {
    /// The handshake is not over, or the connection has failed.
    NotOpen,
    /// Too many bytes are queued already: the peer reads too slowly.
    Full {
        /// Bytes allowed to wait.
        limit: usize,
    },
}

impl fmt::Display for ZmtpSendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ZmtpSendError::NotOpen => write!(f, "connection is not open"),
            ZmtpSendError::Full { limit } => {
                write!(f, "more than {limit} bytes would wait for the peer")
            }
        }
    }
}

impl std::error::Error for ZmtpSendError {}
