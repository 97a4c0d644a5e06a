//! `baton drain`: tells a process over HTTP to drain, and waits for its end where that is asked.
//!
//! Thread: main, which blocks; it has nothing else to do. Invariants: one deadline bounds all that is asked over a connection,
//! however little comes at a time; only who takes no connection has ended. Not here: the drain itself (`front::drain`).

use crate::config::resolved::DrainConfig;
use crate::config::secret::Secret;
use crate::config::values::WorkerUrl;
use crate::front::http::client::{Event, RequestLine, ResponseDecoder, write_request};
use crate::front::http::{Limits, Method};
use crate::front::openai::info::DRAINING;
use crate::limits::{DRAIN_ANSWER_MAX, DRAIN_FLUSH_TIME, DRAIN_TIME_MAX};
use crate::net::{Authorities, Distrust, HTTPS_ALONE};
use std::fmt;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

/// For one question and its answer, the connection and TLS over it included: a process answers from its control thread, at
/// once; somebody waits at a terminal, or a script.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two looks whether it has ended.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Why a process could not be told to drain, or was not seen to end.
#[derive(Debug)]
pub enum DrainError {
    /// The file of those who vouch for it cannot be used.
    File(String),
    /// Nobody answers there.
    Unreachable(String),
    /// It is to be asked over TLS.
    Https,
    /// It answers, but does not drain: status, and what it says.
    Refused(u16, String),
    /// It was told, and whether it has ended cannot be told.
    Unseen(String),
    /// It drains for longer than requests may take.
    Stuck,
}

impl fmt::Display for DrainError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DrainError::File(why) => write!(f, "--tls-ca-file: {why}"),
            DrainError::Unreachable(why) => write!(f, "cannot be reached: {why}"),
            DrainError::Https => {
                f.write_str("it speaks HTTPS alone: name it as https://HOST:PORT, and who vouches for it by --tls-ca-file")
            }
            DrainError::Refused(status, said) => write!(f, "answers with status {status}: {said}"),
            DrainError::Unseen(why) => write!(f, "drains, but its end is not seen: {why}"),
            DrainError::Stuck => f.write_str("it still drains, though all requests should be over"),
        }
    }
}

impl std::error::Error for DrainError {}

impl DrainError {
    /// Whether nothing was asked, since what was typed cannot be used.
    pub fn is_of_usage(&self) -> bool {
        matches!(self, DrainError::File(_))
    }
}

/// Tells it, says on `out` how many requests are left, and waits where that is asked.
///
/// # Errors
/// It cannot be told, or does not end.
pub fn run(config: &DrainConfig, out: &mut impl Write) -> Result<(), DrainError> {
    let authorities = config.tls_ca.as_deref().map(Authorities::read).transpose();
    let authorities = authorities.map_err(DrainError::File)?;
    let at = At { url: &config.url, authorities: authorities.as_ref() };
    let told = at.ask(Method::Post, "/drain", config.api_key.as_ref());
    let (status, body) = told.map_err(|error| DrainError::Unreachable(error.to_string()))?;
    let said: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
    if status != 200 {
        if said["error"]["code"] == HTTPS_ALONE {
            return Err(DrainError::Https);
        }
        return Err(DrainError::Refused(status, String::from_utf8_lossy(&body).into_owned()));
    }
    // A closed standard output is no reason not to wait.
    let _ = writeln!(out, "{} drains; requests that run: {}", config.url, said["running"]);
    if config.wait {
        let until = Instant::now() + DRAIN_TIME_MAX + DRAIN_FLUSH_TIME;
        await_end(&at, || Instant::now() < until)?;
        let _ = writeln!(out, "{} has ended", config.url);
    }
    Ok(())
}

/// It has ended once nobody takes a connection there, or somebody else has taken its place. Looks as long as there is time.
fn await_end(at: &At<'_>, mut has_time: impl FnMut() -> bool) -> Result<(), DrainError> {
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

/// It may end while it answers, and be busy ending; and one that has as many connections as it may have cuts others off. Who
/// shows another certificate may be it, or somebody else: no further look tells.
fn may_be_there(error: &std::io::Error) -> bool {
    use ErrorKind::{BrokenPipe, ConnectionReset, TimedOut, UnexpectedEof, WouldBlock};
    let is_cut_off = matches!(error.kind(), ConnectionReset | UnexpectedEof | BrokenPipe);
    is_cut_off
        || matches!(error.kind(), WouldBlock | TimedOut)
        || Distrust::named(error) == Some(Distrust::Refused)
}

/// The process, as it is reached.
struct At<'a> {
    url: &'a WorkerUrl,
    /// Who vouches for it, where that is over TLS.
    authorities: Option<&'a Authorities>,
}

impl At<'_> {
    /// One request on a connection of its own: the answer's status and body.
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
            // The configuration has no such URL without them.
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

    fn connect(&self) -> std::io::Result<Timed> {
        let addresses: Vec<_> =
            (self.url.host.as_str(), self.url.port).to_socket_addrs()?.collect();
        Timed::connect(&addresses, Instant::now() + PATIENCE)
    }
}

/// A connection that is over at a time, whatever comes until then.
struct Timed {
    stream: TcpStream,
    until: Instant,
}

impl Timed {
    /// To the first of these that takes one.
    fn connect(addresses: &[SocketAddr], until: Instant) -> std::io::Result<Timed> {
        let mut connected = Err(ErrorKind::AddrNotAvailable.into());
        for (tried, address) in addresses.iter().enumerate() {
            // One that drops what comes leaves the others their share.
            let share = left(until)? / (addresses.len() - tried) as u32;
            connected = TcpStream::connect_timeout(address, share);
            if connected.is_ok() {
                break;
            }
        }
        let stream = connected?;
        stream.set_nodelay(true)?;
        Ok(Timed { stream, until })
    }
}

impl Read for Timed {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        self.stream.set_read_timeout(Some(left(self.until)?))?;
        self.stream.read(bytes)
    }
}

impl Write for Timed {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.stream.set_write_timeout(Some(left(self.until)?))?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.stream.flush()
    }
}

/// The time that is left, if any is.
fn left(until: Instant) -> std::io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

fn answer(stream: &mut impl Read, method: Method) -> std::io::Result<(u16, Vec<u8>)> {
    let mut decoder =
        ResponseDecoder::new(method, Limits { body: DRAIN_ANSWER_MAX, ..Limits::default() });
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
                Some(Event::Head(head)) => status = head.status,
                Some(Event::Body(piece)) => body.extend_from_slice(piece),
                Some(Event::End { .. }) => return Ok((status, body)),
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
