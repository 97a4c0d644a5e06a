//! How a process that was told to go goes: it takes nothing new, finishes what it has, is seen to drain, and ends.
//!
//! ```text
//! serves ──SIGTERM, POST /drain──▶ drains ──idle, flushed, and nobody there who does not know──▶ ended
//! ```
//! Thread: `ctl`. No I/O: it is told what is left, and tells when that is an end. Invariants: what was taken is
//! finished; who keeps a connection (a router between two requests) has the time to hear of the drain before it
//! breaks, so that no request meets its end. Not here: what refuses new requests (`routes`, `router::paths`).

use crate::limits::{DRAIN_DONE_TIME, DRAIN_FLUSH_TIME, DRAIN_NOTICE_TIME, DRAIN_TIME_MAX};
use crate::stdx::planted::is_planted;
use std::time::Instant;

/// Why a process has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// Everything was answered.
    Drained,
    /// Time was up, or a second signal came, and requests were cut off.
    CutOff,
}

/// What is left of a process's work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Left {
    /// Whether requests run.
    pub busy: bool,
    /// Bytes that wait to be sent.
    pub queued: usize,
    /// Connections of clients that stand.
    pub clients: usize,
    /// Hand-overs that are done here, and of which their destinations have not said so: what was written there may not have
    /// been looked at, and would be given up with the link.
    pub unheard: usize,
}

/// Whether, and since when, a process drains.
#[derive(Clone, Copy, Default, Debug)]
pub struct Drain {
    begun: Option<Instant>,
    /// Since when nothing runs.
    idle: Option<Instant>,
    signalled: bool,
}

impl Drain {
    /// Begins, unless it has; says whether it does so now.
    pub fn begin(&mut self, now: Instant) -> bool {
        let is_first = self.begun.is_none();
        self.begun.get_or_insert(now);
        is_first
    }

    /// A signal to end has come; says whether it was the second.
    pub fn signal(&mut self) -> bool {
        std::mem::replace(&mut self.signalled, true)
    }

    /// Whether the process drains.
    pub fn is_begun(&self) -> bool {
        self.begun.is_some()
    }

    /// What it means for what is left that the process ends now: at a second signal.
    pub fn cut(left: Left) -> End {
        if left.busy || left.queued > 0 { End::CutOff } else { End::Drained }
    }

    /// Whether the process has come to its end.
    pub fn end(&mut self, left: Left, now: Instant) -> Option<End> {
        let begun = self.begun?;
        if left.busy && !is_planted("drain does not wait for requests") {
            self.idle = None;
            return (now >= begun + DRAIN_TIME_MAX).then_some(End::CutOff);
        }
        let idle = *self.idle.get_or_insert(now);
        let is_known = left.clients == 0 || now >= begun + DRAIN_NOTICE_TIME;
        let may_lose = left.unheard > 0 && !is_planted("drain does not wait for Done");
        if may_lose && now < idle + DRAIN_DONE_TIME {
            return None;
        }
        if left.queued == 0 {
            is_known.then_some(End::Drained)
        } else {
            (now >= idle + DRAIN_FLUSH_TIME).then_some(End::CutOff)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const NOTHING: Left = Left { busy: false, queued: 0, clients: 0, unheard: 0 };
    const MOMENT: Duration = Duration::from_millis(1);

    fn begun(now: Instant) -> Drain {
        let mut drain = Drain::default();
        assert_eq!(drain.end(NOTHING, now), None, "nobody has told it to");
        assert!(drain.begin(now) && drain.is_begun() && !drain.begin(now));
        drain
    }

    #[test]
    fn an_idle_process_that_nobody_knows_ends_at_once() {
        let now = Instant::now();
        assert_eq!(begun(now).end(NOTHING, now), Some(End::Drained));
    }

    #[test]
    fn what_runs_is_waited_for_and_what_was_said_arrives() {
        let now = Instant::now();
        let mut drain = begun(now);
        let busy = Left { busy: true, ..NOTHING };
        let late = now + DRAIN_TIME_MAX;
        assert_eq!(drain.end(busy, late - MOMENT), None);
        let unread = Left { queued: 1, ..NOTHING };
        assert_eq!(drain.end(unread, late - MOMENT), None);
        assert_eq!(drain.end(unread, late), None, "it reads on for a while");
        assert_eq!(drain.end(NOTHING, late), Some(End::Drained));
        assert_eq!(drain.end(unread, late - MOMENT + DRAIN_FLUSH_TIME), Some(End::CutOff));
        assert_eq!(begun(now).end(busy, late), Some(End::CutOff));
    }

    #[test]
    fn what_was_written_is_seen_before_the_link_ends() {
        let now = Instant::now();
        let unheard = Left { unheard: 1, ..NOTHING };
        let mut drain = begun(now);
        assert_eq!(drain.end(unheard, now), None);
        assert_eq!(drain.end(unheard, now + DRAIN_DONE_TIME - MOMENT), None);
        assert_eq!(drain.end(NOTHING, now + DRAIN_DONE_TIME - MOMENT), Some(End::Drained));
        assert_eq!(
            drain.end(unheard, now + DRAIN_DONE_TIME),
            Some(End::Drained),
            "who says nothing has had its time"
        );
    }

    #[test]
    fn who_keeps_a_connection_has_time_to_hear_of_it() {
        let now = Instant::now();
        let mut drain = begun(now);
        let known = Left { clients: 1, ..NOTHING };
        assert_eq!(drain.end(known, now + DRAIN_NOTICE_TIME - MOMENT), None);
        assert_eq!(drain.end(known, now + DRAIN_NOTICE_TIME), Some(End::Drained));
    }

    #[test]
    fn a_second_signal_is_told_from_a_first_one_after_a_request() {
        let mut drain = begun(Instant::now());
        assert!(!drain.signal() && drain.signal());
        let known = Left { clients: 1, ..NOTHING };
        assert_eq!([NOTHING, known].map(Drain::cut), [End::Drained; 2], "nobody lost anything");
        let unread = Left { queued: 1, ..known };
        assert_eq!([Left { busy: true, ..known }, unread].map(Drain::cut), [End::CutOff; 2]);
    }
}
