//! What decode needs of a request besides KV, in one versioned record per request.
//!
//! Written by the source's scheduler with the last chunk, checked at the destination against room and
//! generation before Success.

use crate::ids::{Generation, Room};
use crate::limits::TOP_LOGPROBS_MAX;
use crate::model::logprobs::{Sampled, TopLogprobs};
use bytemuck::{Pod, Zeroable};

/// Version of [`AuxRecord`]; peers of different versions refuse each other at Announce.
pub const AUX_VERSION: u32 = 1;

/// The record as it lies in shared memory and in frames, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct AuxRecord {
    /// The attempt it belongs to.
    pub room: u64,
    /// Generation of the *destination's* slot.
    pub generation: u32,
    /// Sampled by prefill from the last prompt token.
    pub first_token: u32,
    /// Of `first_token`, natural logarithm.
    pub logprob: f32,
    /// Prompt tokens that prefill did not compute.
    pub cached_tokens: u32,
    /// Entries of the two lists below.
    pub top_count: u32,
    /// Time from the request's arrival at prefill to its first chunk, µs.
    pub queue_us: u32,
    /// Time from the first chunk's start to the last layer of the last chunk, µs.
    pub prefill_us: u32,
    /// Alternatives of the first position.
    pub top_tokens: [u32; TOP_LOGPROBS_MAX],
    /// Their logprobs.
    pub top_logprobs: [f32; TOP_LOGPROBS_MAX],
    /// Zero; keeps the size a multiple of eight.
    pub reserved: u32,
}

const _: () = assert!(size_of::<AuxRecord>() == 200);

impl AuxRecord {
    /// A record for `room`; the mover fills in the destination's generation.
    pub fn new(room: Room, first: &Sampled, cached_tokens: u32) -> AuxRecord {
        let mut record = AuxRecord::zeroed();
        record.room = room.0;
        record.first_token = first.token;
        record.logprob = first.logprob;
        record.cached_tokens = cached_tokens;
        record.top_count = first.top.as_slice().len() as u32;
        for (i, &(token, logprob)) in first.top.as_slice().iter().enumerate() {
            record.top_tokens[i] = token;
            record.top_logprobs[i] = logprob;
        }
        record
    }

    /// Whether the record is of this attempt and this use of the destination's slot.
    pub fn belongs_to(&self, room: Room, generation: Generation) -> bool {
        self.room == room.0 && self.generation == generation.0
    }

    /// The first token as prefill sampled it. Counts from outside are bounded.
    pub fn first(&self) -> Sampled {
        let mut top = TopLogprobs::EMPTY;
        for i in 0..(self.top_count as usize).min(TOP_LOGPROBS_MAX) {
            top.push(self.top_tokens[i], self.top_logprobs[i]);
        }
        Sampled { token: self.first_token, logprob: self.logprob, top }
    }
}
