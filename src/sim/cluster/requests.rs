//! Requests of clients with their legs, and the checks of their answers.

use super::calls::Call;
use super::{Cluster, Phase, RECOVERED, SimEvent};
use crate::cause::Cause;
use crate::ids::{Leg, Room};
use crate::sched::messages::FinishReason;
use crate::sim::checkers::{Checked, tokens};
use crate::sim::edge::{Input, Job};
use crate::sim::faults::ROUTER;
use crate::sim::router::fleet::CallName;
use crate::sim::router::{LegName, Wish};
use crate::sim::workload::SimRequest;

impl Cluster<'_> {
    pub(super) fn request(&mut self) -> Checked {
        let now = self.agenda.now();
        self.begin(None, self.plan.is_calm())?;
        self.asked += 1;
        if self.asked < self.plan.scale.requests {
            let next = now + self.dice.range_u64(0, self.plan.gap);
            self.agenda.schedule(next, SimEvent::Request);
        }
        Ok(())
    }

    /// Sends a request of a client. `pair` is the pair that must serve it, if any.
    pub(super) fn begin(&mut self, pair: Option<[usize; 2]>, must_succeed: bool) -> Checked {
        let now = self.agenda.now();
        let mut order = self.workload.draw();
        if pair.is_some() {
            order.patience = RECOVERED;
        }
        self.ends.begun(now, order.patience, must_succeed);
        self.report.requests += 1;
        self.report.trials += usize::from(pair.is_some());
        let id = self.flights.begin(order, pair, now);
        self.trace.record(now, "request", id, "begins", Some(self.flights.room(id)), 0);
        self.carry_out()
    }

    /// Performs the router's actions.
    pub(super) fn carry_out(&mut self) -> Checked {
        let now = self.agenda.now();
        for wish in self.flights.take_wishes() {
            match wish {
                Wish::Choose { flight, attempt, room, pair } => {
                    self.ends.chosen(flight, attempt, pair, now);
                    self.trace.record(
                        now,
                        "request",
                        flight,
                        "gets a pair",
                        Some(room),
                        pair[1] as u64,
                    );
                }
                Wish::Open { call, host, life } => self.open_call(call, host, life),
                send @ Wish::Send { .. } => self.send_legs(send)?,
                Wish::Ask(call, taken_for) => match call {
                    CallName::Notice(_, room) => self.post(call, Input::GiveUp(call, room)),
                    CallName::IdentityQuery(_) => self.post(call, Input::Introduce(call)),
                    CallName::Probe(_) | CallName::Leg(_) => {
                        self.post(call, Input::Ask(call, taken_for))
                    }
                },
                Wish::Close(call) => {
                    self.close(call);
                    // A leg that was sent twice is closed twice.
                    if let CallName::Leg(leg) = call {
                        self.close(CallName::Leg(LegName { copy: 1, ..leg }));
                    }
                }
                Wish::Keep(call) => {
                    self.calls.remove(&call);
                }
                Wish::Remind(flight, at) => self.agenda.schedule(at, SimEvent::Remind(flight)),
                Wish::Over(flight, how) => self.end_flight(flight, how)?,
            }
        }
        Ok(())
    }

    /// Sends the legs of an attempt, and some of them twice.
    fn send_legs(&mut self, wish: Wish) -> Checked {
        let Wish::Send { flight, attempt, again, legs, keeps, asks, taken_for, order } = wish
        else {
            unreachable!("the caller has matched it")
        };
        let now = self.agenda.now();
        self.ends.sent(flight)?;
        let room = self.flights.room(flight);
        let what = if again { "is sent again" } else { "is sent" };
        self.report.retries += usize::from(again);
        self.trace.record(now, "request", flight, what, Some(room), order.resumed.into());
        let name = |role, copy| LegName { flight, attempt, role, copy };
        let mut roles = vec![Leg::Prefill, Leg::Decode];
        roles.retain(|&role| legs[role as usize]);
        for &role in &roles {
            self.submit(name(role, 0), room, [keeps, asks], &taken_for, &order);
        }
        let twice = self.plan.faults.as_ref().map_or(0, |faults| faults.twice);
        if self.phase == Phase::Working && twice > 0 && self.dice.one_in(twice) {
            let role = self.dice.pick(&roles);
            let (host, copy) = (self.flights.pair(flight)[role as usize], name(role, 1));
            // A worker that keeps KV draws a new room each time.
            let room = if keeps || asks { Room(self.dice.next_u64() >> 1) } else { room };
            let call = Call::standing([ROUTER, host], self.hosts[host].life, Some(room));
            self.calls.insert(CallName::Leg(copy), call);
            self.submit(copy, room, [keeps, asks], &taken_for, &order);
            self.ends.doubled(flight);
        }
        Ok(())
    }

    /// Ends a request.
    fn end_flight(&mut self, flight: usize, how: Result<FinishReason, Cause>) -> Checked {
        let now = self.agenda.now();
        let leg = |attempt| LegName { flight, attempt, role: Leg::Prefill, copy: 0 };
        let tries = CallName::Leg(leg(0))..CallName::Leg(leg(u32::MAX));
        let is_copy = |name: &CallName| matches!(name, CallName::Leg(leg) if leg.copy > 0);
        let calls = self.calls.range(tries).filter(|(_, call)| call.from == ROUTER);
        let copies = calls.map(|(&name, _)| name).filter(is_copy);
        copies.collect::<Vec<_>>().into_iter().for_each(|copy| self.close(copy));
        let room = self.flights.room(flight);
        let what = match how {
            Ok(_) => "ends well",
            Err(cause) => cause.name(),
        };
        self.trace.record(now, "request", flight, what, Some(room), 0);
        self.ends.ended(flight, how, now, &self.reasons)?;
        match how {
            Ok(_) => {
                self.report.well += 1;
                let expected = &self.flights.order(flight).expected;
                tokens::whole(flight, self.flights.answer(flight), expected)?;
            }
            Err(cause) => *self.report.failures.entry(cause.name()).or_default() += 1,
        }
        Ok(())
    }

    fn submit(
        &mut self,
        leg: LegName,
        room: Room,
        [keeps, asks]: [bool; 2],
        taken_for: &[Option<String>; 2],
        order: &SimRequest,
    ) {
        let (name, pair) = (CallName::Leg(leg), self.flights.pair(leg.flight));
        let source = Some(pair[Leg::Prefill as usize])
            .filter(|source| *source != pair[Leg::Decode as usize]);
        let (taken_for, order) = (taken_for[leg.role as usize].clone(), order.clone());
        let job = Job { name: leg, room, source, keeps, streams: false, asks, taken_for, order };
        self.post(name, Input::Submit(Box::new(job)));
    }
}
