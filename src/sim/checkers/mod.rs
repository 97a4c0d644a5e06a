//! The rules that must always hold, one checker per file. The cluster passes events to each
//! checker, and the checker returns a violation.

pub mod ends;
pub mod idle;
pub mod pages;
pub mod reasons;
pub mod salts;
pub mod shadow;
pub mod silence;
pub mod tokens;

/// The checker that reports a violation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Checker {
    /// Every request ends, once and in time, and fails only for a reason.
    Ends,
    /// Tokens are correct.
    Tokens,
    /// Pages are conserved.
    Pages,
    /// Only granted pages are written.
    Shadow,
    /// Requests with different salts share no KV.
    Salts,
    /// No request waits for a stalled worker, and a busy worker does not count as stalled.
    Silence,
    /// An idle process holds nothing.
    Idle,
    /// A worker takes only legs of its role, and keeps that role while it serves them.
    Roles,
    /// The events of an engine's turn are valid after those of the previous turn. No event of a
    /// request follows its end.
    Events,
    /// An assertion or a panic in production code.
    Assertion,
    /// Time advances, and a run ends.
    Agenda,
}

/// A violation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// The checker that reports it.
    pub by: Checker,
    /// The request concerned, if there is one.
    pub request: Option<usize>,
    /// Description of the violation.
    pub what: String,
}

impl Finding {
    /// A violation by the cluster or one of its processes.
    pub fn new(by: Checker, what: impl Into<String>) -> Finding {
        Finding { by, request: None, what: what.into() }
    }

    /// A violation that concerns one request.
    pub fn about(by: Checker, request: usize, what: impl Into<String>) -> Finding {
        Finding { by, request: Some(request), what: what.into() }
    }
}

/// The result of a checker.
pub type Checked = Result<(), Finding>;
