//! The servers that a TLS client trusts, and the errors of other servers.
//!
//! Thread: any. Invariants: a server must prove that it is the host that was dialled, by name or
//! address. A session is resumed only with the CAs that verified it. Not here: the bytes of a
//! session (`tls`), deadlines of a handshake (`reactor`).

use super::pem::read_pem;
use super::tls_error::TlsError;
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

/// Trusted CA certificates.
#[derive(Clone, Debug)]
pub struct Authorities(Arc<ClientConfig>);

impl Authorities {
    /// Reads a PEM file with at least one certificate.
    ///
    /// # Errors
    /// The file cannot be read or has the wrong content.
    pub fn read(path: &Path) -> Result<Authorities, String> {
        let wrong = |why: &dyn fmt::Display| format!("{}: {why}", path.display());
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(&read_pem(path)?) {
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

    /// A client session with the server at `host`, before its handshake.
    pub(super) fn session(&self, host: &str) -> io::Result<ClientConnection> {
        let name = ServerName::try_from(host.to_owned()).map_err(|_| untrusted(TlsError::Name))?;
        let mut session = ClientConnection::new(self.0.clone(), name).map_err(io::Error::other)?;
        session.set_buffer_limit(Some(TLS_SEALED_MAX));
        Ok(session)
    }

    /// TLS over a stream to the server at `host`, for a thread that blocks on it. The stream sets
    /// the timeouts.
    ///
    /// # Errors
    /// The handshake fails. The cause of a [`TlsError`] is the server.
    pub fn secure<S: Read + Write>(
        &self,
        mut stream: S,
        host: &str,
    ) -> io::Result<impl Read + Write + use<S>> {
        let mut session = self.session(host)?;
        while session.is_handshaking() {
            session.complete_io(&mut stream).map_err(unwrap_tls_error)?;
        }
        Ok(StreamOwned::new(session, stream))
    }
}

/// The reason in an error of a session.
fn reason_of(error: &rustls::Error) -> TlsError {
    use rustls::Error;
    match error {
        Error::InvalidCertificate(why) => match why {
            CertificateError::UnknownIssuer | CertificateError::BadSignature => TlsError::Stranger,
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                TlsError::Name
            }
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                TlsError::Expired
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                TlsError::Early
            }
            why if is_of_authority(why) => TlsError::Authority,
            _ => TlsError::Certificate,
        },
        Error::InvalidMessage(rustls::InvalidMessage::InvalidContentType) => TlsError::Plain,
        Error::AlertReceived(_) | Error::PeerIncompatible(_) => TlsError::Refused,
        _ => TlsError::Broken,
    }
}

/// Whether a certificate is a CA certificate. [`Authorities`] never accepts one from a server.
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

/// Whether a server presents a CA certificate as its own. rustls has no error of its own for that
/// and returns its verifier's error.
fn is_of_authority(why: &CertificateError) -> bool {
    matches!(why, CertificateError::Other(why) if format!("{why:?}").contains("CaUsedAsEndEntity"))
}

/// The error text for a certificate from a file. rustls reports such an error as that of a peer.
pub(super) fn unusable(error: &rustls::Error) -> String {
    match error {
        rustls::Error::InvalidCertificate(CertificateError::BadEncoding) => {
            "a certificate is damaged".into()
        }
        rustls::Error::InvalidCertificate(CertificateError::Other(why))
            if why.to_string().contains("UnsupportedCertVersion") =>
        {
            "the certificate is not of X.509 version 3, which is required for host names".into()
        }
        rustls::Error::InvalidCertificate(why) => {
            format!("the certificate cannot be used: {why:?}")
        }
        why => why.to_string(),
    }
}

/// The I/O error for a TLS error of a session.
pub(super) fn distrust(error: &rustls::Error) -> io::Error {
    untrusted(reason_of(error))
}

/// The I/O error for a [`TlsError`].
pub(super) fn untrusted(why: TlsError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Unwraps a TLS error from the I/O error around it.
fn unwrap_tls_error(error: io::Error) -> io::Error {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(inner) => distrust(inner),
        None => error,
    }
}
