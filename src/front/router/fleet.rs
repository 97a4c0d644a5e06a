//! All connections to workers: dialled, used for one call at a time, kept for the next one, and the probes.
//!
//! Thread: `ctl`. Invariants: a call's booking is released when it ends, however it ends; a kept connection
//! that its worker closes is dropped at once. A call for a client is not read further while too much waits
//! for that client. Not here: what calls are for.

use crate::cluster::health::Change;
use crate::cluster::loads::WorkerNumber;
use crate::cluster::router::{Booking, Router};
use crate::config::secret::Secret;
use crate::config::values::WorkerUrl;
use crate::front::resolver::Resolver;
use crate::front::router::call::{Call, Lost, Order, Outgoing, Owner, Read, WorkerAnswer};
use crate::front::router::introduction::{self, Verdict};
use crate::limits::{
    ROUTER_CLIENT_QUEUED_MAX, ROUTER_CONNECT_TIME, ROUTER_IDLE_MAX, ROUTER_IDLE_TIME, ROUTER_PROBE_TIME,
};
use crate::net::{Address, CloseReason, ConnId, Event, Reactor};
use crate::obs::log::event;
use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

/// A worker as it is reached.
#[derive(Clone, Debug)]
pub struct Target {
    /// As configured.
    pub url: WorkerUrl,
    /// Where its name points, as far as is known.
    pub address: SocketAddr,
    /// Of its registry; `None` for decode workers.
    pub bootstrap_port: Option<u16>,
    /// Whether nobody answered there, and its name is being looked up again.
    lost: bool,
    /// Whether it has been asked who it is since somebody else may have taken its place.
    introduced: bool,
    /// What that came to, the last time.
    verdict: Verdict,
    /// Whether it was said that it is not up, since it was last.
    told_down: bool,
}

impl Target {
    /// A worker that is thought to be at this address.
    pub fn new(url: WorkerUrl, address: SocketAddr, bootstrap_port: Option<u16>) -> Target {
        Target {
            url,
            address,
            bootstrap_port,
            lost: false,
            introduced: false,
            verdict: Verdict::Fits,
            told_down: false,
        }
    }

    /// Another address of its name, which comes behind the one that led nowhere.
    fn turn_to(&mut self, addresses: &[IpAddr]) {
        let at = addresses.iter().position(|&ip| ip == self.address.ip());
        let next = at.map_or(0, |at| (at + 1) % addresses.len());
        self.address.set_ip(addresses[next]);
    }

    /// The value of a request's Host field.
    fn host(&self) -> String {
        self.url.to_string().trim_start_matches("http://").to_owned()
    }
}

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
    /// More of the answer has come; see [`Fleet::answer`].
    Arrived,
    /// The answer is whole: what was not taken of it yet.
    Ended(WorkerAnswer),
    /// No further answer will come.
    Lost(Lost),
}

/// A connection without a call.
#[derive(Clone, Copy, Debug)]
struct Idle {
    conn: ConnId,
    since: Instant,
}

/// The workers and everything that runs on them.
#[derive(Debug)]
pub struct Fleet {
    router: Router,
    targets: Vec<Target>,
    names: Resolver,
    /// By worker; the one used last is the last.
    idle: Vec<Vec<Idle>>,
    /// Whose the idle ones are.
    kept: HashMap<ConnId, WorkerNumber>,
    calls: HashMap<ConnId, Call>,
    news: VecDeque<News>,
    /// Shown to workers that are asked who they are.
    key: Option<Secret>,
}

impl Fleet {
    /// `targets` by worker number; their names are resolved again where they lead nowhere.
    pub fn new(router: Router, targets: Vec<Target>, names: Resolver) -> Fleet {
        let idle = vec![Vec::new(); targets.len()];
        let (kept, calls, news) = (HashMap::new(), HashMap::new(), VecDeque::new());
        Fleet { router, targets, names, idle, kept, calls, news, key: None }
    }

    /// Workers ask clients, and so the router, for this key.
    pub fn with_key(self, key: Option<Secret>) -> Fleet {
        Fleet { key, ..self }
    }

    /// The decisions.
    pub fn router(&mut self) -> &mut Router {
        &mut self.router
    }

    /// The workers by number.
    pub fn targets(&self) -> &[Target] {
        &self.targets
    }

    /// What has happened.
    pub fn poll(&mut self) -> Option<News> {
        self.news.pop_front()
    }

    /// Takes a connection to the booked worker for a call; also says whether it stands already. Otherwise
    /// [`What::Ready`] or [`What::Refused`] follows.
    ///
    /// # Errors
    /// There are too many connections; the booking is released.
    pub fn open(
        &mut self,
        reactor: &mut Reactor,
        owner: Owner,
        booking: Booking,
        until: Instant,
        now: Instant,
    ) -> Result<(ConnId, bool), CloseReason> {
        let worker = booking.worker();
        if let Some(Idle { conn, .. }) = self.idle[worker.0].pop() {
            self.kept.remove(&conn);
            self.calls.insert(conn, Call::new(owner, booking, until, true));
            return Ok((conn, true));
        }
        let address = Address::Tcp(self.targets[worker.0].address);
        match reactor.connect(&address, now + ROUTER_CONNECT_TIME) {
            Ok(conn) => {
                self.calls.insert(conn, Call::new(owner, booking, until, false));
                Ok((conn, false))
            }
            Err(reason) => {
                self.router.release(booking);
                Err(reason)
            }
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
        let Some(call) = self.calls.get_mut(&conn) else { return };
        let host = self.targets[call.booking.worker().0].host();
        let outgoing = Outgoing::new(order, &host, body.clone());
        if let Err(lost) = call.begin(reactor, conn, outgoing) {
            self.lose(reactor, conn, lost, now);
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
                if let Some(worker) = self.drop_idle(reactor, conn) {
                    self.targets[worker.0].introduced = false;
                }
            }
            return true;
        }
        let Some(call) = self.calls.get_mut(&conn) else { return false };
        match event {
            Event::Connected(_) => {
                call.connected = true;
                // It is there after all.
                self.targets[call.booking.worker().0].lost = false;
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

    /// Begins the probes that are due.
    pub fn probe(&mut self, reactor: &mut Reactor, now: Instant) {
        while let Some(worker) = self.router.begin_probe(now) {
            self.ask(reactor, worker, now);
        }
    }

    /// Asks a worker who it is, or once that is known how it is.
    fn ask(&mut self, reactor: &mut Reactor, worker: WorkerNumber, now: Instant) {
        match self.targets[worker.0].introduced {
            false => self.call(reactor, worker, Owner::Introduction, introduction::PATH, now),
            true => self.call(reactor, worker, Owner::Probe, "/health", now),
        }
    }

    fn call(&mut self, reactor: &mut Reactor, worker: WorkerNumber, owner: Owner, path: &str, now: Instant) {
        let booking = self.router.visit(worker);
        match self.open(reactor, owner, booking, now + ROUTER_PROBE_TIME, now) {
            Ok((conn, _)) => {
                let mut order = Order::get(path);
                if let Some(key) = self.key.as_ref().filter(|_| owner == Owner::Introduction) {
                    let bearer = format!("Bearer {}", String::from_utf8_lossy(key.bytes()));
                    order.headers.push(("authorization", bearer));
                }
                self.begin(reactor, conn, &order, &Arc::default(), now);
            }
            Err(_) => self.probed(worker, false, now),
        }
    }

    /// An introduction has ended: with this answer, or for this reason with none.
    fn introduced(
        &mut self,
        reactor: &mut Reactor,
        worker: WorkerNumber,
        answer: Result<WorkerAnswer, String>,
        now: Instant,
    ) {
        let role = self.router.role(worker);
        let told = answer.as_ref().map(|answer| introduction::kind(&answer.body));
        if let Some((other, why)) = self.router.introduced(worker, told.unwrap_or_default()) {
            let (worker, other) = (&self.targets[worker.0].url, &self.targets[other.0].url);
            event!(Warn, "router", "two workers are never paired", one = worker, other = other, why = why);
        }
        let target = &mut self.targets[worker.0];
        let (verdict, asked) = match answer {
            Ok(answer) if answer.is_success() => {
                (introduction::judge(role, target.bootstrap_port, &answer.body), true)
            }
            // It does not know the path, or wants a key that only clients have.
            Ok(WorkerAnswer { status: status @ (401 | 403 | 404 | 405), .. }) => {
                (Verdict::Doubtful(format!("{} answers with status {status}", introduction::PATH)), true)
            }
            Ok(answer) => {
                let why = format!("{} answers with status {}", introduction::PATH, answer.status);
                (Verdict::Doubtful(why), false)
            }
            Err(why) => (Verdict::Doubtful(format!("{} is not answered: {why}", introduction::PATH)), false),
        };
        target.introduced = asked;
        let is_news = target.verdict != verdict;
        match &verdict {
            Verdict::Unfit(why) if is_news => {
                event!(Error, "router", "worker cannot be used", worker = target.url, why = why);
            }
            Verdict::Doubtful(why) if is_news => {
                event!(Warn, "router", "worker may not fit", worker = target.url, why = why);
            }
            _ => {}
        }
        target.verdict = verdict;
        match target.verdict {
            Verdict::Unfit(_) => {
                target.introduced = false;
                // No matter how well it is.
                let change = self.router.refused(worker);
                self.tell(worker, change, &"what it says of itself");
                self.probed(worker, false, now);
            }
            _ => self.call(reactor, worker, Owner::Probe, "/health", now),
        }
    }

    /// Gives up what took too long, and connections that nobody used.
    pub fn expire(&mut self, reactor: &mut Reactor, now: Instant) {
        let is_late = |(&conn, call): (&ConnId, &Call)| (call.until <= now).then_some(conn);
        for conn in self.calls.iter().filter_map(is_late).collect::<Vec<_>>() {
            self.lose(reactor, conn, Lost::Deadline, now);
        }
        let is_old = |idle: &&Idle| idle.since + ROUTER_IDLE_TIME <= now;
        let old: Vec<ConnId> =
            self.idle.iter().flat_map(|idle| idle.iter().filter(is_old)).map(|idle| idle.conn).collect();
        for conn in old {
            self.drop_idle(reactor, conn);
        }
    }

    fn read(&mut self, reactor: &mut Reactor, conn: ConnId, now: Instant) {
        let Some(call) = self.calls.get_mut(&conn) else { return };
        if let Owner::Lead(client) = call.owner
            && reactor.queued(client) > ROUTER_CLIENT_QUEUED_MAX
        {
            return;
        }
        let mut some = false;
        loop {
            match call.read(reactor.received(conn)) {
                Ok((used, read)) => {
                    reactor.consume(conn, used);
                    match read {
                        Read::Nothing => break,
                        Read::Something => some = true,
                        Read::End { keep_alive } => return self.end(reactor, conn, keep_alive, now),
                    }
                }
                Err(lost) => return self.lose(reactor, conn, lost, now),
            }
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

    fn closed(&mut self, reactor: &mut Reactor, conn: ConnId, reason: CloseReason, now: Instant) {
        let Some(call) = self.calls.get(&conn) else { return };
        let (connected, begun, worker) = (call.connected, call.is_begun(), call.booking.worker());
        if !connected {
            let change = self.router.refused(worker);
            self.tell(worker, change, &reason);
            self.look_up_again(worker, now);
        }
        if begun {
            self.lose(reactor, conn, Lost::Closed, now);
        } else {
            self.refuse(reactor, conn, now);
        }
    }

    /// The answer of a call is whole.
    fn end(&mut self, reactor: &mut Reactor, conn: ConnId, keep_alive: bool, now: Instant) {
        let Some(mut call) = self.calls.remove(&conn) else { return };
        let is_reusable = keep_alive && call.is_sent() && !call.eof && reactor.received(conn).is_empty();
        let (owner, worker, answer) = (call.owner, call.booking.worker(), call.answer.take());
        self.settle(reactor, conn, call, is_reusable, now);
        let Some(answer) = answer else { return };
        let drains = answer.is_of_drain();
        if drains {
            self.drains(reactor, worker);
        }
        match owner {
            Owner::Introduction => self.introduced(reactor, worker, Ok(answer), now),
            Owner::Probe if drains => {
                self.targets[worker.0].told_down = true;
                self.probed(worker, false, now);
            }
            Owner::Probe => self.probed(worker, answer.is_success(), now),
            _ => self.news.push_back(News { owner, conn, what: What::Ended(answer) }),
        }
    }

    fn lose(&mut self, reactor: &mut Reactor, conn: ConnId, lost: Lost, now: Instant) {
        let Some(call) = self.calls.remove(&conn) else { return };
        let (owner, worker, connected) = (call.owner, call.booking.worker(), call.connected);
        self.settle(reactor, conn, call, false, now);
        match owner {
            Owner::Introduction if connected => {
                self.introduced(reactor, worker, Err(lost.to_string()), now);
            }
            Owner::Introduction | Owner::Probe => {
                let was_usable = self.router.loads()[worker.0].usable;
                self.probed(worker, false, now);
                if was_usable && !self.router.loads()[worker.0].usable {
                    self.give_up(reactor, worker, now);
                }
            }
            _ => self.news.push_back(News { owner, conn, what: What::Lost(lost) }),
        }
    }

    /// A worker answers no probe: it stands still, and so does all that it was asked.
    fn give_up(&mut self, reactor: &mut Reactor, worker: WorkerNumber, now: Instant) {
        let is_waiting = |call: &Call| {
            call.booking.worker() == worker && matches!(call.owner, Owner::Lead(_) | Owner::Prefill(_))
        };
        let waiting = self.calls.iter().filter(|(_, call)| is_waiting(call));
        for conn in waiting.map(|(&conn, _)| conn).collect::<Vec<_>>() {
            self.lose(reactor, conn, Lost::Silent, now);
        }
    }

    /// A worker takes nothing new: it is not chosen from now on, and its end meets no request that is on its way to
    /// it. Probes tell whether another one has come in its place.
    fn drains(&mut self, reactor: &mut Reactor, worker: WorkerNumber) {
        let change = self.router.refused(worker);
        self.tell(worker, change, &"drain");
        for Idle { conn, .. } in std::mem::take(&mut self.idle[worker.0]) {
            self.kept.remove(&conn);
            reactor.close(conn);
        }
    }

    /// A call over which nothing was sent has lost its connection.
    fn refuse(&mut self, reactor: &mut Reactor, conn: ConnId, now: Instant) {
        let Some(call) = self.calls.remove(&conn) else { return };
        let owner = call.owner;
        self.settle(reactor, conn, call, false, now);
        self.news.push_back(News { owner, conn, what: What::Refused });
    }

    fn settle(&mut self, reactor: &mut Reactor, conn: ConnId, call: Call, is_reusable: bool, now: Instant) {
        let worker = call.booking.worker();
        self.router.release(call.booking);
        if is_reusable && self.kept.len() < ROUTER_IDLE_MAX {
            self.idle[worker.0].push(Idle { conn, since: now });
            self.kept.insert(conn, worker);
        } else {
            reactor.close(conn);
        }
    }

    fn drop_idle(&mut self, reactor: &mut Reactor, conn: ConnId) -> Option<WorkerNumber> {
        let worker = self.kept.remove(&conn)?;
        self.idle[worker.0].retain(|idle| idle.conn != conn);
        reactor.close(conn);
        Some(worker)
    }

    /// Takes in where names point now.
    pub fn resolve(&mut self, now: Instant) {
        while let Some((name, found)) = self.names.expire(now).or_else(|| self.names.poll(now)) {
            // Workers of one name, on several ports, are lost and found one by one.
            for target in self.targets.iter_mut().filter(|target| target.lost && target.url.host == name) {
                target.lost = false;
                // What was not found is asked for again when it leads nowhere again.
                if let Ok(addresses) = &found {
                    target.turn_to(addresses);
                }
            }
        }
    }

    /// A worker takes no connection: its name may point elsewhere by now.
    fn look_up_again(&mut self, worker: WorkerNumber, now: Instant) {
        let target = &mut self.targets[worker.0];
        if target.url.host.parse::<IpAddr>().is_ok() {
            return;
        }
        match self.names.resolve(&target.url.host, now) {
            Some(Ok(addresses)) => target.turn_to(&addresses),
            Some(Err(_)) => {}
            None => target.lost = true,
        }
    }

    fn probed(&mut self, worker: WorkerNumber, is_well: bool, now: Instant) {
        // Who answers there next may be somebody else.
        self.targets[worker.0].introduced &= is_well;

        let change = self.router.probed(worker, is_well, now);
        self.tell(worker, change, &"probe");
        let target = &mut self.targets[worker.0];
        if is_well {
            target.told_down = false;
        } else if !self.router.loads()[worker.0].usable && !std::mem::replace(&mut target.told_down, true) {
            event!(Warn, "router", "worker is not up", worker = target.url, address = target.address);
        }
    }

    fn tell(&self, worker: WorkerNumber, change: Option<Change>, why: &dyn std::fmt::Display) {
        let (role, url) = (self.router.role(worker), &self.targets[worker.0].url);
        match change {
            Some(Change::Up) => event!(Info, "router", "worker is up", role = role, worker = url),
            Some(Change::Down) => {
                event!(Warn, "router", "worker is down", role = role, worker = url, by = why)
            }
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::resolved::Policy;
    use std::net::TcpListener;
    use std::time::Duration;

    /// One of two workers of a name has moved: where it pointed at the start nobody listens any more.
    #[test]
    fn a_name_that_leads_nowhere_is_resolved_again() {
        let worker = TcpListener::bind("127.0.0.1:0").unwrap();
        worker.set_nonblocking(true).unwrap();
        let here = worker.local_addr().unwrap();
        let other = TcpListener::bind("127.0.0.9:0").unwrap();
        let there = other.local_addr().unwrap();
        let other_url: WorkerUrl = format!("http://worker.test:{}", there.port()).parse().unwrap();
        let url: WorkerUrl = format!("http://worker.test:{}", here.port()).parse().unwrap();
        let gone = SocketAddr::new("127.0.0.9".parse().unwrap(), here.port());
        let begun = Instant::now();
        let mut reactor = Reactor::new().unwrap();
        let waker = reactor.waker();
        let names = Resolver::over(
            move |name| {
                assert_eq!(name, "worker.test");
                Ok(vec![gone.ip(), here.ip()])
            },
            move || waker.wake(),
        );
        let targets = vec![Target::new(url, gone, None), Target::new(other_url, there, None)];
        let router = Router::new(Policy::RoundRobin, 0, 2, begun);
        let mut fleet = Fleet::new(router, targets, names.unwrap());
        while worker.accept().is_err() {
            let now = Instant::now();
            assert!(begun.elapsed() < Duration::from_secs(60), "it is never found");
            fleet.probe(&mut reactor, now);
            reactor.poll(Some(now + Duration::from_millis(50))).unwrap();
            while let Some(event) = reactor.next_event() {
                fleet.handle(&mut reactor, event, now);
            }
            fleet.resolve(now);
        }
        assert_eq!(fleet.targets()[0].address, here);
        assert_eq!(fleet.targets()[1].address, there, "it was well where it is");
    }
}
