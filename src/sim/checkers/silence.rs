//! Who stands still is not waited for: what the router asked of a worker before it fell silent is given up once its probes
//! must have told, and goes on elsewhere.

use super::{Checked, Checker, Finding};
use crate::limits::{ROUTER_PROBE_FAILURES, ROUTER_PROBE_INTERVAL, ROUTER_PROBE_TIME};
use crate::sim::agenda::{Nanos, SECOND};

/// From a worker's last sign of life until its probes have told: one had just gone well, then as many fail as make it
/// silent; ticks and what is still on its way come on top.
pub const KNOWN: Nanos = (ROUTER_PROBE_INTERVAL.as_nanos()
    + ROUTER_PROBE_FAILURES as u128 * ROUTER_PROBE_TIME.as_nanos()) as Nanos
    + SECOND;

/// A worker that stands still for as long; `waits` says whether something that was asked before still waits for it.
pub fn known(worker: usize, waits: bool) -> Checked {
    match waits {
        false => Ok(()),
        true => {
            let what = format!("worker {worker} stands still and is waited for");
            Err(Finding::new(Checker::Silence, what))
        }
    }
}
