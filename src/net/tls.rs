//! TLS over a TCP stream: plaintext on one side, records on the other.
//!
//! Thread: `ctl`. Owns: a server's certificate and key ([`Credentials`]), and one session
//! ([`TlsStream`]) of a server or a client. Invariants: no call blocks. [`TLS_SEALED_MAX`] bounds
//! the encrypted bytes that are not sent. rustls bounds undecrypted input at one record or
//! handshake message. Not here: deadlines and number of handshakes (`reactor`), trusted CAs
//! (`authorities`).

use super::authorities::{Authorities, distrust, is_authoritys, untrusted, unusable};
use super::pem::read_pem;
use super::tls_error::TlsError;
use crate::limits::TLS_SEALED_MAX;
use crate::obs::log::event;
use mio::net::TcpStream;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{Connection, ServerConfig, ServerConnection};
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::path::Path;
use std::sync::Arc;

/// The answer to a client that does not speak TLS. A TLS record never starts with a letter.
const PLAIN_REFUSED: &[u8] = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n\
    content-length: 131\r\nconnection: close\r\n\r\n\
    {\"error\":{\"message\":\"this port only speaks HTTPS; connect to https://\",\
    \"type\":\"invalid_request_error\",\"param\":null,\"code\":\"https\"}}";
/// The error code in the body of that answer.
pub const HTTPS_ALONE: &str = "https";
/// Maximum bytes that are read of a plain request. Most requests are shorter.
const PLAIN_READ: usize = 16 << 10;

/// A certificate with its chain, and its private key.
#[derive(Clone, Debug)]
pub struct Credentials(Arc<ServerConfig>);

impl Credentials {
    /// Reads two PEM files. The server's certificate comes first, followed by its chain up to a CA
    /// that clients trust.
    ///
    /// # Errors
    /// A file cannot be read, has the wrong content, or the key does not match the certificate.
    pub fn read(certificates: &Path, key: &Path) -> Result<Credentials, String> {
        let wrong = |path: &Path, why: &dyn std::fmt::Display| format!("{}: {why}", path.display());
        let pem = read_pem(certificates)?;
        let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(&pem)
            .collect::<Result<_, _>>()
            .map_err(|why| wrong(certificates, &why))?;
        if chain.is_empty() {
            return Err(wrong(certificates, &"holds no certificate in PEM"));
        }
        if is_authoritys(&chain[0]) {
            // Other clients can accept it if they are configured to.
            let (file, why) = (certificates.display(), TlsError::Authority);
            event!(
                Warn,
                "tls",
                "routers and workers do not accept this certificate",
                file = file,
                why = why
            );
        }
        let secret = PrivateKeyDer::from_pem_slice(&read_pem(key)?)
            .map_err(|why| wrong(key, &format!("holds no private key in PEM: {why}")))?;
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|why| why.to_string())?
            .with_no_client_auth()
            .with_single_cert(chain, secret)
            .map_err(|why| {
                let why = match why {
                    rustls::Error::InconsistentKeys(_) => {
                        "the key does not belong to the certificate".to_owned()
                    }
                    why => unusable(&why),
                };
                format!("{} and {}: {why}", certificates.display(), key.display())
            })?;
        Ok(Credentials(Arc::new(config)))
    }

    /// Starts a server session on an accepted connection, before its handshake.
    pub(super) fn accept(&self, tcp: TcpStream) -> io::Result<TlsStream> {
        let mut session = ServerConnection::new(self.0.clone()).map_err(io::Error::other)?;
        session.set_buffer_limit(Some(TLS_SEALED_MAX));
        Ok(TlsStream { tcp, session: session.into(), begun: false })
    }
}

/// A TCP stream and the session over it.
#[derive(Debug)]
pub(super) struct TlsStream {
    tcp: TcpStream,
    session: Connection,
    /// Whether the first byte has come.
    begun: bool,
}

impl TlsStream {
    /// Starts a client session with the server at `host`, while `tcp` still connects.
    pub(super) fn dial(
        tcp: TcpStream,
        authorities: &Authorities,
        host: &str,
    ) -> io::Result<TlsStream> {
        // A server without TLS is recognised by its first record.
        Ok(TlsStream { tcp, session: authorities.session(host)?.into(), begun: true })
    }

    /// The stream below.
    pub(super) fn tcp(&self) -> &TcpStream {
        &self.tcp
    }

    /// The stream below, to register it.
    pub(super) fn tcp_mut(&mut self) -> &mut TcpStream {
        &mut self.tcp
    }

    /// Whether this side dialled.
    fn is_client(&self) -> bool {
        matches!(self.session, Connection::Client(_))
    }

    /// Continues the handshake as far as the socket allows. Returns whether it is done.
    pub(super) fn shake(&mut self) -> io::Result<bool> {
        if !self.begun && !self.begin()? {
            return Ok(false);
        }
        self.flush()?;
        while self.session.is_handshaking() {
            match self.take_in() {
                Ok(0) if self.is_client() => return Err(untrusted(TlsError::Refused)),
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Looks at the first byte, and returns whether it has come. Plain HTTP is answered in plain
    /// HTTP, because such a client cannot read a TLS alert. Only the first byte of a connection
    /// shows it, because later bytes of a record can have any value. So no byte is read before.
    fn begin(&mut self) -> io::Result<bool> {
        let mut first = [0];
        match self.tcp.peek(&mut first) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(_) => self.begun = true,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == ErrorKind::Interrupted => return self.begin(),
            Err(error) => return Err(error),
        }
        if !first[0].is_ascii_uppercase() {
            return Ok(true);
        }
        // Unread input would reset the connection and lose the answer.
        let _ = self.tcp.read(&mut [0; PLAIN_READ]);
        let _ = self.tcp.write(PLAIN_REFUSED);
        Err(io::Error::new(ErrorKind::InvalidData, "plain HTTP on an HTTPS port"))
    }

    /// Reads decrypted bytes. If there are none, it reads once from the socket. If the new bytes
    /// are only a part of a record, or hold no data, it returns `Interrupted`. The caller bounds
    /// its retries.
    pub(super) fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if let Some(opened) = self.opened(bytes) {
            return opened;
        }
        self.take_in()?;
        self.opened(bytes).unwrap_or_else(|| Err(ErrorKind::Interrupted.into()))
    }

    /// Decrypted bytes or the end of the stream; `None` if there are none yet.
    fn opened(&mut self, bytes: &mut [u8]) -> Option<io::Result<usize>> {
        match self.session.reader().read(bytes) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            // Without a close alert the stream can be truncated. A server detects that, because a
            // request has a length. A response can end with its connection, so for a client this is
            // an error.
            Err(error) if error.kind() == ErrorKind::UnexpectedEof && !self.is_client() => {
                Some(Ok(0))
            }
            other => Some(other),
        }
    }

    /// Encrypts bytes and sends them. Returns how many were taken.
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !self.flush()? {
            return Err(ErrorKind::WouldBlock.into());
        }
        let count = self.session.writer().write(bytes)?;
        self.flush()?;
        Ok(count)
    }

    /// Sends encrypted bytes. Returns whether all are sent.
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        while self.session.wants_write() {
            match self.session.write_tls(&mut self.tcp) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Whether encrypted bytes wait for the socket.
    pub(super) fn is_pending(&self) -> bool {
        self.session.wants_write()
    }

    /// Announces the end of the stream and closes the sending direction.
    pub(super) fn shutdown_write(&mut self) -> io::Result<()> {
        self.session.send_close_notify();
        // If the socket takes no more, the peer sees the end without a close alert.
        let _ = self.flush();
        self.tcp.shutdown(Shutdown::Write)
    }

    /// Reads records from the socket and decrypts them. Returns the number of bytes read.
    fn take_in(&mut self) -> io::Result<usize> {
        let count = match self.session.read_tls(&mut self.tcp) {
            Err(error) if error.kind() == ErrorKind::Interrupted => return self.take_in(),
            other => other?,
        };
        if let Err(error) = self.session.process_new_packets() {
            // Send the alert to the peer, if it still reads.
            let _ = self.flush();
            return Err(distrust(&error));
        }
        self.flush()?;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    /// The plain request may come at any moment between two looks at the socket.
    #[test]
    fn plain_http_that_comes_at_any_moment_is_refused_in_plain_http() {
        let file = |name: &str| {
            Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/certificates")).join(name)
        };
        let credentials = Credentials::read(&file("one.pem"), &file("one.key")).unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        for round in 0..200 {
            let mut client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (accepted, _) = listener.accept().unwrap();
            accepted.set_nonblocking(true).unwrap();
            let mut stream = credentials.accept(TcpStream::from_std(accepted)).unwrap();
            let asks = std::thread::spawn(move || {
                client.write_all(b"GET /health HTTP/1.1\r\n\r\n").unwrap();
                let mut answer = Vec::new();
                client.read_to_end(&mut answer).unwrap();
                answer
            });
            let until = Instant::now() + Duration::from_secs(10);
            while let Ok(done) = stream.shake() {
                assert!(!done && Instant::now() < until, "plain HTTP is no handshake");
            }
            drop(stream);
            assert_eq!(asks.join().unwrap(), PLAIN_REFUSED, "round {round}");
        }
    }
}
