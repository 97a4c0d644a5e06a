//! Why a server that was dialled over TLS is not accepted.

use std::fmt;
use std::io;

/// The reason why a dialled server is not accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TlsError {
    /// No trusted CA signed its certificate.
    Stranger,
    /// Its certificate is for another host.
    Name,
    /// Its certificate has expired.
    Expired,
    /// Its certificate is not valid yet.
    Early,
    /// Its certificate is a CA certificate.
    Authority,
    /// Its certificate is otherwise not valid for a server.
    Certificate,
    /// It does not speak TLS.
    Plain,
    /// It has no TLS version in common with this client, or it aborted the handshake.
    Refused,
    /// It takes too long for the handshake.
    Slow,
    /// It violates the TLS protocol.
    Broken,
}

impl TlsError {
    /// The TLS error in an I/O error, if it is one.
    pub fn named(error: &io::Error) -> Option<TlsError> {
        error.get_ref().and_then(|inner| inner.downcast_ref()).copied()
    }

    /// Whether the server answers with a certificate that is not accepted.
    pub fn is_of_certificate(self) -> bool {
        use TlsError::{Authority, Certificate, Early, Expired, Name, Stranger};
        matches!(self, Stranger | Name | Expired | Early | Authority | Certificate)
    }
}

impl fmt::Display for TlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TlsError::Stranger => "its certificate is not signed by a trusted CA",
            TlsError::Name => "its certificate is for another host, not for the dialled one",
            TlsError::Expired => "its certificate has expired",
            TlsError::Early => "its certificate is not valid yet",
            TlsError::Authority => {
                "its certificate is a CA certificate (CA:TRUE), which a server cannot use: have \
                 the CA sign a server certificate"
            }
            TlsError::Certificate => "its certificate is not valid for a server",
            TlsError::Plain => "it does not speak TLS",
            TlsError::Refused => "it refuses the TLS handshake",
            TlsError::Slow => "its TLS handshake takes too long",
            TlsError::Broken => "it sends invalid TLS data",
        })
    }
}

impl std::error::Error for TlsError {}
