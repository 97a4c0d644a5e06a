//! Whom a client of TLS believes, and what is wrong with a server that it does not.
//!
//! Any thread. Invariants: a server is taken for the host that it was dialled as, by name or address, or not at all; sessions
//! are resumed under the authorities that vouched for them alone. Not here: a session's bytes (`tls`), how long a handshake
//! may take (`reactor`).

use super::tls::read;
use crate::limits::TLS_SEALED_MAX;
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use std::fmt;
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;

/// Certificates of those who vouch for servers.
#[derive(Clone, Debug)]
pub struct Authorities(Arc<ClientConfig>);

impl Authorities {
    /// Reads a file of at least one certificate, in PEM.
    ///
    /// # Errors
    /// It cannot be read, or does not hold what it should.
    pub fn read(path: &Path) -> Result<Authorities, String> {
        let wrong = |why: &dyn fmt::Display| format!("{}: {why}", path.display());
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(&read(path)?) {
            roots
                .add(certificate.map_err(|why| wrong(&why))?)
                .map_err(|why| wrong(&unusable(&why)))?;
        }
        if roots.is_empty() {
            return Err(wrong(&"holds no certificate in PEM"));
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|why| why.to_string())?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Authorities(Arc::new(config)))
    }

    /// A session with a server at this host; its handshake is still to come.
    pub(super) fn session(&self, host: &str) -> io::Result<ClientConnection> {
        let name = ServerName::try_from(host.to_owned()).map_err(|_| untrusted(Distrust::Name))?;
        let mut session = ClientConnection::new(self.0.clone(), name).map_err(io::Error::other)?;
        session.set_buffer_limit(Some(TLS_SEALED_MAX));
        Ok(session)
    }

    /// TLS over a stream to a server at this host, for a thread that waits for it; how long, is the stream's to say.
    ///
    /// # Errors
    /// The handshake fails; a [`Distrust`] where that is the server's.
    pub fn secure<S: Read + Write>(
        &self,
        mut stream: S,
        host: &str,
    ) -> io::Result<impl Read + Write + use<S>> {
        let mut session = self.session(host)?;
        while session.is_handshaking() {
            session.complete_io(&mut stream).map_err(told)?;
        }
        Ok(StreamOwned::new(session, stream))
    }
}

/// What is wrong with a server that was dialled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Distrust {
    /// Nobody who is believed vouches for it.
    Stranger,
    /// It is somebody else.
    Name,
    /// Its certificate was good,
    Expired,
    /// will be,
    Early,
    /// is one by which others are signed,
    Authority,
    /// or is otherwise not one of a server.
    Certificate,
    /// It does not speak TLS.
    Plain,
    /// It speaks another TLS, or gave the handshake up.
    Refused,
    /// It takes too long for the handshake.
    Slow,
    /// What it sends is not what it may.
    Broken,
}

impl Distrust {
    /// Whom an error names as one that is not believed.
    pub fn named(error: &io::Error) -> Option<Distrust> {
        error.get_ref().and_then(|inner| inner.downcast_ref()).copied()
    }

    /// Whether somebody is there, and shows a certificate.
    pub fn is_of_certificate(self) -> bool {
        use Distrust::{Authority, Certificate, Early, Expired, Name, Stranger};
        matches!(self, Stranger | Name | Expired | Early | Authority | Certificate)
    }

    fn of(error: &rustls::Error) -> Distrust {
        use rustls::Error;
        match error {
            Error::InvalidCertificate(why) => match why {
                CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                    Distrust::Stranger
                }
                CertificateError::NotValidForName
                | CertificateError::NotValidForNameContext { .. } => Distrust::Name,
                CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                    Distrust::Expired
                }
                CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                    Distrust::Early
                }
                why if is_of_authority(why) => Distrust::Authority,
                _ => Distrust::Certificate,
            },
            Error::InvalidMessage(rustls::InvalidMessage::InvalidContentType) => Distrust::Plain,
            Error::AlertReceived(_) | Error::PeerIncompatible(_) => Distrust::Refused,
            _ => Distrust::Broken,
        }
    }
}

impl fmt::Display for Distrust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Distrust::Stranger => "nobody who is believed here vouches for its certificate",
            Distrust::Name => "its certificate is for another host than the one that was dialled",
            Distrust::Expired => "its certificate has expired",
            Distrust::Early => "its certificate is not valid yet",
            Distrust::Authority => {
                "its certificate is an authority's own (CA:TRUE), which cannot be a server's: have that authority sign \
                 another one for it"
            }
            Distrust::Certificate => "its certificate is not one of a server",
            Distrust::Plain => "it does not speak TLS",
            Distrust::Refused => "it refuses the TLS handshake",
            Distrust::Slow => "its TLS handshake takes too long",
            Distrust::Broken => "what it sends over TLS makes no sense",
        })
    }
}

impl std::error::Error for Distrust {}

/// Whether a certificate is one that nobody who asks [`Authorities`] takes for a server's, since others are signed by it.
pub(super) fn is_authoritys(certificate: &CertificateDer<'_>) -> bool {
    let mut roots = RootCertStore::empty();
    let Ok(parsed) = ParsedCertificate::try_from(certificate) else { return false };
    if roots.add(certificate.clone().into_owned()).is_err() {
        return false;
    }
    let algorithms = ring::default_provider().signature_verification_algorithms.all;
    let checked = verify_server_cert_signed_by_trust_anchor(
        &parsed,
        &roots,
        &[],
        UnixTime::now(),
        algorithms,
    );
    matches!(checked, Err(rustls::Error::InvalidCertificate(why)) if is_of_authority(&why))
}

/// Whether it is an authority's certificate that a server shows as its own. rustls has no word for that, and hands its
/// verifier's on.
fn is_of_authority(why: &CertificateError) -> bool {
    matches!(why, CertificateError::Other(why) if format!("{why:?}").contains("CaUsedAsEndEntity"))
}

/// What is wrong with a certificate that was read from a file: to rustls it is a peer's in any case.
pub(super) fn unusable(error: &rustls::Error) -> String {
    match error {
        rustls::Error::InvalidCertificate(CertificateError::BadEncoding) => {
            "a certificate is damaged".into()
        }
        rustls::Error::InvalidCertificate(CertificateError::Other(why))
            if why.to_string().contains("UnsupportedCertVersion") =>
        {
            "the certificate is not of X.509 version 3, as those are that name their hosts".into()
        }
        rustls::Error::InvalidCertificate(why) => {
            format!("the certificate cannot be used: {why:?}")
        }
        why => why.to_string(),
    }
}

/// What a session says of what came.
pub(super) fn distrust(error: &rustls::Error) -> io::Error {
    untrusted(Distrust::of(error))
}

/// The same, of one's own.
pub(super) fn untrusted(why: Distrust) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// The same, of an error that wraps it.
fn told(error: io::Error) -> io::Error {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(inner) => distrust(inner),
        None => error,
    }
}
