//! The client's side of HTTP, for the router and the registry client. It writes requests, reads
//! responses, and returns the pieces of a body as they arrive.
//!
//! Owns: the response being received. Invariants: a response belongs to one request; informational
//! heads before it are skipped. Body pieces are borrowed from the input, never stored. After an
//! error the decoder only repeats it. Not here: connections and deadlines.

use super::body::{Body, Framing};
use super::head::{self, FirstLine, Gather};
use super::response::write_field;
use super::{Headers, HttpError, HttpLimits, Method, Version};
use std::io::Write;

/// The head of a request, as a client writes it.
#[derive(Clone, Copy, Debug)]
pub struct RequestLine<'a> {
    /// The method.
    pub method: Method,
    /// Path and query. Characters that are not allowed there are escaped.
    pub target: &'a str,
    /// Value of the Host field.
    pub host: &'a str,
}

/// Appends a request to `out`. A body is sent unchanged, with its length.
pub fn write_request(
    out: &mut Vec<u8>,
    line: RequestLine<'_>,
    headers: &[(&str, &str)],
    body: Option<&[u8]>,
) {
    let _ = write!(out, "{} ", line.method.as_str());
    for byte in line.target.bytes() {
        match byte {
            b'!'..=b'~' => out.push(byte),
            _ => {
                let _ = write!(out, "%{byte:02X}");
            }
        }
    }
    out.extend_from_slice(b" HTTP/1.1\r\n");
    write_field(out, "host", line.host);
    for (name, value) in headers {
        write_field(out, name, value);
    }
    if let Some(body) = body {
        let _ = write!(out, "content-length: {}\r\n", body.len());
    }
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(body.unwrap_or_default());
}

/// A response without its body.
#[derive(Clone, Debug)]
pub struct ResponseHead {
    /// 200 to 599.
    pub status: u16,
    /// The server's version.
    pub version: Version,
    /// All header fields.
    pub headers: Headers,
}

/// An event of a response.
#[derive(Debug)]
pub enum ResponseEvent<'a> {
    /// The response begins.
    Head(ResponseHead),
    /// A piece of its body, without framing.
    Body(&'a [u8]),
    /// The response is complete.
    End {
        /// Whether the connection can carry another request.
        keep_alive: bool,
    },
}

/// Reads the response to one request.
#[derive(Debug)]
pub struct ResponseDecoder {
    limits: HttpLimits,
    gather: Gather,
    /// Whether the request was HEAD.
    bodyless: bool,
    /// Whether [`super::response::PROCESSING`] has arrived and the caller does not know it yet.
    processing: bool,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Head,
    Body { body: Body, keep_alive: bool },
    Ended,
    Failed(HttpError),
}

impl ResponseDecoder {
    /// A decoder for the response to a request with `method`.
    pub fn new(method: Method, limits: HttpLimits) -> Self {
        Self {
            limits,
            gather: Gather::new(limits.head),
            bodyless: method == Method::Head,
            processing: false,
            stage: Stage::Head,
        }
    }

    /// Reads `input` up to the next event. Returns the number of bytes read, and the event. Call it
    /// again with the rest until it returns no event. Then all input was read, or the response has
    /// ended.
    pub fn read<'a>(
        &mut self,
        input: &'a [u8],
    ) -> Result<(usize, Option<ResponseEvent<'a>>), HttpError> {
        let result = match self.stage {
            Stage::Head => self.read_head(input),
            Stage::Body { .. } => self.read_body(input),
            Stage::Ended => Ok((0, None)),
            Stage::Failed(error) => Err(error),
        };
        if let Err(error) = result {
            self.stage = Stage::Failed(error);
        }
        result
    }

    /// Whether the server has sent [`super::response::PROCESSING`] since the last call.
    pub fn take_processing(&mut self) -> bool {
        std::mem::take(&mut self.processing)
    }

    /// Handles the server's end of the connection. It ends a body that has no other delimiter;
    /// otherwise it is an error.
    pub fn close(&mut self) -> Result<Option<ResponseEvent<'static>>, HttpError> {
        match std::mem::replace(&mut self.stage, Stage::Ended) {
            Stage::Body { body, .. } if body.is_done() || body.ends_with_connection() => {
                Ok(Some(ResponseEvent::End { keep_alive: false }))
            }
            Stage::Ended => Ok(None),
            Stage::Failed(error) => Err(error),
            Stage::Head | Stage::Body { .. } => {
                self.stage = Stage::Failed(HttpError::Truncated);
                Err(HttpError::Truncated)
            }
        }
    }

    fn read_head<'a>(
        &mut self,
        input: &'a [u8],
    ) -> Result<(usize, Option<ResponseEvent<'a>>), HttpError> {
        let mut used = 0;
        loop {
            let (taken, bytes) = self.gather.read(&input[used..])?;
            used += taken;
            let Some(bytes) = bytes else { return Ok((used, None)) };
            let (line, headers) = head::parse::<StatusLine>(bytes, self.limits.headers)?;
            match line.status {
                102 => self.processing = true,
                // 100 Continue and 103 Early Hints: the response is still to come.
                100 | 103..200 => {}
                200..600 => {
                    let version = Version::from_minor(line.minor);
                    self.stage = self.body_of(line.status, version, &headers)?;
                    let head = ResponseHead { status: line.status, version, headers };
                    return Ok((used, Some(ResponseEvent::Head(head))));
                }
                _ => return Err(HttpError::Malformed("an unexpected status")),
            }
        }
    }

    fn read_body<'a>(
        &mut self,
        input: &'a [u8],
    ) -> Result<(usize, Option<ResponseEvent<'a>>), HttpError> {
        let Stage::Body { body, keep_alive } = &mut self.stage else { return Ok((0, None)) };
        let (used, data) = body.read(input)?;
        let piece = &input[data];
        if !piece.is_empty() {
            return Ok((used, Some(ResponseEvent::Body(piece))));
        }
        if !body.is_done() {
            return Ok((used, None));
        }
        let keep_alive = *keep_alive;
        self.stage = Stage::Ended;
        Ok((used, Some(ResponseEvent::End { keep_alive })))
    }

    fn body_of(
        &self,
        status: u16,
        version: Version,
        headers: &Headers,
    ) -> Result<Stage, HttpError> {
        let framing = headers.framing(version)?.unwrap_or(Framing::UntilClose);
        let keep_alive = headers.keep_alive(version);
        if self.bodyless || matches!(status, 204 | 304) {
            return Ok(Stage::Body { body: Body::none(), keep_alive });
        }
        let body = Body::new(framing, self.limits.body)?;
        let keep_alive = keep_alive && framing != Framing::UntilClose;
        Ok(Stage::Body { body, keep_alive })
    }
}

struct StatusLine {
    status: u16,
    minor: u8,
}

impl FirstLine for StatusLine {
    fn parse<'t>(
        text: &'t str,
        slots: &mut [httparse::Header<'t>],
    ) -> Result<(Option<usize>, Self, usize), httparse::Error> {
        let mut response = httparse::Response::new(slots);
        let status = response.parse(text.as_bytes())?;
        let line = Self {
            status: response.code.unwrap_or_default(),
            minor: response.version.unwrap_or_default(),
        };
        let count = response.headers.len();
        Ok((head::end_of(status), line, count))
    }
}

#[cfg(test)]
mod tests {
    use super::super::request::RequestDecoder;
    use super::*;
    use proptest::prelude::*;

    const LIMITS: HttpLimits = HttpLimits { head: 256, headers: 8, body: 64 };

    #[derive(Default, PartialEq, Debug)]
    struct Seen {
        status: Option<u16>,
        body: Vec<u8>,
        /// Keep-alive at the end.
        end: Option<bool>,
        error: Option<HttpError>,
        left: usize,
    }

    impl Seen {
        fn apply(&mut self, event: ResponseEvent<'_>) {
            match event {
                ResponseEvent::Head(head) => self.status = Some(head.status),
                ResponseEvent::Body(piece) => self.body.extend_from_slice(piece),
                ResponseEvent::End { keep_alive } => self.end = Some(keep_alive),
            }
        }
    }

    /// Feeds `bytes` in pieces of `step`, then closes the connection.
    fn decode(method: Method, bytes: &[u8], step: usize) -> Seen {
        let mut decoder = ResponseDecoder::new(method, LIMITS);
        let mut seen = Seen::default();
        for piece in bytes.chunks(step) {
            let mut rest = piece;
            loop {
                match decoder.read(rest) {
                    Ok((used, event)) => {
                        rest = &rest[used..];
                        match event {
                            Some(event) => seen.apply(event),
                            None => break,
                        }
                    }
                    Err(error) => return Seen { error: Some(error), ..seen },
                }
            }
            seen.left += rest.len();
        }
        match decoder.close() {
            Ok(Some(event)) => seen.apply(event),
            Ok(None) => {}
            Err(error) => seen.error = Some(error),
        }
        seen
    }

    fn whole(status: u16, body: &[u8], keep_alive: bool) -> Seen {
        Seen { status: Some(status), body: body.to_vec(), end: Some(keep_alive), ..Seen::default() }
    }

    #[test]
    fn reads_answers_of_all_framings_in_any_pieces() {
        let get = Method::Get;
        for (method, bytes, expected) in [
            (get, "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", whole(200, b"hello", true)),
            (
                get,
                "HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
                whole(200, b"", false),
            ),
            (
                get,
                "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\na: b\r\n\r\nHTTP/1.1 503 No\r\n\
                 transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
                whole(503, b"hello", true),
            ),
            (get, "HTTP/1.1 200 OK\r\n\r\nuntil the end", whole(200, b"until the end", false)),
            (
                get,
                "HTTP/1.0 200 OK\r\nconnection: keep-alive\r\n\r\nhello",
                whole(200, b"hello", false),
            ),
            (get, "HTTP/1.1 204 No Content\r\n\r\n", whole(204, b"", true)),
            (Method::Head, "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", whole(200, b"", true)),
            (
                get,
                "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhiHTTP",
                Seen { left: 4, ..whole(200, b"hi", true) },
            ),
        ] {
            for step in 1..=bytes.len() {
                assert_eq!(
                    decode(method, bytes.as_bytes(), step),
                    expected,
                    "{bytes:?} in pieces of {step}"
                );
            }
        }
    }

    #[test]
    fn truncated_malformed_and_too_large_responses_are_refused() {
        for (bytes, expected) in [
            ("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhell", HttpError::Truncated),
            (
                "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
                HttpError::Truncated,
            ),
            ("HTTP/1.1 200 O", HttpError::Truncated),
            ("", HttpError::Truncated),
            ("HTTP/2 200 OK\r\n\r\n", HttpError::Version),
            ("SSH-2.0-x\r\n\r\n", HttpError::Malformed("the first line")),
            ("HTTP/1.1 101 Up\r\n\r\n", HttpError::Malformed("an unexpected status")),
            (
                "HTTP/1.1 200 OK\r\ncontent-length: 65\r\n\r\n",
                HttpError::BodyTooLarge { limit: 64 },
            ),
            (
                "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
                HttpError::Malformed("both Content-Length and Transfer-Encoding"),
            ),
        ] {
            for step in [1, 7, usize::MAX] {
                assert_eq!(
                    decode(Method::Get, bytes.as_bytes(), step).error,
                    Some(expected),
                    "{bytes:?}"
                );
            }
        }
        let long = format!("HTTP/1.1 200 OK\r\n\r\n{}", "a".repeat(65));
        assert_eq!(
            decode(Method::Get, long.as_bytes(), 10).error,
            Some(HttpError::BodyTooLarge { limit: 64 })
        );
    }

    #[test]
    fn the_server_reads_the_requests_that_the_client_writes() {
        let mut out = Vec::new();
        let line =
            RequestLine { method: Method::Post, target: "/ä b?c=d\r\nx: y", host: "h:1\r\nz: w" };
        write_request(&mut out, line, &[("x-request-id", "r\n1")], Some(b"{}"));
        let (used, request) = RequestDecoder::new(HttpLimits::default()).read(&out).unwrap();
        let request = request.unwrap();
        assert_eq!(used, out.len());
        assert_eq!(request.head.path(), "/%C3%A4%20b");
        assert_eq!(request.head.query(), "c=d%0D%0Ax:%20y");
        let fields: Vec<_> = request.head.headers.iter().collect();
        assert_eq!(
            fields,
            [("host", "h:1__z: w"), ("x-request-id", "r_1"), ("content-length", "2")]
        );
        assert_eq!(request.body, b"{}");
    }

    proptest! {
        #[test]
        fn any_bytes_give_the_same_in_any_pieces(
            bytes in prop_oneof![
                prop::collection::vec(any::<u8>(), 0..200),
                "HTTP/1.[01] [1-5]0[0-4] OK\r\n(content-length: [0-9]{1,2}\r\n){0,2}\
                 (transfer-encoding: chunked\r\n)?(connection: close\r\n)?\r\n\
                 ([0-9a-f]\r\n[a-z]{0,12}\r\n){0,3}(0\r\n\r\n)?.{0,40}"
                    .prop_map(String::into_bytes),
            ],
            step in 1usize..50,
        ) {
            let (a, b) =
                (decode(Method::Get, &bytes, step), decode(Method::Get, &bytes, usize::MAX));
            // The size of the pieces decides how much of a body is returned before an error, but
            // not its bytes.
            prop_assert!(a.body.starts_with(&b.body) || b.body.starts_with(&a.body));
            prop_assert_eq!((a.status, a.end, a.error), (b.status, b.end, b.error));
        }
    }
}
