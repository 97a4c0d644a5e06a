//! The survey of a host: the transports that it supports. A `--listen` process sends it to the
//! process that connects and to `baton doctor --peer`.

use super::talk::{BenchMessage, LINE_MAX, Survey};
use crate::transfer::manager::identity::host_id;
use crate::transfer::transport::rdma::Nic;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// Maximum time for an answer. An idle `--listen` process answers at once, and a user waits for the
/// result.
const PATIENCE: Duration = Duration::from_secs(5);

/// Maximum characters of an invalid answer in an error message.
const SHOWN: usize = 60;

impl Survey {
    /// The survey of this host.
    pub fn here() -> Survey {
        Survey {
            version: env!("CARGO_PKG_VERSION").into(),
            host: format!("{:?}", host_id()),
            nics: Nic::choose(&[], &[]).map(|nics| Nic::list(&nics)),
        }
    }

    /// Asks the `baton bench transfer --listen` process at `peer`, HOST:PORT. Also returns the
    /// address that answered.
    ///
    /// # Errors
    /// There is no answer, or another program answers.
    pub fn ask(peer: &str) -> Result<(Survey, SocketAddr), String> {
        let text = |error: std::io::Error| error.to_string();
        let mut connected = Err("the name has no address".to_string());
        for address in peer.to_socket_addrs().map_err(text)? {
            connected = TcpStream::connect_timeout(&address, PATIENCE).map_err(text);
            if connected.is_ok() {
                break;
            }
        }
        let mut stream = connected?;
        let address = stream.peer_addr().map_err(text)?;
        let mut line = serde_json::to_vec(&BenchMessage::Survey).expect("all keys are strings");
        line.push(b'\n');
        stream.write_all(&line).map_err(text)?;
        let line = line_of(&mut stream).map_err(|why| match speaks_http(address) {
            true => "an HTTP server is there, such as a worker or router, and no bench".into(),
            false => why,
        })?;
        match serde_json::from_slice(&line) {
            Ok(BenchMessage::Surveyed(survey)) => Ok((survey, address)),
            Ok(BenchMessage::Failed { why }) => Err(why),
            _ if line.is_empty() => Err("it closed the connection without an answer".into()),
            _ => {
                let said: String = String::from_utf8_lossy(&line).chars().take(SHOWN).collect();
                Err(format!("it answered {said:?}"))
            }
        }
    }
}

/// Whether an HTTP server is at this address. Called after a failed survey.
fn speaks_http(address: SocketAddr) -> bool {
    let asked = TcpStream::connect_timeout(&address, PATIENCE).and_then(|mut stream| {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(b"GET /health HTTP/1.1\r\nhost: baton\r\nconnection: close\r\n\r\n")?;
        let mut first = [0; 5];
        stream.read_exact(&mut first)?;
        Ok(&first == b"HTTP/")
    });
    asked.unwrap_or(false)
}

/// Reads a line within the time limit. It is incomplete if the connection closes or the line is too
/// long.
fn line_of(stream: &mut TcpStream) -> Result<Vec<u8>, String> {
    let until = Instant::now() + PATIENCE;
    let (mut line, mut part) = (Vec::new(), [0; 4096]);
    while line.len() < LINE_MAX && !line.contains(&b'\n') {
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        stream.set_read_timeout(Some(left)).map_err(|error| error.to_string())?;
        match stream.read(&mut part) {
            Ok(0) => break,
            Ok(bytes) => line.extend_from_slice(&part[..bytes]),
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => return Err(error.to_string()),
        }
        if Instant::now() > until {
            return Err(format!("no answer within {} s; it may be measuring", PATIENCE.as_secs()));
        }
    }
    Ok(line)
}
