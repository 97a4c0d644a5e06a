//! A worker's error response, and the cause that follows from it.

use super::answer::{CallError, UpstreamReply};
use crate::api::bootstrap::SOURCE_PARAM;
use crate::api::info::{DRAINING, TAKEN_FOR};
use crate::api::{ApiError, ErrorCode};
use crate::cause::Cause;
use crate::ids::Leg;
use crate::limits::ERROR_CODE_MAX;
use crate::routing::attempts::AttemptEvent;
use serde::Deserialize;
use serde_json::Value;
use std::fmt;

/// An error response of a worker: its status, and the code in its body. The rest of the body is not
/// logged, because engines quote their input.
#[derive(Debug)]
pub struct UpstreamFailure {
    status: u16,
    code: Option<String>,
    /// The message, if the error comes from this process and not from a worker.
    own: Option<String>,
    /// Whether it names the prefill worker of the request.
    names_source: bool,
    /// Whether it is about the role that the router expected.
    names_role: bool,
    /// The cause that follows from it.
    pub cause: Cause,
}

impl UpstreamFailure {
    /// Reads a response that is not a success.
    pub fn from_reply(answer: &UpstreamReply) -> UpstreamFailure {
        let reply = serde_json::from_slice::<ErrorBody>(&answer.body).ok();
        let param = reply.as_ref().and_then(|reply| reply.error.param.as_ref());
        let param = param.and_then(Value::as_str);
        let (names_source, names_role) = (param == Some(SOURCE_PARAM), param == Some(TAKEN_FOR));
        let code = reply.and_then(ErrorBody::code);
        let cause =
            code.as_deref().and_then(Cause::named).unwrap_or_else(|| cause_of(answer.status));
        UpstreamFailure {
            status: answer.status,
            code,
            own: answer.own.clone(),
            names_source,
            names_role,
            cause,
        }
    }

    /// The event for the state machine of the request: the leg at fault has failed.
    pub fn attempt_event(&self, leg: Leg) -> AttemptEvent {
        AttemptEvent::Failed(if self.is_partner_fault() { leg.other() } else { leg }, self.cause)
    }

    /// Whether the worker named the cause itself.
    pub fn names_cause(&self) -> bool {
        self.code.as_deref() == Some(self.cause.name())
    }

    /// Whether the worker has another role than the router expected.
    pub fn is_role_mismatch(&self) -> bool {
        self.names_role
    }

    /// Whether its code is `code`.
    pub fn has_code(&self, code: ErrorCode) -> bool {
        self.code.as_deref() == Some(code.name())
    }

    /// Whether the partner of the worker failed, and not the worker that reports the error. A field
    /// of the request names the partner.
    pub fn is_partner_fault(&self) -> bool {
        // For `Incompatible`, the attempt avoids the partner of the reporting worker in any case.
        self.names_source && self.cause != Cause::Incompatible
    }
}

impl UpstreamReply {
    /// Whether the worker reports that it drains, as its health or as the reason of a refusal. If
    /// its partner drains, the error names the request field of the partner and does not count
    /// here.
    pub fn reports_drain(&self) -> bool {
        if self.is_success() {
            return self.body == DRAINING.as_bytes();
        }
        let failure = UpstreamFailure::from_reply(self);
        failure.cause == Cause::Draining && failure.names_cause() && !failure.is_partner_fault()
    }

    /// Whether the worker reports that it has another role than the router expected.
    pub fn is_role_mismatch(&self) -> bool {
        !self.is_success() && UpstreamFailure::from_reply(self).is_role_mismatch()
    }

    /// A description of an error response for operators.
    pub fn complaint(&self) -> String {
        let status = self.status;
        match UpstreamFailure::from_reply(self).has_code(ErrorCode::Https) {
            true => {
                format!(
                    "answers with status {status}: it accepts only HTTPS; use https://HOST:PORT"
                )
            }
            false => format!("answers with status {status}"),
        }
    }
}

impl fmt::Display for UpstreamFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.own {
            Some(own) => f.write_str(own),
            None => {
                write!(f, "status {}, code {}", self.status, self.code.as_deref().unwrap_or("none"))
            }
        }
    }
}

/// The error body of a worker.
#[derive(Deserialize)]
struct ErrorBody {
    error: Inner,
}

#[derive(Deserialize)]
struct Inner {
    code: Option<Value>,
    param: Option<Value>,
}

impl ErrorBody {
    /// Its code, if it is a word.
    fn code(self) -> Option<String> {
        let code = self.error.code?.as_str()?.to_owned();
        let is_word = code.len() <= ERROR_CODE_MAX
            && code.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        is_word.then_some(code)
    }
}

/// The cause that an event of a stream reports, if it is an error.
pub fn cause_in(data: &[u8]) -> Option<Cause> {
    if !data.starts_with(b"{\"error\"") {
        return None;
    }
    let code = serde_json::from_slice::<ErrorBody>(data).ok().and_then(ErrorBody::code);
    // An unknown error is passed on and not retried.
    Some(code.as_deref().and_then(Cause::named).unwrap_or(Cause::Refused))
}

/// The cause for a worker's status.
pub fn cause_of(status: u16) -> Cause {
    // `ClientGone` has the same status, but a client that is gone gets no answer.
    if status == Cause::Aborted.http_status() {
        return Cause::Aborted;
    }
    let is_same = |cause: &&Cause| cause.http_status() == status;
    let known = Cause::ALL.iter().find(is_same).copied();
    known.unwrap_or(if status < 500 { Cause::Refused } else { Cause::Internal })
}

/// The cause of a failed call, and the message for the client.
pub fn explain_call_error(lost: CallError) -> (Cause, String) {
    match lost {
        CallError::Deadline => (Cause::Deadline, "the request took too long".into()),
        CallError::SlowClient => {
            (Cause::ClientGone, "the client reads too slowly; the worker ended the stream".into())
        }
        CallError::Full => (Cause::Overloaded, format!("the request was not forwarded: {lost}")),
        lost => (Cause::PeerLost, format!("the worker sent no complete answer: {lost}")),
    }
}

/// An error with this cause.
pub fn error(cause: Cause, message: String) -> ApiError {
    ApiError::from_cause(cause, message)
}
