//! Errors as OpenAI's clients know them.

use crate::cause::Cause;
use serde::Serialize;
use std::fmt;

/// Why a request is refused or failed, as its client is told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ApiError {
    /// HTTP status.
    pub status: u16,
    /// For people.
    pub message: String,
    /// OpenAI's `type`: whose fault it is.
    pub kind: &'static str,
    /// The field at fault, as a path.
    pub param: Option<String>,
    /// For programs.
    pub code: &'static str,
    /// Seconds after which another try makes sense.
    pub retry_after: Option<u32>,
    /// Methods that the path takes, where it was asked with another one.
    pub allow: Option<String>,
}

impl ApiError {
    /// An error with no field at fault.
    pub fn new(status: u16, code: &'static str, message: impl Into<String>) -> Self {
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

    /// The body is not JSON, or no object.
    pub fn invalid_json(message: impl fmt::Display) -> Self {
        Self::new(
            400,
            "invalid_json",
            format!("the body is not a JSON object that can be read: {message}"),
        )
    }

    /// The field `param` has a value that cannot be; `must` ends the sentence "`param` …".
    pub fn invalid(param: impl Into<String>, must: impl fmt::Display) -> Self {
        let param = param.into();
        let error = Self::new(400, "invalid_value", format!("`{param}` {must}"));
        Self { param: Some(param), ..error }
    }

    /// The field `param`, or the value it has, belongs to the interface but is not supported.
    pub fn unsupported(param: impl Into<String>) -> Self {
        let error = Self::invalid(param, "is not supported by this server with the value given");
        Self { code: "unsupported_field", ..error }
    }

    /// No model of that name is served here.
    pub fn model_not_found(model: &str, served: &[String]) -> Self {
        let served = served.join("`, `");
        let message = format!("the model `{model}` is not served here, but `{served}`");
        let error = Self::new(404, "model_not_found", message);
        Self { param: Some("model".into()), ..error }
    }

    /// Prompt and answer together do not fit. `param` is the field that held the prompt.
    pub fn context_length_exceeded(
        param: &str,
        prompt: usize,
        answer: usize,
        context: usize,
    ) -> Self {
        let message = format!(
            "this model's context holds {context} tokens; the prompt has {prompt} and {answer} more were asked for"
        );
        let error = Self::new(400, "context_length_exceeded", message);
        Self { param: Some(param.into()), ..error }
    }

    /// A text that is too long for the context, whatever its tokens are. `param` is the field that held it.
    pub fn text_too_long(param: &str, bytes: usize, most: usize, context: usize) -> Self {
        let message = format!(
            "this model's context holds {context} tokens, which stand for {most} bytes of text at most; the prompt has {bytes}"
        );
        let error = Self::new(400, "context_length_exceeded", message);
        Self { param: Some(param.into()), ..error }
    }

    /// Prompt and answer take more KV than a worker's memory holds. `held` are tokens of whole pages.
    pub fn kv_memory_exceeded(prompt: usize, answer: usize, held: usize) -> Self {
        let message = format!(
            "the request takes KV of {} tokens ({prompt} of the prompt, {answer} to generate), and a worker here has memory \
             for {held} (--kv-memory)",
            prompt + answer
        );
        Self::new(Cause::Refused.http_status(), Cause::Refused.name(), message)
    }

    /// The path takes these methods, and not the one it was asked with.
    pub fn method_not_allowed(allow: &str) -> Self {
        let error = Self::new(405, "method_not_allowed", format!("this path takes {allow}"));
        Self { allow: Some(allow.to_owned()), ..error }
    }

    /// The queue of a worker is full.
    pub fn overloaded(retry_after: u32) -> Self {
        let error = Self::new(
            429,
            Cause::Overloaded.name(),
            "as many requests wait here as may (--max-queued-requests); try again later",
        );
        Self { retry_after: Some(retry_after), ..error }
    }

    /// There is no room for it now.
    pub fn busy(message: impl Into<String>) -> Self {
        let error = Self::new(429, Cause::Overloaded.name(), message);
        Self { retry_after: Some(1), ..error }
    }

    /// Nothing new is begun here; somewhere else it may be, or here after a restart.
    pub fn draining(message: impl Into<String>) -> Self {
        let error = Self::new(503, Cause::Draining.name(), message);
        Self { retry_after: Some(1), ..error }
    }

    /// The answer's body.
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
            code: self.code,
        };
        serde_json::to_vec(&Body { error: inner }).expect("texts are JSON")
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
            body(ApiError::overloaded(2)),
            r#"{"error":{"message":"as many requests wait here as may (--max-queued-requests); try again later","type":"rate_limit_error","param":null,"code":"overloaded"}}"#
        );
        assert_eq!(ApiError::new(503, "draining", "").kind, "server_error");
        assert_eq!(ApiError::new(408, "deadline", "").kind, "timeout_error");
    }
}
