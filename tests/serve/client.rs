//! A client that shows what was sent: HTTP/1.1 over one socket, read by the project's own decoder.

use baton::front::http::client::{
    Event, RequestLine, ResponseDecoder, ResponseHead, write_request,
};
use baton::front::http::sse::EventReader;
use baton::front::http::{Limits, Method};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// No answer takes so long; a test that would hang fails instead.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A whole answer.
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

    /// The body of a 200.
    #[track_caller]
    pub fn ok(&self) -> Value {
        assert_eq!(self.status(), 200, "{}", self.text());
        self.json()
    }

    /// The data of the events of a stream, the last of which is `[DONE]`.
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

    /// Sends bytes as they are; whether the other side still took them.
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

    /// The next answer on this connection, `None` where it ends before.
    pub fn try_reply(&mut self, method: Method) -> Option<Reply> {
        let mut decoder = ResponseDecoder::new(method, Limits::default());
        let (mut head, mut body) = (None, Vec::new());
        loop {
            let (used, event) = decoder.read(&self.input).unwrap();
            let ended = match event {
                Some(Event::Head(found)) => {
                    head = Some(found);
                    None
                }
                Some(Event::Body(piece)) => {
                    body.extend_from_slice(piece);
                    None
                }
                Some(Event::End { keep_alive }) => Some(keep_alive),
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

    /// Reads until the bytes received hold `needle`; they stay for [`Client::reply`].
    #[track_caller]
    pub fn wait_for(&mut self, needle: &str) {
        while !self.input.windows(needle.len()).any(|window| window == needle.as_bytes()) {
            let open = self.fill();
            assert!(open, "closed before {needle}: {}", String::from_utf8_lossy(&self.input));
        }
    }

    /// Whether the server closes, with or without a last answer; what it sent.
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
