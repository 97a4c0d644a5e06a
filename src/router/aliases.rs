//! The new number of a worker after a role change: the router counts it as another worker.
//!
//! Thread: `ctl`. Owns: the numbers and addresses of workers that have left, the last
//! [`PAST_WORKERS_MAX`] of them.
//! Not here: which worker leaves, and why (`registry::membership`).

use crate::limits::PAST_WORKERS_MAX;
use crate::registry::entry::WorkerAddress;
use crate::routing::load::WorkerNumber;
use std::collections::{HashMap, VecDeque};
use std::time::Instant;

#[derive(Debug)]
struct Past {
    number: WorkerNumber,
    seat: WorkerAddress,
    /// It was ordered to change its role, so the next worker at its URL is the same one.
    was_told: bool,
}

/// Workers that have left.
#[derive(Debug, Default)]
pub struct WorkerAliases {
    past: VecDeque<Past>,
    /// Workers that were ordered to change their role, and until when they can be absent for it.
    told: HashMap<WorkerNumber, Instant>,
}

impl WorkerAliases {
    /// A worker was ordered to change its role. It can be absent until `until`.
    pub fn told(&mut self, worker: WorkerNumber, until: Instant, now: Instant) {
        self.told.retain(|_, until| *until > now);
        self.told.insert(worker, until);
    }

    /// Whether the worker is possibly between two roles.
    pub fn may_come_back(&self, worker: WorkerNumber, now: Instant) -> bool {
        self.told.get(&worker).is_some_and(|until| *until > now)
    }

    /// A worker has left its address.
    pub fn left(&mut self, worker: WorkerNumber, seat: WorkerAddress, now: Instant) {
        if self.past.len() == PAST_WORKERS_MAX {
            self.past.pop_front();
        }
        self.past.push_back(Past {
            number: worker,
            seat,
            was_told: self.may_come_back(worker, now),
        });
    }

    /// An operator has removed it: it is not expected again.
    pub fn removed(&mut self, worker: WorkerNumber) {
        self.told.remove(&worker);
    }

    /// The present worker at the URL of this past worker, with another role. `seats` are the taken
    /// addresses.
    ///
    /// A worker there with the same role is another one. Exception: the past worker was ordered to
    /// change, because a mixed worker has the address of a decode worker.
    pub fn resolve_alias(
        &self,
        worker: WorkerNumber,
        seats: &HashMap<WorkerAddress, WorkerNumber>,
    ) -> Option<WorkerNumber> {
        let mut number = worker;
        loop {
            let Past { seat, was_told, .. } =
                self.past.iter().find(|past| past.number == number)?;
            let other = WorkerAddress { role: seat.role.other(), url: seat.url.clone() };
            let is_next = |at: &WorkerAddress, by: WorkerNumber| {
                by > number && (*at == other || (*was_told && at == seat))
            };
            let next = [&other, seat]
                .into_iter()
                .find_map(|at| seats.get(at).filter(|&&by| is_next(at, by)));
            if let Some(&found) = next {
                return Some(found);
            }
            // Numbers only grow, so the loop ends.
            number = self.past.iter().find(|past| is_next(&past.seat, past.number))?.number;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Leg;
    use std::time::Duration;

    fn seat(role: Leg, port: u16) -> WorkerAddress {
        WorkerAddress { role, url: format!("http://10.0.0.1:{port}").parse().unwrap() }
    }

    #[test]
    fn who_changes_its_role_is_found_by_all_its_numbers_and_who_is_started_anew_is_not() {
        let (mut succession, now) = (WorkerAliases::default(), Instant::now());
        let number = |number| WorkerNumber(number);
        succession.left(number(1), seat(Leg::Decode, 7), now);
        let mut seats =
            HashMap::from([(seat(Leg::Prefill, 7), number(3)), (seat(Leg::Prefill, 8), number(2))]);
        assert_eq!(succession.resolve_alias(number(1), &seats), Some(number(3)));
        assert_eq!(succession.resolve_alias(number(2), &seats), None, "it has not left");
        seats.remove(&seat(Leg::Prefill, 7));
        succession.left(number(3), seat(Leg::Prefill, 7), now);
        assert_eq!(
            succession.resolve_alias(number(1), &seats),
            None,
            "it has left for good, or is about to come back"
        );
        seats.insert(seat(Leg::Decode, 7), number(9));
        assert_eq!(
            [1, 3].map(|past| succession.resolve_alias(number(past), &seats)),
            [Some(number(9)); 2]
        );
        seats.remove(&seat(Leg::Decode, 7));
        succession.left(number(9), seat(Leg::Decode, 7), now);
        seats.insert(seat(Leg::Decode, 7), number(12));
        assert_eq!(
            succession.resolve_alias(number(9), &seats),
            None,
            "another one was started in the same role"
        );
        succession.told(number(12), now + Duration::from_secs(1), now);
        succession.left(number(12), seat(Leg::Decode, 7), now);
        seats.insert(seat(Leg::Decode, 7), number(13));
        assert_eq!(succession.resolve_alias(number(12), &seats), Some(number(13)), "it does both");
        succession.told(number(13), now + Duration::from_secs(1), now);
        succession.left(number(13), seat(Leg::Decode, 7), now + Duration::from_secs(1));
        seats.insert(seat(Leg::Decode, 7), number(14));
        assert_eq!(succession.resolve_alias(number(13), &seats), None, "that was long ago");
        succession.told(number(14), now + Duration::from_secs(1), now);
        succession.removed(number(14));
        assert!(!succession.may_come_back(number(14), now), "it was taken off");
    }

    #[test]
    fn the_past_has_an_end() {
        let (mut succession, now) = (WorkerAliases::default(), Instant::now());
        for number in 0..2 * PAST_WORKERS_MAX {
            succession.left(WorkerNumber(number), seat(Leg::Decode, 7), now);
        }
        assert_eq!(succession.past.len(), PAST_WORKERS_MAX);
        for number in 0..100 {
            let at = now + Duration::from_secs(number);
            succession.told(WorkerNumber(number as usize), at + Duration::from_secs(2), at);
        }
        assert!(succession.told.len() <= 3);
    }
}
