//! Which workers there are, over HTTP: `/workers` for operators, as in SGLang's router, and `/registry`, where workers
//! keep an entry of themselves. What the membership wants done is done here.
//!
//! ```text
//! POST   /challenge       {"nonce", "life_ms"}                  whoever asks
//! PUT    /registry        an entry (`cluster::entry`)           enters a worker, or renews its entry
//! DELETE /registry        the same entry                        takes it back
//! GET    /workers[/ID]    those that there are
//! POST   /workers         {"url", "worker_type", "bootstrap_port"}
//! DELETE /workers/ID
//! GET    /workers/ID/role                                  as `/role` of the worker, which is asked (`turns`)
//! POST   /workers/ID/role {"role", "timeout_secs"}              likewise
//! ```
//! Thread: `ctl`. Whoever enters a worker receives prompts: all changes need the cluster key's proof where there is a
//! key (`cluster::proof`), and are taken without only on loopback or with `--insecure`.

use crate::cluster::entry::{Entry, Seat};
use crate::cluster::etcd::view::{Change, View};
use crate::cluster::kinds::Difference;
use crate::cluster::loads::WorkerNumber;
use crate::cluster::membership::{Action, Full, Membership, Why};
use crate::cluster::proof::{Asked, NONCE, Nonces, PROOF, Unproven};
use crate::cluster::router::Role;
use crate::config::secret::Secret;
use crate::config::values::WorkerUrl;
use crate::front::http::{Method, Request};
use crate::front::openai::ApiError;
use crate::front::router::fleet::{Fleet, Turned};
use crate::front::router::flights::Way;
use crate::front::router::succession::Succession;
use crate::front::router::target::Target;
use crate::front::turning::{NOT_POSSIBLE, Wanted};
use crate::limits::{DRAIN_DONE_TIME, ETCD_ODD_MAX, REGISTRY_ENTRY_LIFE};
use crate::net::Reactor;
use crate::obs::log::event;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::time::Instant;

/// Whose word on workers is taken.
#[derive(Debug)]
pub struct Trust {
    /// One of them must be proven, where there are some.
    pub keys: Vec<Secret>,
    /// Whether anybody's is taken where there is none,
    pub anybody: bool,
    /// also of those who show no client's key: workers that enter themselves.
    pub strangers: bool,
}

/// All workers by seat, and who may change them.
#[derive(Debug)]
pub struct Workers {
    trust: Trust,
    nonces: Nonces,
    members: Membership,
    numbers: HashMap<Seat, WorkerNumber>,
    /// It was said that there is no room for what etcd has, since there was.
    is_full: bool,
    /// Of those that are reached over TLS, which this router does not speak, the ones of which that was said.
    unspoken: HashSet<Seat>,
    succession: Succession,
}

/// Why a worker at an https:// address is not taken.
const UNSPOKEN: &str = "workers are reached over TLS by a router with --tls-ca-file";

/// What `/workers` calls a worker that does both.
const MIXED: &str = "mixed";

/// Status and body.
type Told = (u16, Vec<u8>);

impl Workers {
    /// None yet; `secret` is random.
    pub fn new(trust: Trust, secret: [u8; 32], now: Instant) -> Workers {
        let nonces = Nonces::new(secret, now);
        Workers {
            trust,
            nonces,
            members: Membership::default(),
            numbers: HashMap::new(),
            is_full: false,
            unspoken: HashSet::new(),
            succession: Succession::default(),
        }
    }

    /// Changes must prove one of these from now on.
    pub fn set_keys(&mut self, keys: Vec<Secret>) {
        self.trust.keys = keys;
    }

    /// A worker that the command line names, at an address that its name was found to have.
    ///
    /// # Errors
    /// There are too many.
    pub fn name(
        &mut self,
        seat: Seat,
        bootstrap_port: Option<u16>,
        address: SocketAddr,
        fleet: &mut Fleet,
        reactor: &mut Reactor,
        now: Instant,
    ) -> Result<(), Full> {
        self.members.name(seat.clone(), bootstrap_port)?;
        self.act(fleet, reactor, now);
        if let Some(&worker) = self.numbers.get(&seat) {
            fleet.locate(worker, address);
        }
        Ok(())
    }

    /// Takes in which workers have another role by now.
    pub fn follow_roles(&mut self, fleet: &mut Fleet, reactor: &mut Reactor, now: Instant) {
        while let Some(Turned { worker, role, is_news }) = fleet.turned() {
            let Some(seat) = self.seat(worker).cloned() else { continue };
            // It tells so with each look at it, and there may be room by then.
            if let Err(full) = self.members.turn(&seat, role)
                && is_news
            {
                event!(
                    Warn,
                    "router",
                    "a worker's new role is not taken",
                    worker = seat.url,
                    why = full
                );
            }
        }
        self.act(fleet, reactor, now);
    }

    /// The worker that is to have another role, and what it is to be told.
    ///
    /// # Errors
    /// The sender may not ask that, there is no such worker, or none would be left to serve with the others.
    pub fn turn(
        &mut self,
        request: &Request,
        id: &str,
        way: &mut Way<'_>,
    ) -> Result<(WorkerNumber, Wanted), ApiError> {
        self.check(request, way.now)?;
        let wanted = Wanted::parse(&request.body)?;
        let worker = self.find(id, way)?;
        let is_other =
            way.fleet.role_name(worker).is_some_and(|role| role != wanted.role.to_string());
        let router = way.fleet.router();
        if is_other && router.is_ready() && !router.is_ready_without(worker) {
            return Err(ApiError::new(
                409,
                NOT_POSSIBLE,
                "without this worker no pair of workers would be left that serves meanwhile",
            ));
        }
        // Its entry is gone from when it is asked until it serves again.
        let until = way.now + wanted.patience + DRAIN_DONE_TIME + REGISTRY_ENTRY_LIFE;
        self.succession.told(worker, until, way.now);
        Ok((worker, wanted))
    }

    /// Drops entries that were not renewed.
    pub fn expire(&mut self, fleet: &mut Fleet, reactor: &mut Reactor, now: Instant) {
        self.members.expire(now);
        self.act(fleet, reactor, now);
    }

    /// Takes in what etcd has.
    pub fn follow(
        &mut self,
        view: &mut View,
        fleet: &mut Fleet,
        reactor: &mut Reactor,
        now: Instant,
    ) {
        while let Some(change) = view.change() {
            match change {
                Change::Entered(entry) if !is_spoken_to(&entry.seat, fleet) => self.refuse(entry),
                Change::Entered(entry) => match self.members.renew(entry, None) {
                    Ok(()) => {}
                    // Of those for whom there is no room, one stands for all.
                    Err(_) if self.is_full => {}
                    Err(full) => {
                        event!(Warn, "router", "workers are not taken", why = full);
                        self.is_full = true;
                    }
                },
                Change::Gone(seat, incarnation) => {
                    self.members.withdraw(&seat, incarnation, Why::Dropped)
                }
                Change::Whole(seats) => {
                    self.members.reconcile(|seat| seats.contains(seat), now + REGISTRY_ENTRY_LIFE);
                }
                Change::Odd(key, why) => {
                    event!(
                        Warn,
                        "router",
                        "no worker's entry",
                        key = key.escape_debug(),
                        why = why
                    );
                }
                Change::Odder => {
                    event!(
                        Warn,
                        "router",
                        "and more that are no workers' entries, which are not named"
                    );
                }
            }
        }
        self.act(fleet, reactor, now);
    }

    /// Answers a request for one of these paths.
    ///
    /// # Errors
    /// What is wrong with it, or who may not ask it.
    pub fn serve(&mut self, request: &Request, way: &mut Way<'_>) -> Result<Told, ApiError> {
        let path = request.head.path();
        let told = match (request.head.method, path.strip_prefix("/workers/")) {
            _ if path == "/challenge" => Ok(json_of(&self.nonces.invite(way.now))),
            (Method::Get, None) => Ok(json_of(&self.list(way))),
            (Method::Get, Some(id)) => {
                let worker = self.find(id, way)?;
                Ok(json_of(&self.describe(worker, way)))
            }
            (method, id) => {
                self.check(request, way.now)?;
                match (method, id) {
                    (Method::Put, None) => self.enter(&request.body, way),
                    (Method::Delete, None) => self.withdraw(&request.body),
                    (Method::Delete, Some(id)) => self.remove(id, way),
                    _ => self.add(&request.body, way),
                }
            }
        };
        self.act(way.fleet, way.reactor, way.now);
        told
    }

    /// Whether the sender of a change may make it.
    fn check(&mut self, request: &Request, now: Instant) -> Result<(), ApiError> {
        if self.trust.keys.is_empty() {
            let is_entry = request.head.path() == "/registry";
            return match if is_entry { self.trust.strangers } else { self.trust.anybody } {
                true => Ok(()),
                false => Err(ApiError::new(
                    403,
                    "not_trusted",
                    "workers are taken from others than this host, and by entry where clients need keys, only with \
                     --cluster-key-file or --insecure",
                )),
            };
        }
        let head = &request.head;
        let asked = Asked { method: head.method.as_str(), path: head.path(), body: &request.body };
        let (nonce, proof) = (head.headers.get(NONCE), head.headers.get(PROOF));
        self.nonces.take(&self.trust.keys, asked, nonce, proof, now).map_err(|why| match why {
            Unproven::TooMany => ApiError::new(429, "overloaded", why.to_string()),
            _ => ApiError::new(401, "not_proven", why.to_string()),
        })
    }

    fn enter(&mut self, body: &[u8], way: &mut Way<'_>) -> Result<Told, ApiError> {
        let entry = Entry::parse(body).map_err(|why| ApiError::new(400, "invalid_entry", why))?;
        if !is_spoken_to(&entry.seat, way.fleet) {
            self.refuse(entry);
            return Err(ApiError::new(400, "invalid_entry", UNSPOKEN));
        }
        self.members.renew(entry, Some(way.now + REGISTRY_ENTRY_LIFE)).map_err(full)?;
        Ok(json_of(&json!({ "life_ms": REGISTRY_ENTRY_LIFE.as_millis() as u64 })))
    }

    /// Somebody says that a worker is there, which may have been given up.
    fn await_anew(&self, seat: &Seat, way: &mut Way<'_>) {
        let Some(&worker) = self.numbers.get(seat) else { return };
        if way.fleet.router().await_anew(worker, way.now) {
            event!(Info, "router", "worker is looked for again", worker = seat.url);
        }
    }

    /// A worker has entered itself that this router cannot speak to.
    fn refuse(&mut self, entry: Entry) {
        self.members.refuse(&entry);
        if self.unspoken.len() < ETCD_ODD_MAX && self.unspoken.insert(entry.seat.clone()) {
            event!(
                Error,
                "router",
                "a worker is not taken",
                worker = entry.seat.url,
                why = UNSPOKEN
            );
        }
    }

    fn withdraw(&mut self, body: &[u8]) -> Result<Told, ApiError> {
        let entry = Entry::parse(body).map_err(|why| ApiError::new(400, "invalid_entry", why))?;
        self.members.withdraw(&entry.seat, entry.peer.incarnation, Why::Withdrawn);
        Ok(json_of(&json!({})))
    }

    fn add(&mut self, body: &[u8], way: &mut Way<'_>) -> Result<Told, ApiError> {
        let (seat, bootstrap_port) = Asking::parse(body)?;
        if !is_spoken_to(&seat, way.fleet) {
            return Err(ApiError::invalid("url", format!("is {}: {UNSPOKEN}", seat.url)));
        }
        self.members.name(seat.clone(), bootstrap_port).map_err(full)?;
        self.await_anew(&seat, way);
        self.act(way.fleet, way.reactor, way.now);
        let id = self.numbers.get(&seat).map(|worker| worker.0.to_string());
        let (_, body) = json_of(&json!({
            "status": "accepted",
            "worker_id": id,
            "url": seat.url.to_string(),
            "location": id.as_ref().map(|id| format!("/workers/{id}")),
            "message": "Worker addition queued for background processing",
        }));
        Ok((202, body))
    }

    fn remove(&mut self, id: &str, way: &mut Way<'_>) -> Result<Told, ApiError> {
        let worker = self.find(id, way)?;
        // What sits now where this one sat may be somebody else: it is taken off by its own ID.
        if worker.0.to_string() != id {
            let why = format!("worker {id} is worker {} now", worker.0);
            return Err(ApiError::new(404, "worker_not_found", why));
        }
        if let Some(seat) = self.seat(worker).cloned() {
            self.members.remove(&seat);
        }
        let (_, body) = json_of(&json!({
            "status": "accepted",
            "worker_id": id,
            "message": "Worker removal queued for background processing",
        }));
        Ok((202, body))
    }

    fn list(&self, way: &mut Way<'_>) -> Value {
        let here: Vec<WorkerNumber> =
            way.fleet.router().workers().map(|(worker, ..)| worker).collect();
        let mut count = |role: &str| {
            here.iter()
                .filter(|&&worker| way.fleet.role_name(worker).as_deref() == Some(role))
                .count()
        };
        // SGLang's word for those that do both.
        let [prefill, decode, regular] = ["prefill", "decode", MIXED].map(&mut count);
        json!({
            "workers": here.iter().map(|&worker| self.describe(worker, way)).collect::<Vec<_>>(),
            "total": here.len(),
            "stats": {
                "prefill_count": prefill, "decode_count": decode, "regular_count": regular,
            },
        })
    }

    fn describe(&self, worker: WorkerNumber, way: &mut Way<'_>) -> Value {
        let load = way.fleet.router().load(worker).unwrap_or_default();
        let role = way.fleet.role_name(worker);
        let entry = self.seat(worker).and_then(|seat| self.members.entry(seat));
        let misfit = way.fleet.router().misfit(worker).map(|(other, difference)| {
            let other = way.fleet.url(other);
            match difference {
                Difference::Alone => {
                    format!("no worker of the other role is here: {other} is mixed, and hands nothing over")
                }
                difference => format!("it fits no worker of the other role; of it and {other}: {difference}"),
            }
        });
        let lonely = || String::from("no worker of the other role is here");
        let misfit = misfit.or_else(|| way.fleet.router().is_lonely(worker).then(lonely));
        let target = way.fleet.target(worker);
        let (status, reason) = match (misfit, target) {
            _ if !load.usable && target.is_some_and(|target| target.drains) => ("draining", None),
            _ if !load.usable => ("down", target.and_then(|target| target.fault.clone())),
            (Some(why), target) if target.is_none_or(|target| !target.is_mixed) => {
                ("unpaired", Some(why))
            }
            _ => ("ready", None),
        };
        let model = target.and_then(|target| target.model.as_deref());
        json!({
            "id": worker.0.to_string(),
            "url": target.map(|target| target.url.to_string()),
            "model_id": model.unwrap_or("unknown"),
            "priority": 50,
            "cost": 1.0,
            "worker_type": role,
            "is_healthy": load.usable,
            "status": status,
            "reason": reason,
            "load": load.booked,
            "connection_mode": "http",
            "bootstrap_port": target.and_then(Target::registry_port),
            "metadata": { "by": if entry.is_some() { "entry" } else { "name" } },
        })
    }

    fn seat(&self, worker: WorkerNumber) -> Option<&Seat> {
        self.numbers.iter().find(|(_, number)| **number == worker).map(|(seat, _)| seat)
    }

    /// The worker of this ID, or the one that it has become.
    ///
    /// # Errors
    /// There is none, or not now.
    pub fn find(&self, id: &str, way: &mut Way<'_>) -> Result<WorkerNumber, ApiError> {
        let none = || ApiError::new(404, "worker_not_found", format!("there is no worker {id}"));
        let worker = id.parse().map(WorkerNumber).map_err(|_| none())?;
        let here = Some(worker).filter(|&worker| way.fleet.router().has(worker));
        match here.or_else(|| self.succession.of(worker, &self.numbers)) {
            Some(found) => Ok(found),
            None if self.succession.may_come_back(worker, way.now) => {
                let why = format!("worker {id} changes its role: it is here again once it serves");
                Err(ApiError { retry_after: Some(1), ..ApiError::new(503, "role_changes", why) })
            }
            None => Err(none()),
        }
    }

    /// Does what the membership wants done.
    fn act(&mut self, fleet: &mut Fleet, reactor: &mut Reactor, now: Instant) {
        while let Some(action) = self.members.poll() {
            match action {
                Action::Join { seat, bootstrap_port, kind, has_turned } => {
                    event!(Info, "router", "worker joins", seat = seat.role, worker = seat.url);
                    let target =
                        Target::new(seat.url.clone(), None, bootstrap_port).turned(has_turned);
                    let worker = fleet.join(seat.role, target, now);
                    if self.members.entry(&seat).is_some() {
                        // Its entry goes with it.
                        fleet.router().keep_looking(worker);
                    }
                    if let Some(kind) = kind {
                        fleet.router().entered(worker, kind);
                    }
                    self.numbers.insert(seat, worker);
                }
                Action::Leave { seat, why } => {
                    self.is_full = false;
                    if let Some(worker) = self.numbers.remove(&seat) {
                        fleet.part_with(reactor, worker, &why);
                        match why {
                            Why::Removed => self.succession.removed(worker),
                            _ => self.succession.left(worker, seat, now),
                        }
                    }
                }
            }
        }
    }
}

/// An operator's worker, with the fields of SGLang's router.
#[derive(Deserialize)]
#[serde(expecting = "an object of url, worker_type and, of a prefill worker, bootstrap_port")]
struct Asking {
    url: Option<String>,
    worker_type: Option<String>,
    bootstrap_port: Option<Value>,
    /// What would have no effect here.
    #[serde(flatten)]
    others: serde_json::Map<String, Value>,
}

impl Asking {
    fn parse(body: &[u8]) -> Result<(Seat, Option<u16>), ApiError> {
        let asked: Asking = serde_json::from_slice(body).map_err(ApiError::invalid_json)?;
        let says_nothing = |value: &Value| match value {
            Value::Null => true,
            Value::Object(fields) => fields.is_empty(),
            _ => false,
        };
        if let Some((field, _)) = asked.others.iter().find(|(_, value)| !says_nothing(value)) {
            return Err(ApiError::unsupported(field));
        }
        let url = asked.url.ok_or_else(|| ApiError::invalid("url", "must be given"))?;
        // A word alone would be taken for a host.
        let parsed =
            Some(&url).filter(|url| url.contains("://")).map(|url| url.parse::<WorkerUrl>());
        let parsed = parsed.unwrap_or_else(|| {
            Err("a worker's address is http://HOST:PORT or https://HOST:PORT".into())
        });
        let wrong =
            |why| ApiError::invalid("url", format!("is {url:?}, which is no address: {why}"));
        let url = parsed.map_err(wrong)?;
        // Who does both has the seat of a decode worker; whether it may sit there it is asked.
        let role = asked.worker_type.as_deref().and_then(|name| match name {
            MIXED => Some(Role::Decode),
            name => Role::named(name),
        });
        let role = role
            .ok_or_else(|| ApiError::invalid("worker_type", "must be prefill, decode or mixed"))?;
        let port = |value: &Value| {
            let port =
                value.as_u64().and_then(|port| u16::try_from(port).ok()).filter(|&port| port > 0);
            port.ok_or_else(|| ApiError::invalid("bootstrap_port", "must be 1 to 65535"))
        };
        let bootstrap_port = match (role, asked.bootstrap_port.as_ref().map(port).transpose()?) {
            (Role::Prefill, port) => port,
            (Role::Decode, None) => None,
            (Role::Decode, Some(_)) => {
                return Err(ApiError::invalid(
                    "bootstrap_port",
                    "is a prefill worker's, and of no other",
                ));
            }
        };
        Ok((Seat { role, url }, bootstrap_port))
    }
}

/// Whether this router can speak to who sits there.
fn is_spoken_to(seat: &Seat, fleet: &Fleet) -> bool {
    !seat.url.tls || fleet.speaks_tls()
}

fn full(full: Full) -> ApiError {
    ApiError::new(429, "overloaded", full.to_string())
}

fn json_of(body: &impl Serialize) -> Told {
    (200, serde_json::to_vec(body).expect("plain structs are JSON"))
}
