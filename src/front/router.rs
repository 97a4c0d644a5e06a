//! The router's loop: clients on one side, workers on the other.
//!
//! Thread: `ctl`, the only one of a router. Not here: what a request means (`paths`), a request's way
//! (`flights`), connections to workers (`fleet`), decisions (`cluster`).

pub mod call;
pub(crate) mod failure;
pub mod fanout;
pub mod fleet;
pub mod flights;
pub mod introduction;
mod line;
mod pace;
pub mod paths;
mod relay;
mod report;
mod succession;
pub mod target;
pub mod turns;
pub mod workers;

use crate::cluster::etcd::view::View;
use crate::config::resolved::{BalanceTerms, RequestTerms};
use crate::front::connections::{Connections, Incoming};
use crate::front::drain::{Drain, End, Left};
use crate::front::errands::Errands;
use crate::front::http::Limits;
use crate::front::reload::{Fresh, Reload};
use crate::front::resolver::Resolver;
use crate::limits::{DRAIN_TIME_MAX, HTTP_CONNECTIONS_MAX, SCRAPERS_MAX};
use crate::net::{Address, Credentials, Event, ListenerId, Reactor};
use crate::obs::log::event;
use call::Owner;
use fanout::Fanout;
use fleet::Fleet;
use flights::{Flights, Way};
use pace::Pace;
use paths::Paths;
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use turns::Turns;

/// How often overdue things are looked for.
pub const TICK: Duration = Duration::from_millis(100);

/// A router.
#[derive(Debug)]
pub struct RouterService {
    reactor: Reactor,
    listener: ListenerId,
    connections: Connections,
    /// Those who read metrics on a port of their own.
    scrapers: Option<(ListenerId, Connections)>,
    fleet: Fleet,
    flights: Flights,
    fanout: Fanout,
    turns: Turns,
    paths: Paths,
    drain: Drain,
    reload: Reload,
    etcd: Option<(Errands<View>, Option<Resolver>)>,
    next_tick: Instant,
    pace: Pace,
}

impl RouterService {
    /// Listens; nothing is served before [`RouterService::run`].
    pub fn new(
        mut reactor: Reactor,
        address: SocketAddr,
        fleet: Fleet,
        flights: Flights,
        paths: Paths,
        now: Instant,
    ) -> io::Result<RouterService> {
        reactor.watch_signals()?;
        let listener = reactor.listen(&Address::Tcp(address), HTTP_CONNECTIONS_MAX)?;
        Ok(RouterService {
            reactor,
            listener,
            connections: Connections::default(),
            scrapers: None,
            fleet,
            flights,
            fanout: Fanout::default(),
            turns: Turns::default(),
            paths,
            drain: Drain::default(),
            reload: Reload::nothing(now),
            etcd: None,
            next_tick: now,
            pace: Pace::new(now),
        })
    }

    /// Takes bodies of so many bytes, and requests' names from these header fields.
    pub fn within(self, body_max: usize, terms: &RequestTerms) -> RouterService {
        let limits = Limits { body: body_max, ..Limits::default() };
        RouterService {
            connections: Connections::within(limits).named_by(terms.id_headers.clone()),
            ..self
        }
    }

    /// Speaks HTTPS from now on, as this.
    pub fn secure(&mut self, credentials: Credentials) {
        self.reactor.secure(self.listener, credentials);
    }

    /// Uses these files as they change from now on.
    ///
    /// # Errors
    /// The signal that says so cannot be had.
    pub fn renew_from(&mut self, reload: Reload) -> io::Result<()> {
        self.reload = reload.watched(&mut self.reactor)?;
        Ok(())
    }

    fn renew(&mut self, fresh: Vec<Fresh>, now: Instant) {
        for fresh in fresh {
            match fresh {
                Fresh::Credentials(credentials) => self.secure(credentials),
                Fresh::Authorities(authorities) => self.fleet.trust(authorities, &mut self.reactor),
                Fresh::ApiKeys(keys) => {
                    self.fleet.set_key(keys.first().cloned());
                    self.paths.set_keys(keys);
                }
                Fresh::ClusterKeys(keys) => {
                    if let Some((etcd, _)) = &mut self.etcd {
                        etcd.errand().set_keys(keys.clone());
                        etcd.begin_anew(&mut self.reactor, now);
                    }
                    self.paths.workers().set_keys(keys);
                    self.fleet.ask_anew(now);
                }
            }
        }
    }

    /// Has workers change their roles by themselves, on these terms.
    pub fn balance(&mut self, terms: BalanceTerms, now: Instant) {
        self.turns = Turns::balancing(terms, now);
    }

    /// Tells its metrics there, too.
    pub fn tell_metrics(&mut self, address: SocketAddr) -> io::Result<()> {
        let listener = self.reactor.listen(&Address::Tcp(address), SCRAPERS_MAX)?;
        self.scrapers = Some((listener, Connections::default()));
        Ok(())
    }

    /// Where it tells its metrics alone.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.scrapers.as_ref().and_then(|(listener, _)| self.reactor.local_address(*listener))
    }

    /// Takes the workers that are entered in an etcd, too; `names` where a host of it has a name.
    pub fn watch(&mut self, etcd: Errands<View>, names: Option<Resolver>) {
        self.etcd = Some((etcd, names));
    }

    /// Where it listens.
    pub fn address(&self) -> Option<SocketAddr> {
        self.reactor.local_address(self.listener)
    }

    /// Turns until a drain has ended.
    pub fn run(mut self) -> io::Result<End> {
        loop {
            let due = self.flights.next_due();
            self.reactor.poll(Some(due.map_or(self.next_tick, |due| due.min(self.next_tick))))?;
            if let Some(end) = self.turn(Instant::now()) {
                return Ok(end);
            }
            let (passed, served) = (self.flights.take_passed(), self.flights.served());
            if let Some(time) = self.pace.rest(passed, served, Instant::now()) {
                self.reactor.rest(time);
            }
        }
    }

    fn turn(&mut self, now: Instant) -> Option<End> {
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
        self.fleet.resolve(now);
        if now >= self.next_tick {
            self.next_tick = now + TICK;
            let fresh = self.reload.changed(now);
            self.renew(fresh, now);
            self.fleet.expire(&mut self.reactor, now);
            if let Some((etcd, names)) = &mut self.etcd {
                if let Some(names) = names {
                    while names.expire(now).or_else(|| names.poll(now)).is_some() {}
                }
                etcd.turn(names, &mut self.reactor, now);
            }
            self.paths.workers().expire(&mut self.fleet, &mut self.reactor, now);
            self.paths.workers().follow_roles(&mut self.fleet, &mut self.reactor, now);
            self.fleet.probe(&mut self.reactor, now);
            if !self.drain.is_begun() {
                let (_, (_, turns), _, mut way) = self.split(now);
                turns.look(&mut way);
            }
            self.connections.expire(&mut self.reactor, now);
            if let Some((_, scrapers)) = &mut self.scrapers {
                scrapers.expire(&mut self.reactor, now);
            }
        }
        let (flights, _, _, mut way) = self.split(now);
        flights.try_again(&mut way);
        flights.admit(&mut way);
        self.settle(now);
        self.drained(now)
    }

    fn take(&mut self, event: Event, now: Instant) {
        if let Some((etcd, _)) = self.etcd.as_mut().filter(|(etcd, _)| etcd.owns(&event)) {
            etcd.handle(event, &mut self.reactor, now);
            let view = etcd.errand();
            return self.paths.workers().follow(view, &mut self.fleet, &mut self.reactor, now);
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
        if !self.fleet.handle(&mut self.reactor, event, now) {
            self.connections.handle(&mut self.reactor, event, now);
            if let Event::Drained(client) = event {
                let (flights, _, _, mut way) = self.split(now);
                flights.drained(client, &mut way);
            }
        }
        self.settle(now);
    }

    /// Something has happened to a connection of those who read metrics.
    fn scrape(&mut self, event: Event, now: Instant) {
        let Some((listener, mut scrapers)) = self.scrapers.take() else { return };
        scrapers.handle(&mut self.reactor, event, now);
        while let Some(incoming) = scrapers.poll() {
            if let Incoming::Request(client, request) = incoming {
                let told = self.paths.scrape(&request, &mut self.fleet);
                scrapers.answer(&mut self.reactor, client, &told.answer(), now);
            }
        }
        self.scrapers = Some((listener, scrapers));
    }

    /// Deals with everything that has come of an event, until nothing is left.
    fn settle(&mut self, now: Instant) {
        loop {
            let (flights, (fanout, turns), paths, mut way) = self.split(now);
            if let Some(news) = way.fleet.poll() {
                match news.owner {
                    Owner::Lead(client) => flights.lead(client, news.conn, news.what, &mut way),
                    Owner::Prefill(client) => {
                        flights.prefill(client, news.conn, news.what, &mut way)
                    }
                    Owner::Reader(client) => flights.reader(client, news.conn, news.what, &mut way),
                    Owner::Part(client) => fanout.part(client, news.conn, &news.what, &mut way),
                    Owner::Turn(client) => turns.news(client, news.conn, &news.what, &mut way),
                    Owner::Balance => turns.balanced(news.conn, &news.what, &mut way),
                    Owner::Introduction | Owner::Probe | Owner::Report | Owner::Nobody => {}
                }
            } else if let Some(incoming) = way.connections.poll() {
                match incoming {
                    Incoming::Request(client, request) => {
                        paths.serve(client, *request, flights, (fanout, turns), &mut way);
                    }
                    Incoming::Gone(client) => {
                        flights.gone(client, &mut way);
                        fanout.gone(client, &mut way);
                        turns.gone(client, &mut way);
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
    ) -> (&mut Flights, (&mut Fanout, &mut Turns), &mut Paths, Way<'_>) {
        let way = Way {
            reactor: &mut self.reactor,
            connections: &mut self.connections,
            fleet: &mut self.fleet,
            now,
        };
        (&mut self.flights, (&mut self.fanout, &mut self.turns), &mut self.paths, way)
    }

    /// Takes no new requests from now on. Who asks is told so until the end, so the port stays open.
    fn drain(&mut self, now: Instant) {
        if !self.drain.begin(now) {
            return;
        }
        event!(Info, "router", "draining: no new requests, those that run are finished");
        // What was answered is to arrive as well.
        self.reactor.flush_until(now + DRAIN_TIME_MAX);
        self.paths.drain();
        self.connections.drain();
    }

    fn drained(&mut self, now: Instant) -> Option<End> {
        self.drain.end(self.left(), now)
    }

    fn left(&self) -> Left {
        Left {
            busy: !(self.flights.is_idle() && self.fanout.is_idle() && self.turns.is_idle()),
            queued: self.reactor.queued_total(),
            clients: self.connections.count(),
            unheard: 0,
        }
    }
}
