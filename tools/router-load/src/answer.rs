//! Parses one HTTP/1.1 answer while it arrives, to find its end and the number of its events.

use std::io;

/// How the end of the body is found, and where in the body the next byte is.
#[derive(Clone, Copy, Debug)]
enum Body {
    Length(usize),
    /// Bytes of the current chunk that are missing.
    Chunk(usize),
    /// After a chunk's data: the rest of its line is missing.
    ChunkEnd,
    ChunkSize,
}

/// An answer that is being received.
#[derive(Debug, Default)]
pub struct Answer {
    head: Vec<u8>,
    body: Option<Body>,
    /// The received part of the line with a chunk's size.
    line: Vec<u8>,
    last: u8,
    /// Number of complete events.
    pub events: usize,
    status: u16,
}

fn invalid(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

impl Answer {
    /// Takes received bytes. Returns whether the answer is complete.
    ///
    /// No bytes follow a complete answer, because a connection has one request at a time.
    ///
    /// # Errors
    /// The answer is not valid, or its status is not 200.
    pub fn take(&mut self, mut bytes: &[u8]) -> io::Result<bool> {
        if self.body.is_none() {
            let old = self.head.len();
            self.head.extend_from_slice(bytes);
            match self.parse()? {
                None => return Ok(false),
                Some(used) => bytes = &bytes[used - old..],
            }
        }
        let done = self.advance(bytes)?;
        if done && self.status != 200 {
            let text = [&self.head[..], bytes].concat();
            return Err(invalid(format!("answered {}", String::from_utf8_lossy(&text))));
        }
        Ok(done)
    }

    fn parse(&mut self) -> io::Result<Option<usize>> {
        let mut fields = [httparse::EMPTY_HEADER; 32];
        let mut head = httparse::Response::new(&mut fields);
        let httparse::Status::Complete(used) =
            head.parse(&self.head).map_err(|error| invalid(error.to_string()))?
        else {
            return Ok(None);
        };
        self.status = head.code.unwrap_or(0);
        let field = |name: &str| {
            head.headers
                .iter()
                .find(|field| field.name.eq_ignore_ascii_case(name))
                .map(|field| field.value)
        };
        self.body = Some(match field("content-length") {
            Some(length) => {
                let length = std::str::from_utf8(length).ok().and_then(|text| text.parse().ok());
                Body::Length(length.ok_or_else(|| invalid("content-length"))?)
            }
            None if field("transfer-encoding").is_some() => Body::ChunkSize,
            None => return Err(invalid("an answer without a length")),
        });
        Ok(Some(used))
    }

    fn advance(&mut self, mut bytes: &[u8]) -> io::Result<bool> {
        loop {
            match self.body.ok_or_else(|| invalid("no head"))? {
                Body::Length(left) => {
                    let got = left.min(bytes.len());
                    self.count(&bytes[..got]);
                    self.body = Some(Body::Length(left - got));
                    return Ok(left == got);
                }
                Body::Chunk(left) => {
                    let got = left.min(bytes.len());
                    self.count(&bytes[..got]);
                    bytes = &bytes[got..];
                    self.body =
                        Some(if got == left { Body::ChunkEnd } else { Body::Chunk(left - got) });
                }
                Body::ChunkEnd | Body::ChunkSize => {
                    let Some(end) = bytes.iter().position(|&byte| byte == b'\n') else {
                        self.line.extend_from_slice(bytes);
                        return Ok(false);
                    };
                    self.line.extend_from_slice(&bytes[..end]);
                    bytes = &bytes[end + 1..];
                    let line = std::mem::take(&mut self.line);
                    if matches!(self.body, Some(Body::ChunkEnd)) {
                        self.body = Some(Body::ChunkSize);
                        continue;
                    }
                    let text = std::str::from_utf8(&line).unwrap_or_default().trim_end();
                    let size = usize::from_str_radix(text, 16)
                        .map_err(|_| invalid(format!("chunk {text:?}")))?;
                    // No trailers are sent here: the chunk of size 0 ends the answer.
                    if size == 0 {
                        return Ok(true);
                    }
                    self.body = Some(Body::Chunk(size));
                }
            }
            if bytes.is_empty() {
                return Ok(false);
            }
        }
    }

    /// Counts the empty lines that end events.
    fn count(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            if byte == b'\n' && self.last == b'\n' {
                self.events += 1;
                self.last = 0;
            } else {
                self.last = byte;
            }
        }
    }
}
