//! A worker as the router reaches it: its address, what it said of itself, and why it is there.
//!
//! Thread: `ctl`. Not here: connections to it (`fleet`), whether it is up (`cluster::health`).

use crate::cluster::roles::Room;
use crate::cluster::router::Role;
use crate::config::values::WorkerUrl;
use crate::front::router::introduction::{Verdict, Words};
use crate::net::ConnId;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

/// A connection without a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Idle {
    pub conn: ConnId,
    pub since: Instant,
}

/// A worker as it is reached.
#[derive(Debug)]
pub struct Target {
    /// As it was named.
    pub url: WorkerUrl,
    /// Where its name points, as far as is known.
    pub address: Option<SocketAddr>,
    /// Of its registry, as it was named; `None` for decode workers, and where that was left to it.
    pub bootstrap_port: Option<u16>,
    /// What it says itself of that.
    pub(super) told_port: Option<u16>,
    /// Whether it was named for another role, and has this one by its own word.
    pub(super) has_turned: bool,
    /// What it says it has room for, and how often its role has changed, if that can.
    pub(super) room: Option<Room>,
    pub(super) role_changes: Option<u64>,
    /// Whether it has said that it cannot have the other role, being what it is.
    pub(super) keeps_role: bool,
    /// Whether it does not tell who it is, for want of a key that it takes.
    pub(super) withholds: bool,
    /// Whether it has the seat of a decode worker, and does both.
    pub(super) is_mixed: bool,
    /// Whether nobody answered there, and its name is being looked up again.
    pub(super) lost: bool,
    /// Whether it has been asked who it is since somebody else may have taken its place.
    pub(super) introduced: bool,
    /// What that came to, the last time.
    pub(super) verdict: Verdict,
    /// Whether it may tell what it has to do, when asked.
    pub(super) reports: bool,
    /// Tokens of KV that it said are in use, where it was asked for that.
    pub(super) used: Option<u64>,
    /// Whether it has said that it takes nothing new, and not yet that it does.
    pub drains: bool,
    /// Why it is down, or was last; `None` since it is well.
    pub fault: Option<String>,
    /// Its model, as its clients name it.
    pub model: Option<String>,
    /// Whether it was said that it is not up, since it was last,
    pub(super) told_down: bool,
    /// for which reason, as far as one was or needs to be said,
    told_fault: Option<String>,
    /// and which other one the last look has met.
    other_fault: Option<String>,
    /// The one used last is the last.
    pub(super) idle: Vec<Idle>,
}

impl Target {
    /// A worker that is thought to be at this address, where that is known.
    pub fn new(url: WorkerUrl, address: Option<SocketAddr>, bootstrap_port: Option<u16>) -> Target {
        let address = address.or_else(|| Some(SocketAddr::new(url.host.parse().ok()?, url.port)));
        Target {
            url,
            address,
            bootstrap_port,
            told_port: None,
            has_turned: false,
            room: None,
            role_changes: None,
            keeps_role: false,
            withholds: false,
            is_mixed: false,
            lost: false,
            introduced: false,
            reports: true,
            used: None,
            verdict: Verdict::Fits,
            drains: false,
            fault: Some("it was not asked yet".into()),
            model: None,
            told_down: false,
            told_fault: None,
            other_fault: None,
            idle: Vec::new(),
        }
    }

    /// The same, whose role it has told itself.
    pub(super) fn turned(self, has_turned: bool) -> Target {
        Target { has_turned, ..self }
    }

    /// Takes in what it has told of itself. What it does not tell now is as it told before.
    pub(super) fn hear(&mut self, words: &Words, role: Role) {
        self.model = words.model.clone().or_else(|| self.model.take());
        self.room = words.room.or(self.room);
        // Who can have no other role than this may be able to as something else.
        self.keeps_role &= words.role_changes == self.role_changes;
        (self.role_changes, self.is_mixed) = (words.role_changes, words.is_mixed());
        if role == Role::Prefill {
            self.told_port = words.bootstrap_port.or(self.told_port);
        }
        if words.role_changes.is_some_and(|changes| changes > 0) {
            // The port that it was named with was that of a role of its past.
            self.bootstrap_port = None;
        }
    }

    /// Why it is down, or is not used, has been said.
    pub(super) fn tell_fault(&mut self) {
        self.told_down = true;
        (self.told_fault, self.other_fault) = (self.fault.clone(), None);
    }

    /// It is well: whatever it has next is news.
    pub(super) fn is_well(&mut self) {
        self.told_down = false;
        (self.drains, self.fault, self.told_fault, self.other_fault) = (false, None, None, None);
    }

    /// A look has met it down again: whether that is for another reason than was said last. One look alone tells that of no
    /// worker, as what is met at a port differs while its process comes and goes.
    pub(super) fn has_another_fault(&mut self) -> bool {
        if self.told_fault.is_none() || self.fault == self.told_fault {
            // That one that drained is gone then was said without a reason.
            self.tell_fault();
            return false;
        }
        let is_met_again = self.other_fault == self.fault;
        self.other_fault.clone_from(&self.fault);
        is_met_again
    }

    /// Where decode workers find it, as far as anybody has said.
    pub(super) fn registry_port(&self) -> Option<u16> {
        self.bootstrap_port.or(self.told_port)
    }

    /// Another address of its name, which comes behind the one that led nowhere.
    pub(super) fn turn_to(&mut self, addresses: &[IpAddr]) {
        let at =
            self.address.and_then(|address| addresses.iter().position(|&ip| ip == address.ip()));
        let next = at.map_or(0, |at| (at + 1) % addresses.len());
        self.address = Some(SocketAddr::new(addresses[next], self.url.port));
    }

    /// The value of a request's Host field.
    pub(super) fn host(&self) -> String {
        self.url.authority()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_reason_is_news_once_it_was_met_twice() {
        let mut target = Target::new("http://10.0.0.1:7".parse().unwrap(), None, None);
        let mut met = |why: &str| {
            target.fault = Some(why.into());
            let is_news = target.has_another_fault();
            if is_news {
                target.tell_fault();
            }
            is_news
        };
        assert_eq!(
            ["gone", "gone", "late", "gone", "late"].map(&mut met),
            [false; 5],
            "it comes and goes"
        );
        assert_eq!(
            ["late", "late", "gone", "gone", "gone"].map(&mut met),
            [true, false, false, true, false]
        );
        target.is_well();
        assert!(!target.told_down && target.fault.is_none());
    }

    #[test]
    fn who_cannot_change_may_be_able_to_as_something_else() {
        let mut target = Target::new("http://10.0.0.1:7".parse().unwrap(), None, None);
        let told = |changes| Words { role_changes: changes, ..Words::default() };
        target.hear(&told(Some(0)), Role::Decode);
        target.keeps_role = true;
        target.hear(&told(Some(0)), Role::Decode);
        assert!(target.keeps_role, "it is what it was");
        target.hear(&told(Some(1)), Role::Decode);
        assert!(!target.keeps_role);
    }
}
