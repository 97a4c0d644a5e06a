//! The paths of the router and their handlers.
//!
//! Thread: `ctl`. The router answers at once if it needs no worker. Other requests go to workers.

use crate::api::info::{
    ASKED_BY_ROUTER, AbortRequest, DRAINING, Draining, Loads, RouterLoad, VersionInfo,
};
use crate::api::routed_body::RoutedBody;
use crate::api::{ApiError, ErrorCode};
use crate::http::response::{JSON, Response};
use crate::http::{self, Method, REQUEST_TIMEOUT};
use crate::net::ConnId;
use crate::net::Entropy;
use crate::obs::registry::Registry;
use crate::router::fanout::Fanout;
use crate::router::identity::{self, RouterInfo};
use crate::router::metrics::RoutedMetrics;
use crate::router::pool::WorkerPool;
use crate::router::requests::{self, Payload, ProxiedRequests, RouterContext, unavailable};
use crate::router::role_admin::RoleAdmin;
use crate::router::workers::WorkerAdmin;
use crate::routing::load::WorkerNumber;
use crate::server::authorization::{
    AccessKeys, authorise, is_administrative, refuse_browser_request, refuse_compressed_body,
};
use crate::upstream::request::UpstreamHead;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Header fields that workers get unchanged.
const PASSED: [&str; 3] = ["authorization", "traceparent", REQUEST_TIMEOUT];

/// The handler of a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Route {
    /// A pair.
    Pair,
    /// A pair, with the router's own test request.
    Trial,
    /// A decode worker.
    Decode,
    /// Any worker.
    Any,
    /// Every worker.
    Every,
    /// The router's own requests, and every worker, because workers can have other clients.
    Abort,
    /// The router, while it runs.
    Alive,
    /// The router, if it can serve a request.
    Health,
    /// The router, if it can serve a request and does not drain.
    Readiness,
    Metrics,
    Loads,
    Version,
    /// The router, for another router that has it configured as a worker.
    Identity,
    /// The router, which refuses new requests from then on.
    Drain,
    /// The list of workers, for operators.
    Workers,
    /// The list of workers, for workers. They have no API key.
    Registry,
    /// Query of a worker's role.
    Role,
    /// Change of a worker's role.
    Turn,
}

/// A path that ends in a slash is a prefix; `*` is one name.
const PATHS: &[(&str, Method, Route)] = &[
    ("/v1/chat/completions", Method::Post, Route::Pair),
    ("/v1/completions", Method::Post, Route::Pair),
    ("/v1/responses", Method::Post, Route::Pair),
    ("/v1/messages", Method::Post, Route::Pair),
    ("/v1/messages/count_tokens", Method::Post, Route::Decode),
    ("/generate", Method::Post, Route::Pair),
    ("/health_generate", Method::Get, Route::Trial),
    ("/tokenize", Method::Post, Route::Decode),
    ("/detokenize", Method::Post, Route::Decode),
    ("/tokenizer_info", Method::Get, Route::Any),
    ("/v1/models", Method::Get, Route::Any),
    ("/v1/models/", Method::Get, Route::Any),
    ("/server_info", Method::Get, Route::Any),
    ("/get_server_info", Method::Get, Route::Any),
    ("/model_info", Method::Get, Route::Any),
    ("/get_model_info", Method::Get, Route::Any),
    ("/abort_request", Method::Post, Route::Abort),
    ("/flush_cache", Method::Post, Route::Every),
    ("/health", Method::Get, Route::Health),
    ("/ping", Method::Get, Route::Alive),
    ("/liveness", Method::Get, Route::Alive),
    ("/readiness", Method::Get, Route::Readiness),
    ("/metrics", Method::Get, Route::Metrics),
    ("/v1/loads", Method::Get, Route::Loads),
    ("/version", Method::Get, Route::Version),
    ("/drain", Method::Post, Route::Drain),
    ("/workers", Method::Get, Route::Workers),
    ("/workers", Method::Post, Route::Workers),
    ("/workers/*", Method::Get, Route::Workers),
    ("/workers/*", Method::Delete, Route::Workers),
    ("/workers/*/role", Method::Get, Route::Role),
    ("/workers/*/role", Method::Post, Route::Turn),
    ("/challenge", Method::Post, Route::Registry),
    ("/registry", Method::Put, Route::Registry),
    ("/registry", Method::Delete, Route::Registry),
];

/// The table of paths, and the data of the paths that need no worker.
#[derive(Debug)]
pub struct RouterRoutes {
    keys: AccessKeys,
    registry: Registry,
    /// Metrics of the present workers.
    metrics: BTreeMap<WorkerNumber, RoutedMetrics>,
    workers: WorkerAdmin,
    /// Time limit of requests, if it is shorter than the workers' limit.
    timeout: Option<Duration>,
    draining: bool,
    /// Makes request IDs differ from those of other routers and from those before a restart. An
    /// abort by ID must not end the request of another client.
    mark: u64,
    next_id: u64,
    /// Secret in the names of prompt blocks.
    secret: u64,
}

impl RouterRoutes {
    /// Some paths need one of `keys`; `workers` protects changes of the workers.
    pub fn new(
        keys: AccessKeys,
        registry: Registry,
        workers: WorkerAdmin,
        entropy: &mut Entropy,
    ) -> RouterRoutes {
        RouterRoutes {
            keys,
            registry,
            metrics: BTreeMap::new(),
            workers,
            timeout: None,
            draining: false,
            mark: entropy.next_u64(),
            next_id: 0,
            secret: entropy.next_u64(),
        }
    }

    /// Sets the time limit of generation requests.
    pub fn with_timeout(self, timeout: Option<Duration>) -> RouterRoutes {
        RouterRoutes { timeout, ..self }
    }

    /// The keys that clients need.
    pub fn keys(&mut self) -> &mut AccessKeys {
        &mut self.keys
    }

    /// The administration of workers.
    pub fn workers(&mut self) -> &mut WorkerAdmin {
        &mut self.workers
    }

    /// From now on, refuses new requests.
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// Whether the router drains.
    pub fn is_draining(&self) -> bool {
        self.draining
    }

    /// Answers a request, or starts to serve it.
    pub fn serve(
        &mut self,
        client: ConnId,
        request: http::Request,
        requests: &mut ProxiedRequests,
        (fanout, turns): (&mut Fanout, &mut RoleAdmin),
        cx: &mut RouterContext<'_>,
    ) {
        let id = cx.connections.assign_request_id(client, || self.make_id());
        let (course, key) = match course(&request).and_then(|course| self.admit(course, &request)) {
            Ok(admitted) => admitted,
            Err(error) => return cx.refuse(client, &error),
        };
        let request = match cx.connections.translate(client, &request) {
            Ok(Some(translated)) => translated,
            Ok(None) => request,
            Err(error) => return cx.refuse(client, &error),
        };
        self.draining |= course == Route::Drain;
        if matches!(course, Route::Every | Route::Abort) {
            return match told_to_all(course, &request, requests, cx) {
                Ok(aborted) => {
                    fanout.begin(client, &order(&request, &id, cx), request.body, aborted, cx)
                }
                Err(error) => cx.refuse(client, &error),
            };
        }
        let Some(payload) = self.read_payload(course, &request, cx) else {
            return self.serve_alone(course, client, &request, (requests, turns), cx);
        };
        let mut order = order(&request, &id, cx);
        if course == Route::Trial {
            order.method = Method::Post;
            order.target = "/generate".into();
        }
        if let (Some(timeout), Route::Pair | Route::Trial) = (self.timeout, course) {
            order.cap_patience(timeout);
        }
        let charged = payload.and_then(|payload| {
            if let (Route::Pair, Some(key), Payload::Routed(body)) = (course, key, &payload) {
                let refusals = &requests.metrics().key_refusals;
                let charge = (key, body.tokens_max());
                cx.connections.charge(client, charge, refusals, cx.now)?;
            }
            Ok(payload)
        });
        match charged {
            Ok(payload) => {
                let request = requests::ClientRequest { head: order, payload, id };
                requests.start_request(client, request, cx);
            }
            Err(error) => cx.refuse(client, &error),
        }
    }

    /// What a worker gets of the request. `None`: no worker gets it.
    fn read_payload(
        &self,
        course: Route,
        request: &http::Request,
        cx: &mut RouterContext<'_>,
    ) -> Option<Result<Payload, ApiError>> {
        let body = &request.body;
        Some(match course {
            Route::Pair if cx.pool.balancer().reads_prompts() => {
                RoutedBody::parse_with_blocks(body, self.secret).map(Payload::Routed)
            }
            Route::Pair => RoutedBody::parse(body).map(Payload::Routed),
            Route::Trial => RoutedBody::parse(TRIAL).map(Payload::Routed),
            Route::Decode => Ok(Payload::Decode(body.clone())),
            Route::Any => Ok(Payload::Any),
            _ => return None,
        })
    }

    /// Answers a request that no worker gets as it is.
    fn serve_alone(
        &mut self,
        course: Route,
        client: ConnId,
        request: &http::Request,
        (requests, turns): (&ProxiedRequests, &mut RoleAdmin),
        cx: &mut RouterContext<'_>,
    ) {
        let refused = match course {
            Route::Role => self
                .workers
                .find(role_of(request), cx)
                .map(|worker| turns.query_role(client, worker, cx)),
            Route::Turn => self
                .workers
                .check_role_change(request, role_of(request), cx)
                .map(|(worker, wanted)| turns.begin(client, worker, wanted, cx)),
            Route::Workers | Route::Registry => self
                .workers
                .serve(request, cx)
                .map(|(status, body)| cx.send_json(client, status, &body)),
            _ => {
                let reply = self.answer_locally(course, requests, cx);
                return cx.connections.send_response(cx.reactor, client, &reply.answer(), cx.now);
            }
        };
        if let Err(error) = refused {
            cx.refuse(client, &error);
        }
    }

    /// Checks whether a request is allowed. Returns the index of its API key, too.
    fn admit(
        &self,
        course: Route,
        request: &http::Request,
    ) -> Result<(Route, Option<usize>), ApiError> {
        let is_open = matches!(
            course,
            Route::Alive | Route::Health | Route::Readiness | Route::Identity | Route::Registry
        );
        let key = if is_open { None } else { authorise(&self.keys, request)? };
        refuse_compressed_body(request)?;
        if course == Route::Registry {
            refuse_browser_request(request)?;
        }
        if self.draining && matches!(course, Route::Pair | Route::Trial | Route::Readiness) {
            return Err(ApiError::draining("the router is draining"));
        }
        Ok((course, key))
    }

    /// Answers a request that needs no worker.
    fn answer_locally(
        &mut self,
        course: Route,
        requests: &ProxiedRequests,
        cx: &mut RouterContext<'_>,
    ) -> LocalReply {
        match course {
            Route::Health | Route::Readiness if !cx.pool.balancer().is_ready() => {
                LocalReply::error(&unavailable(
                    "no worker that can serve a request is reachable".into(),
                ))
            }
            Route::Metrics => self.metrics(cx.pool),
            Route::Loads => {
                let load = RouterLoad::new(
                    requests.count(),
                    requests.waiting(),
                    cx.pool.decode_capacity(),
                    cx.pool.used(),
                );
                let now = cx.reactor.since_epoch().as_secs_f64();
                LocalReply::json(&Loads::new(load, now, VERSION))
            }
            Route::Version => LocalReply::json(&VersionInfo { version: VERSION }),
            Route::Identity => LocalReply::json(&RouterInfo::default()),
            Route::Drain => LocalReply::json(&Draining::with(requests.count())),
            Route::Health | Route::Alive if self.draining => {
                LocalReply::well("text/plain", DRAINING.as_bytes().to_vec())
            }
            _ => LocalReply::well("text/plain", b"OK".to_vec()),
        }
    }

    /// Answers a request on the port that serves only metrics.
    pub fn scrape(&mut self, request: &http::Request, pool: &mut WorkerPool) -> LocalReply {
        match (request.head.method, request.head.path()) {
            (Method::Get, "/metrics") => self.metrics(pool),
            (_, "/metrics") => LocalReply::error(&ApiError::new(
                405,
                ErrorCode::MethodNotAllowed,
                "this path takes another method",
            )),
            (_, path) => {
                let why = format!("there is nothing at {path}; this port serves only /metrics");
                LocalReply::error(&ApiError::new(404, ErrorCode::NotFound, why))
            }
        }
    }

    fn metrics(&mut self, pool: &mut WorkerPool) -> LocalReply {
        self.follow(pool);
        let mut body = String::new();
        self.registry.expose(&mut body);
        LocalReply::well("text/plain; version=0.0.4", body.into_bytes())
    }

    /// Adds and removes metrics when workers come and leave.
    fn follow(&mut self, pool: &mut WorkerPool) {
        let router = pool.balancer();
        let gone: Vec<WorkerNumber> =
            self.metrics.keys().copied().filter(|&worker| !router.has(worker)).collect();
        // Removal comes first, because a new worker can have the URL of a worker that is gone.
        for metrics in gone.iter().filter_map(|worker| self.metrics.remove(worker)) {
            metrics.unlist(&mut self.registry);
        }
        let here: Vec<_> = router.workers().collect();
        for (worker, leg, load) in here {
            let metrics = self.metrics.entry(worker).or_insert_with(|| {
                RoutedMetrics::register(&mut self.registry, leg, &pool.url(worker))
            });
            metrics.set(load.usable, load.reserved as usize);
        }
    }

    fn make_id(&mut self) -> String {
        self.next_id += 1;
        format!("{:x}-{:x}", self.mark, self.next_id)
    }
}

/// A minimal request that shows that a pair works.
const TRIAL: &[u8] = br#"{"input_ids":[0],"sampling_params":{"max_new_tokens":1,"temperature":0}}"#;

/// An answer of the router itself.
#[derive(Debug)]
pub struct LocalReply {
    status: u16,
    media: &'static str,
    body: Vec<u8>,
    retry_after: Option<u32>,
}

impl LocalReply {
    fn well(media: &'static str, body: Vec<u8>) -> LocalReply {
        LocalReply { status: 200, media, body, retry_after: None }
    }

    fn error(error: &ApiError) -> LocalReply {
        LocalReply {
            status: error.status,
            media: JSON,
            body: error.to_json(),
            retry_after: error.retry_after,
        }
    }

    fn json(body: &impl Serialize) -> LocalReply {
        LocalReply::well(JSON, serde_json::to_vec(body).expect("plain structs are JSON"))
    }

    /// The response for a client.
    pub fn answer(&self) -> Response<'_> {
        Response {
            status: self.status,
            media: self.media,
            body: &self.body,
            retry_after: self.retry_after,
        }
    }
}

/// The worker ID in a path of a role.
fn role_of(request: &http::Request) -> &str {
    name_between(request.head.path(), "/workers/", "/role").unwrap_or_default()
}

/// The single name in a path between `before` and `behind`.
fn name_between<'a>(path: &'a str, before: &str, behind: &str) -> Option<&'a str> {
    let name = path.strip_prefix(before)?.strip_suffix(behind)?;
    Some(name).filter(|name| !name.is_empty() && !name.contains('/'))
}

fn course(request: &http::Request) -> Result<Route, ApiError> {
    let path = request.head.path();
    let is_get = request.head.method == Method::Get;
    if is_get && path == identity::PATH && request.head.headers.get(ASKED_BY_ROUTER).is_some() {
        return Ok(Route::Identity);
    }
    let is_meant = |known: &str| match known.split_once('*') {
        Some((before, behind)) => name_between(path, before, behind).is_some(),
        None => known == path || (known.ends_with('/') && path.starts_with(known)),
    };
    let known = || PATHS.iter().filter(|(known, ..)| is_meant(known));
    let methods = |&(_, method, course): &(&str, Method, Route)| {
        let is_health = matches!(course, Route::Alive | Route::Health | Route::Readiness);
        [Some(method), is_health.then_some(Method::Head)].into_iter().flatten()
    };
    if let Some((.., course)) =
        known().find(|it| methods(it).any(|method| method == request.head.method))
    {
        return Ok(*course);
    }
    let allow: Vec<&str> = known().flat_map(methods).map(Method::as_str).collect();
    Err(match allow.is_empty() {
        true => ApiError::nothing_at(path, |path| PATHS.iter().any(|(known, ..)| *known == path)),
        false => ApiError::method_not_allowed(&allow.join(", ")),
    })
}

/// Performs the router's part of a request to all workers. For an abort, returns the number of
/// requests that the router ended.
fn told_to_all(
    course: Route,
    request: &http::Request,
    requests: &mut ProxiedRequests,
    cx: &mut RouterContext<'_>,
) -> Result<Option<usize>, ApiError> {
    if course != Route::Abort {
        cx.pool.balancer().forget_prompts();
        return Ok(None);
    }
    Ok(Some(match AbortRequest::parse(&request.body)? {
        AbortRequest::All => requests.abort(None, cx),
        AbortRequest::Rid(rid) => requests.abort(Some(&rid), cx),
        // Kept KV belongs to no client's request.
        AbortRequest::Kept(_) => 0,
    }))
}

/// Method, target and header fields of the request for workers. If the request is administrative
/// and the router has an admin key, workers get this key in place of the client's.
fn order(request: &http::Request, id: &str, cx: &RouterContext<'_>) -> UpstreamHead {
    let head = &request.head;
    let mut headers = vec![("x-request-id", id.to_owned())];
    for name in PASSED {
        headers.extend(head.headers.get(name).map(|value| (name, value.to_owned())));
    }
    if is_administrative(request)
        && let Some(bearer) = cx.pool.admin_bearer()
    {
        headers.retain(|(name, _)| *name != bearer.0);
        headers.push(bearer);
    }
    if head.path().starts_with("/v1/models") {
        headers.push((ASKED_BY_ROUTER, "client".to_owned()));
    }
    let media = head.headers.get("content-type").unwrap_or(JSON);
    headers.push(("content-type", media.to_owned()));
    let target = match head.query() {
        "" => head.path().to_owned(),
        query => format!("{}?{query}", head.path()),
    };
    UpstreamHead { method: head.method, target, headers }
}
