//! A poster or poller that hangs for longer than any deadline. Its rooms fail in time, and their
//! pages stay leased until no write can reach them. Its late work has no effect.

use super::{SESSION, at_every_point, next_room_works, reopen};
use crate::rig::{At, Handoff, Rig};
use crate::way::{Hangs, Kind};
use baton::cause::Cause;
use baton::sys::verbs::provider::Fabric;
use baton::transfer::status::State;
use std::os::unix::process::ExitStatusExt;
use std::process::{self, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{env, thread};

const KIND: Kind = Kind::Split(2);

fn set(rig: &mut Rig, hangs: Option<Hangs>) {
    rig.ways[0].rails.as_mut().unwrap().posters.hangs = hangs;
}

fn turns(rig: &mut Rig, count: usize) {
    for _ in 0..count {
        rig.turn();
    }
}

/// Both sides' deadlines expire without asking a mover. Returns whether the source failed a slot.
fn deadline(rig: &Rig, handoff: &Handoff) -> bool {
    let failed = rig.fail(handoff, At::Source, Cause::Deadline);
    if failed {
        assert_eq!(
            (rig.states(handoff)[0], rig.cause(handoff)),
            (State::Failed, Some(Cause::Deadline))
        );
    }
    if rig.fail(handoff, At::Destination, Cause::Deadline) {
        assert_eq!(rig.states(handoff)[1], State::Failed);
    }
    failed
}

/// Both sides keep the room's pages until the source is quiet. Returns whether they still wait.
fn is_fenced(rig: &Rig, handoff: &Handoff, failed: bool) -> bool {
    let waits = failed && !rig.has_withdrawn();
    assert_eq!(rig.source.leased.contains_key(&handoff.from.0), waits, "lease of the source");
    assert!(
        !waits || rig.destination.leased.contains_key(&handoff.to.0),
        "lease of the destination"
    );
    waits
}

#[test]
fn a_thread_that_comes_back_late_ends_its_leases() {
    for hangs in [Hangs::Posters, Hangs::Pollers] {
        let mut fenced = 0;
        at_every_point(KIND, |rig, handoff| {
            set(rig, Some(hangs));
            let failed = deadline(rig, handoff);
            turns(rig, 50);
            fenced += usize::from(is_fenced(rig, handoff, failed));
            set(rig, None);
            rig.until("the leases end", |rig| rig.holds_no_lease(handoff));
            rig.reuse(handoff);
            rig.reuse_source(handoff);
            turns(rig, 7);
            rig.release(handoff);
            SESSION
        });
        assert!(fenced > 0, "{hangs:?} had nothing in hand");
    }
}

/// The answer is overdue. First the destination resets the session, then the source.
#[test]
fn a_thread_that_comes_back_to_a_session_that_was_reset_does_nothing() {
    for hangs in [Hangs::Posters, Hangs::Pollers] {
        at_every_point(KIND, |rig, handoff| {
            set(rig, Some(hangs));
            let failed = deadline(rig, handoff);
            turns(rig, 20);
            is_fenced(rig, handoff, failed);
            rig.close(SESSION, At::Destination);
            rig.step_destination();
            rig.reuse(handoff);
            turns(rig, 7);
            rig.close(SESSION, At::Source);
            rig.step_source();
            assert!(
                rig.holds_no_lease(handoff),
                "the session must not wait for a thread that hangs between its turns"
            );
            rig.reuse_source(handoff);
            let rails = rig.ways[0].rails.as_ref().unwrap();
            let has_posted = |&pair: &u32| rails.fabric.counts(pair).requests > 0;
            assert!(!rails.pairs.iter().any(has_posted), "a queue pair is left");
            rig.release(handoff);
            // The next session uses the same threads, which still have the last session's state.
            reopen(rig);
            turns(rig, 7);
            set(rig, None);
            SESSION
        });
    }
}

/// A room with a poster that hangs while it posts, after both deadlines. Then the destination
/// resets the session.
fn hang_in_a_turn() -> (Rig, Handoff) {
    let mut rig = Rig::new(Kind::Threads(1));
    let handoff = rig.begin(SESSION, 1, 40);
    fabric(&rig).stall(true);
    rig.chunks(&handoff, 16);
    rig.until("the poster hangs", |rig| fabric(rig).has_stalled());
    let failed = deadline(&rig, &handoff);
    turns(&mut rig, 20);
    assert!(is_fenced(&rig, &handoff, failed));
    rig.close(SESSION, At::Destination);
    rig.step_destination();
    rig.reuse(&handoff);
    rig.close(SESSION, At::Source);
    (rig, handoff)
}

fn fabric(rig: &Rig) -> &Fabric {
    &rig.ways[0].rails.as_ref().unwrap().fabric
}

/// The poster holds the queue pairs, so the session ends after it releases them.
#[test]
fn a_poster_that_hangs_in_a_turn_is_waited_for() {
    let (mut rig, handoff) = hang_in_a_turn();
    let rails = rig.ways[0].rails.take().unwrap();
    let is_back = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(200));
            is_back.store(true, Ordering::Relaxed);
            rails.fabric.stall(false);
        });
        rig.step_source();
        assert!(is_back.load(Ordering::Relaxed), "the session ended before its poster");
    });
    rig.ways[0].rails = Some(rails);
    assert!(rig.holds_no_lease(&handoff));
    rig.reuse_source(&handoff);
    turns(&mut rig, 20);
    rig.release(&handoff);
    reopen(&mut rig);
    next_room_works(&mut rig, SESSION);
}

/// A thread that never returns could still post, so its pages must not be reused. The process
/// aborts.
#[test]
fn a_poster_that_never_comes_back_ends_the_process() {
    const NAME: &str = "hangs::a_poster_that_never_comes_back_ends_the_process";
    if env::var_os(NAME).is_some() {
        let (mut rig, _) = hang_in_a_turn();
        rig.step_source();
        // The session ended before its poster.
        process::exit(1);
    }
    let mut again = Command::new(env::current_exe().unwrap());
    let ended = again.args(["--exact", NAME]).env(NAME, "").stdout(Stdio::null()).status().unwrap();
    assert_eq!(ended.signal(), Some(libc::SIGABRT), "{ended}");
}
