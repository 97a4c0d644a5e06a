//! What a host can take part in: told by whoever listens for a bench, asked for by whoever connects to it and by
//! `baton doctor --peer`.

use super::talk::{LINE_MAX, Say};
use crate::role::host_id;
use crate::transfer::transport::rdma::Nic;
use serde::{Deserialize, Serialize};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// Who listens and measures nothing answers at once; somebody asks at a terminal.
const PATIENCE: Duration = Duration::from_secs(5);

/// Characters of nonsense that are shown.
const SHOWN: usize = 60;

/// One host's answer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Survey {
    /// Of the program.
    pub version: String,
    /// Equal where memory can be shared.
    pub host: String,
    /// The NICs that sessions would use, for people, or why there are none.
    pub nics: Result<String, String>,
}

impl Survey {
    /// Of this host.
    pub fn here() -> Survey {
        Survey {
            version: env!("CARGO_PKG_VERSION").into(),
            host: format!("{:?}", host_id()),
            nics: Nic::choose(&[], &[]).map(|nics| Nic::list(&nics)),
        }
    }

    /// Of the host where `baton bench transfer --listen` is at `peer`, HOST:PORT; also the address that answered.
    ///
    /// # Errors
    /// Nobody answers there, or something else does.
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
        let mut line = serde_json::to_vec(&Say::Survey).expect("only strings are keys");
        line.push(b'\n');
        stream.write_all(&line).map_err(text)?;
        let line = line_of(&mut stream).map_err(|why| match speaks_http(address) {
            true => "HTTP is spoken there, as by a worker or router, and no bench listens".into(),
            false => why,
        })?;
        match serde_json::from_slice(&line) {
            Ok(Say::Surveyed(survey)) => Ok((survey, address)),
            Ok(Say::Failed { why }) => Err(why),
            _ if line.is_empty() => Err("it hangs up without a word".into()),
            _ => {
                let said: String = String::from_utf8_lossy(&line).chars().take(SHOWN).collect();
                Err(format!("it says {said:?}"))
            }
        }
    }
}

/// Whether it answers to HTTP, once it has said nothing to anything else.
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

/// What it says first, however slowly: a line, or less where it hangs up or the line has no end.
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
