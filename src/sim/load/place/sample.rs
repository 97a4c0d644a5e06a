//! What a fleet is tried with, at any rate.
//!
//! Invariant: what is compared is judged by the same: the same requests of a trace, or all that come in the same time. Not here:
//! how many, and for how long (`place`).

use crate::limits::LOAD_REQUESTS_MAX;
use crate::sim::agenda::SECOND;
use crate::sim::dice::Dice;
use crate::sim::load::arrivals::{Arrivals, Drawn};

/// What a fleet is tried with.
#[derive(Debug)]
pub(super) enum Sample {
    /// These, faster or slower.
    Same(Arrivals),
    /// Whoever comes in so many seconds, drawn from this seed: the more, the higher the rate.
    Span { drawn: Drawn, seconds: f64, seed: u64 },
}

impl Sample {
    /// Requests a second, as the load is typed.
    pub(super) fn rate(&self) -> f64 {
        match self {
            Sample::Same(arrivals) => arrivals.rate(),
            Sample::Span { drawn, .. } => drawn.rate,
        }
    }

    /// Those that come at so many times that rate.
    pub(super) fn at(&self, factor: f64) -> Arrivals {
        match self {
            Sample::Same(arrivals) => arrivals.faster(factor),
            Sample::Span { drawn, seconds, seed } => {
                let rate = drawn.rate * factor;
                // One more than none, so that there is somebody to be served.
                let requests = ((rate * seconds) as usize).clamp(1, LOAD_REQUESTS_MAX);
                let drawn = Drawn { requests, rate, ..drawn.clone() };
                drawn.draw(&mut Dice::new(*seed).fork("arrivals"))
            }
        }
    }
}

impl Arrivals {
    /// From the first arrival to the last.
    pub(in crate::sim::load) fn span(&self) -> u64 {
        self.list().last().map_or(0, |last| last.at - self.list()[0].at)
    }

    /// Requests a second.
    pub(in crate::sim::load) fn rate(&self) -> f64 {
        (self.list().len() - 1) as f64 * SECOND as f64 / self.span().max(1) as f64
    }
}
