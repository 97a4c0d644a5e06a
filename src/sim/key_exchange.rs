//! The exchange of the cluster key, or of API keys and admin keys, by the operator.
//!
//! Invariants: the exchange takes the steps of `docs/operate/security.md`. In a step, the files of
//! each host change at a time of its own. The router is the first or the last. Some processes are
//! restarted with their new files. The next step begins after all processes have read the files of
//! their hosts. An old API key is removed after all requests with it have ended.

use super::faults::{Fault, Weather};
use super::keys::{
    ClientKeys, ExchangedKeys, KeyAge, KeyAge::New, KeyAge::Old, write_bearer_keys,
    write_cluster_keys,
};
use super::{Cluster, Event, RESTART};
use crate::limits::RELOAD_INTERVAL;
use crate::stdx::event_queue::{Nanos, SECOND};
use crate::stdx::rng::Rng;
use crate::sys::file_access::MemoryFiles;

/// Steps of an exchange.
const STEPS: usize = 3;
/// After each step: the cluster keys in both files. A process proves the first, and accepts both.
const CLUSTER_KEYS: [[KeyAge; 2]; STEPS] = [[Old, New], [New, Old], [New, New]];
/// After each step: the API keys and admin keys. The router sends the first. In the second step,
/// clients and the operator take the new key.
const BEARER_KEYS: [&[KeyAge]; STEPS] = [&[Old, New], &[Old, New], &[New]];
/// After this time, a process has read a changed file: it has checked it twice.
const RELOADED: Nanos = 2 * RELOAD_INTERVAL.as_nanos() as Nanos + SECOND;
/// The time between the first and the last host of a step. The second one is longer than the time
/// in which a router expects that workers read their keys.
const SPREADS: [Nanos; 2] = [SECOND, 45 * SECOND];

/// An exchange of keys.
#[derive(Clone, Debug)]
pub struct KeyExchange {
    keys: ExchangedKeys,
    /// When it begins.
    pub begin: Nanos,
    spread: Nanos,
    /// Whether the router is the first in the next step.
    is_router_first: bool,
    dice: Rng,
    /// Steps that have begun.
    begun: usize,
    /// By host: when its files change in this step.
    changes: Vec<Nanos>,
}

impl KeyExchange {
    /// An exchange of so many hosts. The first one is the router.
    pub fn draw(keys: ExchangedKeys, mut dice: Rng, hosts: usize) -> KeyExchange {
        let (spread, is_router_first) = (dice.pick(&SPREADS), dice.one_in(2));
        let (begin, changes) = (RELOADED, vec![0; hosts]);
        KeyExchange { keys, begin, spread, is_router_first, dice, begun: 0, changes }
    }

    /// Moves its beginning so that one of these times is within it. Returns by how much all other
    /// times must move for that.
    pub fn meet(&mut self, times: &[Nanos]) -> Nanos {
        let (at, before) = (self.dice.pick(times), self.dice.range_u64(0, self.time()));
        self.begin = RELOADED.max(at.saturating_sub(before));
        (self.begin + before).saturating_sub(at)
    }

    /// Its longest time, if no process is late.
    pub fn time(&self) -> Nanos {
        STEPS as Nanos * (self.spread + RELOADED)
    }

    /// When all processes have read the files of the last step. `stalled_until`: by host, until
    /// when its process reads nothing.
    pub fn read_by(&self, stalled_until: &[Nanos]) -> Nanos {
        let read = self.changes.iter().zip(stalled_until).map(|(at, until)| at.max(until));
        read.fold(0, |last, at| last.max(at + RELOADED))
    }

    /// Whether no step is left.
    pub fn is_done(&self) -> bool {
        self.begun == STEPS
    }

    /// Begins the next step. Returns when the files of each host change.
    pub fn begin_step(&mut self, now: Nanos) -> &[Nanos] {
        self.begun += 1;
        let spread = self.spread;
        if self.keys == ExchangedKeys::Bearer {
            // Workers accept each key that the router sends.
            self.is_router_first = self.begun == STEPS;
        }
        let (router, first, last) = match self.is_router_first {
            true => (0, 3 * spread / 4, spread),
            false => (spread, 0, spread / 4),
        };
        self.is_router_first = !self.is_router_first;
        self.changes.fill_with(|| now + self.dice.range_u64(first, last));
        self.changes[0] = now + router;
        &self.changes
    }

    /// Whether the operator restarts a process with its new files.
    pub fn draw_restart(&mut self) -> bool {
        self.dice.one_in(2)
    }

    /// Changes the files of a host.
    pub fn change(&self, files: &MemoryFiles) {
        match self.keys {
            ExchangedKeys::Cluster => write_cluster_keys(files, CLUSTER_KEYS[self.begun - 1]),
            ExchangedKeys::Bearer => write_bearer_keys(files, BEARER_KEYS[self.begun - 1]),
        }
    }
}

impl Cluster {
    /// Begins the next step of the exchange, or waits until all processes have read their files.
    pub(super) fn exchange_key(&mut self, now: Nanos) {
        self.operator.list_workers(self.router);
        let Some(exchange) = &mut self.plan.exchange else { return };
        let is_read = exchange.read_by(self.schedule.stalled_until()) <= now;
        let is_bearer = exchange.keys == ExchangedKeys::Bearer;
        if is_read && exchange.is_done() {
            if is_bearer {
                self.clients.keys = ClientKeys { right: New, is_old_refused: true };
            }
            return;
        }
        let is_last = exchange.begun + 1 == STEPS;
        if is_read && !(is_bearer && is_last && self.clients.sends(Old)) {
            let changes = exchange.begin_step(now).iter().enumerate();
            changes.for_each(|(host, &at)| self.queue.schedule(at, Event::NewKeys(host)));
            if is_bearer && exchange.begun + 1 == STEPS {
                self.clients.keys.right = New;
                self.operator.set_key_age(New);
            }
        }
        let next = exchange.read_by(self.schedule.stalled_until()).max(now + SECOND);
        self.queue.schedule(next, Event::Exchange);
    }

    /// Changes the key files of a host. In narrow weather, the process of a victim can restart.
    pub(super) fn change_keys(&mut self, host: usize, now: Nanos) -> Result<(), String> {
        let Some(exchange) = &mut self.plan.exchange else { return Ok(()) };
        exchange.change(&self.files[host]);
        let may_restart = self.plan.weather == Weather::Narrow && self.plan.victims.contains(&host);
        if may_restart && exchange.draw_restart() {
            let fault = Fault::Drain { host, pause: RESTART };
            self.plan.faults.push((now, fault));
            self.break_something(fault, now)?;
        }
        Ok(())
    }
}
