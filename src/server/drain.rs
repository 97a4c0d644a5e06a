//! The end of a process after SIGTERM or `POST /drain`: it accepts nothing new, finishes its work,
//! reports that it drains, and exits.
//!
//! ```text
//! serves ──SIGTERM, POST /drain──▶ drains ──idle, flushed, every client notified──▶ ended
//! ```
//! Thread: `ctl`. No I/O: callers pass the remaining work and get the outcome. Invariants: accepted
//! work is finished. A client with an open connection, such as a router, has time to notice the
//! drain before the exit, so no request is lost. Not here: the refusal of new requests
//! (`worker::routes`, `router::routes`).

use crate::limits::{DRAIN_DONE_TIME, DRAIN_FLUSH_TIME, DRAIN_NOTICE_TIME, DRAIN_TIME_MAX};
use crate::stdx::failpoint::is_failpoint_active;
use std::time::{Duration, Instant};

/// How a drain ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DrainOutcome {
    /// Every request was answered.
    Drained,
    /// The time was over or a second signal came, and requests were cut off.
    CutOff,
}

/// The remaining work of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RemainingWork {
    /// Whether requests are running.
    pub busy: bool,
    /// Bytes that are queued to be sent.
    pub queued: usize,
    /// Open connections of clients.
    pub clients: usize,
    /// Hand-offs that are over here, while writes are under way or their destinations have not
    /// confirmed them. If the link ended now, data that a destination has not checked would be
    /// lost.
    pub unconfirmed: usize,
}

/// Whether a process drains, and since when.
#[derive(Clone, Copy, Default, Debug)]
pub struct Drain {
    begun: Option<Instant>,
    /// Time since which no request runs.
    idle: Option<Instant>,
    signalled: bool,
}

impl Drain {
    /// Begins the drain. Returns whether this call began it.
    pub fn begin(&mut self, now: Instant) -> bool {
        let is_first = self.begun.is_none();
        self.begun.get_or_insert(now);
        is_first
    }

    /// Records a termination signal. Returns whether it was the second.
    pub fn signal(&mut self) -> bool {
        std::mem::replace(&mut self.signalled, true)
    }

    /// Whether the process drains.
    pub fn is_begun(&self) -> bool {
        self.begun.is_some()
    }

    /// The process was paused: the time does not count against its destinations and clients, which
    /// could not be heard.
    pub fn exclude_pause(&mut self, pause: Duration) {
        self.idle = self.idle.map(|idle| idle + pause);
    }

    /// The outcome if the process ends now, at a second signal.
    pub fn cut(left: RemainingWork) -> DrainOutcome {
        if left.busy || left.queued > 0 { DrainOutcome::CutOff } else { DrainOutcome::Drained }
    }

    /// The outcome of the drain. `None` before its end.
    pub fn poll_outcome(&mut self, left: RemainingWork, now: Instant) -> Option<DrainOutcome> {
        let begun = self.begun?;
        if left.busy && !is_failpoint_active("drain does not wait for requests") {
            self.idle = None;
            return (now >= begun + DRAIN_TIME_MAX).then_some(DrainOutcome::CutOff);
        }
        let idle = *self.idle.get_or_insert(now);
        let is_known = left.clients == 0 || now >= begun + DRAIN_NOTICE_TIME;
        let may_lose = left.unconfirmed > 0 && !is_failpoint_active("drain does not wait for Done");
        if may_lose && now < idle + DRAIN_DONE_TIME {
            return None;
        }
        if left.queued == 0 {
            is_known.then_some(DrainOutcome::Drained)
        } else {
            (now >= idle + DRAIN_FLUSH_TIME).then_some(DrainOutcome::CutOff)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: RemainingWork =
        RemainingWork { busy: false, queued: 0, clients: 0, unconfirmed: 0 };
    const MOMENT: Duration = Duration::from_millis(1);

    fn begun(now: Instant) -> Drain {
        let mut drain = Drain::default();
        assert_eq!(drain.poll_outcome(NOTHING, now), None, "no drain was requested");
        assert!(drain.begin(now) && drain.is_begun() && !drain.begin(now));
        drain
    }

    #[test]
    fn an_idle_process_without_clients_ends_at_once() {
        let now = Instant::now();
        assert_eq!(begun(now).poll_outcome(NOTHING, now), Some(DrainOutcome::Drained));
    }

    #[test]
    fn a_drain_waits_for_running_requests_and_unsent_answers() {
        let now = Instant::now();
        let mut drain = begun(now);
        let busy = RemainingWork { busy: true, ..NOTHING };
        let late = now + DRAIN_TIME_MAX;
        assert_eq!(drain.poll_outcome(busy, late - MOMENT), None);
        let unread = RemainingWork { queued: 1, ..NOTHING };
        assert_eq!(drain.poll_outcome(unread, late - MOMENT), None);
        assert_eq!(drain.poll_outcome(unread, late), None, "the client has time to read");
        assert_eq!(drain.poll_outcome(NOTHING, late), Some(DrainOutcome::Drained));
        assert_eq!(
            drain.poll_outcome(unread, late - MOMENT + DRAIN_FLUSH_TIME),
            Some(DrainOutcome::CutOff)
        );
        assert_eq!(begun(now).poll_outcome(busy, late), Some(DrainOutcome::CutOff));
    }

    #[test]
    fn a_drain_waits_for_the_confirmation_of_written_kv() {
        let now = Instant::now();
        let unconfirmed = RemainingWork { unconfirmed: 1, ..NOTHING };
        let mut drain = begun(now);
        assert_eq!(drain.poll_outcome(unconfirmed, now), None);
        assert_eq!(drain.poll_outcome(unconfirmed, now + DRAIN_DONE_TIME - MOMENT), None);
        assert_eq!(
            drain.poll_outcome(NOTHING, now + DRAIN_DONE_TIME - MOMENT),
            Some(DrainOutcome::Drained)
        );
        assert_eq!(
            drain.poll_outcome(unconfirmed, now + DRAIN_DONE_TIME),
            Some(DrainOutcome::Drained),
            "a silent destination has had its time"
        );
    }

    #[test]
    fn a_pause_of_the_process_takes_no_time_from_destinations() {
        let now = Instant::now();
        let unconfirmed = RemainingWork { unconfirmed: 1, ..NOTHING };
        let mut drain = begun(now);
        assert_eq!(drain.poll_outcome(unconfirmed, now), None);
        let pause = DRAIN_DONE_TIME * 2;
        drain.exclude_pause(pause);
        let late = now + pause + DRAIN_DONE_TIME;
        assert_eq!(drain.poll_outcome(unconfirmed, late - MOMENT), None);
        assert_eq!(drain.poll_outcome(unconfirmed, late), Some(DrainOutcome::Drained));
    }

    #[test]
    fn a_client_with_an_open_connection_has_time_to_notice_the_drain() {
        let now = Instant::now();
        let mut drain = begun(now);
        let known = RemainingWork { clients: 1, ..NOTHING };
        assert_eq!(drain.poll_outcome(known, now + DRAIN_NOTICE_TIME - MOMENT), None);
        assert_eq!(drain.poll_outcome(known, now + DRAIN_NOTICE_TIME), Some(DrainOutcome::Drained));
    }

    #[test]
    fn a_second_signal_is_told_from_a_first_one_after_a_request() {
        let mut drain = begun(Instant::now());
        assert!(!drain.signal() && drain.signal());
        let known = RemainingWork { clients: 1, ..NOTHING };
        assert_eq!(
            [NOTHING, known].map(Drain::cut),
            [DrainOutcome::Drained; 2],
            "no request was lost"
        );
        let unread = RemainingWork { queued: 1, ..known };
        assert_eq!(
            [RemainingWork { busy: true, ..known }, unread].map(Drain::cut),
            [DrainOutcome::CutOff; 2]
        );
    }
}
