//! The loop of `ctl`. Each turn connects sockets, engines, movers and the tokeniser.
//!
//! Owns: the table of requests, the hand-off, and the client that asks prefill. Events of the
//! engine about requests go to the table, and those about transfers to the hand-off. Thread: `ctl`,
//! which parks only in the reactor. Other threads wake it through its bell. Not here: requests
//! (`requests`), small endpoints (`routes`).

mod checks;

use crate::cause::Cause;
use crate::config::ServerConfig;
use crate::config::secret::Secret;
use crate::http::HttpLimits;
use crate::ids::Role;
use crate::limits::{DRAIN_TIME_MAX, HTTP_CONNECTIONS_MAX};
use crate::link::control::ControlLinks;
use crate::link::handoff::Handoff;
use crate::net::{Address, Authorities, Credentials, Event, ListenerId, Reactor};
use crate::obs::log::event;
use crate::peer::bootstrap::BootstrapServer;
use crate::registry::registrar::Registrar;
use crate::sched::masks::MaskClient;
use crate::sched::messages::{self, EngineCommand, EngineEvent, TransferEvent};
use crate::server::connections::{ClientEvent, Connections};
use crate::server::drain::{Drain, DrainOutcome, RemainingWork};
use crate::server::key_limits::KeyLimits;
use crate::server::reload::{Reload, ReloadedFile, keyring};
use crate::server::role_change::{RoleChange, RoleChangeAction};
use crate::stdx::event_count::EventCount;
use crate::transfer::manager::rooms::Slot;
use crate::worker::metrics::WorkerMetrics;
use crate::worker::prefill_client::PrefillClient;
use crate::worker::progress::EngineWatchdog;
use crate::worker::requests::{Context, Placement, RequestTable};
use crate::worker::routes::{DisaggregationMode, WorkerRoutes};
use crate::worker::telemetry::Telemetry;
use crossbeam_channel::Receiver;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

/// Time between two checks for overdue work.
const TICK: Duration = Duration::from_millis(100);

/// Why [`WorkerService::run`] returns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RunOutcome {
    /// The process must end.
    Ended(DrainOutcome),
    /// The workers are idle, and workers of another role must replace them. The caller calls
    /// [`WorkerService::remove_workers`], [`WorkerService::set_workers`] and
    /// [`WorkerService::finish_role_change`]; if the change fails, it calls
    /// [`WorkerService::fail_role_change`].
    ChangeRole(Role),
    /// The role change failed. The workers stay, and the caller must register them again.
    KeepRole,
}

/// The parts of a process's workers that `ctl` uses.
#[derive(Debug)]
pub struct Workers {
    /// The workers and the hand-off protocol.
    pub handoff: Handoff<EngineCommand>,
    /// Their counters.
    pub metrics: Vec<Arc<WorkerMetrics>>,
    /// Their figures.
    pub telemetry: Telemetry,
    /// Events of their engine.
    pub events: Receiver<messages::EngineEvent>,
    /// The engine's counter of progress.
    pub progress: Arc<AtomicU64>,
    /// The masks of requests with a grammar.
    pub masks: MaskClient,
}

/// All that `ctl` runs.
#[derive(Debug)]
pub struct WorkerService {
    reactor: Reactor,
    listener: ListenerId,
    connections: Connections,
    requests: RequestTable,
    handoff: Handoff<EngineCommand>,
    prefill_client: PrefillClient,
    routes: WorkerRoutes,
    control_links: Option<ControlLinks>,
    bootstrap: Option<BootstrapServer>,
    registrar: Option<Registrar>,
    events: Receiver<messages::EngineEvent>,
    progress: EngineWatchdog,
    bell: Arc<EventCount>,
    drain: Drain,
    reload: Reload,
    /// CA certificates for servers with TLS.
    authorities: Option<Authorities>,
    /// The cluster keys, if they were reloaded.
    cluster_keys: Option<Vec<Secret>>,
    next_tick: Instant,
}

impl WorkerService {
    /// Listens on `address`. [`WorkerService::run`] serves.
    ///
    /// # Errors
    /// The signals cannot be watched, or the address cannot be used.
    pub fn new(
        mut reactor: Reactor,
        address: SocketAddr,
        (requests, handoff): (RequestTable, Handoff<EngineCommand>),
        routes: WorkerRoutes,
        (events, progress): (Receiver<messages::EngineEvent>, Arc<AtomicU64>),
        bell: Arc<EventCount>,
        now: Instant,
    ) -> io::Result<WorkerService> {
        reactor.watch_signals()?;
        let listener = reactor.listen(&Address::Tcp(address), HTTP_CONNECTIONS_MAX)?;
        Ok(WorkerService {
            reactor,
            listener,
            connections: Connections::default(),
            requests,
            handoff,
            prefill_client: PrefillClient::default(),
            routes,
            control_links: None,
            bootstrap: None,
            registrar: None,
            events,
            progress: EngineWatchdog::new(progress, now),
            bell,
            drain: Drain::default(),
            reload: Reload::nothing(now),
            authorities: None,
            cluster_keys: None,
            next_tick: now + TICK,
        })
    }

    /// Sets the maximum size of a body, plus `added` bytes for routers, the origins of web pages
    /// that can read answers, and the limits of API keys.
    pub fn within(self, server: &ServerConfig, added: usize) -> WorkerService {
        let limits = HttpLimits { body: server.body_max + added, ..HttpLimits::default() };
        let connections = Connections::with_limits(limits)
            .allowing(server.allowed_origins.clone())
            .limiting(KeyLimits::of(server));
        WorkerService { connections, ..self }
    }

    /// From now on, serves HTTPS with these credentials.
    pub fn secure(&mut self, credentials: Credentials) {
        self.reactor.secure(self.listener, credentials);
    }

    /// Sets the CA certificates for registries and prefill workers with TLS.
    pub fn trust(&mut self, authorities: Authorities) {
        if let Some(registrar) = &mut self.registrar {
            registrar.trust(&authorities);
        }
        self.prefill_client.trust(authorities.clone());
        self.authorities = Some(authorities);
    }

    /// Reloads these files when they change.
    ///
    /// # Errors
    /// The handler of SIGHUP cannot be installed.
    pub fn renew_from(&mut self, reload: Reload) -> io::Result<()> {
        self.reload = reload.watched(&mut self.reactor)?;
        Ok(())
    }

    fn renew(&mut self, fresh: Vec<ReloadedFile>) {
        for fresh in fresh {
            match fresh {
                ReloadedFile::Credentials(credentials) => self.secure(credentials),
                ReloadedFile::Authorities(authorities) => self.trust(authorities),
                ReloadedFile::ApiKeys(keys) => {
                    self.connections.key_limits.set_keys(&keys);
                    self.routes.keys().set_api(&keys);
                }
                ReloadedFile::AdminKeys(keys) => self.routes.keys().admin = keys,
                ReloadedFile::ClusterKeys(secrets) => {
                    let Ok(keys) = keyring(&secrets) else { continue };
                    self.routes.set_cluster_keys(&keys);
                    if let Some(registrar) = &mut self.registrar {
                        registrar.set_key(secrets.first());
                    }
                    if let Some(peers) = &mut self.control_links {
                        peers.set_keys(keys);
                    }
                    if let Some(bootstrap) = &mut self.bootstrap {
                        bootstrap.set_keys(secrets.clone());
                    }
                    self.cluster_keys = Some(secrets);
                }
            }
        }
    }

    /// Joins a cluster: links to workers of other processes, and a bootstrap registry on a prefill
    /// worker.
    pub fn join(&mut self, peers: ControlLinks, bootstrap: Option<BootstrapServer>) {
        self.control_links = Some(peers);
        self.bootstrap = bootstrap;
    }

    /// From now on, keeps the worker registered.
    pub fn set_registrar(&mut self, mut registrar: Registrar) {
        if let Some(authorities) = &self.authorities {
            registrar.trust(authorities);
        }
        if let Some(registrar) = self.registrar.replace(registrar) {
            registrar.close(&mut self.reactor);
        }
    }

    /// The cluster keys, if they differ from those of the start.
    pub fn cluster_keys(&self) -> Option<&[Secret]> {
        self.cluster_keys.as_deref()
    }

    /// From now on, the workers' role can change.
    pub fn set_role_change(&mut self, role_change: RoleChange) {
        self.routes.set_role_change(role_change);
    }

    /// Removes the workers: drops their events, and closes their links, their bootstrap registry
    /// and its port. The caller must not serve before [`WorkerService::set_workers`].
    pub fn remove_workers(&mut self) {
        self.requests.remove_workers();
        let entropy = self.reactor.entropy().fork("handoff");
        self.handoff = Handoff::new(Vec::new(), self.handoff.offer().clone(), entropy);
        self.prefill_client.close(&mut self.reactor);
        if let Some(peers) = self.control_links.take() {
            peers.close(&mut self.reactor);
        }
        if let Some(bootstrap) = self.bootstrap.take() {
            bootstrap.close(&mut self.reactor);
        }
        if let Some(registrar) = self.registrar.take() {
            registrar.close(&mut self.reactor);
        }
    }

    /// Sets new workers.
    pub fn set_workers(
        &mut self,
        workers: Workers,
        placement: Placement,
        mode: DisaggregationMode,
        now: Instant,
    ) {
        let Workers { handoff, metrics, telemetry, events, progress, masks } = workers;
        self.requests.set_workers(placement, metrics, masks);
        self.handoff = handoff;
        self.routes.set_mode(mode, telemetry);
        (self.events, self.progress) = (events, EngineWatchdog::new(progress, now));
    }

    /// Ends a role change that succeeded, or that failed for this reason and left the workers in
    /// their old role. `stood_still` is the time without service.
    pub fn finish_role_change(&mut self, outcome: Result<(), String>, stood_still: Duration) {
        let Some(role_change) = self.routes.role_change() else { return };
        let before = role_change.role();
        if let Err(why) = &outcome {
            log_failed_change(before, why);
        }
        role_change.finish_change(outcome);
        let seconds = format!("{:.3}", stood_still.as_secs_f64());
        let after = role_change.role();
        event!(Info, "ctl", "role changed", was = before, is = after, seconds = seconds);
    }

    /// Ends a role change that failed for this reason before it changed anything.
    pub fn fail_role_change(&mut self, why: String) {
        let Some(role_change) = self.routes.role_change() else { return };
        log_failed_change(role_change.role(), &why);
        role_change.fail_change(why);
    }

    /// The reactor, so that the caller can open further ports.
    pub fn reactor(&mut self) -> &mut Reactor {
        &mut self.reactor
    }

    /// The address on which the service listens.
    pub fn address(&self) -> Option<SocketAddr> {
        self.reactor.local_address(self.listener)
    }

    /// Runs until a drain has ended, or the workers' role changes.
    pub fn run(&mut self) -> io::Result<RunOutcome> {
        // The time of the start-up does not count against the engine.
        self.progress.begin(self.reactor.now());
        loop {
            let until = self.prepare_wait();
            if let Some(outcome) = self.finish_wait(until)? {
                return Ok(outcome);
            }
        }
    }

    /// The first half of a turn: announces the wait, and sends the queued bytes. Returns the end of
    /// the wait.
    pub fn prepare_wait(&mut self) -> Instant {
        self.bell.prepare_wait();
        let deadline = if self.has_events() { self.reactor.now() } else { self.next_tick };
        self.reactor.prepare(Some(deadline)).unwrap_or(deadline)
    }

    /// The second half of a turn: waits until `until` at most, and handles what has come. Returns
    /// an outcome if the service has ended.
    ///
    /// # Errors
    /// The wait failed.
    pub fn finish_wait(&mut self, until: Instant) -> io::Result<Option<RunOutcome>> {
        self.reactor.wait(Some(until))?;
        self.bell.cancel_wait();
        Ok(self.turn(self.reactor.now()))
    }

    /// Whether an event waits. Called between the arming of the bell and the wait, so that no event
    /// is missed.
    fn has_events(&self) -> bool {
        !self.events.is_empty()
            || self.requests.has_events()
            || self.handoff.has_events()
            || self.prefill_client.has_events()
            || self.control_links.as_ref().is_some_and(ControlLinks::has_events)
    }

    fn turn(&mut self, now: Instant) -> Option<RunOutcome> {
        while let Some(event) = self.reactor.next_event() {
            match event {
                Event::Terminate if self.drain.signal() => {
                    // KV that is kept for decode does not count, because its client has the answer.
                    let busy = self.requests.has_waiting_client();
                    return Some(RunOutcome::Ended(Drain::cut(RemainingWork {
                        busy,
                        ..self.left()
                    })));
                }
                Event::Terminate => self.drain(now),
                Event::Hangup => {
                    let fresh = self.reload.all();
                    self.renew(fresh);
                }
                event => self.dispatch(event, now),
            }
        }
        self.serve(now);
        while let Ok(event) = self.events.try_recv() {
            self.handle_engine_event(event, now);
        }
        self.handoff.step(now);
        let (requests, _, mut cx) = self.parts(now);
        requests.step(&mut cx);
        if now >= self.next_tick {
            self.next_tick = now + TICK;
            self.tick(now);
        }
        // An answer can lead to a pipelined request, or to the end of a connection if its client
        // does not read.
        while !self.connections.is_settled() {
            self.serve(now);
        }
        self.run_remote_actions(now);
        match self.routes.is_changing() {
            true => self.changed(now),
            false => self.drained(now).map(RunOutcome::Ended),
        }
    }

    /// The table of requests, the routes, and the context for both.
    fn parts(&mut self, now: Instant) -> (&mut RequestTable, &mut WorkerRoutes, Context<'_>) {
        let WorkerService {
            reactor, connections, requests, routes, handoff, prefill_client, ..
        } = self;
        (requests, routes, Context { reactor, connections, handoff, prefill_client, now })
    }

    fn handle_engine_event(&mut self, event: EngineEvent, now: Instant) {
        match event {
            EngineEvent::Request(event) => {
                let (requests, _, mut cx) = self.parts(now);
                requests.handle_event(event, &mut cx);
            }
            EngineEvent::Transfer(event) => match event {
                TransferEvent::Expecting { worker, slot, generation, tokens, .. } => {
                    let slot = Slot { id: slot, generation };
                    self.handoff.handle_expecting(worker, slot, tokens, now);
                }
                TransferEvent::Computed { worker, slot, generation, request, cached_tokens } => {
                    let slot = Slot { id: slot, generation };
                    self.handoff.handle_computed(worker, slot, now);
                    let (requests, _, mut cx) = self.parts(now);
                    requests.end_kept_choice(request, cached_tokens, &mut cx);
                }
            },
        }
    }

    /// Runs the actions of the hand-off and of the prefill client that need other processes.
    fn run_remote_actions(&mut self, now: Instant) {
        let Some(links) = &mut self.control_links else { return };
        while let Some((name, address)) = links.poll_resolved(now) {
            self.prefill_client.resolved(&name, &address, &mut self.reactor, now);
            self.handoff.resolved(&name, address, now);
        }
        self.prefill_client.dial_queued(links.lookup_mut(), &mut self.reactor, now);
        links.run_remote_actions(&mut self.reactor, &mut self.handoff, now);
    }

    fn dispatch(&mut self, event: Event, now: Instant) {
        if self.prefill_client.owns(&event) {
            return self.prefill_client.handle(event, &mut self.reactor, now);
        }
        if let Some(registrar) = self.registrar.as_mut().filter(|registrar| registrar.owns(&event))
        {
            return registrar.handle(event, &mut self.reactor, now);
        }
        let handoff = &mut self.handoff;
        match (&mut self.control_links, &mut self.bootstrap) {
            (Some(peers), _) if peers.owns(&event) => {
                peers.handle(event, &mut self.reactor, handoff, now)
            }
            (_, Some(bootstrap)) if bootstrap.owns(&event) => {
                bootstrap.handle(event, &mut self.reactor, now)
            }
            _ => self.connections.handle(&mut self.reactor, event, now),
        }
    }

    /// Makes a worker with a hung engine look dead to routers and peers.
    fn watch(&mut self, now: Instant) {
        let hangs = self.progress.check_hang(now);
        if let Some(time) = self.progress.take_pause() {
            let seconds = format!("{:.1}", time.as_secs_f64());
            event!(Warn, "ctl", "this process, or its host, was paused", seconds = seconds);
            self.drain.exclude_pause(time);
            self.routes.role_change().into_iter().for_each(|change| change.exclude_pause(time));
        }
        self.routes.set_hanging(hangs);
        if let Some(peers) = &mut self.control_links {
            peers.show_health(!hangs);
        }
        if let Some(registrar) = &mut self.registrar {
            registrar.step(hangs, &mut self.reactor, now);
        }
    }

    fn tick(&mut self, now: Instant) {
        self.watch(now);
        let fresh = self.reload.changed(now);
        self.renew(fresh);
        self.routes.log_shortages(now);
        self.handoff.expire(now);
        let (requests, _, mut cx) = self.parts(now);
        requests.expire(&mut cx);
        self.prefill_client.expire(&mut self.reactor, now);
        self.connections.expire(&mut self.reactor, now);
        if let Some(peers) = &mut self.control_links {
            peers.expire(&mut self.reactor, &mut self.handoff, now);
        }
        if let Some(bootstrap) = &mut self.bootstrap {
            bootstrap.expire(&mut self.reactor, now);
        }
    }

    fn serve(&mut self, now: Instant) {
        while let Some(incoming) = self.connections.poll_event() {
            match incoming {
                ClientEvent::Request(conn, request) => {
                    let was_changing = self.routes.is_changing();
                    let (requests, routes, mut cx) = self.parts(now);
                    routes.serve(conn, &request, requests, &mut cx);
                    if self.routes.is_draining() {
                        self.drain(now);
                    } else if !was_changing && self.routes.is_changing() {
                        self.withdraw(now);
                    }
                }
                ClientEvent::Disconnected(conn) => {
                    let (requests, _, mut cx) = self.parts(now);
                    requests.handle_disconnect(conn, &mut cx);
                }
            }
        }
    }

    /// From now on, refuses new requests. The port stays open until the end, so that clients get
    /// the refusal.
    fn drain(&mut self, now: Instant) {
        if !self.drain.begin(now) {
            return;
        }
        event!(Info, "ctl", "draining: no new requests, those that run are finished");
        if self.routes.is_changing() {
            // This is not an error, because a drain ends any role change.
            let role_change =
                self.routes.role_change().map(|role_change| (role_change.role(), role_change));
            if let Some((role, role_change)) = role_change {
                event!(
                    Info,
                    "ctl",
                    "role change failed: the worker keeps its role",
                    role = role,
                    why = "a drain has begun"
                );
                role_change.fail_change("a drain has begun".into());
            }
        }
        // Answers in the send queues must also arrive.
        self.reactor.flush_until(now + DRAIN_TIME_MAX);
        self.routes.drain();
        self.connections.drain();
        if let Some(peers) = &mut self.control_links {
            peers.drain(&mut self.reactor, &mut self.handoff, now);
        }
        self.withdraw(now);
    }

    /// Removes the worker from registries.
    fn withdraw(&mut self, now: Instant) {
        if let Some(registrar) = &mut self.registrar {
            registrar.withdraw(&mut self.reactor, now);
        }
    }

    /// Takes the next step of a role change. Returns an outcome when the change applies or is given
    /// up.
    fn changed(&mut self, now: Instant) -> Option<RunOutcome> {
        self.refuse_early(now);
        let is_out = self.registrar.as_mut().is_none_or(Registrar::is_over);
        let busy = !self.requests.is_free() || !is_out;
        let left = RemainingWork { busy, ..self.left() };
        match self.routes.role_change()?.poll_action(left, now)? {
            RoleChangeAction::Apply(role) => Some(RunOutcome::ChangeRole(role)),
            RoleChangeAction::GiveUp => {
                let work = self.requests.describe_work();
                let why = format!(
                    "the work did not finish in time; left: {work} registry_entry={}",
                    !is_out
                );
                self.fail_role_change(why);
                Some(RunOutcome::KeepRole)
            }
        }
    }

    /// Refuses messages for unknown rooms: a room that has no request now will never get one.
    fn refuse_early(&mut self, now: Instant) {
        if self.requests.is_placed() {
            self.handoff.refuse_early(Cause::Draining, now);
        }
    }

    fn drained(&mut self, now: Instant) -> Option<DrainOutcome> {
        if !self.drain.is_begun() {
            return None;
        }
        self.refuse_early(now);
        let is_out = self.registrar.as_mut().is_none_or(Registrar::is_over);
        let left = self.left();
        self.drain.poll_outcome(RemainingWork { busy: left.busy || !is_out, ..left }, now)
    }

    /// The work that remains for clients and peers.
    fn left(&self) -> RemainingWork {
        RemainingWork {
            busy: !self.requests.is_idle(),
            queued: self.reactor.queued_total(),
            clients: self.connections.count(),
            unconfirmed: self.handoff.unconfirmed(),
        }
    }
}

fn log_failed_change(role: Role, why: &str) {
    event!(Error, "ctl", "role change failed: the worker keeps its role", role = role, why = why);
}

#[cfg(test)]
#[path = "service_tests.rs"]
mod tests;
