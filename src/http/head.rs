//! The head of a message, in both directions. It is gathered up to the empty line and parsed into
//! header fields. This module also reads from the fields how the body is delimited.

use super::HttpError;
use super::body::Framing;
use crate::limits::HTTP_HEADERS_MAX;
use std::ops::Range;

/// The supported versions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Version {
    /// HTTP/1.0: closes by default and has no chunks.
    Http10,
    /// HTTP/1.1.
    Http11,
}

impl Version {
    pub(super) fn from_minor(minor: u8) -> Self {
        if minor == 0 { Self::Http10 } else { Self::Http11 }
    }
}

/// Header fields in their order of arrival.
#[derive(Clone, Default, Debug)]
pub struct Headers {
    /// The whole head; names and values are ranges in it.
    text: String,
    fields: Vec<(Range<usize>, Range<usize>)>,
}

impl Headers {
    /// The value of the first field called `name`, in any case.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }

    /// The values of all fields called `name`.
    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.iter().filter(move |(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }

    /// All fields as (name, value).
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.fields.iter().map(|(n, v)| (&self.text[n.clone()], &self.text[v.clone()]))
    }

    /// A part of the head's text, found by [`parse`].
    pub(super) fn slice(&self, range: &Range<usize>) -> &str {
        &self.text[range.clone()]
    }

    /// Adds a field.
    pub fn add(&mut self, name: &str, value: &str) {
        let field = (self.append(name), self.append(value));
        self.fields.push(field);
    }

    /// Appends to the head's text, behind its end.
    pub(super) fn append(&mut self, text: &str) -> Range<usize> {
        let begin = self.text.len();
        self.text.push_str(text);
        begin..self.text.len()
    }

    /// Whether a comma-separated list in the fields called `name` contains `token`.
    fn lists(&self, name: &str, token: &str) -> bool {
        self.all(name)
            .flat_map(|v| v.split(','))
            .any(|item| item.trim().eq_ignore_ascii_case(token))
    }

    /// Whether the connection can carry another message after this one.
    pub(super) fn keep_alive(&self, version: Version) -> bool {
        let close = self.lists("connection", "close");
        !close && (version == Version::Http11 || self.lists("connection", "keep-alive"))
    }

    /// How the body is delimited; `None` if no field says so.
    pub(super) fn framing(&self, version: Version) -> Result<Option<Framing>, HttpError> {
        let length = self.content_length()?;
        let mut codings = self.all("transfer-encoding");
        let Some(coding) = codings.next() else {
            return Ok(length.map(Framing::Length));
        };
        if length.is_some() {
            return Err(HttpError::Malformed("both Content-Length and Transfer-Encoding"));
        }
        if version == Version::Http10 {
            return Err(HttpError::Malformed("Transfer-Encoding in HTTP/1.0"));
        }
        if codings.next().is_some() || !coding.eq_ignore_ascii_case("chunked") {
            return Err(HttpError::Unsupported("a Transfer-Encoding other than `chunked`"));
        }
        Ok(Some(Framing::Chunked))
    }

    fn content_length(&self) -> Result<Option<u64>, HttpError> {
        let mut length = None;
        for value in self.all("content-length") {
            if value.is_empty() || !value.bytes().all(|b| b.is_ascii_digit()) {
                return Err(HttpError::Malformed("Content-Length is not a number"));
            }
            // The text has only digits, so a number that overflows is above any limit.
            let value = value.parse().unwrap_or(u64::MAX);
            if length.is_some_and(|earlier| earlier != value) {
                return Err(HttpError::Malformed("conflicting Content-Length fields"));
            }
            length = Some(value);
        }
        Ok(length)
    }
}

/// Gathers the bytes of a head up to and including its empty line.
#[derive(Debug)]
pub(super) struct Gather {
    bytes: Vec<u8>,
    /// Bytes of the line that is arriving, without CR.
    line: usize,
    limit: usize,
}

impl Gather {
    pub(super) fn new(limit: usize) -> Self {
        Self { bytes: Vec::new(), line: 0, limit }
    }

    /// Whether no byte of a head has come yet. Empty lines before it do not count.
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Reads bytes of the head from `input`. Returns the number of bytes read, and the head if it
    /// is complete.
    pub(super) fn read(&mut self, input: &[u8]) -> Result<(usize, Option<Vec<u8>>), HttpError> {
        for (i, &byte) in input.iter().enumerate() {
            match byte {
                b'\n' if self.line == 0 && !self.bytes.is_empty() => {
                    self.bytes.push(byte);
                    return Ok((i + 1, Some(std::mem::take(&mut self.bytes))));
                }
                // RFC 9112 (2.2) asks to skip empty lines between messages.
                b'\r' | b'\n' if self.bytes.is_empty() => continue,
                b'\n' => self.line = 0,
                b'\r' => {}
                // Refuse binary data and TLS at the first byte, not at the limit.
                0..=8 | 11..=31 | 127 => {
                    return Err(HttpError::Malformed("control character in the head"));
                }
                _ => self.line += 1,
            }
            if self.bytes.len() == self.limit {
                return Err(HttpError::HeadTooLarge { limit: self.limit });
            }
            self.bytes.push(byte);
        }
        Ok((input.len(), None))
    }
}

/// The first line of a head, as httparse reads it.
pub(super) trait FirstLine: Sized {
    /// Parses `text` into this and the fields in `slots`. Returns the end of the head (`None`: not
    /// in `text`), the line, and the number of fields.
    fn parse<'t>(
        text: &'t str,
        slots: &mut [httparse::Header<'t>],
    ) -> Result<(Option<usize>, Self, usize), httparse::Error>;
}

/// The end of the head that httparse found.
pub(super) fn end_of(status: httparse::Status<usize>) -> Option<usize> {
    status.is_complete().then(|| status.unwrap())
}

/// Parses a gathered head with at most `limit` fields.
pub(super) fn parse<L: FirstLine>(bytes: Vec<u8>, limit: usize) -> Result<(L, Headers), HttpError> {
    let text =
        String::from_utf8(bytes).map_err(|_| HttpError::Malformed("the head is not UTF-8"))?;
    let mut slots = [httparse::EMPTY_HEADER; HTTP_HEADERS_MAX];
    let limit = limit.min(HTTP_HEADERS_MAX);
    let (first, count) = match L::parse(&text, &mut slots[..limit]) {
        Ok((Some(end), first, count)) if end == text.len() => (first, count),
        Ok(_) => return Err(HttpError::Malformed("the head's end")),
        Err(error) => return Err(refusal(error, &text, limit)),
    };
    let fields = slots[..count]
        .iter()
        .map(|field| {
            // Cannot fail: httparse returns parts of `text`, cut at ASCII bytes.
            let value = std::str::from_utf8(field.value).unwrap_or_default();
            (span(&text, field.name), span(&text, value))
        })
        .collect();
    Ok((first, Headers { text, fields }))
}

/// The range of `part`, a slice of `text`, in `text`.
pub(super) fn span(text: &str, part: &str) -> Range<usize> {
    if part.is_empty() {
        return 0..0;
    }
    let start = part.as_ptr() as usize - text.as_ptr() as usize;
    start..start + part.len()
}

fn refusal(error: httparse::Error, text: &str, limit: usize) -> HttpError {
    use httparse::Error as E;
    match error {
        E::TooManyHeaders => HttpError::TooManyHeaders { limit },
        E::Version => version_refusal(text),
        E::HeaderName => HttpError::Malformed("a header name"),
        E::HeaderValue => HttpError::Malformed("a header value"),
        E::NewLine => HttpError::Malformed("a line end"),
        E::Status => HttpError::Malformed("the status line"),
        E::Token => HttpError::Malformed("the first line"),
    }
}

fn version_refusal(text: &str) -> HttpError {
    let line = text.lines().next().unwrap_or_default();
    if line == "PRI * HTTP/2.0" {
        return HttpError::Malformed("HTTP/2 is not supported");
    }
    let names_version = line.split(' ').any(|word| {
        word.strip_prefix("HTTP/")
            .is_some_and(|version| version.starts_with(|c: char| c.is_ascii_digit()))
    });
    if names_version { HttpError::Version } else { HttpError::Malformed("the first line") }
}
