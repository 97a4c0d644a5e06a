//! HTTP to a hub: one request at a time, on the thread that waits for it.
//!
//! Thread: the thread that starts the process. Invariants: the token goes to the scheme, host and
//! port of the endpoint, and to no host of a redirect. A redirect never leads from TLS to plain
//! HTTP. Each wait has a deadline, and each answer a limit. Not here: the bytes of files
//! (`download`).

use super::error::HubError;
use super::file_list::HubListing;
use crate::config::hub::HubConfig;
use crate::limits::{
    HUB_CONNECT_TIME, HUB_LISTING_MAX, HUB_LISTING_TIME, HUB_REDIRECTS_MAX, HUB_RETRY_DELAY,
    HUB_SILENCE_MAX,
};
use crate::obs::log::event;
use std::io::{self, Read};
use std::sync::Arc;
use std::time::Duration;
use ureq::http::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_RANGE, LOCATION, RANGE};
use ureq::http::{HeaderName, Response, StatusCode, Uri};
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::{Agent, Body};

/// The path of lists of files.
const LISTINGS: &str = "/api/models/";
/// The header in which a hub names the reason of a refusal.
const ERROR_CODE: &str = "x-error-code";

/// A connection to a hub.
pub struct HubClient {
    agent: Agent,
    endpoint: String,
    /// Repository and revision, for messages.
    model: String,
    origin: Origin,
    /// Value of the header `Authorization`.
    authorization: Option<String>,
}

/// The reason why a try failed.
#[derive(Debug)]
pub enum HubFault {
    /// The next try can succeed: the reason.
    Passing(String),
    /// It fails again.
    Final(HubError),
}

impl From<HubError> for HubFault {
    fn from(error: HubError) -> HubFault {
        HubFault::Final(error)
    }
}

/// The bytes of a file from some offset on.
pub struct FileAnswer {
    /// The offset of the first byte.
    pub from: u64,
    /// Size of the whole file, if the host says it.
    pub size: Option<u64>,
    /// The bytes.
    pub bytes: Box<dyn Read>,
}

impl HubClient {
    /// A client of this hub. It makes no connection yet.
    ///
    /// # Errors
    /// The endpoint is no URL.
    pub fn new(hub: &HubConfig) -> Result<HubClient, HubError> {
        let endpoint = hub.endpoint.clone();
        let origin = Origin::of(&parse_url(&endpoint)?);
        let tls = TlsConfig::builder()
            .root_certs(trusted_authorities())
            .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .build();
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(HUB_CONNECT_TIME))
            .timeout_resolve(Some(HUB_CONNECT_TIME))
            .timeout_per_read(Some(HUB_SILENCE_MAX))
            .timeout_per_write(Some(HUB_SILENCE_MAX))
            .timeout_recv_response(Some(HUB_SILENCE_MAX))
            .user_agent(concat!("baton/", env!("CARGO_PKG_VERSION")))
            .tls_config(tls)
            .build();
        let token = hub.token.as_ref();
        let authorization =
            token.map(|token| format!("Bearer {}", String::from_utf8_lossy(token.bytes())));
        let model =
            format!("repository {} with the revision {}", hub.name.repository, hub.revision);
        let agent = Agent::new_with_config(config);
        Ok(HubClient { agent, endpoint, model, origin, authorization })
    }

    /// The files of a repository at a revision.
    ///
    /// # Errors
    /// The hub refuses, or does not answer in any of the tries.
    pub fn list_files(
        &self,
        repository: &str,
        revision: &str,
        tries: u32,
    ) -> Result<HubListing, HubError> {
        let revision_path = escape(revision, false);
        let url =
            format!("{}{LISTINGS}{repository}/revision/{revision_path}?blobs=true", self.endpoint);
        let mut failures = 0;
        loop {
            match self.list_once(&url) {
                Ok(json) => {
                    return HubListing::parse(&json)
                        .map_err(|what| HubError::Answer { url: url.clone(), what });
                }
                Err(HubFault::Final(error)) => return Err(error),
                Err(HubFault::Passing(reason)) => {
                    failures += 1;
                    if failures >= tries {
                        return Err(HubError::Unreachable { url, reason, tries });
                    }
                    wait_for_retry(&url, failures, &reason);
                }
            }
        }
    }

    /// A file of a repository at a commit, from this offset on.
    ///
    /// # Errors
    /// The try fails.
    pub fn open_file(
        &self,
        repository: &str,
        commit: &str,
        path: &str,
        from: u64,
    ) -> Result<FileAnswer, HubFault> {
        let url = format!("{}/{repository}/resolve/{commit}/{}", self.endpoint, escape(path, true));
        let response = self.get(&url, (from > 0).then_some(from), None)?;
        let text = |name: HeaderName| {
            response.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
        };
        let (from, size) = if response.status() == StatusCode::PARTIAL_CONTENT {
            let stated = text(CONTENT_RANGE).unwrap_or_default();
            let Some((begin, size)) =
                parse_content_range(&stated).filter(|(begin, _)| *begin == from)
            else {
                let what = format!("asked for bytes from {from} on, found the range {stated:?}");
                return Err(HubFault::Final(HubError::Answer { url, what }));
            };
            (begin, size)
        } else {
            (0, text(CONTENT_LENGTH).and_then(|length| length.parse().ok()))
        };
        Ok(FileAnswer { from, size, bytes: Box::new(response.into_body().into_reader()) })
    }

    fn list_once(&self, url: &str) -> Result<Vec<u8>, HubFault> {
        let response = self.get(url, None, Some(HUB_LISTING_TIME))?;
        let mut json = Vec::new();
        let mut bytes = response.into_body().into_reader().take(HUB_LISTING_MAX as u64 + 1);
        bytes.read_to_end(&mut json).map_err(|error| HubFault::Passing(describe(&error)))?;
        if json.len() > HUB_LISTING_MAX {
            let what = format!("the list of files has more than {HUB_LISTING_MAX} bytes");
            return Err(HubFault::Final(HubError::Answer { url: url.to_owned(), what }));
        }
        Ok(json)
    }

    /// Sends a request and follows its redirects. The answer has the status 200 or 206.
    fn get(
        &self,
        url: &str,
        from: Option<u64>,
        time: Option<Duration>,
    ) -> Result<Response<Body>, HubFault> {
        let mut uri = parse_url(url)?;
        for _ in 0..=HUB_REDIRECTS_MAX {
            let is_own = Origin::of(&uri) == self.origin;
            let mut request = self.agent.get(&uri).config().timeout_global(time).build();
            if let Some(authorization) = self.authorization.as_ref().filter(|_| is_own) {
                request = request.header(AUTHORIZATION, authorization);
            }
            if let Some(from) = from {
                request = request.header(RANGE, format!("bytes={from}-"));
            }
            let response = request.call().map_err(|error| fault_of(&uri, error))?;
            match response.status().as_u16() {
                200 => return Ok(response),
                206 if from.is_some() => return Ok(response),
                301 | 302 | 303 | 307 | 308 => uri = follow(&uri, &response)?,
                _ => return Err(self.refusal(&uri, &response, is_own)),
            }
        }
        let what = format!("more than {HUB_REDIRECTS_MAX} redirects");
        Err(HubFault::Final(HubError::Answer { url: url.to_owned(), what }))
    }

    /// What an answer without content means.
    fn refusal(&self, uri: &Uri, response: &Response<Body>, is_own: bool) -> HubFault {
        let status = response.status().as_u16();
        // A store of large files signs its URLs for some time, and the next try gets a new one.
        if matches!(status, 408 | 425 | 429 | 500..=599) || !is_own && status == 403 {
            let reason = format!("the host {} answers with status {status}", host(uri));
            return HubFault::Passing(reason);
        }
        let code = response.headers().get(ERROR_CODE).and_then(|code| code.to_str().ok());
        let is_file = !uri.path().contains(LISTINGS);
        let advice = self.advise(status, code.unwrap_or_default(), is_file);
        HubFault::Final(HubError::Refused { url: shown(uri), status, advice })
    }

    /// What the reader can do. A hub also answers 401 if there is no repository with the name.
    fn advise(&self, status: u16, code: &str, is_file: bool) -> String {
        const WITH_TERMS: &str = "GatedRepo";
        let model = &self.model;
        let advice = match (status, code, self.authorization.is_some()) {
            (404, _, _) if is_file => "the file is not there",
            (401 | 403, WITH_TERMS, false) => {
                "the model has terms; accept them on its page, and set HF_TOKEN to a token of the \
                 same account"
            }
            (401 | 403, WITH_TERMS, true) | (403, _, true) => {
                "the token gives no access; accept the terms on the model's page, or set HF_TOKEN \
                 to a token of an account with access"
            }
            (401 | 403 | 404, _, false) => {
                return format!(
                    "there is no {model}, or it needs a token; check the name, and for a private \
                     model or one with terms set HF_TOKEN"
                );
            }
            (401 | 404, _, true) => {
                return format!("there is no {model}, or the token is wrong or gives no access");
            }
            _ => "this is no answer that a hub gives",
        };
        advice.to_owned()
    }
}

/// Waits before the next try, longer after each failure.
pub fn wait_for_retry(what: &str, failures: u32, reason: &str) {
    let delay = HUB_RETRY_DELAY * 2u32.saturating_pow(failures.saturating_sub(1));
    event!(
        Warn,
        "hub",
        "fetch failed, next try follows",
        file = what,
        why = reason,
        failures = failures,
        delay_ms = delay.as_millis()
    );
    std::thread::sleep(delay);
}

/// An I/O error of an answer's body, in a few words.
pub fn describe(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => "the connection ended early".to_owned(),
        io::ErrorKind::TimedOut => format!("no byte came for {} s", HUB_SILENCE_MAX.as_secs()),
        _ => error.to_string(),
    }
}

/// Scheme, host and port.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Origin {
    is_tls: bool,
    host: String,
    port: u16,
}

impl Origin {
    fn of(uri: &Uri) -> Origin {
        let is_tls = uri.scheme_str() == Some("https");
        let port = uri.port_u16().unwrap_or(if is_tls { 443 } else { 80 });
        Origin { is_tls, host: host(uri).to_ascii_lowercase(), port }
    }
}

/// The CA certificates of this host, or those of `SSL_CERT_FILE` and `SSL_CERT_DIR`. A host without
/// any, such as an empty container, gets the built-in ones.
fn trusted_authorities() -> RootCerts {
    let found = rustls_native_certs::load_native_certs();
    for error in &found.errors {
        event!(Warn, "hub", "CA certificates cannot be read", why = error);
    }
    // A file that cannot be read must not widen the trust to the built-in ones.
    if found.certs.is_empty() && found.errors.is_empty() {
        return RootCerts::WebPki;
    }
    let certificates: Vec<Certificate<'static>> =
        found.certs.iter().map(|one| Certificate::from_der(one.as_ref()).to_owned()).collect();
    RootCerts::new_with_certs(&certificates)
}

fn parse_url(url: &str) -> Result<Uri, HubError> {
    let uri: Option<Uri> = url.parse().ok();
    let is_absolute =
        |uri: &Uri| matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some();
    uri.filter(is_absolute)
        .ok_or_else(|| HubError::Answer { url: url.to_owned(), what: "this is no URL".to_owned() })
}

fn host(uri: &Uri) -> &str {
    uri.host().unwrap_or_default()
}

/// A URL for messages: without its query, which can be a signature that gives access.
fn shown(uri: &Uri) -> String {
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    format!("{}://{authority}{}", uri.scheme_str().unwrap_or_default(), uri.path())
}

/// The URL that a redirect leads to.
fn follow(uri: &Uri, response: &Response<Body>) -> Result<Uri, HubError> {
    let location = response.headers().get(LOCATION).and_then(|value| value.to_str().ok());
    let refused = |what: &str| HubError::Answer { url: shown(uri), what: what.to_owned() };
    let location = location.ok_or_else(|| refused("a redirect leads nowhere"))?;
    let next = if location.starts_with('/') && !location.starts_with("//") {
        let base = Origin::of(uri);
        let scheme = if base.is_tls { "https" } else { "http" };
        parse_url(&format!("{scheme}://{}:{}{location}", base.host, base.port))
    } else {
        parse_url(location)
    };
    let next = next.map_err(|_| refused("a redirect leads to no URL"))?;
    if Origin::of(uri).is_tls && !Origin::of(&next).is_tls {
        return Err(refused("a redirect leads from https to http"));
    }
    Ok(next)
}

/// Bytes that need no escape in a URL's path. Slashes separate the parts of a file's path, and are
/// a part of a revision's name.
fn escape(text: &str, keeps_slashes: bool) -> String {
    let mut escaped = String::new();
    for byte in text.bytes() {
        match byte {
            b'/' if keeps_slashes => escaped.push('/'),
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                escaped.push(byte as char);
            }
            _ => escaped.push_str(&format!("%{byte:02X}")),
        }
    }
    escaped
}

/// First byte and size of `bytes FIRST-LAST/SIZE`.
fn parse_content_range(text: &str) -> Option<(u64, Option<u64>)> {
    let (range, size) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, _) = range.split_once('-')?;
    Some((first.parse().ok()?, size.parse().ok()))
}

/// What an error of the HTTP client means for the next try.
fn fault_of(uri: &Uri, error: ureq::Error) -> HubFault {
    let certificate = match &error {
        ureq::Error::Rustls(why) => Some(why),
        ureq::Error::Io(why) => why.get_ref().and_then(|inner| inner.downcast_ref()),
        _ => None,
    };
    if let Some(why @ rustls::Error::InvalidCertificate(_)) = certificate {
        let reason = why.to_string();
        return HubFault::Final(HubError::Certificate { url: shown(uri), reason });
    }
    let host = host(uri);
    HubFault::Passing(match error {
        ureq::Error::Io(why) => format!("{host}: {}", describe(&why)),
        ureq::Error::HostNotFound => format!("the host {host} is not found"),
        ureq::Error::Timeout(what) => format!("{host}: no answer in time ({what})"),
        other => format!("{host}: {other}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_revisions_are_escaped_in_a_url() {
        assert_eq!(escape("a b/c#d?.gguf", true), "a%20b/c%23d%3F.gguf");
        assert_eq!(escape("refs/pr/1", false), "refs%2Fpr%2F1");
        assert_eq!(escape("é", true), "%C3%A9");
    }

    #[test]
    fn ranges_are_read() {
        assert_eq!(parse_content_range("bytes 5-9/10"), Some((5, Some(10))));
        assert_eq!(parse_content_range("bytes 5-9/*"), Some((5, None)));
        for text in ["", "bytes", "bytes */10", "bytes x-9/10", "5-9/10"] {
            assert_eq!(parse_content_range(text), None, "{text}");
        }
    }

    #[test]
    fn a_redirect_never_leads_from_tls_to_plain_http() {
        let next = |from: &str, location: &str| {
            let response =
                Response::builder().header(LOCATION, location).body(Body::builder().data(""));
            follow(&from.parse().unwrap(), &response.unwrap()).map(|uri| uri.to_string())
        };
        let https = "https://hub/a/b";
        assert_eq!(next(https, "/c?d=e").unwrap(), "https://hub:443/c?d=e");
        assert_eq!(next(https, "https://store:8/x").unwrap(), "https://store:8/x");
        assert_eq!(next("http://hub/a", "https://store/x").unwrap(), "https://store/x");
        for (location, why) in [
            ("http://hub/a", "from https to http"),
            ("ftp://hub/a", "no URL"),
            ("//store/x", "no URL"),
            ("x", "no URL"),
        ] {
            let error = next(https, location).unwrap_err().to_string();
            assert!(error.contains(why), "{location}: {error}");
        }
    }

    #[test]
    fn one_origin_has_one_scheme_host_and_port() {
        let origin = |url: &str| Origin::of(&url.parse().unwrap());
        assert_eq!(origin("https://Hub/a"), origin("https://hub:443/b"));
        for other in ["http://hub/", "https://hub:8443/", "https://hub.evil/", "https://evil/hub"] {
            assert_ne!(origin("https://hub/"), origin(other), "{other}");
        }
    }
}
