//! The load mode: a cluster of up to a thousand workers and more under a trace, with a model of what a forward pass
//! costs in place of the pass, and no bytes of KV: for policies, sizes and scale.
//!
//! ```text
//! arrivals ──▶ cluster: agenda ──▶ router: who serves ──▶ one turn of one worker ──▶ report
//!                  ▲              (cluster::{router, flight})   (sched::{prefill, decode})
//!                  └───── transfers: lease, two NICs, end of the lease ◀──┘
//! ```
//! Of production: the router's decisions, the schedulers with their pools, prefix caches, admission and batches, the
//! status table, the rings to the mover. Not here: what the fault mode tries (managers, movers and transports, links,
//! whoever dies), HTTP, and time that threads lose: a turn comes when there is something to do.
//! Invariant: a seed repeats itself, to the last happening.

pub mod arrivals;
pub mod baselines;
pub mod cluster;
pub mod cost;
pub mod host;
pub mod nic;
pub mod place;
pub mod plan;
pub mod report;
pub mod trace;
pub mod transfers;

use crate::config::error::ConfigError;
use crate::say;
use crate::sys::heap;
use plan::Plan;

/// Runs what was asked for and says what came of it. True when all is well.
///
/// # Errors
/// The trace cannot be used.
pub fn run(plan: &Plan) -> Result<bool, ConfigError> {
    heap::map_large_blocks();
    if let Some(against) = &plan.against {
        return baselines::run(plan, against);
    }
    let arrivals = plan.arrivals()?;
    let summary = match cluster::Cluster::new(plan, &arrivals).run() {
        Ok(summary) => summary,
        Err(failure) => {
            say!("{failure}");
            return Ok(false);
        }
    };
    if plan.json {
        say!("{}", serde_json::to_string(&summary).expect("a summary has only string keys"));
    } else {
        say!("{summary}");
    }
    Ok(true)
}
