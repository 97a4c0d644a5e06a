//! What a run of the load mode has found to be wrong.

use std::fmt;

/// The rule that is broken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rule {
    /// Each request ends, once.
    Ends,
    /// A request has the tokens that it asked for.
    Tokens,
    /// Pages are conserved.
    Pages,
    /// At the end, no worker and no router holds anything.
    Idle,
    /// No event of a request follows its end.
    Events,
}

/// A violation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    rule: Rule,
    request: Option<usize>,
    what: String,
}

impl Violation {
    /// A violation by the cluster or one of its workers.
    pub fn new(rule: Rule, what: impl Into<String>) -> Violation {
        Violation { rule, request: None, what: what.into() }
    }

    /// A violation that concerns one request.
    pub fn about(rule: Rule, request: usize, what: impl Into<String>) -> Violation {
        Violation { rule, request: Some(request), what: what.into() }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.rule, self.what)?;
        self.request.map_or(Ok(()), |request| write!(f, " (request {request})"))
    }
}
