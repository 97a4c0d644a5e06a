//! What must hold, whatever happens: one file each, fed by the cluster, each of which answers with what is wrong.

pub mod ends;
pub mod idle;
pub mod pages;
pub mod reasons;
pub mod salts;
pub mod shadow;
pub mod silence;
pub mod tokens;

/// Who says that something is wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Checker {
    /// Every request ends, once and in time, and not for no reason.
    Ends,
    /// Tokens are the right ones.
    Tokens,
    /// Pages are conserved.
    Pages,
    /// Nobody writes where nothing was granted.
    Shadow,
    /// Who names another salt shares nothing.
    Salts,
    /// Who stands still is not waited for, and who is at work not taken for one.
    Silence,
    /// Who has nothing to do holds nothing.
    Idle,
    /// Who takes a leg is of its role, and stays it.
    Roles,
    /// Each turn of an engine says what may follow the one before: nothing of a request after its end.
    Events,
    /// An assertion of production, or a panic.
    Assertion,
    /// Time goes on, and a run comes to its end.
    Agenda,
}

/// Something is wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// Who says so.
    pub by: Checker,
    /// The request it is about, if it is about one.
    pub request: Option<usize>,
    /// What.
    pub what: String,
}

impl Finding {
    /// About the cluster, or one of its processes.
    pub fn new(by: Checker, what: impl Into<String>) -> Finding {
        Finding { by, request: None, what: what.into() }
    }

    /// About a request.
    pub fn about(by: Checker, request: usize, what: impl Into<String>) -> Finding {
        Finding { by, request: Some(request), what: what.into() }
    }
}

/// What a checker answers.
pub type Checked = Result<(), Finding>;
