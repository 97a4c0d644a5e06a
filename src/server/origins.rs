//! Web pages of other origins: which of them can read answers (CORS).
//!
//! Thread: `ctl`. Owns: the header fields that browsers look for. Not here: requests that no page
//! can make (`authorization`).

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

    /// Header fields that let the web page behind this request read the answer; empty if it cannot
    /// or if there is no web page.
    pub fn headers(&self, request: &Request) -> Vec<(&'static str, String)> {
        let sent = &request.head.headers;
        let is_allowed = |origin: &&str| self.0.iter().any(|known| known == "*" || known == origin);
        let Some(origin) = sent.get("origin").filter(is_allowed) else { return Vec::new() };
        let exposed = format!("x-request-id, retry-after, {IGNORED_FIELDS}");
        let mut headers = vec![
            ("access-control-allow-origin", origin.to_owned()),
            ("access-control-expose-headers", exposed),
            ("vary", "origin".to_owned()),
        ];
        if is_preflight(request) {
            let asked = sent.get("access-control-request-headers");
            headers.push(("access-control-allow-methods", "GET, POST".to_owned()));
            headers.push(("access-control-allow-headers", asked.unwrap_or("*").to_owned()));
            headers.push(("access-control-max-age", "600".to_owned()));
        }
        headers
    }
}

/// Whether a browser asks before it sends the request itself.
pub fn is_preflight(request: &Request) -> bool {
    request.head.method == Method::Options
}
