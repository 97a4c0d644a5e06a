//! What a worker says of a failure, and the cause that it stands for.

use crate::cause::Cause;
use crate::cluster::flight::News;
use crate::cluster::router::Role;
use crate::front::openai::ApiError;
use crate::front::openai::bootstrap::SOURCE_PARAM;
use crate::front::router::call::{Lost, WorkerAnswer};
use crate::front::turning::TAKEN_FOR;
use crate::limits::ERROR_CODE_MAX;
use serde::Deserialize;
use serde_json::Value;
use std::fmt;

/// What a worker's answer says of a failure: its status, and the code in its body. The rest of the body stays
/// out of the log, since engines quote what they were sent.
#[derive(Debug)]
pub struct Failure {
    status: u16,
    code: Option<String>,
    /// What happened, where no worker told it.
    own: Option<String>,
    /// Whether it is of the prefill worker that the request names,
    names_source: bool,
    /// or of what the router takes the worker for.
    names_role: bool,
    /// What it stands for.
    pub cause: Cause,
}

impl Failure {
    /// Of an answer that is none of success.
    pub fn of(answer: &WorkerAnswer) -> Failure {
        let told = serde_json::from_slice::<Told>(&answer.body).ok();
        let param = told.as_ref().and_then(|told| told.error.param.as_ref());
        let param = param.and_then(Value::as_str);
        let (names_source, names_role) = (param == Some(SOURCE_PARAM), param == Some(TAKEN_FOR));
        let code = told.and_then(Told::code);
        let cause =
            code.as_deref().and_then(Cause::named).unwrap_or_else(|| cause_of(answer.status));
        Failure {
            status: answer.status,
            code,
            own: answer.own.clone(),
            names_source,
            names_role,
            cause,
        }
    }

    /// What it means for the flight whose leg it ended.
    pub fn news(&self, leg: Role) -> News {
        News::Failed(if self.is_partners() { leg.other() } else { leg }, self.cause)
    }

    /// Whether the worker named the cause itself.
    pub fn is_told(&self) -> bool {
        self.code.as_deref() == Some(self.cause.name())
    }

    /// Whether the worker is another than the router takes it for.
    pub fn is_of_role(&self) -> bool {
        self.names_role
    }

    /// Whether its code is this one.
    pub fn has_code(&self, code: &str) -> bool {
        self.code.as_deref() == Some(code)
    }

    /// Whether it is the other worker's, which a field of the request chose, and not of who tells it.
    pub fn is_partners(&self) -> bool {
        // Of two that do not fit, whoever tells it, the other one is done without.
        self.names_source && self.cause != Cause::Incompatible
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.own {
            Some(own) => f.write_str(own),
            None => {
                write!(f, "status {}, code {}", self.status, self.code.as_deref().unwrap_or("none"))
            }
        }
    }
}

/// An error as workers tell it.
#[derive(Deserialize)]
struct Told {
    error: Inner,
}

#[derive(Deserialize)]
struct Inner {
    code: Option<Value>,
    param: Option<Value>,
}

impl Told {
    /// Its code, if it is a word.
    fn code(self) -> Option<String> {
        let code = self.error.code?.as_str()?.to_owned();
        let is_word = code.len() <= ERROR_CODE_MAX
            && code.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        is_word.then_some(code)
    }
}

/// The cause that an event of a stream tells, if it tells one.
pub fn cause_in(data: &[u8]) -> Option<Cause> {
    if !data.starts_with(b"{\"error\"") {
        return None;
    }
    let code = serde_json::from_slice::<Told>(data).ok().and_then(Told::code);
    // What nobody knows is told, and not tried again.
    Some(code.as_deref().and_then(Cause::named).unwrap_or(Cause::Refused))
}

/// The cause that a worker's status stands for.
pub fn cause_of(status: u16) -> Cause {
    // Of two causes of one status, the one that is the client's own doing.
    if status == Cause::Aborted.http_status() {
        return Cause::Aborted;
    }
    let is_same = |cause: &&Cause| cause.http_status() == status;
    let known = Cause::ALL.iter().find(is_same).copied();
    known.unwrap_or(if status < 500 { Cause::Refused } else { Cause::Internal })
}

/// The cause of a connection that broke, and what the client is told of it.
pub fn of_loss(lost: Lost) -> (Cause, String) {
    match lost {
        Lost::Deadline => (Cause::Deadline, "the request took too long".into()),
        Lost::Behind => {
            (Cause::ClientGone, "the answer is read too slowly: its worker has given it up".into())
        }
        Lost::Full => (Cause::Overloaded, format!("the request was not passed on: {lost}")),
        lost => (Cause::PeerLost, format!("the worker's answer did not come: {lost}")),
    }
}

/// An error of this cause.
pub fn error(cause: Cause, message: String) -> ApiError {
    ApiError::new(cause.http_status(), cause.name(), message)
}
