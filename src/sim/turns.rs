//! When the processes of a simulated run take their turns.
//!
//! Owns: the time of each host's next turn, and which hosts stand still. Thread: that of the run.
//! Invariant: the queue can hold several turns of a host; only the earliest one is due. Not here:
//! what a turn does.

use super::Event;
use crate::stdx::event_queue::{EventQueue, MICRO, Nanos};
use crate::stdx::rng::Rng;

/// The longest delay between a reason to wake and the turn of a process.
pub(super) const LATENESS: Nanos = 50 * MICRO;

/// By host: the time of its next turn, and the time until which it takes none.
pub(super) struct TurnSchedule {
    due: Vec<Option<Nanos>>,
    stalled_until: Vec<Nanos>,
}

impl TurnSchedule {
    /// All hosts have a turn at time 0.
    pub(super) fn new(hosts: usize) -> TurnSchedule {
        TurnSchedule { due: vec![Some(0); hosts], stalled_until: vec![0; hosts] }
    }

    pub(super) fn hosts(&self) -> usize {
        self.due.len()
    }

    pub(super) fn is_due(&self, host: usize, now: Nanos) -> bool {
        self.due[host] == Some(now)
    }

    /// Schedules a turn soon.
    pub(super) fn wake(
        &mut self,
        host: usize,
        now: Nanos,
        dice: &mut Rng,
        queue: &mut EventQueue<Event>,
    ) {
        self.schedule(host, now + dice.range_u64(0, LATENESS), queue);
    }

    /// Schedules a turn, unless an earlier one is due.
    pub(super) fn schedule(&mut self, host: usize, at: Nanos, queue: &mut EventQueue<Event>) {
        let at = at.max(self.stalled_until[host]);
        if self.due[host].is_none_or(|due| at < due) {
            self.due[host] = Some(at);
            queue.schedule(at, Event::Turn(host));
        }
    }

    /// The turn of a host has come: it has no other one until the next is scheduled.
    pub(super) fn take(&mut self, host: usize) {
        self.due[host] = None;
    }

    pub(super) fn is_stalled(&self, host: usize, now: Nanos) -> bool {
        now < self.stalled_until[host]
    }

    /// By host: the time until which it takes no turn.
    pub(super) fn stalled_until(&self) -> &[Nanos] {
        &self.stalled_until
    }

    /// Stops a host until this time, or longer.
    pub(super) fn stall(&mut self, host: usize, until: Nanos) {
        self.stalled_until[host] = self.stalled_until[host].max(until);
    }

    /// A process starts. It does not stand still as the one before it did.
    pub(super) fn restart(&mut self, host: usize, now: Nanos) {
        self.stalled_until[host] = now;
    }
}
