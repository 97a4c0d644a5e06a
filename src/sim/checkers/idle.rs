//! An idle process holds nothing: no page, lease, slot or place in a queue, and later no room.

use super::{Checked, Checker, Finding};
use crate::sim::process::{Process, WORKER};

/// Checks a process that has no work in flight.
pub fn holds_nothing(index: usize, process: &Process) -> Checked {
    let held = process.stats.check_idle().and_then(|()| {
        let worker = process.edge.handoff().worker(WORKER);
        match worker.slots() - worker.free_slots() {
            0 => Ok(()),
            slots => Err(format!("{slots} slots")),
        }
    });
    held.map_err(|held| {
        Finding::new(Checker::Idle, format!("process {index} is idle and holds {held}"))
    })
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
pub fn charges_nothing(reserved: u32) -> Checked {
    match reserved {
        0 => Ok(()),
        reserved => Err(Finding::new(
            Checker::Idle,
            format!("the router charges workers with {reserved} sequences"),
        )),
    }
}
