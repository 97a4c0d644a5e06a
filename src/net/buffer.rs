//! A byte queue: filled at the tail and consumed at the head. Its content is always one slice.
//!
//! Invariants: `head <= tail <= bytes.len()`. An empty buffer restarts at 0 and frees memory above
//! [`NET_BUFFER_KEPT`]. The rest goes to the [`BufferPool`] when its connection waits.

use crate::limits::{NET_BUFFER_KEPT, NET_BUFFERS_SPARE};

#[derive(Debug, Default)]
pub(super) struct Buffer {
    bytes: Vec<u8>,
    head: usize,
    tail: usize,
}

impl Buffer {
    pub(super) fn data(&self) -> &[u8] {
        &self.bytes[self.head..self.tail]
    }

    pub(super) fn len(&self) -> usize {
        self.tail - self.head
    }

    pub(super) fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// Free space to fill: at least one byte while the buffer holds fewer than `max` bytes.
    pub(super) fn space(&mut self, max: usize) -> &mut [u8] {
        if self.tail == self.bytes.len() {
            if self.head > 0 {
                self.bytes.copy_within(self.head..self.tail, 0);
                self.tail -= self.head;
                self.head = 0;
            }
            if self.tail == self.bytes.len() {
                let len = (self.bytes.len() * 2).max(NET_BUFFER_KEPT).min(max).max(self.tail);
                self.bytes.resize(len, 0);
            }
        }
        &mut self.bytes[self.tail..]
    }

    /// Marks `count` bytes of [`space`](Self::space) as filled.
    pub(super) fn filled(&mut self, count: usize) {
        self.tail += count;
        assert!(self.tail <= self.bytes.len(), "filled beyond the space");
    }

    pub(super) fn append(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let space = self.space(usize::MAX);
            let count = bytes.len().min(space.len());
            space[..count].copy_from_slice(&bytes[..count]);
            self.filled(count);
            bytes = &bytes[count..];
        }
    }

    pub(super) fn consume(&mut self, count: usize) {
        self.head += count;
        assert!(self.head <= self.tail, "consumed more than held");
        if self.is_empty() {
            (self.head, self.tail) = (0, 0);
            if self.bytes.len() > NET_BUFFER_KEPT {
                self.bytes = Vec::new();
            }
        }
    }
}

/// Spare memory of empty buffers for buffers that fill next. Most connections only wait, and then
/// hold no memory.
#[derive(Debug, Default)]
pub(super) struct BufferPool(Vec<Vec<u8>>);

impl BufferPool {
    /// Gives memory to a buffer without any, if the pool has some.
    pub(super) fn lend(&mut self, buffer: &mut Buffer) {
        if buffer.bytes.is_empty() {
            buffer.bytes = self.0.pop().unwrap_or_default();
        }
    }

    /// Takes the memory of a buffer, if it is empty.
    pub(super) fn take_back(&mut self, buffer: &mut Buffer) {
        if buffer.is_empty() {
            let bytes = std::mem::take(&mut buffer.bytes);
            if bytes.len() == NET_BUFFER_KEPT && self.0.len() < NET_BUFFERS_SPARE {
                self.0.push(bytes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_buffer_stops_at_its_bound_and_frees_its_memory() {
        let mut buffer = Buffer::default();
        let max = 2 * NET_BUFFER_KEPT;
        loop {
            let space = buffer.space(max).len();
            if space == 0 {
                break;
            }
            buffer.filled(space);
        }
        assert_eq!(buffer.len(), max);
        buffer.consume(1);
        assert_eq!(buffer.space(max).len(), 1);
        buffer.consume(max - 1);
        assert_eq!(buffer.bytes.capacity(), 0);
    }

    #[test]
    fn memory_goes_from_one_that_is_empty_to_the_next() {
        let (mut spare, mut first, mut second) =
            (BufferPool::default(), Buffer::default(), Buffer::default());
        spare.lend(&mut first);
        first.append(b"one");
        spare.take_back(&mut first);
        assert_eq!(first.data(), b"one", "a buffer with data keeps its memory");
        first.consume(3);
        spare.take_back(&mut first);
        assert_eq!((first.bytes.capacity(), spare.0.len()), (0, 1));
        spare.lend(&mut second);
        assert_eq!((second.len(), second.bytes.len(), spare.0.len()), (0, NET_BUFFER_KEPT, 0));
        let mut many: Vec<Buffer> = (0..2 * NET_BUFFERS_SPARE).map(|_| Buffer::default()).collect();
        for buffer in &mut many {
            buffer.append(b"x");
            buffer.consume(1);
            spare.take_back(buffer);
        }
        assert_eq!(spare.0.len(), NET_BUFFERS_SPARE, "the pool is bounded");
    }

    proptest! {
        #[test]
        fn a_buffer_behaves_like_a_queue_of_bytes(
            steps in proptest::collection::vec((0usize..40_000, 0usize..40_000), 1..20),
        ) {
            let (mut buffer, mut reference, mut next) = (Buffer::default(), Vec::new(), 0u8);
            for (add, remove) in steps {
                let bytes: Vec<u8> = (0..add).map(|_| {
                    next = next.wrapping_add(1);
                    next
                }).collect();
                buffer.append(&bytes);
                reference.extend_from_slice(&bytes);
                let remove = remove.min(reference.len());
                buffer.consume(remove);
                reference.drain(..remove);
                prop_assert_eq!(buffer.data(), &reference[..]);
            }
        }
    }
}
