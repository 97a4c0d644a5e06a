//! What NICs write: each request of a queue pair leaves, lands and is answered, at times of their own. What has left is the
//! network's, and lands whatever becomes of its source, unless the queue pair that it is for is gone.
//!
//! A queue pair keeps its order, two of them do not. What is lost is sent again, until the NIC has heard nothing for as
//! long as it tries: then its queue pair has broken. A fabric that holds back what is on its way makes that later than
//! anybody waits, and loses none of it. A process that stands still is written to nonetheless.
//! Not here: what of that is allowed (`checkers::shadow`).

use super::stream::Stream;
use super::{Cluster, Happening};
use crate::sim::agenda::{MICRO, MILLI, Nanos};
use crate::sim::checkers::reasons::{Effect, Place};
use crate::sim::checkers::{Checked, shadow};
use crate::sim::dice::Dice;
use crate::sim::machines::Nics;
use crate::sim::process::{Process, Thread};
use crate::sys::verbs::provider::{Fabric, Landed};
use std::collections::{BTreeMap, VecDeque};

/// From a doorbell, or the request before, until a request is read.
const READ: Nanos = 5 * MICRO;
/// How long a lost packet waits to be sent again, at most: less than the shortest time that NICs try, several times over.
const RESENT: Nanos = 70 * MILLI;
/// How long one waits that found no receive, as queue pairs of production ask their peers to.
const PAUSE: Nanos = 640 * MICRO;

/// What happens to a queue pair's requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// The next one leaves.
    Leaves,
    /// The next one comes to the other end.
    Lands,
    /// What became of the oldest is heard.
    Answered,
    /// Has one been waited for too long?
    Watched,
}

/// Requests of a queue pair.
#[derive(Debug)]
struct Line {
    from: usize,
    /// Where its other end was last.
    to: Option<usize>,
    /// The next one is about to leave.
    leaves: bool,
    there: Stream<()>,
    back: Stream<()>,
    /// When each left that is not answered.
    unanswered: VecDeque<Nanos>,
    watched: bool,
}

/// All of them.
pub(super) struct Writes {
    pub(super) fabric: Fabric,
    pub(super) nics: Nics,
    lines: BTreeMap<u32, Line>,
    /// From a host to another, nothing that NICs write lands until then.
    held: BTreeMap<(usize, usize), Nanos>,
    dice: Dice,
}

impl Writes {
    pub(super) fn new(nics: Nics, dice: Dice) -> Writes {
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

    /// How long a packet takes.
    fn delay(&mut self, (least, most): (Nanos, Nanos)) -> Nanos {
        let resent = if self.dice.one_in(200) { self.dice.within(0, RESENT) } else { 0 };
        self.dice.within(least, most) + resent
    }

    /// Forgets queue pairs that are gone.
    pub(super) fn forget(&mut self) {
        let Writes { fabric, lines, .. } = self;
        lines.retain(|&pair, line| fabric.has_pair(pair) || !line.there.is_empty());
    }
}

impl Cluster<'_> {
    /// A mover had a turn: what it has posted leaves.
    pub(super) fn read_doorbells(&mut self, host: usize) {
        let now = self.agenda.now();
        let Some(writes) = &mut self.writes else { return };
        for pair in writes.fabric.leaving(host as u32) {
            if !std::mem::replace(&mut writes.line(pair, host).leaves, true) {
                let at = now + writes.dice.within(0, READ);
                self.agenda.put(at, Happening::Write(Step::Leaves, pair));
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
        let next = now + writes.dice.within(1, READ);
        let Some(line) = writes.lines.get_mut(&pair) else { return };
        line.leaves = writes.fabric.depart(pair);
        if !line.leaves {
            return;
        }
        self.agenda.put(next, Happening::Write(Step::Leaves, pair));
        line.to = writes.fabric.place_of_peer(pair).map(|place| place as usize).or(line.to);
        line.unanswered.push_back(now);
        let at = line.there.put(now + delay, ());
        self.agenda.put(at, Happening::Write(Step::Lands, pair));
        if !std::mem::replace(&mut line.watched, true) {
            let until = now + writes.nics.patience;
            self.agenda.put(until, Happening::Write(Step::Watched, pair));
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
            self.agenda.put(until + delay, Happening::Write(Step::Lands, pair));
            return Ok(());
        }
        if line.there.take(now).is_none() {
            return Ok(());
        }
        let Some(landed) = writes.fabric.land(pair) else { return Ok(()) };
        match landed {
            Landed::Here { .. } | Landed::Refused => {
                let at = line.back.put(now + delay, ());
                self.agenda.put(at, Happening::Write(Step::Answered, pair));
            }
            Landed::Later => {
                // Its source has heard of that.
                line.unanswered.iter_mut().for_each(|left| *left = now);
                line.there.put_first(now, ());
                self.agenda.put(now + PAUSE, Happening::Write(Step::Lands, pair));
            }
            Landed::Unanswered => {}
        }
        if let (Landed::Here { address, bytes }, Some(to)) = (landed, to) {
            self.story.tell(now, "process", to, "is written to", None, bytes);
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
            return self.agenda.put(until, Happening::Write(Step::Watched, pair));
        }
        line.unanswered.clear();
        if writes.fabric.give_up(pair) {
            self.story.tell(now, "process", from, "is not answered", None, pair.into());
            self.rouse(from);
        }
    }

    pub(super) fn hold_writes(&mut self, from: usize, to: usize, over: Nanos) {
        self.story.tell(self.agenda.now(), "way", from, "is held", None, to as u64);
        if let Some(writes) = &mut self.writes {
            let until = writes.held.entry((from, to)).or_default();
            *until = over.max(*until);
        }
    }

    /// A NIC has a fault of its own, if one waits to hear what became of a write.
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
        let place = line.to.map_or(Place::Host(from), |to| Place::Way(from, to));
        if writes.fabric.give_up(pair) {
            self.reasons.add(Effect::Breaks, place, now, now);
            self.story.tell(now, "process", from, "gives up", None, pair.into());
            self.rouse(from);
        }
    }

    /// What was lost on ways that are whole again is sent again.
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
                    let at = now + writes.dice.within(0, RESENT);
                    self.agenda.put(at, Happening::Write(step, pair));
                }
            }
        }
    }

    /// A NIC has something to tell, and wakes who sleeps.
    fn rouse(&mut self, host: usize) {
        if self.hosts[host].process.as_ref().is_some_and(Process::take_event) {
            self.wake_soon(host, Thread::Move);
        }
    }
}
