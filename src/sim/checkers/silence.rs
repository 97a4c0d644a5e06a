//! Who stands still is not waited for: what the router asked of a worker before it fell silent is given up once its probes
//! must have told, and goes on elsewhere. And who is at work does not look as if it stood still.

use super::reasons::WEATHER;
use super::{Checked, Checker, Finding};
use crate::limits::{ROUTER_PROBE_FAILURES, ROUTER_PROBE_INTERVAL, ROUTER_PROBE_TIME};
use crate::sim::agenda::{Nanos, SECOND};
use crate::sim::cluster::ENGINE_LOOKS;

/// From a worker's last sign of life until its probes have told: one had just gone well, then as many fail as make it
/// silent; ticks and what is still on its way come on top.
pub const KNOWN: Nanos = (ROUTER_PROBE_INTERVAL.as_nanos()
    + ROUTER_PROBE_FAILURES as u128 * ROUTER_PROBE_TIME.as_nanos())
    as Nanos
    + SECOND;
/// The same where workers are asked who they are: one that was down already may have just told that when it fell silent, and
/// the next look comes at its interval, with a question that is not answered and counts only with the probe behind it.
pub const KNOWN_ANEW: Nanos = KNOWN + ROUTER_PROBE_TIME.as_nanos() as Nanos;
/// From the end of what kept an engine until it has moved, also one without work, and somebody has looked.
const LOOKS_AGAIN: Nanos = ENGINE_LOOKS + WEATHER;

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

/// A worker whose engine looks as if it hung; `kept` is until when something last kept it, or moved its clock.
pub fn hangs(worker: usize, kept: Nanos, now: Nanos) -> Checked {
    match now <= kept + LOOKS_AGAIN {
        true => Ok(()),
        false => {
            let what = format!("process {worker} is at work and is taken for dead");
            Err(Finding::new(Checker::Silence, what))
        }
    }
}
