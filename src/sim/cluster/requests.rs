//! Requests of clients and their legs, and what is checked of their answers.

use super::{Cluster, Happening, Leg, Phase, RECOVERED};
use crate::cluster::router::Role;
use crate::ids::Room;
use crate::sim::checkers::{Checked, tokens};
use crate::sim::edge::{Input, Job};
use crate::sim::router::{Answer, LegName, Wish};
use crate::sim::workload::Order;

impl Cluster<'_> {
    pub(super) fn request(&mut self) -> Checked {
        let now = self.agenda.now();
        self.begin(None, self.plan.is_calm())?;
        self.asked += 1;
        if self.asked < self.plan.scale.requests {
            let next = now + self.dice.within(0, self.plan.gap);
            self.agenda.put(next, Happening::Request);
        }
        Ok(())
    }

    /// A client asks; `pair` is whom it wants to be served by.
    pub(super) fn begin(&mut self, pair: Option<[usize; 2]>, must_succeed: bool) -> Checked {
        let now = self.agenda.now();
        let mut order = self.workload.draw();
        if pair.is_some() {
            order.patience = RECOVERED;
        }
        self.ends.begun(now, order.patience, must_succeed);
        self.report.requests += 1;
        let hosts = &self.hosts;
        let id = self.flights.begin(order, pair, |host| hosts[host].process.is_some(), now);
        self.story.tell(now, "request", id, "begins", Some(self.flights.room(id)), 0);
        self.carry_out()
    }

    /// Does what the router wants done.
    pub(super) fn carry_out(&mut self) -> Checked {
        for wish in std::mem::take(&mut self.flights.wishes) {
            match wish {
                Wish::Send { flight, attempt, room, prefill, decode, order } => {
                    self.ends.placed(flight, [prefill, decode]);
                    let name = |role, copy| LegName { flight, attempt, role, copy };
                    if attempt > 1 {
                        let answered = order.resumed.into();
                        self.report.retries += 1;
                        let now = self.agenda.now();
                        self.story.tell(now, "request", flight, "is tried again", Some(room), answered);
                    }
                    self.open_leg(name(Role::Prefill, 0), room, prefill, prefill, &order);
                    self.open_leg(name(Role::Decode, 0), room, decode, prefill, &order);
                    let twice = self.plan.faults.as_ref().map_or(0, |faults| faults.twice);
                    if self.phase == Phase::Working && twice > 0 && self.dice.one_in(twice) {
                        let (role, host) =
                            self.dice.pick(&[(Role::Prefill, prefill), (Role::Decode, decode)]);
                        self.open_leg(name(role, 1), room, host, prefill, &order);
                        self.ends.doubled(flight);
                    }
                }
                Wish::Cancel(name) => self.post(name, Input::Cancel(name)),
                Wish::Remind(flight, at) => self.agenda.put(at, Happening::Remind(flight)),
                Wish::Over(flight, how) => {
                    let tries = LegName { flight, attempt: 0, role: Role::Prefill, copy: 0 }..;
                    let legs = self.legs.range(tries).map(|(name, _)| *name);
                    let legs = legs.take_while(|name| name.flight == flight);
                    let copies: Vec<LegName> = legs.filter(|name| name.copy > 0).collect();
                    copies.into_iter().for_each(|copy| self.post(copy, Input::Cancel(copy)));
                    let room = self.flights.room(flight);
                    let what = match how {
                        Ok(_) => "ends well",
                        Err(cause) => cause.name(),
                    };
                    self.story.tell(self.agenda.now(), "request", flight, what, Some(room), 0);
                    self.ends.ended(flight, how, self.agenda.now(), &self.reasons)?;
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

    fn open_leg(&mut self, name: LegName, room: Room, host: usize, source: usize, order: &Order) {
        let life = self.hosts[host].life;
        self.legs.insert(name, Leg { host, life, room, last: [0; 2] });
        let order = order.clone();
        self.post(name, Input::Submit(Box::new(Job { name, room, source, order })));
    }

    fn post(&mut self, name: LegName, input: Input) {
        let at = self.agenda.now() + self.delay();
        let Some(leg) = self.legs.get_mut(&name) else { return };
        leg.last[0] = at.max(leg.last[0] + 1);
        let at = leg.last[0];
        self.agenda.put(at, Happening::ToWorker { leg: name, input });
    }

    pub(super) fn reach_worker(&mut self, name: LegName, input: Input) {
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

    pub(super) fn reach_router(&mut self, name: LegName, answer: Answer) -> Checked {
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
        let hosts = &self.hosts;
        self.flights.take(name, answer, |host| hosts[host].process.is_some(), now);
        if let Answer::Token(_) = answer {
            let expected = &self.flights.order(name.flight).expected;
            tokens::begins(name.flight, self.flights.answer(name.flight), expected)?;
        } else {
            self.legs.remove(&name);
        }
        self.carry_out()
    }
}
