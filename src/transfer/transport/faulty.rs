//! A bad day for any transport: holds back, delays, drops, repeats, reorders, spoils, fails, dies, as a
//! script says that a test holds.
//!
//! Wraps either half. Invariant, whatever the script: a source's slot completes, and is withdrawn, only when
//! nothing of it waits here; no fault of the wrapper is one that a transport may not have.

use crate::ids::SlotId;
use crate::transfer::transport::{
    Arrival, Completion, DestinationHalf, Full, Landing, Landings, Lost, Memory, Notice, Post,
    SourceHalf,
};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What goes wrong, from now on. The default is nothing.
#[derive(Clone, Copy, Default, Debug)]
pub struct Faults {
    /// Nothing passes: a source's posts wait, what came to a destination lies unread.
    pub hold: bool,
    /// Steps that each post, or each look at what came, is late.
    pub delay: u64,
    /// So many of the next posts vanish.
    pub drop: u32,
    /// So many of the next posts are posted twice.
    pub duplicate: u32,
    /// Of what waits, the youngest slot's posts go first.
    pub reorder: bool,
    /// Done to each post: another slot, tokens, a byte of the record.
    pub spoil: Option<fn(&mut Post)>,
    /// The session is lost after so many more steps.
    pub fail_after: Option<u64>,
    /// The half is gone, its streams closed, and says nothing of it.
    pub dead: bool,
}

/// The test's end.
#[derive(Clone, Default, Debug)]
pub struct Script(Arc<Mutex<Faults>>);

impl Script {
    /// A script without faults.
    pub fn new() -> Script {
        Script::default()
    }

    /// Changes what goes wrong.
    pub fn set(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.lock());
    }

    fn lock(&self) -> MutexGuard<'_, Faults> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Posts that may wait before room for more is made.
const WAITING: usize = 64;

/// A half on a bad day.
#[derive(Debug)]
pub struct Faulty<T> {
    /// None: dead.
    inner: Option<T>,
    script: Script,
    completion: Completion,
    /// Posts, and the step from which they may pass.
    waiting: VecDeque<(u64, Post)>,
    steps: u64,
}

impl<T: SourceHalf> Faulty<T> {
    /// A source's half.
    pub fn source(inner: T, script: Script) -> Faulty<T> {
        let completion = inner.completion();
        Faulty {
            inner: Some(inner),
            script,
            completion,
            waiting: VecDeque::with_capacity(WAITING),
            steps: 0,
        }
    }
}

impl<T: DestinationHalf> Faulty<T> {
    /// A destination's half.
    pub fn destination(inner: T, script: Script) -> Faulty<T> {
        let completion = Completion::Immediate;
        Faulty {
            inner: Some(inner),
            script,
            completion,
            waiting: VecDeque::with_capacity(WAITING),
            steps: 0,
        }
    }
}

impl<T> Faulty<T> {
    /// Begins a step: the script's word for it.
    fn turn(&mut self) -> Result<Faults, Lost> {
        self.steps += 1;
        let mut faults = self.script.lock();
        match &mut faults.fail_after {
            Some(0) => return Err(Lost::GONE),
            Some(left) => *left -= 1,
            None => {}
        }
        if faults.dead {
            self.inner = None;
            self.waiting.clear();
        }
        Ok(*faults)
    }

    /// The next post that may pass. Posts of one slot keep their order.
    fn next_due(&self, faults: &Faults) -> Option<usize> {
        let due = |index: usize| {
            let (from, post) = &self.waiting[index];
            let first = self.waiting.iter().take(index).all(|(_, other)| other.slot != post.slot);
            *from <= self.steps && first
        };
        let mut indices = 0..self.waiting.len();
        if faults.reorder {
            indices.rfind(|&index| due(index))
        } else {
            indices.find(|&index| due(index))
        }
    }
}

impl<T: SourceHalf> SourceHalf for Faulty<T> {
    fn completion(&self) -> Completion {
        self.completion
    }

    fn post(&mut self, _memory: &Memory, post: &Post) -> Result<(), Full> {
        let mut faults = self.script.lock();
        let mut post = post.clone();
        if let Some(spoil) = faults.spoil {
            spoil(&mut post);
        }
        let due = self.steps + faults.delay;
        if faults.drop > 0 {
            faults.drop -= 1;
            return Ok(());
        }
        if faults.duplicate > 0 {
            faults.duplicate -= 1;
            self.waiting.push_back((due, post.clone()));
        }
        self.waiting.push_back((due, post));
        Ok(())
    }

    fn step(&mut self, memory: &Memory, completed: &mut dyn FnMut(SlotId)) -> Result<bool, Lost> {
        let faults = self.turn()?;
        let Some(inner) = self.inner.as_mut().filter(|_| !faults.hold) else { return Ok(false) };
        let moved = inner.step(memory, &mut |slot| {
            if self.waiting.iter().all(|(_, post)| post.slot != slot) {
                completed(slot);
            }
        })?;
        let mut posted = false;
        while let Some(index) = self.next_due(&faults) {
            let post = &self.waiting[index].1;
            if self.inner.as_mut().is_none_or(|inner| inner.post(memory, post).is_err()) {
                break;
            }
            self.waiting.remove(index);
            posted = true;
        }
        Ok(moved | posted | !self.waiting.is_empty())
    }

    fn withdraw(&mut self, slot: SlotId) -> bool {
        self.waiting.retain(|(_, post)| post.slot != slot);
        self.inner.as_mut().is_none_or(|inner| inner.withdraw(slot))
    }

    fn park(&mut self, parked: bool) {
        if let Some(inner) = &mut self.inner {
            inner.park(parked);
        }
    }
}

impl<T: DestinationHalf> DestinationHalf for Faulty<T> {
    fn landing(&self) -> Landing {
        self.inner.as_ref().map_or(Landing::Moved, DestinationHalf::landing)
    }

    fn join(&mut self, arrival: Arrival) {
        if let Some(inner) = &mut self.inner {
            inner.join(arrival);
        }
    }

    fn step(&mut self, memory: &Memory, landings: &mut dyn Landings) -> Result<bool, Lost> {
        let faults = self.turn()?;
        let late = faults.hold || !self.steps.is_multiple_of(faults.delay + 1);
        let Some(inner) = self.inner.as_mut().filter(|_| !late) else { return Ok(false) };
        inner.step(memory, landings)
    }

    fn revoke(&mut self, slot: SlotId) {
        if let Some(inner) = &mut self.inner {
            inner.revoke(slot);
        }
    }

    fn expect(&mut self, notice: &Notice, first: u32, landings: &mut dyn Landings) {
        if let Some(inner) = &mut self.inner {
            inner.expect(notice, first, landings);
        }
    }

    fn park(&mut self, parked: bool) {
        if let Some(inner) = &mut self.inner {
            inner.park(parked);
        }
    }
}
