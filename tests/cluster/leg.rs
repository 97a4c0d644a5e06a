//! A request whose answer is read piece by piece.

use crate::process::PATIENCE;
use serde_json::Value;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};

/// One leg's connection.
pub struct Leg {
    stream: TcpStream,
    answer: Vec<u8>,
}

impl Leg {
    /// `fields` are whole header lines.
    pub fn open(address: SocketAddr, path: &str, fields: &str, body: &Value) -> Leg {
        let body = body.to_string();
        let head = format!("POST {path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\n{fields}content-length:");
        let mut stream = TcpStream::connect(address).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(format!("{head} {}\r\n\r\n{body}", body.len()).as_bytes()).unwrap();
        Leg { stream, answer: Vec::new() }
    }

    #[track_caller]
    pub fn await_words(&mut self, words: &str) {
        while !String::from_utf8_lossy(&self.answer).contains(words) {
            assert!(self.read(), "ended before {words}: {}", String::from_utf8_lossy(&self.answer));
        }
    }

    /// Waits for so many events.
    #[track_caller]
    pub fn await_events(&mut self, count: usize) {
        while self.answer.windows(6).filter(|bytes| bytes == b"data: ").count() < count {
            assert!(self.read(), "ended before {count} events: {}", String::from_utf8_lossy(&self.answer));
        }
    }

    /// Its whole answer; a leg that does not end is a failure.
    #[track_caller]
    pub fn end(mut self) -> String {
        while self.read() {}
        String::from_utf8_lossy(&self.answer).into_owned()
    }

    #[track_caller]
    fn read(&mut self) -> bool {
        let mut bytes = [0; 4096];
        match self.stream.read(&mut bytes) {
            Ok(count) => {
                self.answer.extend_from_slice(&bytes[..count]);
                count > 0
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                panic!("the leg hangs after: {}", String::from_utf8_lossy(&self.answer))
            }
            // Its process was killed.
            Err(_) => false,
        }
    }
}
