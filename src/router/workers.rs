//! The HTTP interface to the set of workers. `/workers` is for operators, as in SGLang's router;
//! workers keep their entries at `/registry`. This module also runs the actions of `Membership`.
//!
//! ```text
//! POST   /challenge       {"nonce", "life_ms"}                  without a key
//! PUT    /registry        an entry (`registry::entry`)          adds or renews an entry
//! DELETE /registry        the same entry                        removes it
//! GET    /workers[/ID]    lists the workers
//! POST   /workers         {"url", "worker_type", "bootstrap_port"}
//! DELETE /workers/ID
//! GET    /workers/ID/role                               the worker's own `/role` (`role_admin`)
//! POST   /workers/ID/role {"role", "timeout_secs"}      likewise
//! ```
//! Thread: `ctl`. Workers receive prompts, so all changes need a proof of the cluster key
//! (`registry::proof`). Without a key, changes are possible only on loopback or with `--insecure`.

use crate::api::{ApiError, ErrorCode};
use crate::config::secret::Secret;
use crate::config::values::WorkerUrl;
use crate::http::{Method, Request};
use crate::ids::Leg;
use crate::limits::{DRAIN_DONE_TIME, ETCD_ODD_MAX, REGISTRY_ENTRY_LIFE};
use crate::net::Reactor;
use crate::obs::log::event;
use crate::registry::entry::{Entry, WorkerAddress};
use crate::registry::etcd::view::{EtcdChange, EtcdView};
use crate::registry::membership::{LeaveReason, Membership, MembershipAction, MembershipFull};
use crate::registry::proof::{NONCE, Nonces, PROOF, ProofError, SignedRequest};
use crate::router::aliases::WorkerAliases;
use crate::router::pool::{RoleReport, WorkerPool};
use crate::router::requests::RouterContext;
use crate::router::target::WorkerTarget;
use crate::routing::compatibility::Difference;
use crate::routing::load::WorkerNumber;
use crate::server::role_change::RoleChangeRequest;
use crate::stdx::hash_map::{HashMap, HashSet};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Instant;

/// The senders that can change the set of workers.
#[derive(Debug)]
pub struct RegistryTrust {
    /// The sender must prove one of these keys, if there are any.
    pub keys: Vec<Secret>,
    /// Whether any sender is accepted if there are no keys.
    pub anybody: bool,
    /// Whether entries are accepted without keys, from senders without an API key.
    pub strangers: bool,
}

/// All workers by address, and the permission to change them.
#[derive(Debug)]
pub struct WorkerAdmin {
    trust: RegistryTrust,
    nonces: Nonces,
    members: Membership,
    numbers: HashMap<WorkerAddress, WorkerNumber>,
    /// Whether the log already says that there is no room for more workers of etcd.
    is_full: bool,
    /// Addresses of TLS workers that this router cannot reach. The log has named them.
    unspoken: HashSet<WorkerAddress>,
    aliases: WorkerAliases,
}

/// The reason to refuse a worker at an `https://` address.
const UNSPOKEN: &str = "a router needs --tls-ca-file to reach workers over TLS";

/// The name of a mixed worker in `/workers`.
const MIXED: &str = "mixed";

/// Status and body.
type JsonReply = (u16, Vec<u8>);

impl WorkerAdmin {
    /// Creates the state without workers; `secret` is random.
    pub fn new(trust: RegistryTrust, secret: [u8; 32], now: Instant) -> WorkerAdmin {
        let nonces = Nonces::new(secret, now);
        WorkerAdmin {
            trust,
            nonces,
            members: Membership::default(),
            numbers: HashMap::default(),
            is_full: false,
            unspoken: HashSet::default(),
            aliases: WorkerAliases::default(),
        }
    }

    /// From now on, changes must prove one of these keys.
    pub fn set_keys(&mut self, keys: Vec<Secret>) {
        self.trust.keys = keys;
    }

    /// Adds a worker that the command line names, at the resolved address of its name.
    ///
    /// # Errors
    /// There are too many workers.
    pub fn name(
        &mut self,
        address: WorkerAddress,
        bootstrap_port: Option<u16>,
        socket: SocketAddr,
        pool: &mut WorkerPool,
        reactor: &mut Reactor,
        now: Instant,
    ) -> Result<(), MembershipFull> {
        self.members.name(address.clone(), bootstrap_port)?;
        self.act(pool, reactor, now);
        if let Some(&worker) = self.numbers.get(&address) {
            pool.locate(worker, socket);
        }
        Ok(())
    }

    /// Applies the role changes that workers have reported.
    pub fn follow_roles(&mut self, pool: &mut WorkerPool, reactor: &mut Reactor, now: Instant) {
        while let Some(RoleReport { worker, role, is_news }) = pool.turned() {
            let Some(address) = self.address(worker).cloned() else { continue };
            // The worker reports its role in each identification, so a later report can find room.
            if let Err(full) = self.members.change_role(&address, role)
                && is_news
            {
                event!(
                    Warn,
                    "router",
                    "a worker's new role is refused",
                    worker = address.url,
                    why = full
                );
            }
        }
        self.act(pool, reactor, now);
    }

    /// Checks a role change. Returns the worker and the order for it.
    ///
    /// # Errors
    /// The sender has no permission, there is no such worker, or no pair could serve without it.
    pub fn check_role_change(
        &mut self,
        request: &Request,
        id: &str,
        cx: &mut RouterContext<'_>,
    ) -> Result<(WorkerNumber, RoleChangeRequest), ApiError> {
        self.check(request, cx.now)?;
        let wanted = RoleChangeRequest::parse(&request.body)?;
        let worker = self.find(id, cx)?;
        let is_other =
            cx.pool.role_name(worker).is_some_and(|role| role != wanted.role.to_string());
        let router = cx.pool.balancer();
        if is_other && router.is_ready() && !router.is_ready_without(worker) {
            return Err(ApiError::new(
                409,
                ErrorCode::RoleNotPossible,
                "without this worker, no pair of workers would be left to serve requests",
            ));
        }
        // From the order until it serves again, its entry is absent.
        let until = cx.now + wanted.patience + DRAIN_DONE_TIME + REGISTRY_ENTRY_LIFE;
        self.aliases.expect_role_change(worker, until, cx.now);
        Ok((worker, wanted))
    }

    /// Drops entries that were not renewed.
    pub fn expire(&mut self, pool: &mut WorkerPool, reactor: &mut Reactor, now: Instant) {
        self.members.expire(now);
        self.act(pool, reactor, now);
    }

    /// Applies the changes of the entries in etcd.
    pub fn follow(
        &mut self,
        view: &mut EtcdView,
        pool: &mut WorkerPool,
        reactor: &mut Reactor,
        now: Instant,
    ) {
        while let Some(change) = view.change() {
            match change {
                EtcdChange::Entered(entry) if !is_spoken_to(&entry.address, pool) => {
                    self.refuse(entry)
                }
                EtcdChange::Entered(entry) => match self.members.renew(entry, None) {
                    Ok(()) => {}
                    // One log line covers all workers without room.
                    Err(_) if self.is_full => {}
                    Err(full) => {
                        event!(Warn, "router", "workers refused: limit reached", why = full);
                        self.is_full = true;
                    }
                },
                EtcdChange::Gone(address, incarnation) => {
                    self.members.withdraw(&address, incarnation, LeaveReason::Dropped)
                }
                EtcdChange::Whole(addresses) => {
                    self.members.reconcile(
                        |address| addresses.contains(address),
                        now + REGISTRY_ENTRY_LIFE,
                    );
                }
                EtcdChange::Odd(key, why) => {
                    event!(
                        Warn,
                        "router",
                        "invalid registry entry ignored",
                        key = key.escape_debug(),
                        why = why
                    );
                }
                EtcdChange::Odder => {
                    event!(
                        Warn,
                        "router",
                        "more keys are not workers' entries; they are not listed"
                    );
                }
            }
        }
        self.act(pool, reactor, now);
    }

    /// Answers a request for one of these paths.
    ///
    /// # Errors
    /// The request is invalid, or the sender has no permission.
    pub fn serve(
        &mut self,
        request: &Request,
        cx: &mut RouterContext<'_>,
    ) -> Result<JsonReply, ApiError> {
        let path = request.head.path();
        let reply = match (request.head.method, path.strip_prefix("/workers/")) {
            _ if path == "/challenge" => Ok(json_of(&self.nonces.invite(cx.now))),
            (Method::Get, None) => Ok(json_of(&self.list(cx))),
            (Method::Get, Some(id)) => {
                let worker = self.find(id, cx)?;
                Ok(json_of(&self.describe(worker, cx)))
            }
            (method, id) => {
                self.check(request, cx.now)?;
                match (method, id) {
                    (Method::Put, None) => self.enter(&request.body, cx),
                    (Method::Delete, None) => self.withdraw(&request.body),
                    (Method::Delete, Some(id)) => self.remove(id, cx),
                    _ => self.add(&request.body, cx),
                }
            }
        };
        self.act(cx.pool, cx.reactor, cx.now);
        reply
    }

    /// Checks the permission of the sender of a change.
    fn check(&mut self, request: &Request, now: Instant) -> Result<(), ApiError> {
        if self.trust.keys.is_empty() {
            let is_entry = request.head.path() == "/registry";
            return match if is_entry { self.trust.strangers } else { self.trust.anybody } {
                true => Ok(()),
                false => Err(ApiError::new(
                    403,
                    ErrorCode::NotTrusted,
                    "this router accepts workers from other hosts, and entries if clients need \
                     keys, only with --cluster-key-file or --insecure",
                )),
            };
        }
        let head = &request.head;
        let asked =
            SignedRequest { method: head.method.as_str(), path: head.path(), body: &request.body };
        let (nonce, proof) = (head.headers.get(NONCE), head.headers.get(PROOF));
        self.nonces.verify_request(&self.trust.keys, asked, nonce, proof, now).map_err(|why| {
            match why {
                ProofError::TooMany => ApiError::busy(why.to_string()),
                _ => ApiError::new(401, ErrorCode::NotProven, why.to_string()),
            }
        })
    }

    fn enter(&mut self, body: &[u8], cx: &mut RouterContext<'_>) -> Result<JsonReply, ApiError> {
        let entry = Entry::parse(body).map_err(invalid_entry)?;
        if !is_spoken_to(&entry.address, cx.pool) {
            self.refuse(entry);
            return Err(ApiError::new(400, ErrorCode::InvalidEntry, UNSPOKEN));
        }
        self.members.renew(entry, Some(cx.now + REGISTRY_ENTRY_LIFE)).map_err(full)?;
        Ok(json_of(&json!({ "life_ms": REGISTRY_ENTRY_LIFE.as_millis() as u64 })))
    }

    /// Handles a new announcement of a worker. If the router had stopped to probe it, probes start
    /// again.
    fn await_anew(&self, address: &WorkerAddress, cx: &mut RouterContext<'_>) {
        let Some(&worker) = self.numbers.get(address) else { return };
        if cx.pool.balancer().await_anew(worker, cx.now) {
            event!(Info, "router", "worker is probed again", worker = address.url);
        }
    }

    /// Refuses the entry of a worker that this router cannot reach.
    fn refuse(&mut self, entry: Entry) {
        self.members.refuse(&entry);
        if self.unspoken.len() < ETCD_ODD_MAX && self.unspoken.insert(entry.address.clone()) {
            event!(
                Error,
                "router",
                "a worker is refused",
                worker = entry.address.url,
                why = UNSPOKEN
            );
        }
    }

    fn withdraw(&mut self, body: &[u8]) -> Result<JsonReply, ApiError> {
        let entry = Entry::parse(body).map_err(invalid_entry)?;
        self.members.withdraw(&entry.address, entry.peer.incarnation, LeaveReason::Withdrawn);
        Ok(json_of(&json!({})))
    }

    fn add(&mut self, body: &[u8], cx: &mut RouterContext<'_>) -> Result<JsonReply, ApiError> {
        let (address, bootstrap_port) = AddWorkerRequest::parse(body)?;
        if !is_spoken_to(&address, cx.pool) {
            return Err(ApiError::invalid("url", format!("is {}: {UNSPOKEN}", address.url)));
        }
        self.members.name(address.clone(), bootstrap_port).map_err(full)?;
        self.await_anew(&address, cx);
        self.act(cx.pool, cx.reactor, cx.now);
        let id = self.numbers.get(&address).map(|worker| worker.0.to_string());
        let (_, body) = json_of(&json!({
            "status": "accepted",
            "worker_id": id,
            "url": address.url.to_string(),
            "location": id.as_ref().map(|id| format!("/workers/{id}")),
            "message": "Worker addition queued for background processing",
        }));
        Ok((202, body))
    }

    fn remove(&mut self, id: &str, cx: &mut RouterContext<'_>) -> Result<JsonReply, ApiError> {
        let worker = self.find(id, cx)?;
        // The present worker at this address can be a different one, and its own ID is needed to
        // remove it.
        if worker.0.to_string() != id {
            let why = format!("worker {id} is worker {} now", worker.0);
            return Err(ApiError::new(404, ErrorCode::WorkerNotFound, why));
        }
        if let Some(address) = self.address(worker).cloned() {
            self.members.remove(&address);
        }
        let (_, body) = json_of(&json!({
            "status": "accepted",
            "worker_id": id,
            "message": "Worker removal queued for background processing",
        }));
        Ok((202, body))
    }

    fn list(&self, cx: &mut RouterContext<'_>) -> Value {
        let here: Vec<WorkerNumber> =
            cx.pool.balancer().workers().map(|(worker, ..)| worker).collect();
        let mut count = |role: &str| {
            here.iter()
                .filter(|&&worker| cx.pool.role_name(worker).as_deref() == Some(role))
                .count()
        };
        // SGLang's name for mixed workers is `regular`.
        let [prefill, decode, regular] = ["prefill", "decode", MIXED].map(&mut count);
        json!({
            "workers": here.iter().map(|&worker| self.describe(worker, cx)).collect::<Vec<_>>(),
            "total": here.len(),
            "stats": {
                "prefill_count": prefill, "decode_count": decode, "regular_count": regular,
            },
        })
    }

    fn describe(&self, worker: WorkerNumber, cx: &mut RouterContext<'_>) -> Value {
        let load = cx.pool.balancer().load(worker).unwrap_or_default();
        let role = cx.pool.role_name(worker);
        let entry = self.address(worker).and_then(|address| self.members.entry(address));
        let misfit = cx.pool.balancer().misfit(worker).map(|(other, difference)| {
            let other = cx.pool.url(other);
            match difference {
                Difference::Alone => {
                    format!(
                        "no worker of the other role is here: {other} is mixed and never hands over"
                    )
                }
                difference => format!(
                    "it fits no worker of the other role; compared with {other}: {difference}"
                ),
            }
        });
        let lonely = || String::from("no worker of the other role is here");
        let misfit = misfit.or_else(|| cx.pool.balancer().is_lonely(worker).then(lonely));
        let target = cx.pool.target(worker);
        let (status, reason) = match (misfit, target) {
            _ if !load.usable && target.is_some_and(|target| target.drains) => ("draining", None),
            _ if !load.usable => ("down", target.and_then(|target| target.fault.clone())),
            (Some(why), target) if target.is_none_or(|target| !target.is_mixed) => {
                ("unpaired", Some(why))
            }
            // The router sends it requests, but it is not sure what the worker is.
            (_, target) => ("ready", target.and_then(WorkerTarget::doubt).map(str::to_owned)),
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
            "load": load.reserved,
            "connection_mode": "http",
            "bootstrap_port": target.and_then(WorkerTarget::registry_port),
            "metadata": { "by": if entry.is_some() { "entry" } else { "name" } },
        })
    }

    fn address(&self, worker: WorkerNumber) -> Option<&WorkerAddress> {
        self.numbers.iter().find(|(_, number)| **number == worker).map(|(address, _)| address)
    }

    /// The worker with this ID, or its successor after a role change.
    ///
    /// # Errors
    /// There is no such worker, or it is changing its role now.
    pub fn find(&self, id: &str, cx: &mut RouterContext<'_>) -> Result<WorkerNumber, ApiError> {
        let why = || format!("there is no worker {id}");
        let none = || ApiError::new(404, ErrorCode::WorkerNotFound, why());
        let worker = id.parse().map(WorkerNumber).map_err(|_| none())?;
        let here = Some(worker).filter(|&worker| cx.pool.balancer().has(worker));
        match here.or_else(|| self.aliases.resolve_alias(worker, &self.numbers)) {
            Some(found) => Ok(found),
            None if self.aliases.may_come_back(worker, cx.now) => {
                let why = format!("worker {id} is changing its role; try again when it serves");
                let error = ApiError::new(503, ErrorCode::RoleChanges, why);
                Err(ApiError { retry_after: Some(1), ..error })
            }
            None => Err(none()),
        }
    }

    /// Performs the actions of the membership.
    fn act(&mut self, pool: &mut WorkerPool, reactor: &mut Reactor, now: Instant) {
        while let Some(action) = self.members.poll() {
            match action {
                MembershipAction::Join { address, bootstrap_port, kind, has_changed_role } => {
                    event!(
                        Info,
                        "router",
                        "worker joins",
                        role = address.role,
                        worker = address.url
                    );
                    let target = WorkerTarget::new(address.url.clone(), None, bootstrap_port)
                        .turned(has_changed_role);
                    let worker = pool.join(address.role, target, now);
                    if self.members.entry(&address).is_some() {
                        // The worker stays while its entry exists.
                        pool.balancer().keep_looking(worker);
                    }
                    if let Some(kind) = kind {
                        pool.balancer().entered(worker, kind);
                    }
                    self.numbers.insert(address, worker);
                }
                MembershipAction::Leave { address, why } => {
                    self.is_full = false;
                    if let Some(worker) = self.numbers.remove(&address) {
                        pool.part_with(reactor, worker, &why);
                        match why {
                            LeaveReason::Removed => self.aliases.removed(worker),
                            _ => self.aliases.left(worker, address, now),
                        }
                    }
                }
            }
        }
    }
}

/// A worker that an operator names, with the fields of SGLang's router.
#[derive(Deserialize)]
#[serde(expecting = "an object of url, worker_type and, for a prefill worker, bootstrap_port")]
struct AddWorkerRequest {
    url: Option<String>,
    worker_type: Option<String>,
    bootstrap_port: Option<Value>,
    /// Fields that have no effect here.
    #[serde(flatten)]
    others: serde_json::Map<String, Value>,
}

impl AddWorkerRequest {
    fn parse(body: &[u8]) -> Result<(WorkerAddress, Option<u16>), ApiError> {
        let asked: AddWorkerRequest =
            serde_json::from_slice(body).map_err(ApiError::invalid_json)?;
        let says_nothing = |value: &Value| match value {
            Value::Null => true,
            Value::Object(fields) => fields.is_empty(),
            _ => false,
        };
        if let Some((field, _)) = asked.others.iter().find(|(_, value)| !says_nothing(value)) {
            return Err(ApiError::unknown(field));
        }
        let url = asked.url.ok_or_else(|| ApiError::invalid("url", "must be given"))?;
        // Without this check, a single word would be parsed as a host.
        let parsed =
            Some(&url).filter(|url| url.contains("://")).map(|url| url.parse::<WorkerUrl>());
        let parsed = parsed
            .unwrap_or_else(|| Err("an address is http://HOST:PORT or https://HOST:PORT".into()));
        let wrong =
            |why| ApiError::invalid("url", format!("is {url:?}, which is not an address: {why}"));
        let url = parsed.map_err(wrong)?;
        // A mixed worker has the address of a decode worker. The identity query checks it.
        let role = asked.worker_type.as_deref().and_then(|name| match name {
            MIXED => Some(Leg::Decode),
            name => Leg::named(name),
        });
        let role = role
            .ok_or_else(|| ApiError::invalid("worker_type", "must be prefill, decode or mixed"))?;
        let port = |value: &Value| {
            let port =
                value.as_u64().and_then(|port| u16::try_from(port).ok()).filter(|&port| port > 0);
            port.ok_or_else(|| ApiError::invalid("bootstrap_port", "must be 1 to 65535"))
        };
        let bootstrap_port = match (role, asked.bootstrap_port.as_ref().map(port).transpose()?) {
            (Leg::Prefill, port) => port,
            (Leg::Decode, None) => None,
            (Leg::Decode, Some(_)) => {
                return Err(ApiError::invalid("bootstrap_port", "is for prefill workers only"));
            }
        };
        Ok((WorkerAddress { role, url }, bootstrap_port))
    }
}

/// Whether this router can reach this address: it needs CA certificates for TLS.
fn is_spoken_to(address: &WorkerAddress, pool: &WorkerPool) -> bool {
    !address.url.tls || pool.speaks_tls()
}

fn invalid_entry(why: String) -> ApiError {
    ApiError::new(400, ErrorCode::InvalidEntry, why)
}

fn full(full: MembershipFull) -> ApiError {
    ApiError::busy(full.to_string())
}

fn json_of(body: &impl Serialize) -> JsonReply {
    (200, serde_json::to_vec(body).expect("plain structs are JSON"))
}
