//! The server's writer: heads, whole bodies and streams, appended to a buffer.
//!
//! Owns: the form of a response. Invariant: no header value can end its line, whatever it contains.
//! Not here: when the buffer is sent.

use super::Version;
use std::io::Write;

/// The interim response for a client that sent `Expect: 100-continue`.
pub const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// The interim response before a response that is sent as a whole. It tells the client that the
/// server works on the response.
pub const PROCESSING: &[u8] = b"HTTP/1.1 102 Processing\r\n\r\n";

/// The properties that determine the form of a response.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Exchange {
    /// The client's version.
    pub version: Version,
    /// Whether the connection stays open after the response.
    pub keep_alive: bool,
    /// Whether the response has no body (HEAD).
    pub bodyless: bool,
}

impl Exchange {
    /// For the last response on a connection: after an error, or while draining.
    pub fn last() -> Self {
        Self { version: Version::Http11, keep_alive: false, bodyless: false }
    }
}

/// Writes one response, head first.
#[derive(Debug)]
#[must_use = "a response ends with `body` or `stream`"]
pub struct ResponseWriter<'a> {
    out: &'a mut Vec<u8>,
    exchange: Exchange,
}

impl<'a> ResponseWriter<'a> {
    /// Begins a response at the end of `out`.
    pub fn new(out: &'a mut Vec<u8>, exchange: Exchange, status: u16) -> Self {
        let _ = write!(out, "HTTP/1.1 {status} {}\r\n", reason(status));
        Self { out, exchange }
    }

    /// Adds a header field.
    pub fn header(self, name: &'static str, value: &str) -> Self {
        write_field(self.out, name, value);
        self
    }

    /// Adds `Retry-After`: the seconds that a refused client should wait.
    pub fn retry_after(self, seconds: u32) -> Self {
        let _ = write!(self.out, "retry-after: {seconds}\r\n");
        self
    }

    /// Ends the head and writes the whole body.
    pub fn body(mut self, content_type: &str, body: &[u8]) {
        write_field(self.out, "content-type", content_type);
        let _ = write!(self.out, "content-length: {}\r\n", body.len());
        self.end_head(self.exchange.keep_alive);
        if !self.exchange.bodyless {
            self.out.extend_from_slice(body);
        }
    }

    /// Ends the head of a body with unknown length.
    pub fn stream(mut self, content_type: &str) -> BodyStream {
        write_field(self.out, "content-type", content_type);
        self.out.extend_from_slice(b"cache-control: no-cache\r\n");
        let stream = match self.exchange {
            Exchange { bodyless: true, .. } => BodyStream::Nothing,
            Exchange { version: Version::Http10, .. } => BodyStream::UntilClose,
            Exchange { version: Version::Http11, .. } => BodyStream::Chunked,
        };
        if stream == BodyStream::Chunked {
            self.out.extend_from_slice(b"transfer-encoding: chunked\r\n");
        }
        self.end_head(self.exchange.keep_alive && stream != BodyStream::UntilClose);
        stream
    }

    fn end_head(&mut self, keep_alive: bool) {
        let connection: &[u8] = match (self.exchange.version, keep_alive) {
            (Version::Http11, true) => b"\r\n",
            (Version::Http10, true) => b"connection: keep-alive\r\n\r\n",
            (_, false) => b"connection: close\r\n\r\n",
        };
        self.out.extend_from_slice(connection);
    }
}

/// How the pieces of a streamed body are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BodyStream {
    /// Each piece as a chunk.
    Chunked,
    /// Unchanged; closing the connection ends the body (HTTP/1.0).
    UntilClose,
    /// Nothing is written (HEAD).
    Nothing,
}

impl BodyStream {
    /// Appends one piece.
    pub fn write(self, out: &mut Vec<u8>, piece: &[u8]) {
        match self {
            // An empty chunk would end the body.
            Self::Chunked if piece.is_empty() => {}
            Self::Chunked => {
                let _ = write!(out, "{:x}\r\n", piece.len());
                out.extend_from_slice(piece);
                out.extend_from_slice(b"\r\n");
            }
            Self::UntilClose => out.extend_from_slice(piece),
            Self::Nothing => {}
        }
    }

    /// Appends the end of the body.
    pub fn end(self, out: &mut Vec<u8>) {
        if self == Self::Chunked {
            out.extend_from_slice(b"0\r\n\r\n");
        }
    }

    /// Whether the connection must be closed to end the body.
    pub fn must_close(self) -> bool {
        self == Self::UntilClose
    }
}

/// Appends `name: value`. Characters that are not allowed in a value become `_`.
pub(super) fn write_field(out: &mut Vec<u8>, name: &str, value: &str) {
    debug_assert!(!name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-'));
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b": ");
    out.extend(value.bytes().map(|b| if b == b'\t' || (b >= b' ' && b != 127) { b } else { b'_' }));
    out.extend_from_slice(b"\r\n");
}

/// The reason phrase of a status.
fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        202 => "Accepted",
        204 => "No Content",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        409 => "Conflict",
        413 => "Content Too Large",
        415 => "Unsupported Media Type",
        417 => "Expectation Failed",
        422 => "Unprocessable Content",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        505 => "HTTP Version Not Supported",
        _ => "Unknown",
    }
}

/// Media type of most responses.
pub const JSON: &str = "application/json";

/// A whole response.
#[derive(Clone, Copy, Debug)]
pub struct Response<'a> {
    /// HTTP status.
    pub status: u16,
    /// Media type.
    pub media: &'a str,
    /// The body.
    pub body: &'a [u8],
    /// Seconds after which a retry makes sense.
    pub retry_after: Option<u32>,
}

impl<'a> Response<'a> {
    /// 200 with a JSON body.
    pub fn json(body: &'a [u8]) -> Response<'a> {
        Response { status: 200, media: JSON, body, retry_after: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(out: Vec<u8>) -> String {
        String::from_utf8(out).unwrap()
    }

    fn exchange(version: Version, keep_alive: bool) -> Exchange {
        Exchange { version, keep_alive, bodyless: false }
    }

    #[test]
    fn writes_whole_answers() {
        let mut out = Vec::new();
        ResponseWriter::new(&mut out, exchange(Version::Http11, true), 429)
            .header("x-request-id", "r1")
            .retry_after(2)
            .body("application/json", b"{}");
        assert_eq!(
            text(out),
            "HTTP/1.1 429 Too Many Requests\r\nx-request-id: r1\r\nretry-after: 2\r\n\
             content-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
        );
    }

    #[test]
    fn the_form_follows_the_client() {
        let stream = |exchange| {
            let mut out = Vec::new();
            let stream = ResponseWriter::new(&mut out, exchange, 200).stream("text/event-stream");
            stream.write(&mut out, b"hello, world");
            stream.write(&mut out, b"");
            stream.end(&mut out);
            (text(out), stream.must_close())
        };
        let head =
            "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n";
        assert_eq!(
            stream(exchange(Version::Http11, true)),
            (
                format!("{head}transfer-encoding: chunked\r\n\r\nc\r\nhello, world\r\n0\r\n\r\n"),
                false
            )
        );
        assert_eq!(
            stream(exchange(Version::Http10, true)),
            (format!("{head}connection: close\r\n\r\nhello, world"), true)
        );
        let bodyless = Exchange { bodyless: true, ..Exchange::last() };
        assert_eq!(stream(bodyless), (format!("{head}connection: close\r\n\r\n"), false));

        let mut out = Vec::new();
        ResponseWriter::new(&mut out, exchange(Version::Http10, true), 200)
            .body("text/plain", b"OK");
        assert!(text(out).ends_with("content-length: 2\r\nconnection: keep-alive\r\n\r\nOK"));
        let mut out = Vec::new();
        ResponseWriter::new(&mut out, bodyless, 200).body("text/plain", b"OK");
        assert!(text(out).ends_with("content-length: 2\r\nconnection: close\r\n\r\n"));
    }

    #[test]
    fn a_value_cannot_end_its_line() {
        let mut out = Vec::new();
        ResponseWriter::new(&mut out, Exchange::last(), 200)
            .header("x-request-id", "a\r\nset-cookie: b\0\x7fé\tc")
            .body("text/plain", b"");
        assert!(text(out).contains("\r\nx-request-id: a__set-cookie: b__é\tc\r\n"));
    }
}
