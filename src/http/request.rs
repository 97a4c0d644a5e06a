//! The server's reader: requests from bytes that arrive in any pieces.
//!
//! Owns: the request being received. Invariants: bytes after its end stay with the caller, so
//! pipelined requests come one by one. Memory grows with the received bytes, not with the announced
//! length. After an error the decoder only repeats it. Not here: the client's deadlines.
//!
//! ```
//! use baton::http::{HttpLimits, Method, RequestDecoder};
//!
//! let mut decoder = RequestDecoder::new(HttpLimits::default());
//! let bytes = b"POST /generate?x=1 HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}GET /";
//! let (used, request) = decoder.read(bytes).unwrap();
//! let request = request.expect("whole");
//! assert_eq!((request.head.method, request.head.path()), (Method::Post, "/generate"));
//! assert_eq!((request.body.as_slice(), &bytes[used..]), (&b"{}"[..], &b"GET /"[..]));
//! ```

use super::body::{Body, Framing};
use super::head::{self, FirstLine, Gather};
use super::response::Exchange;
use super::{Headers, HttpError, HttpLimits, Version};
use crate::limits::HTTP_BODY_RESERVE;
use std::borrow::Cow;
use std::ops::Range;

/// Methods that a route can support.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Method {
    /// Reads.
    Get,
    /// Like GET, without the body.
    Head,
    /// Runs an action.
    Post,
    /// Stores.
    Put,
    /// Removes.
    Delete,
    /// Lists the allowed methods.
    Options,
    /// Changes.
    Patch,
}

impl Method {
    const ALL: [Self; 7] =
        [Self::Get, Self::Head, Self::Post, Self::Put, Self::Delete, Self::Options, Self::Patch];

    /// The name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Head => "HEAD",
            Self::Post => "POST",
            Self::Put => "PUT",
            Self::Delete => "DELETE",
            Self::Options => "OPTIONS",
            Self::Patch => "PATCH",
        }
    }

    fn parse(name: &str) -> Result<Self, HttpError> {
        let known = Self::ALL.into_iter().find(|method| method.as_str() == name);
        known.ok_or(HttpError::Unsupported("the request's method"))
    }
}

/// A request without its body.
#[derive(Clone, Debug)]
pub struct RequestHead {
    /// The method.
    pub method: Method,
    /// The client's version.
    pub version: Version,
    /// Whether the client wants to send more on this connection.
    pub keep_alive: bool,
    /// All header fields.
    pub headers: Headers,
    /// Path and query, as ranges of the head.
    path: Range<usize>,
    query: Range<usize>,
}

impl RequestHead {
    /// The path as sent, without the query.
    pub fn path(&self) -> &str {
        self.headers.slice(&self.path)
    }

    /// The same head with another path.
    #[must_use]
    pub fn with_path(&self, path: &str) -> RequestHead {
        let mut head = self.clone();
        head.path = head.headers.append(path);
        head
    }

    /// The path with its escapes resolved.
    pub fn unescaped_path(&self) -> Cow<'_, str> {
        unescape(self.path(), b'+')
    }

    /// The query as sent; empty if there is none.
    pub fn query(&self) -> &str {
        self.headers.slice(&self.query)
    }

    /// The query's pairs with their escapes resolved.
    pub fn query_pairs(&self) -> impl Iterator<Item = (Cow<'_, str>, Cow<'_, str>)> {
        self.query().split('&').filter(|pair| !pair.is_empty()).map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            (unescape(key, b' '), unescape(value, b' '))
        })
    }

    /// The properties of the request that determine the form of the response.
    pub fn exchange(&self) -> Exchange {
        Exchange {
            version: self.version,
            keep_alive: self.keep_alive,
            bodyless: self.method == Method::Head,
        }
    }

    fn parse(bytes: Vec<u8>, limits: &HttpLimits) -> Result<Self, HttpError> {
        let (line, headers) = head::parse::<RequestLine>(bytes, limits.headers)?;
        let method = Method::parse(headers.slice(&line.method))?;
        let version = Version::from_minor(line.minor);
        let hosts = headers.all("host").count();
        if hosts > 1 || (hosts == 0 && version == Version::Http11) {
            return Err(HttpError::Malformed("exactly one Host field is required"));
        }
        let keep_alive = headers.keep_alive(version);
        let (path, query) = split_target(headers.slice(&line.target), line.target.start);
        Ok(Self { method, version, keep_alive, headers, path, query })
    }

    /// Whether the client waits for `100 Continue` before it sends the body.
    fn expects_continue(&self) -> Result<bool, HttpError> {
        match self.headers.get("expect") {
            None => Ok(false),
            Some(value) if value.eq_ignore_ascii_case("100-continue") => {
                Ok(self.version == Version::Http11)
            }
            Some(_) => Err(HttpError::Expectation),
        }
    }
}

/// A whole request.
#[derive(Clone, Debug)]
pub struct Request {
    /// Method, target, header fields.
    pub head: RequestHead,
    /// Empty if there is none.
    pub body: Vec<u8>,
}

/// Reads the requests of one connection.
#[derive(Debug)]
pub struct RequestDecoder {
    limits: HttpLimits,
    gather: Gather,
    head: Option<RequestHead>,
    framing: Body,
    body: Vec<u8>,
    continue_due: bool,
    failed: Option<HttpError>,
}

impl RequestDecoder {
    /// A decoder for a fresh connection.
    pub fn new(limits: HttpLimits) -> Self {
        Self {
            limits,
            gather: Gather::new(limits.head),
            head: None,
            framing: Body::none(),
            body: Vec::new(),
            continue_due: false,
            failed: None,
        }
    }

    /// Reads `input`, at most up to the end of one request. Returns the number of bytes read, and
    /// the request if it is complete. If no request is returned, all of `input` was read.
    pub fn read(&mut self, input: &[u8]) -> Result<(usize, Option<Request>), HttpError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        let result = self.advance(input);
        self.failed = result.as_ref().err().copied();
        result
    }

    /// Whether the next request has not begun, so that closing the connection loses nothing.
    pub fn is_idle(&self) -> bool {
        self.gather.is_empty() && self.head.is_none()
    }

    /// The head of the request if its body is still incomplete.
    pub fn head(&self) -> Option<&RequestHead> {
        self.head.as_ref()
    }

    /// Bytes of the incomplete body.
    pub fn held(&self) -> usize {
        self.body.len()
    }

    /// Whether to send `100 Continue` now; true once per request that asks for it.
    pub fn take_continue(&mut self) -> bool {
        std::mem::take(&mut self.continue_due)
    }

    fn advance(&mut self, input: &[u8]) -> Result<(usize, Option<Request>), HttpError> {
        let mut used = 0;
        if self.head.is_none() {
            let (taken, bytes) = self.gather.read(input)?;
            let Some(bytes) = bytes else { return Ok((taken, None)) };
            used = taken;
            self.begin(RequestHead::parse(bytes, &self.limits)?)?;
        }
        while !self.framing.is_done() && used < input.len() {
            let (taken, data) = self.framing.read(&input[used..])?;
            self.body.extend_from_slice(&input[used..][data]);
            self.continue_due = false;
            used += taken;
        }
        if !self.framing.is_done() {
            return Ok((used, None));
        }
        self.continue_due = false;
        let body = std::mem::take(&mut self.body);
        Ok((used, self.head.take().map(|head| Request { head, body })))
    }

    fn begin(&mut self, head: RequestHead) -> Result<(), HttpError> {
        let framing = head.headers.framing(head.version)?;
        self.framing = match framing {
            Some(framing) => Body::new(framing, self.limits.body)?,
            None => Body::none(),
        };
        if let Some(Framing::Length(length)) = framing {
            self.body.reserve(usize::try_from(length).map_or(0, |n| n.min(HTTP_BODY_RESERVE)));
        }
        self.continue_due = head.expects_continue()?;
        self.head = Some(head);
        Ok(())
    }
}

struct RequestLine {
    method: Range<usize>,
    target: Range<usize>,
    minor: u8,
}

impl FirstLine for RequestLine {
    fn parse<'t>(
        text: &'t str,
        slots: &mut [httparse::Header<'t>],
    ) -> Result<(Option<usize>, Self, usize), httparse::Error> {
        let mut request = httparse::Request::new(slots);
        let status = request.parse(text.as_bytes())?;
        let line = Self {
            method: head::span(text, request.method.unwrap_or_default()),
            target: head::span(text, request.path.unwrap_or_default()),
            minor: request.version.unwrap_or_default(),
        };
        let count = request.headers.len();
        Ok((head::end_of(status), line, count))
    }
}

/// Path and query of a request target that begins at `start`. The authority of an absolute target
/// is dropped: this server answers for every host.
fn split_target(target: &str, start: usize) -> (Range<usize>, Range<usize>) {
    let end = start + target.len();
    let scheme = target.find("://").map_or(0, |at| at + 3);
    let path = match target.starts_with('/') {
        true => 0,
        false if scheme > 0 => {
            target[scheme..].find(['/', '?']).map_or(target.len(), |at| scheme + at)
        }
        false => 0,
    };
    match target[path..].find('?') {
        Some(mark) => (start + path..start + path + mark, start + path + mark + 1..end),
        None => (start + path..end, end..end),
    }
}

/// Resolves `%XX`, and replaces `+` by `plus`. A broken escape stays unchanged.
fn unescape(text: &str, plus: u8) -> Cow<'_, str> {
    if !text.contains(['%', '+']) {
        return Cow::Borrowed(text);
    }
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        rest = tail;
        match first {
            b'+' => bytes.push(plus),
            b'%' => {
                match tail.split_first_chunk().and_then(|(&pair, tail)| Some((hex(pair)?, tail))) {
                    Some((byte, tail)) => {
                        bytes.push(byte);
                        rest = tail;
                    }
                    None => bytes.push(b'%'),
                }
            }
            other => bytes.push(other),
        }
    }
    Cow::Owned(
        String::from_utf8(bytes)
            .unwrap_or_else(|bad| String::from_utf8_lossy(bad.as_bytes()).into_owned()),
    )
}

fn hex(pair: [u8; 2]) -> Option<u8> {
    let [high, low] = pair.map(|byte| (byte as char).to_digit(16));
    u8::try_from(high? << 4 | low?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMITS: HttpLimits = HttpLimits { head: 512, headers: 8, body: 64 };

    /// Feeds `bytes` in pieces of `step`. Returns the requests, the error, and the decoder.
    fn decode(bytes: &[u8], step: usize) -> (Vec<Request>, Option<HttpError>, RequestDecoder) {
        let mut decoder = RequestDecoder::new(LIMITS);
        let mut requests = Vec::new();
        for piece in bytes.chunks(step) {
            let mut rest = piece;
            while !rest.is_empty() {
                match decoder.read(rest) {
                    Ok((used, request)) => {
                        assert!(
                            request.is_some() || used == rest.len(),
                            "bytes left without a request"
                        );
                        requests.extend(request);
                        rest = &rest[used..];
                    }
                    Err(error) => return (requests, Some(error), decoder),
                }
            }
        }
        (requests, None, decoder)
    }

    fn error_of(bytes: &[u8]) -> (u16, HttpError) {
        let error = decode(bytes, usize::MAX).1.expect("an error");
        assert_eq!(decode(bytes, 1).1, Some(error), "depends on the pieces");
        (error.status(), error)
    }

    fn one(bytes: &[u8]) -> Request {
        let (mut requests, error, decoder) = decode(bytes, usize::MAX);
        assert_eq!((requests.len(), error), (1, None));
        assert!(decoder.is_idle());
        requests.remove(0)
    }

    #[test]
    fn reads_pipelined_requests_of_all_framings_in_any_pieces() {
        let bytes = b"\r\nGET /v1/models?a=b%20c&d HTTP/1.1\r\nHost: x\r\n\r\n\
            POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello\
            POST /c HTTP/1.1\r\nhost: x\r\nTransfer-Encoding: Chunked\r\n\r\n\
            3;ext=\"1\"\r\nabc\r\n0A \r\n0123456789\r\n000\r\nx-sum: 1\r\n\r\n\
            GET /old HTTP/1.0\nConnection: close, Keep-Alive\n\n\
            HEAD / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n";
        for step in 1..bytes.len() {
            let (requests, error, _) = decode(bytes, step);
            assert_eq!(error, None, "pieces of {step}");
            let seen: Vec<_> = requests
                .iter()
                .map(|r| (r.head.method, r.head.path(), r.body.as_slice(), r.head.keep_alive))
                .collect();
            assert_eq!(
                seen,
                [
                    (Method::Get, "/v1/models", &b""[..], true),
                    (Method::Post, "/generate", b"hello", true),
                    (Method::Post, "/c", b"abc0123456789", true),
                    (Method::Get, "/old", b"", false),
                    (Method::Head, "/", b"", true),
                ]
            );
            assert_eq!(requests[0].head.query(), "a=b%20c&d");
        }
    }

    #[test]
    fn splits_targets_and_resolves_queries() {
        let target = |t: &str| {
            let request = one(format!("GET {t} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes());
            let pairs: Vec<_> =
                request.head.query_pairs().map(|(k, v)| (k.into_owned(), v.into_owned())).collect();
            (request.head.path().to_owned(), pairs)
        };
        let pair = |k: &str, v: &str| (k.to_owned(), v.to_owned());
        assert_eq!(target("/route"), ("/route".into(), vec![]));
        assert_eq!(
            target("/route?prefill_dp_rank=-1&&x=%C3%A4+b&y=%zz%4&z"),
            (
                "/route".into(),
                vec![
                    pair("prefill_dp_rank", "-1"),
                    pair("x", "ä b"),
                    pair("y", "%zz%4"),
                    pair("z", "")
                ]
            )
        );
        assert_eq!(target("http://host:80/a?b=c"), ("/a".into(), vec![pair("b", "c")]));
        assert_eq!(target("http://host?b"), ("".into(), vec![pair("b", "")]));
        assert_eq!(target("/a?u=http://x"), ("/a".into(), vec![pair("u", "http://x")]));
        assert_eq!(target("*"), ("*".into(), vec![]));
        assert_eq!(target("/?x=%ff"), ("/".into(), vec![pair("x", "\u{fffd}")]));
    }

    #[test]
    fn headers_are_found_whatever_their_case() {
        let request =
            one(b"GET / HTTP/1.1\r\nHOST: h\r\nX-Request-Id:  r 1 \r\nx-request-ID: r2\r\n\
                  empty:\r\n\r\n");
        assert_eq!(request.head.headers.get("x-request-id"), Some("r 1"));
        assert_eq!(request.head.headers.all("X-REQUEST-ID").collect::<Vec<_>>(), ["r 1", "r2"]);
        assert_eq!(request.head.headers.get("empty"), Some(""));
        assert_eq!(request.head.headers.get("absent"), None);
    }

    #[test]
    fn malformed_ambiguous_and_too_large_requests_are_refused() {
        let post =
            |fields: &str| format!("POST / HTTP/1.1\r\nhost: x\r\n{fields}\r\n").into_bytes();
        let chunked = |body: &str| {
            format!("POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n{body}")
                .into_bytes()
        };
        let many = "a: b\r\n".repeat(9);
        let long = "a".repeat(600);
        for (bytes, status) in [
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), 400),
            (b"\x16\x03\x01\x02\x00".to_vec(), 400),
            (b"GET / HTTP/1.1\r\n\r\n".to_vec(), 400),
            (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n".to_vec(), 400),
            (b"GET /\r\nhost: a\r\n\r\n".to_vec(), 400),
            (b"nonsense\r\n\r\n".to_vec(), 400),
            (b"GET / HTTP/2.0\r\nhost: a\r\n\r\n".to_vec(), 505),
            (b"GET / HTTP/0.9\r\nhost: a\r\n\r\n".to_vec(), 505),
            (b"BREW / HTTP/1.1\r\nhost: a\r\n\r\n".to_vec(), 501),
            (b"GET / HTTP/1.1\r\nhost: a\r\nx: \xff\r\n\r\n".to_vec(), 400),
            (b"GET / HTTP/1.1\r\nhost: a\r\nx: b\r\n folded\r\n\r\n".to_vec(), 400),
            (b"GET / HTTP/1.1\r\nhost : a\r\n\r\n".to_vec(), 400),
            (b"GET / HTTP/1.1\r\nhost: a\rb\r\n\r\n".to_vec(), 400),
            (post(&many), 431),
            (format!("GET /{long}").into_bytes(), 431),
            (post("content-length: 65\r\n"), 413),
            (post("content-length: 99999999999999999999999\r\n"), 413),
            (post("content-length: +5\r\n"), 400),
            (post("content-length: 5, 5\r\n"), 400),
            (post("content-length:\r\n"), 400),
            (post("content-length: 5\r\ncontent-length: 6\r\n"), 400),
            (post("content-length: 5\r\ntransfer-encoding: chunked\r\n"), 400),
            (post("transfer-encoding: gzip, chunked\r\n"), 501),
            (post("transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n"), 501),
            (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n".to_vec(), 400),
            (post("expect: miracles\r\n"), 417),
            (chunked("x\r\n"), 400),
            (chunked("\r\n"), 400),
            (chunked("-1\r\n"), 400),
            (chunked("5 5\r\n"), 400),
            (chunked("5\nhello\r\n"), 400),
            (chunked("5\r\nhello!\r\n"), 400),
            (chunked("5\r\nhello\n"), 400),
            (chunked("5;\n\r\n"), 400),
            (chunked("41\r\n"), 413),
            (chunked("20\r\n01234567890123456789012345678901\r\n21\r\n"), 413),
            (chunked("10000000000000000\r\n"), 413),
            (chunked(&format!("1;{long}")), 400),
            (chunked("0\r\na: b\n"), 400),
            (chunked(&format!("0\r\n{}", "a: b\r\n".repeat(2000))), 431),
        ] {
            let (seen, error) = error_of(&bytes);
            assert_eq!(seen, status, "{error:?} for {:?}", String::from_utf8_lossy(&bytes));
        }
    }

    #[test]
    fn an_error_stays() {
        let (_, error, mut decoder) = decode(b"\0", 1);
        assert_eq!(decoder.read(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").err(), error);
    }

    #[test]
    fn equal_content_lengths_agree() {
        let request =
            one(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\nhi");
        assert_eq!(request.body, b"hi");
    }

    #[test]
    fn asks_for_the_body_once_and_only_while_it_is_awaited() {
        let head =
            b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-Continue\r\ncontent-length: 2\r\n\r\n";
        let mut decoder = RequestDecoder::new(LIMITS);
        assert!(decoder.read(head).unwrap().1.is_none());
        assert_eq!(decoder.head().map(RequestHead::path), Some("/"));
        assert!(!decoder.is_idle());
        assert!(decoder.take_continue());
        assert!(!decoder.take_continue());
        assert!(decoder.read(b"hi").unwrap().1.is_some());

        let whole = [&head[..], b"hi"].concat();
        let mut decoder = RequestDecoder::new(LIMITS);
        assert!(decoder.read(&whole).unwrap().1.is_some());
        assert!(!decoder.take_continue());
    }

    #[test]
    fn a_length_alone_reserves_little() {
        let mut decoder = RequestDecoder::new(HttpLimits { body: 1 << 40, ..LIMITS });
        decoder.read(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n").unwrap();
        assert!(decoder.body.capacity() <= HTTP_BODY_RESERVE);
    }

    /// A body in chunks of `sizes`.
    fn chunks(body: &[u8], sizes: &[usize]) -> Vec<u8> {
        let mut out = Vec::new();
        let mut rest = body;
        let mut sizes = sizes.iter().cycle();
        while !rest.is_empty() {
            let (chunk, tail) = rest.split_at((*sizes.next().unwrap()).min(rest.len()));
            super::super::BodyStream::Chunked.write(&mut out, chunk);
            rest = tail;
        }
        super::super::BodyStream::Chunked.end(&mut out);
        out
    }

    proptest! {
        #[test]
        fn chunks_come_back_whole(
            body in prop::collection::vec(any::<u8>(), 0..64),
            sizes in prop::collection::vec(1usize..40, 1..5),
            step in 1usize..80,
        ) {
            let mut bytes =
                b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
            bytes.extend(chunks(&body, &sizes));
            let (requests, error, decoder) = decode(&bytes, step);
            prop_assert_eq!(error, None);
            prop_assert_eq!(requests.len(), 1);
            prop_assert_eq!(&requests[0].body, &body);
            prop_assert!(decoder.is_idle());
        }

        #[test]
        fn any_bytes_give_the_same_in_any_pieces(
            bytes in prop_oneof![
                prop::collection::vec(any::<u8>(), 0..200),
                "(GET|POST) /[a-z?=]{0,5} HTTP/1.[01]\r\n(host: x\r\n){0,2}\
                 (content-length: [0-9]{1,2}\r\n){0,2}(transfer-encoding: chunked\r\n)?\r\n\
                 ([0-9a-f]\r\n[a-z]{0,12}\r\n){0,3}(0\r\n\r\n)?.{0,40}"
                    .prop_map(String::into_bytes),
            ],
            step in 1usize..50,
        ) {
            let view = |(requests, error, _): (Vec<Request>, _, _)| {
                let requests: Vec<_> =
                    requests.into_iter().map(|r| (r.head.path().to_owned(), r.body)).collect();
                (requests, error)
            };
            prop_assert_eq!(view(decode(&bytes, step)), view(decode(&bytes, usize::MAX)));
        }
    }
}
