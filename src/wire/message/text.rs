//! Short texts for the other side's log: UTF-8, bounded, one part each.

use super::MessageError;
use crate::limits;
use crate::wire::{Multipart, Parts};

/// Reads part `index` as text.
pub fn read_text<'a>(
    parts: Parts<'a>,
    index: usize,
    what: &'static str,
) -> Result<&'a str, MessageError> {
    let bytes = parts.get(index).unwrap_or_default();
    let text =
        std::str::from_utf8(bytes).ok().filter(|text| text.len() <= limits::MESSAGE_TEXT_MAX);
    text.ok_or(MessageError::Content { what, len: bytes.len() })
}

/// Appends a text as one part, cut to the length that the reader accepts.
pub fn write_text(text: &str, out: &mut Multipart) {
    out.push(&text.as_bytes()[..text.floor_char_boundary(limits::MESSAGE_TEXT_MAX)]);
}
