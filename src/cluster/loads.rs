//! What a router knows of the load on its workers: what it has sent there itself.
//!
//! Booked at the moment of decision, so that a burst spreads before any worker could have reported it.

use std::time::Instant;

/// Names a worker behind a router, in the order in which they joined. It is no other's, also when its worker
/// has left.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct WorkerNumber(pub usize);

/// One worker's row.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Load {
    /// Whether it may be chosen.
    pub usable: bool,
    /// Sequences it was given and has not finished.
    pub booked: u32,
    /// A request failed there: until then it is asked last.
    pub suspect: Option<Instant>,
}
