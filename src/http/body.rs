//! The body of a message, with the three ways in which HTTP/1.1 delimits a body.
//!
//! Owns: the position of data in the bytes that arrive. Invariants: nothing is buffered. Chunk
//! framing is read strictly (CRLF only, no stray characters), so that no other reader interprets it
//! differently.

use super::HttpError;
use crate::limits::{HTTP_CHUNK_LINE_MAX, HTTP_TRAILERS_MAX};
use std::ops::Range;

/// How a body ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Framing {
    /// After this many bytes.
    Length(u64),
    /// With a chunk of size 0 and its trailers.
    Chunked,
    /// With the connection.
    UntilClose,
}

/// Reads one body.
#[derive(Clone, Debug)]
pub(super) struct Body {
    state: State,
    /// Data bytes that the body can still announce.
    allowed: u64,
    limit: usize,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Data { left: u64 },
    UntilClose,
    ChunkSize { size: u64, part: SizePart, line: usize },
    ChunkData { left: u64 },
    ChunkEnd { cr: bool },
    Trailers { line: usize, cr: bool, total: usize },
    Done,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SizePart {
    /// No byte yet.
    Start,
    /// Hexadecimal digits.
    Digits,
    /// Whitespace after the size.
    Blank,
    Extension,
    Cr,
}

const CHUNK_START: State = State::ChunkSize { size: 0, part: SizePart::Start, line: 0 };

impl Body {
    /// A body of at most `limit` bytes. A longer one is refused here or in `read`.
    pub(super) fn new(framing: Framing, limit: usize) -> Result<Self, HttpError> {
        let mut body = Self { state: CHUNK_START, allowed: limit as u64, limit };
        match framing {
            Framing::Length(0) => body.state = State::Done,
            Framing::Length(left) => {
                body.announce(left)?;
                body.state = State::Data { left };
            }
            Framing::Chunked => {}
            Framing::UntilClose => body.state = State::UntilClose,
        }
        Ok(body)
    }

    /// The body of a message without one.
    pub(super) fn none() -> Self {
        Self { state: State::Done, allowed: 0, limit: 0 }
    }

    pub(super) fn is_done(&self) -> bool {
        matches!(self.state, State::Done)
    }

    /// Whether the body ends with the connection.
    pub(super) fn ends_with_connection(&self) -> bool {
        matches!(self.state, State::UntilClose)
    }

    /// Reads `input` up to the end of one contiguous piece of data. Returns the number of bytes
    /// read, and the range of the data.
    pub(super) fn read(&mut self, input: &[u8]) -> Result<(usize, Range<usize>), HttpError> {
        let mut at = 0;
        while at < input.len() {
            let byte = input[at];
            match self.state {
                State::Done => break,
                State::UntilClose => {
                    self.announce((input.len() - at) as u64)?;
                    return Ok((input.len(), at..input.len()));
                }
                State::Data { left } => {
                    let take = clamp(left, input.len() - at);
                    let left = left - take as u64;
                    self.state = if left == 0 { State::Done } else { State::Data { left } };
                    return Ok((at + take, at..at + take));
                }
                State::ChunkData { left } => {
                    let take = clamp(left, input.len() - at);
                    let left = left - take as u64;
                    self.state = if left == 0 {
                        State::ChunkEnd { cr: false }
                    } else {
                        State::ChunkData { left }
                    };
                    return Ok((at + take, at..at + take));
                }
                State::ChunkSize { size, part, line } => self.size_byte(byte, size, part, line)?,
                State::ChunkEnd { cr } => self.chunk_end_byte(byte, cr)?,
                State::Trailers { line, cr, total } => self.trailer_byte(byte, line, cr, total)?,
            }
            at += 1;
        }
        Ok((at, at..at))
    }

    /// Takes `size` bytes from the limit.
    fn announce(&mut self, size: u64) -> Result<(), HttpError> {
        let too_large = HttpError::BodyTooLarge { limit: self.limit };
        self.allowed = self.allowed.checked_sub(size).ok_or(too_large)?;
        Ok(())
    }

    fn chunk_end_byte(&mut self, byte: u8, cr: bool) -> Result<(), HttpError> {
        self.state = match (byte, cr) {
            (b'\r', false) => State::ChunkEnd { cr: true },
            (b'\n', true) => CHUNK_START,
            _ => return Err(HttpError::Malformed("a chunk is longer than its size")),
        };
        Ok(())
    }

    fn size_byte(
        &mut self,
        byte: u8,
        size: u64,
        part: SizePart,
        line: usize,
    ) -> Result<(), HttpError> {
        use SizePart::{Blank, Cr, Digits, Extension, Start};
        let mut next = size;
        let part = match (part, byte) {
            (Start | Digits, b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F') => {
                if size >> 60 != 0 {
                    return Err(HttpError::BodyTooLarge { limit: self.limit });
                }
                let digit = (byte as char).to_digit(16).expect("a hexadecimal digit");
                next = size << 4 | u64::from(digit);
                Digits
            }
            (Digits | Blank, b' ' | b'\t') => Blank,
            (Digits | Blank, b';') => Extension,
            (Digits | Blank | Extension, b'\r') => Cr,
            (Extension, b'\t' | b' '..=b'~' | 0x80..) => Extension,
            (Cr, b'\n') if size == 0 => {
                self.state = State::Trailers { line: 0, cr: false, total: 0 };
                return Ok(());
            }
            (Cr, b'\n') => {
                self.announce(size)?;
                self.state = State::ChunkData { left: size };
                return Ok(());
            }
            _ => return Err(HttpError::Malformed("a chunk size")),
        };
        if line == HTTP_CHUNK_LINE_MAX {
            return Err(HttpError::Malformed("a chunk extension is too long"));
        }
        self.state = State::ChunkSize { size: next, part, line: line + 1 };
        Ok(())
    }

    fn trailer_byte(
        &mut self,
        byte: u8,
        line: usize,
        cr: bool,
        total: usize,
    ) -> Result<(), HttpError> {
        if total == HTTP_TRAILERS_MAX {
            return Err(HttpError::HeadTooLarge { limit: HTTP_TRAILERS_MAX });
        }
        let total = total + 1;
        self.state = match (byte, cr) {
            (b'\r', false) => State::Trailers { line, cr: true, total },
            (b'\n', true) if line == 0 => State::Done,
            (b'\n', true) => State::Trailers { line: 0, cr: false, total },
            (b'\t' | b' '..=b'~' | 0x80.., false) => {
                State::Trailers { line: line + 1, cr: false, total }
            }
            _ => return Err(HttpError::Malformed("a trailer")),
        };
        Ok(())
    }
}

/// The smaller of the number of announced bytes and the number of bytes that are here.
fn clamp(left: u64, here: usize) -> usize {
    usize::try_from(left).map_or(here, |left| left.min(here))
}
