//! The size and the kind of a run, as the command line has them.

use crate::cli::flags::{SimFlow, SimTransfer};

/// The size and the kind of a run.
#[derive(Clone, Copy, Debug)]
pub struct RunScale {
    /// Prefill and decode workers. `None`: the seed draws them.
    pub workers: [Option<usize>; 2],
    /// Requests of clients.
    pub requests: usize,
    /// Whether faults happen and clients leave.
    pub faults: bool,
    /// The transport of all workers.
    pub transfer: SimTransfer,
    /// The order in which the workers of a pair get a request.
    pub flow: SimFlow,
    /// Whether agents of the library run in place of a cluster.
    pub is_library: bool,
}
