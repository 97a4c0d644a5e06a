//! Web pages of other origins: which of them can read answers (CORS).
//!
//! Thread: `ctl`. Owns: the header fields that browsers look for. Not here: requests that no page
//! can make (`authorization`).

use super::key_limits::{REQUEST_FIELDS, TOKEN_FIELDS};
use crate::api::IGNORED_FIELDS;
use crate::http::{Method, Request};

/// Origins of web pages that can read answers; empty: none.
#[derive(Default, Debug)]
pub struct AllowedOrigins(Vec<String>);

impl AllowedOrigins {
    /// These origins; `*` is every origin.
    pub fn new(origins: Vec<String>) -> AllowedOrigins {
        AllowedOrigins(origins)
    }

    /// The origin of the web page behind this request, if it can read the answer.
    fn allowed<'r>(&self, request: &'r Request) -> Option<&'r str> {
        let is_allowed = |origin: &&str| self.0.iter().any(|known| known == "*" || known == origin);
        request.head.headers.get("origin").filter(is_allowed)
    }

    /// Whether a browser asks for such a page before it sends the request itself.
    pub fn is_preflight(&self, request: &Request) -> bool {
        request.head.method == Method::Options && self.allowed(request).is_some()
    }

    /// Header fields that let the web page behind this request read the answer. Caches learn that
    /// the answer depends on the origin.
    pub fn headers(&self, request: &Request) -> Vec<(&'static str, String)> {
        let sent = &request.head.headers;
        let Some(origin) = self.allowed(request) else {
            let is_open = !self.0.is_empty();
            return is_open.then(|| ("vary", "origin".to_owned())).into_iter().collect();
        };
        let own = ["x-request-id", "retry-after", IGNORED_FIELDS];
        let exposed = [&own[..], &REQUEST_FIELDS, &TOKEN_FIELDS].concat().join(", ");
        let mut headers = vec![
            ("access-control-allow-origin", origin.to_owned()),
            ("access-control-expose-headers", exposed),
            ("vary", "origin".to_owned()),
        ];
        if self.is_preflight(request) {
            let asked = sent.get("access-control-request-headers");
            headers.push(("access-control-allow-methods", "GET, POST".to_owned()));
            headers.push(("access-control-allow-headers", asked.unwrap_or("*").to_owned()));
            headers.push(("access-control-max-age", "600".to_owned()));
        }
        headers
    }
}
