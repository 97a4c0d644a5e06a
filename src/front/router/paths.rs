//! Which path is served how.
//!
//! Thread: `ctl`. What the router knows itself is answered at once; the rest goes to workers.

use crate::cluster::loads::WorkerNumber;
use crate::cluster::router::Role;
use crate::config::secret::Secret;
use crate::front::connections::{Answer, JSON};
use crate::front::handoff::random;
use crate::front::http::{self, Method, REQUEST_TIMEOUT};
use crate::front::openai::ApiError;
use crate::front::openai::info::{Abort, DRAINING, Draining, Loads, RoutedLoad, Version};
use crate::front::openai::routed::Routed;
use crate::front::router::call::Order;
use crate::front::router::fanout::Fanout;
use crate::front::router::fleet::Fleet;
use crate::front::router::flights::{self, Flights, Way, unavailable};
use crate::front::router::introduction::{self, RouterInfo};
use crate::front::router::turns::Turns;
use crate::front::router::workers::Workers;
use crate::front::routes::{authorise, no_page};
use crate::net::ConnId;
use crate::obs::metrics::{EngineType, RoutedMetrics};
use crate::obs::registry::Registry;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Header fields that workers get as the client sent them.
const PASSED: [&str; 3] = ["authorization", "traceparent", REQUEST_TIMEOUT];

/// What serves a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Course {
    /// A pair.
    Pair,
    /// A pair, with a request of our own.
    Trial,
    /// A decode worker.
    Decode,
    /// Any worker.
    Any,
    /// Every worker.
    Every,
    /// Requests of the router's own clients, and every worker, which may have others'.
    Abort,
    /// The router, while it runs.
    Alive,
    /// The router, once it has a pair.
    Health,
    /// Likewise, unless it drains.
    Readiness,
    Metrics,
    Loads,
    Version,
    /// The router, which another one takes for a worker.
    Introduction,
    /// The router, which takes nothing new from now on.
    Drain,
    /// Which workers there are, for operators.
    Workers,
    /// The same, for workers, which have no client's key.
    Registry,
    /// What one worker says of its role,
    Role,
    /// which is to be another one.
    Turn,
}

/// A path that ends in a slash goes on as it likes; `*` stands for one name.
const PATHS: &[(&str, Method, Course)] = &[
    ("/v1/chat/completions", Method::Post, Course::Pair),
    ("/v1/completions", Method::Post, Course::Pair),
    ("/generate", Method::Post, Course::Pair),
    ("/health_generate", Method::Get, Course::Trial),
    ("/tokenize", Method::Post, Course::Decode),
    ("/detokenize", Method::Post, Course::Decode),
    ("/v1/models", Method::Get, Course::Any),
    ("/v1/models/", Method::Get, Course::Any),
    ("/server_info", Method::Get, Course::Any),
    ("/get_server_info", Method::Get, Course::Any),
    ("/model_info", Method::Get, Course::Any),
    ("/get_model_info", Method::Get, Course::Any),
    ("/abort_request", Method::Post, Course::Abort),
    ("/flush_cache", Method::Post, Course::Every),
    ("/health", Method::Get, Course::Health),
    ("/ping", Method::Get, Course::Alive),
    ("/liveness", Method::Get, Course::Alive),
    ("/readiness", Method::Get, Course::Readiness),
    ("/metrics", Method::Get, Course::Metrics),
    ("/v1/loads", Method::Get, Course::Loads),
    ("/version", Method::Get, Course::Version),
    ("/drain", Method::Post, Course::Drain),
    ("/workers", Method::Get, Course::Workers),
    ("/workers", Method::Post, Course::Workers),
    ("/workers/*", Method::Get, Course::Workers),
    ("/workers/*", Method::Delete, Course::Workers),
    ("/workers/*/role", Method::Get, Course::Role),
    ("/workers/*/role", Method::Post, Course::Turn),
    ("/challenge", Method::Post, Course::Registry),
    ("/registry", Method::Put, Course::Registry),
    ("/registry", Method::Delete, Course::Registry),
];

/// The table of paths and what stands behind those that need no worker.
#[derive(Debug)]
pub struct Paths {
    keys: Vec<Secret>,
    registry: Registry,
    /// Metrics of workers that are here.
    metrics: BTreeMap<WorkerNumber, RoutedMetrics>,
    workers: Workers,
    /// When requests are given up, where that is sooner than workers do it.
    timeout: Option<Duration>,
    draining: bool,
    /// Makes names of requests unlike those before a restart, and those of other routers: who aborts by name hits nobody
    /// else's.
    mark: u64,
    next_id: u64,
    /// Of names of blocks of prompts.
    secret: u64,
}

impl Paths {
    /// Everything is open but what `keys` guard, and what `workers` does.
    pub fn new(keys: Vec<Secret>, registry: Registry, workers: Workers) -> Paths {
        Paths {
            keys,
            registry,
            metrics: BTreeMap::new(),
            workers,
            timeout: None,
            draining: false,
            mark: u64::from_le_bytes(random()),
            next_id: 0,
            secret: u64::from_le_bytes(random()),
        }
    }

    /// Requests for text are given up after so long.
    pub fn with_timeout(self, timeout: Option<Duration>) -> Paths {
        Paths { timeout, ..self }
    }

    /// Clients must show one of these from now on.
    pub fn set_keys(&mut self, keys: Vec<Secret>) {
        self.keys = keys;
    }

    /// Who the workers are.
    pub fn workers(&mut self) -> &mut Workers {
        &mut self.workers
    }

    /// No new requests.
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// Whether it was told so.
    pub fn is_draining(&self) -> bool {
        self.draining
    }

    /// Answers a request, or begins to.
    pub fn serve(
        &mut self,
        client: ConnId,
        request: http::Request,
        flights: &mut Flights,
        (fanout, turns): (&mut Fanout, &mut Turns),
        way: &mut Way<'_>,
    ) {
        let id = way.connections.name(client, || self.make_id());
        let course = match course(&request).and_then(|course| self.admit(course, &request)) {
            Ok(course) => course,
            Err(error) => return way.refuse(client, &error),
        };
        self.draining |= course == Course::Drain;
        if matches!(course, Course::Every | Course::Abort) {
            return match told_to_all(course, &request, flights, way) {
                Ok(aborted) => {
                    fanout.begin(client, &order(&request, &id), request.body, aborted, way)
                }
                Err(error) => way.refuse(client, &error),
            };
        }
        let load = match course {
            Course::Pair if way.fleet.router().reads_prompts() => {
                Routed::parse_with_blocks(&request.body, self.secret).map(flights::Load::Routed)
            }
            Course::Pair => Routed::parse(&request.body).map(flights::Load::Routed),
            Course::Trial => Routed::parse(TRIAL).map(flights::Load::Routed),
            Course::Decode => Ok(flights::Load::Decode(request.body.clone())),
            Course::Any => Ok(flights::Load::Any),
            Course::Role => {
                return match self.workers.find(role_of(&request), way) {
                    Ok(worker) => turns.look_at(client, worker, way),
                    Err(error) => way.refuse(client, &error),
                };
            }
            Course::Turn => {
                return match self.workers.turn(&request, role_of(&request), way) {
                    Ok((worker, wanted)) => turns.begin(client, worker, wanted, way),
                    Err(error) => way.refuse(client, &error),
                };
            }
            Course::Workers | Course::Registry => {
                let (status, body) = match self.workers.serve(&request, way) {
                    Ok(told) => told,
                    Err(error) => return way.refuse(client, &error),
                };
                let answer = Answer { status, media: JSON, body: &body, retry_after: None };
                return way.connections.answer(way.reactor, client, &answer, way.now);
            }
            _ => {
                let told = self.tell(course, flights, way);
                return way.connections.answer(way.reactor, client, &told.answer(), way.now);
            }
        };
        let mut order = order(&request, &id);
        if course == Course::Trial {
            order.method = Method::Post;
            order.target = "/generate".into();
        }
        if let (Some(timeout), Course::Pair | Course::Trial) = (self.timeout, course) {
            order.limit(timeout);
        }
        match load {
            Ok(load) => flights.begin(client, flights::Request { order, load, id }, way),
            Err(error) => way.refuse(client, &error),
        }
    }

    fn admit(&self, course: Course, request: &http::Request) -> Result<Course, ApiError> {
        let is_open = matches!(
            course,
            Course::Alive
                | Course::Health
                | Course::Readiness
                | Course::Introduction
                | Course::Registry
        );
        if !is_open {
            authorise(&self.keys, request)?;
        }
        if matches!(course, Course::Drain | Course::Workers | Course::Registry | Course::Turn) {
            no_page(request)?;
        }
        if self.draining && matches!(course, Course::Pair | Course::Trial | Course::Readiness) {
            return Err(ApiError::draining("the router is draining"));
        }
        Ok(course)
    }

    /// What needs no worker.
    fn tell(&mut self, course: Course, flights: &Flights, way: &mut Way<'_>) -> Told {
        match course {
            Course::Health | Course::Readiness if !way.fleet.router().is_ready() => {
                Told::error(&unavailable("no pair of workers can be reached".into()))
            }
            Course::Metrics => self.metrics(way.fleet),
            Course::Loads => {
                let load = RoutedLoad::new(
                    flights.count(),
                    flights.waiting(),
                    way.fleet.room(),
                    way.fleet.used(),
                );
                let now = unix().map_or(0.0, |since| since.as_secs_f64());
                Told::json(&Loads::new(load, now, VERSION))
            }
            Course::Version => Told::json(&Version { version: VERSION }),
            Course::Introduction => Told::json(&RouterInfo::default()),
            Course::Drain => Told::json(&Draining::with(flights.count())),
            Course::Health | Course::Alive if self.draining => {
                Told::well("text/plain", DRAINING.as_bytes().to_vec())
            }
            _ => Told::well("text/plain", b"OK".to_vec()),
        }
    }

    /// Answers a request on the port that is for metrics alone.
    pub fn scrape(&mut self, request: &http::Request, fleet: &mut Fleet) -> Told {
        match (request.head.method, request.head.path()) {
            (Method::Get, "/metrics") => self.metrics(fleet),
            (_, "/metrics") => Told::error(&ApiError::new(
                405,
                "method_not_allowed",
                "this path knows another method",
            )),
            (_, path) => {
                let why = format!("there is nothing at {path}; this port serves /metrics alone");
                Told::error(&ApiError::new(404, "not_found", why))
            }
        }
    }

    fn metrics(&mut self, fleet: &mut Fleet) -> Told {
        self.follow(fleet);
        let mut body = String::new();
        self.registry.expose(&mut body);
        Told::well("text/plain; version=0.0.4", body.into_bytes())
    }

    /// Metrics of workers come and go with them.
    fn follow(&mut self, fleet: &mut Fleet) {
        let router = fleet.router();
        let gone: Vec<WorkerNumber> =
            self.metrics.keys().copied().filter(|&worker| !router.has(worker)).collect();
        // First, since one that is new may have the place of one that is gone.
        for metrics in gone.iter().filter_map(|worker| self.metrics.remove(worker)) {
            metrics.unlist(&mut self.registry);
        }
        let here: Vec<_> = router.workers().collect();
        for (worker, role, load) in here {
            let metrics = self.metrics.entry(worker).or_insert_with(|| {
                let role = match role {
                    Role::Prefill => EngineType::Prefill,
                    Role::Decode => EngineType::Decode,
                };
                RoutedMetrics::register(&mut self.registry, role, &fleet.url(worker))
            });
            metrics.set(load.usable, load.booked as usize);
        }
    }

    fn make_id(&mut self) -> String {
        self.next_id += 1;
        format!("{:x}-{:x}", self.mark, self.next_id)
    }
}

/// The least that shows that a pair works.
const TRIAL: &[u8] = br#"{"input_ids":[0],"sampling_params":{"max_new_tokens":1,"temperature":0}}"#;

/// An answer of the router's own.
#[derive(Debug)]
pub struct Told {
    status: u16,
    media: &'static str,
    body: Vec<u8>,
    retry_after: Option<u32>,
}

impl Told {
    fn well(media: &'static str, body: Vec<u8>) -> Told {
        Told { status: 200, media, body, retry_after: None }
    }

    fn error(error: &ApiError) -> Told {
        Told {
            status: error.status,
            media: JSON,
            body: error.to_json(),
            retry_after: error.retry_after,
        }
    }

    fn json(body: &impl Serialize) -> Told {
        Told::well(JSON, serde_json::to_vec(body).expect("plain structs are JSON"))
    }

    /// For a client.
    pub fn answer(&self) -> Answer<'_> {
        Answer {
            status: self.status,
            media: self.media,
            body: &self.body,
            retry_after: self.retry_after,
        }
    }
}

/// Which worker's role a path is about.
fn role_of(request: &http::Request) -> &str {
    name_between(request.head.path(), "/workers/", "/role").unwrap_or_default()
}

/// The one name in a path that begins and ends so.
fn name_between<'a>(path: &'a str, before: &str, behind: &str) -> Option<&'a str> {
    let name = path.strip_prefix(before)?.strip_suffix(behind)?;
    Some(name).filter(|name| !name.is_empty() && !name.contains('/'))
}

fn course(request: &http::Request) -> Result<Course, ApiError> {
    let path = request.head.path();
    let is_get = request.head.method == Method::Get;
    if is_get
        && path == introduction::PATH
        && request.head.headers.get(introduction::ASKED_BY_ROUTER).is_some()
    {
        return Ok(Course::Introduction);
    }
    let is_meant = |known: &str| match known.split_once('*') {
        Some((before, behind)) => name_between(path, before, behind).is_some(),
        None => known == path || (known.ends_with('/') && path.starts_with(known)),
    };
    let known = || PATHS.iter().filter(|(known, ..)| is_meant(known));
    let methods = |&(_, method, course): &(&str, Method, Course)| {
        let is_health = matches!(course, Course::Alive | Course::Health | Course::Readiness);
        [Some(method), is_health.then_some(Method::Head)].into_iter().flatten()
    };
    if let Some((.., course)) =
        known().find(|it| methods(it).any(|method| method == request.head.method))
    {
        return Ok(*course);
    }
    let allow: Vec<&str> = known().flat_map(methods).map(Method::as_str).collect();
    Err(match allow.is_empty() {
        true => ApiError::new(404, "not_found", format!("there is nothing at {path}")),
        false => ApiError::method_not_allowed(&allow.join(", ")),
    })
}

/// Does here what all workers are told to do, too; how many requests that has ended, where it ends some.
fn told_to_all(
    course: Course,
    request: &http::Request,
    flights: &mut Flights,
    way: &mut Way<'_>,
) -> Result<Option<usize>, ApiError> {
    if course != Course::Abort {
        way.fleet.router().forget_prompts();
        return Ok(None);
    }
    Ok(Some(match Abort::parse(&request.body)? {
        Abort::All => flights.abort(None, way),
        Abort::Rid(rid) => flights.abort(Some(&rid), way),
        // None of those is a client's.
        Abort::Kept(_) => 0,
    }))
}

/// The request as workers get it.
fn order(request: &http::Request, id: &str) -> Order {
    let head = &request.head;
    let mut headers = vec![("x-request-id", id.to_owned())];
    for name in PASSED {
        headers.extend(head.headers.get(name).map(|value| (name, value.to_owned())));
    }
    let media = head.headers.get("content-type").unwrap_or(JSON);
    headers.push(("content-type", media.to_owned()));
    let target = match head.query() {
        "" => head.path().to_owned(),
        query => format!("{}?{query}", head.path()),
    };
    Order { method: head.method, target, headers }
}

fn unix() -> Option<Duration> {
    SystemTime::now().duration_since(UNIX_EPOCH).ok()
}
