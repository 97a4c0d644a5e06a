//! The loop of `ctl`: sockets, engines, movers and the tokeniser meet here, one turn after the other.
//!
//! Thread: `ctl`. Parks in the reactor alone; everybody who has news rings its bell. Not here: what a request
//! means (`generations`), small endpoints (`routes`).

use crate::cause::Cause;
use crate::config::secret::Secret;
use crate::front::bootstrap::Bootstrap;
use crate::front::connections::{Connections, Incoming};
use crate::front::drain::{Drain, End, Left};
use crate::front::generations::{Generations, Placement, Way};
use crate::front::handoff::Handoff;
use crate::front::http::Limits;
use crate::front::peers::Peers;
use crate::front::progress::Progress;
use crate::front::registrar::Registrar;
use crate::front::reload::{Fresh, Reload, keyring};
use crate::front::routes::{Mode, Routes};
use crate::front::telemetry::Telemetry;
use crate::front::turning::{Next, Turning};
use crate::limits::{DRAIN_TIME_MAX, HTTP_CONNECTIONS_MAX};
use crate::net::{Address, Authorities, Credentials, Event, ListenerId, Reactor};
use crate::obs::log::event;
use crate::obs::metrics::WorkerMetrics;
use crate::sched::mailbox;
use crate::stdx::bell::Bell;
use crate::wire::message::Role;
use crossbeam_channel::Receiver;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

/// How often overdue things are looked for.
const TICK: Duration = Duration::from_millis(100);

/// Why [`Service::run`] has returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The process is to end.
    Ended(End),
    /// The workers are done, and others are to come in their place: [`Service::dismiss`], then [`Service::take_on`] and
    /// [`Service::turned`]; or [`Service::stayed`].
    Turns(Role),
    /// They stay after all: what was taken back is to be entered again.
    Stays,
}

/// The workers of a process, as far as `ctl` knows them.
#[derive(Debug)]
pub struct Workers {
    /// They and their protocol.
    pub handoff: Handoff,
    /// Their counters.
    pub metrics: Vec<Arc<WorkerMetrics>>,
    /// Their figures.
    pub telemetry: Telemetry,
    /// What their engine says.
    pub events: Receiver<mailbox::Event>,
    /// What it counts.
    pub progress: Arc<AtomicU64>,
}

/// What `ctl` runs.
#[derive(Debug)]
pub struct Service {
    reactor: Reactor,
    listener: ListenerId,
    connections: Connections,
    generations: Generations,
    routes: Routes,
    peers: Option<Peers>,
    bootstrap: Option<Bootstrap>,
    registrar: Option<Registrar>,
    events: Receiver<mailbox::Event>,
    progress: Progress,
    bell: Arc<Bell>,
    drain: Drain,
    reload: Reload,
    /// Who vouches for servers that are reached over TLS.
    authorities: Option<Authorities>,
    /// The cluster's keys, since they have changed.
    cluster_keys: Option<Vec<Secret>>,
    next_tick: Instant,
}

impl Service {
    /// Listens; nothing is served before [`Service::run`].
    pub fn new(
        mut reactor: Reactor,
        address: SocketAddr,
        generations: Generations,
        routes: Routes,
        (events, progress): (Receiver<mailbox::Event>, Arc<AtomicU64>),
        bell: Arc<Bell>,
        now: Instant,
    ) -> io::Result<Service> {
        reactor.watch_signals()?;
        let listener = reactor.listen(&Address::Tcp(address), HTTP_CONNECTIONS_MAX)?;
        Ok(Service {
            reactor,
            listener,
            connections: Connections::default(),
            generations,
            routes,
            peers: None,
            bootstrap: None,
            registrar: None,
            events,
            progress: Progress::new(progress, now),
            bell,
            drain: Drain::default(),
            reload: Reload::nothing(now),
            authorities: None,
            cluster_keys: None,
            next_tick: now + TICK,
        })
    }

    /// Takes bodies of so many bytes.
    pub fn within(self, body_max: usize) -> Service {
        let limits = Limits { body: body_max, ..Limits::default() };
        Service { connections: Connections::within(limits), ..self }
    }

    /// Speaks HTTPS from now on, as this.
    pub fn secure(&mut self, credentials: Credentials) {
        self.reactor.secure(self.listener, credentials);
    }

    /// Registries and prefill workers that are reached over TLS must be vouched for by these from now on.
    pub fn trust(&mut self, authorities: Authorities) {
        if let Some(registrar) = &mut self.registrar {
            registrar.trust(&authorities);
        }
        if let Some(peers) = &mut self.peers {
            peers.trust(authorities.clone());
        }
        self.authorities = Some(authorities);
    }

    /// Uses these files as they change from now on.
    ///
    /// # Errors
    /// The signal that says so cannot be had.
    pub fn renew_from(&mut self, reload: Reload) -> io::Result<()> {
        self.reload = reload.watched(&mut self.reactor)?;
        Ok(())
    }

    fn renew(&mut self, fresh: Vec<Fresh>) {
        for fresh in fresh {
            match fresh {
                Fresh::Credentials(credentials) => self.secure(credentials),
                Fresh::Authorities(authorities) => self.trust(authorities),
                Fresh::ApiKeys(keys) => self.routes.set_keys(keys),
                Fresh::ClusterKeys(secrets) => {
                    let Ok(keys) = keyring(&secrets) else { continue };
                    self.routes.set_cluster_keys(&keys);
                    if let Some(registrar) = &mut self.registrar {
                        registrar.set_key(secrets.first());
                    }
                    if let Some(peers) = &mut self.peers {
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

    /// Takes part in a cluster: links to workers of other processes, and a registry on a prefill worker.
    pub fn join(&mut self, mut peers: Peers, bootstrap: Option<Bootstrap>) {
        if let Some(authorities) = &self.authorities {
            peers.trust(authorities.clone());
        }
        self.peers = Some(peers);
        self.bootstrap = bootstrap;
    }

    /// Is found in registries from now on.
    pub fn enrol(&mut self, mut registrar: Registrar) {
        if let Some(authorities) = &self.authorities {
            registrar.trust(authorities);
        }
        if let Some(registrar) = self.registrar.replace(registrar) {
            registrar.close(&mut self.reactor);
        }
    }

    /// The cluster's keys, where they are others by now than those of the start.
    pub fn cluster_keys(&self) -> Option<&[Secret]> {
        self.cluster_keys.as_deref()
    }

    /// The workers' role can be changed from now on.
    pub fn set_turning(&mut self, turning: Turning) {
        self.routes.set_turning(turning);
    }

    /// The workers are gone: what they say is dropped, links, registry and their ports are closed. Nothing may be served
    /// before [`Service::take_on`].
    pub fn dismiss(&mut self) {
        self.generations.dismiss();
        if let Some(peers) = self.peers.take() {
            peers.close(&mut self.reactor);
        }
        if let Some(bootstrap) = self.bootstrap.take() {
            bootstrap.close(&mut self.reactor);
        }
        if let Some(registrar) = self.registrar.take() {
            registrar.close(&mut self.reactor);
        }
    }

    /// Others have come in their place.
    pub fn take_on(&mut self, workers: Workers, placement: Placement, mode: Mode, now: Instant) {
        let Workers { handoff, metrics, telemetry, events, progress } = workers;
        self.generations.take_on(placement, handoff, metrics);
        self.routes.tell_of(mode, telemetry);
        (self.events, self.progress) = (events, Progress::new(progress, now));
    }

    /// A change of role is over: it has come about, or for this reason the workers are once more what they were. For so
    /// long nobody was served.
    pub fn turned(&mut self, outcome: Result<(), String>, stood_still: Duration) {
        let Some(turning) = self.routes.turning() else { return };
        let before = turning.role();
        if let Err(why) = &outcome {
            event!(Error, "ctl", "keeps its role", role = before, why = why);
        }
        turning.turned(outcome);
        let seconds = format!("{:.3}", stood_still.as_secs_f64());
        event!(
            Info,
            "ctl",
            "is put together anew",
            was = before,
            is = turning.role(),
            seconds = seconds
        );
    }

    /// It does not come about, for this reason, and nothing was done for it.
    pub fn stayed(&mut self, why: String) {
        let Some(turning) = self.routes.turning() else { return };
        event!(Error, "ctl", "keeps its role", role = turning.role(), why = why);
        turning.stayed(why);
    }

    /// Sockets, to listen on further ports.
    pub fn reactor(&mut self) -> &mut Reactor {
        &mut self.reactor
    }

    /// Where it listens.
    pub fn address(&self) -> Option<SocketAddr> {
        self.reactor.local_address(self.listener)
    }

    /// Turns until a drain has ended, or the workers' role changes.
    pub fn run(&mut self) -> io::Result<Outcome> {
        // Nobody has looked at the engine while all was made.
        self.progress.begin(Instant::now());
        loop {
            self.bell.announce();
            let deadline = if self.has_news() { Instant::now() } else { self.next_tick };
            self.reactor.poll(Some(deadline))?;
            self.bell.dismiss();
            if let Some(outcome) = self.turn(Instant::now()) {
                return Ok(outcome);
            }
        }
    }

    /// Looked for between the bell's announcement and the wait, so that nothing is slept over.
    fn has_news(&self) -> bool {
        !self.events.is_empty()
            || self.generations.has_news()
            || self.peers.as_ref().is_some_and(Peers::has_news)
    }

    fn turn(&mut self, now: Instant) -> Option<Outcome> {
        while let Some(event) = self.reactor.next_event() {
            match event {
                Event::Terminate if self.drain.signal() => {
                    // Who keeps KV for nobody yet has answered.
                    let busy = self.generations.is_asked();
                    return Some(Outcome::Ended(Drain::cut(Left { busy, ..self.left() })));
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
        let mut way = Way { reactor: &mut self.reactor, connections: &mut self.connections, now };
        while let Ok(event) = self.events.try_recv() {
            self.generations.event(event, &mut way);
        }
        self.generations.turn(&mut way);
        if now >= self.next_tick {
            self.next_tick = now + TICK;
            self.tick(now);
        }
        // Answers may have let pipelined requests in; and who does not take them has gone.
        while !self.connections.is_settled() {
            self.serve(now);
        }
        if let Some(peers) = &mut self.peers {
            peers.serve(&mut self.reactor, self.generations.handoff_mut(), now);
        }
        match self.routes.is_changing() {
            true => self.changed(now),
            false => self.drained(now).map(Outcome::Ended),
        }
    }

    fn dispatch(&mut self, event: Event, now: Instant) {
        if let Some(registrar) = self.registrar.as_mut().filter(|registrar| registrar.owns(&event))
        {
            return registrar.handle(event, &mut self.reactor, now);
        }
        let handoff = self.generations.handoff_mut();
        match (&mut self.peers, &mut self.bootstrap) {
            (Some(peers), _) if peers.owns(&event) => {
                peers.handle(event, &mut self.reactor, handoff, now)
            }
            (_, Some(bootstrap)) if bootstrap.owns(&event) => {
                bootstrap.handle(event, &mut self.reactor, now)
            }
            _ => self.connections.handle(&mut self.reactor, event, now),
        }
    }

    /// A hung engine makes the worker look dead, to routers and to peers.
    fn watch(&mut self, now: Instant) {
        let hangs = self.progress.stands_still(now);
        if let Some(time) = self.progress.take_pause() {
            let seconds = format!("{:.1}", time.as_secs_f64());
            event!(Warn, "ctl", "this process, or its host, was paused", seconds = seconds);
        }
        self.routes.set_hanging(hangs);
        if let Some(peers) = &mut self.peers {
            peers.answer_pings(!hangs);
        }
        if let Some(registrar) = &mut self.registrar {
            registrar.turn(hangs, &mut self.reactor, now);
        }
    }

    fn tick(&mut self, now: Instant) {
        self.watch(now);
        let fresh = self.reload.changed(now);
        self.renew(fresh);
        self.routes.look(now);
        self.generations.expire(now);
        self.connections.expire(&mut self.reactor, now);
        if let Some(peers) = &mut self.peers {
            peers.expire(&mut self.reactor, self.generations.handoff_mut(), now);
        }
        if let Some(bootstrap) = &mut self.bootstrap {
            bootstrap.expire(&mut self.reactor, now);
        }
    }

    fn serve(&mut self, now: Instant) {
        while let Some(incoming) = self.connections.poll() {
            match incoming {
                Incoming::Request(conn, request) => {
                    let mut way =
                        Way { reactor: &mut self.reactor, connections: &mut self.connections, now };
                    let was_changing = self.routes.is_changing();
                    self.routes.serve(conn, &request, &mut self.generations, &mut way);
                    if self.routes.is_draining() {
                        self.drain(now);
                    } else if !was_changing && self.routes.is_changing() {
                        self.withdraw(now);
                    }
                }
                Incoming::Gone(conn) => self.generations.gone(conn, now),
            }
        }
    }

    /// Takes no new requests from now on. Who asks is told so until the end, so the port stays open.
    fn drain(&mut self, now: Instant) {
        if !self.drain.begin(now) {
            return;
        }
        event!(Info, "ctl", "draining: no new requests, those that run are finished");
        if self.routes.is_changing() {
            // Nothing is wrong: a drain is the end of any change.
            let turning = self.routes.turning().map(|turning| (turning.role(), turning));
            if let Some((role, turning)) = turning {
                event!(Info, "ctl", "keeps its role", role = role, why = "it was told to drain");
                turning.stayed("it was told to drain".into());
            }
        }
        // What was answered is to arrive as well.
        self.reactor.flush_until(now + DRAIN_TIME_MAX);
        self.routes.drain();
        self.connections.drain();
        if let Some(peers) = &mut self.peers {
            peers.drain(&mut self.reactor, self.generations.handoff_mut(), now);
        }
        self.withdraw(now);
    }

    /// Takes back what others find this worker by.
    fn withdraw(&mut self, now: Instant) {
        if let Some(registrar) = &mut self.registrar {
            registrar.withdraw(&mut self.reactor, now);
        }
    }

    /// Whether enough of its work is done that a worker may change its role.
    fn changed(&mut self, now: Instant) -> Option<Outcome> {
        self.refuse_early(now);
        let is_out = self.registrar.as_mut().is_none_or(Registrar::is_over);
        let busy = !self.generations.is_free() || !is_out;
        let left = Left { busy, ..self.left() };
        match self.routes.turning()?.look(left, now)? {
            Next::Turn(role) => Some(Outcome::Turns(role)),
            Next::GiveUp => {
                let running = self.generations.running();
                self.stayed(format!("time was up; requests that still ran: {running}"));
                Some(Outcome::Stays)
            }
        }
    }

    /// Rooms that are not known by now never will be.
    fn refuse_early(&mut self, now: Instant) {
        if self.generations.is_placed() {
            self.generations.handoff_mut().refuse_early(Cause::Draining, now);
        }
    }

    fn drained(&mut self, now: Instant) -> Option<End> {
        if !self.drain.is_begun() {
            return None;
        }
        self.refuse_early(now);
        let is_out = self.registrar.as_mut().is_none_or(Registrar::is_over);
        let left = self.left();
        self.drain.end(Left { busy: left.busy || !is_out, ..left }, now)
    }

    /// What is left for clients.
    fn left(&self) -> Left {
        Left {
            busy: !self.generations.is_idle(),
            queued: self.reactor.queued_total(),
            clients: self.connections.count(),
            unheard: self.generations.handoff().unheard(),
        }
    }
}
