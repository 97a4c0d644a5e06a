//! Checks whether a request is allowed: it has an API key, or an admin key if it is administrative,
//! and no browser sends it for a web page.
//!
//! Owns: the rule for administrative requests. Thread: `ctl`. Not here: the proof of a cluster key
//! (`registry::proof`, `wire::auth`).

use crate::api::info::AbortRequest;
use crate::api::{ApiError, ErrorCode};
use crate::config::ServerConfig;
use crate::config::api_key::ApiKey;
use crate::config::secret::Secret;
use crate::http::{Method, Request};
use crate::stdx::failpoint::is_failpoint_active;

/// The keys that a server accepts.
#[derive(Clone, Default, Debug)]
pub struct AccessKeys {
    /// API keys; empty: only administrative requests can need a key.
    pub api: Vec<Secret>,
    /// Admin keys; empty: each API key permits administrative requests.
    pub admin: Vec<Secret>,
}

impl AccessKeys {
    /// The keys of these settings.
    pub fn of(server: &ServerConfig) -> AccessKeys {
        let mut keys = AccessKeys { api: Vec::new(), admin: server.admin_keys.clone() };
        keys.set_api(&server.api_keys);
        keys
    }

    /// Accepts these API keys from now on.
    pub fn set_api(&mut self, keys: &[ApiKey]) {
        let keys = keys.iter().map(|key| key.secret.clone()).collect();
        let former = std::mem::replace(&mut self.api, keys);
        if is_failpoint_active("removed key is still accepted") {
            self.api.extend(former);
        }
    }
}

/// Checks that a request carries one of the keys that it needs, if there are any. Returns the index
/// of its API key. An admin key, which has no index, is also accepted in place of an API key. The
/// time of the comparison does not depend on where the keys differ.
/// No web page can send an administrative request, whatever its key.
pub fn authorise(keys: &AccessKeys, request: &Request) -> Result<Option<usize>, ApiError> {
    if is_administrative(request) {
        refuse_browser_request(request)?;
    }
    let needs_admin = !keys.admin.is_empty() && is_administrative(request);
    if keys.api.is_empty() && !needs_admin {
        return Ok(None);
    }
    let shown =
        request.head.headers.get("authorization").and_then(|value| value.strip_prefix("Bearer "));
    let shown = shown.unwrap_or_default().trim().as_bytes();
    // All keys are compared, so that the time does not reveal which one matched.
    let find = |keys: &[Secret]| {
        let matches = keys.iter().map(|key| key.matches(shown)).enumerate();
        matches.fold(None, |found: Option<usize>, (index, is)| found.or(is.then_some(index)))
    };
    let (api_key, admin_key) = (find(&keys.api), find(&keys.admin));
    let is_api = api_key.is_some() || is_failpoint_active("any key is accepted");
    let is_admin =
        admin_key.is_some() || is_api && is_failpoint_active("API key is accepted for orders");
    match needs_admin {
        _ if is_admin => Ok(None),
        false if is_api => Ok(api_key),
        true if is_api => Err(ApiError::new(
            403,
            ErrorCode::AdminKeyRequired,
            "this request needs an admin key (--admin-key-file); the key is only an API key",
        )),
        _ => {
            let needed = if needs_admin { "admin key" } else { "API key" };
            let why = format!("this server requires an {needed} as a bearer token");
            Err(ApiError::new(401, ErrorCode::InvalidApiKey, why))
        }
    }
}

/// Whether a request administers a worker or a router: it ends or changes more than a client's own
/// requests. An abort is one unless it names its requests, so a body that cannot be read is one.
pub fn is_administrative(request: &Request) -> bool {
    if matches!(request.head.method, Method::Get | Method::Head) {
        return false;
    }
    match request.head.path() {
        "/drain" | "/flush_cache" | "/role" | "/workers" => true,
        "/abort_request" => {
            let named = AbortRequest::parse(&request.body);
            !matches!(named, Ok(AbortRequest::Rid(_) | AbortRequest::Kept(_)))
        }
        path => path.starts_with("/workers/"),
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

/// Refuses a body that is not as it is.
pub fn refuse_compressed_body(request: &Request) -> Result<(), ApiError> {
    match request.head.headers.get("content-encoding") {
        None | Some("identity" | "") => Ok(()),
        Some(coding) => Err(ApiError::new(
            415,
            ErrorCode::UnsupportedMedia,
            format!("the body has the Content-Encoding {coding:?}; send it without compression"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::{HttpLimits, RequestDecoder};

    /// A request with this key, if there is one.
    fn request(method: &str, path: &str, body: &str, key: Option<&str>) -> Request {
        let key = key.map(|key| format!("authorization: Bearer {key}\r\n")).unwrap_or_default();
        let length = body.len();
        let text = format!(
            "{method} {path} HTTP/1.1\r\nhost: t\r\n{key}content-length: {length}\r\n\r\n{body}"
        );
        let mut decoder = RequestDecoder::new(HttpLimits::default());
        let (mut at, mut read) = (0, None);
        while read.is_none() && at < text.len() {
            let (used, request) = decoder.read(&text.as_bytes()[at..]).expect("it is HTTP");
            (at, read) = (at + used, request);
        }
        read.expect("it is whole")
    }

    const ADMINISTRATIVE: [(&str, &str, &str); 14] = [
        ("POST", "/drain", ""),
        ("POST", "/drain?now", ""),
        ("POST", "/flush_cache", ""),
        ("POST", "/role", r#"{"role":"decode"}"#),
        ("POST", "/workers", "{}"),
        ("PUT", "/workers/3", "{}"),
        ("DELETE", "/workers/3", ""),
        ("POST", "/workers/3/role", r#"{"role":"decode"}"#),
        ("POST", "/abort_request", r#"{"abort_all":true}"#),
        ("POST", "/abort_request", r#"{"rid":"a","abort_all":true}"#),
        ("POST", "/abort_request", r#"{"rid":""}"#),
        ("POST", "/abort_request", r#"{"rid":null}"#),
        ("POST", "/abort_request", "{}"),
        ("POST", "/abort_request", r#"{"rid":"a""#),
    ];
    const ORDINARY: [(&str, &str, &str); 11] = [
        ("POST", "/abort_request", r#"{"rid":"a"}"#),
        ("POST", "/abort_request", r#"{"rid":"a","abort_all":false}"#),
        ("POST", "/abort_request", r#"{"bootstrap_room":7}"#),
        ("POST", "/v1/completions", r#"{"abort_all":true}"#),
        ("GET", "/metrics", ""),
        ("GET", "/role", ""),
        ("GET", "/workers", ""),
        ("GET", "/workers/3", ""),
        ("GET", "/workers/3/role", ""),
        ("PUT", "/registry", "{}"),
        ("POST", "/challenge", ""),
    ];

    /// Status and code for a request with this key.
    fn verdict(
        keys: &AccessKeys,
        it: (&str, &str, &str),
        key: Option<&str>,
    ) -> (u16, &'static str) {
        match authorise(keys, &request(it.0, it.1, it.2, key)) {
            Ok(_) => (200, ""),
            Err(error) => (error.status, error.code.name()),
        }
    }

    fn keys(api: &[&str], admin: &[&str]) -> AccessKeys {
        let [api, admin] = [api, admin].map(|keys| {
            keys.iter().map(|key| Secret::of_bytes(key.as_bytes())).collect::<Vec<_>>()
        });
        AccessKeys { api, admin }
    }

    #[test]
    fn an_administrative_request_needs_an_admin_key_if_there_are_any() {
        let keys = keys(&["client", "other"], &["root", "chief"]);
        for it in ADMINISTRATIVE {
            assert_eq!(verdict(&keys, it, Some("client")), (403, "admin_key_required"), "{it:?}");
            assert_eq!(verdict(&keys, it, Some("other")), (403, "admin_key_required"), "{it:?}");
            assert_eq!(verdict(&keys, it, Some("nobody")), (401, "invalid_api_key"), "{it:?}");
            assert_eq!(verdict(&keys, it, None), (401, "invalid_api_key"), "{it:?}");
            assert_eq!(verdict(&keys, it, Some("chief")), (200, ""), "{it:?}");
        }
        for it in ORDINARY {
            assert_eq!(verdict(&keys, it, Some("other")), (200, ""), "{it:?}");
            assert_eq!(verdict(&keys, it, Some("root")), (200, ""), "{it:?}");
            assert_eq!(verdict(&keys, it, Some("roo")), (401, "invalid_api_key"), "{it:?}");
            assert_eq!(verdict(&keys, it, None), (401, "invalid_api_key"), "{it:?}");
        }
    }

    #[test]
    fn an_api_key_is_known_by_its_place_and_an_admin_key_by_none() {
        let keys = keys(&["client", "other", "root"], &["root"]);
        let place = |key| authorise(&keys, &request("POST", "/v1/completions", "{}", Some(key)));
        assert_eq!((place("client"), place("other")), (Ok(Some(0)), Ok(Some(1))));
        assert_eq!(place("root"), Ok(None), "a key in both files is an admin key");
    }

    #[test]
    fn without_admin_keys_every_api_key_administers() {
        for it in ADMINISTRATIVE.into_iter().chain(ORDINARY) {
            assert_eq!(verdict(&keys(&["client"], &[]), it, Some("client")), (200, ""), "{it:?}");
            assert_eq!(verdict(&keys(&["client"], &[]), it, None).0, 401, "{it:?}");
            assert_eq!(verdict(&AccessKeys::default(), it, None), (200, ""), "{it:?}");
        }
    }

    #[test]
    fn admin_keys_alone_leave_ordinary_requests_open() {
        let keys = keys(&[], &["root"]);
        for it in ADMINISTRATIVE {
            assert_eq!(verdict(&keys, it, None), (401, "invalid_api_key"), "{it:?}");
            assert_eq!(verdict(&keys, it, Some("")), (401, "invalid_api_key"), "{it:?}");
            assert_eq!(verdict(&keys, it, Some("root")), (200, ""), "{it:?}");
        }
        for it in ORDINARY {
            assert_eq!(verdict(&keys, it, None), (200, ""), "{it:?}");
            assert_eq!(verdict(&keys, it, Some("nobody")), (200, ""), "{it:?}");
        }
    }
}
