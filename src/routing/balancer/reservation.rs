//! The result of a choice: the work that is charged to workers, or the reason why no worker is
//! chosen.
//!
//! Not here: the choice itself (`selection`).

use crate::ids::Leg;
use crate::routing::load::WorkerNumber;
use std::fmt;
use std::time::Duration;

/// Work that is charged to a worker until [`LoadBalancer::release`](super::LoadBalancer::release).
#[must_use = "it stays charged until it is released"]
#[derive(PartialEq, Eq, Debug)]
pub struct Reservation {
    pub(super) worker: WorkerNumber,
    pub(super) weight: u32,
    /// Tokens that the worker must compute, and the predicted time. Both become zero when it has
    /// computed them.
    pub(super) uncomputed: u32,
    pub(super) reading: Duration,
    /// Prompt tokens of the sequences that it generates.
    pub(super) context: u64,
}

impl Reservation {
    /// The reserved worker.
    pub fn worker(&self) -> WorkerNumber {
        self.worker
    }
}

/// The workers that serve a request.
#[derive(PartialEq, Eq, Debug)]
pub struct ReservedPair {
    /// Computes the prompt.
    pub prefill: Reservation,
    /// Generates the answer.
    pub decode: Reservation,
}

/// Reason why no worker is chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoWorker {
    /// No worker of this role is usable.
    Of {
        /// The role.
        role: Leg,
        /// Whether a worker that is unreachable now could serve the request later.
        may_come: bool,
    },
    /// The chosen worker is predicted to exceed the limit.
    Late {
        /// The limited time, as text of a message.
        until: &'static str,
        /// The predicted time at the workers of least cost.
        predicted: Duration,
        /// The flag of the limit, and the limit.
        allowed: (&'static str, Duration),
    },
    /// No usable prefill worker fits a usable decode worker.
    Fitting {
        /// Whether a worker that is unreachable now could serve the request later.
        may_come: bool,
    },
}

impl NoWorker {
    /// Whether a worker that is unreachable now could serve the request later.
    pub fn may_come(self) -> bool {
        match self {
            NoWorker::Of { may_come, .. } | NoWorker::Fitting { may_come } => may_come,
            NoWorker::Late { .. } => false,
        }
    }
}

impl NoWorker {
    /// The same error. `other` also sets `may_come`.
    pub(super) fn or_may_come(self, other: bool) -> NoWorker {
        match self {
            NoWorker::Of { role, may_come } => NoWorker::Of { role, may_come: may_come || other },
            NoWorker::Fitting { may_come } => NoWorker::Fitting { may_come: may_come || other },
            late @ NoWorker::Late { .. } => late,
        }
    }
}

impl fmt::Display for NoWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoWorker::Of { role, .. } => write!(f, "no {role} worker is reachable"),
            NoWorker::Late { until, predicted, allowed: (flag, most) } => {
                let [predicted, most] = [predicted, most].map(|time| time.as_secs_f64() * 1e3);
                write!(
                    f,
                    "the predicted time {until} is {predicted:.1} ms; \
                    the limit of {flag} is {most}"
                )
            }
            NoWorker::Fitting { .. } => {
                f.write_str("no reachable decode worker fits a reachable prefill worker")
            }
        }
    }
}

impl std::error::Error for NoWorker {}
