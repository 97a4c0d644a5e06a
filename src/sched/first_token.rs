//! The payload of the aux record: the first token of a request, which prefill has sampled, and the
//! times that prefill took. Prefill writes it and decode reads it.
//!
//! Invariant: counts from another worker are bounded when they are read. Not here: how the record
//! moves (`transfer`).

use crate::ids::Room;
use crate::limits::TOP_LOGPROBS_MAX;
use crate::model::logprobs::{Sampled, TopLogprobs};
use crate::transfer::aux::{AUX_PAYLOAD_BYTES, AUX_TAIL, AuxRecord};
use bytemuck::{Pod, Zeroable};
use std::mem::offset_of;

/// The payload in shared memory and in frames, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct FirstTokenRecord {
    /// Sampled by prefill from the last prompt token.
    pub token: u32,
    /// Logprob of `token` (natural logarithm).
    pub logprob: f32,
    /// Prompt tokens that prefill did not compute.
    pub cached_tokens: u32,
    /// Entries of the two lists below. If it is 0, the lists are not moved.
    top_count: u32,
    /// Time from the request's arrival at prefill to its first chunk, µs.
    pub queue_us: u32,
    /// Time from the first chunk's start to the last layer of the last chunk, µs.
    pub prefill_us: u32,
    /// Alternatives of the first position.
    top_tokens: [u32; TOP_LOGPROBS_MAX],
    /// Their logprobs.
    top_logprobs: [f32; TOP_LOGPROBS_MAX],
    /// Zero; keeps the record's size a multiple of eight.
    reserved: u32,
}

const _: () = assert!(size_of::<FirstTokenRecord>() == AUX_PAYLOAD_BYTES);
const _: () = assert!(offset_of!(FirstTokenRecord, top_count) == 12);
const _: () = assert!(offset_of!(FirstTokenRecord, top_tokens) == AUX_TAIL);

impl FirstTokenRecord {
    /// The first token, and how many prompt tokens the prefix cache had.
    pub fn new(first: &Sampled, cached_tokens: u32) -> FirstTokenRecord {
        let mut record = FirstTokenRecord::zeroed();
        record.token = first.token;
        record.logprob = first.logprob;
        record.cached_tokens = cached_tokens;
        record.top_count = first.top.as_slice().len() as u32;
        for (i, &(token, logprob)) in first.top.as_slice().iter().enumerate() {
            record.top_tokens[i] = token;
            record.top_logprobs[i] = logprob;
        }
        record
    }

    /// The aux record that carries it for `room`.
    pub fn to_aux(self, room: Room) -> AuxRecord {
        AuxRecord::new(room, bytemuck::cast(self))
    }

    /// The payload of an aux record.
    pub fn of_aux(aux: &AuxRecord) -> FirstTokenRecord {
        bytemuck::pod_read_unaligned(&aux.payload)
    }

    /// The first token as prefill sampled it. Counts from outside are bounded.
    pub fn sampled(&self) -> Sampled {
        let mut top = TopLogprobs::EMPTY;
        for i in 0..(self.top_count as usize).min(TOP_LOGPROBS_MAX) {
            top.push(self.top_tokens[i], self.top_logprobs[i]);
        }
        Sampled { token: self.token, logprob: self.logprob, top }
    }
}
