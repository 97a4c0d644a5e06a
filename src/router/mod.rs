//! The router's loop: it serves clients and calls workers.
//!
//! Thread: `ctl`, the router's only thread.
//! Not here: the paths (`routes`), the handling of a request (`requests`), connections to workers
//! (`pool`), decisions (`routing`).

mod admission_queue;
mod aliases;
pub mod call;
mod coalescer;
pub mod fanout;
pub mod identity;
mod load_report;
pub mod metrics;
pub mod pool;
mod relay;
pub mod requests;
pub mod role_admin;
pub mod routes;
pub mod target;
pub mod workers;

use crate::config::{BalanceConfig, RequestConfig, ServerConfig};
use crate::http::HttpLimits;
use crate::limits::{DRAIN_TIME_MAX, HTTP_CONNECTIONS_MAX, SCRAPERS_MAX};
use crate::net::resolver::Resolver;
use crate::net::{Address, Credentials, Event, ListenerId, Reactor};
use crate::obs::log::event;
use crate::registry::client::RegistryClient;
use crate::registry::etcd::view::EtcdView;
use crate::router::call::Owner;
use crate::server::connections::{ClientEvent, Connections};
use crate::server::drain::{Drain, DrainOutcome, RemainingWork};
use crate::server::key_limits::KeyLimits;
use crate::server::reload::{Reload, ReloadedFile};
use crate::stdx::failpoint::is_failpoint_active;
use coalescer::WriteCoalescer;
use fanout::Fanout;
use pool::WorkerPool;
use requests::{ProxiedRequests, RouterContext};
use role_admin::RoleAdmin;
use routes::RouterRoutes;
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Interval of the checks for overdue work.
pub const TICK: Duration = Duration::from_millis(100);

/// A router.
#[derive(Debug)]
pub struct RouterService {
    reactor: Reactor,
    listener: ListenerId,
    connections: Connections,
    /// Clients of the port that serves only `/metrics`.
    scrapers: Option<(ListenerId, Connections)>,
    pool: WorkerPool,
    requests: ProxiedRequests,
    fanout: Fanout,
    turns: RoleAdmin,
    paths: RouterRoutes,
    drain: Drain,
    reload: Reload,
    etcd: Option<(RegistryClient<EtcdView>, Option<Resolver>)>,
    next_tick: Instant,
    pace: WriteCoalescer,
}

impl RouterService {
    /// Opens the listener. [`RouterService::run`] serves.
    pub fn new(
        mut reactor: Reactor,
        address: SocketAddr,
        pool: WorkerPool,
        requests: ProxiedRequests,
        paths: RouterRoutes,
        now: Instant,
    ) -> io::Result<RouterService> {
        reactor.watch_signals()?;
        let listener = reactor.listen(&Address::Tcp(address), HTTP_CONNECTIONS_MAX)?;
        Ok(RouterService {
            reactor,
            listener,
            connections: Connections::default(),
            scrapers: None,
            pool,
            requests,
            fanout: Fanout::default(),
            turns: RoleAdmin::default(),
            paths,
            drain: Drain::default(),
            reload: Reload::nothing(now),
            etcd: None,
            next_tick: now,
            pace: WriteCoalescer::new(now),
        })
    }

    /// Sets the maximum size of a body, the origins of web pages that can read answers, the limits
    /// of API keys, and the header fields with a client's request ID.
    pub fn within(self, server: &ServerConfig, terms: &RequestConfig) -> RouterService {
        let limits = HttpLimits { body: server.body_max, ..HttpLimits::default() };
        let connections = Connections::with_limits(limits)
            .allowing(server.allowed_origins.clone())
            .limiting(KeyLimits::of(server))
            .named_by(terms.id_headers.clone());
        RouterService { connections, ..self }
    }

    /// From now on, serves HTTPS with these credentials.
    pub fn secure(&mut self, credentials: Credentials) {
        self.reactor.secure(self.listener, credentials);
    }

    /// Reloads these files when they change.
    ///
    /// # Errors
    /// The handler of SIGHUP cannot be installed.
    pub fn renew_from(&mut self, reload: Reload) -> io::Result<()> {
        self.reload = reload.watched(&mut self.reactor)?;
        Ok(())
    }

    fn renew(&mut self, fresh: Vec<ReloadedFile>, now: Instant) {
        for fresh in fresh {
            match fresh {
                ReloadedFile::Credentials(credentials) => self.secure(credentials),
                ReloadedFile::Authorities(authorities) => {
                    self.pool.trust(authorities, &mut self.reactor)
                }
                ReloadedFile::ApiKeys(keys) => {
                    if !is_failpoint_active("router sends its former key") {
                        self.pool.set_key(keys.first().map(|key| key.secret.clone()));
                    }
                    self.connections.key_limits.set_keys(&keys);
                    self.paths.keys().set_api(&keys);
                }
                ReloadedFile::AdminKeys(keys) => {
                    self.pool.set_admin_key(keys.first().cloned());
                    self.paths.keys().admin = keys;
                }
                ReloadedFile::ClusterKeys(keys) => {
                    if let Some((etcd, _)) = &mut self.etcd {
                        etcd.task().set_keys(keys.clone());
                        etcd.begin_anew(&mut self.reactor, now);
                    }
                    self.paths.workers().set_keys(keys);
                    self.pool.ask_anew(now);
                }
            }
        }
    }

    /// Starts the role balancer, which changes the roles of workers.
    pub fn balance(&mut self, terms: BalanceConfig, now: Instant) {
        self.turns = RoleAdmin::balancing(terms, now);
    }

    /// Also serves `/metrics` at this address.
    pub fn open_metrics_port(&mut self, address: SocketAddr) -> io::Result<()> {
        let listener = self.reactor.listen(&Address::Tcp(address), SCRAPERS_MAX)?;
        self.scrapers = Some((listener, Connections::default()));
        Ok(())
    }

    /// The address of the port that serves only `/metrics`.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.scrapers.as_ref().and_then(|(listener, _)| self.reactor.local_address(*listener))
    }

    /// Also uses the workers that have entries in this etcd. `names` is needed if a host of etcd
    /// has a name.
    pub fn watch(&mut self, etcd: RegistryClient<EtcdView>, names: Option<Resolver>) {
        self.etcd = Some((etcd, names));
    }

    /// The address of the listener.
    pub fn address(&self) -> Option<SocketAddr> {
        self.reactor.local_address(self.listener)
    }

    /// Panics if a table of the service contradicts itself or another one.
    pub fn invariants(&self) {
        self.requests.invariants(&self.pool);
        self.connections.invariants();
        let mut clients = self.requests.clients();
        assert!(clients.all(|conn| self.connections.owns(conn)), "each request has its client");
    }

    /// Whether the router holds nothing of any request.
    ///
    /// # Errors
    /// What it holds.
    pub fn check_idle(&self) -> Result<(), String> {
        match (self.requests.count(), self.fanout.is_idle()) {
            (0, true) => self.connections.check_idle().and_then(|()| self.pool.check_idle()),
            (_, false) => Err("requests to all workers".into()),
            (requests, _) => Err(format!("{requests} requests")),
        }
    }

    /// The first half of a turn: sends the queued bytes. Returns the end of the wait.
    pub fn prepare_wait(&mut self) -> Instant {
        let due = self.requests.next_due();
        let deadline = due.map_or(self.next_tick, |due| due.min(self.next_tick));
        self.reactor.prepare(Some(deadline)).unwrap_or(deadline)
    }

    /// The second half of a turn: waits until `until` at most, and handles what has come. Returns
    /// an outcome if the service has ended.
    ///
    /// # Errors
    /// The wait failed.
    pub fn finish_wait(&mut self, until: Instant) -> io::Result<Option<DrainOutcome>> {
        self.reactor.wait(Some(until))?;
        Ok(self.turn(self.reactor.now()))
    }

    /// Runs until a drain has ended.
    pub fn run(mut self) -> io::Result<DrainOutcome> {
        loop {
            let until = self.prepare_wait();
            if let Some(end) = self.finish_wait(until)? {
                return Ok(end);
            }
            let (passed, served) = (self.requests.take_passed(), self.requests.served());
            if let Some(time) = self.pace.rest(passed, served, self.reactor.now()) {
                self.reactor.flush_and_sleep(time);
            }
        }
    }

    fn turn(&mut self, now: Instant) -> Option<DrainOutcome> {
        while let Some(event) = self.reactor.next_event() {
            match event {
                Event::Terminate if self.drain.signal() => return Some(Drain::cut(self.left())),
                Event::Terminate => self.drain(now),
                Event::Hangup => {
                    let fresh = self.reload.all();
                    self.renew(fresh, now);
                }
                event => self.take(event, now),
            }
        }
        self.pool.resolve(now);
        let is_tick = now >= self.next_tick;
        if is_tick {
            self.next_tick = now + TICK;
            let fresh = self.reload.changed(now);
            self.renew(fresh, now);
            self.pool.expire(&mut self.reactor, now);
            if let Some((etcd, names)) = &mut self.etcd {
                if let Some(names) = names {
                    while names.expire(now).or_else(|| names.poll(now)).is_some() {}
                }
                etcd.step(names, &mut self.reactor, now);
            }
            self.paths.workers().expire(&mut self.pool, &mut self.reactor, now);
            self.paths.workers().follow_roles(&mut self.pool, &mut self.reactor, now);
            self.pool.probe(&mut self.reactor, now);
            if !self.drain.is_begun() {
                let (_, (_, turns), _, mut cx) = self.split(now);
                turns.poll_balancer(&mut cx);
            }
            self.connections.expire(&mut self.reactor, now);
            if let Some((_, scrapers)) = &mut self.scrapers {
                scrapers.expire(&mut self.reactor, now);
            }
        }
        let (requests, _, _, mut cx) = self.split(now);
        requests.try_again(&mut cx);
        requests.admit(&mut cx);
        self.settle(now);
        if is_tick && cfg!(debug_assertions) {
            self.requests.invariants(&self.pool);
        }
        self.drained(now)
    }

    fn take(&mut self, event: Event, now: Instant) {
        if let Some((etcd, _)) = self.etcd.as_mut().filter(|(etcd, _)| etcd.owns(&event)) {
            etcd.handle(event, &mut self.reactor, now);
            let view = etcd.task();
            return self.paths.workers().follow(view, &mut self.pool, &mut self.reactor, now);
        }
        let is_scrapers = |(listener, scrapers): &(ListenerId, Connections)| match event {
            Event::Accepted { listener: by, .. } => by == *listener,
            Event::Received(conn)
            | Event::Eof(conn)
            | Event::Drained(conn)
            | Event::Closed { conn, .. } => scrapers.owns(conn),
            _ => false,
        };
        if self.scrapers.as_ref().is_some_and(is_scrapers) {
            return self.scrape(event, now);
        }
        if !self.pool.handle(&mut self.reactor, event, now) {
            self.connections.handle(&mut self.reactor, event, now);
            if let Event::Drained(client) = event {
                let (requests, _, _, mut cx) = self.split(now);
                requests.drained(client, &mut cx);
            }
        }
        self.settle(now);
    }

    /// Handles an event of the port that serves only `/metrics`.
    fn scrape(&mut self, event: Event, now: Instant) {
        let Some((listener, mut scrapers)) = self.scrapers.take() else { return };
        scrapers.handle(&mut self.reactor, event, now);
        while let Some(incoming) = scrapers.poll_event() {
            if let ClientEvent::Request(client, request) = incoming {
                let reply = self.paths.scrape(&request, &mut self.pool);
                scrapers.send_response(&mut self.reactor, client, &reply.answer(), now);
            }
        }
        self.scrapers = Some((listener, scrapers));
    }

    /// Handles all events that follow from the last one, until none is left.
    fn settle(&mut self, now: Instant) {
        loop {
            let (requests, (fanout, turns), paths, mut cx) = self.split(now);
            if let Some(news) = cx.pool.poll() {
                match news.owner {
                    Owner::Lead(client) => {
                        requests.handle_lead_event(client, news.conn, news.event, &mut cx)
                    }
                    Owner::Prefill(client) => {
                        requests.handle_prefill_event(client, news.conn, news.event, &mut cx)
                    }
                    Owner::PrefillFirst(client) => {
                        requests.handle_prefill_first_event(client, news.conn, news.event, &mut cx)
                    }
                    Owner::Fanout(client) => {
                        fanout.handle_call_event(client, news.conn, &news.event, &mut cx)
                    }
                    Owner::RoleChange(client) => {
                        turns.handle_call_event(client, news.conn, &news.event, &mut cx)
                    }
                    Owner::Balance => turns.handle_balancer_event(news.conn, &news.event, &mut cx),
                    Owner::IdentityQuery | Owner::Probe | Owner::Report | Owner::Detached => {}
                }
            } else if let Some(incoming) = cx.connections.poll_event() {
                match incoming {
                    ClientEvent::Request(client, request) => {
                        paths.serve(client, *request, requests, (fanout, turns), &mut cx);
                    }
                    ClientEvent::Disconnected(client) => {
                        requests.handle_disconnect(client, &mut cx);
                        fanout.handle_disconnect(client, &mut cx);
                        turns.handle_disconnect(client, &mut cx);
                    }
                }
            } else if self.paths.is_draining() {
                return self.drain(now);
            } else {
                return;
            }
        }
    }

    fn split(
        &mut self,
        now: Instant,
    ) -> (&mut ProxiedRequests, (&mut Fanout, &mut RoleAdmin), &mut RouterRoutes, RouterContext<'_>)
    {
        let cx = RouterContext {
            reactor: &mut self.reactor,
            connections: &mut self.connections,
            pool: &mut self.pool,
            now,
        };
        (&mut self.requests, (&mut self.fanout, &mut self.turns), &mut self.paths, cx)
    }

    /// From now on, refuses new requests. The port stays open until the end, so that clients get
    /// the refusal.
    fn drain(&mut self, now: Instant) {
        if !self.drain.begin(now) {
            return;
        }
        event!(Info, "router", "draining: no new requests, those that run are finished");
        // Queued answers must also arrive.
        self.reactor.flush_until(now + DRAIN_TIME_MAX);
        self.paths.drain();
        self.connections.drain();
    }

    fn drained(&mut self, now: Instant) -> Option<DrainOutcome> {
        self.drain.poll_outcome(self.left(), now)
    }

    fn left(&self) -> RemainingWork {
        RemainingWork {
            busy: !(self.requests.is_idle() && self.fanout.is_idle() && self.turns.is_idle()),
            queued: self.reactor.queued_total(),
            clients: self.connections.count(),
            unconfirmed: 0,
        }
    }
}
