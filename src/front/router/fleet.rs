//! All connections to workers: dialled, used for one call at a time, kept for the next one, and the probes.
//!
//! Thread: `ctl`. Invariants: a call's booking is released when it ends, however it ends; a kept connection
//! that its worker closes is dropped at once. A call for a client is not read further while too much waits
//! for that client. A worker that leaves keeps the calls it has, and is known until they have ended. Not here:
//! what calls are for. `ending`: how they end; `joining`: who comes and goes, and where it is; `probes`: how they are; `roles`: what they do.

mod ending;
mod joining;
mod probes;
mod roles;

pub use roles::Turned;

use crate::cluster::loads::WorkerNumber;
use crate::cluster::router::{Booking, Router};
use crate::config::secret::Secret;
use crate::front::resolver::Resolver;
use crate::front::router::call::{Call, Lost, Order, Outgoing, Owner, Read, WorkerAnswer};
use crate::front::router::target::{Idle, Target};
use crate::limits::{
    ROUTER_ABORT_TIME, ROUTER_CLIENT_QUEUED_MAX, ROUTER_CONNECT_TIME, ROUTER_IDLE_TIME,
    ROUTER_PROBE_TIME,
};
use crate::net::{Address, Authorities, CloseReason, ConnId, Event, Reactor};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What has become of a call.
#[derive(Debug)]
pub struct News {
    /// Whom it is for.
    pub owner: Owner,
    /// Its connection.
    pub conn: ConnId,
    /// What happened.
    pub what: What,
}

/// What happens to a call.
#[derive(Debug)]
pub enum What {
    /// Its connection stands; [`Fleet::begin`] is due.
    Ready,
    /// There is no connection, and nothing was sent.
    Refused,
    /// The worker makes an answer that comes whole.
    Processing,
    /// More of the answer has come; see [`Fleet::answer`].
    Arrived,
    /// The answer is whole: what was not taken of it yet.
    Ended(WorkerAnswer),
    /// No further answer will come.
    Lost(Lost),
}

/// The workers and everything that runs on them.
#[derive(Debug)]
pub struct Fleet {
    router: Router,
    /// Those that `router` knows.
    targets: BTreeMap<WorkerNumber, Target>,
    names: Resolver,
    /// Whose the idle connections are.
    kept: HashMap<ConnId, WorkerNumber>,
    calls: HashMap<ConnId, Call>,
    news: VecDeque<News>,
    /// Shown to workers that are asked who they are.
    key: Option<Secret>,
    /// Who vouches for those that are reached over TLS.
    authorities: Option<Authorities>,
    /// Where they are asked how they are, and how long that may take.
    health: (String, Duration),
    /// Those that have told that their role is another one now.
    turned: VecDeque<Turned>,
    /// Until then others may not have read their new keys.
    keys_change: Option<Instant>,
}

impl Fleet {
    /// No workers yet, and `router` to decide over them; their names are resolved, again where they lead nowhere.
    pub fn new(router: Router, names: Resolver) -> Fleet {
        Fleet {
            router,
            targets: BTreeMap::new(),
            names,
            kept: HashMap::new(),
            calls: HashMap::new(),
            news: VecDeque::new(),
            key: None,
            authorities: None,
            health: ("/health".into(), ROUTER_PROBE_TIME),
            turned: VecDeque::new(),
            keys_change: None,
        }
    }

    /// Workers are asked how they are at this path, and have so long to answer.
    pub fn with_health(self, path: String, time: Duration) -> Fleet {
        Fleet { health: (path, time), ..self }
    }

    /// Workers ask clients, and so the router, for this key.
    pub fn with_key(self, key: Option<Secret>) -> Fleet {
        Fleet { key, ..self }
    }

    /// Those that are reached over TLS must be vouched for by these.
    pub fn with_authorities(self, authorities: Option<Authorities>) -> Fleet {
        Fleet { authorities, ..self }
    }

    /// Whether there are workers that can be reached over TLS.
    pub fn speaks_tls(&self) -> bool {
        self.authorities.is_some()
    }

    /// By these from now on: what was vouched for by others carries what it does, and nothing new.
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

    /// They ask for this one from now on.
    pub fn set_key(&mut self, key: Option<Secret>) {
        self.key = key;
    }

    /// What workers are shown that ask for a key.
    pub fn bearer(&self) -> Option<(&'static str, String)> {
        let key = self.key.as_ref()?;
        Some(("authorization", format!("Bearer {}", String::from_utf8_lossy(key.bytes()))))
    }

    /// The decisions.
    pub fn router(&mut self) -> &mut Router {
        &mut self.router
    }

    /// A worker, while it is here or a call to it is open.
    pub fn target(&self, worker: WorkerNumber) -> Option<&Target> {
        self.targets.get(&worker)
    }

    /// How a worker is named in logs and answers.
    pub fn url(&self, worker: WorkerNumber) -> String {
        self.target(worker)
            .map_or_else(|| "a worker that has left".into(), |target| target.url.to_string())
    }

    /// What has happened.
    pub fn poll(&mut self) -> Option<News> {
        self.news.pop_front()
    }

    /// Takes a connection to the booked worker for a call; also says whether it stands already. Otherwise
    /// [`What::Ready`] or [`What::Refused`] follows.
    ///
    /// # Errors
    /// There are too many connections, or it is not known yet where the worker's name points; the booking is
    /// released.
    pub fn open(
        &mut self,
        reactor: &mut Reactor,
        owner: Owner,
        booking: Booking,
        until: Instant,
        now: Instant,
    ) -> Result<(ConnId, bool), CloseReason> {
        let worker = booking.worker();
        let target = self.targets.get_mut(&worker);
        let idle = target.and_then(|target| target.idle.pop());
        if let Some(Idle { conn, .. }) = idle {
            self.kept.remove(&conn);
            self.calls.insert(conn, Call::new(owner, booking, until, true));
            return Ok((conn, true));
        }
        match self.dial(reactor, worker, now) {
            Ok(conn) => {
                self.calls.insert(conn, Call::new(owner, booking, until, false));
                Ok((conn, false))
            }
            Err(reason) => {
                self.release(booking, now);
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
            // Such a worker is not taken.
            None => Err(CloseReason::Io(ErrorKind::Unsupported)),
        }
    }

    /// Sends the request of a call, once its connection stands or as soon as it does.
    pub fn begin(
        &mut self,
        reactor: &mut Reactor,
        conn: ConnId,
        order: &Order,
        body: &Arc<Vec<u8>>,
        now: Instant,
    ) {
        let Some(call) = self.calls.get(&conn) else { return };
        // A worker is there as long as a call to it is.
        let worker = call.booking.worker();
        let is_asked = call.owner != Owner::Introduction;
        let host = self.targets.get(&worker).map(Target::host).unwrap_or_default();
        let taken_for = is_asked.then(|| self.taken_for(worker)).flatten();
        let Some(call) = self.calls.get_mut(&conn) else { return };
        let outgoing = Outgoing::new(order, &host, taken_for, body.clone());
        if let Err(lost) = call.begin(reactor, conn, outgoing) {
            self.lose(reactor, conn, lost, now);
        }
    }

    /// Tells a worker something, if it can be reached within a moment; nobody hears what comes of it.
    pub fn notify(
        &mut self,
        reactor: &mut Reactor,
        worker: WorkerNumber,
        order: &Order,
        body: Vec<u8>,
        now: Instant,
    ) {
        let booking = self.router.visit(worker);
        if let Ok((conn, _)) =
            self.open(reactor, Owner::Nobody, booking, now + ROUTER_ABORT_TIME, now)
        {
            self.begin(reactor, conn, order, &Arc::new(body), now);
        }
    }

    /// The answer of a call, once its head has come.
    pub fn answer(&mut self, conn: ConnId) -> Option<&mut WorkerAnswer> {
        self.calls.get_mut(&conn).and_then(|call| call.answer.as_mut())
    }

    /// Gives a call up at another time.
    pub fn set_deadline(&mut self, conn: ConnId, until: Instant) {
        if let Some(call) = self.calls.get_mut(&conn) {
            call.until = until;
        }
    }

    /// Lets a call end by itself; nobody hears of it.
    pub fn leave(&mut self, conn: ConnId) {
        if let Some(call) = self.calls.get_mut(&conn) {
            call.owner = Owner::Nobody;
        }
    }

    /// Lets a call end by itself within a moment, since its worker is told so otherwise; nobody hears of it.
    pub fn let_end(&mut self, reactor: &mut Reactor, conn: ConnId, now: Instant) {
        match self.calls.get_mut(&conn) {
            Some(call) if call.is_begun() => {
                (call.owner, call.until) = (Owner::Nobody, now + ROUTER_ABORT_TIME);
            }
            _ => self.cancel(reactor, conn, now),
        }
    }

    /// Ends a call: a connection over which something was sent is closed, which tells the worker.
    pub fn cancel(&mut self, reactor: &mut Reactor, conn: ConnId, now: Instant) {
        let Some(call) = self.calls.remove(&conn) else { return };
        let is_reusable = call.connected && !call.is_begun();
        self.settle(reactor, conn, call, is_reusable, now);
    }

    /// Reads on for a client whose answers have left.
    pub fn resume(&mut self, reactor: &mut Reactor, conn: ConnId, now: Instant) {
        self.read(reactor, conn, now);
    }

    /// Takes a reactor's event, if it is of one of these connections.
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
                // Closed, or something that nobody asked for. It may have ended, and another have begun.
                let worker = self.drop_idle(reactor, conn);
                if let Some(target) = worker.and_then(|worker| self.targets.get_mut(&worker)) {
                    target.introduced = false;
                }
            }
            return true;
        }
        let Some(call) = self.calls.get_mut(&conn) else { return false };
        match event {
            Event::Connected(_) => {
                call.connected = true;
                // It is there after all.
                if let Some(target) = self.targets.get_mut(&call.booking.worker()) {
                    target.lost = false;
                }
                if !call.is_begun() {
                    let owner = call.owner;
                    self.news.push_back(News { owner, conn, what: What::Ready });
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

    /// Gives up what took too long, and connections that nobody used.
    pub fn expire(&mut self, reactor: &mut Reactor, now: Instant) {
        let is_late = |(&conn, call): (&ConnId, &Call)| (call.until <= now).then_some(conn);
        for conn in self.calls.iter().filter_map(is_late).collect::<Vec<_>>() {
            self.lose(reactor, conn, Lost::Deadline, now);
        }
        let is_old = |idle: &&Idle| idle.since + ROUTER_IDLE_TIME <= now;
        let idle = self.targets.values().flat_map(|target| target.idle.iter().filter(is_old));
        let old: Vec<ConnId> = idle.map(|idle| idle.conn).collect();
        for conn in old {
            self.drop_idle(reactor, conn);
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
            // An answer to nothing: what would come of it is not this request's.
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
            self.news.push_back(News { owner: call.owner, conn, what: What::Processing });
        }
        if some {
            self.news.push_back(News { owner: call.owner, conn, what: What::Arrived });
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
