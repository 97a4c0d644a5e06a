//! `baton drain`: drains a server over HTTP, and waits for its end with `--wait`.
//!
//! Thread: main, which blocks. Invariants: each request has one deadline, even if its answer
//! arrives slowly. A server has ended if it accepts no connection or another server has replaced
//! it. Not here: the drain itself (`server::drain`).

use crate::api::ErrorCode;
use crate::api::info::DRAINING;
use crate::config::DrainConfig;
use crate::config::secret::Secret;
use crate::config::values::WorkerUrl;
use crate::http::client::{RequestLine, ResponseDecoder, ResponseEvent, write_request};
use crate::http::{HttpLimits, Method};
use crate::limits::{DRAIN_ANSWER_MAX, DRAIN_FLUSH_TIME, DRAIN_TIME_MAX};
use crate::net::{Authorities, TlsError};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};
use std::{fmt, thread};

/// Time for one request and its answer, including the connection and TLS. A server answers at once
/// from its control thread, and a user or a script waits for this command.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time between two checks for the end.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Why a server could not be drained, or its end was not seen.
#[derive(Debug)]
pub enum DrainError {
    /// The file of CA certificates cannot be used.
    File(String),
    /// The server cannot be reached.
    Unreachable(String),
    /// The server requires HTTPS.
    Https,
    /// The server answers, but does not drain: its status and message.
    Refused(u16, String),
    /// The server drains, but its end cannot be observed.
    Unseen(String),
    /// The drain takes longer than any request can run.
    Stuck,
}

impl fmt::Display for DrainError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DrainError::File(why) => write!(f, "--tls-ca-file: {why}"),
            DrainError::Unreachable(why) => write!(f, "cannot be reached: {why}"),
            DrainError::Https => f.write_str(
                "the server accepts only HTTPS: use https://HOST:PORT and --tls-ca-file",
            ),
            DrainError::Refused(status, said) => write!(f, "answers with status {status}: {said}"),
            DrainError::Unseen(why) => write!(f, "drains, but its end cannot be observed: {why}"),
            DrainError::Stuck => f.write_str("still drains after the maximum time of a request"),
        }
    }
}

impl std::error::Error for DrainError {}

impl DrainError {
    /// Whether nothing was sent, because the command line is unusable.
    pub fn is_usage_error(&self) -> bool {
        matches!(self, DrainError::File(_))
    }
}

/// Drains the server, writes the number of running requests to `out`, and waits if configured.
///
/// # Errors
/// The server cannot be drained, or does not end.
pub fn run(config: &DrainConfig, out: &mut impl Write) -> Result<(), DrainError> {
    let authorities = config.tls_ca.as_deref().map(Authorities::read).transpose();
    let authorities = authorities.map_err(DrainError::File)?;
    let at = DrainTarget { url: &config.url, authorities: authorities.as_ref() };
    let reply = at.ask(Method::Post, "/drain", config.key.as_ref());
    let (status, body) = reply.map_err(|error| DrainError::Unreachable(error.to_string()))?;
    let said: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
    if status != 200 {
        if said["error"]["code"] == ErrorCode::Https.name() {
            return Err(DrainError::Https);
        }
        return Err(DrainError::Refused(status, String::from_utf8_lossy(&body).into_owned()));
    }
    // The command waits even if its standard output is closed.
    let _ = writeln!(out, "{} drains; running requests: {}", config.url, said["running"]);
    if config.wait {
        let until = Instant::now() + DRAIN_TIME_MAX + DRAIN_FLUSH_TIME;
        await_end(&at, || Instant::now() < until)?;
        let _ = writeln!(out, "{} has ended", config.url);
    }
    Ok(())
}

/// Repeats a check until the server accepts no connection, another server has its address, or the
/// time is over.
fn await_end(at: &DrainTarget<'_>, mut has_time: impl FnMut() -> bool) -> Result<(), DrainError> {
    let mut unseen = None;
    while has_time() {
        match at.ask(Method::Get, "/health", None) {
            Ok((200, body)) if body != DRAINING.as_bytes() => return Ok(()),
            Ok(_) => unseen = None,
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => return Ok(()),
            Err(error) if may_be_there(&error) => unseen = Some(error.to_string()),
            Err(error) => return Err(DrainError::Unseen(error.to_string())),
        }
        thread::sleep(LOOK_EVERY);
    }
    Err(unseen.map_or(DrainError::Stuck, DrainError::Unseen))
}

/// Whether the server may still be there after this error. A server that is ending can cause it,
/// and so can a server that closes connections above its limit. An untrusted certificate is
/// different: it can be the server's new one or another server's, and no further check can tell
/// which.
fn may_be_there(error: &std::io::Error) -> bool {
    use ErrorKind::{BrokenPipe, ConnectionReset, TimedOut, UnexpectedEof, WouldBlock};
    let is_cut_off = matches!(error.kind(), ConnectionReset | UnexpectedEof | BrokenPipe);
    is_cut_off
        || matches!(error.kind(), WouldBlock | TimedOut)
        || TlsError::named(error) == Some(TlsError::Refused)
}

/// The server and how to reach it.
struct DrainTarget<'a> {
    url: &'a WorkerUrl,
    /// CA certificates, for TLS.
    authorities: Option<&'a Authorities>,
}

impl DrainTarget<'_> {
    /// Sends one request on its own connection. Returns the answer's status and body.
    fn ask(
        &self,
        method: Method,
        target: &str,
        key: Option<&Secret>,
    ) -> std::io::Result<(u16, Vec<u8>)> {
        let mut stream = self.connect()?;
        match self.authorities {
            Some(authorities) if self.url.tls => {
                self.exchange(&mut authorities.secure(stream, &self.url.host)?, method, target, key)
            }
            // `resolve` refuses https:// without CA certificates.
            _ => self.exchange(&mut stream, method, target, key),
        }
    }

    fn exchange(
        &self,
        stream: &mut (impl Read + Write),
        method: Method,
        target: &str,
        key: Option<&Secret>,
    ) -> std::io::Result<(u16, Vec<u8>)> {
        let line = RequestLine { method, target, host: &self.url.authority() };
        let bearer = key.map(|key| format!("Bearer {}", String::from_utf8_lossy(key.bytes())));
        let mut fields = vec![("connection", "close")];
        fields.extend(bearer.as_deref().map(|bearer| ("authorization", bearer)));
        let mut request = Vec::new();
        write_request(&mut request, line, &fields, (method == Method::Post).then_some(&[]));
        stream.write_all(&request)?;
        stream.flush()?;
        answer(stream, method)
    }

    fn connect(&self) -> std::io::Result<DeadlineStream> {
        let addresses: Vec<_> =
            (self.url.host.as_str(), self.url.port).to_socket_addrs()?.collect();
        DeadlineStream::connect(&addresses, Instant::now() + PATIENCE)
    }
}

/// A connection with a deadline for all its reads and writes.
struct DeadlineStream {
    stream: TcpStream,
    until: Instant,
}

impl DeadlineStream {
    /// Connects to the first of these addresses that accepts.
    fn connect(addresses: &[SocketAddr], until: Instant) -> std::io::Result<DeadlineStream> {
        let mut connected = Err(ErrorKind::AddrNotAvailable.into());
        for (tried, address) in addresses.iter().enumerate() {
            // Each address gets a share of the time, because one that drops packets uses up its
            // share.
            let share = left(until)? / (addresses.len() - tried) as u32;
            connected = TcpStream::connect_timeout(address, share);
            if connected.is_ok() {
                break;
            }
        }
        let stream = connected?;
        stream.set_nodelay(true)?;
        Ok(DeadlineStream { stream, until })
    }
}

impl Read for DeadlineStream {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        self.stream.set_read_timeout(Some(left(self.until)?))?;
        self.stream.read(bytes)
    }
}

impl Write for DeadlineStream {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.stream.set_write_timeout(Some(left(self.until)?))?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.stream.flush()
    }
}

/// The time until the deadline.
fn left(until: Instant) -> std::io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

fn answer(stream: &mut impl Read, method: Method) -> std::io::Result<(u16, Vec<u8>)> {
    let mut decoder = ResponseDecoder::new(
        method,
        HttpLimits { body: DRAIN_ANSWER_MAX, ..HttpLimits::default() },
    );
    let (mut status, mut body, mut input) = (0, Vec::new(), Vec::new());
    let mut part = [0; 4096];
    loop {
        let count = stream.read(&mut part)?;
        if count == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        input.extend_from_slice(&part[..count]);
        loop {
            let (used, event) = decoder.read(&input).map_err(std::io::Error::other)?;
            let mut is_last = false;
            match event {
                Some(ResponseEvent::Head(head)) => status = head.status,
                Some(ResponseEvent::Body(piece)) => body.extend_from_slice(piece),
                Some(ResponseEvent::End { .. }) => return Ok((status, body)),
                None => is_last = true,
            }
            input.drain(..used);
            if is_last {
                break;
            }
        }
    }
}

#[cfg(test)]
#[path = "drain_tests.rs"]
mod tests;
