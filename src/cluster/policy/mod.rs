//! How a worker is chosen among those of one role: pure functions over their loads, one file each.
//!
//! `last` is the place of the worker chosen before; a policy names a usable worker whenever there is one.

pub mod least_loaded;
pub mod round_robin;

use super::loads::Load;
use crate::config::resolved::Policy;

/// The place in `loads` of the worker to choose.
pub fn pick(policy: Policy, loads: &[Load], last: usize) -> Option<usize> {
    match policy {
        Policy::LeastLoaded => least_loaded::pick(loads, last),
        Policy::RoundRobin => round_robin::pick(loads, last),
    }
}

/// All places, beginning with the one after `last`.
fn places_after(last: usize, count: usize) -> impl Iterator<Item = usize> {
    (1..=count).map(move |step| (last + step) % count)
}
