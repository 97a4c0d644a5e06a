//! All connections to workers. The pool dials them, uses each for one call at a time, keeps it for
//! the next call, and probes workers.
//!
//! Thread: `ctl`.
//! Invariants: every end of a call releases its reservation. A kept connection that its worker
//! closes is dropped at once. The pool does not read a call while too many bytes wait for its
//! client. A leaving worker keeps its calls, and is known until they end.
//! Not here: the purpose of calls. `completion`: their end; `members`: workers and addresses;
//! `probes`: health; `pressure`: roles and load.

mod completion;
mod members;
mod pressure;
mod probes;

pub use pressure::RoleReport;

use crate::config::secret::Secret;
use crate::limits::{
    ROUTER_ABORT_TIME, ROUTER_CLIENT_QUEUED_MAX, ROUTER_CONNECT_TIME, ROUTER_IDLE_MAX,
    ROUTER_IDLE_TIME, ROUTER_PROBE_TIME,
};
use crate::net::resolver::Resolver;
use crate::net::{Address, Authorities, CloseReason, ConnId, Event, Reactor};
use crate::router::call::{Call, Owner, Read};
use crate::router::target::{Idle, WorkerTarget};
use crate::routing::balancer::{LoadBalancer, Reservation};
use crate::routing::load::{WorkerLoad, WorkerNumber};
use crate::stdx::hash_map::{HashMap, HashSet};
use crate::upstream::answer::{CallError, UpstreamReply};
use crate::upstream::request::{UpstreamHead, UpstreamRequest};
use std::collections::{BTreeMap, VecDeque};
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An event of a call.
#[derive(Debug)]
pub struct PoolEvent {
    /// The purpose of the call.
    pub owner: Owner,
    /// The connection of the call.
    pub conn: ConnId,
    /// The event.
    pub event: CallEvent,
}

/// An event of a call, without its owner.
#[derive(Debug)]
pub enum CallEvent {
    /// Its connection is established; [`WorkerPool::send_request`] is due.
    Ready,
    /// The connection failed, and nothing was sent.
    Refused,
    /// The worker generates an answer that it sends as a whole.
    Processing,
    /// More of the answer has arrived; see [`WorkerPool::answer`].
    Arrived,
    /// The answer is complete. Inside is the part that was not read yet.
    Ended(UpstreamReply),
    /// The rest of the answer will not arrive.
    Lost(CallError),
}

/// The workers and all their calls.
#[derive(Debug)]
pub struct WorkerPool {
    balancer: LoadBalancer,
    /// The workers that `balancer` knows.
    targets: BTreeMap<WorkerNumber, WorkerTarget>,
    names: Resolver,
    /// Worker by idle connection.
    kept: HashMap<ConnId, WorkerNumber>,
    calls: HashMap<ConnId, Call>,
    news: VecDeque<PoolEvent>,
    /// API key for calls to workers.
    key: Option<Secret>,
    /// Admin key for administrative calls to workers.
    admin_key: Option<Secret>,
    /// Certificate authorities for workers that are reached over TLS.
    authorities: Option<Authorities>,
    /// Path of health probes, and the time that one can take.
    health: (String, Duration),
    /// Workers that have reported another role.
    turned: VecDeque<RoleReport>,
    /// Until this time, other processes may not have read their new keys yet.
    keys_change: Option<Instant>,
}

impl WorkerPool {
    /// A pool without workers. `balancer` chooses workers. `names` resolves their names, and again
    /// if an address does not work.
    pub fn new(balancer: LoadBalancer, names: Resolver) -> WorkerPool {
        WorkerPool {
            balancer,
            targets: BTreeMap::new(),
            names,
            kept: HashMap::default(),
            calls: HashMap::default(),
            news: VecDeque::new(),
            key: None,
            admin_key: None,
            authorities: None,
            health: ("/health".into(), ROUTER_PROBE_TIME),
            turned: VecDeque::new(),
            keys_change: None,
        }
    }

    /// Sets the path of health probes, and the time that one can take.
    pub fn with_health(self, path: String, time: Duration) -> WorkerPool {
        WorkerPool { health: (path, time), ..self }
    }

    /// Sets the API key and the admin key for calls to workers.
    pub fn with_keys(self, key: Option<Secret>, admin_key: Option<Secret>) -> WorkerPool {
        WorkerPool { key, admin_key, ..self }
    }

    /// Sets the certificate authorities for workers that are reached over TLS.
    pub fn with_authorities(self, authorities: Option<Authorities>) -> WorkerPool {
        WorkerPool { authorities, ..self }
    }

    /// Whether workers can be reached over TLS.
    pub fn speaks_tls(&self) -> bool {
        self.authorities.is_some()
    }

    /// Replaces the certificate authorities. Open calls on earlier TLS connections continue, but no
    /// new call uses such a connection.
    pub fn trust(&mut self, authorities: Authorities, reactor: &mut Reactor) {
        self.authorities = Some(authorities);
        let is_secured = |worker| self.targets.get(worker).is_some_and(|target| target.url.tls);
        let idle: Vec<ConnId> = self
            .kept
            .iter()
            .filter(|(_, worker)| is_secured(worker))
            .map(|(&conn, _)| conn)
            .collect();
        for conn in idle {
            self.drop_idle(reactor, conn);
        }
        for call in self.calls.values_mut() {
            call.is_last = true;
        }
    }

    /// Replaces the API key for calls to workers.
    pub fn set_key(&mut self, key: Option<Secret>) {
        self.key = key;
    }

    /// Replaces the admin key for administrative calls to workers.
    pub fn set_admin_key(&mut self, key: Option<Secret>) {
        self.admin_key = key;
    }

    /// The header field with the API key.
    pub fn bearer(&self) -> Option<(&'static str, String)> {
        self.key.as_ref().map(bearer)
    }

    /// The header field with the admin key, if the router has admin keys.
    pub fn admin_bearer(&self) -> Option<(&'static str, String)> {
        self.admin_key.as_ref().map(bearer)
    }

    /// The load balancer.
    pub fn balancer(&mut self) -> &mut LoadBalancer {
        &mut self.balancer
    }

    /// A worker, while it is present or has calls.
    pub fn target(&self, worker: WorkerNumber) -> Option<&WorkerTarget> {
        self.targets.get(&worker)
    }

    /// The worker's name in logs and answers.
    pub fn url(&self, worker: WorkerNumber) -> String {
        self.target(worker)
            .map_or_else(|| "a worker that has left".into(), |target| target.url.to_string())
    }

    /// The next event.
    pub fn poll(&mut self) -> Option<PoolEvent> {
        self.news.pop_front()
    }

    /// Opens a connection to the reserved worker for a call, or takes a kept connection. The flag
    /// says whether it is already established. If not, [`CallEvent::Ready`] or
    /// [`CallEvent::Refused`] follows.
    ///
    /// # Errors
    /// There are too many connections, or the worker's address is unknown. The reservation is
    /// released.
    pub fn open_call(
        &mut self,
        reactor: &mut Reactor,
        owner: Owner,
        reservation: Reservation,
        until: Instant,
        now: Instant,
    ) -> Result<(ConnId, bool), CloseReason> {
        let worker = reservation.worker();
        let target = self.targets.get_mut(&worker);
        let idle = target.and_then(|target| target.idle.pop());
        if let Some(Idle { conn, .. }) = idle {
            let kept_for = self.kept.remove(&conn);
            debug_assert_eq!(kept_for, Some(worker), "a connection is used for its own worker");
            self.calls.insert(conn, Call::new(owner, reservation, until, true));
            return Ok((conn, true));
        }
        match self.dial(reactor, worker, now) {
            Ok(conn) => {
                let before = self.calls.insert(conn, Call::new(owner, reservation, until, false));
                debug_assert!(before.is_none(), "a new connection carries no call");
                Ok((conn, false))
            }
            Err(reason) => {
                self.release(reservation, now);
                Err(reason)
            }
        }
    }

    fn dial(
        &self,
        reactor: &mut Reactor,
        worker: WorkerNumber,
        now: Instant,
    ) -> Result<ConnId, CloseReason> {
        let target = self.targets.get(&worker);
        let at = target.and_then(|target| Some((&target.url, target.address?)));
        let (url, address) = at.ok_or(CloseReason::Io(ErrorKind::AddrNotAvailable))?;
        let (address, until) = (Address::Tcp(address), now + ROUTER_CONNECT_TIME);
        match &self.authorities {
            _ if !url.tls => reactor.connect(&address, until),
            Some(authorities) => reactor.connect_secured(&address, (authorities, &url.host), until),
            // The configuration refuses such a worker without authorities.
            None => Err(CloseReason::Io(ErrorKind::Unsupported)),
        }
    }

    /// Sends the request of a call, now or when its connection is established.
    pub fn send_request(
        &mut self,
        reactor: &mut Reactor,
        conn: ConnId,
        order: &UpstreamHead,
        body: &Arc<Vec<u8>>,
        now: Instant,
    ) {
        let Some(call) = self.calls.get(&conn) else { return };
        // A worker stays known while it has a call.
        let worker = call.reservation.worker();
        let is_asked = call.owner != Owner::IdentityQuery;
        let host = self.targets.get(&worker).map(WorkerTarget::host).unwrap_or_default();
        let taken_for = is_asked.then(|| self.taken_for(worker)).flatten();
        let Some(call) = self.calls.get_mut(&conn) else { return };
        let outgoing = UpstreamRequest::new(order, &host, taken_for, body.clone());
        if let Err(lost) = call.begin(reactor, conn, outgoing) {
            self.lose(reactor, conn, lost, now);
        }
    }

    /// Sends a request to a worker and ignores the answer. The deadline is short.
    pub fn notify(
        &mut self,
        reactor: &mut Reactor,
        worker: WorkerNumber,
        order: &UpstreamHead,
        body: Vec<u8>,
        now: Instant,
    ) {
        let reservation = self.balancer.reserve_visit(worker);
        if let Ok((conn, _)) =
            self.open_call(reactor, Owner::Detached, reservation, now + ROUTER_ABORT_TIME, now)
        {
            self.send_request(reactor, conn, order, &Arc::new(body), now);
        }
    }

    /// The answer of a call, from its head on.
    pub fn answer(&mut self, conn: ConnId) -> Option<&mut UpstreamReply> {
        self.calls.get_mut(&conn).and_then(|call| call.answer.as_mut())
    }

    /// The purpose of a call, while it is open.
    pub fn owner(&self, conn: ConnId) -> Option<Owner> {
        self.calls.get(&conn).map(|call| call.owner)
    }

    /// Number of calls that are legs of clients' requests.
    pub fn legs(&self) -> usize {
        self.calls.values().filter(|call| call.owner.is_leg()).count()
    }

    /// Whether no request has a call or a reservation.
    ///
    /// # Errors
    /// What is left, and where.
    pub fn check_idle(&self) -> Result<(), String> {
        if self.legs() > 0 {
            return Err(format!("{} calls", self.legs()));
        }
        for (worker, role, load) in self.balancer.workers() {
            if load.reserved > 0 || load.uncomputed > 0 || load.context > 0 {
                let WorkerLoad { reserved, uncomputed, context, .. } = load;
                return Err(format!(
                    "{role} worker {}: {reserved} sequences, {uncomputed} tokens to compute, \
                     {context} tokens of context",
                    self.url(worker)
                ));
            }
        }
        Ok(())
    }

    /// Changes the deadline of a call.
    pub fn set_deadline(&mut self, conn: ConnId, until: Instant) {
        if let Some(call) = self.calls.get_mut(&conn) {
            call.until = until;
        }
    }

    /// Lets a call end by itself. Its events are dropped.
    pub fn detach_call(&mut self, conn: ConnId) {
        if let Some(call) = self.calls.get_mut(&conn) {
            call.owner = Owner::Detached;
        }
    }

    /// Gives a call `patience` to end by itself: its worker is notified in another way, or its
    /// answer is no longer needed. Its events are dropped.
    pub fn let_end(
        &mut self,
        reactor: &mut Reactor,
        conn: ConnId,
        (now, patience): (Instant, Duration),
    ) {
        match self.calls.get_mut(&conn) {
            Some(call) if call.is_begun() => {
                (call.owner, call.until) = (Owner::Detached, now + patience);
            }
            _ => self.cancel_call(reactor, conn, now),
        }
    }

    /// Ends a call. If data was sent, its connection is closed; for the worker, that is a
    /// cancellation.
    pub fn cancel_call(&mut self, reactor: &mut Reactor, conn: ConnId, now: Instant) {
        let Some(call) = self.calls.remove(&conn) else { return };
        let is_reusable = call.connected && !call.is_begun();
        self.settle(reactor, conn, call, is_reusable, now);
    }

    /// Continues to read for a client after its queue has emptied.
    pub fn resume(&mut self, reactor: &mut Reactor, conn: ConnId, now: Instant) {
        self.read(reactor, conn, now);
    }

    /// Handles an event of the reactor. Returns false if it belongs to no connection of a worker.
    pub fn handle(&mut self, reactor: &mut Reactor, event: Event, now: Instant) -> bool {
        let (Event::Connected(conn)
        | Event::Received(conn)
        | Event::Eof(conn)
        | Event::Drained(conn)
        | Event::Closed { conn, .. }) = event
        else {
            return false;
        };
        if self.kept.contains_key(&conn) {
            if !matches!(event, Event::Drained(_)) {
                // The connection was closed, or got data without a request. The worker can have
                // been replaced, so it is identified again.
                let worker = self.drop_idle(reactor, conn);
                if let Some(target) = worker.and_then(|worker| self.targets.get_mut(&worker)) {
                    target.is_identified = false;
                }
            }
            return true;
        }
        let Some(call) = self.calls.get_mut(&conn) else { return false };
        match event {
            Event::Connected(_) => {
                call.connected = true;
                // The worker is reachable after all.
                if let Some(target) = self.targets.get_mut(&call.reservation.worker()) {
                    target.lost = false;
                }
                if !call.is_begun() {
                    let owner = call.owner;
                    self.news.push_back(PoolEvent { owner, conn, event: CallEvent::Ready });
                }
            }
            Event::Drained(_) => {
                if let Err(lost) = call.pump(reactor, conn) {
                    self.lose(reactor, conn, lost, now);
                }
            }
            Event::Eof(_) => {
                call.eof = true;
                self.read(reactor, conn, now);
            }
            Event::Received(_) => self.read(reactor, conn, now),
            Event::Closed { reason, .. } => self.closed(reactor, conn, reason, now),
            _ => {}
        }
        true
    }

    /// Asserts the rules that hold between turns. Debug builds call it at each tick.
    ///
    /// # Panics
    /// A connection is idle and in use, is listed as idle in only one of two places, or belongs to
    /// an unknown worker. A worker that drains can be chosen, or a worker has two probes.
    pub fn invariants(&self) {
        for (conn, worker) in &self.kept {
            assert!(!self.calls.contains_key(conn), "an idle connection carries no call");
            let target = self.targets.get(worker).expect("an idle connection's worker is known");
            assert!(
                target.idle.iter().any(|idle| idle.conn == *conn),
                "an idle connection is in its worker's list"
            );
        }
        self.balancer.invariants();
        for worker in self.targets.keys() {
            assert!(self.balancer.knows(*worker), "a worker of the pool can be chosen or leaves");
        }
        for (worker, _, load) in self.balancer.workers() {
            let target = self.targets.get(&worker).expect("a worker that can be chosen is known");
            assert!(!(target.drains && load.usable), "a worker that drains is not chosen");
        }
        let listed: usize = self.targets.values().map(|target| target.idle.len()).sum();
        assert_eq!(listed, self.kept.len(), "each idle connection is listed once");
        assert!(listed <= ROUTER_IDLE_MAX, "idle connections are bounded");
        let mut probed = HashSet::default();
        for call in self.calls.values() {
            let worker = call.reservation.worker();
            assert!(self.targets.contains_key(&worker), "a worker is known while it has calls");
            let is_probe = matches!(call.owner, Owner::IdentityQuery | Owner::Probe);
            assert!(!is_probe || probed.insert(worker), "a worker has one probe at a time");
        }
    }

    /// Ends overdue calls, and closes connections that are idle for too long.
    pub fn expire(&mut self, reactor: &mut Reactor, now: Instant) {
        let is_late = |(&conn, call): (&ConnId, &Call)| (call.until <= now).then_some(conn);
        for conn in self.calls.iter().filter_map(is_late).collect::<Vec<_>>() {
            self.lose(reactor, conn, CallError::Deadline, now);
        }
        let is_old = |idle: &&Idle| idle.since + ROUTER_IDLE_TIME <= now;
        let idle = self.targets.values().flat_map(|target| target.idle.iter().filter(is_old));
        let old: Vec<ConnId> = idle.map(|idle| idle.conn).collect();
        for conn in old {
            self.drop_idle(reactor, conn);
        }
        if cfg!(debug_assertions) {
            self.invariants();
        }
    }

    fn read(&mut self, reactor: &mut Reactor, conn: ConnId, now: Instant) {
        let Some(call) = self.calls.get_mut(&conn) else { return };
        if let Owner::Lead(client) = call.owner
            && reactor.queued(client) > ROUTER_CLIENT_QUEUED_MAX
        {
            call.held_back = Some(now);
            return;
        }
        if !call.is_begun() && !reactor.received(conn).is_empty() {
            // The connection has data without a request. Its rest would look like the answer to
            // this request.
            return self.refuse(reactor, conn, now);
        }
        let mut some = false;
        loop {
            match call.read(reactor.received(conn)) {
                Ok((used, read)) => {
                    reactor.consume(conn, used);
                    match read {
                        Read::Nothing => break,
                        Read::Something => some = true,
                        Read::End { keep_alive } => {
                            return self.end(reactor, conn, keep_alive, now);
                        }
                    }
                }
                Err(lost) => return self.lose(reactor, conn, lost, now),
            }
        }
        if call.take_processing() {
            self.news.push_back(PoolEvent {
                owner: call.owner,
                conn,
                event: CallEvent::Processing,
            });
        }
        if some {
            self.news.push_back(PoolEvent { owner: call.owner, conn, event: CallEvent::Arrived });
        }
        if call.eof {
            match call.close() {
                Ok(()) => self.end(reactor, conn, false, now),
                Err(_) if !call.is_begun() => self.refuse(reactor, conn, now),
                Err(lost) => self.lose(reactor, conn, lost, now),
            }
        }
    }
}

fn bearer(key: &Secret) -> (&'static str, String) {
    ("authorization", format!("Bearer {}", String::from_utf8_lossy(key.bytes())))
}

#[cfg(test)]
mod tests;
