//! The threads of a worker, stepped by a caller: the simulator. They take the same steps as the
//! threads that `Cores::start` starts, and they park and wake by the same rules.
//!
//! Thread: the caller's. Invariant: a parked mover takes no step until its bell, its doorbell or a
//! lane wakes it. It parks without a time limit, so a lost wake-up of a mover shows. A lost wake-up
//! of the engine only costs time.

use crate::model::forward::Forward;
use crate::sched::engine::{Engine, EngineLoop, WAITING_PARK};
use crate::stdx::event_count::EventCount;
use crate::transfer::event_loop::{EventLoop, NextStep, Waiter};
use crate::transfer::mover::Mover;
use std::sync::Arc;
use std::time::Instant;

/// An idle engine parks this many times as long as in production, so that a run has fewer turns.
const IDLE_STRETCH: u32 = 10;

/// An engine and a mover without threads.
pub struct SteppedThreads {
    engine: Engine,
    engine_loop: EngineLoop,
    engine_bell: Arc<EventCount>,
    /// The end of the engine's park.
    engine_parks_until: Option<Instant>,
    mover: Mover,
    mover_loop: EventLoop,
    waiter: Waiter,
    is_mover_parked: bool,
}

impl SteppedThreads {
    pub(super) fn new(
        (engine, engine_loop, engine_bell): (Engine, EngineLoop, Arc<EventCount>),
        mover: Mover,
        waiter: Waiter,
    ) -> SteppedThreads {
        SteppedThreads {
            engine,
            engine_loop,
            engine_bell,
            engine_parks_until: None,
            mover,
            mover_loop: waiter.event_loop(),
            waiter,
            is_mover_parked: false,
        }
    }

    /// Takes a turn of the engine, unless it parks. Returns the end of its park, or `None` if it
    /// has computed. `now` is the time of its clock.
    pub fn step_engine(&mut self, now: Instant) -> Option<Instant> {
        if let Some(until) = self.engine_parks_until
            && now < until
            && self.engine_bell.is_parked()
        {
            return Some(until);
        }
        self.engine_bell.cancel_wait();
        let park = self.engine_loop.step(&mut self.engine, &self.engine_bell);
        let stretch = |park| if park > WAITING_PARK { park * IDLE_STRETCH } else { park };
        self.engine_parks_until = park.map(|park| now + stretch(park));
        self.engine_parks_until
    }

    /// Takes a step of the mover's loop, unless it parks. `has_ready_lane` says whether a lane
    /// wakes it. Returns whether it parks.
    pub fn step_mover(&mut self, has_ready_lane: bool) -> bool {
        if self.is_mover_parked {
            if !has_ready_lane && !self.is_mover_woken() {
                return true;
            }
            self.waiter.resume(&mut self.mover_loop, &mut self.mover);
            self.is_mover_parked = false;
        }
        match self.mover_loop.step(&mut self.mover, &self.waiter.bell) {
            NextStep::Turn | NextStep::Spin => {}
            NextStep::Resume => self.waiter.resume(&mut self.mover_loop, &mut self.mover),
            NextStep::Park => self.is_mover_parked = true,
        }
        self.is_mover_parked
    }

    /// Whether the engine or the mover parks and must wake, lanes apart.
    pub fn is_woken(&self) -> bool {
        let is_engine_woken = self.engine_parks_until.is_some() && !self.engine_bell.is_parked();
        is_engine_woken || self.is_mover_woken()
    }

    fn is_mover_woken(&self) -> bool {
        self.is_mover_parked && self.waiter.is_woken()
    }

    /// Ends the threads, and returns the model.
    pub fn stop(self) -> Box<dyn Forward> {
        self.engine.into_forward()
    }
}
