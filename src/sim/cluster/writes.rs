//! Writes of NICs. Each request of a queue pair leaves, lands and is answered at its own times. A
//! request that has left lands even if its source dies, unless its target queue pair is gone.
//!
//! A queue pair keeps its order; two queue pairs have no common order. Lost packets are resent
//! until the NIC has received nothing for its whole patience; then the queue pair breaks. A fabric
//! that holds writes delays them beyond all deadlines, but loses none. A paused process still
//! receives writes. Not here: the check of writes (`checkers::shadow`).

use super::stream::Stream;
use super::{Cluster, SimEvent};
use crate::sim::checkers::reasons::{Effect, FaultSite};
use crate::sim::checkers::{Checked, shadow};
use crate::sim::machines::Nics;
use crate::sim::process::{Process, Thread};
use crate::stdx::event_queue::{MICRO, MILLI, Nanos};
use crate::stdx::rng::Rng;
use crate::sys::verbs::provider::{Fabric, Landed};
use std::collections::{BTreeMap, VecDeque};

/// Longest time from a doorbell, or from the previous request, until the NIC reads a request.
const READ: Nanos = 5 * MICRO;
/// Longest wait of a lost packet until it is resent. The shortest patience of a NIC is several
/// times longer.
const RESENT: Nanos = 70 * MILLI;
/// Time that a request waits if it found no receive. Production queue pairs ask their peers for the
/// same time.
const PAUSE: Nanos = 640 * MICRO;

/// A step of a queue pair's requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// The next request leaves.
    Leaves,
    /// The next request arrives at the other end.
    Lands,
    /// The answer to the oldest request arrives.
    Answered,
    /// A check whether a request has waited for too long.
    Watched,
}

/// The requests of a queue pair.
#[derive(Debug)]
struct Line {
    from: usize,
    /// The last known host of its other end.
    to: Option<usize>,
    /// Whether the next request is about to leave.
    leaves: bool,
    there: Stream<()>,
    back: Stream<()>,
    /// Time at which each unanswered request left.
    unanswered: VecDeque<Nanos>,
    watched: bool,
}

/// The writes of all NICs.
pub(super) struct Writes {
    pub(super) fabric: Fabric,
    pub(super) nics: Nics,
    lines: BTreeMap<u32, Line>,
    /// Time until which no write from one host lands at another.
    held: BTreeMap<(usize, usize), Nanos>,
    dice: Rng,
}

impl Writes {
    pub(super) fn new(nics: Nics, dice: Rng) -> Writes {
        Writes { fabric: Fabric::new(), nics, lines: BTreeMap::new(), held: BTreeMap::new(), dice }
    }

    fn line(&mut self, pair: u32, from: usize) -> &mut Line {
        self.lines.entry(pair).or_insert_with(|| Line {
            from,
            to: None,
            leaves: false,
            there: Stream::default(),
            back: Stream::default(),
            unanswered: VecDeque::new(),
            watched: false,
        })
    }

    /// Delay of a packet.
    fn delay(&mut self, (least, most): (Nanos, Nanos)) -> Nanos {
        let resent = if self.dice.one_in(200) { self.dice.range_u64(0, RESENT) } else { 0 };
        self.dice.range_u64(least, most) + resent
    }

    /// Forgets queue pairs that are gone.
    pub(super) fn forget(&mut self) {
        let Writes { fabric, lines, .. } = self;
        lines.retain(|&pair, line| fabric.has_pair(pair) || !line.there.is_empty());
    }
}

impl Cluster<'_> {
    /// After a mover's turn, sends the requests that it has posted.
    pub(super) fn read_doorbells(&mut self, host: usize) {
        let now = self.agenda.now();
        let Some(writes) = &mut self.writes else { return };
        for pair in writes.fabric.leaving(host as u32) {
            if !std::mem::replace(&mut writes.line(pair, host).leaves, true) {
                let at = now + writes.dice.range_u64(0, READ);
                self.agenda.schedule(at, SimEvent::Write(Step::Leaves, pair));
            }
        }
    }

    pub(super) fn write(&mut self, step: Step, pair: u32) -> Checked {
        match step {
            Step::Leaves => self.leave_nic(pair),
            Step::Lands => self.land(pair)?,
            Step::Answered => self.answered(pair),
            Step::Watched => self.watch(pair),
        }
        Ok(())
    }

    fn leave_nic(&mut self, pair: u32) {
        let now = self.agenda.now();
        let delays = self.plan.delay;
        let Some(writes) = &mut self.writes else { return };
        let delay = writes.delay(delays);
        let next = now + writes.dice.range_u64(1, READ);
        let Some(line) = writes.lines.get_mut(&pair) else { return };
        line.leaves = writes.fabric.depart(pair);
        if !line.leaves {
            return;
        }
        self.agenda.schedule(next, SimEvent::Write(Step::Leaves, pair));
        line.to = writes.fabric.place_of_peer(pair).map(|place| place as usize).or(line.to);
        line.unanswered.push_back(now);
        let at = line.there.put(now + delay, ());
        self.agenda.schedule(at, SimEvent::Write(Step::Lands, pair));
        if !std::mem::replace(&mut line.watched, true) {
            let until = now + writes.nics.patience;
            self.agenda.schedule(until, SimEvent::Write(Step::Watched, pair));
        }
    }

    fn land(&mut self, pair: u32) -> Checked {
        let now = self.agenda.now();
        let Some(writes) = &mut self.writes else { return Ok(()) };
        let delay = writes.delay(self.plan.delay);
        let Some(line) = writes.lines.get_mut(&pair) else { return Ok(()) };
        let (from, to) = (line.from, line.to);
        if to.is_some_and(|to| self.parted.contains_key(&(from, to))) {
            line.there.lose();
            return Ok(());
        }
        let held = to.and_then(|to| writes.held.get(&(from, to)).copied());
        if let Some(until) = held.filter(|&until| until > now) {
            self.agenda.schedule(until + delay, SimEvent::Write(Step::Lands, pair));
            return Ok(());
        }
        if line.there.take(now).is_none() {
            return Ok(());
        }
        let Some(landed) = writes.fabric.land(pair) else { return Ok(()) };
        match landed {
            Landed::Here { .. } | Landed::Refused => {
                let at = line.back.put(now + delay, ());
                self.agenda.schedule(at, SimEvent::Write(Step::Answered, pair));
            }
            Landed::Later => {
                // Its source knows that it must wait.
                line.unanswered.iter_mut().for_each(|left| *left = now);
                line.there.put_first(now, ());
                self.agenda.schedule(now + PAUSE, SimEvent::Write(Step::Lands, pair));
            }
            Landed::Unanswered => {}
        }
        if let (Landed::Here { address, bytes }, Some(to)) = (landed, to) {
            self.trace.record(now, "process", to, "is written to", None, bytes);
            if let Some(process) = &self.hosts[to].process {
                shadow::written(to, process, address, bytes)?;
            }
            self.rouse(to);
        }
        Ok(())
    }

    fn answered(&mut self, pair: u32) {
        let now = self.agenda.now();
        let Some(writes) = &mut self.writes else { return };
        let Some(line) = writes.lines.get_mut(&pair) else { return };
        let from = line.from;
        if line.to.is_some_and(|to| self.parted.contains_key(&(to, from))) {
            return line.back.lose();
        }
        if line.back.take(now).is_some() {
            line.unanswered.pop_front();
            writes.fabric.answer(pair);
            self.rouse(from);
        }
    }

    fn watch(&mut self, pair: u32) {
        let now = self.agenda.now();
        let Some(writes) = &mut self.writes else { return };
        let Some(line) = writes.lines.get_mut(&pair) else { return };
        line.watched = false;
        let Some(&oldest) = line.unanswered.front() else { return };
        let from = line.from;
        let until = oldest + writes.nics.patience;
        if until > now {
            line.watched = true;
            return self.agenda.schedule(until, SimEvent::Write(Step::Watched, pair));
        }
        line.unanswered.clear();
        if writes.fabric.give_up(pair) {
            self.trace.record(now, "process", from, "is not answered", None, pair.into());
            self.rouse(from);
        }
    }

    pub(super) fn hold_writes(&mut self, from: usize, to: usize, over: Nanos) {
        self.trace.record(self.agenda.now(), "way", from, "is held", None, to as u64);
        if let Some(writes) = &mut self.writes {
            let until = writes.held.entry((from, to)).or_default();
            *until = over.max(*until);
        }
    }

    /// Makes a NIC fail, if a write waits for its answer.
    pub(super) fn give_up_writes(&mut self) {
        let now = self.agenda.now();
        let Some(writes) = &mut self.writes else { return };
        let waiting = writes.lines.iter().filter(|(_, line)| !line.unanswered.is_empty());
        let waiting: Vec<u32> = waiting.map(|(&pair, _)| pair).collect();
        if waiting.is_empty() {
            return;
        }
        let pair = writes.dice.pick(&waiting);
        let Some(line) = writes.lines.get_mut(&pair) else { return };
        let from = line.from;
        line.unanswered.clear();
        let place = line.to.map_or(FaultSite::Host(from), |to| FaultSite::Way(from, to));
        if writes.fabric.give_up(pair) {
            self.reasons.add(Effect::Breaks, place, now, now);
            self.trace.record(now, "process", from, "gives up", None, pair.into());
            self.rouse(from);
        }
    }

    /// Resends data that was lost between hosts that can reach each other again.
    pub(super) fn write_again(&mut self) {
        let now = self.agenda.now();
        let Some(writes) = &mut self.writes else { return };
        for (&pair, line) in &mut writes.lines {
            let Some(to) = line.to else { continue };
            let parted = |from: usize, to: usize| self.parted.contains_key(&(from, to));
            let there = if parted(line.from, to) { 0 } else { line.there.resend() };
            let back = if parted(to, line.from) { 0 } else { line.back.resend() };
            for (lost, step) in [(there, Step::Lands), (back, Step::Answered)] {
                for _ in 0..lost {
                    let at = now + writes.dice.range_u64(0, RESENT);
                    self.agenda.schedule(at, SimEvent::Write(step, pair));
                }
            }
        }
    }

    /// Signals an event of a NIC, and wakes the mover if it sleeps.
    fn rouse(&mut self, host: usize) {
        if self.hosts[host].process.as_ref().is_some_and(Process::take_event) {
            self.wake_soon(host, Thread::Move);
        }
    }
}
