//! Connections between processes. The data of a connection keeps its order and has a delay. Lost
//! packets are resent.

use super::{Cluster, Conn, SimEvent};
use crate::ids::{Leg, Room};
use crate::limits::{PEER_PROOF_TIME_MAX, ROUTER_ABORT_TIME};
use crate::sim::edge::{ConnNumber, Input, Output, Parcel};
use crate::sim::process::Thread;
use crate::sim::router::fleet::CallName;
use crate::stdx::event_queue::{MILLI, Nanos};
use crate::wire::message::Message;

/// Numbers of workers' notices start here; those below are the router's.
const NOTICES_OF_WORKERS: u64 = 1 << 32;
/// Time between two tries of a dial with lost packets.
const DIAL_AGAIN: Nanos = 200 * MILLI;

impl Cluster<'_> {
    /// Puts an input into a process's inbox, if the process still has this life.
    pub(super) fn deliver(&mut self, index: usize, life: u32, input: Input) {
        let host = &mut self.hosts[index];
        if let Some(process) = host.process.as_mut().filter(|_| host.life == life) {
            process.edge.inbox.push_back(input);
            self.wake_soon(index, Thread::Ctl);
        }
    }

    /// Like [`Cluster::deliver`]. If the process is gone, a caller gets an answer.
    pub(super) fn pass(&mut self, index: usize, life: u32, input: Input) {
        let gone = self.hosts[index].life != life || self.hosts[index].process.is_none();
        match (gone, input) {
            (true, Input::Called(conn, ..)) => {
                let at = self.agenda.now() + self.delay();
                let Some(conns) = self.conns.get(&conn) else { return };
                let (host, life) = (conns.hosts[0], conns.lives[0]);
                self.agenda
                    .schedule(at, SimEvent::Pass { host, life, input: Input::Shown(conn, None) });
            }
            (_, input) => self.deliver(index, life, input),
        }
    }

    pub(super) fn dispatch(&mut self, from: usize, output: Output) {
        let now = self.agenda.now();
        match output {
            Output::Parcel(conn, parcel) => self.send(from, conn, parcel),
            Output::Dial { conn, to, patience } => {
                let until = now + patience;
                let lives = [self.hosts[from].life, self.hosts[to].life];
                let conns =
                    Conn { hosts: [from, to], lives, open: [true, false], to: Default::default() };
                self.conns.insert(conn, conns);
                self.trace.record(now, "process", from, "dials", None, to as u64);
                let at = now + self.delay() + self.delay();
                self.agenda.schedule(at, SimEvent::Reach { conn, until });
            }
            Output::Call(conn, token, shown) => {
                let Some(other) = self.conns.get(&conn) else { return };
                let (host, life) = (other.hosts[1], other.lives[1]);
                let at = now + self.delay();
                self.agenda.schedule(
                    at,
                    SimEvent::Pass { host, life, input: Input::Called(conn, token, shown) },
                );
            }
            Output::Show(conn, shown) => {
                let Some(other) = self.conns.get(&conn) else { return };
                let (host, life) = (other.hosts[0], other.lives[0]);
                let at = now + self.delay();
                self.agenda
                    .schedule(at, SimEvent::Pass { host, life, input: Input::Shown(conn, shown) });
            }
            Output::Lane { to, kernel } => self.dial_lane(from, to, kernel),
            Output::Answer(name, answer) => self.answer(name, answer),
            Output::Ask { name, to, room } => {
                self.question(CallName::Leg(name), [from, to], room, Nanos::MAX);
            }
            Output::Put(name, job) => self.post(CallName::Leg(name), Input::Submit(job)),
            Output::Unask(name) => self.close(CallName::Leg(name)),
            Output::GiveUp { to, room } => {
                self.notices += 1;
                let name = CallName::Notice(NOTICES_OF_WORKERS + self.notices, room);
                self.question(name, [from, to], room, ROUTER_ABORT_TIME.as_nanos() as Nanos);
            }
        }
    }

    pub(super) fn send(&mut self, from: usize, number: ConnNumber, parcel: Parcel) {
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
        if let Parcel::Message(message) = &parcel
            && let Ok(Some(message)) = Message::decode(message.parts(), None)
        {
            let (what, room) = describe(&message);
            self.trace.record(now, "process", from, what, room, number.into());
        }
        let Some(conn) = self.conns.get_mut(&number) else { return };
        let at = conn.to[to].put(now + delay, parcel);
        self.agenda.schedule(at, SimEvent::Arrive { conn: number, end: to });
    }

    pub(super) fn arrive(&mut self, number: ConnNumber, end: usize) {
        let Some(conn) = self.conns.get_mut(&number) else { return };
        let (host, life) = (conn.hosts[end], conn.lives[end]);
        if self.parted.contains_key(&(conn.hosts[1 - end], host)) {
            return conn.to[end].lose();
        }
        // The parcel of this event can have been lost together with the connection.
        let now = self.agenda.now();
        let Some(parcel) = conn.to[end].take(now) else { return };
        if !conn.open[end] {
            if self.hosts[host].process.is_some() && conn.open[1 - end] {
                self.reset(number, 1 - end, now);
            }
            return;
        }
        if matches!(parcel, Parcel::Close) {
            conn.open[end] = false;
        }
        self.deliver(host, life, Input::Parcel(number, parcel));
    }

    /// Closes an end because the other end is gone, at `from` or later.
    pub(super) fn reset(&mut self, number: ConnNumber, end: usize, from: Nanos) {
        let delay = self.delay();
        let Some(conn) = self.conns.get_mut(&number) else { return };
        let at = conn.to[end].put(from + delay, Parcel::Close);
        self.agenda.schedule(at, SimEvent::Arrive { conn: number, end });
    }

    /// Whether packets between two hosts are lost in either direction.
    pub(super) fn is_parted(&self, one: usize, other: usize) -> bool {
        self.parted.contains_key(&(one, other)) || self.parted.contains_key(&(other, one))
    }

    pub(super) fn reach(&mut self, number: ConnNumber, until: Nanos) {
        let now = self.agenda.now();
        let mut answered = now + self.delay();
        let Some(&Conn { hosts: [from, to], .. }) = self.conns.get(&number) else { return };
        // A host that is gone does not answer, like an unreachable one.
        let parted = self.is_parted(from, to) || self.hosts[to].dark_until > now;
        let Some(conn) = self.conns.get_mut(&number) else { return };
        if self.hosts[from].life != conn.lives[0] || !conn.open[0] {
            self.conns.remove(&number);
            return;
        }
        let target = &self.hosts[to];
        let proof = PEER_PROOF_TIME_MAX.as_nanos() as Nanos;
        // A stalled peer does not prove itself.
        let still = target.paused_until.max(target.stalled_until[Thread::Ctl as usize]);
        let again = match target.process {
            _ if parted => until.min(now + DIAL_AGAIN),
            // Its kernel accepts the connection, and the process can still answer in time.
            Some(_) => still.min(now + proof),
            None => 0,
        };
        // Only prefill workers listen for peers.
        let listens = target.process.is_some() && target.role == Leg::Prefill;
        let again = if parted || listens { again } else { 0 };
        let stands = match again > now {
            true if parted || still == again => {
                return self.agenda.schedule(again, SimEvent::Reach { conn: number, until });
            }
            true => {
                answered = again;
                false
            }
            false => listens && !parted,
        };
        let life = target.life;
        if stands {
            conn.lives[1] = life;
            conn.open = [true; 2];
            let dialler = conn.lives[0];
            self.deliver(to, life, Input::Accepted { conn: number, from, life: dialler });
        } else {
            self.conns.remove(&number);
        }
        let life = self.hosts[from].life;
        self.agenda.schedule(
            answered,
            SimEvent::Pass { host: from, life, input: Input::Dialled(number, stands) },
        );
    }
}

/// The words for a message in the trace, and its room.
fn describe(message: &Message<'_>) -> (&'static str, Option<Room>) {
    match message {
        Message::Hello(_) => ("says Hello", None),
        Message::Proof(_) => ("says Proof", None),
        Message::Announce(_) => ("says Announce", None),
        Message::Welcome(_) => ("says Welcome", None),
        Message::Refused(_) => ("says Refused", None),
        Message::Destination(destination) => ("says Destination", Some(destination.id.room)),
        Message::Interest(interest) => ("says Interest", Some(interest.id.room)),
        Message::Ready(ready) => ("says Ready", Some(ready.id.room)),
        Message::Abort(abort) => ("says Abort", Some(abort.id.room)),
        Message::AbortAck(ack) => ("says AbortAck", Some(ack.id.room)),
        Message::Status(status) => ("says Status", Some(status.id.room)),
        Message::Done(done) => ("says Done", Some(done.id.room)),
        Message::Bye(_) => ("says Bye", None),
    }
}
