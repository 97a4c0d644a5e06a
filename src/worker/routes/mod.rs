//! The HTTP paths of a worker, and the endpoints that need no engine.
//!
//! Thread: `ctl`. These endpoints answer at once. Requests for text go to `requests`, and so do
//! requests that need the tokeniser.

mod info;
mod role;

use crate::api::info::{AbortRequest, DRAINING, Draining, HandoffInfo, TAKEN_FOR};
use crate::api::request::list_fields;
use crate::api::routed_body::RoutedBody;
use crate::api::tokenize::{DetokenizeRequest, TokenizeRequest};
use crate::api::{
    ApiError, ErrorCode, GenerateRequest, IGNORED_FIELDS, Keep, PrefillAddress, Sampling, chat,
    completion, generate,
};
use crate::cause::Cause;
use crate::http::response::{JSON, Response};
use crate::http::{Method, REQUEST_TIMEOUT, Request};
use crate::ids::{RequestKey, Role};
use crate::limits::REQUEST_TIME_MAX;
use crate::net::ConnId;
use crate::obs::log::event;
use crate::server::authorization::{AccessKeys, authorise, refuse_compressed_body};
use crate::server::role_change::RoleChange;
use crate::upstream::request::UpstreamHead;
use crate::wire::auth::Keyring;
use crate::worker::prefill_client::PrefillRequest;
use crate::worker::requests::{Context, RequestTable};
use crate::worker::telemetry::Telemetry;
use crate::worker::text::TextTask;
use serde::Serialize;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The description of a server.
#[derive(Clone, Debug)]
pub struct ServerDescription {
    /// Model file or directory.
    pub model_path: String,
    /// `model_type` as in `config.json`.
    pub model_type: &'static str,
    /// `architectures` as in `config.json`.
    pub architectures: Vec<String>,
    /// `null`, `prefill` or `decode`.
    pub mode: &'static str,
    /// Port of the bootstrap registry, if there is one.
    pub bootstrap_port: Option<u16>,
    /// Properties that its peers must share, if this worker takes part in hand-offs.
    pub handoff: Option<HandoffInfo>,
    /// Tokens of the KV pool.
    pub pool_tokens: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// Maximum number of requests in the decode batch.
    pub max_running: usize,
    /// Default sampling parameters.
    pub sampling: Sampling,
    /// Start of the server, in seconds of Unix time.
    pub started: u64,
}

/// The role of a process as SGLang's interface names it.
#[derive(Clone, Debug)]
pub struct DisaggregationMode {
    /// `null`, `prefill` or `decode`.
    pub name: &'static str,
    /// Port of the bootstrap registry, if there is one.
    pub bootstrap_port: Option<u16>,
    /// Properties that its peers must share, if this worker takes part in hand-offs.
    pub handoff: Option<HandoffInfo>,
}

impl ServerDescription {
    /// The mode of a role.
    pub fn mode_of(role: Role) -> DisaggregationMode {
        let name = match role {
            Role::Mixed => "null",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        };
        DisaggregationMode { name, bootstrap_port: None, handoff: None }
    }
}

/// The endpoints of a worker.
#[derive(Debug)]
pub struct WorkerRoutes {
    about: ServerDescription,
    keys: AccessKeys,
    telemetry: Telemetry,
    /// Present if the role of this worker can change.
    role_change: Option<RoleChange>,
    draining: bool,
    hanging: bool,
    /// Number of the last id made for a request without one.
    next_id: u64,
    /// Unknown fields that were logged. Each is logged once, up to a bound.
    unknown: Vec<String>,
}

/// Paths that need no key.
const OPEN_PATHS: [&str; 4] = ["/health", "/readiness", "/liveness", "/ping"];
/// Paths of requests for text.
const TEXT_PATHS: [&str; 3] = ["/v1/completions", "/v1/chat/completions", "/generate"];
/// Maximum number of unknown fields that are logged.
const UNKNOWN_FIELDS_MAX: usize = 256;

impl WorkerRoutes {
    /// Requires one of `keys`, if there are any, on all paths except the health endpoints.
    pub fn new(about: ServerDescription, keys: AccessKeys, telemetry: Telemetry) -> WorkerRoutes {
        WorkerRoutes {
            about,
            keys,
            telemetry,
            role_change: None,
            draining: false,
            hanging: false,
            next_id: 0,
            unknown: Vec::new(),
        }
    }

    /// The figures of the workers.
    pub fn telemetry(&self) -> &Telemetry {
        &self.telemetry
    }

    /// From now on, serves these workers in this role.
    pub fn set_mode(&mut self, mode: DisaggregationMode, telemetry: Telemetry) {
        let DisaggregationMode { name, bootstrap_port, handoff } = mode;
        (self.about.mode, self.about.bootstrap_port, self.about.handoff) =
            (name, bootstrap_port, handoff);
        self.telemetry = telemetry;
    }

    /// The keys that requests need.
    pub fn keys(&mut self) -> &mut AccessKeys {
        &mut self.keys
    }

    /// Sets the ids of the cluster keys that routers see.
    pub fn set_cluster_keys(&mut self, keys: &Keyring) {
        if let Some(handoff) = &mut self.about.handoff {
            handoff.cluster_keys = keys.names();
        }
    }

    /// Refuses new requests for text from now on.
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// Whether [`WorkerRoutes::drain`] was called.
    pub fn is_draining(&self) -> bool {
        self.draining
    }

    /// Logs the events that the figures show.
    pub fn log_shortages(&mut self, now: Instant) {
        self.telemetry.log_shortages(now);
    }

    /// Sets whether the engine hangs.
    pub fn set_hanging(&mut self, hanging: bool) {
        match (std::mem::replace(&mut self.hanging, hanging), hanging) {
            (false, true) => event!(Error, "ctl", "the engine hangs"),
            (true, false) => event!(Info, "ctl", "the engine makes progress again"),
            _ => {}
        }
    }

    /// Answers a request, or starts it.
    pub fn serve(
        &mut self,
        conn: ConnId,
        request: &Request,
        table: &mut RequestTable,
        cx: &mut Context<'_>,
    ) {
        let id = cx.connections.assign_request_id(conn, || self.make_id());
        match self.route(conn, request, &id, table, cx) {
            Ok(()) => {}
            Err(error) => cx.send_error(conn, &error),
        }
    }

    fn route(
        &mut self,
        conn: ConnId,
        request: &Request,
        id: &str,
        table: &mut RequestTable,
        cx: &mut Context<'_>,
    ) -> Result<(), ApiError> {
        let is_open = OPEN_PATHS.contains(&request.head.path());
        let key = if is_open { None } else { authorise(&self.keys, request)? };
        refuse_compressed_body(request)?;
        let translated = cx.connections.translate(conn, request)?;
        let request = translated.as_ref().unwrap_or(request);
        if TEXT_PATHS.contains(&request.head.path()) && request.head.method == Method::Post {
            self.check_role(request)?;
            self.admitting()?;
            self.charge(conn, key, request, cx)?;
        }
        self.dispatch(conn, request, id, table, cx)
    }

    /// Charges a request for text to its API key, if the key has limits.
    fn charge(
        &self,
        conn: ConnId,
        key: Option<usize>,
        request: &Request,
        cx: &mut Context<'_>,
    ) -> Result<(), ApiError> {
        let Some(key) = key.filter(|_| cx.connections.key_limits.is_on()) else { return Ok(()) };
        let tokens = RoutedBody::parse(&request.body)?.tokens_max();
        cx.connections.charge(conn, (key, tokens), self.telemetry.key_refusals(), cx.now)
    }

    /// Answers a request that is allowed, or starts it.
    fn dispatch(
        &mut self,
        conn: ConnId,
        request: &Request,
        id: &str,
        table: &mut RequestTable,
        cx: &mut Context<'_>,
    ) -> Result<(), ApiError> {
        use Method::{Get, Head, Post};
        let path = request.head.path();
        let method = request.head.method;
        if OPEN_PATHS.contains(&path) {
            self.check_role(request)?;
        }
        match (method, path) {
            (Post, "/v1/completions") => {
                let parsed = completion::parse(&request.body, &self.about.sampling)?;
                self.generate(conn, request, parsed, id, table, cx)
            }
            (Post, "/v1/chat/completions") => {
                let parsed = chat::parse(&request.body, &self.about.sampling)?;
                self.generate(conn, request, parsed, id, table, cx)
            }
            (Post, "/generate") => {
                let parsed = generate::parse(&request.body, &self.about.sampling)?;
                self.generate(conn, request, parsed, id, table, cx)
            }
            (Get, "/health_generate") => self.run_self_test(conn, id, table, cx),
            (Get | Head, "/health" | "/ping" | "/liveness") => {
                self.alive()?;
                let body = if self.takes_nothing() { DRAINING } else { "OK" };
                text(conn, "text/plain", body, cx)
            }
            (Get | Head, "/readiness") => {
                self.admitting()?;
                text(conn, "text/plain", "OK", cx)
            }
            (Get, "/metrics") => {
                text(conn, "text/plain; version=0.0.4", &self.telemetry.exposition(), cx)
            }
            (Get, _) if path.starts_with(ONE_MODEL) => {
                let path = request.head.unescaped_path();
                let name = path.get(ONE_MODEL.len()..).unwrap_or_default();
                table.check_model(Some(name))?;
                json(conn, &self.card(name, request, table), cx)
            }
            (Get, "/role") => json(conn, &self.role(table.running()), cx),
            (Get, _) => self.serve_info(conn, request, table, cx),
            (Post, "/tokenize") => self.tokenize(conn, request, table),
            (Post, "/detokenize") => self.detokenize(conn, request, table),
            (Post, "/abort_request") => abort(conn, request, table, cx),
            (Post, "/flush_cache") => table.flush(conn, cx),
            (Post, "/drain") => {
                self.drain();
                json(conn, &Draining::with(table.running()), cx)
            }
            (Post, "/role") => {
                let (status, reply) = self.change_role(request, table.running(), cx.now)?;
                json_with(status, conn, &reply, cx)
            }
            _ => Err(nothing_at(path)),
        }
    }

    /// Runs a generation that tests this worker.
    fn run_self_test(
        &self,
        conn: ConnId,
        id: &str,
        table: &mut RequestTable,
        cx: &mut Context<'_>,
    ) -> Result<(), ApiError> {
        // Two tokens: in a hand-off prefill samples the first, and decode the second.
        const BODY: &[u8] =
            b"{\"input_ids\":[0],\"sampling_params\":{\"max_new_tokens\":2,\"temperature\":0,\
            \"ignore_eos\":true}}";
        let parsed = generate::parse(BODY, &self.about.sampling)?;
        self.admitting()?;
        table.start_self_test(conn, parsed, id.to_owned(), cx);
        Ok(())
    }

    fn generate(
        &mut self,
        conn: ConnId,
        request: &Request,
        mut asked: GenerateRequest,
        id: &str,
        table: &mut RequestTable,
        cx: &mut Context<'_>,
    ) -> Result<(), ApiError> {
        if asked.priority != 0 && !table.config().has_priorities {
            let why = "needs a server with --scheduling-policy priority";
            return Err(ApiError::invalid("priority", why));
        }
        asked.patience = patience(request)?;
        if !asked.unknown.is_empty() {
            self.telemetry.count_ignored_fields(asked.unknown.len());
            cx.connections.add_header(conn, IGNORED_FIELDS, list_fields(&asked.unknown));
        }
        for field in &asked.unknown {
            if self.unknown.len() < UNKNOWN_FIELDS_MAX && !self.unknown.contains(field) {
                event!(Warn, "http", "unknown request field ignored", field = field);
                self.unknown.push(field.clone());
            }
        }
        match asked.prefill.take() {
            None => table.start_request(conn, asked, id.to_owned(), cx),
            Some(address) => {
                let ask = ask(request, &asked, address, id)?;
                table.start_with_remote_prefill(conn, asked, ask, id.to_owned(), cx);
            }
        }
        Ok(())
    }

    fn tokenize(
        &self,
        conn: ConnId,
        request: &Request,
        table: &mut RequestTable,
    ) -> Result<(), ApiError> {
        let asked = TokenizeRequest::parse(&request.body)?;
        table.check_model(asked.model.as_deref())?;
        table.convert(conn, TextTask::Tokenize(asked))
    }

    fn detokenize(
        &self,
        conn: ConnId,
        request: &Request,
        table: &mut RequestTable,
    ) -> Result<(), ApiError> {
        let asked = DetokenizeRequest::parse(&request.body)?;
        table.check_model(asked.model.as_deref())?;
        table.convert(conn, TextTask::Detokenize(asked))
    }

    fn alive(&self) -> Result<(), ApiError> {
        if self.hanging {
            Err(ApiError::new(503, ErrorCode::Hanging, "the engine makes no progress"))
        } else {
            Ok(())
        }
    }

    fn admitting(&self) -> Result<(), ApiError> {
        self.alive()?;
        match () {
            () if self.draining => Err(ApiError::draining("the server is draining")),
            () if self.empties() => Err(ApiError::draining("the worker changes its role")),
            () => Ok(()),
        }
    }

    fn takes_nothing(&self) -> bool {
        self.draining || self.empties()
    }

    fn make_id(&mut self) -> String {
        self.next_id += 1;
        format!("{:x}-{:x}", self.about.started, self.next_id)
    }
}

/// The request to prefill in the flow `decode-first`: the client's request, plus the order to keep
/// its KV.
fn ask(
    request: &Request,
    asked: &GenerateRequest,
    address: PrefillAddress,
    id: &str,
) -> Result<PrefillRequest, ApiError> {
    let head = &request.head;
    let resume = asked.resume.as_ref().filter(|resume| resume.has_begun());
    let keep = Keep { claimed: true, ..address.keep() };
    let body = RoutedBody::parse(&request.body)?.keep(&keep, resume, true);
    let patience = asked.patience.as_millis().to_string();
    let mut headers = vec![("x-request-id", id.to_owned()), (REQUEST_TIMEOUT, patience)];
    for name in ["authorization", "traceparent"] {
        headers.extend(head.headers.get(name).map(|value| (name, value.to_owned())));
    }
    headers.push(("content-type", JSON.to_owned()));
    // With this field, a worker that has changed its role reports the change. Without it, that
    // worker would refuse to keep KV, and the refusal would look like a mistake of the client.
    headers.push((TAKEN_FOR, Role::Prefill.to_string()));
    let order = UpstreamHead { method: Method::Post, target: head.path().to_owned(), headers };
    // Key and deadline are set when the request has its slots.
    Ok(PrefillRequest {
        key: RequestKey(0),
        address,
        head: order,
        body: Arc::new(body),
        until: Instant::now(),
    })
}

/// Aborts the requests that the body names.
fn abort(
    conn: ConnId,
    request: &Request,
    table: &mut RequestTable,
    cx: &mut Context<'_>,
) -> Result<(), ApiError> {
    let aborted = match AbortRequest::parse(&request.body)? {
        AbortRequest::All => table.abort_requests(None, cx),
        AbortRequest::Rid(rid) => table.abort_requests(Some(&rid), cx),
        AbortRequest::Kept(room) => table.abort_kept(room, cx),
    };
    event!(Info, "http", "aborted by request", count = aborted);
    json(conn, &serde_json::json!({ "aborted": aborted }), cx)
}

/// Path of one model; its name follows.
const ONE_MODEL: &str = "/v1/models/";

/// The time that the client waits, at most [`REQUEST_TIME_MAX`].
fn patience(request: &Request) -> Result<Duration, ApiError> {
    let Some(text) = request.head.headers.get(REQUEST_TIMEOUT) else { return Ok(REQUEST_TIME_MAX) };
    let milliseconds = text.parse::<u64>().ok().filter(|&milliseconds| milliseconds > 0);
    let milliseconds = milliseconds.ok_or_else(|| {
        ApiError::invalid(
            REQUEST_TIMEOUT,
            format!("must be a positive number of milliseconds, not {text:?}"),
        )
    })?;
    Ok(Duration::from_millis(milliseconds).min(REQUEST_TIME_MAX))
}

/// The error for a path that does not exist or does not take the method.
fn nothing_at(path: &str) -> ApiError {
    match methods_of(path) {
        Some(allow) => ApiError::method_not_allowed(allow),
        None => ApiError::nothing_at(path, |path| methods_of(path).is_some()),
    }
}

/// The methods that a path takes, if it exists.
fn methods_of(path: &str) -> Option<&'static str> {
    Some(match path {
        "/v1/completions"
        | "/v1/chat/completions"
        | "/v1/responses"
        | "/v1/messages"
        | "/v1/messages/count_tokens"
        | "/generate"
        | "/tokenize"
        | "/detokenize"
        | "/abort_request"
        | "/flush_cache"
        | "/drain" => "POST",
        "/role" => "GET, POST",
        "/health" | "/ping" | "/liveness" | "/readiness" => "GET, HEAD",
        "/health_generate" | "/metrics" | "/v1/models" | "/server_info" | "/get_server_info"
        | "/model_info" | "/get_model_info" | "/tokenizer_info" | "/v1/loads" | "/get_load"
        | "/version" => "GET",
        _ if path.starts_with(ONE_MODEL) => "GET",
        _ => return None,
    })
}

fn text(
    conn: ConnId,
    media: &'static str,
    body: &str,
    cx: &mut Context<'_>,
) -> Result<(), ApiError> {
    let body = body.as_bytes();
    cx.send_response(conn, &Response { status: 200, media, body, retry_after: None });
    Ok(())
}

fn json(conn: ConnId, body: &impl Serialize, cx: &mut Context<'_>) -> Result<(), ApiError> {
    json_with(200, conn, body, cx)
}

fn json_with(
    status: u16,
    conn: ConnId,
    body: &impl Serialize,
    cx: &mut Context<'_>,
) -> Result<(), ApiError> {
    let body = serde_json::to_vec(body)
        .map_err(|error| ApiError::from_cause(Cause::Internal, error.to_string()))?;
    cx.send_response(conn, &Response { status, media: JSON, body: &body, retry_after: None });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::{HttpLimits, RequestDecoder};

    /// How long a request with this header field lasts at most.
    fn patience_of(field: &str) -> Duration {
        let text = format!("GET / HTTP/1.1\r\nhost: t\r\n{field}\r\n");
        let (_, request) =
            RequestDecoder::new(HttpLimits::default()).read(text.as_bytes()).expect("it is HTTP");
        patience(&request.expect("it is whole")).expect("a time")
    }

    #[test]
    fn a_request_lasts_half_an_hour_and_less_if_its_client_says_so() {
        let most = Duration::from_secs(1800);
        assert_eq!(patience_of(""), most);
        assert_eq!(patience_of("x-request-timeout-ms: 1800001\r\n"), most);
        assert_eq!(patience_of("x-request-timeout-ms: 500\r\n"), Duration::from_millis(500));
    }
}
