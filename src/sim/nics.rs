//! The NICs of hosts: each request of a queue pair leaves, lands and is answered at its own times.
//!
//! Invariants: a queue pair keeps its order; two queue pairs have no common order. A request that
//! has left lands even if its source dies, unless its target queue pair is gone. What travels
//! during a cut, or while writes are held, arrives after it. A queue pair breaks if a request gets
//! no answer for the patience of its NIC.
//! Not here: the bytes and their checks (`sys::verbs::provider`).

use super::fleet::HostSite;
use super::network::Network;
use super::{Event, RunDigest};
use crate::stdx::event_queue::{EventQueue, MICRO, MILLI, Nanos};
use crate::stdx::rng::Rng;
use crate::sys::verbs::provider::{Fabric, Landed};
use crate::transfer::transport::rdma::Nic;
use std::collections::{BTreeMap, VecDeque};

/// Longest time from a doorbell, or from the previous request, until the NIC reads a request.
const READ: Nanos = 5 * MICRO;
/// The shortest and the usual longest delay of a packet.
const DELAY: (Nanos, Nanos) = (5 * MICRO, 100 * MICRO);
/// The longest delay of a packet that was sent twice.
const RESENT: Nanos = 70 * MILLI;
/// Time that a request waits if it found no receive. Production queue pairs ask their peers for
/// the same time.
const PAUSE: Nanos = 640 * MICRO;

/// A step of a queue pair's requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NicStep {
    /// The next request leaves.
    Leave,
    /// The next request arrives at the other end.
    Land,
    /// The answer to the oldest request arrives.
    Answer,
    /// A request may have waited for too long.
    Watch,
}

/// What a step has done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NicEvent {
    /// No process notices it.
    Nothing,
    /// Bytes have landed in the memory of a host.
    Landed {
        /// The host.
        host: usize,
        /// Address of the first byte.
        address: u64,
        /// Number of bytes.
        bytes: u64,
    },
    /// The NIC of this host has an event for its process.
    Completed(usize),
}

/// The requests of a queue pair.
#[derive(Debug)]
struct Line {
    from: usize,
    /// The last known host of its other end.
    to: Option<usize>,
    /// Whether the next request is about to leave.
    leaves: bool,
    /// The last arrival at the other end, and the last answer.
    last: [Nanos; 2],
    /// Time at which each unanswered request left.
    unanswered: VecDeque<Nanos>,
    watched: bool,
}

/// The NICs of all hosts, on one fabric.
#[derive(Debug)]
pub struct NicNetwork {
    fabric: Fabric,
    lines: BTreeMap<u32, Line>,
    /// By host: writes to it land after this time.
    held: BTreeMap<usize, Nanos>,
    /// Time for which a NIC sends a request again.
    patience: Nanos,
    dice: Rng,
}

impl NicNetwork {
    /// NICs that resend a request for this time.
    pub fn new(patience: Nanos, dice: Rng) -> NicNetwork {
        let (fabric, lines, held) = (Fabric::new(), BTreeMap::new(), BTreeMap::new());
        NicNetwork { fabric, lines, held, patience, dice }
    }

    /// The NICs of a host at this site.
    pub fn of_site(&self, host: usize, site: HostSite) -> Vec<Nic> {
        site.has_nic.then(|| self.nic(host)).into_iter().collect()
    }

    /// The NIC of a host.
    pub fn nic(&self, host: usize) -> Nic {
        let device = self.fabric.device_in(host as u32);
        Nic { device, route: self.fabric.route(), number: 0, node: None, chosen: "sim".into() }
    }

    /// After a turn of a host's process: its NIC reads the posted requests.
    pub fn pump(&mut self, host: usize, queue: &mut EventQueue<Event>) {
        let NicNetwork { fabric, lines, dice, .. } = self;
        for pair in fabric.leaving(host as u32) {
            let line = lines.entry(pair).or_insert_with(|| Line {
                from: host,
                to: None,
                leaves: false,
                last: [0; 2],
                unanswered: VecDeque::new(),
                watched: false,
            });
            if !std::mem::replace(&mut line.leaves, true) {
                let at = queue.now() + dice.range_u64(0, READ);
                queue.schedule(at, Event::Nic(NicStep::Leave, pair));
            }
        }
    }

    /// A step of a queue pair. Returns what a process can notice.
    pub fn step(
        &mut self,
        (step, pair): (NicStep, u32),
        network: &Network,
        queue: &mut EventQueue<Event>,
        digest: &mut RunDigest,
    ) -> NicEvent {
        digest.note([5, step as u64, pair.into()]);
        let Some(line) = self.lines.get(&pair) else { return NicEvent::Nothing };
        let (now, from, to) = (queue.now(), line.from, line.to.unwrap_or(line.from));
        let is_arrival = matches!(step, NicStep::Land | NicStep::Answer);
        let until = network.cut_end(from, to).max(self.held.get(&to).copied().unwrap_or(0));
        if is_arrival && until > now {
            queue.schedule(until + self.dice.range_u64(0, READ), Event::Nic(step, pair));
            return NicEvent::Nothing;
        }
        match step {
            NicStep::Leave => self.leave(pair, queue),
            NicStep::Land => return self.land(pair, queue),
            NicStep::Answer => {
                if let Some(line) = self.lines.get_mut(&pair) {
                    line.unanswered.pop_front();
                    self.fabric.answer(pair);
                    return NicEvent::Completed(from);
                }
            }
            NicStep::Watch => return self.watch(pair, queue),
        }
        NicEvent::Nothing
    }

    fn leave(&mut self, pair: u32, queue: &mut EventQueue<Event>) {
        let now = queue.now();
        let (delay, next) = (self.delay(), now + self.dice.range_u64(1, READ));
        let NicNetwork { fabric, lines, patience, .. } = self;
        let Some(line) = lines.get_mut(&pair) else { return };
        line.leaves = fabric.depart(pair);
        if !line.leaves {
            return;
        }
        queue.schedule(next, Event::Nic(NicStep::Leave, pair));
        line.to = fabric.place_of_peer(pair).map(|place| place as usize).or(line.to);
        line.unanswered.push_back(now);
        line.last[0] = (now + delay).max(line.last[0] + 1);
        queue.schedule(line.last[0], Event::Nic(NicStep::Land, pair));
        if !std::mem::replace(&mut line.watched, true) {
            queue.schedule(now + *patience, Event::Nic(NicStep::Watch, pair));
        }
    }

    fn land(&mut self, pair: u32, queue: &mut EventQueue<Event>) -> NicEvent {
        let (now, delay) = (queue.now(), self.delay());
        let NicNetwork { fabric, lines, .. } = self;
        let Some(line) = lines.get_mut(&pair) else { return NicEvent::Nothing };
        let Some(landed) = fabric.land(pair) else { return NicEvent::Nothing };
        match landed {
            Landed::Here { .. } | Landed::Refused => {
                line.last[1] = (now + delay).max(line.last[1] + 1);
                queue.schedule(line.last[1], Event::Nic(NicStep::Answer, pair));
            }
            Landed::Later => {
                // Its source knows that it must wait.
                line.unanswered.iter_mut().for_each(|left| *left = now);
                queue.schedule(now + PAUSE, Event::Nic(NicStep::Land, pair));
            }
            Landed::Unanswered => {}
        }
        match (landed, line.to) {
            (Landed::Here { address, bytes }, Some(host)) => {
                NicEvent::Landed { host, address, bytes }
            }
            _ => NicEvent::Nothing,
        }
    }

    fn watch(&mut self, pair: u32, queue: &mut EventQueue<Event>) -> NicEvent {
        let Some(line) = self.lines.get_mut(&pair) else { return NicEvent::Nothing };
        line.watched = false;
        let Some(&oldest) = line.unanswered.front() else {
            if !self.fabric.has_pair(pair) {
                self.lines.remove(&pair);
            }
            return NicEvent::Nothing;
        };
        let until = oldest + self.patience;
        if until > queue.now() {
            line.watched = true;
            queue.schedule(until, Event::Nic(NicStep::Watch, pair));
            return NicEvent::Nothing;
        }
        self.give_up(pair)
    }

    /// Holds back what NICs write to a host until this time.
    pub fn hold(&mut self, host: usize, until: Nanos) {
        let held = self.held.entry(host).or_default();
        *held = until.max(*held);
    }

    /// Breaks a queue pair that waits for an answer, as a NIC with an error does.
    pub fn break_one(&mut self) -> NicEvent {
        let waiting = self.lines.iter().filter(|(_, line)| !line.unanswered.is_empty());
        let waiting: Vec<u32> = waiting.map(|(&pair, _)| pair).collect();
        match waiting.is_empty() {
            true => NicEvent::Nothing,
            false => {
                let pair = self.dice.pick(&waiting);
                self.give_up(pair)
            }
        }
    }

    fn give_up(&mut self, pair: u32) -> NicEvent {
        let Some(line) = self.lines.get_mut(&pair) else { return NicEvent::Nothing };
        line.unanswered.clear();
        match self.fabric.give_up(pair) {
            true => NicEvent::Completed(line.from),
            false => NicEvent::Nothing,
        }
    }

    /// Delay of a packet.
    fn delay(&mut self) -> Nanos {
        let resent = if self.dice.one_in(200) { self.dice.range_u64(0, RESENT) } else { 0 };
        self.dice.range_u64(DELAY.0, DELAY.1) + resent
    }
}
