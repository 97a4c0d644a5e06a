//! Chains of work requests, allocated once and filled repeatedly. Only the words that differ are
//! written for each request. Filling allocates nothing.
//!
//! A chain holds the registrations of its local data and checks each piece against them. If a piece
//! lies outside, Baton has a bug, and the chain panics. Not here: checks of remote addresses, which
//! belong to the caller.
#![allow(unsafe_code)]

use super::abi::{self, SendWr, Sge};
use super::memory::{Local, Registration};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// A range of one of a chain's registrations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LocalPiece {
    /// Index of the registration, in the order given to [`Chain::new`].
    pub registration: usize,
    /// Offset from its beginning.
    pub offset: usize,
    /// Number of bytes, at least one.
    pub len: u32,
}

/// An address in a peer's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RemoteAddress {
    /// Address in the peer's process.
    pub address: u64,
    /// Key of the peer's registration.
    pub key: u32,
}

/// Options of a write.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Marks {
    /// The write has a completion. The last write of each batch needs one: it shows that the queue
    /// has room again.
    pub signalled: bool,
    /// The bytes are copied at posting. The queue pair limits their number.
    pub inline: bool,
    /// A receive of the peer completes with this value.
    pub immediate: Option<u32>,
}

/// Work requests that are posted together.
pub struct Chain {
    requests: Vec<SendWr>,
    /// `pieces_max` pieces for each request, in order.
    pieces: Vec<Sge>,
    pieces_max: usize,
    filled: usize,
    locals: Box<[Local]>,
    registrations: Box<[Arc<Registration>]>,
}

// SAFETY: its pointers point into its own two vectors, which move with it.
unsafe impl Send for Chain {}

impl Chain {
    /// A chain for `requests_max` work requests of up to `pieces_max` pieces of `registrations`.
    pub fn new(
        registrations: &[Arc<Registration>],
        requests_max: usize,
        pieces_max: usize,
    ) -> Chain {
        assert!(requests_max > 0 && pieces_max > 0, "a chain without room");
        let pieces = vec![Sge { addr: 0, length: 0, lkey: 0 }; requests_max * pieces_max];
        // SAFETY: the struct holds plain numbers and pointers, and zeros are valid values.
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
            // SAFETY: the index is within the pieces.
            let place = unsafe { chain.pieces.as_mut_ptr().add(index * pieces_max) };
            chain.request(index).sg_list = place;
        }
        chain
    }

    /// Number of work requests in it.
    pub fn len(&self) -> usize {
        self.filled
    }

    /// Whether it has no work requests.
    pub fn is_empty(&self) -> bool {
        self.filled == 0
    }

    /// Whether it has no room for more.
    pub fn is_full(&self) -> bool {
        self.filled == self.requests.len()
    }

    /// The registrations of its local data.
    pub fn registrations(&self) -> &[Arc<Registration>] {
        &self.registrations
    }

    /// Empties it, after posting or to discard it. Posted requests are not affected.
    #[inline]
    pub fn clear(&mut self) {
        self.filled = 0;
    }

    /// Adds an RDMA WRITE of all `pieces`, consecutively, to `to`.
    ///
    /// # Panics
    /// The chain is full, there are more pieces than its maximum, or a piece lies outside its
    /// registration.
    // Several places call it for each work request. Without the attribute the compiler does not
    // inline it, and posting takes a tenth longer.
    #[inline(always)]
    pub fn write(&mut self, id: u64, pieces: &[LocalPiece], to: RemoteAddress, marks: Marks) {
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

    /// Requests a completion with this id for the last added request.
    #[inline]
    pub fn signal_last(&mut self, id: u64) {
        if let Some(last) = self.filled.checked_sub(1) {
            let request = self.request(last);
            request.wr_id = id;
            request.send_flags |= abi::SEND_SIGNALED;
        }
    }

    /// The first request to post. The last request ends the chain.
    #[inline]
    pub(super) fn linked(&mut self) -> Option<NonNull<SendWr>> {
        let last = self.filled.checked_sub(1)?;
        self.request(last).next = std::ptr::null_mut();
        NonNull::new(self.requests.as_mut_ptr())
    }

    /// The index of a request that a provider returned; 0 if it returned none.
    #[cold]
    pub(super) fn index_of(&self, request: *const SendWr) -> usize {
        let bytes = request.addr().wrapping_sub(self.requests.as_ptr().addr());
        let index = bytes / size_of::<SendWr>();
        if index < self.filled { index } else { 0 }
    }

    /// The address of the request after `index`.
    #[inline]
    fn next(&mut self, index: usize) -> *mut SendWr {
        match index + 1 < self.requests.len() {
            // SAFETY: the index is within the requests.
            true => unsafe { self.requests.as_mut_ptr().add(index + 1) },
            false => std::ptr::null_mut(),
        }
    }

    /// Borrows only this request, so that pointers to other requests stay valid.
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
