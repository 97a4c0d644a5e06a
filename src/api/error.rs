//! Errors in the format of OpenAI's API.
//!
//! Owns: the codes of errors. `docs/operate/troubleshoot.md` has a row for each.

use crate::cause::Cause;
use crate::net::HTTPS_ALONE;
use serde::Serialize;
use std::fmt;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $text:expr;)*) => {
        /// The machine-readable code of an error.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum ErrorCode {
            /// The name of a cause.
            Cause(Cause),
            $($(#[$doc])* $name,)*
        }

        impl ErrorCode {
            /// All codes that are not names of causes.
            pub const OTHERS: &'static [ErrorCode] = &[$(ErrorCode::$name),*];

            /// The code in the body of an answer.
            pub const fn name(self) -> &'static str {
                match self {
                    ErrorCode::Cause(cause) => cause.name(),
                    $(ErrorCode::$name => $text,)*
                }
            }
        }
    };
}

codes! {
    /// The request administers the server, and its key is only an API key.
    AdminKeyRequired = "admin_key_required";
    /// The HTTP message is malformed or too large.
    BadHttp = "bad_http";
    /// Prompt and answer together exceed the context.
    ContextLengthExceeded = "context_length_exceeded";
    /// The engine makes no progress.
    Hanging = "hanging";
    /// The port speaks HTTPS only. `net` writes this answer itself.
    Https = HTTPS_ALONE;
    /// The API key is missing or unknown.
    InvalidApiKey = "invalid_api_key";
    /// A registry entry cannot be used.
    InvalidEntry = "invalid_entry";
    /// The body is not JSON, or not an object.
    InvalidJson = "invalid_json";
    /// A field has an invalid value.
    InvalidValue = "invalid_value";
    /// The path does not support the method.
    MethodNotAllowed = "method_not_allowed";
    /// No model of this name is served here.
    ModelNotFound = "model_not_found";
    /// The model has no chat template.
    NoChatTemplate = "no_chat_template";
    /// No worker can serve the request.
    NoWorker = "no_worker";
    /// The path does not exist.
    NotFound = "not_found";
    /// A proof of the cluster key is missing or wrong.
    NotProven = "not_proven";
    /// The sender must not make this change.
    NotTrusted = "not_trusted";
    /// A limit of the API key is reached.
    RateLimitExceeded = "rate_limit_exceeded";
    /// The worker is between two roles.
    RoleChanges = "role_changes";
    /// The worker can never have the requested role.
    RoleNotPossible = "role_not_possible";
    /// The request asks for more choices than a worker can hold.
    TooManyChoices = "too_many_choices";
    /// A worker did not empty its cache in time.
    Unavailable = "unavailable";
    /// The field, or its value, is not supported.
    UnsupportedField = "unsupported_field";
    /// The body is compressed.
    UnsupportedMedia = "unsupported_media";
    /// There is no worker of this id.
    WorkerNotFound = "worker_not_found";
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The error response for a request that was refused or failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ApiError {
    /// HTTP status.
    pub status: u16,
    /// Human-readable text.
    pub message: String,
    /// OpenAI's `type`: the class of the error.
    pub kind: &'static str,
    /// Path of the field at fault.
    pub param: Option<String>,
    /// Machine-readable code.
    pub code: ErrorCode,
    /// Seconds after which a retry makes sense.
    pub retry_after: Option<u32>,
    /// Methods that the path supports, for an error about the method.
    pub allow: Option<String>,
}

impl ApiError {
    /// An error with no field at fault.
    pub fn new(status: u16, code: ErrorCode, message: impl Into<String>) -> Self {
        let kind = match status {
            401 => "authentication_error",
            404 => "not_found_error",
            408 => "timeout_error",
            429 => "rate_limit_error",
            400..500 => "invalid_request_error",
            _ => "server_error",
        };
        Self {
            status,
            message: message.into(),
            kind,
            param: None,
            code,
            retry_after: None,
            allow: None,
        }
    }

    /// A failure with this cause, which decides the status, and whether a retry makes sense soon.
    pub fn from_cause(cause: Cause, message: impl Into<String>) -> Self {
        let retry_after = matches!(cause, Cause::Overloaded | Cause::Draining).then_some(1);
        Self { retry_after, ..Self::new(cause.http_status(), ErrorCode::Cause(cause), message) }
    }

    /// The body is not JSON, or not an object.
    pub fn invalid_json(message: impl fmt::Display) -> Self {
        let message = format!("the body is not a valid JSON object: {message}");
        Self::new(400, ErrorCode::InvalidJson, message)
    }

    /// The field `param` has an invalid value; `must` ends the sentence "`param` …".
    pub fn invalid(param: impl Into<String>, must: impl fmt::Display) -> Self {
        let param = param.into();
        let error = Self::new(400, ErrorCode::InvalidValue, format!("`{param}` {must}"));
        Self { param: Some(param), ..error }
    }

    /// The field `param`, or its value, belongs to the API but is not supported.
    pub fn unsupported(param: impl Into<String>) -> Self {
        let error = Self::invalid(param, "with this value is not implemented in this version");
        Self { code: ErrorCode::UnsupportedField, ..error }
    }

    /// The field `param` is not a part of this request.
    pub fn unknown(param: impl Into<String>) -> Self {
        let error = Self::invalid(param, "is not supported in this request");
        Self { code: ErrorCode::UnsupportedField, ..error }
    }

    /// The path does not exist. If a path that is spelt almost so does, by `exists`, the message
    /// names it.
    pub fn nothing_at(path: &str, exists: impl Fn(&str) -> bool) -> Self {
        let bare = path.trim_end_matches('/');
        let inner = bare.trim_start_matches("/v1");
        let likely = [bare.to_owned(), format!("/v1{inner}"), inner.to_owned()];
        let mut message = format!("there is nothing at {path}");
        if let Some(right) = likely.iter().find(|likely| *likely != path && exists(likely)) {
            message += &format!("; did you mean {right}?");
        }
        Self::new(404, ErrorCode::NotFound, message)
    }

    /// No model of this name is served here.
    pub fn model_not_found(model: &str, served: &[String]) -> Self {
        let served = served.join("`, `");
        let message = format!("the model `{model}` is not served here; available: `{served}`");
        let error = Self::new(404, ErrorCode::ModelNotFound, message);
        Self { param: Some("model".into()), ..error }
    }

    /// Prompt and answer together exceed the context. `param` is the field with the prompt.
    pub fn context_length_exceeded(
        param: &str,
        prompt: usize,
        answer: usize,
        context: usize,
    ) -> Self {
        let message = format!(
            "this model's context holds {context} tokens; the prompt has {prompt}, and {answer} \
             more were requested"
        );
        let error = Self::new(400, ErrorCode::ContextLengthExceeded, message);
        Self { param: Some(param.into()), ..error }
    }

    /// A text that is too long for the context with any tokenisation. `param` is the field with the
    /// text.
    pub fn text_too_long(param: &str, bytes: usize, most: usize, context: usize) -> Self {
        let message = format!(
            "this model's context holds {context} tokens, which is at most {most} bytes of text; \
             the prompt has {bytes} bytes"
        );
        let error = Self::new(400, ErrorCode::ContextLengthExceeded, message);
        Self { param: Some(param.into()), ..error }
    }

    /// Prompt and answer need more KV memory than a worker has. `held` is its capacity: the tokens
    /// of all its whole pages.
    pub fn kv_memory_exceeded(prompt: usize, answer: usize, held: usize) -> Self {
        let message = format!(
            "the request needs KV for {} tokens ({prompt} of the prompt, {answer} to generate); a \
             worker here has memory for {held} (--kv-memory)",
            prompt + answer
        );
        Self::from_cause(Cause::Refused, message)
    }

    /// The path does not support the method; `allow` lists the methods that it supports.
    pub fn method_not_allowed(allow: &str) -> Self {
        let message = format!("this path supports {allow}");
        let error = Self::new(405, ErrorCode::MethodNotAllowed, message);
        Self { allow: Some(allow.to_owned()), ..error }
    }

    /// The queue of a worker is full.
    pub fn queue_full() -> Self {
        Self::busy("the queue is full (--max-queued-requests); try again later")
    }

    /// There is no capacity for the request now.
    pub fn busy(message: impl Into<String>) -> Self {
        Self::from_cause(Cause::Overloaded, message)
    }

    /// This server accepts no new requests. Another server can take the request, or this one after
    /// a restart.
    pub fn draining(message: impl Into<String>) -> Self {
        Self::from_cause(Cause::Draining, message)
    }

    /// The body of the response.
    pub fn to_json(&self) -> Vec<u8> {
        #[derive(Serialize)]
        struct Body<'a> {
            error: Inner<'a>,
        }
        #[derive(Serialize)]
        struct Inner<'a> {
            message: &'a str,
            r#type: &'a str,
            param: Option<&'a str>,
            code: &'a str,
        }
        let inner = Inner {
            message: &self.message,
            r#type: self.kind,
            param: self.param.as_deref(),
            code: self.code.name(),
        };
        serde_json::to_vec(&Body { error: inner }).expect("strings are JSON")
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.status, self.code, self.message)
    }
}

impl std::error::Error for ApiError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn has_the_shape_that_clients_read() {
        let body = |error: ApiError| String::from_utf8(error.to_json()).unwrap();
        assert_eq!(
            body(ApiError::invalid("temperature", "must be at least 0")),
            r#"{"error":{"message":"`temperature` must be at least 0","type":"invalid_request_error","param":"temperature","code":"invalid_value"}}"#
        );
        assert_eq!(
            body(ApiError::queue_full()),
            r#"{"error":{"message":"the queue is full (--max-queued-requests); try again later","type":"rate_limit_error","param":null,"code":"overloaded"}}"#
        );
        assert_eq!(ApiError::from_cause(Cause::Draining, "").kind, "server_error");
        assert_eq!(ApiError::from_cause(Cause::Deadline, "").kind, "timeout_error");
    }
}
