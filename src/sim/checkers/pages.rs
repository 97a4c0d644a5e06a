//! Page counts: `free + cached + in use + leased = total` holds after each turn of an engine.

use super::{Checked, Checker, Finding};
use crate::sched::stats::WorkerStats;

/// Compares a worker's counts with the pages of its pool.
pub fn conserved(process: usize, stats: &WorkerStats, total: u32) -> Checked {
    let counts = stats.pages();
    match counts.total() == total {
        true => Ok(()),
        false => Err(Finding::new(
            Checker::Pages,
            format!("process {process}: {counts:?} are not {total} pages"),
        )),
    }
}
