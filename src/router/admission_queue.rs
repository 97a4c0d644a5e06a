//! The queue of requests that wait while the limit of running requests is reached.
//!
//! Thread: `ctl`.
//! Invariants: first come, first served. A request waits only if the limit is reached or other
//! requests wait. The queue is bounded in length and time.
//! Not here: the service of requests, and the answer if the queue is full (`requests`).

use crate::config::RequestConfig;
use crate::net::ConnId;
use crate::stdx::failpoint::is_failpoint_active;
use crate::stdx::hash_map::HashSet;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Waiting requests, by their clients.
#[derive(Debug)]
pub struct AdmissionQueue<T> {
    /// Maximum number of running requests. `None`: no limit.
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

    /// Maximum number of waiting requests.
    pub fn length_max(&self) -> usize {
        self.length_max
    }

    /// Whether there is no limit. Then no request waits.
    pub fn is_open(&self) -> bool {
        self.running_max.is_none()
    }

    /// Whether a new request must wait while `running` requests run.
    pub fn is_needed(&self, running: usize) -> bool {
        self.running_max.is_some_and(|most| running >= most || !self.waiting.is_empty())
    }

    /// Adds a request at the end. It waits at most until its deadline.
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
        debug_assert!(!self.is_open(), "a request is queued only if there is a limit");
        if self.waiting.len() >= self.length_max
            && !is_failpoint_active("full queue takes a request")
        {
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

    /// Removes the first request, if `running` is below the limit.
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

    /// Panics if more requests wait than allowed, or a client waits twice.
    pub fn invariants(&self) {
        assert!(self.len() <= self.length_max, "the queue is bounded");
        assert!(self.is_empty() || !self.is_open(), "a request is queued only if there is a limit");
        let clients: HashSet<ConnId> = self.iter().map(|(client, _)| client).collect();
        assert_eq!(clients.len(), self.len(), "a client waits once");
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stdx::failpoint::panic_of;

    #[test]
    fn a_queue_over_its_length_breaks_the_invariants() {
        let join_twice = || {
            let terms = RequestConfig { concurrent: Some(1), queue: 1, ..Default::default() };
            let (mut queue, now) = (AdmissionQueue::new(&terms), Instant::now());
            assert_eq!(queue.join(ConnId::outside(1), "first", None, now), Ok(()));
            let second = queue.join(ConnId::outside(2), "second", None, now);
            queue.invariants();
            assert_eq!(second, Err("second"), "a full queue returns the request");
        };
        join_twice();
        let message = panic_of("full queue takes a request", join_twice);
        assert!(message.contains("the queue is bounded"), "{message}");
    }
}
