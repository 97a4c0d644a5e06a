//! Injects faults and ends them.

use super::calls::Call;
use super::{Cluster, Conn, RESENT, SimEvent};
use crate::limits::{ENGINE_STILL_MAX, NET_HOST_SILENCE_MAX};
use crate::sim::checkers::reasons::{Effect, FaultSite};
use crate::sim::checkers::{Checked, silence};
use crate::sim::edge::{ConnNumber, Input, Parcel};
use crate::sim::faults::{Fault, ROUTER};
use crate::sim::plan::Size;
use crate::sim::process::Thread;
use crate::sim::router::fleet::CallName;
use crate::stdx::event_queue::Nanos;

impl Cluster<'_> {
    pub(super) fn go_wrong(&mut self, fault: Fault) -> Checked {
        let now = self.agenda.now();
        // The hit request records these faults.
        if !matches!(fault, Fault::CutCall | Fault::Abort | Fault::Leave) {
            self.trace.record_fault(now, &fault);
        }
        let over = now + fault.time();
        self.explain(fault, over);
        self.expect_silence(fault, over);
        match fault {
            Fault::Cut => self.cut_any(),
            Fault::CutCall => self.cut_any_call(),
            Fault::Crash { host, silent, .. } => self.crash(host, silent, over),
            Fault::Pause { host, .. } => {
                self.trace.record(now, "process", host, "stands still", None, over);
                let host = &mut self.hosts[host];
                host.paused_until = host.paused_until.max(over);
            }
            Fault::Stall { host, thread, .. } => {
                self.trace.record(
                    now,
                    "process",
                    host,
                    "has a thread stand still",
                    None,
                    thread as u64,
                );
                let until = &mut self.hosts[host].stalled_until[thread as usize];
                *until = over.max(*until);
            }
            Fault::Hang { host, .. } => {
                self.trace.record(now, "process", host, "has an engine that hangs", None, over);
                let until = &mut self.hosts[host].stalled_until[Thread::Engine as usize];
                *until = over.max(*until);
            }
            Fault::Drain { host, down } => self.drain(host, down),
            Fault::Turn { host, patience, still } => self.tell_to_turn(host, patience, still),
            Fault::Abort => self.abort_any()?,
            Fault::Part { from, to, both, .. } => self.part([from, to], both, over),
            Fault::Hold { from, to, .. } => {
                self.hold_writes(from, to, over);
                self.hold_lanes(from, to, over);
            }
            Fault::GiveUp => self.give_up_writes(),
            Fault::CutLane => self.cut_lane(),
            Fault::HoldLane { .. } => self.hold_lane(over),
            Fault::Slow { host, factor, .. } => self.slow(host, factor, over),
            Fault::Jump { host, by } => {
                self.trace.record(now, "process", host, "is later", None, by);
                self.hosts[host].skew += by;
                self.hosts[host].jumped = now;
                self.wake_soon(host, Thread::Ctl);
            }
            Fault::Leave => self.leave_any()?,
        }
        Ok(())
    }

    /// Records the effect of a fault and its place. If a fault hits one of many targets, the
    /// function that picks the target records it.
    fn explain(&mut self, fault: Fault, over: Nanos) {
        let now = self.agenda.now();
        let (effect, place, over) = match fault {
            Fault::Crash { host, .. } => (Effect::Breaks, FaultSite::Host(host), over),
            Fault::Pause { host, .. }
            | Fault::Hang { host, .. }
            | Fault::Stall { host, thread: Thread::Ctl, .. } => {
                (Effect::Silences, FaultSite::Host(host), over)
            }
            // A lane also does not prove itself.
            Fault::Stall { host, thread: Thread::Move, .. } => {
                (Effect::Holds, FaultSite::Host(host), over)
            }
            Fault::Stall { host, .. } => (Effect::Delays, FaultSite::Host(host), over),
            // A step that has begun stays slow after that.
            Fault::Slow { host, factor, .. } => {
                let Size { config, token, .. } = self.hosts[host].size;
                let step = config.max_prefill_tokens as Nanos * token * factor;
                (Effect::Delays, FaultSite::Host(host), over + step)
            }
            Fault::Part { from, to, .. } => (Effect::Silences, FaultSite::Way(from, to), over),
            Fault::Hold { from, to, .. } => (Effect::Holds, FaultSite::Way(from, to), over),
            Fault::Jump { host, by } => (Effect::Skips(by), FaultSite::Host(host), now),
            Fault::Cut
            | Fault::CutCall
            | Fault::GiveUp
            | Fault::CutLane
            | Fault::HoldLane { .. }
            | Fault::Drain { .. }
            | Fault::Turn { .. }
            | Fault::Abort
            | Fault::Leave => return,
        };
        self.reasons.add(effect, place, now, over);
    }

    fn cut_any(&mut self) {
        let now = self.agenda.now();
        let open = self.conns.iter().filter(|(_, conn)| conn.open == [true; 2]);
        let open: Vec<ConnNumber> = open.map(|(&number, _)| number).collect();
        if !open.is_empty() {
            let number = self.dice.pick(&open);
            let [from, to] = self.conns[&number].hosts;
            self.reasons.add(Effect::Breaks, FaultSite::Way(from, to), now, now);
            self.cut(number);
        }
    }

    fn cut_any_call(&mut self) {
        let now = self.agenda.now();
        let open: Vec<CallName> = self.open_calls().collect();
        if !open.is_empty() {
            let name = self.dice.pick(&open);
            let way = FaultSite::Way(self.calls[&name].from, self.calls[&name].host);
            self.reasons.add(Effect::Breaks, way, now, now);
            self.cut_call(name);
        }
    }

    fn abort_any(&mut self) -> Checked {
        let open: Vec<usize> = self.flights.open().collect();
        if open.is_empty() {
            return Ok(());
        }
        let flight = self.dice.pick(&open);
        self.abort(flight)
    }

    fn leave_any(&mut self) -> Checked {
        let now = self.agenda.now();
        let open: Vec<usize> = self.flights.open().collect();
        if open.is_empty() {
            return Ok(());
        }
        let flight = self.dice.pick(&open);
        let room = self.flights.room(flight);
        self.trace.record(now, "request", flight, "is left by its client", Some(room), 0);
        self.ends.left(flight);
        self.flights.gone(flight, now);
        self.carry_out()
    }

    fn part(&mut self, [from, to]: [usize; 2], both: bool, over: Nanos) {
        self.trace.record(self.agenda.now(), "way", from, "is parted", None, to as u64);
        let ways = [Some((from, to)), both.then_some((to, from))];
        for &way in ways.iter().flatten() {
            let until = self.parted.entry(way).or_default();
            *until = over.max(*until);
        }
        self.agenda.schedule(over, SimEvent::Heal { ways });
    }

    fn slow(&mut self, index: usize, factor: u64, over: Nanos) {
        let host = &mut self.hosts[index];
        host.slow_until = over.max(host.slow_until);
        if let Some(process) = &host.process {
            process.slow_down(&host.size, factor);
        }
        let life = host.life;
        self.agenda.schedule(over, SimEvent::Quicken { host: index, life });
    }

    /// Aborts a request. The router notifies all workers that it can reach.
    fn abort(&mut self, flight: usize) -> Checked {
        let now = self.agenda.now();
        let room = self.flights.room(flight);
        self.trace.record(now, "request", flight, "is aborted", Some(room), 0);
        self.ends.aborted(flight);
        for host in 0..self.hosts.len() {
            if !self.is_parted(ROUTER, host) {
                let (at, life) = (now + self.delay(), self.hosts[host].life);
                self.agenda
                    .schedule(at, SimEvent::Pass { host, life, input: Input::Abort(flight) });
            }
        }
        self.flights.abort(flight, now);
        self.carry_out()
    }

    /// Orders a process to drain, unless there is none or it is already draining.
    fn drain(&mut self, index: usize, down: Nanos) {
        let now = self.agenda.now();
        let host = &mut self.hosts[index];
        if host.process.is_some() && host.leaves.is_none() {
            host.leaves = Some((now, down));
            let life = host.life;
            self.reasons.leaves(index, false, now);
            self.trace.record(now, "process", index, "starts to drain", None, down);
            self.deliver(index, life, Input::Drain);
        }
    }

    /// Ends a process that has drained.
    pub(super) fn leave(&mut self, index: usize) {
        let now = self.agenda.now();
        let down = self.hosts[index].leaves.map_or(0, |(_, down)| down);
        self.trace.record(now, "process", index, "has drained", None, down);
        self.reasons.ends(index, now);
        self.crash(index, false, now + down);
    }

    /// Schedules a check: after a long stall, no earlier request waits for the worker.
    fn expect_silence(&mut self, fault: Fault, over: Nanos) {
        let now = self.agenda.now();
        let (host, from) = match fault {
            Fault::Pause { host, .. } | Fault::Crash { host, silent: true, .. } => (host, now),
            Fault::Hang { host, .. } => (host, now + ENGINE_STILL_MAX.as_nanos() as Nanos),
            Fault::Part { from: ROUTER, to: host, .. }
            | Fault::Part { from: host, to: ROUTER, .. } => (host, now),
            _ => return,
        };
        let known = from + if self.plan.turns() { silence::KNOWN_ANEW } else { silence::KNOWN };
        if known < over {
            let life = self.hosts[host].life;
            self.agenda.schedule(known, SimEvent::Silent { host, life, since: now });
        }
    }

    /// Breaks a connection. Data in flight is lost. Both ends notice it, each at its time.
    fn cut(&mut self, number: ConnNumber) {
        self.trace.record(self.agenda.now(), "connection", number as usize, "is cut", None, 0);
        for end in [0, 1] {
            // The end that sends next, or that has keepalive probes, notices first.
            let rare = if self.dice.one_in(2) { self.dice.range_u64(0, RESENT) } else { 0 };
            if let Some(conn) = self.conns.get_mut(&number) {
                conn.to[end].clear();
            }
            self.reset(number, end, self.agenda.now() + rare);
        }
    }

    /// Ends a process by a crash. Its kernel closes its connections. If its host also dies, peers
    /// notice it from the next process at this address, or from the silence.
    fn crash(&mut self, index: usize, silent: bool, over: Nanos) {
        let now = self.agenda.now();
        if self.hosts[index].process.take().is_none() {
            return;
        }
        self.trace.record(now, "process", index, "dies", None, silent.into());
        self.agenda.schedule(over, SimEvent::Restart { host: index });
        let life = self.hosts[index].life;
        self.leave_lanes(index, life, silent);
        self.close_links(index, life, silent);
        if silent {
            self.hosts[index].dark_until = over;
        } else {
            let at = now + self.delay();
            self.agenda.schedule(at, SimEvent::Dropped { host: index, life });
        }
        self.close_asked(index, life, silent, over);
        let calls = self.calls.iter().filter(|(_, call)| call.leads_to(index, life));
        for name in calls.map(|(&name, _)| name).collect::<Vec<_>>() {
            self.lose(name);
        }
    }

    /// Closes the links of a process. The other ends notice, unless the host is gone.
    pub(super) fn close_links(&mut self, index: usize, life: u32, silent: bool) {
        let is_open = |conn: &Conn, end: usize| conn.is_end(end, index, life) && conn.open[end];
        for (number, end) in self.find(is_open) {
            match (silent, self.conns.get_mut(&number)) {
                (true, Some(conn)) => conn.open[end] = false,
                _ => self.send(index, number, Parcel::Close),
            }
        }
    }

    /// Closes its calls to other workers.
    pub(super) fn close_asked(&mut self, index: usize, life: u32, silent: bool, over: Nanos) {
        let now = self.agenda.now();
        let asked = self.calls.iter().filter(|(_, call)| call.comes_from(index, life));
        for name in asked.map(|(&name, _)| name).collect::<Vec<_>>() {
            match (silent, name, self.calls.remove(&name)) {
                // The other end's kernel notices by itself.
                (true, CallName::Leg(leg), Some(Call { host, life: Some(life), .. })) => {
                    let at =
                        over.min(now + NET_HOST_SILENCE_MAX.as_nanos() as Nanos) + self.delay();
                    let input = Input::Cancel(leg);
                    self.agenda.schedule(at, SimEvent::Pass { host, life, input });
                }
                (true, ..) | (false, _, None) => {}
                (false, _, Some(call)) => {
                    self.calls.insert(name, call);
                    self.close(name);
                }
            }
        }
    }

    fn find(&self, is_meant: impl Fn(&Conn, usize) -> bool) -> Vec<(ConnNumber, usize)> {
        let ends =
            self.conns.iter().flat_map(|(&number, conn)| [(number, conn, 0), (number, conn, 1)]);
        ends.filter(|&(_, conn, end)| is_meant(conn, end))
            .map(|(number, _, end)| (number, end))
            .collect()
    }

    /// Starts another process at the same address. It resets the connections of the old process,
    /// because it does not know them.
    pub(super) fn restart(&mut self, index: usize) {
        let now = self.agenda.now();
        self.trace.record(now, "process", index, "is started again", None, 0);
        self.reasons.returns(index, now);
        let life = self.hosts[index].life;
        self.start(index);
        let is_left = |conn: &Conn, end: usize| conn.is_end(end, index, life) && conn.open[1 - end];
        for (number, end) in self.find(is_left) {
            self.reset(number, 1 - end, self.agenda.now());
        }
    }

    /// Resends data that was lost between these hosts.
    pub(super) fn heal(&mut self, ways: [Option<(usize, usize)>; 2]) {
        let now = self.agenda.now();
        // A partition that began later can still last.
        self.parted.retain(|way, until| !ways.contains(&Some(*way)) || *until > now);
        for (&number, conn) in &mut self.conns {
            for end in [0, 1] {
                if self.parted.contains_key(&(conn.hosts[1 - end], conn.hosts[end])) {
                    continue;
                }
                for _ in 0..conn.to[end].resend() {
                    let at = now + self.dice.range_u64(0, RESENT);
                    self.agenda.schedule(at, SimEvent::Arrive { conn: number, end });
                }
            }
        }
        self.write_again();
        self.carry_again();
        for (&name, call) in &mut self.calls {
            let (there, back) = ((call.from, call.host), (call.host, call.from));
            let to_worker =
                if self.parted.contains_key(&there) { 0 } else { call.to_worker.resend() };
            let to_router =
                if self.parted.contains_key(&back) { 0 } else { call.to_router.resend() };
            let again =
                [(to_worker, SimEvent::ToWorker as fn(_) -> _), (to_router, SimEvent::ToRouter)];
            for (lost, arrives) in again {
                for _ in 0..lost {
                    let at = now + self.dice.range_u64(0, RESENT);
                    self.agenda.schedule(at, arrives(name));
                }
            }
        }
    }

    /// Restores the speed of a model, unless another fault still slows it down.
    pub(super) fn quicken(&mut self, index: usize, life: u32) {
        let host = &self.hosts[index];
        let meant = host.life == life && host.slow_until <= self.agenda.now();
        if let Some(process) = host.process.as_ref().filter(|_| meant) {
            process.slow_down(&host.size, 1);
        }
    }
}
