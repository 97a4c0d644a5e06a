//! The role of a process's worker, and the change of it, by the rules of `worker::service` and
//! `worker::routes`; the change itself is production's (`server::role_change`).
//!
//! Not here: what the worker of a role is made of (`process`), what becomes of its links
//! (`routing::role_balancer`).

use super::{Answer, CallName, Edge, Input, LegName, Output};
use crate::cause::Cause;
use crate::ids::{Leg, Role};
use crate::server::role_change::{RoleChange, RoleChangeAction, RoleChangeRequest};
use crate::sim::checkers::{Checked, Checker, Finding};
use std::collections::VecDeque;
use std::time::Instant;

/// What has come of a change of role.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Became {
    /// Nothing is left of the old one: the worker is to be put together anew.
    Other(Leg),
    /// It stays what it is.
    Same,
}

/// What a process keeps of the worker that it had before.
#[derive(Debug)]
pub struct Lasting {
    turning: RoleChange,
    inbox: VecDeque<Input>,
    next_request: u64,
    next_token: u64,
}

/// A worker that begins as this.
pub(super) fn begin(role: Leg) -> RoleChange {
    RoleChange::new(name_of(role), vec![(Role::Mixed, "it is not simulated".into())])
}

/// A role, as workers name theirs.
pub fn name_of(role: Leg) -> Role {
    match role {
        Leg::Prefill => Role::Prefill,
        Leg::Decode => Role::Decode,
    }
}

/// Whether a leg may be taken by a worker of this role: it is one of that role, and the worker does
/// not empty.
pub(super) fn may_take(process: usize, empties: bool, role: Leg, leg: LegName) -> Checked {
    let what = match (leg.role == role, empties) {
        (true, false) => return Ok(()),
        (true, true) => "is about to have another role".to_owned(),
        (false, _) => format!("is a {role} worker"),
    };
    let what = format!(
        "process {process} {what} and takes the {} leg of request {}",
        leg.role, leg.flight
    );
    Err(Finding::about(Checker::Roles, leg.flight, what))
}

impl Edge {
    /// What its worker is.
    pub(super) fn role(&self) -> Leg {
        match self.turning.role() {
            Role::Prefill => Leg::Prefill,
            Role::Decode | Role::Mixed => Leg::Decode,
        }
    }

    /// Whether it has something to finish.
    pub fn is_busy(&self) -> bool {
        self.left(0).busy
    }

    /// Whether it is about to be something else.
    pub(super) fn is_emptying(&self) -> bool {
        self.turning.is_changing()
    }

    /// What has come of a change, once.
    pub fn take_became(&mut self) -> Option<Became> {
        self.became.take()
    }

    /// What is answered to whoever asks something new of what it takes the worker for, if that is
    /// refused.
    pub(super) fn refusal(&self, taken_for: Option<&str>) -> Option<Answer> {
        if taken_for.is_some_and(|taken_for| !self.turning.is_taken_for(taken_for)) {
            return Some(Answer::Drains);
        }
        match self.hangs {
            true => Some(Answer::Hangs),
            false => {
                (self.drain.is_begun() || self.turning.takes_nothing()).then_some(Answer::Drains)
            }
        }
    }

    /// Says who it is.
    pub(super) fn introduce(&mut self, name: CallName) {
        let answer = Answer::Is { role: self.role(), changes: self.turning.changes() };
        self.outbox.push(Output::Answer(name, answer));
    }

    /// Its worker is to have this role, unless it drains.
    pub(super) fn begin_change(&mut self, wanted: RoleChangeRequest, now: Instant) {
        // Who asks for what it is, or is on its way to be, is told so.
        let begins = !self.drain.is_begun()
            && self.turning.request_change(wanted, now).is_ok_and(|begins| begins);
        if !begins && !self.turning.is_changing() {
            self.became = Some(Became::Same);
        }
    }

    /// It takes nothing new and ends when it has finished what it has: that is the end of any
    /// change, too.
    pub(super) fn begin_drain(&mut self, now: Instant) {
        if self.drain.begin(now) && self.turning.is_changing() {
            self.turning.fail_change("it was told to drain".into());
            self.became = Some(Became::Same);
        }
    }

    /// Whether enough of its work is done that it may change its role.
    pub(super) fn change(&mut self, now: Instant) {
        // Rooms that are not known by now never will be.
        self.handoff.refuse_early(Cause::Draining, now);
        let left = self.left(0);
        match self.turning.poll_action(left, now) {
            None => {}
            Some(RoleChangeAction::Apply(_)) => {
                self.became = Some(Became::Other(self.role().other()))
            }
            Some(RoleChangeAction::GiveUp) => {
                self.turning.fail_change("time was up".into());
                self.became = Some(Became::Same);
            }
        }
    }

    /// The worker goes, and all that is its own.
    pub fn dismiss(self) -> Lasting {
        let Edge { mut turning, inbox, next_request, next_token, .. } = self;
        turning.finish_change(Ok(()));
        // What has come for the ports that were its own has come for nobody.
        let lasts = |input: &Input| match input {
            Input::Parcel(..)
            | Input::Accepted { .. }
            | Input::Dialled(..)
            | Input::Called(..)
            | Input::Shown(..)
            | Input::Lane(_)
            | Input::Word(..) => false,
            Input::Submit(_)
            | Input::Cancel(_)
            | Input::Ask(..)
            | Input::Introduce(_)
            | Input::GiveUp(..)
            | Input::Abort(_)
            | Input::Drain
            | Input::Turn(_) => true,
        };
        let inbox = inbox.into_iter().filter(lasts).collect();
        Lasting { turning, inbox, next_request, next_token }
    }

    /// The process goes on with this worker.
    pub fn take_on(&mut self, lasting: Lasting) {
        let Lasting { turning, inbox, next_request, next_token } = lasting;
        (self.turning, self.inbox) = (turning, inbox);
        (self.next_request, self.next_token) = (next_request, next_token);
    }
}
