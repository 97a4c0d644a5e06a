//! A thread and its helpers that share the tasks of a phase.
//!
//! Thread: the thread that owns the team calls `run`.
//! Invariants: each task runs once. `run` returns when all tasks have ended. A late or sleeping
//! helper delays no other thread: it can join only while tasks are left. The caller waits only for
//! helpers that joined. Waiting spins briefly, then parks.
#![allow(unsafe_code)]

use super::barrier::{Barrier, PhaseNumber};
use super::disjoint_parts::{Chunks, DisjointParts};
use super::seal::seal_thread;
use std::cell::UnsafeCell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::*, fence};
use std::thread::{self, JoinHandle, Thread};

/// Iterations of waiting before parking: about 50 µs. That is longer than the serial pieces between
/// two phases of a decode step and far shorter than a scheduler's time slice.
const SPINS: u32 = 2000;

/// The work of a phase for one thread, given the thread's number. The lifetime is erased: see
/// [`Team::phase`].
type Job = *const (dyn Fn(usize) + Sync);

struct Shared {
    phase: Barrier,
    job: UnsafeCell<Option<Job>>,
    /// The caller is parked until the last helper leaves.
    caller_waits: AtomicBool,
    caller: UnsafeCell<Option<Thread>>,
    panicked: AtomicBool,
    stop: AtomicBool,
    started: AtomicUsize,
    asleep: Vec<AtomicBool>,
}

// SAFETY: the caller writes `job` and `caller` only while no helper can have joined (the previous
// phase is closed and empty). Helpers read them only after joining.
unsafe impl Sync for Shared {}
// SAFETY: as above; a job is `Sync`.
unsafe impl Send for Shared {}

/// See the module.
pub struct Team {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
}

impl Team {
    /// Starts `threads − 1` helpers with the names `name-1` and so on. Helper `i` begins with
    /// `begin(i)`, which can choose its CPUs.
    pub fn new(
        name: &str,
        threads: usize,
        begin: impl Fn(usize) + Clone + Send + 'static,
    ) -> io::Result<Team> {
        let helpers = threads.saturating_sub(1);
        let shared = Arc::new(Shared {
            phase: Barrier::new(),
            job: UnsafeCell::new(None),
            caller_waits: AtomicBool::new(false),
            caller: UnsafeCell::new(None),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            started: AtomicUsize::new(0),
            asleep: (0..helpers).map(|_| AtomicBool::new(false)).collect(),
        });
        let mut team = Team { shared: shared.clone(), helpers: Vec::with_capacity(helpers) };
        for index in 1..=helpers {
            let (shared, begin) = (shared.clone(), begin.clone());
            let helper =
                thread::Builder::new().name(format!("{name}-{index}")).spawn(move || {
                    begin(index);
                    drop(begin);
                    shared.started.fetch_add(1, SeqCst);
                    let _seal = seal_thread();
                    help(&shared, index);
                })?;
            team.helpers.push(helper);
        }
        // A thread allocates while it starts. After this point none does.
        while team.shared.started.load(SeqCst) < helpers {
            thread::yield_now();
        }
        Ok(team)
    }

    /// Number of threads, including the caller.
    pub fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Runs `work` once for each part.
    pub fn run<P: DisjointParts>(&mut self, parts: P, work: impl Fn(usize, P::Part) + Sync) {
        self.share(parts.count(), |_, index| {
            // SAFETY: `share` gives each index once.
            work(index, unsafe { parts.part(index) });
        });
    }

    /// Runs `work` once for each part, with the scratch of the running thread. `scratch` holds one
    /// element for each thread.
    pub fn run_with<P: DisjointParts, T: Send>(
        &mut self,
        scratch: &mut [T],
        parts: P,
        work: impl Fn(&mut T, usize, P::Part) + Sync,
    ) {
        assert!(scratch.len() >= self.threads());
        let scratch = Chunks::new(scratch, 1);
        self.share(parts.count(), |worker, index| {
            // SAFETY: a worker is one thread, and runs one task at a time.
            let own = unsafe { scratch.part(worker) };
            // SAFETY: `share` gives each index once.
            work(&mut own[0], index, unsafe { parts.part(index) });
        });
    }

    fn share(&mut self, count: usize, task: impl Fn(usize, usize) + Sync) {
        if count <= 1 || self.helpers.is_empty() {
            return (0..count).for_each(|index| task(0, index));
        }
        let next = AtomicUsize::new(0);
        self.phase(&|worker| {
            loop {
                let index = next.fetch_add(1, Relaxed);
                if index >= count {
                    return;
                }
                task(worker, index);
            }
        });
    }

    /// Opens a phase, takes part in it, closes it, and waits for helpers at work.
    fn phase<'a>(&mut self, job: &'a (dyn Fn(usize) + Sync + 'a)) {
        /// Closes and waits even if the caller's own part panics.
        struct Close<'a>(&'a Shared);
        impl Drop for Close<'_> {
            fn drop(&mut self) {
                self.0.close();
            }
        }
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes, and no thread calls the job after `close` returned.
        let job: Job = unsafe { std::mem::transmute::<&'a (dyn Fn(usize) + Sync + 'a), Job>(job) };
        // SAFETY: the last phase is closed and empty, so no helper reads these.
        unsafe {
            *shared.job.get() = Some(job);
            let caller = &mut *shared.caller.get();
            if caller.as_ref().is_none_or(|c| c.id() != thread::current().id()) {
                *caller = Some(thread::current());
            }
        }
        shared.phase.open();
        let closing = Close(shared);
        self.wake();
        // SAFETY: made from a live reference above.
        unsafe { (*job)(0) };
        drop(closing);
        assert!(!shared.panicked.load(Relaxed), "a task panicked in another thread");
    }

    fn wake(&self) {
        // Pairs with the fence in `wait`: either this thread sees the helper asleep, or the helper
        // sees the phase.
        fence(SeqCst);
        for (asleep, helper) in self.shared.asleep.iter().zip(&self.helpers) {
            if asleep.load(Relaxed) {
                helper.thread().unpark();
            }
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        for helper in self.helpers.drain(..) {
            helper.thread().unpark();
            let _ = helper.join();
        }
    }
}

impl Shared {
    fn close(&self) {
        self.phase.close();
        for _ in 0..SPINS {
            if self.phase.is_empty() {
                return;
            }
            std::hint::spin_loop();
        }
        self.caller_waits.store(true, SeqCst);
        while !self.phase.is_empty() {
            thread::park();
        }
        self.caller_waits.store(false, Relaxed);
    }

    fn leave(&self) {
        // The thread handle is cloned first: once the count is zero the caller may replace it.
        // SAFETY: a joined helper may read what the caller wrote before opening the phase.
        let caller = unsafe { &*self.caller.get() }.clone();
        if self.phase.leave()
            && self.caller_waits.load(SeqCst)
            && let Some(caller) = caller
        {
            caller.unpark();
        }
    }
}

/// The main loop of a helper.
fn help(shared: &Shared, worker: usize) {
    /// Leaves the phase even if the task panics.
    struct Leave<'a>(&'a Shared);
    impl Drop for Leave<'_> {
        fn drop(&mut self) {
            if thread::panicking() {
                self.0.panicked.store(true, SeqCst);
            }
            self.0.leave();
        }
    }
    let mut last = PhaseNumber::default();
    while let Some(joined) = wait(shared, worker, last) {
        last = joined;
        let _leaving = Leave(shared);
        // SAFETY: this helper has joined, so the caller keeps the job alive until it leaves.
        if let Some(job) = unsafe { *shared.job.get() } {
            // SAFETY: as above.
            unsafe { (*job)(worker) };
        }
    }
}

/// Waits for a phase and joins it. Returns `None` when the team stops.
fn wait(shared: &Shared, worker: usize, last: PhaseNumber) -> Option<PhaseNumber> {
    let asleep = &shared.asleep[worker - 1];
    loop {
        for _ in 0..SPINS {
            if let Some(joined) = shared.phase.join(last) {
                return Some(joined);
            }
            if shared.stop.load(Relaxed) {
                return None;
            }
            std::hint::spin_loop();
        }
        asleep.store(true, Relaxed);
        fence(SeqCst);
        let joined = shared.phase.join(last);
        if joined.is_none() && !shared.stop.load(SeqCst) {
            thread::park();
        }
        asleep.store(false, Relaxed);
        if joined.is_some() {
            return joined;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::disjoint_parts::Count;
    use super::*;

    #[test]
    fn each_task_runs_once_for_any_number_of_threads() {
        for threads in [1, 2, 3, 7] {
            let mut team = Team::new("team", threads, |_| ()).unwrap();
            for count in [0, 1, 2, 3, 100] {
                let mut done = vec![0u32; count];
                let mut scratch = vec![0u32; threads];
                for _ in 0..50 {
                    team.run_with(&mut scratch, Chunks::new(&mut done, 1), |own, index, part| {
                        part[0] += index as u32 + 1;
                        *own += 1;
                    });
                }
                assert!(done.iter().enumerate().all(|(i, n)| *n == 50 * (i as u32 + 1)));
                assert_eq!(scratch.iter().sum::<u32>(), 50 * count as u32);
            }
        }
    }

    #[test]
    fn sleeping_helpers_are_woken() {
        let mut team = Team::new("team", 2, |_| ()).unwrap();
        for _ in 0..20 {
            thread::sleep(std::time::Duration::from_millis(2));
            // Two tasks that wait for each other need two threads.
            let met = std::sync::Barrier::new(2);
            team.run(Count(2), |_, ()| {
                met.wait();
            });
        }
    }

    #[test]
    fn a_panic_in_any_task_reaches_the_caller_after_all_ended() {
        let mut team = Team::new("team", 2, |_| ()).unwrap();
        let ended = AtomicUsize::new(0);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let met = std::sync::Barrier::new(2);
            team.run(Count(2), |index, ()| {
                met.wait();
                assert!(index != 1, "task fails");
                ended.fetch_add(1, SeqCst);
            });
        }));
        assert!(result.is_err());
        assert_eq!(ended.load(SeqCst), 1);
    }
}
