//! A cluster in one thread: everything that happens, in the order of one seed.
//!
//! Owns: hosts with their processes, connections between them, the router, the time, the checkers. A thread of a
//! process takes a turn when it was woken, or its time has come; a message arrives when it has travelled.
//! Invariants: whatever is drawn comes from the plan's dice, so that a seed repeats itself; a connection keeps
//! its order, two of them do not.

mod harm;

use super::agenda::{Agenda, MICRO, MILLI, Nanos, SECOND};
use super::checkers::{ends::Ends, idle, pages, shadow::Shadow, tokens};
use super::dice::Dice;
use super::edge::{ConnNumber, Input, Job, Output, Parcel, Turn};
use super::faults::Fault;
use super::plan::{Plan, Size};
use super::process::{Process, Thread};
use super::router::{Answer, Flights, LegName, Wish};
use super::story::Story;
use super::workload::Workload;
use crate::cluster::router::Role;
use crate::ids::Room;
use crate::limits::{EARLY_DESTINATION_LIFE, PEER_PROOF_TIME_MAX};
use crate::sched::worker::Activity;
use crate::wire::message::Message;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

/// Most happenings of a run: many times what the longest of them takes.
const EVENTS_MAX: u64 = 20_000_000;
/// Between two looks at what is overdue.
const CHECK_EVERY: Nanos = SECOND;
/// What a request may take beyond its own deadline: a host's silence, a pause, and an answer's way.
const SLACK: Nanos = 30 * SECOND;
/// From the last fault until the cluster must serve again: silence is noticed, links are dialled anew.
const SETTLED: Nanos = 8 * SECOND;
/// How long a request may take then.
const RECOVERED: Nanos = 10 * SECOND;
/// From the last request's end until nothing of it is held any more but rooms whose request never came.
const CLEARED: Nanos = 10 * SECOND;
/// Between two tries of a dial whose packets are lost.
const DIAL_AGAIN: Nanos = 200 * MILLI;
/// How long a lost packet waits to be sent again, at most.
const RESENT: Nanos = 400 * MILLI;

/// Something is not as it must be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// What.
    pub what: String,
    /// When.
    pub at: Nanos,
    /// Where the legs of the request meet that it is about, if it is about one.
    pub room: Option<Room>,
}

/// What a run was.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Report {
    /// Equal for equal runs.
    pub hash: u64,
    /// Happenings.
    pub events: u64,
    /// Requests begun.
    pub requests: usize,
    /// Of them, those that ended well.
    pub well: usize,
    /// The others, by cause.
    pub failures: BTreeMap<&'static str, usize>,
    /// How long it took in its own time.
    pub time: Nanos,
}

/// Something that is to happen.
#[derive(Debug)]
enum Happening {
    /// A thread's turn, if that is still when it is due.
    Turn { host: usize, life: u32, thread: Thread, at: Nanos },
    /// The next parcel of a connection reaches this end.
    Arrive { conn: ConnNumber, end: usize },
    /// A dial reaches the other host, or not.
    Reach { conn: ConnNumber, until: Nanos },
    /// Something comes that is not on a connection.
    Pass { host: usize, life: u32, input: Input },
    /// A leg's request, or its cancellation, reaches the worker.
    ToWorker { leg: LegName, input: Input },
    /// Something reaches the router.
    ToRouter { leg: LegName, answer: Answer },
    /// A client asks.
    Request,
    /// A flight's time may be up.
    Remind(usize),
    /// Is everything as it must be?
    Check,
    /// Something goes wrong.
    Fault(Fault),
    /// A process is started where one has died.
    Restart { host: usize },
    /// Packets arrive again.
    Heal { ways: [Option<(usize, usize)>; 2] },
    /// A model is as fast as it was.
    Quicken { host: usize, life: u32 },
}

/// Where a process runs, or ran, or will.
struct Host {
    role: Role,
    size: Size,
    process: Option<Process>,
    /// Processes so far.
    life: u32,
    /// When each thread's next turn is.
    due: [Nanos; 3],
    /// The engine computes until then.
    computes_until: Nanos,
    /// The process stands still until then.
    paused_until: Nanos,
    /// How much later than the cluster's its clock is.
    skew: Nanos,
}

impl Host {
    fn is_up(&self, now: Nanos) -> bool {
        self.process.is_some() && self.paused_until <= now
    }
}

/// A control connection.
#[derive(Debug)]
struct Conn {
    /// Who has dialled, and whom.
    hosts: [usize; 2],
    lives: [u32; 2],
    open: [bool; 2],
    /// On their way to each end.
    queues: [VecDeque<Parcel>; 2],
    /// When the last of them comes.
    last: [Nanos; 2],
    /// Those that were lost and will be sent again.
    lost: [u32; 2],
}

impl Conn {
    fn is_end(&self, end: usize, host: usize, life: u32) -> bool {
        (self.hosts[end], self.lives[end]) == (host, life)
    }
}

/// A leg's HTTP connection.
#[derive(Debug)]
struct Leg {
    host: usize,
    life: u32,
    room: Room,
    /// When the last of what travels to the worker, and back, comes.
    last: [Nanos; 2],
}

/// What a run goes through.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// Requests come and end.
    Working,
    /// All have ended; the next pair is tried from then on.
    Recovering { from: Nanos, pair: usize },
    /// All have ended; what is left over must go by itself.
    Idle { since: Nanos },
    /// It has.
    Over,
}

/// The whole.
pub struct Cluster<'a> {
    plan: &'a Plan,
    base: Instant,
    agenda: Agenda<Happening>,
    dice: Dice,
    rooms: Dice,
    hosts: Vec<Host>,
    conns: BTreeMap<ConnNumber, Conn>,
    last_conn: ConnNumber,
    legs: BTreeMap<LegName, Leg>,
    flights: Flights,
    workload: Workload,
    ends: Ends,
    shadow: Shadow,
    phase: Phase,
    /// From a host to another, nothing arrives.
    parted: BTreeSet<(usize, usize)>,
    /// When the last fault is over.
    calm_from: Nanos,
    /// What happened.
    pub story: Story,
    report: Report,
}

impl<'a> Cluster<'a> {
    /// A cluster that has just started; the story keeps lines of one room, if asked for.
    pub fn new(plan: &'a Plan, trace: Option<Room>) -> Cluster<'a> {
        let dice = Dice::new(plan.seed);
        let base = Instant::now();
        let (prefill, decode) = (plan.scale.prefill as usize, plan.scale.decode as usize);
        let host = |role, size| Host {
            role,
            size,
            process: None,
            life: 0,
            due: [Nanos::MAX; 3],
            computes_until: 0,
            paused_until: 0,
            skew: 0,
        };
        let hosts = (0..prefill).map(|_| host(Role::Prefill, plan.prefill));
        let mut cluster = Cluster {
            plan,
            base,
            agenda: Agenda::new(dice.fork("order")),
            rooms: dice.fork("rooms"),
            hosts: hosts.chain((0..decode).map(|_| host(Role::Decode, plan.decode))).collect(),
            conns: BTreeMap::new(),
            last_conn: 0,
            legs: BTreeMap::new(),
            flights: Flights::new(plan.policy, prefill, decode, base),
            workload: Workload::new(dice.fork("workload"), plan.patience),
            ends: Ends::default(),
            shadow: Shadow::default(),
            phase: Phase::Working,
            parted: BTreeSet::new(),
            calm_from: 0,
            story: Story::new(trace),
            report: Report::default(),
            dice: dice.fork("delays"),
        };
        (0..prefill + decode).for_each(|host| cluster.start(host));
        cluster.agenda.put(0, Happening::Request);
        cluster.agenda.put(CHECK_EVERY, Happening::Check);
        for &(at, fault) in plan.faults.iter().flat_map(|faults| &faults.list) {
            cluster.agenda.put(at, Happening::Fault(fault));
        }
        cluster
    }

    /// Everything, to the end.
    ///
    /// # Errors
    /// What was not as it must be.
    pub fn run(&mut self) -> Result<Report, Failure> {
        while self.phase != Phase::Over {
            let what = self.agenda.take();
            let went = match what {
                Some(what) => self.happen(what),
                None => Err("nothing is to happen any more".into()),
            };
            let went = went.and_then(|()| match self.story.events() < EVENTS_MAX {
                true => Ok(()),
                false => Err("it goes on and on".into()),
            });
            went.map_err(|what| self.failure(what))?;
        }
        self.report.hash = self.story.hash();
        self.report.events = self.story.events();
        self.report.time = self.agenda.now();
        Ok(self.report.clone())
    }

    /// What to say of a run that has panicked.
    pub fn failure(&self, what: String) -> Failure {
        let flight = what.strip_prefix("request ").and_then(|rest| rest.split(' ').next()?.parse().ok());
        Failure { what, at: self.agenda.now(), room: flight.map(|flight| self.flights.room(flight)) }
    }

    fn happen(&mut self, what: Happening) -> Result<(), String> {
        let now = self.agenda.now();
        match what {
            Happening::Turn { host, life, thread, at } => {
                let current = &mut self.hosts[host];
                if current.life != life || current.due[thread as usize] != at {
                    return Ok(());
                }
                current.due[thread as usize] = Nanos::MAX;
                match current.paused_until {
                    until if until > now => self.wake(host, thread, until),
                    _ => self.turn(host, thread, now)?,
                }
            }
            Happening::Arrive { conn, end } => self.arrive(conn, end),
            Happening::Reach { conn, until } => self.reach(conn, until),
            Happening::Pass { host, life, input } => self.pass(host, life, input),
            Happening::ToWorker { leg, input } => self.reach_worker(leg, input),
            Happening::ToRouter { leg, answer } => self.reach_router(leg, answer)?,
            Happening::Request => self.request(),
            Happening::Remind(flight) => {
                self.flights.overdue(flight, now);
                self.carry_out()?;
            }
            Happening::Check => self.check()?,
            Happening::Fault(fault) => self.go_wrong(fault)?,
            Happening::Restart { host } => self.restart(host),
            Happening::Heal { ways } => self.heal(ways),
            Happening::Quicken { host, life } => self.slow_down(host, life, 1),
        }
        Ok(())
    }

    // Processes and their threads.

    fn start(&mut self, index: usize) {
        let now = self.agenda.now();
        let host = &mut self.hosts[index];
        let mut process = Process::new(host.role, &host.size, self.base).expect("memory for a process");
        process.edge.begin(process.instant(now + host.skew));
        host.process = Some(process);
        host.life += 1;
        host.due = [Nanos::MAX; 3];
        (host.computes_until, host.paused_until) = (0, 0);
        for thread in Thread::ALL {
            let at = now + self.late();
            self.wake(index, thread, at);
        }
    }

    /// How late a thread is, or how long it takes to be somewhere: as a rule short, now and then long.
    fn late(&mut self) -> Nanos {
        let most = self.plan.lateness;
        let rare = if self.dice.one_in(50) { 20 } else { 1 };
        self.dice.within(MICRO, most * rare)
    }

    fn delay(&mut self) -> Nanos {
        let (least, most) = self.plan.delay;
        // A lost packet comes later, and what follows it on its connection, too.
        let resent = if self.dice.one_in(200) { self.dice.within(0, RESENT) } else { 0 };
        self.dice.within(least, most) + resent
    }

    fn wake(&mut self, index: usize, thread: Thread, at: Nanos) {
        let host = &mut self.hosts[index];
        let at = if thread == Thread::Engine { at.max(host.computes_until) } else { at };
        let due = &mut host.due[thread as usize];
        if at < *due {
            *due = at;
            self.agenda.put(at, Happening::Turn { host: index, life: host.life, thread, at });
        }
    }

    fn wake_soon(&mut self, index: usize, thread: Thread) {
        let at = self.agenda.now() + self.late();
        self.wake(index, thread, at);
    }

    fn turn(&mut self, index: usize, thread: Thread, now: Nanos) -> Result<(), String> {
        let host = &mut self.hosts[index];
        let Some(process) = &mut host.process else { return Ok(()) };
        let own = now + host.skew;
        let detail = match thread {
            Thread::Engine => {
                let (activity, took) = process.step_engine(own);
                pages::conserved(index, &process.stats, host.size.pages)?;
                host.computes_until = now + took;
                let pause = match activity {
                    Activity::Busy => Some(0),
                    Activity::Waiting => Some(self.dice.within(MILLI, 10 * MILLI)),
                    Activity::Idle => None,
                };
                if let Some(pause) = pause {
                    let at = now + took + pause + self.late();
                    self.wake(index, thread, at);
                }
                took << 2 | activity as u64
            }
            Thread::Move => {
                let watched = host.role == Role::Decode;
                if watched {
                    self.shadow.look(process);
                }
                let busy = process.step_mover();
                if watched && busy {
                    self.shadow.compare(index, process)?;
                }
                if busy {
                    self.wake_soon(index, thread);
                    self.wake_peers(index);
                }
                busy.into()
            }
            Thread::Ctl => {
                process.attend(true);
                let instant = process.instant(own);
                process.edge.turn(&mut Turn { now: instant, nanos: own, conns: &mut self.last_conn });
                process.attend(false);
                let tick = process.edge.next_tick - host.skew;
                let outputs = std::mem::take(&mut process.edge.outbox);
                let sent = outputs.len();
                outputs.into_iter().for_each(|output| self.dispatch(index, output));
                self.wake(index, thread, tick);
                sent as u64
            }
        };
        let what = ["ctl", "engine", "move"][thread as usize];
        self.story.tell(now, "process", index, what, None, detail);
        let woken: Vec<Thread> = self.hosts[index]
            .process
            .as_ref()
            .map(|process| process.take_woken().collect())
            .unwrap_or_default();
        woken.into_iter().for_each(|thread| self.wake_soon(index, thread));
        Ok(())
    }

    /// What a mover has put where a peer's looks: as a doorbell, or a NIC, has it look.
    fn wake_peers(&mut self, index: usize) {
        let linked = |conn: &Conn| {
            let end = conn.hosts.iter().position(|&host| host == index)?;
            (conn.open == [true; 2]).then_some(conn.hosts[1 - end])
        };
        let peers: Vec<usize> = self.conns.values().filter_map(linked).collect();
        peers.into_iter().for_each(|peer| self.wake_soon(peer, Thread::Move));
    }

    /// Puts something into what the kernel keeps for a process, if that is the one it is for.
    fn deliver(&mut self, index: usize, life: u32, input: Input) {
        let host = &mut self.hosts[index];
        if let Some(process) = host.process.as_mut().filter(|_| host.life == life) {
            process.edge.inbox.push_back(input);
            self.wake_soon(index, Thread::Ctl);
        }
    }

    /// As [`Cluster::deliver`]; who calls a process that is gone is told.
    fn pass(&mut self, index: usize, life: u32, input: Input) {
        let gone = self.hosts[index].life != life || self.hosts[index].process.is_none();
        match (gone, input) {
            (true, Input::Called(conn, ..)) => {
                let at = self.agenda.now() + self.delay();
                let Some(conns) = self.conns.get(&conn) else { return };
                let (host, life) = (conns.hosts[0], conns.lives[0]);
                self.agenda.put(at, Happening::Pass { host, life, input: Input::Shown(conn, None) });
            }
            (_, input) => self.deliver(index, life, input),
        }
    }

    // Connections.

    fn dispatch(&mut self, from: usize, output: Output) {
        let now = self.agenda.now();
        match output {
            Output::Parcel(conn, parcel) => self.send(from, conn, parcel),
            Output::Dial { conn, to, patience } => {
                let until = now + patience;
                let lives = [self.hosts[from].life, self.hosts[to].life];
                let conns = Conn {
                    hosts: [from, to],
                    lives,
                    open: [true, false],
                    queues: Default::default(),
                    last: [0; 2],
                    lost: [0; 2],
                };
                self.conns.insert(conn, conns);
                self.story.tell(now, "process", from, "dials", None, to as u64);
                let at = now + self.delay() + self.delay();
                self.agenda.put(at, Happening::Reach { conn, until });
            }
            Output::Call(conn, token, shown) => {
                let Some(other) = self.conns.get(&conn) else { return };
                let (host, life) = (other.hosts[1], other.lives[1]);
                let at = now + self.delay();
                self.agenda.put(at, Happening::Pass { host, life, input: Input::Called(conn, token, shown) });
            }
            Output::Show(conn, shown) => {
                let Some(other) = self.conns.get(&conn) else { return };
                let (host, life) = (other.hosts[0], other.lives[0]);
                let at = now + self.delay();
                self.agenda.put(at, Happening::Pass { host, life, input: Input::Shown(conn, shown) });
            }
            Output::Answer(name, answer) => {
                let delay = self.delay();
                let Some(leg) = self.legs.get_mut(&name) else { return };
                leg.last[1] = (now + delay).max(leg.last[1] + 1);
                let at = leg.last[1];
                self.agenda.put(at, Happening::ToRouter { leg: name, answer });
            }
        }
    }

    fn send(&mut self, from: usize, number: ConnNumber, parcel: Parcel) {
        let delay = self.delay();
        let now = self.agenda.now();
        let Some(conn) = self.conns.get_mut(&number) else { return };
        let Some(end) = conn.hosts.iter().position(|&host| host == from) else { return };
        if !conn.open[end] {
            return;
        }
        if matches!(parcel, Parcel::Close) {
            conn.open[end] = false;
        }
        let to = 1 - end;
        conn.last[to] = (now + delay).max(conn.last[to]);
        let at = conn.last[to];
        if let Parcel::Message(message) = &parcel
            && let Ok(Some(message)) = Message::decode(message.parts(), None)
        {
            let (what, room) = told(&message);
            self.story.tell(now, "process", from, what, room, number.into());
        }
        conn.queues[to].push_back(parcel);
        self.agenda.put(at, Happening::Arrive { conn: number, end: to });
    }

    fn arrive(&mut self, number: ConnNumber, end: usize) {
        let Some(conn) = self.conns.get_mut(&number) else { return };
        let (host, life) = (conn.hosts[end], conn.lives[end]);
        if self.parted.contains(&(conn.hosts[1 - end], host)) {
            conn.lost[end] += 1;
            return;
        }
        let Some(parcel) = conn.queues[end].pop_front() else { return };
        if !conn.open[end] {
            return;
        }
        if matches!(parcel, Parcel::Close) {
            conn.open = [false; 2];
        }
        self.deliver(host, life, Input::Parcel(number, parcel));
    }

    fn reach(&mut self, number: ConnNumber, until: Nanos) {
        let now = self.agenda.now();
        let mut answered = now + self.delay();
        let Some(conn) = self.conns.get_mut(&number) else { return };
        let [from, to] = conn.hosts;
        if self.hosts[from].life != conn.lives[0] || !conn.open[0] {
            self.conns.remove(&number);
            return;
        }
        let target = &self.hosts[to];
        let parted = self.parted.contains(&(from, to)) || self.parted.contains(&(to, from));
        let proof = PEER_PROOF_TIME_MAX.as_nanos() as Nanos;
        let again = match target.process {
            _ if parted => until.min(now + DIAL_AGAIN),
            // Its kernel takes the connection, and somebody may answer in time.
            Some(_) => target.paused_until.min(now + proof),
            None => 0,
        };
        let stands = match again > now {
            true if parted || target.paused_until == again => {
                return self.agenda.put(again, Happening::Reach { conn: number, until });
            }
            true => {
                answered = again;
                false
            }
            false => target.process.is_some() && !parted,
        };
        let life = target.life;
        if stands {
            conn.lives[1] = life;
            conn.open = [true; 2];
            self.deliver(to, life, Input::Accepted { conn: number, from });
        } else {
            self.conns.remove(&number);
        }
        let life = self.hosts[from].life;
        self.agenda
            .put(answered, Happening::Pass { host: from, life, input: Input::Dialled(number, stands) });
    }

    // Requests.

    fn request(&mut self) {
        let now = self.agenda.now();
        self.begin(None, self.plan.is_calm());
        self.report.requests += 1;
        if self.report.requests < self.plan.scale.requests as usize {
            let next = now + self.dice.within(0, self.plan.gap);
            self.agenda.put(next, Happening::Request);
        }
    }

    /// A client asks; `pair` is whom it wants to be served by.
    fn begin(&mut self, pair: Option<(usize, usize)>, must_succeed: bool) {
        let now = self.agenda.now();
        let mut order = self.workload.draw();
        let mut until = now + order.patience + SLACK;
        if pair.is_some() {
            (order.patience, until) = (RECOVERED, now + RECOVERED);
        }
        let room = Room(self.rooms.draw() >> 1);
        self.ends.begun(until, must_succeed);
        let hosts = &self.hosts;
        let id = self.flights.begin(order, room, pair, |host| hosts[host].process.is_some());
        self.story.tell(now, "request", id, "begins", Some(room), 0);
        // Nothing has come of it yet that could be wrong.
        let _ = self.carry_out();
    }

    /// Does what the router wants done.
    fn carry_out(&mut self) -> Result<(), String> {
        for wish in std::mem::take(&mut self.flights.wishes) {
            match wish {
                Wish::Send { flight, room, prefill, decode } => {
                    self.open_leg(LegName { flight, role: Role::Prefill, copy: 0 }, room, prefill, prefill);
                    self.open_leg(LegName { flight, role: Role::Decode, copy: 0 }, room, decode, prefill);
                    let twice = self.plan.faults.as_ref().map_or(0, |faults| faults.twice);
                    if self.phase == Phase::Working && twice > 0 && self.dice.one_in(twice) {
                        let (role, host) =
                            self.dice.pick(&[(Role::Prefill, prefill), (Role::Decode, decode)]);
                        self.open_leg(LegName { flight, role, copy: 1 }, room, host, prefill);
                    }
                }
                Wish::Cancel(name) => self.post(name, Input::Cancel(name)),
                Wish::Remind(flight, at) => self.agenda.put(at, Happening::Remind(flight)),
                Wish::Over(flight, how) => {
                    for role in [Role::Prefill, Role::Decode] {
                        let copy = LegName { flight, role, copy: 1 };
                        self.post(copy, Input::Cancel(copy));
                    }
                    let room = self.flights.room(flight);
                    let what = match how {
                        Ok(_) => "ends well",
                        Err(cause) => cause.name(),
                    };
                    self.story.tell(self.agenda.now(), "request", flight, what, Some(room), 0);
                    self.ends.ended(flight, how)?;
                    match how {
                        Ok(_) => {
                            self.report.well += 1;
                            let expected = &self.flights.order(flight).expected;
                            tokens::whole(flight, self.flights.answer(flight), expected)?;
                        }
                        Err(cause) => *self.report.failures.entry(cause.name()).or_default() += 1,
                    }
                }
            }
        }
        Ok(())
    }

    fn open_leg(&mut self, name: LegName, room: Room, host: usize, source: usize) {
        let life = self.hosts[host].life;
        self.legs.insert(name, Leg { host, life, room, last: [0; 2] });
        let order = self.flights.order(name.flight).clone();
        self.post(name, Input::Submit(Box::new(Job { name, room, source, order })));
    }

    fn post(&mut self, name: LegName, input: Input) {
        let at = self.agenda.now() + self.delay();
        let Some(leg) = self.legs.get_mut(&name) else { return };
        leg.last[0] = at.max(leg.last[0] + 1);
        let at = leg.last[0];
        self.agenda.put(at, Happening::ToWorker { leg: name, input });
    }

    fn reach_worker(&mut self, name: LegName, input: Input) {
        let Some(leg) = self.legs.get(&name) else { return };
        let (host, life, room) = (leg.host, leg.life, leg.room);
        let what = if matches!(input, Input::Cancel(_)) { "is cancelled" } else { "comes" };
        self.story.tell(self.agenda.now(), "process", host, what, Some(room), name.role as u64);
        if self.hosts[host].life != life || self.hosts[host].process.is_none() {
            let now = self.agenda.now();
            return self.lose(name, now);
        }
        self.deliver(host, life, input);
    }

    fn reach_router(&mut self, name: LegName, answer: Answer) -> Result<(), String> {
        let now = self.agenda.now();
        let Some(leg) = self.legs.get(&name) else { return Ok(()) };
        let detail = match answer {
            Answer::Token(token) => token.into(),
            _ => name.role as u64,
        };
        let what = match answer {
            Answer::Token(_) => "answers",
            Answer::Ended(_) => "has answered",
            Answer::Lost => "is lost",
        };
        self.story.tell(now, "process", leg.host, what, Some(leg.room), detail);
        self.flights.take(name, answer, now);
        if let Answer::Token(_) = answer {
            let expected = &self.flights.order(name.flight).expected;
            tokens::begins(name.flight, self.flights.answer(name.flight), expected)?;
        } else {
            self.legs.remove(&name);
        }
        self.carry_out()
    }

    // Whether all is well.

    fn check(&mut self) -> Result<(), String> {
        let now = self.agenda.now();
        self.agenda.put(now + CHECK_EVERY, Happening::Check);
        self.ends.overdue(now)?;
        let instant = self.base + Duration::from_nanos(now);
        let hosts = &self.hosts;
        self.flights.probe(|host| hosts[host].is_up(now), instant);
        let all = self.report.requests == self.plan.scale.requests as usize;
        match self.phase {
            Phase::Working if all && self.ends.open() == 0 && now >= self.calm_from => {
                self.phase = match self.plan.is_calm() {
                    true => Phase::Idle { since: now },
                    false => Phase::Recovering { from: now + SETTLED, pair: 0 },
                };
            }
            Phase::Recovering { from, pair } if now >= from && self.ends.open() == 0 => {
                let (prefill, decode) = (self.plan.scale.prefill as usize, self.plan.scale.decode as usize);
                self.phase = match pair < prefill * decode {
                    true => {
                        self.begin(Some((pair % prefill, prefill + pair / prefill)), true);
                        Phase::Recovering { from, pair: pair + 1 }
                    }
                    false => Phase::Idle { since: now },
                };
            }
            Phase::Working | Phase::Recovering { .. } | Phase::Over => {}
            Phase::Idle { since } => {
                let rooms_gone = CLEARED + EARLY_DESTINATION_LIFE.as_nanos() as Nanos;
                match (self.all(idle::holds_nothing), self.all(idle::has_no_rooms)) {
                    (Ok(()), Ok(())) => self.phase = Phase::Over,
                    (Err(what), _) if now - since > CLEARED => return Err(what),
                    (_, Err(what)) if now - since > rooms_gone => return Err(what),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Whether something is true of all processes.
    fn all(&self, holds: impl Fn(usize, &Process) -> Result<(), String>) -> Result<(), String> {
        let hosts = self.hosts.iter().enumerate();
        let mut running = hosts.filter_map(|(index, host)| Some((index, host.process.as_ref()?)));
        running.try_for_each(|(index, process)| holds(index, process))
    }
}

/// A message in a word, and its room.
fn told(message: &Message<'_>) -> (&'static str, Option<Room>) {
    match message {
        Message::Hello(_) => ("says Hello", None),
        Message::Proof(_) => ("says Proof", None),
        Message::Announce(_) => ("says Announce", None),
        Message::Welcome(_) => ("says Welcome", None),
        Message::Refused(_) => ("says Refused", None),
        Message::Destination(destination) => ("says Destination", Some(destination.id.room)),
        Message::Abort(abort) => ("says Abort", Some(abort.id.room)),
        Message::AbortAck(ack) => ("says AbortAck", Some(ack.id.room)),
        Message::Status(status) => ("says Status", Some(status.id.room)),
        Message::Done(done) => ("says Done", Some(done.id.room)),
        Message::Bye(_) => ("says Bye", None),
    }
}
