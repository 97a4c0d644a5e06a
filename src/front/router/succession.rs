//! Which worker one has become whose role has changed: to the router it is another one, under another number.
//!
//! Thread: `ctl`. Owns: the numbers of workers that have left, and where they sat, the last [`PAST_WORKERS_MAX`] of them. Not
//! here: who leaves, and why (`cluster::membership`).

use crate::cluster::entry::Seat;
use crate::cluster::loads::WorkerNumber;
use crate::limits::PAST_WORKERS_MAX;
use std::collections::{HashMap, VecDeque};
use std::time::Instant;

#[derive(Debug)]
struct Past {
    number: WorkerNumber,
    seat: Seat,
    /// It was told to change, and nobody else is expected there.
    was_told: bool,
}

/// Workers of the past.
#[derive(Debug, Default)]
pub struct Succession {
    past: VecDeque<Past>,
    /// Those that were told to change, until when they may have no seat for it.
    told: HashMap<WorkerNumber, Instant>,
}

impl Succession {
    /// A worker was told to have another role, and may take so long for it.
    pub fn told(&mut self, worker: WorkerNumber, until: Instant, now: Instant) {
        self.told.retain(|_, until| *until > now);
        self.told.insert(worker, until);
    }

    /// Whether it may be between two roles.
    pub fn may_come_back(&self, worker: WorkerNumber, now: Instant) -> bool {
        self.told.get(&worker).is_some_and(|until| *until > now)
    }

    /// A worker has left its seat.
    pub fn left(&mut self, worker: WorkerNumber, seat: Seat, now: Instant) {
        if self.past.len() == PAST_WORKERS_MAX {
            self.past.pop_front();
        }
        self.past.push_back(Past {
            number: worker,
            seat,
            was_told: self.may_come_back(worker, now),
        });
    }

    /// An operator has taken it off: it is not expected again.
    pub fn removed(&mut self, worker: WorkerNumber) {
        self.told.remove(&worker);
    }

    /// Who sits there now, in another role than this worker had when it left; `seats` are those that are taken. Who has the role
    /// that it had is somebody else, unless it was told to change: who does both has the seat of a decode worker.
    pub fn of(
        &self,
        worker: WorkerNumber,
        seats: &HashMap<Seat, WorkerNumber>,
    ) -> Option<WorkerNumber> {
        let mut number = worker;
        loop {
            let Past { seat, was_told, .. } =
                self.past.iter().find(|past| past.number == number)?;
            let other = Seat { role: seat.role.other(), url: seat.url.clone() };
            let is_next = |at: &Seat, by: WorkerNumber| {
                by > number && (*at == other || (*was_told && at == seat))
            };
            let next = [&other, seat]
                .into_iter()
                .find_map(|at| seats.get(at).filter(|&&by| is_next(at, by)));
            if let Some(&found) = next {
                return Some(found);
            }
            // Numbers only grow, so that there is an end.
            number = self.past.iter().find(|past| is_next(&past.seat, past.number))?.number;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::router::Role;
    use std::time::Duration;

    fn seat(role: Role, port: u16) -> Seat {
        Seat { role, url: format!("http://10.0.0.1:{port}").parse().unwrap() }
    }

    #[test]
    fn who_changes_its_role_is_found_by_all_its_numbers_and_who_is_started_anew_is_not() {
        let (mut succession, now) = (Succession::default(), Instant::now());
        let number = |number| WorkerNumber(number);
        succession.left(number(1), seat(Role::Decode, 7), now);
        let mut seats = HashMap::from([
            (seat(Role::Prefill, 7), number(3)),
            (seat(Role::Prefill, 8), number(2)),
        ]);
        assert_eq!(succession.of(number(1), &seats), Some(number(3)));
        assert_eq!(succession.of(number(2), &seats), None, "it has not left");
        seats.remove(&seat(Role::Prefill, 7));
        succession.left(number(3), seat(Role::Prefill, 7), now);
        assert_eq!(
            succession.of(number(1), &seats),
            None,
            "it has left for good, or is about to come back"
        );
        seats.insert(seat(Role::Decode, 7), number(9));
        assert_eq!([1, 3].map(|past| succession.of(number(past), &seats)), [Some(number(9)); 2]);
        seats.remove(&seat(Role::Decode, 7));
        succession.left(number(9), seat(Role::Decode, 7), now);
        seats.insert(seat(Role::Decode, 7), number(12));
        assert_eq!(
            succession.of(number(9), &seats),
            None,
            "another one was started in the same role"
        );
        succession.told(number(12), now + Duration::from_secs(1), now);
        succession.left(number(12), seat(Role::Decode, 7), now);
        seats.insert(seat(Role::Decode, 7), number(13));
        assert_eq!(succession.of(number(12), &seats), Some(number(13)), "it does both");
        succession.told(number(13), now + Duration::from_secs(1), now);
        succession.left(number(13), seat(Role::Decode, 7), now + Duration::from_secs(1));
        seats.insert(seat(Role::Decode, 7), number(14));
        assert_eq!(succession.of(number(13), &seats), None, "that was long ago");
        succession.told(number(14), now + Duration::from_secs(1), now);
        succession.removed(number(14));
        assert!(!succession.may_come_back(number(14), now), "it was taken off");
    }

    #[test]
    fn the_past_has_an_end() {
        let (mut succession, now) = (Succession::default(), Instant::now());
        for number in 0..2 * PAST_WORKERS_MAX {
            succession.left(WorkerNumber(number), seat(Role::Decode, 7), now);
        }
        assert_eq!(succession.past.len(), PAST_WORKERS_MAX);
        for number in 0..100 {
            let at = now + Duration::from_secs(number);
            succession.told(WorkerNumber(number as usize), at + Duration::from_secs(2), at);
        }
        assert!(succession.told.len() <= 3);
    }
}
