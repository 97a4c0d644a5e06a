//! Which path does what, and the endpoints that need no engine.
//!
//! Thread: `ctl`. Answers at once; requests for text, and what takes the tokeniser, go on to `generations`.

mod roles;
mod telling;

use crate::config::secret::Secret;
use crate::front::asking::Ask;
use crate::front::connections::{Answer, JSON};
use crate::front::generations::{Generations, Way};
use crate::front::http::{Method, REQUEST_TIMEOUT, Request};
use crate::front::openai::info::{Abort, DRAINING, Draining, HandoffInfo};
use crate::front::openai::routed::Routed;
use crate::front::openai::tokenize::{DetokenizeRequest, TokenizeRequest};
use crate::front::openai::{
    ApiError, GenerateRequest, Keep, PrefillAddress, Sampling, chat, completion, generate,
};
use crate::front::router::call::Order;
use crate::front::telemetry::Telemetry;
use crate::front::text::Task;
use crate::front::turning::{TAKEN_FOR, Turning};
use crate::limits::REQUEST_TIME_MAX;
use crate::net::ConnId;
use crate::obs::log::event;
use crate::obs::metrics::EngineType;
use crate::wire::auth::Keyring;
use crate::wire::message::Role;
use serde::Serialize;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a server tells about itself.
#[derive(Clone, Debug)]
pub struct About {
    /// File or directory.
    pub model_path: String,
    /// `model_type` as in `config.json`.
    pub model_type: &'static str,
    /// `architectures` as in `config.json`.
    pub architectures: Vec<String>,
    /// `null`, `prefill` or `decode`.
    pub mode: &'static str,
    /// Port of the registry, where there is one.
    pub bootstrap_port: Option<u16>,
    /// What peers must have in common with this worker, where there are some.
    pub handoff: Option<HandoffInfo>,
    /// Tokens of the KV pool.
    pub pool_tokens: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// Of the decode batch.
    pub max_running: usize,
    /// Sampling where a request says nothing.
    pub sampling: Sampling,
    /// Seconds of Unix time.
    pub started: u64,
}

/// The role of a process as SGLang's interface names it.
#[derive(Clone, Debug)]
pub struct Mode {
    /// `null`, `prefill` or `decode`.
    pub name: &'static str,
    /// Port of the registry, where there is one.
    pub bootstrap_port: Option<u16>,
    /// What peers must have in common with this worker, where there are some.
    pub handoff: Option<HandoffInfo>,
}

impl About {
    /// The mode of a role.
    pub fn mode_of(role: EngineType) -> Mode {
        let name = match role {
            EngineType::Unified => "null",
            EngineType::Prefill => "prefill",
            EngineType::Decode => "decode",
        };
        Mode { name, bootstrap_port: None, handoff: None }
    }
}

/// The table of paths.
#[derive(Debug)]
pub struct Routes {
    about: About,
    keys: Vec<Secret>,
    telemetry: Telemetry,
    /// Of a worker whose role can change.
    turning: Option<Turning>,
    draining: bool,
    hanging: bool,
    /// Names for requests that come without.
    next_id: u64,
    /// Unknown fields are logged once each, up to a bound.
    unknown: Vec<String>,
}

/// Unknown fields remembered, so that each is logged once.
const UNKNOWN_FIELDS_MAX: usize = 256;

impl Routes {
    /// Everything is open but what `keys` guard.
    pub fn new(about: About, keys: Vec<Secret>, telemetry: Telemetry) -> Routes {
        Routes {
            about,
            keys,
            telemetry,
            turning: None,
            draining: false,
            hanging: false,
            next_id: 0,
            unknown: Vec::new(),
        }
    }

    /// Tells of these workers, in this role, from now on.
    pub fn tell_of(&mut self, mode: Mode, telemetry: Telemetry) {
        let Mode { name, bootstrap_port, handoff } = mode;
        (self.about.mode, self.about.bootstrap_port, self.about.handoff) =
            (name, bootstrap_port, handoff);
        self.telemetry = telemetry;
    }

    /// Clients must show one of these from now on.
    pub fn set_keys(&mut self, keys: Vec<Secret>) {
        self.keys = keys;
    }

    /// Routers are told that peers prove these from now on.
    pub fn set_cluster_keys(&mut self, keys: &Keyring) {
        if let Some(handoff) = &mut self.about.handoff {
            handoff.cluster_keys = keys.names();
        }
    }

    /// No new requests for text.
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// Whether it was told so.
    pub fn is_draining(&self) -> bool {
        self.draining
    }

    /// Says in the log what figures show.
    pub fn look(&mut self, now: Instant) {
        self.telemetry.tell(now);
    }

    /// Whether the engine hangs.
    pub fn set_hanging(&mut self, hanging: bool) {
        match (std::mem::replace(&mut self.hanging, hanging), hanging) {
            (false, true) => event!(Error, "ctl", "the engine hangs"),
            (true, false) => event!(Info, "ctl", "the engine moves again"),
            _ => {}
        }
    }

    /// Answers a request, or begins to.
    pub fn serve(
        &mut self,
        conn: ConnId,
        request: &Request,
        generations: &mut Generations,
        way: &mut Way<'_>,
    ) {
        let id = way.connections.name(conn, || self.make_id());
        match self.route(conn, request, &id, generations, way) {
            Ok(()) => {}
            Err(error) => way.refuse(conn, &error),
        }
    }

    fn route(
        &mut self,
        conn: ConnId,
        request: &Request,
        id: &str,
        generations: &mut Generations,
        way: &mut Way<'_>,
    ) -> Result<(), ApiError> {
        use Method::{Get, Head, Post};
        let path = request.head.path();
        let method = request.head.method;
        let open = matches!(path, "/health" | "/readiness" | "/liveness" | "/ping");
        if !open {
            authorise(&self.keys, request)?;
        }
        if open || matches!(path, "/v1/completions" | "/v1/chat/completions" | "/generate") {
            self.check_role(request)?;
        }
        match (method, path) {
            (Post, "/v1/completions") => {
                let parsed = completion::parse(&request.body, &self.about.sampling)?;
                self.generate(conn, request, parsed, id, generations, way)
            }
            (Post, "/v1/chat/completions") => {
                let parsed = chat::parse(&request.body, &self.about.sampling)?;
                self.generate(conn, request, parsed, id, generations, way)
            }
            (Post, "/generate") => {
                let parsed = generate::parse(&request.body, &self.about.sampling)?;
                self.generate(conn, request, parsed, id, generations, way)
            }
            (Get, "/health_generate") => self.try_out(conn, id, generations, way),
            (Get | Head, "/health" | "/ping" | "/liveness") => {
                self.alive()?;
                let body = if self.takes_nothing() { DRAINING.as_bytes() } else { b"OK" };
                way.answer(
                    conn,
                    &Answer { status: 200, media: "text/plain", body, retry_after: None },
                );
                Ok(())
            }
            (Get | Head, "/readiness") => {
                self.admitting()?;
                way.answer(
                    conn,
                    &Answer { status: 200, media: "text/plain", body: b"OK", retry_after: None },
                );
                Ok(())
            }
            (Get, "/metrics") => {
                let body = self.telemetry.exposition();
                let media = "text/plain; version=0.0.4";
                way.answer(
                    conn,
                    &Answer { status: 200, media, body: body.as_bytes(), retry_after: None },
                );
                Ok(())
            }
            (Get, _) if path.starts_with(ONE_MODEL) => {
                let path = request.head.unescaped_path();
                let name = path.get(ONE_MODEL.len()..).unwrap_or_default();
                generations.check_model(Some(name))?;
                json(conn, &self.card(name, generations), way)
            }
            (Get, "/role") => json(conn, &self.role(generations.running()), way),
            (Get, _) => self.tell(conn, path, generations, way),
            (Post, "/tokenize") => self.tokenize(conn, request, generations),
            (Post, "/detokenize") => self.detokenize(conn, request, generations),
            (Post, "/abort_request") => abort(conn, request, generations, way),
            (Post, "/flush_cache") => generations.flush(conn, way.now),
            (Post, "/drain") => {
                no_page(request)?;
                self.drain();
                json(conn, &Draining::with(generations.running()), way)
            }
            (Post, "/role") => {
                let (status, told) = self.change_role(request, generations.running(), way.now)?;
                json_with(status, conn, &told, way)
            }
            _ => Err(nothing_at(path)),
        }
    }

    /// Has tokens come for nobody.
    fn try_out(
        &self,
        conn: ConnId,
        id: &str,
        generations: &mut Generations,
        way: &mut Way<'_>,
    ) -> Result<(), ApiError> {
        // Two: in a hand-off the first one is prefill's, the second decode's.
        const BODY: &[u8] =
            br#"{"input_ids":[0],"sampling_params":{"max_new_tokens":2,"temperature":0,"ignore_eos":true}}"#;
        let parsed = generate::parse(BODY, &self.about.sampling)?;
        self.admitting()?;
        generations.begin_trial(conn, parsed, id.to_owned(), way);
        Ok(())
    }

    fn generate(
        &mut self,
        conn: ConnId,
        request: &Request,
        mut asked: GenerateRequest,
        id: &str,
        generations: &mut Generations,
        way: &mut Way<'_>,
    ) -> Result<(), ApiError> {
        self.admitting()?;
        asked.patience = patience(request)?;
        for field in &asked.unknown {
            if self.unknown.len() < UNKNOWN_FIELDS_MAX && !self.unknown.contains(field) {
                event!(Warn, "http", "unknown request field ignored", field = field);
                self.unknown.push(field.clone());
            }
        }
        match asked.prefill.take() {
            None => generations.begin(conn, asked, id.to_owned(), way),
            Some(address) => {
                let ask = ask(request, &asked, address, id)?;
                generations.begin_asking(conn, asked, ask, id.to_owned(), way);
            }
        }
        Ok(())
    }

    fn tokenize(
        &self,
        conn: ConnId,
        request: &Request,
        generations: &mut Generations,
    ) -> Result<(), ApiError> {
        let asked = TokenizeRequest::parse(&request.body)?;
        generations.check_model(asked.model.as_deref())?;
        generations.convert(conn, Task::Tokenize(asked))
    }

    fn detokenize(
        &self,
        conn: ConnId,
        request: &Request,
        generations: &mut Generations,
    ) -> Result<(), ApiError> {
        let asked = DetokenizeRequest::parse(&request.body)?;
        generations.check_model(asked.model.as_deref())?;
        generations.convert(conn, Task::Detokenize(asked))
    }

    fn alive(&self) -> Result<(), ApiError> {
        if self.hanging {
            Err(ApiError::new(503, "hanging", "the engine makes no progress"))
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

/// What prefill is asked of a request whose router leaves that to this worker: the same, but to keep its KV.
fn ask(
    request: &Request,
    asked: &GenerateRequest,
    address: PrefillAddress,
    id: &str,
) -> Result<Ask, ApiError> {
    let head = &request.head;
    let resume = asked.resume.as_ref().filter(|resume| resume.has_begun());
    let keep = Keep { claimed: true, ..address.keep() };
    let body = Routed::parse(&request.body)?.keep(&keep, resume, true);
    let patience = asked.patience.as_millis().to_string();
    let mut headers = vec![("x-request-id", id.to_owned()), (REQUEST_TIMEOUT, patience)];
    for name in ["authorization", "traceparent"] {
        headers.extend(head.headers.get(name).map(|value| (name, value.to_owned())));
    }
    headers.push(("content-type", JSON.to_owned()));
    // One that has another role since it was chosen says so, where it would refuse to keep anything as a client's mistake.
    headers.push((TAKEN_FOR, Role::Prefill.to_string()));
    let order = Order { method: Method::Post, target: head.path().to_owned(), headers };
    // Whose it is, and until when, is known once it has a place.
    Ok(Ask { exchange: 0, address, order, body: Arc::new(body), until: Instant::now() })
}

/// Ends what the body names.
fn abort(
    conn: ConnId,
    request: &Request,
    generations: &mut Generations,
    way: &mut Way<'_>,
) -> Result<(), ApiError> {
    let aborted = match Abort::parse(&request.body)? {
        Abort::All => generations.abort(None, way),
        Abort::Rid(rid) => generations.abort(Some(&rid), way),
        Abort::Kept(room) => generations.abort_kept(room, way),
    };
    event!(Info, "http", "aborted by request", count = aborted);
    json(conn, &serde_json::json!({ "aborted": aborted }), way)
}

/// Whether a request shows one of `keys`, if there are any. Compares in time that does not depend on where a
/// key differs.
pub fn authorise(keys: &[Secret], request: &Request) -> Result<(), ApiError> {
    if keys.is_empty() {
        return Ok(());
    }
    let shown =
        request.head.headers.get("authorization").and_then(|value| value.strip_prefix("Bearer "));
    // All are compared, so that nothing tells which it was.
    let is_one =
        |shown: &str| keys.iter().fold(false, |is, key| is | key.matches(shown.trim().as_bytes()));
    if shown.is_some_and(is_one) {
        Ok(())
    } else {
        Err(ApiError::new(
            401,
            "invalid_api_key",
            "this server asks for an API key as a bearer token",
        ))
    }
}

/// Refuses what a browser sends for a page: a page of anybody's can have it send a POST to whatever its host reaches, and
/// none has any business with what changes a process.
pub fn no_page(request: &Request) -> Result<(), ApiError> {
    match request.head.headers.get("origin") {
        None => Ok(()),
        Some(_) => Err(ApiError::new(
            403,
            "not_trusted",
            "this is not taken from a page, which sends an Origin",
        )),
    }
}

/// A model's name follows.
const ONE_MODEL: &str = "/v1/models/";

/// How long the client says that it waits, at most [`REQUEST_TIME_MAX`].
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

/// What stands at a path that was asked with a method that it does not take.
fn nothing_at(path: &str) -> ApiError {
    let allow = match path {
        "/v1/completions"
        | "/v1/chat/completions"
        | "/generate"
        | "/tokenize"
        | "/detokenize"
        | "/abort_request"
        | "/flush_cache"
        | "/drain" => "POST",
        "/role" => "GET, POST",
        "/health" | "/ping" | "/liveness" | "/readiness" => "GET, HEAD",
        "/health_generate" | "/metrics" | "/v1/models" | "/server_info" | "/get_server_info"
        | "/model_info" | "/get_model_info" | "/v1/loads" | "/get_load" | "/version" => "GET",
        _ if path.starts_with(ONE_MODEL) => "GET",
        _ => return ApiError::new(404, "not_found", format!("there is nothing at {path}")),
    };
    ApiError::method_not_allowed(allow)
}

fn json(conn: ConnId, body: &impl Serialize, way: &mut Way<'_>) -> Result<(), ApiError> {
    json_with(200, conn, body, way)
}

fn json_with(
    status: u16,
    conn: ConnId,
    body: &impl Serialize,
    way: &mut Way<'_>,
) -> Result<(), ApiError> {
    let body = serde_json::to_vec(body)
        .map_err(|error| ApiError::new(500, "internal", error.to_string()))?;
    way.answer(conn, &Answer { status, media: JSON, body: &body, retry_after: None });
    Ok(())
}
