//! The models, one file for each protocol. A model is a function that loom runs once for each order
//! of events.
//!
//! If a thread only reads a word, the model spawns that thread. The reason: loom remembers only the
//! last access to a word. If the reader ran first, and the writer reads the word before it writes
//! it, loom does not try the reader after the writer.

mod bell;
mod flight;
mod pages;
mod phase;
mod ring;
mod rings;
pub mod sleep;
mod split;
mod status;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Name and check of each model.
pub const ALL: &[(&str, fn(&str))] = &[
    ("status-end", |name| check(name, status::one_end_wins)),
    ("status-read", |name| check(name, status::a_reader_of_success_finds_every_part)),
    ("status-lanes", |name| check(name, status::the_mover_that_completes_finds_every_part)),
    ("status-stale", |name| check(name, status::a_stale_move_leaves_the_next_use_alone)),
    ("bell", |name| check(name, bell::the_listener_never_sleeps_over_pending_work)),
    ("ring-whole", |name| check(name, ring::entries_come_whole_and_in_order)),
    ("ring-park", |name| check(name, ring::a_parked_reader_is_woken)),
    ("pages-lease", |name| check(name, pages::a_copy_that_counts_is_of_the_rooms_pages)),
    ("pages-helper", |name| {
        check(name, phase::a_helpers_copy_counts_only_if_the_lease_word_is_the_rooms)
    }),
    ("phase", |name| check(name, phase::a_joined_phase_has_a_job_that_is_done_when_all_have_left)),
    ("flight-over", |name| check(name, flight::a_slot_is_over_once_and_for_all)),
    ("flight-room", |name| check(name, flight::an_entry_is_written_again_when_it_was_reaped)),
    ("flight-woken", |name| check(name, flight::room_wakes_a_poster_that_sleeps)),
    ("split-taken", |name| {
        check(name, split::pages_of_a_session_can_be_reused_when_its_seat_is_gone)
    }),
    ("split-once", |name| check(name, split::a_cancelled_slot_is_over_once)),
    ("split-woken", |name| check(name, split::all_three_threads_are_woken)),
    ("rings-success", |name| check(name, rings::success_shows_behind_the_lease_end)),
    ("rings-once", |name| check(name, rings::a_lease_ends_once)),
    ("rings-woken", |name| check(name, rings::both_threads_are_woken)),
];

/// Thread switches for each run that no thread asked for. Few are enough to show an error.
const PREEMPTIONS: usize = 3;

fn check(name: &str, model: fn()) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(PREEMPTIONS);
    let (runs, started) = (Arc::new(AtomicUsize::new(0)), Instant::now());
    let counted = runs.clone();
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        model();
    });
    println!(
        "{name}: holds in {} runs, {:.1} s",
        runs.load(Ordering::Relaxed),
        started.elapsed().as_secs_f32()
    );
}
