//! Plain-old-data bodies and their checks.

use super::MessageError;
use crate::wire::{Multipart, Parts};
use bytemuck::Pod;

/// Reads a body. Fields that a later version has appended are ignored.
pub fn read_body<T: Pod>(bytes: &[u8], what: &'static str) -> Result<T, MessageError> {
    let needed = size_of::<T>();
    match bytes.get(..needed) {
        Some(body) => Ok(bytemuck::pod_read_unaligned(body)),
        None => Err(MessageError::Short { what, len: bytes.len(), needed }),
    }
}

/// Reads a body that has grown since an earlier minor version, which wrote at least `least` bytes.
/// Missing bytes are zero.
pub fn read_grown<T: Pod>(
    bytes: &[u8],
    least: usize,
    what: &'static str,
) -> Result<T, MessageError> {
    if bytes.len() < least {
        return Err(MessageError::Short { what, len: bytes.len(), needed: least });
    }
    let mut body = T::zeroed();
    let known = bytes.len().min(size_of::<T>());
    bytemuck::bytes_of_mut(&mut body)[..known].copy_from_slice(&bytes[..known]);
    Ok(body)
}

/// Reads a body that is part `index` of a message.
pub fn read_part<T: Pod>(
    parts: Parts<'_>,
    index: usize,
    what: &'static str,
) -> Result<T, MessageError> {
    read_body(parts.get(index).unwrap_or_default(), what)
}

/// Appends a body to the open part.
pub fn write_body<T: Pod>(body: &T, out: &mut Multipart) {
    out.extend(bytemuck::bytes_of(body));
}

/// Refuses a message that does not have `count` parts.
pub fn exactly(parts: Parts<'_>, count: usize) -> Result<(), MessageError> {
    if parts.len() == count {
        Ok(())
    } else {
        Err(MessageError::Parts { said: count, found: parts.len() })
    }
}

/// Refuses a value outside `range`.
pub fn within(
    what: &'static str,
    value: impl Into<u64>,
    range: std::ops::RangeInclusive<u64>,
) -> Result<(), MessageError> {
    let value = value.into();
    if range.contains(&value) { Ok(()) } else { Err(MessageError::Value { what, value }) }
}
