//! Errors in the format of OpenAI's API.

use crate::cause::Cause;
use serde::Serialize;
use std::fmt;

/// Why a request was refused or failed, as the client sees it.
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
    pub code: &'static str,
    /// Seconds after which a retry makes sense.
    pub retry_after: Option<u32>,
    /// Methods that the path supports, for an error about the method.
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

    /// The body is not JSON, or not an object.
    pub fn invalid_json(message: impl fmt::Display) -> Self {
        Self::new(400, "invalid_json", format!("the body is not a valid JSON object: {message}"))
    }

    /// The field `param` has an invalid value; `must` ends the sentence "`param` …".
    pub fn invalid(param: impl Into<String>, must: impl fmt::Display) -> Self {
        let param = param.into();
        let error = Self::new(400, "invalid_value", format!("`{param}` {must}"));
        Self { param: Some(param), ..error }
    }

    /// The field `param`, or its value, belongs to the API but is not supported.
    pub fn unsupported(param: impl Into<String>) -> Self {
        let error = Self::invalid(param, "is not supported by this server with the value given");
        Self { code: "unsupported_field", ..error }
    }

    /// No model of this name is served here.
    pub fn model_not_found(model: &str, served: &[String]) -> Self {
        let served = served.join("`, `");
        let message = format!("the model `{model}` is not served here; available: `{served}`");
        let error = Self::new(404, "model_not_found", message);
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
        let error = Self::new(400, "context_length_exceeded", message);
        Self { param: Some(param.into()), ..error }
    }

    /// A text that is too long for the context, whatever its tokens are. `param` is the field with
    /// the text.
    pub fn text_too_long(param: &str, bytes: usize, most: usize, context: usize) -> Self {
        let message = format!(
            "this model's context holds {context} tokens, which is at most {most} bytes of text; \
             the prompt has {bytes} bytes"
        );
        let error = Self::new(400, "context_length_exceeded", message);
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
        Self::new(Cause::Refused.http_status(), Cause::Refused.name(), message)
    }

    /// The path does not support the method; `allow` lists those that it does.
    pub fn method_not_allowed(allow: &str) -> Self {
        let error = Self::new(405, "method_not_allowed", format!("this path supports {allow}"));
        Self { allow: Some(allow.to_owned()), ..error }
    }

    /// The queue of a worker is full.
    pub fn overloaded(retry_after: u32) -> Self {
        let error = Self::new(
            429,
            Cause::Overloaded.name(),
            "the queue is full (--max-queued-requests); try again later",
        );
        Self { retry_after: Some(retry_after), ..error }
    }

    /// There is no capacity for the request now.
    pub fn busy(message: impl Into<String>) -> Self {
        let error = Self::new(429, Cause::Overloaded.name(), message);
        Self { retry_after: Some(1), ..error }
    }

    /// No new work starts here; another server can take it, or this one after a restart.
    pub fn draining(message: impl Into<String>) -> Self {
        let error = Self::new(503, Cause::Draining.name(), message);
        Self { retry_after: Some(1), ..error }
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
            code: self.code,
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
            body(ApiError::overloaded(2)),
            r#"{"error":{"message":"the queue is full (--max-queued-requests); try again later","type":"rate_limit_error","param":null,"code":"overloaded"}}"#
        );
        assert_eq!(ApiError::new(503, "draining", "").kind, "server_error");
        assert_eq!(ApiError::new(408, "deadline", "").kind, "timeout_error");
    }
}
