//! A message of several parts in one contiguous, reusable buffer.
//!
//! Invariants: `ends` rises and never passes `bytes.len()`; bytes behind the last end belong to the
//! open part.

/// An owned, reusable multipart message.
#[derive(Clone, Debug, Default)]
pub struct Multipart {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

/// The finished parts of a [`Multipart`], borrowed; `bytes` ends with the last of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts<'a> {
    bytes: &'a [u8],
    ends: &'a [usize],
}

impl Multipart {
    /// An empty message; allocates nothing yet.
    pub const fn new() -> Multipart {
        Multipart { bytes: Vec::new(), ends: Vec::new() }
    }

    /// Removes all parts. Keeps the buffer, unless it has grown beyond `keep_bytes`.
    pub fn clear(&mut self, keep_bytes: usize) {
        self.bytes.clear();
        self.ends.clear();
        self.bytes.shrink_to(keep_bytes);
    }

    /// Appends to the open part.
    pub fn extend(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Ends the open part, which may be empty.
    pub fn end_part(&mut self) {
        self.ends.push(self.bytes.len());
    }

    /// Appends one whole part.
    pub fn push(&mut self, part: &[u8]) {
        self.extend(part);
        self.end_part();
    }

    /// Overwrites bytes from byte `at` of the whole message.
    pub fn overwrite(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Bytes of all parts, the open one included.
    pub fn byte_len(&self) -> usize {
        self.bytes.len()
    }

    /// The finished parts.
    pub fn parts(&self) -> Parts<'_> {
        Parts { bytes: &self.bytes[..self.ends.last().copied().unwrap_or(0)], ends: &self.ends }
    }
}

impl<'a> Parts<'a> {
    /// Number of parts.
    pub fn len(self) -> usize {
        self.ends.len()
    }

    /// Whether there is no part.
    pub fn is_empty(self) -> bool {
        self.ends.is_empty()
    }

    /// Bytes of all parts.
    pub fn byte_len(self) -> usize {
        self.bytes.len()
    }

    /// Part `index`, counted from 0.
    pub fn get(self, index: usize) -> Option<&'a [u8]> {
        let end = *self.ends.get(index)?;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        Some(&self.bytes[start..end])
    }

    /// All parts in order.
    pub fn iter(self) -> impl ExactSizeIterator<Item = &'a [u8]> {
        (0..self.len()).map(move |index| self.get(index).expect("index below len"))
    }

    /// The parts before the last one, and the last one.
    pub fn split_last(self) -> Option<(Parts<'a>, &'a [u8])> {
        let last = self.get(self.len().checked_sub(1)?)?;
        let bytes = &self.bytes[..self.bytes.len() - last.len()];
        Some((Parts { bytes, ends: &self.ends[..self.len() - 1] }, last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_come_back_as_pushed_and_an_open_one_is_not_among_them() {
        let mut message = Multipart::new();
        message.push(b"one");
        message.push(b"");
        message.extend(b"op");
        assert_eq!(message.parts().iter().collect::<Vec<_>>(), [&b"one"[..], b""]);
        message.extend(b"en");
        message.end_part();
        let (head, last) = message.parts().split_last().unwrap();
        assert_eq!((head.len(), head.byte_len(), last), (2, 3, &b"open"[..]));
        assert_eq!(head.get(2), None);
        message.clear(0);
        assert!(message.parts().is_empty());
        assert_eq!(message.parts().split_last(), None);
    }
}
