//! The queue of requests that wait while the limit of running requests is reached.
//!
//! Thread: `ctl`.
//! Invariants: first come, first served, or by priority. A request waits only if the limit is
//! reached or other requests wait. The queue is bounded in length and time.
//! Not here: the order (`sched::wait_queue`), the service of requests, and the answer if the queue
//! is full (`requests`).

use crate::config::{RequestConfig, SchedulingPolicy};
use crate::limits::HTTP_CONNECTIONS_MAX;
use crate::net::ConnId;
use crate::sched::wait_queue::WaitQueue;
use crate::stdx::failpoint::is_failpoint_active;
use crate::stdx::hash_map::HashMap;
use std::time::{Duration, Instant};

/// Waiting requests, by their clients.
#[derive(Debug)]
pub struct AdmissionQueue<T> {
    /// Maximum number of running requests. `None`: no limit.
    running_max: Option<usize>,
    length_max: usize,
    patience: Duration,
    scheduling: SchedulingPolicy,
    order: WaitQueue<ConnId>,
    /// The requests, and how long each waits at most.
    waiting: HashMap<ConnId, (T, Instant)>,
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
            scheduling: terms.scheduling,
            // A client waits once.
            order: WaitQueue::new(HTTP_CONNECTIONS_MAX),
            waiting: HashMap::default(),
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

    /// Adds a request. The lowest priority is the first, if the queue has priorities. The request
    /// waits at most until its deadline.
    ///
    /// # Errors
    /// The queue is full; the request is returned.
    pub fn join(
        &mut self,
        client: ConnId,
        item: T,
        priority: i32,
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
        let until = deadline.map_or(until, |deadline| deadline.min(until));
        let before = self.waiting.insert(client, (item, until));
        debug_assert!(before.is_none(), "a client waits once");
        self.order.push(
            client,
            match self.scheduling {
                SchedulingPolicy::Fcfs => 0,
                SchedulingPolicy::Priority => priority,
            },
        );
        Ok(())
    }

    /// Removes the first request, if `running` is below the limit.
    pub fn next(&mut self, running: usize) -> Option<(ConnId, T)> {
        if self.running_max.is_some_and(|most| running >= most) {
            return None;
        }
        let client = self.order.pop_fitting(|_| true)?;
        self.waiting.remove(&client).map(|(item, _)| (client, item))
    }

    /// Removes a request that has waited too long.
    pub fn overdue(&mut self, now: Instant) -> Option<(ConnId, T)> {
        let is_over = |client: &ConnId| self.waiting[client].1 <= now;
        let client = self.order.iter().find(is_over)?;
        self.leave(client).map(|item| (client, item))
    }

    /// Removes the request of this client.
    pub fn leave(&mut self, client: ConnId) -> Option<T> {
        let (item, _) = self.waiting.remove(&client)?;
        self.order.remove(client);
        Some(item)
    }

    /// Panics if more requests wait than allowed, or one of them has no place in the order.
    pub fn invariants(&self) {
        assert!(self.len() <= self.length_max, "the queue is bounded");
        assert!(self.is_empty() || !self.is_open(), "a request is queued only if there is a limit");
        assert_eq!(self.order.len(), self.len(), "each request has one place");
        assert_eq!(self.iter().count(), self.len(), "each place has its request");
    }

    /// All waiting requests, in their order.
    pub fn iter(&self) -> impl Iterator<Item = (ConnId, &T)> {
        let request = |client| self.waiting.get(&client).map(|(item, _)| (client, item));
        self.order.iter().filter_map(request)
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
    use crate::limits::PASSES_MAX;
    use crate::stdx::failpoint::panic_of;

    /// The order in which requests of these priorities are served.
    fn order(scheduling: SchedulingPolicy, priorities: &[i32]) -> Vec<i32> {
        let terms =
            RequestConfig { concurrent: Some(1), queue: 100, scheduling, ..Default::default() };
        let (mut queue, now) = (AdmissionQueue::new(&terms), Instant::now());
        for (number, &priority) in priorities.iter().enumerate() {
            let client = ConnId::outside(number as u32);
            assert_eq!(queue.join(client, priority, priority, Some(now), now), Ok(()));
            queue.invariants();
        }
        assert_eq!(queue.next(1), None, "the limit is reached");
        let order = std::iter::from_fn(|| queue.next(0)).map(|(_, priority)| priority).collect();
        assert!(queue.is_empty());
        queue.invariants();
        order
    }

    #[test]
    fn the_most_urgent_request_is_first_with_the_policy_alone() {
        let arrivals = [0, 5, -1, 5, -1, -2];
        assert_eq!(order(SchedulingPolicy::Fcfs, &arrivals), arrivals);
        assert_eq!(order(SchedulingPolicy::Priority, &arrivals), [-2, -1, -1, 0, 5, 5]);
    }

    #[test]
    fn a_less_urgent_request_is_passed_a_bounded_number_of_times() {
        let arrivals = [&[5][..], &[0; 40]].concat();
        let served = order(SchedulingPolicy::Priority, &arrivals);
        assert_eq!(served.iter().position(|&priority| priority == 5), Some(PASSES_MAX as usize));
    }

    #[test]
    fn a_request_that_leaves_or_is_late_has_no_place() {
        let terms = RequestConfig { concurrent: Some(1), queue: 3, ..Default::default() };
        let (mut queue, now) = (AdmissionQueue::new(&terms), Instant::now());
        for number in 0..3 {
            let _ = queue.join(ConnId::outside(number), number, 0, None, now);
        }
        assert_eq!(
            (queue.leave(ConnId::outside(1)), queue.leave(ConnId::outside(1))),
            (Some(1), None)
        );
        assert_eq!(queue.overdue(now), Some((ConnId::outside(0), 0)));
        queue.invariants();
        assert_eq!(queue.next(0), Some((ConnId::outside(2), 2)));
        assert_eq!((queue.next(0), queue.overdue(now)), (None, None));
    }

    #[test]
    fn a_queue_over_its_length_breaks_the_invariants() {
        let join_twice = || {
            let terms = RequestConfig { concurrent: Some(1), queue: 1, ..Default::default() };
            let (mut queue, now) = (AdmissionQueue::new(&terms), Instant::now());
            assert_eq!(queue.join(ConnId::outside(1), "first", 0, None, now), Ok(()));
            let second = queue.join(ConnId::outside(2), "second", 0, None, now);
            queue.invariants();
            assert_eq!(second, Err("second"), "a full queue returns the request");
        };
        join_twice();
        let message = panic_of("full queue takes a request", join_twice);
        assert!(message.contains("the queue is bounded"), "{message}");
    }
}
