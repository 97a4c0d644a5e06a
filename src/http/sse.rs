//! Server-sent events, the format of streams.
//!
//! Owns: the writer and the reader of events. Invariants: the reader returns the data of an event
//! as it was written, if its line ends are not CR. [`crate::limits::SSE_EVENT_MAX`] bounds an
//! event. Not here: the transfer coding around it.

use crate::limits::SSE_EVENT_MAX;
use std::fmt;

/// The media type of a stream.
pub const CONTENT_TYPE: &str = "text/event-stream";

/// Keep-alive of a stream: an empty comment. The blank line ends no event.
pub const NOTHING: &[u8] = b":\n\n";

/// Appends an event with `data`.
pub fn write_event(out: &mut Vec<u8>, data: &[u8]) {
    for line in data.split(|&byte| byte == b'\n') {
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(line);
        out.push(b'\n');
    }
    out.push(b'\n');
}

/// Appends an event of this type with `data` of one line.
pub fn write_named_event(out: &mut Vec<u8>, name: &str, data: &[u8]) {
    out.extend_from_slice(b"event: ");
    out.extend_from_slice(name.as_bytes());
    out.push(b'\n');
    write_event(out, data);
}

/// Appends a comment of one line, which belongs to the next event. Readers of events skip it.
pub fn write_comment(out: &mut Vec<u8>, line: &[u8]) {
    out.extend_from_slice(b": ");
    out.extend_from_slice(line);
    out.push(b'\n');
}

/// An event is longer than [`SSE_EVENT_MAX`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EventTooLong;

impl fmt::Display for EventTooLong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a server-sent event is longer than {SSE_EVENT_MAX} bytes")
    }
}

impl std::error::Error for EventTooLong {}

/// Reads the data of events from bytes that arrive in any pieces. Event names, ids and comments are
/// skipped.
#[derive(Default, Debug)]
pub struct EventReader {
    line: Vec<u8>,
    data: Vec<u8>,
    /// Whether the event has data, even if empty.
    some: bool,
    /// Whether the last byte was CR; then an LF belongs to it.
    cr: bool,
}

impl EventReader {
    /// Reads `input` up to the end of one event. Returns the number of bytes read, and the event's
    /// data.
    pub fn read(&mut self, input: &[u8]) -> Result<(usize, Option<Vec<u8>>), EventTooLong> {
        for (i, &byte) in input.iter().enumerate() {
            let after_cr = std::mem::replace(&mut self.cr, byte == b'\r');
            match byte {
                b'\n' if after_cr => {}
                b'\n' | b'\r' if self.line.is_empty() => {
                    if std::mem::take(&mut self.some) {
                        return Ok((i + 1, Some(std::mem::take(&mut self.data))));
                    }
                }
                b'\n' | b'\r' => self.end_line(),
                _ if self.line.len() + self.data.len() >= SSE_EVENT_MAX => {
                    return Err(EventTooLong);
                }
                _ => self.line.push(byte),
            }
        }
        Ok((input.len(), None))
    }

    fn end_line(&mut self) {
        if let Some(value) =
            self.line.strip_prefix(b"data").filter(|v| matches!(v, [] | [b':', ..]))
        {
            let value = value.strip_prefix(b":").unwrap_or(value);
            if std::mem::replace(&mut self.some, true) {
                self.data.push(b'\n');
            }
            self.data.extend_from_slice(value.strip_prefix(b" ").unwrap_or(value));
        }
        self.line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(bytes: &[u8], step: usize) -> Vec<String> {
        let mut reader = EventReader::default();
        let mut events = Vec::new();
        for piece in bytes.chunks(step) {
            let mut rest = piece;
            while !rest.is_empty() {
                let (used, event) = reader.read(rest).unwrap();
                events.extend(event.map(|data| String::from_utf8(data).unwrap()));
                rest = &rest[used..];
            }
        }
        events
    }

    #[test]
    fn writes_one_line_of_data_for_each_line() {
        let mut out = Vec::new();
        write_event(&mut out, b"{}");
        write_event(&mut out, b"a\nb");
        assert_eq!(out, b"data: {}\n\ndata: a\ndata: b\n\n");
    }

    #[test]
    fn reads_every_line_end_and_skips_other_fields() {
        let bytes = b": hi\n\ndata: a\n\nevent: x\r\ndata:b\r\ndata:  c\r\n\r\n\
              id: 1\rdata\r\rdatax: no\n\ndata: cut";
        for step in 1..bytes.len() {
            assert_eq!(read(bytes, step), ["a", "b\n c", ""], "pieces of {step}");
        }
    }

    proptest! {
        #[test]
        fn events_come_back(
            data in prop::collection::vec("[^\r]{0,20}", 0..5),
            step in 1usize..30,
        ) {
            let mut out = Vec::new();
            for event in &data {
                write_event(&mut out, event.as_bytes());
            }
            prop_assert_eq!(read(&out, step), data);
        }
    }
}
