//! The record of a run: a hash over all events, and the lines about one room and about the faults.
//! Equal hashes show that a replay repeats the run.

use crate::ids::Room;
use crate::stdx::event_queue::{MICRO, Nanos};
use crate::stdx::rng::scramble;
use std::fmt::Display;

/// The record so far.
#[derive(Debug)]
pub struct Trace {
    hash: u64,
    happenings: u64,
    trace: Option<Room>,
    /// By request, if a room is selected.
    rooms: Vec<(usize, Room)>,
    lines: Vec<String>,
}

impl Trace {
    /// An empty record. It keeps the lines about the room `trace`.
    pub fn new(trace: Option<Room>) -> Trace {
        Trace { hash: 0, happenings: 0, trace, rooms: Vec::new(), lines: Vec::new() }
    }

    /// Records an event at `place`. `room` is its room, if known. The hash covers all numbers.
    pub fn record(
        &mut self,
        at: Nanos,
        place: &'static str,
        index: usize,
        what: &str,
        room: Option<Room>,
        detail: u64,
    ) {
        self.happenings += 1;
        let text = what.bytes().chain(place.bytes());
        let text = text.fold(0_u64, |state, byte| state.wrapping_mul(31).wrapping_add(byte.into()));
        let known = room.map_or(u64::MAX, |room| room.0);
        for number in [at, index as u64, text, known, detail] {
            self.hash = scramble(self.hash ^ number);
        }
        if let (Some(_), Some(room), "request") = (self.trace, room, place)
            && room.0 > 0
            && self.rooms.last() != Some(&(index, room))
        {
            self.rooms.push((index, room));
        }
        if self.trace.is_some() && self.trace == room {
            let time = at as f64 / (1000 * MICRO) as f64;
            self.lines.push(format!("{time:12.3} ms  {place} {index}: {what} ({detail})"));
        }
    }

    /// Records a fault, which can concern any room.
    pub fn record_fault(&mut self, at: Nanos, fault: &impl Display) {
        if self.trace.is_some() {
            let time = at as f64 / (1000 * MICRO) as f64;
            self.lines.push(format!("{time:12.3} ms  {fault}"));
        }
    }

    /// Equal for equal runs.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// Number of recorded events.
    pub fn happenings(&self) -> u64 {
        self.happenings
    }

    /// The rooms of requests, if a room is selected.
    pub fn rooms(&self) -> Vec<(usize, Room)> {
        self.rooms.clone()
    }

    /// The lines of the selected room.
    pub fn lines(&self) -> &[String] {
        &self.lines
    }
}
