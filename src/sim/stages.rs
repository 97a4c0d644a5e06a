//! The time to the first token, measured from outside: from the turn of `ctl` that knows a request
//! until the engine's clock as the first token leaves the engine. The stages that `ctl` records for
//! `/metrics` must sum to it.
//!
//! Invariants: the events of the engine keep their order. The clock of the engine only moves in a
//! pass of the model, so an event has the time of the last pass before it.
//! Not here: the stamps (`sched::request`) and the stages (`worker::stages`).

use super::model::Watch;
use crate::ids::RequestKey;
use crate::sched::messages::{EngineEvent, RequestEvent};
use crate::stdx::event_queue::Nanos;
use crate::worker::service::WorkerService;
use crossbeam_channel::{Receiver, Sender};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Times of the requests of a worker in one role.
pub struct StageWatch {
    /// Simulated time starts here.
    base: Instant,
    events: Receiver<EngineEvent>,
    /// Of each pass in the current step: the number of events before it, and the time after it.
    passes: Arc<Mutex<Vec<(usize, Nanos)>>>,
    arrived: BTreeMap<RequestKey, Instant>,
    first: BTreeMap<(RequestKey, usize), Instant>,
}

impl StageWatch {
    /// Watches a worker that has just begun its role. The model of its engine has this watch.
    pub fn new(base: Instant, service: &mut WorkerService, model: &Arc<Watch>) -> StageWatch {
        let events = service.engine_events().clone();
        let passes = Arc::<Mutex<Vec<_>>>::default();
        service.take_stages();
        let (counted, times, clock) = (events.clone(), passes.clone(), Arc::downgrade(model));
        // The clock of a pass stands at its end already when its first layer is computed.
        let hook = move || {
            let now = clock.upgrade().map_or(0, |watch| watch.now_ns.load(Ordering::Relaxed));
            times.lock().expect("no panic while locked").push((counted.len(), now));
        };
        *model.hook.lock().expect("no panic while locked") = Some(Box::new(hook));
        StageWatch { base, events, passes, arrived: BTreeMap::new(), first: BTreeMap::new() }
    }

    /// Number of events that `ctl` has not taken.
    pub fn waiting(&self) -> usize {
        self.events.len()
    }

    /// Notes the first tokens among the events of a step, which began at `begun`. There were
    /// `before` events before it.
    pub fn note_step(
        &mut self,
        (before, begun): (usize, Nanos),
        service: &WorkerService,
        sender: &Sender<EngineEvent>,
    ) {
        let passes = std::mem::take(&mut *self.passes.lock().expect("no panic while locked"));
        for index in 0..self.events.len() {
            let event = self.events.try_recv().expect("it was counted");
            if let EngineEvent::Request(RequestEvent::Token { request, first: Some(_), .. }) = event
                && index >= before
                && let Some(choice) = service.choice_of(request)
            {
                let last = passes.iter().rev().find(|(earlier, _)| *earlier <= index);
                let at = last.map_or(begun, |&(_, time)| time);
                self.first.insert(choice, self.base + Duration::from_nanos(at));
            }
            assert!(sender.try_send(event).is_ok(), "there was room for it");
        }
    }

    /// Notes new requests, and checks the stages that `ctl` has recorded in a turn at `now`.
    ///
    /// # Errors
    /// The stages of a first token do not sum to the time that passed.
    pub fn check(&mut self, service: &mut WorkerService, now: Instant) -> Result<(), String> {
        for request in service.unanswered() {
            self.arrived.entry(request).or_insert(now);
        }
        for (request, choice, stages) in service.take_stages() {
            let Some(first) = self.first.remove(&(request, choice)) else {
                return Err("a first token is recorded that no event has told".into());
            };
            let passed = first - self.arrived[&request];
            if stages.total() != passed {
                return Err(format!(
                    "a first token came after {passed:?}, which is not the sum of {stages:?}"
                ));
            }
        }
        Ok(())
    }
}
