//! TLS over a TCP stream: bytes in the clear on one side, records on the other.
//!
//! Thread: `ctl`. Owns: what a server shows ([`Credentials`]) and one session ([`Secured`]), as a server or a client.
//! Invariants: no call waits; what is sealed and not yet sent is bounded by [`TLS_SEALED_MAX`], what was received and not
//! yet opened by rustls, at one record or one handshake message.
//! Not here: how long a handshake may take, and how many there are (`reactor`), whom a client believes (`authorities`).

use super::authorities::{Authorities, Distrust, distrust, is_authoritys, untrusted, unusable};
use crate::limits::{TLS_FILE_MAX, TLS_SEALED_MAX};
use crate::obs::log::event;
use mio::net::TcpStream;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{Connection, ServerConfig, ServerConnection};
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::path::Path;
use std::sync::Arc;

/// What a client that does not speak TLS is told; records of TLS begin with no letter.
const PLAIN_REFUSED: &[u8] = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: 131\r\n\
    connection: close\r\n\r\n\
    {\"error\":{\"message\":\"this port speaks HTTPS alone: ask it at https://\",\"type\":\"invalid_request_error\",\"param\":null,\"code\":\"https\"}}";
/// The code in that answer's body.
pub const HTTPS_ALONE: &str = "https";
/// Bytes of such a request that are read: most are whole then.
const PLAIN_READ: usize = 16 << 10;

/// A certificate, those that vouch for it, and its key.
#[derive(Clone, Debug)]
pub struct Credentials(Arc<ServerConfig>);

impl Credentials {
    /// Reads both files, in PEM: the certificate first, then those that lead to one that clients know.
    ///
    /// # Errors
    /// Which file cannot be read or does not hold what it should, or that the two do not belong together.
    pub fn read(certificates: &Path, key: &Path) -> Result<Credentials, String> {
        let wrong = |path: &Path, why: &dyn std::fmt::Display| format!("{}: {why}", path.display());
        let pem = read(certificates)?;
        let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(&pem)
            .collect::<Result<_, _>>()
            .map_err(|why| wrong(certificates, &why))?;
        if chain.is_empty() {
            return Err(wrong(certificates, &"holds no certificate in PEM"));
        }
        if is_authoritys(&chain[0]) {
            // Others may take it, as they are told to.
            let (file, why) = (certificates.display(), Distrust::Authority);
            event!(
                Warn,
                "tls",
                "no router or worker takes this certificate",
                file = file,
                why = why
            );
        }
        let secret = PrivateKeyDer::from_pem_slice(&read(key)?)
            .map_err(|why| wrong(key, &format!("holds no private key in PEM: {why}")))?;
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|why| why.to_string())?
            .with_no_client_auth()
            .with_single_cert(chain, secret)
            .map_err(|why| {
                let why = match why {
                    rustls::Error::InconsistentKeys(_) => {
                        "the key is not that of the certificate".to_owned()
                    }
                    why => unusable(&why),
                };
                format!("{} and {}: {why}", certificates.display(), key.display())
            })?;
        Ok(Credentials(Arc::new(config)))
    }

    /// A session with who has connected; its handshake is still to come.
    pub(super) fn accept(&self, tcp: TcpStream) -> io::Result<Secured> {
        let mut session = ServerConnection::new(self.0.clone()).map_err(io::Error::other)?;
        session.set_buffer_limit(Some(TLS_SEALED_MAX));
        Ok(Secured { tcp, session: session.into(), begun: false })
    }
}

/// A file in PEM.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, String> {
    let wrong = |why: String| format!("{}: {why}", path.display());
    let file = File::open(path).map_err(|error| wrong(error.to_string()))?;
    let mut bytes = Vec::new();
    file.take(TLS_FILE_MAX as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| wrong(error.to_string()))?;
    if bytes.len() > TLS_FILE_MAX {
        return Err(wrong(format!("holds more than {TLS_FILE_MAX} bytes")));
    }
    Ok(bytes)
}

/// A TCP stream and the session over it.
#[derive(Debug)]
pub(super) struct Secured {
    pub(super) tcp: TcpStream,
    session: Connection,
    /// The first byte has come.
    begun: bool,
}

impl Secured {
    /// A session with the server at this host, to which `tcp` is still on its way.
    pub(super) fn dial(
        tcp: TcpStream,
        authorities: &Authorities,
        host: &str,
    ) -> io::Result<Secured> {
        // Who answers in the clear is told from one that does not by the first record.
        Ok(Secured { tcp, session: authorities.session(host)?.into(), begun: true })
    }

    /// Whether it was dialled.
    fn is_client(&self) -> bool {
        matches!(self.session, Connection::Client(_))
    }

    /// Goes on with the handshake as far as the socket lets it; whether it is done.
    pub(super) fn shake(&mut self) -> io::Result<bool> {
        if !self.begun {
            self.refuse_plain()?;
        }
        self.flush()?;
        while self.session.is_handshaking() {
            match self.take_in() {
                Ok(0) if self.is_client() => return Err(untrusted(Distrust::Refused)),
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) => self.begun = true,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Who speaks HTTP in the clear is told so in the clear: an alert is nothing to such a client. Only the first byte of all
    /// tells: any may be in a record.
    fn refuse_plain(&mut self) -> io::Result<()> {
        let mut first = [0];
        self.begun = matches!(self.tcp.peek(&mut first), Ok(1));
        if !self.begun || !first[0].is_ascii_uppercase() {
            return Ok(());
        }
        // What was read does not reset the connection, and the answer with it, as what is left unread would.
        let _ = self.tcp.read(&mut [0; PLAIN_READ]);
        let _ = self.tcp.write(PLAIN_REFUSED);
        Err(io::Error::new(ErrorKind::InvalidData, "HTTP in the clear, where HTTPS is spoken"))
    }

    /// Reads what was opened. Where there is nothing it reads from the socket, once. What came then may be part of a record,
    /// or hold nothing for who reads: it says that it was interrupted, and how much of that is enough is the caller's to say.
    pub(super) fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if let Some(opened) = self.opened(bytes) {
            return opened;
        }
        self.take_in()?;
        self.opened(bytes).unwrap_or_else(|| Err(ErrorKind::Interrupted.into()))
    }

    /// What was opened, if there is something, or its end.
    fn opened(&mut self, bytes: &mut [u8]) -> Option<io::Result<usize>> {
        match self.session.reader().read(bytes) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            // An end that was not announced may have been cut off. HTTP knows how long requests are; an answer may end
            // with its connection.
            Err(error) if error.kind() == ErrorKind::UnexpectedEof && !self.is_client() => {
                Some(Ok(0))
            }
            other => Some(other),
        }
    }

    /// Seals bytes and sends them; says how many were taken.
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !self.flush()? {
            return Err(ErrorKind::WouldBlock.into());
        }
        let count = self.session.writer().write(bytes)?;
        self.flush()?;
        Ok(count)
    }

    /// Sends what is sealed; whether that is all of it.
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

    /// Whether something is sealed and waits for the socket.
    pub(super) fn is_pending(&self) -> bool {
        self.session.wants_write()
    }

    /// Says that nothing more comes, and sends nothing more.
    pub(super) fn shutdown_write(&mut self) -> io::Result<()> {
        self.session.send_close_notify();
        // Where the socket takes no more, the peer sees the end without its announcement.
        let _ = self.flush();
        self.tcp.shutdown(Shutdown::Write)
    }

    /// Reads records from the socket and opens them; how many bytes those were.
    fn take_in(&mut self) -> io::Result<usize> {
        let count = match self.session.read_tls(&mut self.tcp) {
            Err(error) if error.kind() == ErrorKind::Interrupted => return self.take_in(),
            other => other?,
        };
        if let Err(error) = self.session.process_new_packets() {
            // Why is said to the peer, if it listens.
            let _ = self.flush();
            return Err(distrust(&error));
        }
        self.flush()?;
        Ok(count)
    }
}
