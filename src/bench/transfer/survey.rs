//! What a host can take part in: told by whoever listens for a bench, asked for by `baton doctor --peer`.

use super::talk::{LINE_MAX, Say};
use crate::role::host_id;
use crate::transfer::transport::rdma::Nic;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

/// Who listens and measures nothing answers at once; somebody asks at a terminal.
const PATIENCE: Duration = Duration::from_secs(5);

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

    /// Of the host where `baton bench transfer --listen` is at `peer`, HOST:PORT.
    ///
    /// # Errors
    /// Nobody answers there, or something else does.
    pub fn ask(peer: &str) -> Result<Survey, String> {
        let text = |error: std::io::Error| error.to_string();
        let mut connected = Err("the name has no address".to_string());
        for address in peer.to_socket_addrs().map_err(text)? {
            connected = TcpStream::connect_timeout(&address, PATIENCE).map_err(text);
            if connected.is_ok() {
                break;
            }
        }
        let mut stream = connected?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(text)?;
        let mut line = serde_json::to_vec(&Say::Survey).expect("only strings are keys");
        line.push(b'\n');
        stream.write_all(&line).map_err(text)?;
        let mut line = String::new();
        let read = BufReader::new(stream.take(LINE_MAX as u64)).read_line(&mut line);
        read.map_err(|error| match error.kind() {
            ErrorKind::WouldBlock => {
                format!("no answer within {} s; it may be measuring", PATIENCE.as_secs())
            }
            _ => error.to_string(),
        })?;
        match serde_json::from_str(&line) {
            Ok(Say::Surveyed(survey)) => Ok(survey),
            Ok(Say::Failed { why }) => Err(why),
            _ => Err("what listens there is no baton bench transfer of this version".into()),
        }
    }
}
