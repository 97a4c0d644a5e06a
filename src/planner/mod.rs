//! The load mode of `baton sim`: a cluster of a thousand or more workers under a trace. A cost
//! model replaces the forward pass, and no bytes of KV exist.
//!
//! ```text
//! arrivals ──▶ cluster: event queue ─▶ router: which pair ─▶ one turn of one worker ──▶ report
//!                  ▲              (routing::{balancer, attempts})  (sched::{prefill, decode})
//!                  └───── transfers: lease, two NICs, end of the lease ◀──┘
//! ```
//! Production code: the router's decisions, the schedulers with their pools, prefix caches,
//! admission and batches, the choice of the session that gives way, the status table, the rings to
//! the mover. Not here: the parts that the fault mode covers (managers, movers, transports, links,
//! faults), HTTP, and the latency of threads. Invariant: the same seed gives the
//! same run.

pub mod arrivals;
pub mod baselines;
pub mod cluster;
pub mod cost;
pub mod host;
pub mod nic;
pub mod place;
pub mod plan;
pub mod report;
pub mod sessions;
pub mod trace;
pub mod transfers;
pub mod violation;

use crate::config::error::ConfigError;
use crate::say;
use crate::sys::heap;
use plan::LoadPlan;

/// Runs the load and prints the result. Returns whether all is well.
///
/// # Errors
/// The trace cannot be used.
pub fn run(plan: &LoadPlan) -> Result<bool, ConfigError> {
    heap::map_large_blocks();
    if let Some(against) = &plan.against {
        return baselines::run(plan, against);
    }
    let arrivals = plan.arrivals()?;
    let summary = match cluster::LoadCluster::new(plan, &arrivals).run() {
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
