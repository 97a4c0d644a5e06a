//! Pointers of a caller: null, alignment and length are checked before the first access.
//!
//! Thread: any. Invariant: a reference lives during the call only. Not here: what the values mean.
#![allow(unsafe_code)]

use super::guard::Failure;
use crate::limits::ABI_TEXT_MAX;
use std::ffi::{CStr, c_char};
use std::{ptr, slice};

/// Refuses a pointer that is null or not aligned. A call does so before it has an effect.
pub(super) fn check<T>(pointer: *const T, name: &str) -> Result<(), Failure> {
    match pointer {
        _ if pointer.is_null() => Err(Failure::argument(format!("{name} is null"))),
        _ if !pointer.is_aligned() => Err(Failure::argument(format!("{name} is not aligned"))),
        _ => Ok(()),
    }
}

/// Refuses a structure if its first field is not its size. That of another version can be shorter,
/// so there is no reference to it before.
///
/// # Safety
/// `first` is null, or as many bytes are readable as the first field says; it is a `u32`.
pub(super) unsafe fn check_size<T>(first: *const T, name: &str) -> Result<(), Failure> {
    check(first, name)?;
    // SAFETY: the caller's promise; the alignment of a structure is that of its fields or more.
    let size = unsafe { first.cast::<u32>().read() };
    if size as usize == size_of::<T>() {
        return Ok(());
    }
    let wanted = size_of::<T>();
    Err(Failure::argument(format!("{name} has {size} bytes, not {wanted}: another version")))
}

/// Stores a result.
///
/// # Safety
/// `out` is writable, or null.
pub(super) unsafe fn store<T>(out: *mut T, name: &str, value: T) -> Result<i32, Failure> {
    check(out, name)?;
    // SAFETY: the caller's promise.
    unsafe { out.write(value) };
    Ok(0)
}

/// The items at `first`.
///
/// # Safety
/// There are `len` items, and they do not change during the call.
pub(super) unsafe fn items<'a, T>(
    first: *const T,
    len: usize,
    max: usize,
    name: &str,
) -> Result<&'a [T], Failure> {
    if len == 0 {
        return Ok(&[]);
    }
    check(first, name)?;
    if len > max {
        let why = format!("{name} has {len} items, at most {max} are possible");
        return Err(Failure::argument(why));
    }
    // SAFETY: the caller's promise; the pointer is not null and aligned.
    Ok(unsafe { slice::from_raw_parts(first, len) })
}

/// The text at `first`, or none if it is null.
///
/// # Safety
/// The text ends with a zero.
pub(super) unsafe fn text<'a>(
    first: *const c_char,
    name: &str,
) -> Result<Option<&'a str>, Failure> {
    if first.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(first) };
    if text.count_bytes() > ABI_TEXT_MAX {
        return Err(Failure::argument(format!("{name} has more than {ABI_TEXT_MAX} bytes")));
    }
    let text = text.to_str().map_err(|_| Failure::argument(format!("{name} is not UTF-8")))?;
    Ok(Some(text))
}

/// Writes a text with a final zero, and cuts it if it is too long. Returns the bytes of the whole.
///
/// # Safety
/// `out` has room for `bytes` bytes.
pub(super) unsafe fn write_text(text: &str, out: *mut c_char, bytes: usize) -> usize {
    if !out.is_null() && bytes > 0 {
        let kept = text.len().min(bytes - 1);
        // SAFETY: the caller's promise; the text does not overlap with the caller's memory.
        unsafe {
            ptr::copy_nonoverlapping(text.as_ptr().cast(), out, kept);
            out.add(kept).write(0);
        }
    }
    text.len()
}
