//! An idle process holds nothing: no page, lease, slot or place in a queue, and later no room.

use super::{Checked, Checker, Finding};
use crate::sched::stats::WorkerStats;
use crate::sim::process::{Process, WORKER};
use std::sync::atomic::Ordering::Relaxed;

/// Checks a process that has no work in flight.
pub fn holds_nothing(index: usize, process: &Process) -> Checked {
    let left = |what: &str, count: usize| match count {
        0 => Ok(()),
        count => {
            let what = format!("process {index} is idle and holds {count} {what}");
            Err(Finding::new(Checker::Idle, what))
        }
    };
    let WorkerStats {
        bootstrapping,
        waiting,
        transferring,
        arrived,
        running,
        retracted,
        swapped,
        ending,
        ..
    } = &*process.stats;
    for (what, queue) in [
        ("requests without the other leg", bootstrapping),
        ("waiting requests", waiting),
        ("transfers", transferring),
        ("arrived requests", arrived),
        ("running requests", running),
        ("retracted requests", retracted),
        ("pages of KV of retracted requests", swapped),
        ("leases of requests that are over", ending),
    ] {
        left(what, queue.load(Relaxed) as usize)?;
    }
    let counts = process.stats.pages();
    left("pages in use", counts.in_use as usize)?;
    left("leased pages", counts.leased as usize)?;
    let worker = process.edge.handoff().worker(WORKER);
    left("slots", worker.slots() - worker.free_slots())
}

/// Checks that the process has no rooms. A room without a request is kept for a while.
pub fn has_no_rooms(index: usize, process: &Process) -> Checked {
    match process.edge.open_rooms() {
        0 => Ok(()),
        count => {
            let what = format!("process {index} is idle and knows {count} open rooms");
            Err(Finding::new(Checker::Idle, what))
        }
    }
}

/// Checks that the router charges no worker with load.
pub fn charges_nothing(booked: u32) -> Checked {
    match booked {
        0 => Ok(()),
        booked => Err(Finding::new(
            Checker::Idle,
            format!("the router charges workers with {booked} sequences"),
        )),
    }
}
