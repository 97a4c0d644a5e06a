//! Chains of work requests, made once and filled again and again: a request costs the few words in which it
//! differs. Filling allocates nothing.
//!
//! A chain keeps the registrations from which it gathers, and checks each piece against them: our own
//! arithmetic, so what is outside panics. Where peers' bytes may go is the caller's to check.
#![allow(unsafe_code)]

use super::abi::{self, SendWr, Sge};
use super::memory::{Local, Registration};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// A range of one of a chain's registrations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Which one, in the order they were given.
    pub registration: usize,
    /// From its beginning.
    pub offset: usize,
    /// Bytes, at least one.
    pub len: u32,
}

/// A place in a peer's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Remote {
    /// In the peer's process.
    pub address: u64,
    /// Of the peer's registration.
    pub key: u32,
}

/// How a write is to be carried out.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Marks {
    /// It has a completion. The last of what a queue pair is given at a time needs one, or nobody learns that
    /// there is room again.
    pub signalled: bool,
    /// Its bytes are taken when it is posted, at most as many as the queue pair grants.
    pub inline: bool,
    /// A receive of the peer completes with this.
    pub immediate: Option<u32>,
}

/// Work requests that are posted together.
pub struct Chain {
    requests: Vec<SendWr>,
    /// `pieces_max` for each request, in order.
    pieces: Vec<Sge>,
    pieces_max: usize,
    filled: usize,
    locals: Box<[Local]>,
    registrations: Box<[Arc<Registration>]>,
}

// SAFETY: its pointers lead into its own two vectors, which move with it.
unsafe impl Send for Chain {}

impl Chain {
    /// Room for `requests_max` work requests of up to `pieces_max` pieces of `registrations`.
    pub fn new(
        registrations: &[Arc<Registration>],
        requests_max: usize,
        pieces_max: usize,
    ) -> Chain {
        assert!(requests_max > 0 && pieces_max > 0, "a chain without room");
        let pieces = vec![Sge { addr: 0, length: 0, lkey: 0 }; requests_max * pieces_max];
        // SAFETY: plain numbers and pointers, for which zeros are values.
        let empty: SendWr = unsafe { std::mem::zeroed() };
        let mut chain = Chain {
            requests: vec![empty; requests_max],
            pieces,
            pieces_max,
            filled: 0,
            locals: registrations.iter().map(|registration| registration.local()).collect(),
            registrations: registrations.into(),
        };
        for index in 0..requests_max {
            // SAFETY: within the pieces.
            let place = unsafe { chain.pieces.as_mut_ptr().add(index * pieces_max) };
            chain.request(index).sg_list = place;
        }
        chain
    }

    /// Work requests in it.
    pub fn len(&self) -> usize {
        self.filled
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.filled == 0
    }

    /// Whether no more can be added.
    pub fn is_full(&self) -> bool {
        self.filled == self.requests.len()
    }

    /// From what it gathers.
    pub fn registrations(&self) -> &[Arc<Registration>] {
        &self.registrations
    }

    /// Empties it, after it was posted or to give it up. What was posted is not touched.
    #[inline]
    pub fn clear(&mut self) {
        self.filled = 0;
    }

    /// Adds an RDMA WRITE of all `pieces`, one behind the other, to `to`. Panics when the chain is full, when
    /// there are more pieces than it was made for, or when one lies outside its registration.
    // Called for each work request, from several places: the compiler would rather call it, for a tenth of all.
    #[inline(always)]
    pub fn write(&mut self, id: u64, pieces: &[Piece], to: Remote, marks: Marks) {
        let index = self.filled;
        assert!(index < self.requests.len(), "the chain is full");
        assert!(pieces.len() <= self.pieces_max, "{} pieces", pieces.len());
        for (place, piece) in pieces.iter().enumerate() {
            let local = self.locals[piece.registration];
            let fits = piece.offset <= local.len && piece.len as usize <= local.len - piece.offset;
            assert!(fits, "{piece:?} of {}", local.len);
            // SAFETY: below `pieces_max`, so within this request's part of the pieces.
            let entry =
                unsafe { &mut *self.pieces.as_mut_ptr().add(index * self.pieces_max + place) };
            *entry = Sge {
                addr: local.address + piece.offset as u64,
                length: piece.len,
                lkey: local.key,
            };
        }
        let next = self.next(index);
        let request = self.request(index);
        request.next = next;
        request.wr_id = id;
        request.num_sge = pieces.len() as i32;
        request.remote_addr = to.address;
        request.rkey = to.key;
        request.send_flags = if marks.signalled { abi::SEND_SIGNALED } else { 0 }
            | if marks.inline { abi::SEND_INLINE } else { 0 };
        (request.opcode, request.imm_data) = match marks.immediate {
            None => (abi::WR_RDMA_WRITE, 0),
            Some(immediate) => (abi::WR_RDMA_WRITE_WITH_IMM, immediate.to_be()),
        };
        self.filled += 1;
    }

    /// Asks for a completion of the last one added, by this id.
    #[inline]
    pub fn signal_last(&mut self, id: u64) {
        if let Some(last) = self.filled.checked_sub(1) {
            let request = self.request(last);
            request.wr_id = id;
            request.send_flags |= abi::SEND_SIGNALED;
        }
    }

    /// The first of what is to be posted, with the last one's link cut.
    #[inline]
    pub(super) fn linked(&mut self) -> Option<NonNull<SendWr>> {
        let last = self.filled.checked_sub(1)?;
        self.request(last).next = std::ptr::null_mut();
        NonNull::new(self.requests.as_mut_ptr())
    }

    /// Which one a provider has named; the first where it named none.
    #[cold]
    pub(super) fn index_of(&self, request: *const SendWr) -> usize {
        let bytes = request.addr().wrapping_sub(self.requests.as_ptr().addr());
        let index = bytes / size_of::<SendWr>();
        if index < self.filled { index } else { 0 }
    }

    /// Where the one behind `index` will be.
    #[inline]
    fn next(&mut self, index: usize) -> *mut SendWr {
        match index + 1 < self.requests.len() {
            // SAFETY: within the requests.
            true => unsafe { self.requests.as_mut_ptr().add(index + 1) },
            false => std::ptr::null_mut(),
        }
    }

    /// Borrows this one alone, so that pointers that lead to others stay good.
    #[inline]
    fn request(&mut self, index: usize) -> &mut SendWr {
        debug_assert!(index < self.requests.len());
        // SAFETY: callers' indices are below the number of requests, which never changes.
        unsafe { &mut *self.requests.as_mut_ptr().add(index) }
    }
}

impl fmt::Debug for Chain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Chain")
            .field("filled", &self.filled)
            .field("room", &self.requests.len())
            .finish()
    }
}
