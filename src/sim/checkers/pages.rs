//! `free + cached + in use + leased = total` after each turn of an engine.

use crate::sched::stats::WorkerStats;

/// A worker's counts, against the pages of its pool.
pub fn conserved(process: usize, stats: &WorkerStats, total: u32) -> Result<(), String> {
    let counts = stats.pages();
    match counts.total() == total {
        true => Ok(()),
        false => Err(format!("process {process}: {counts:?} are not {total} pages")),
    }
}
