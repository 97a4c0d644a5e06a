//! Scheduler, mover and `ctl` of one worker around its rings. The handle and the movers are the
//! product's. The channels order no more than crossbeam's. The transport is the model's.

use crate::cause::Cause;
use crate::channel;
use crate::ids::{Generation, PageId, Room, SessionGeneration, SlotId};
use crate::kv::lease::MoverRight;
use crate::kv::page_span::PageSpan;
use crate::models::sleep::Sleep;
use crate::stdx::event_count::EventCount;
use crate::transfer::aux::AuxRecord;
use crate::transfer::command::{DestinationCommand, LeaseEnd, SourceCommand};
use crate::transfer::handle::{DestinationHandle, SourceHandle};
use crate::transfer::mover::destination::DestinationMover;
use crate::transfer::mover::source::SourceMover;
use crate::transfer::pages::PageLists;
use crate::transfer::rings::{Bells, Rings};
use crate::transfer::status::{Move, State, StatusTable};
use crate::transfer::target::{SessionId, Target};
use crate::transfer::transport::{
    CompletionMode, DestinationHalf, Full, Landings, Memory, Post, SessionLost, SourceHalf,
};
use loom::thread;
use std::sync::Arc;

const SLOT: SlotId = SlotId(0);
const SESSION: SessionId = SessionId(0);
const PAGE: PageId = PageId(5);
const AUX: AuxRecord = AuxRecord(42);

/// The state that one worker's threads share, and the sleep of two of them.
struct Worker<C> {
    status: Arc<StatusTable>,
    generation: Generation,
    rings: Rings<C>,
    memory: Memory,
    engine: Sleep,
    mover: Sleep,
}

impl<C> Worker<C> {
    /// A worker with one open slot.
    fn new() -> Worker<C> {
        let status = Arc::new(StatusTable::new(1));
        let lists = Arc::new(PageLists::new(1, 1).unwrap());
        let (engine, mover) = (Sleep::new(), Sleep::new());
        let wakes = |sleep: &Sleep| {
            let sleep = sleep.clone();
            Arc::new(EventCount::new(move || sleep.wake()))
        };
        let bells = Bells {
            engine: wakes(&engine),
            ctl: Arc::new(EventCount::new(|| ())),
            mover: wakes(&mover),
        };
        let rings = Rings::new(&status, &lists, 1, &bells);
        let generation = status.open(SLOT);
        Worker { status, generation, rings, memory: Memory { lists }, engine, mover }
    }
}

/// The session of a decode worker: everything lands as soon as it is expected.
#[derive(Debug)]
struct Arriving;

impl DestinationHalf for Arriving {
    fn step(&mut self, memory: &Memory, landings: &mut dyn Landings) -> Result<bool, SessionLost> {
        let wanted =
            landings.current(SLOT).is_some_and(|notice| landings.expected(&notice).is_some());
        if wanted {
            assert_eq!(memory.lists.page(SLOT, 0), PAGE, "landed with another list");
            landings.complete(SLOT, AUX);
        }
        Ok(wanted)
    }
}

type Commands = channel::Sender<DestinationCommand>;

/// A decode worker with one session, and its `ctl`'s end of the ring.
fn decode() -> (DestinationMover, DestinationHandle, Commands, Generation) {
    let Worker { generation, rings: Rings { links, handle, commands, .. }, memory, .. } =
        Worker::new();
    let mut mover = DestinationMover::new(links, memory, 1, MoverRight::for_mover_thread());
    let open = DestinationCommand::Open {
        session: SESSION,
        generation: SessionGeneration(1),
        binding: Box::new(Arriving),
    };
    commands.try_send(open).unwrap();
    mover.step();
    (mover, handle, commands, generation)
}

fn expect(handle: &DestinationHandle, generation: Generation) {
    let lease = crate::kv::lease(SLOT, generation);
    handle.expect(SLOT, generation, (SESSION, Room(7)), 0..1, [PageSpan::whole(&[PAGE])], lease);
}

/// A scheduler that reads Success finds the end of the lease and the aux record.
pub fn success_shows_behind_the_lease_end() {
    let (mut mover, handle, _commands, generation) = decode();
    expect(&handle, generation);
    let scheduler = thread::spawn(move || {
        if handle.status(SLOT).state == State::Success {
            let LeaseEnd { ended, aux } =
                handle.poll_end().expect("Success shows before the lease has ended");
            assert_eq!((ended.generation(), aux), (generation, Some(AUX)));
        }
    });
    mover.step();
    scheduler.join().unwrap();
}

/// `ctl` marks the slot Failed while the scheduler leases its pages and the mover lands the KV.
/// In each order the lease ends exactly once.
pub fn a_lease_ends_once() {
    let (mut mover, handle, commands, generation) = decode();
    let status = handle.status.clone();
    let ctl = thread::spawn(move || {
        if status.advance(SLOT, generation, Move::Fail(Cause::PeerLost)).is_ok() {
            commands.try_send(DestinationCommand::Cancel { slot: SLOT, generation }).unwrap();
        }
    });
    let mover = thread::spawn(move || {
        mover.step();
        mover
    });
    expect(&handle, generation);
    ctl.join().unwrap();
    let mut mover = mover.join().unwrap();
    while mover.step() {}
    let end = handle.poll_end().expect("the lease has not ended");
    assert!(handle.poll_end().is_none(), "the lease has ended twice");
    let state = handle.status(SLOT).state;
    assert!(state == State::Failed || (state, end.aux) == (State::Success, Some(AUX)));
}

/// The session of a prefill worker.
#[derive(Debug)]
struct Posting;

impl SourceHalf for Posting {
    fn completion(&self) -> CompletionMode {
        CompletionMode::Immediate
    }

    fn post(&mut self, memory: &Memory, post: &Post) -> Result<(), Full> {
        assert_eq!(memory.lists.page(post.slot, 0), PAGE, "posted with another list");
        Ok(())
    }
}

/// Both threads of a prefill worker sleep when they find nothing to do. In a hand-off the mover
/// posts the pages of the list, and the scheduler gets its lease back and reads Success.
pub fn both_threads_are_woken() {
    let Worker { status, generation, rings, memory, engine, mover: sleep } = Worker::new();
    let Rings { links, handle, commands, .. } = rings;
    let bell = handle.bell.clone();
    let engine_bell = links.engine.clone();
    let mut mover = SourceMover::new(links, memory, 1, MoverRight::for_mover_thread());
    let open = SourceCommand::Open {
        session: SESSION,
        generation: SessionGeneration(1),
        binding: Box::new(Posting),
    };
    commands.try_send(open).unwrap();
    mover.step();
    status.advance(SLOT, generation, Move::Grant).unwrap();
    // As `sched::engine::run`.
    let scheduler = thread::spawn(move || {
        hand_over(&handle, generation);
        let mut ended = None;
        loop {
            engine_bell.prepare_wait();
            ended = ended.or_else(|| handle.poll_end());
            if ended.is_some() && handle.status(SLOT).state == State::Success {
                break;
            }
            engine.sleep();
            engine_bell.cancel_wait();
        }
    });
    // As `Waiter::run`, until its part is done.
    while status.is_open(SLOT, generation) {
        bell.prepare_wait();
        if !mover.step() {
            sleep.sleep();
        }
        bell.cancel_wait();
    }
    scheduler.join().unwrap();
}

fn hand_over(handle: &SourceHandle, generation: Generation) {
    let target = Target { session: SESSION, slot: SLOT, generation, room: Room(7), prefix: 0 };
    handle.begin(
        SLOT,
        generation,
        target,
        [PageSpan::whole(&[PAGE])],
        crate::kv::lease(SLOT, generation),
    );
    handle.chunk(SLOT, generation, 0..1, Some(AUX));
}
