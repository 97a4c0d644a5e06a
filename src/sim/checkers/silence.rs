//! A stalled worker is not waited for. Requests that the router sent it before it fell silent are
//! given up once its probes have failed, and continue elsewhere. A busy worker does not look
//! stalled.

use super::reasons::WEATHER;
use super::{Checked, Checker, Finding};
use crate::limits::{ROUTER_PROBE_FAILURES, ROUTER_PROBE_INTERVAL, ROUTER_PROBE_TIME};
use crate::sim::cluster::ENGINE_LOOKS;
use crate::stdx::event_queue::{Nanos, SECOND};

/// Time from a worker's last sign of life until its probes have detected the silence. One probe has
/// just succeeded, then `ROUTER_PROBE_FAILURES` probes fail. Ticks and messages in flight add up to
/// a second.
pub const KNOWN: Nanos = (ROUTER_PROBE_INTERVAL.as_nanos()
    + ROUTER_PROBE_FAILURES as u128 * ROUTER_PROBE_TIME.as_nanos())
    as Nanos
    + SECOND;
/// The same if the router also asks workers for their identity. A worker that was down can have
/// answered that just before it fell silent. The next question comes one interval later, gets no
/// answer, and counts only with the probe after it.
pub const KNOWN_ANEW: Nanos = KNOWN + ROUTER_PROBE_TIME.as_nanos() as Nanos;
/// Time from the end of a stall until the engine has moved, even without work, and its progress was
/// checked.
const LOOKS_AGAIN: Nanos = ENGINE_LOOKS + WEATHER;

/// A worker that stalls for that long. `waits` says whether a request sent before still waits for
/// it.
pub fn known(worker: usize, waits: bool) -> Checked {
    match waits {
        false => Ok(()),
        true => {
            let what = format!("worker {worker} stands still and is waited for");
            Err(Finding::new(Checker::Silence, what))
        }
    }
}

/// A worker with an engine that looks hung. `kept` is the end of the last fault that held it up or
/// moved its clock.
pub fn hangs(worker: usize, kept: Nanos, now: Nanos) -> Checked {
    match now <= kept + LOOKS_AGAIN {
        true => Ok(()),
        false => {
            let what = format!("process {worker} is at work and is taken for dead");
            Err(Finding::new(Checker::Silence, what))
        }
    }
}
