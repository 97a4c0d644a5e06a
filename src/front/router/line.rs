//! Who waits while as many requests run as may.
//!
//! Thread: `ctl`. Invariants: first come, first served; nobody joins while there is room, unless others wait; bounded by its
//! terms. Not here: what is served, and who is told that there is no room (`flights`).

use crate::config::resolved::RequestTerms;
use crate::net::ConnId;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Requests in line, by their clients.
#[derive(Debug)]
pub struct Line<T> {
    /// Most that may run; `None`: no matter how many.
    running_max: Option<usize>,
    length_max: usize,
    patience: Duration,
    waiting: VecDeque<(ConnId, T, Instant)>,
}

impl<T> Default for Line<T> {
    fn default() -> Line<T> {
        Line::new(&RequestTerms::default())
    }
}

impl<T> Line<T> {
    /// Nobody waits yet.
    pub fn new(terms: &RequestTerms) -> Line<T> {
        Line {
            running_max: terms.concurrent.map(|most| most as usize),
            length_max: terms.queue as usize,
            patience: terms.queue_time,
            waiting: VecDeque::new(),
        }
    }

    /// How many may wait.
    pub fn length_max(&self) -> usize {
        self.length_max
    }

    /// Whether nobody ever has to wait.
    pub fn is_open(&self) -> bool {
        self.running_max.is_none()
    }

    /// Whether a new one has to wait beside so many that run.
    pub fn is_needed(&self, running: usize) -> bool {
        self.running_max.is_some_and(|most| running >= most || !self.waiting.is_empty())
    }

    /// Joins at its end, for no longer than its client waits, if that has said.
    ///
    /// # Errors
    /// It is full.
    pub fn join(
        &mut self,
        client: ConnId,
        item: T,
        deadline: Option<Instant>,
        now: Instant,
    ) -> Result<(), T> {
        if self.waiting.len() >= self.length_max {
            return Err(item);
        }
        let until = now + self.patience;
        self.waiting.push_back((
            client,
            item,
            deadline.map_or(until, |deadline| deadline.min(until)),
        ));
        Ok(())
    }

    /// The first in it, if there is room beside so many that run.
    pub fn next(&mut self, running: usize) -> Option<(ConnId, T)> {
        let has_room = self.running_max.is_none_or(|most| running < most);
        let (client, item, _) = self.waiting.pop_front_if(|_| has_room)?;
        Some((client, item))
    }

    /// One that has waited too long.
    pub fn overdue(&mut self, now: Instant) -> Option<(ConnId, T)> {
        let place = self.waiting.iter().position(|(.., until)| *until <= now)?;
        self.waiting.remove(place).map(|(client, item, _)| (client, item))
    }

    /// A client's, which leaves it.
    pub fn leave(&mut self, client: ConnId) -> Option<T> {
        let place = self.waiting.iter().position(|(waiting, ..)| *waiting == client)?;
        self.waiting.remove(place).map(|(_, item, _)| item)
    }

    /// All in it.
    pub fn iter(&self) -> impl Iterator<Item = (ConnId, &T)> {
        self.waiting.iter().map(|(client, item, _)| (*client, item))
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether nobody does.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}
