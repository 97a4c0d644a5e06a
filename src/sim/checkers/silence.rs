//! No request waits for a stalled worker. When its probes have failed, the router cancels the
//! requests that it sent to the worker before the stall. They continue on other workers. A busy
//! worker does not look stalled.

use super::reasons::WEATHER;
use super::{Checked, Checker, Finding};
use crate::limits::{ROUTER_PROBE_FAILURES, ROUTER_PROBE_INTERVAL, ROUTER_PROBE_TIME};
use crate::stdx::event_queue::{Nanos, SECOND};

/// Time between two checks of an idle engine for work.
pub const ENGINE_LOOKS: Nanos = SECOND;
/// Time from a worker's last sign of life until probes have detected the silence: one probe has
/// just succeeded, then `ROUTER_PROBE_FAILURES` probes fail. Ticks and messages in flight take up
/// to a second more.
pub const KNOWN: Nanos = (ROUTER_PROBE_INTERVAL.as_nanos()
    + ROUTER_PROBE_FAILURES as u128 * ROUTER_PROBE_TIME.as_nanos())
    as Nanos
    + SECOND;
/// The same time if the router also sends identity queries. A worker that was down can have
/// answered one just before it fell silent. The next query follows one interval later and gets no
/// answer. It counts only together with the next probe.
pub const KNOWN_ANEW: Nanos = KNOWN + ROUTER_PROBE_TIME.as_nanos() as Nanos;
/// Time from the end of a stall until the engine has made progress, even without work, and the
/// progress was checked.
const LOOKS_AGAIN: Nanos = ENGINE_LOOKS + WEATHER;

/// Checks a worker that has stalled for that long. `waits`: a request that was sent before still
/// waits for it.
pub fn known(worker: usize, waits: bool) -> Checked {
    match waits {
        false => Ok(()),
        true => {
            let what = format!("worker {worker} stands still and is waited for");
            Err(Finding::new(Checker::Silence, what))
        }
    }
}

/// Checks a worker with an engine that looks hung. `kept` is the end of the last fault that delayed
/// it or moved its clock.
pub fn hangs(worker: usize, kept: Nanos, now: Nanos) -> Checked {
    match now <= kept + LOOKS_AGAIN {
        true => Ok(()),
        false => {
            let what = format!("process {worker} is at work and is taken for dead");
            Err(Finding::new(Checker::Silence, what))
        }
    }
}
