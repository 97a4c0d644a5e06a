//! Every request ends, once and in time; and well, where nothing was done to it.

use super::{Checked, Checker, Finding};
use crate::cause::Cause;
use crate::sched::mailbox::Outcome;
use crate::sim::agenda::Nanos;

/// What requests may end with where processes die, links break, and places are few.
const HAPPENS: &[Cause] = &[
    Cause::ClientGone,
    Cause::Refused,
    Cause::Overloaded,
    Cause::PeerLost,
    Cause::Deadline,
    Cause::OtherLeg,
    Cause::Flushed,
];

#[derive(Clone, Copy, Debug)]
struct Entry {
    until: Nanos,
    ended: bool,
    /// Nothing is done to it that could make it fail.
    must_succeed: bool,
}

/// All requests so far.
#[derive(Debug, Default)]
pub struct Ends {
    entries: Vec<Entry>,
    open: usize,
}

impl Ends {
    /// The next request has begun, and has to be over by `until`.
    pub fn begun(&mut self, until: Nanos, must_succeed: bool) {
        self.entries.push(Entry { until, ended: false, must_succeed });
        self.open += 1;
    }

    /// A request is over for its client.
    pub fn ended(&mut self, id: usize, how: Result<Outcome, Cause>) -> Checked {
        let wrong = |what: String| Err(Finding::about(Checker::Ends, id, what));
        let entry = &mut self.entries[id];
        if std::mem::replace(&mut entry.ended, true) {
            return wrong(format!("request {id} ended twice"));
        }
        self.open -= 1;
        match how {
            Err(cause) if entry.must_succeed => {
                wrong(format!("request {id} failed ({cause}), and nothing was done to it"))
            }
            Err(cause) if !HAPPENS.contains(&cause) => {
                wrong(format!("request {id} failed ({cause}), which nothing that was done explains"))
            }
            _ => Ok(()),
        }
    }

    /// Requests that are not over.
    pub fn open(&self) -> usize {
        self.open
    }

    /// Whether one should be over.
    pub fn overdue(&self, now: Nanos) -> Checked {
        let late = |entry: &Entry| !entry.ended && entry.until < now;
        match self.entries.iter().position(late) {
            Some(id) => Err(Finding::about(Checker::Ends, id, format!("request {id} has not ended in time"))),
            None => Ok(()),
        }
    }
}
