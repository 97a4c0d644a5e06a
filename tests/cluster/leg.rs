//! A request with an answer that the test reads in pieces.

use crate::network;
use crate::process::PATIENCE;
use serde_json::Value;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// The connection of one leg.
pub struct Leg {
    stream: TcpStream,
    answer: Vec<u8>,
}

impl Leg {
    /// `fields` are complete header lines.
    pub fn open(address: SocketAddr, path: &str, fields: &str, body: &Value) -> Leg {
        let body = body.to_string();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\n{fields}content-length:"
        );
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

    /// Waits for this many events.
    #[track_caller]
    pub fn await_events(&mut self, count: usize) {
        let is_there = self.has_events(count);
        assert!(is_there, "ended before {count} events: {}", String::from_utf8_lossy(&self.answer));
    }

    /// Waits for this many events. False if the stream ends before.
    #[track_caller]
    pub fn has_events(&mut self, count: usize) -> bool {
        while self.answer.windows(6).filter(|bytes| bytes == b"data: ").count() < count {
            if !self.read() {
                return false;
            }
        }
        true
    }

    /// Reads what is there, at most `most` bytes. False at the end.
    #[track_caller]
    pub fn sip(&mut self, most: usize) -> bool {
        self.read_at_most(most)
    }

    /// Fails if nothing arrives for this long.
    pub fn wait_for(&self, patience: Duration) {
        self.stream.set_read_timeout(Some(patience)).unwrap();
    }

    /// Limits what the kernel buffers before it is read.
    pub fn narrow(&self) {
        network::narrow(&self.stream);
    }

    /// The complete answer. A leg that does not end is a failure.
    #[track_caller]
    pub fn end(mut self) -> String {
        while self.read() {}
        String::from_utf8_lossy(&self.answer).into_owned()
    }

    #[track_caller]
    fn read(&mut self) -> bool {
        self.read_at_most(4096)
    }

    #[track_caller]
    fn read_at_most(&mut self, most: usize) -> bool {
        let mut bytes = [0; 4096];
        let most = most.min(bytes.len());
        match self.stream.read(&mut bytes[..most]) {
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
