//! What a choice comes to: who is charged with which work, or why nobody is. Owns: the words; who is chosen is `choosing`'s.

use crate::cluster::loads::WorkerNumber;
use std::fmt;
use std::time::Duration;

/// What a worker does.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Role {
    /// Reads prompts.
    Prefill,
    /// Generates.
    Decode,
}

impl Role {
    /// The role of this name.
    pub fn named(name: &str) -> Option<Role> {
        [Role::Prefill, Role::Decode].into_iter().find(|role| role.to_string() == name)
    }

    /// That of the worker at the other end of a hand-off.
    pub fn other(self) -> Role {
        match self {
            Role::Prefill => Role::Decode,
            Role::Decode => Role::Prefill,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        })
    }
}

/// Work that is charged to a worker until it is given back to [`Router::release`].
#[must_use = "it stays charged until it is released"]
#[derive(PartialEq, Eq, Debug)]
pub struct Booking {
    pub(super) worker: WorkerNumber,
    pub(super) weight: u32,
    /// Tokens it is to read, and how long that takes; nothing once it has.
    pub(super) unread: u32,
    pub(super) reading: Duration,
    /// Tokens of the prompts that it generates behind.
    pub(super) context: u64,
}

impl Booking {
    /// The worker.
    pub fn worker(&self) -> WorkerNumber {
        self.worker
    }
}

/// The workers that serve a request.
#[derive(PartialEq, Eq, Debug)]
pub struct Pair {
    /// Reads its prompt.
    pub prefill: Booking,
    /// Generates its answer.
    pub decode: Booking,
}

/// Why nobody is chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoWorker {
    /// No worker of this role can be used.
    Of {
        /// Which.
        role: Role,
        /// Whether one that cannot be reached now would do.
        may_come: bool,
    },
    /// Whoever can be used is foretold to take longer than is allowed.
    Late {
        /// Up to what: as a message says it.
        until: &'static str,
        /// The soonest.
        foretold: Duration,
        /// What is allowed, and by which flag.
        allowed: (&'static str, Duration),
    },
    /// No two that can be used fit each other.
    Fitting {
        /// Whether one that cannot be reached now would do.
        may_come: bool,
    },
}

impl NoWorker {
    /// Whether somebody may do who cannot be reached now.
    pub fn may_come(self) -> bool {
        match self {
            NoWorker::Of { may_come, .. } | NoWorker::Fitting { may_come } => may_come,
            NoWorker::Late { .. } => false,
        }
    }
}

impl NoWorker {
    /// The same, where somebody else may come.
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
            NoWorker::Of { role, .. } => write!(f, "no {role} worker can be reached"),
            NoWorker::Late { until, foretold, allowed: (flag, most) } => {
                let [foretold, most] = [foretold, most].map(|time| time.as_secs_f64() * 1e3);
                write!(
                    f,
                    "the soonest is foretold to take {foretold:.1} ms {until}, and {flag} is {most}"
                )
            }
            NoWorker::Fitting { .. } => f.write_str(
                "no decode worker that can be reached fits a prefill worker that can be reached",
            ),
        }
    }
}

impl std::error::Error for NoWorker {}
