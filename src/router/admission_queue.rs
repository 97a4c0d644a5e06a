//! The queue of requests that wait while the limit of running requests is reached.
//!
//! Thread: `ctl`.
//! Invariants: first come, first served. A request waits only if the limit is reached or others
//! wait. The queue is bounded in length and time.
//! Not here: serving, and the answer to a request that finds the queue full (`requests`).

use crate::config::RequestConfig;
use crate::net::ConnId;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Waiting requests, by their clients.
#[derive(Debug)]
pub struct AdmissionQueue<T> {
    /// Most running requests. `None`: no limit.
    running_max: Option<usize>,
    length_max: usize,
    patience: Duration,
    waiting: VecDeque<(ConnId, T, Instant)>,
}

impl<T> Default for AdmissionQueue<T> {
    fn default() -> AdmissionQueue<T> {
        AdmissionQueue::new(&RequestConfig::default())
    }
}

impl<T> AdmissionQueue<T> {
    /// An empty queue.
    pub fn new(terms: &RequestConfig) -> AdmissionQueue<T> {
        AdmissionQueue {
            running_max: terms.concurrent.map(|most| most as usize),
            length_max: terms.queue as usize,
            patience: terms.queue_time,
            waiting: VecDeque::new(),
        }
    }

    /// Most waiting requests.
    pub fn length_max(&self) -> usize {
        self.length_max
    }

    /// Whether there is no limit, so that no request ever waits.
    pub fn is_open(&self) -> bool {
        self.running_max.is_none()
    }

    /// Whether a new request must wait while `running` requests run.
    pub fn is_needed(&self, running: usize) -> bool {
        self.running_max.is_some_and(|most| running >= most || !self.waiting.is_empty())
    }

    /// Adds a request at the end. It waits until its deadline at most.
    ///
    /// # Errors
    /// The queue is full; the request is returned.
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

    /// Removes the first request, if fewer than the limit are `running`.
    pub fn next(&mut self, running: usize) -> Option<(ConnId, T)> {
        let has_room = self.running_max.is_none_or(|most| running < most);
        let (client, item, _) = self.waiting.pop_front_if(|_| has_room)?;
        Some((client, item))
    }

    /// Removes a request that has waited too long.
    pub fn overdue(&mut self, now: Instant) -> Option<(ConnId, T)> {
        let place = self.waiting.iter().position(|(.., until)| *until <= now)?;
        self.waiting.remove(place).map(|(client, item, _)| (client, item))
    }

    /// Removes the request of this client.
    pub fn leave(&mut self, client: ConnId) -> Option<T> {
        let place = self.waiting.iter().position(|(waiting, ..)| *waiting == client)?;
        self.waiting.remove(place).map(|(_, item, _)| item)
    }

    /// All waiting requests.
    pub fn iter(&self) -> impl Iterator<Item = (ConnId, &T)> {
        self.waiting.iter().map(|(client, item, _)| (*client, item))
    }

    /// The number of waiting requests.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether no request waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}
