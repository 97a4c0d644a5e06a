//! The map from a worker's old numbers to its present one. After a role change, the router gives a
//! worker a new number.
//!
//! Thread: `ctl`. Owns: the numbers and addresses of workers that have left, the last
//! [`PAST_WORKERS_MAX`] of them.
//! Not here: the decision that a worker leaves (`registry::membership`).

use crate::limits::PAST_WORKERS_MAX;
use crate::registry::entry::WorkerAddress;
use crate::routing::load::WorkerNumber;
use crate::stdx::hash_map::HashMap;
use std::collections::VecDeque;
use std::time::Instant;

#[derive(Debug)]
struct Past {
    number: WorkerNumber,
    address: WorkerAddress,
    /// Whether it was ordered to change its role. The next worker at its URL is then the same
    /// worker.
    was_told: bool,
}

/// Workers that have left.
#[derive(Debug, Default)]
pub struct WorkerAliases {
    past: VecDeque<Past>,
    /// Workers that were ordered to change their role, and the time until which they can be absent.
    ordered: HashMap<WorkerNumber, Instant>,
}

impl WorkerAliases {
    /// Records that a worker was ordered to change its role. It can be absent until `until`.
    pub fn expect_role_change(&mut self, worker: WorkerNumber, until: Instant, now: Instant) {
        debug_assert!(until > now, "a worker that changes its role can be absent for some time");
        self.ordered.retain(|_, until| *until > now);
        self.ordered.insert(worker, until);
    }

    /// Whether the worker can be between two roles.
    pub fn may_come_back(&self, worker: WorkerNumber, now: Instant) -> bool {
        self.ordered.get(&worker).is_some_and(|until| *until > now)
    }

    /// Records that a worker has left its address.
    pub fn left(&mut self, worker: WorkerNumber, address: WorkerAddress, now: Instant) {
        debug_assert!(
            self.past.iter().all(|past| past.number != worker),
            "a worker leaves once, because its number is never given again"
        );
        if self.past.len() == PAST_WORKERS_MAX {
            self.past.pop_front();
        }
        self.past.push_back(Past {
            number: worker,
            address,
            was_told: self.may_come_back(worker, now),
        });
    }

    /// Records that an operator has removed a worker, so that it is not expected again.
    pub fn removed(&mut self, worker: WorkerNumber) {
        self.ordered.remove(&worker);
    }

    /// The present worker at the URL of this past worker, if its role is another one. `addresses`
    /// are the taken addresses.
    ///
    /// A worker at that URL with the same role is a different worker. Exception: the past worker
    /// was ordered to change its role. It can then be mixed now, and a mixed worker has the address
    /// of a decode worker.
    pub fn resolve_alias(
        &self,
        worker: WorkerNumber,
        addresses: &HashMap<WorkerAddress, WorkerNumber>,
    ) -> Option<WorkerNumber> {
        let mut number = worker;
        loop {
            let Past { address, was_told, .. } =
                self.past.iter().find(|past| past.number == number)?;
            let other = WorkerAddress { role: address.role.other(), url: address.url.clone() };
            let is_next = |at: &WorkerAddress, by: WorkerNumber| {
                by > number && (*at == other || (*was_told && at == address))
            };
            let next = [&other, address]
                .into_iter()
                .find_map(|at| addresses.get(at).filter(|&&by| is_next(at, by)));
            if let Some(&found) = next {
                debug_assert!(
                    self.past.iter().all(|past| past.number != found),
                    "a worker that has left has no address"
                );
                return Some(found);
            }
            // Numbers only grow, so the loop ends.
            number = self.past.iter().find(|past| is_next(&past.address, past.number))?.number;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Leg;
    use std::time::Duration;

    fn address(role: Leg, port: u16) -> WorkerAddress {
        WorkerAddress { role, url: format!("http://10.0.0.1:{port}").parse().unwrap() }
    }

    #[test]
    fn old_numbers_lead_to_a_worker_that_changed_role_but_not_to_a_restarted_one() {
        let (mut aliases, now) = (WorkerAliases::default(), Instant::now());
        let number = |number| WorkerNumber(number);
        aliases.left(number(1), address(Leg::Decode, 7), now);
        let mut addresses = HashMap::from_iter([
            (address(Leg::Prefill, 7), number(3)),
            (address(Leg::Prefill, 8), number(2)),
        ]);
        assert_eq!(aliases.resolve_alias(number(1), &addresses), Some(number(3)));
        assert_eq!(aliases.resolve_alias(number(2), &addresses), None, "it has not left");
        addresses.remove(&address(Leg::Prefill, 7));
        aliases.left(number(3), address(Leg::Prefill, 7), now);
        assert_eq!(
            aliases.resolve_alias(number(1), &addresses),
            None,
            "it has left for good, or is about to come back"
        );
        addresses.insert(address(Leg::Decode, 7), number(9));
        assert_eq!(
            [1, 3].map(|past| aliases.resolve_alias(number(past), &addresses)),
            [Some(number(9)); 2]
        );
        addresses.remove(&address(Leg::Decode, 7));
        aliases.left(number(9), address(Leg::Decode, 7), now);
        addresses.insert(address(Leg::Decode, 7), number(12));
        assert_eq!(
            aliases.resolve_alias(number(9), &addresses),
            None,
            "another one was started in the same role"
        );
        aliases.expect_role_change(number(12), now + Duration::from_secs(1), now);
        aliases.left(number(12), address(Leg::Decode, 7), now);
        addresses.insert(address(Leg::Decode, 7), number(13));
        assert_eq!(aliases.resolve_alias(number(12), &addresses), Some(number(13)), "it does both");
        aliases.expect_role_change(number(13), now + Duration::from_secs(1), now);
        aliases.left(number(13), address(Leg::Decode, 7), now + Duration::from_secs(1));
        addresses.insert(address(Leg::Decode, 7), number(14));
        assert_eq!(aliases.resolve_alias(number(13), &addresses), None, "that was long ago");
        aliases.expect_role_change(number(14), now + Duration::from_secs(1), now);
        aliases.removed(number(14));
        assert!(!aliases.may_come_back(number(14), now), "it was taken off");
    }

    #[test]
    fn the_past_has_an_end() {
        let (mut aliases, now) = (WorkerAliases::default(), Instant::now());
        for number in 0..2 * PAST_WORKERS_MAX {
            aliases.left(WorkerNumber(number), address(Leg::Decode, 7), now);
        }
        assert_eq!(aliases.past.len(), PAST_WORKERS_MAX);
        for number in 0..100 {
            let at = now + Duration::from_secs(number);
            aliases.expect_role_change(
                WorkerNumber(number as usize),
                at + Duration::from_secs(2),
                at,
            );
        }
        assert!(aliases.ordered.len() <= 3);
    }
}
