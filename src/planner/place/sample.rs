//! The requests of a fleet's tries, at any rate.
//!
//! Invariant: all fleets get the same requests of a trace, or random requests of the same time
//! span. Not here: their number and time span (`place`).

use crate::limits::LOAD_REQUESTS_MAX;
use crate::planner::arrivals::{Arrivals, Drawn};
use crate::stdx::event_queue::SECOND;
use crate::stdx::rng::Rng;

/// The requests of a try.
#[derive(Debug)]
pub(super) enum Sample {
    /// The same requests, faster or slower.
    Same(Arrivals),
    /// Requests drawn from this seed for this many seconds. A higher rate gives more requests.
    Span { drawn: Drawn, seconds: f64, seed: u64 },
}

impl Sample {
    /// Requests per second of the load as given.
    pub(super) fn rate(&self) -> f64 {
        match self {
            Sample::Same(arrivals) => arrivals.rate(),
            Sample::Span { drawn, .. } => drawn.rate,
        }
    }

    /// The requests at `factor` times that rate.
    pub(super) fn at(&self, factor: f64) -> Arrivals {
        match self {
            Sample::Same(arrivals) => arrivals.faster(factor),
            Sample::Span { drawn, seconds, seed } => {
                let rate = drawn.rate * factor;
                // At least one request, so that the run serves one.
                let requests = ((rate * seconds) as usize).clamp(1, LOAD_REQUESTS_MAX);
                let drawn = Drawn { requests, rate, ..drawn.clone() };
                drawn.draw(&mut Rng::new(*seed).fork("arrivals"))
            }
        }
    }
}

impl Arrivals {
    /// Time from the first arrival to the last.
    pub(in crate::planner) fn span(&self) -> u64 {
        self.list().last().map_or(0, |last| last.at - self.list()[0].at)
    }

    /// Requests per second.
    pub(in crate::planner) fn rate(&self) -> f64 {
        (self.list().len() - 1) as f64 * SECOND as f64 / self.span().max(1) as f64
    }
}
