//! Whether one worker can be used: probed at intervals, and believed to be down at once where it does not
//! take connections.
//!
//! A worker begins as down and is probed at once. Not here: the probe itself and how long it may take.

use crate::limits::{ROUTER_PROBE_FAILURES, ROUTER_PROBE_INTERVAL};
use std::time::Instant;

/// What has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// The worker can be used from now on.
    Up,
    /// It cannot.
    Down,
}

/// What is known of a worker's health.
#[derive(Clone, Debug)]
pub struct Health {
    up: bool,
    /// Probes that failed since one succeeded.
    failures: u32,
    /// When the next probe is due; `None` while one is under way.
    next_probe: Option<Instant>,
}

impl Health {
    /// Of a worker that nothing is known of.
    pub fn new(now: Instant) -> Health {
        Health { up: false, failures: 0, next_probe: Some(now) }
    }

    /// Whether it can be used.
    pub fn is_up(&self) -> bool {
        self.up
    }

    /// Whether as many probes in a row have failed as make it down.
    pub fn is_silent(&self) -> bool {
        self.failures >= ROUTER_PROBE_FAILURES
    }

    /// Whether a probe is to begin now; it ends with [`Health::probed`].
    pub fn begin_probe(&mut self, now: Instant) -> bool {
        self.next_probe.take_if(|due| *due <= now).is_some()
    }

    /// The next probe is due now, unless one is under way.
    pub fn hasten(&mut self, now: Instant) {
        self.next_probe = self.next_probe.map(|due| due.min(now));
    }

    /// A probe has ended.
    pub fn probed(&mut self, is_well: bool, now: Instant) -> Option<Change> {
        self.failures = if is_well { 0 } else { self.failures.saturating_add(1) };
        let up = is_well || (self.up && self.failures < ROUTER_PROBE_FAILURES);
        // Clients wait for one of which nobody knows whether it still is.
        let is_doubtful = up && !is_well;
        self.next_probe = Some(if is_doubtful { now } else { now + ROUTER_PROBE_INTERVAL });
        self.turn(up)
    }

    /// A probe was answered, by one that takes nothing new: it stands not still, and what it runs goes on.
    pub fn declined(&mut self, now: Instant) -> Option<Change> {
        self.failures = 0;
        self.next_probe = Some(now + ROUTER_PROBE_INTERVAL);
        self.turn(false)
    }

    /// It did not take a connection.
    pub fn refused(&mut self) -> Option<Change> {
        self.turn(false)
    }

    fn turn(&mut self, up: bool) -> Option<Change> {
        let was = std::mem::replace(&mut self.up, up);
        (was != up).then_some(if up { Change::Up } else { Change::Down })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_success_is_up_and_two_failures_in_a_row_are_down() {
        let now = Instant::now();
        let mut health = Health::new(now);
        assert!(!health.is_up());
        let mut seen = Vec::new();
        for is_well in [false, true, true, false, true, false, false, false, true] {
            seen.push((health.probed(is_well, now), health.is_up()));
        }
        let (up, down) = (Some(Change::Up), Some(Change::Down));
        assert_eq!(
            seen,
            [
                (None, false),
                (up, true),
                (None, true),
                (None, true),
                (None, true),
                (None, true),
                (down, false),
                (None, false),
                (up, true)
            ]
        );
    }

    #[test]
    fn the_first_probe_is_due_at_once_and_the_next_an_interval_after_the_last_ended() {
        let now = Instant::now();
        let mut health = Health::new(now);
        assert!(health.begin_probe(now));
        assert!(!health.begin_probe(now + 10 * ROUTER_PROBE_INTERVAL), "one at a time");
        health.probed(true, now);
        assert!(!health.begin_probe(now + ROUTER_PROBE_INTERVAL / 2));
        assert!(health.begin_probe(now + ROUTER_PROBE_INTERVAL));
        health.hasten(now);
        assert!(!health.begin_probe(now + ROUTER_PROBE_INTERVAL), "still one at a time");
        health.probed(true, now);
        health.hasten(now);
        assert!(health.begin_probe(now), "sooner, where there is reason");
        health.probed(false, now);
        assert!(health.begin_probe(now), "one failure is doubtful, and is asked again at once");
        health.probed(false, now);
        assert!(!health.begin_probe(now), "two are not");
    }

    #[test]
    fn one_that_takes_nothing_new_is_not_silent() {
        let now = Instant::now();
        let mut health = Health::new(now);
        health.probed(true, now);
        assert_eq!([(); 3].map(|()| health.declined(now)), [Some(Change::Down), None, None]);
        health.probed(false, now);
        assert!(!health.is_silent(), "one lost probe tells nothing");
        health.probed(false, now);
        assert!(health.is_silent() && !health.is_up());
    }

    #[test]
    fn a_refused_connection_is_down_at_once_until_a_probe_succeeds() {
        let now = Instant::now();
        let mut health = Health::new(now);
        health.probed(true, now);
        assert_eq!(health.refused(), Some(Change::Down));
        assert_eq!(health.refused(), None);
        assert_eq!(health.probed(true, now), Some(Change::Up));
    }
}
