//! Turns of a process's threads: their times, their work, the threads that they wake, and the
//! checks after them.

use super::{Cluster, LAG_MAX, SimEvent};
use crate::ids::Leg;
use crate::sched::worker::Activity;
use crate::sim::checkers::silence::ENGINE_LOOKS;
use crate::sim::checkers::{Checked, Finding, pages, silence};
use crate::sim::edge::{Became, Turn};
use crate::sim::process::{Process, Thread};
use crate::stdx::event_queue::{MICRO, MILLI, Nanos};
use crate::transfer::event_loop::NextStep;

impl Cluster<'_> {
    /// The delay of a thread: usually small, sometimes large.
    pub(super) fn late(&mut self) -> Nanos {
        let most = self.plan.lateness;
        let rare = if self.dice.one_in(50) { 20 } else { 1 };
        self.dice.range_u64(MICRO, most * rare)
    }

    pub(super) fn wake(&mut self, index: usize, thread: Thread, at: Nanos) {
        let host = &mut self.hosts[index];
        let at = if thread == Thread::Engine { at.max(host.computes_until) } else { at };
        let due = &mut host.due[thread as usize];
        if at < *due {
            *due = at;
            self.agenda.schedule(at, SimEvent::Turn { host: index, life: host.life, thread, at });
        }
    }

    pub(super) fn wake_soon(&mut self, index: usize, thread: Thread) {
        self.wake_after(index, thread, self.agenda.now());
    }

    fn wake_after(&mut self, index: usize, thread: Thread, from: Nanos) {
        let late = self.late() * self.hosts[index].lags[thread as usize];
        self.wake(index, thread, from + late.min(LAG_MAX));
    }

    pub(super) fn turn(&mut self, index: usize, thread: Thread, now: Nanos) -> Checked {
        if self.hosts[index].process.is_none() {
            return Ok(());
        }
        let detail = match thread {
            Thread::Engine => self.turn_of_engine(index, now)?,
            Thread::Move => self.turn_of_mover(index)?,
            Thread::Ctl => match self.turn_of_ctl(index, now)? {
                Some(sent) => sent,
                None => return Ok(()),
            },
        };
        let what = ["ctl", "engine", "move"][thread as usize];
        self.trace.record(now, "process", index, what, None, detail);
        let process = self.hosts[index].process.as_ref();
        let woken: Vec<Thread> =
            process.map(|process| process.take_woken().collect()).unwrap_or_default();
        // The effects of a step are visible when its time has passed.
        let from = if thread == Thread::Engine { self.hosts[index].computes_until } else { now };
        woken.into_iter().for_each(|thread| self.wake_after(index, thread, from));
        Ok(())
    }

    fn turn_of_engine(&mut self, index: usize, now: Nanos) -> Result<u64, Finding> {
        let host = &mut self.hosts[index];
        let Some(process) = &mut host.process else { return Ok(0) };
        process.edge.hear();
        let (activity, took) = process.step_engine(now + host.skew);
        pages::conserved(index, &process.stats, host.size.pages)?;
        host.computes_until = now + took;
        let pause = match activity {
            Activity::Busy => Some(0),
            Activity::Waiting => Some(self.dice.range_u64(MILLI, 10 * MILLI)),
            // In production, an idle engine checks for work far more often.
            Activity::Idle => Some(ENGINE_LOOKS),
        };
        if let Some(pause) = pause {
            let at = now + took + pause + self.late();
            self.wake(index, Thread::Engine, at);
        }
        Ok(took << 2 | activity as u64)
    }

    fn turn_of_mover(&mut self, index: usize) -> Result<u64, Finding> {
        let host = &mut self.hosts[index];
        let Some(process) = &mut host.process else { return Ok(0) };
        let watched = host.role == Leg::Decode;
        if watched {
            self.shadow.look(process);
        }
        let next = process.step_mover();
        if watched {
            self.shadow.compare(index, process)?;
            process.note_leases();
        }
        let is_woken = || {
            process.take_ring() || process.take_event() || self.lanes.are_ready(index, host.life)
        };
        if next != NextStep::Park || is_woken() {
            self.wake_soon(index, Thread::Move);
        }
        if !watched {
            self.wake_peers();
            self.read_doorbells(index);
        }
        self.read_lanes(index);
        Ok(next as u64)
    }

    /// Returns the number of outputs; `None` if this was its last turn.
    fn turn_of_ctl(&mut self, index: usize, now: Nanos) -> Result<Option<u64>, Finding> {
        let clients = if self.hosts[index].leaves.is_some() { self.clients(index) } else { 0 };
        let host = &mut self.hosts[index];
        let kept = host.kept_until();
        let Some(process) = &mut host.process else { return Ok(None) };
        let own = now + host.skew;
        process.attend(true);
        let instant = process.instant(own);
        let computes = host.computes_until > now;
        process.edge.turn(&mut Turn {
            now: instant,
            nanos: own,
            computes,
            conns: &mut self.last_conn,
            clients,
        })?;
        process.attend(false);
        if process.edge.hangs() {
            silence::hangs(index, kept, now)?;
        }
        let tick = process.edge.next_tick - host.skew;
        process.edge.taken.drain(..).for_each(|leg| self.ends.taken(leg, now));
        let outputs = std::mem::take(&mut process.edge.outbox);
        let sent = outputs.len();
        outputs.into_iter().for_each(|output| self.dispatch(index, output));
        self.read_lanes(index);
        let heard = self.hosts[index].computes_until;
        self.wake(index, Thread::Ctl, if computes { tick.min(heard) } else { tick });
        if self.hosts[index].process.as_ref().is_some_and(|process| process.edge.has_ended()) {
            self.leave(index);
            return Ok(None);
        }
        match self.hosts[index].process.as_mut().and_then(|process| process.edge.take_became()) {
            Some(Became::Other(role)) => {
                self.turn_role(index, role)?;
                return Ok(None);
            }
            Some(Became::Same) => self.keep_role(index),
            None => {}
        }
        Ok(Some(sent as u64))
    }

    /// Wakes sleeping movers of destinations for which a source's mover has rung.
    fn wake_peers(&mut self) {
        for peer in self.hosts_of(Leg::Decode) {
            if self.hosts[peer].process.as_ref().is_some_and(Process::take_ring) {
                self.wake_soon(peer, Thread::Move);
            }
        }
    }
}
