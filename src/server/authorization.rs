//! Checks whether a request is allowed: it has an API key, and no browser sends it for a web page.
//!
//! Thread: `ctl`. Not here: the proof of a cluster key (`registry::proof`, `wire::auth`).

use crate::api::{ApiError, ErrorCode};
use crate::config::secret::Secret;
use crate::http::Request;

/// Checks that a request carries one of `keys`, if there are any. The time of the comparison does
/// not depend on where the keys differ.
pub fn authorise(keys: &[Secret], request: &Request) -> Result<(), ApiError> {
    if keys.is_empty() {
        return Ok(());
    }
    let shown =
        request.head.headers.get("authorization").and_then(|value| value.strip_prefix("Bearer "));
    // All keys are compared, so that the time does not reveal which one matched.
    let is_one =
        |shown: &str| keys.iter().fold(false, |is, key| is | key.matches(shown.trim().as_bytes()));
    if shown.is_some_and(is_one) {
        Ok(())
    } else {
        Err(ApiError::new(
            401,
            ErrorCode::InvalidApiKey,
            "this server requires an API key as a bearer token",
        ))
    }
}

/// Refuses requests that a browser sends for a web page. Any page can make a browser send a POST to
/// any host that the browser reaches. No page should change a process.
pub fn refuse_browser_request(request: &Request) -> Result<(), ApiError> {
    match request.head.headers.get("origin") {
        None => Ok(()),
        Some(_) => Err(ApiError::new(
            403,
            ErrorCode::NotTrusted,
            "a request with an Origin header comes from a web page and is refused",
        )),
    }
}
