//! What happened: a hash over all of it, by which a replay proves to be one, and the lines of one room
//! and of the faults.

use super::agenda::{MICRO, Nanos};
use super::model::mix;
use crate::ids::Room;
use std::fmt::Display;

/// What happened so far.
#[derive(Debug)]
pub struct Story {
    hash: u64,
    happenings: u64,
    trace: Option<Room>,
    /// By request, if one is asked for.
    rooms: Vec<(usize, Room)>,
    lines: Vec<String>,
}

impl Story {
    /// Nothing yet. Lines are kept of what concerns `trace`.
    pub fn new(trace: Option<Room>) -> Story {
        Story { hash: 0, happenings: 0, trace, rooms: Vec::new(), lines: Vec::new() }
    }

    /// Something happened at `place`. `room` is whom it concerns, if that is known; all numbers count for the hash.
    pub fn tell(
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
            self.hash = mix(self.hash ^ number);
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

    /// Something is done to the cluster, which may concern any room.
    pub fn tell_of_fault(&mut self, at: Nanos, fault: &impl Display) {
        if self.trace.is_some() {
            let time = at as f64 / (1000 * MICRO) as f64;
            self.lines.push(format!("{time:12.3} ms  {fault}"));
        }
    }

    /// Equal for equal stories.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// How much happened.
    pub fn happenings(&self) -> u64 {
        self.happenings
    }

    /// The rooms of requests, if one is asked for.
    pub fn rooms(&self) -> Vec<(usize, Room)> {
        self.rooms.clone()
    }

    /// The lines of the room asked for.
    pub fn lines(&self) -> &[String] {
        &self.lines
    }
}
