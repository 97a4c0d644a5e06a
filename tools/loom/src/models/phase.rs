//! The phases of a team, and the work of its helpers in a phase.

use super::pages::{SLOT, Taken};
use crate::stdx::barrier::{Barrier, PhaseNumber};
use crate::stdx::sync::{AtomicU64, Ordering};
use crate::transfer::pages::PeerPageLists;
use loom::sync::Arc;
use loom::thread;

fn await_empty(phase: &Barrier) {
    phase.close();
    while !phase.is_empty() {
        thread::yield_now();
    }
}

/// A helper that joins a phase finds the job of that phase. When the caller finds the phase empty,
/// the helper has done the job, and the job belongs to the caller again.
pub fn a_joined_phase_has_a_job_that_is_done_when_all_have_left() {
    let phase = Arc::new(Barrier::new());
    let job = Arc::new(AtomicU64::new(0));
    let done = Arc::new(AtomicU64::new(0));
    let helper = thread::spawn({
        let (phase, job, done) = (phase.clone(), job.clone(), done.clone());
        move || {
            let mut last = PhaseNumber::default();
            let mut phases = 0;
            // Joins as often as it can: each phase once.
            while let Some(joined) = phase.join(last) {
                assert_ne!(joined, last);
                last = joined;
                phases += 1;
                let number = job.load(Ordering::Relaxed);
                assert_ne!(number, 0, "joined a phase without a job");
                done.fetch_add(number, Ordering::Relaxed);
                phase.leave();
            }
            phases
        }
    });
    let mut asked = [0; 2];
    for (index, number) in [1, 10].into_iter().enumerate() {
        job.store(number, Ordering::Relaxed);
        phase.open();
        await_empty(&phase);
        asked[index] = done.load(Ordering::Relaxed);
        job.store(0, Ordering::Relaxed);
    }
    let phases = helper.join().unwrap();
    let last = done.load(Ordering::Relaxed);
    assert_eq!(last, asked[1], "a helper worked after the phase was empty");
    assert!(matches!((phases, last), (0, 0) | (1, 1 | 10) | (2, 11)), "{phases} phases, {last}");
    assert!(asked[0] <= 1);
}

/// As `pages-lease`, but a helper copies, and the caller checks the lease word.
pub fn a_helpers_copy_counts_only_if_the_lease_word_is_the_rooms() {
    let Taken { shown, pool, word, threads } = Taken::begin();
    let shown: Arc<PeerPageLists> = Arc::new(shown);
    let phase = Arc::new(Barrier::new());
    let copied = Arc::new(AtomicU64::new(0));
    phase.open();
    let helper = thread::spawn({
        let (phase, copied) = (phase.clone(), copied.clone());
        move || {
            if phase.join(PhaseNumber::default()).is_some() {
                copied.store(pool.word(0).load(Ordering::Relaxed), Ordering::Relaxed);
                phase.leave();
            }
        }
    });
    await_empty(&phase);
    let found = copied.load(Ordering::Relaxed);
    if shown.still_leased(SLOT, word) {
        assert!(found == 0 || found == 7, "a copy of another room's pages was accepted");
    }
    for thread in threads.into_iter().chain([helper]) {
        thread.join().unwrap();
    }
}
