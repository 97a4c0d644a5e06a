//! A test client over one socket, which uses the project's own HTTP/1.1 decoder.

use baton::http::client::{
    RequestLine, ResponseDecoder, ResponseEvent, ResponseHead, write_request,
};
use baton::http::sse::EventReader;
use baton::http::{HttpLimits, Method};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Longer than any answer takes, so that a hanging test fails.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A whole response.
#[derive(Debug)]
pub struct Reply {
    pub head: ResponseHead,
    pub body: Vec<u8>,
    pub keep_alive: bool,
}

impl Reply {
    pub fn status(&self) -> u16 {
        self.head.status
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// The body of a response with status 200.
    #[track_caller]
    pub fn ok(&self) -> Value {
        assert_eq!(self.status(), 200, "{}", self.text());
        self.json()
    }

    /// The data of all events in a stream, without the final `[DONE]`.
    #[track_caller]
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.status(), 200, "{}", self.text());
        assert_eq!(self.head.headers.get("content-type"), Some("text/event-stream"));
        let (mut reader, mut rest, mut events) =
            (EventReader::default(), &self.body[..], Vec::new());
        while let (used, Some(data)) = reader.read(rest).unwrap() {
            rest = &rest[used..];
            events.push(String::from_utf8(data).unwrap());
        }
        assert_eq!(events.pop().as_deref(), Some("[DONE]"), "{}", self.text());
        events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }

    /// Status, and the error's `code` and `param`.
    pub fn error(&self) -> (u16, String, Option<String>) {
        let error = &self.json()["error"];
        let text = |name: &str| error[name].as_str().map(str::to_owned);
        assert!(text("message").is_some_and(|message| !message.is_empty()), "{}", self.text());
        assert!(text("type").is_some(), "{}", self.text());
        (self.status(), text("code").unwrap(), text("param"))
    }
}

/// One connection.
pub struct Client {
    pub stream: TcpStream,
    input: Vec<u8>,
}

impl Client {
    pub fn new(address: SocketAddr) -> Client {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        Client { stream, input: Vec::new() }
    }

    /// Sends raw bytes. Returns whether the server still accepted them.
    pub fn raw(&mut self, bytes: &[u8]) -> bool {
        self.stream.write_all(bytes).is_ok()
    }

    pub fn send(
        &mut self,
        method: Method,
        target: &str,
        headers: &[(&str, &str)],
        body: Option<&[u8]>,
    ) {
        let mut out = Vec::new();
        write_request(&mut out, RequestLine { method, target, host: "localhost" }, headers, body);
        assert!(self.raw(&out), "the server closed the connection");
    }

    pub fn post(&mut self, target: &str, body: &Value) {
        self.send(Method::Post, target, &[], Some(body.to_string().as_bytes()));
    }

    /// The next response on this connection; `None` if the connection ends first.
    pub fn try_reply(&mut self, method: Method) -> Option<Reply> {
        let mut decoder = ResponseDecoder::new(method, HttpLimits::default());
        let (mut head, mut body) = (None, Vec::new());
        loop {
            let (used, event) = decoder.read(&self.input).unwrap();
            let ended = match event {
                Some(ResponseEvent::Head(found)) => {
                    head = Some(found);
                    None
                }
                Some(ResponseEvent::Body(piece)) => {
                    body.extend_from_slice(piece);
                    None
                }
                Some(ResponseEvent::End { keep_alive }) => Some(keep_alive),
                None => {
                    self.input.drain(..used);
                    if !self.fill() {
                        return None;
                    }
                    continue;
                }
            };
            self.input.drain(..used);
            if let Some(keep_alive) = ended {
                return Some(Reply { head: head.unwrap(), body, keep_alive });
            }
        }
    }

    #[track_caller]
    pub fn reply(&mut self, method: Method) -> Reply {
        self.try_reply(method).expect("an answer")
    }

    /// Reads until `needle` arrives. The bytes stay available for [`Client::reply`].
    #[track_caller]
    pub fn wait_for(&mut self, needle: &str) {
        while !self.input.windows(needle.len()).any(|window| window == needle.as_bytes()) {
            let open = self.fill();
            assert!(open, "closed before {needle}: {}", String::from_utf8_lossy(&self.input));
        }
    }

    /// Whether a part of an answer is there. Does not wait.
    pub fn has_bytes(&mut self) -> bool {
        self.stream.set_nonblocking(true).unwrap();
        let is_there = self.stream.peek(&mut [0]).is_ok();
        self.stream.set_nonblocking(false).unwrap();
        is_there || !self.input.is_empty()
    }

    /// Reads until the server closes, with or without a last response. Returns what it sent.
    pub fn until_closed(&mut self) -> Vec<u8> {
        while self.fill() {}
        std::mem::take(&mut self.input)
    }

    fn fill(&mut self) -> bool {
        let mut bytes = [0; 16 << 10];
        match self.stream.read(&mut bytes) {
            Ok(0) => false,
            Ok(count) => {
                self.input.extend_from_slice(&bytes[..count]);
                true
            }
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => false,
            Err(error) => panic!("no answer: {error}"),
        }
    }
}
