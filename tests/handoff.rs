//! The hand-off inside one process, stepped by hand: real managers, rings, movers and regions. The
//! test replaces both schedulers.

use baton::cause::Cause;
use baton::ids::{DecodeAllocation, PageId, Room, WorkerId};
use baton::kv::groups::GroupCounts;
use baton::kv::layout::{KvDtype, KvLayout};
use baton::kv::lease::MoverRight;
use baton::kv::page_span::PageSpan;
use baton::kv::pool::PagePool;
use baton::kv::region::Region;
use baton::link::handoff::{
    EndpointKind, Handoff, LinkId, Source, TransportCapabilities, WorkerEndpoint, prompt_of,
};
use baton::link::local_worker::{LocalWorker, Ring};
use baton::model::logprobs::{Sampled, TopLogprobs};
use baton::net::Entropy;
use baton::sched::first_token::FirstTokenRecord;
use baton::stdx::event_count::EventCount;
use baton::stdx::failpoint::set_failpoint;
use baton::transfer::answer::TransferAnswer;
use baton::transfer::aux::AuxRecord;
use baton::transfer::command::{DestinationCommand, SourceCommand};
use baton::transfer::copy_pool::CopyPool;
use baton::transfer::event_loop::LoopTask;
use baton::transfer::handle::{DestinationHandle, SourceHandle};
use baton::transfer::manager::destination::DestinationManager;
use baton::transfer::manager::identity::WorkerIdentity;
use baton::transfer::manager::rooms::Slot;
use baton::transfer::manager::source::SourceManager;
use baton::transfer::mover::Mover;
use baton::transfer::mover::destination::DestinationMover;
use baton::transfer::mover::source::SourceMover;
use baton::transfer::pages::PageLists;
use baton::transfer::rings::{Bells, Rings};
use baton::transfer::status::{State, StatusTable};
use baton::transfer::target::{SessionId, Target};
use baton::transfer::transport::Memory;
use baton::wire::message::{BitClass, Fingerprint, HostId, Transport};
use crossbeam_channel as channel;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

const SLOTS: usize = 8;
const PAGES: u32 = 64;
const SESSIONS: usize = 4;
const PREFILL: WorkerId = WorkerId(0);
const DECODE: WorkerId = WorkerId(1);

/// One worker's memory, and the scheduler's ends of its queues.
struct Side<H> {
    memory: Memory,
    pool: PagePool,
    commands: channel::Receiver<TransferAnswer>,
    handle: H,
}

struct Cluster {
    handoff: Handoff,
    mover: Mover,
    prefill: Side<SourceHandle>,
    decode: Side<DestinationHandle>,
    now: Instant,
}

fn bell() -> Arc<EventCount> {
    Arc::new(EventCount::new(|| ()))
}

fn memory(page_size: u32) -> Memory {
    let layout = KvLayout::page_major(page_size, 2, 2, 8, KvDtype::F16);
    let pages = PAGES * 16 / page_size;
    let bytes = u64::from(pages) * layout.page_stride;
    Memory {
        groups: GroupCounts::FULL,
        region: Arc::new(Region::new(c"kv", bytes as usize).unwrap()),
        layout,
        pages,
        lists: Arc::new(PageLists::new(SLOTS, 64).unwrap()),
        counters: Arc::default(),
        copy_pool: CopyPool::default(),
    }
}

fn identity(memory: &Memory) -> WorkerIdentity {
    WorkerIdentity {
        groups: GroupCounts::FULL,
        fingerprint: Fingerprint {
            config: [1; 32],
            weights: [2; 32],
            kernels: [3; 32],
            tokenizer: [4; 32],
            template: [5; 32],
        },
        bit_class: BitClass::UNKNOWN,
        layout: memory.layout,
        pages: memory.pages,
        pool_bytes: memory.region.len() as u64,
        slots: SLOTS as u32,
        host: HostId([7; 16]),
    }
}

impl Cluster {
    fn new(prefill_page: u32, decode_page: u32, transport: Transport) -> Cluster {
        let (source, destination) = (memory(prefill_page), memory(decode_page));
        let statuses = [Arc::new(StatusTable::new(SLOTS)), Arc::new(StatusTable::new(SLOTS))];
        let engines: [_; 2] = std::array::from_fn(|_| channel::bounded(64));
        let bells = Bells { engine: bell(), ctl: bell(), mover: bell() };
        let from: Rings<SourceCommand> = Rings::new(&statuses[0], &source.lists, SESSIONS, &bells);
        let to: Rings<DestinationCommand> =
            Rings::new(&statuses[1], &destination.lists, SESSIONS, &bells);
        let right = MoverRight::for_mover_thread;
        let mover = Mover {
            sources: vec![SourceMover::new(from.links, source.clone(), SESSIONS, right())],
            destinations: vec![DestinationMover::new(
                to.links,
                destination.clone(),
                SESSIONS,
                right(),
            )],
        };
        let worker = |id: WorkerId, memory: &Memory| {
            let ring = Ring::new(engines[id.index()].0.clone(), bell());
            LocalWorker::new(id, ring, statuses[id.index()].clone(), memory.clone())
        };
        let members = vec![
            WorkerEndpoint {
                worker: worker(PREFILL, &source),
                kind: EndpointKind::Prefill {
                    manager: Box::new(SourceManager::<LinkId>::new(
                        identity(&source),
                        vec![transport],
                        DecodeAllocation::Early,
                        statuses[0].clone(),
                        SESSIONS,
                    )),
                    mover: Ring::new(from.commands, bell()),
                },
                reports: Some(from.reports),
            },
            WorkerEndpoint {
                worker: worker(DECODE, &destination),
                kind: EndpointKind::Decode {
                    manager: Box::new(DestinationManager::new(
                        identity(&destination),
                        statuses[1].clone(),
                        SESSIONS,
                    )),
                    mover: Ring::new(to.commands, bell()),
                    doorbell: baton::sys::event::EventFd::new().unwrap(),
                },
                reports: Some(to.reports),
            },
        ];
        let prefill = Side {
            handle: from.handle,
            pool: PagePool::new(source.pages),
            memory: source,
            commands: engines[0].1.clone(),
        };
        let decode = Side {
            handle: to.handle,
            pool: PagePool::new(destination.pages),
            memory: destination,
            commands: engines[1].1.clone(),
        };
        let handoff = Handoff::new(
            members,
            TransportCapabilities {
                transports: vec![transport],
                host: HostId([7; 16]),
                data: None,
                lanes: 1,
            },
            Entropy::System,
        );
        Cluster { handoff, mover, prefill, decode, now: Instant::now() }
    }

    fn settle(&mut self) {
        while self.mover.step() | self.handoff.step(self.now) {}
    }

    fn submit(&mut self, worker: WorkerId, room: u64, prompt: &[u32]) -> Option<Slot> {
        let source = Source::Local(PREFILL);
        self.submit_from((worker == DECODE).then_some(&source), worker, room, prompt)
    }

    fn submit_from(
        &mut self,
        source: Option<&Source>,
        worker: WorkerId,
        room: u64,
        prompt: &[u32],
    ) -> Option<Slot> {
        let deadline = self.now + Duration::from_secs(60);
        let slot = self.handoff.worker_mut(worker).take_slot(prompt_of(prompt), deadline)?;
        self.handoff.enter(worker, slot, Room(room), source, self.now);
        Some(slot)
    }

    /// Acts as the decode scheduler: leases pages after the session is ready.
    fn expect(&mut self, slot: Slot, room: u64, tokens: u32) -> Vec<PageId> {
        let session = self.session_ready(slot);
        let mut pages = Vec::new();
        let count = self.decode.memory.layout.pages_for(tokens);
        assert!(self.decode.pool.allocate(count, &mut pages));
        let lease = self.decode.pool.lease(slot.id, slot.generation, &pages);
        let from = (session, Room(room));
        self.decode.handle.expect(
            slot.id,
            slot.generation,
            from,
            0..tokens,
            [PageSpan::whole(&pages)],
            lease,
        );
        self.handoff.handle_expecting(DECODE, slot, 0..tokens, self.now);
        pages
    }

    fn session_ready(&mut self, slot: Slot) -> SessionId {
        for command in self.decode.commands.try_iter() {
            if let TransferAnswer::SessionReady { slot: id, session, .. } = command
                && id == slot.id
            {
                return session;
            }
        }
        panic!("no session for {slot:?}");
    }

    fn granted(&mut self) -> Option<Target> {
        self.prefill.commands.try_iter().find_map(|command| match command {
            TransferAnswer::Granted { target, .. } => Some(target),
            _ => None,
        })
    }

    /// Acts as the prefill scheduler up to the first chunk, with known bytes in its pages.
    fn begin(&mut self, slot: Slot, target: Target, tokens: u32) -> Vec<PageId> {
        let mut pages = Vec::new();
        assert!(
            self.prefill.pool.allocate(self.prefill.memory.layout.pages_for(tokens), &mut pages)
        );
        // Pages are adjacent only on one side, so runs must be split.
        pages.reverse();
        self.fill(&pages, slot.id.0 as u8 + 1);
        let lease = self.prefill.pool.lease(slot.id, slot.generation, &pages);
        self.prefill.handle.begin(
            slot.id,
            slot.generation,
            target,
            [PageSpan::whole(&pages)],
            lease,
        );
        pages
    }

    #[allow(unsafe_code)]
    fn fill(&self, pages: &[PageId], salt: u8) {
        let memory = &self.prefill.memory;
        for (i, page) in pages.iter().enumerate() {
            let at = u64::from(page.0) * memory.layout.page_stride;
            for byte in 0..memory.layout.page_stride {
                let value = salt.wrapping_mul(31).wrapping_add((i as u64 * 7 + byte) as u8);
                // SAFETY: inside the region; no other thread runs.
                unsafe { memory.region.base().add((at + byte) as usize).write(value) };
            }
        }
    }

    fn chunk(&self, slot: Slot, room: u64, tokens: std::ops::Range<u32>, last: bool) {
        let first = Sampled { token: 4242, logprob: -0.5, top: TopLogprobs::EMPTY };
        let aux = last.then(|| FirstTokenRecord::new(&first, 0).to_aux(Room(room)));
        self.prefill.handle.chunk(slot.id, slot.generation, tokens, aux);
    }

    /// All elements of `tokens` tokens, read with a side's own layout and pages.
    #[allow(unsafe_code)]
    fn kv(memory: &Memory, pages: &[PageId], tokens: u32) -> Vec<u8> {
        use baton::kv::layout::KeyValue;
        let layout = &memory.layout;
        let mut bytes = Vec::new();
        for token in 0..tokens {
            for layer in 0..layout.layers {
                for which in [KeyValue::Key, KeyValue::Value] {
                    for head in 0..layout.kv_heads {
                        let page = pages[(token / layout.page_size) as usize];
                        let at = layout.offset(page, layer, which, head, token % layout.page_size)
                            as usize;
                        for i in 0..layout.token_stride as usize {
                            // SAFETY: inside the region; no other thread runs.
                            bytes.push(unsafe { memory.region.base().add(at + i).read() });
                        }
                    }
                }
            }
        }
        bytes
    }

    /// Every page is free again.
    fn assert_idle(&mut self) {
        for (pool, free) in [
            (&self.prefill.pool, self.prefill.memory.pages),
            (&self.decode.pool, self.decode.memory.pages),
        ] {
            pool.invariants();
            assert_eq!(pool.counts().free, free);
        }
    }

    fn end_prefill(&mut self, slot: Slot, pages: &[PageId], failure: Option<Cause>) {
        self.prefill.pool.release(pages);
        if let Some(end) = self.prefill.handle.poll_end() {
            self.prefill.pool.end_lease(end.ended, pages);
        }
        self.handoff.handle_finished(PREFILL, slot, failure, self.now);
        self.handoff.release_slot(PREFILL, slot);
    }

    fn end_decode(
        &mut self,
        slot: Slot,
        pages: &[PageId],
        failure: Option<Cause>,
    ) -> Option<AuxRecord> {
        self.decode.pool.release(pages);
        let end = self.decode.handle.poll_end();
        let aux = end.as_ref().and_then(|end| end.aux);
        if let Some(end) = end {
            self.decode.pool.end_lease(end.ended, pages);
        }
        self.handoff.handle_finished(DECODE, slot, failure, self.now);
        self.handoff.release_slot(DECODE, slot);
        aux
    }
}

fn prompt(tokens: u32) -> Vec<u32> {
    (0..tokens).map(|i| i * 3 + 1).collect()
}

#[test]
fn kv_arrives_whole_for_every_pair_of_page_sizes_and_both_orders() {
    for (from, to) in [(16, 16), (16, 4), (4, 16), (8, 1), (1, 8)] {
        for decode_first in [true, false] {
            let mut cluster = Cluster::new(from, to, Transport::Shm);
            for (room, tokens) in [(0, 1), (1, 37), (2, 64), (3, 16)] {
                let ids = prompt(tokens);
                let (prefill, decode, to_pages) = if decode_first {
                    let decode = cluster.submit(DECODE, room, &ids).unwrap();
                    let pages = cluster.expect(decode, room, tokens);
                    (cluster.submit(PREFILL, room, &ids).unwrap(), decode, pages)
                } else {
                    let prefill = cluster.submit(PREFILL, room, &ids).unwrap();
                    let decode = cluster.submit(DECODE, room, &ids).unwrap();
                    let pages = cluster.expect(decode, room, tokens);
                    (prefill, decode, pages)
                };
                let target = cluster.granted().expect("both legs have arrived");
                let from_pages = cluster.begin(prefill, target, tokens);
                let half = tokens / 2 / 16 * 16;
                if half > 0 {
                    cluster.chunk(prefill, room, 0..half, false);
                    cluster.settle();
                }
                cluster.chunk(prefill, room, half..tokens, true);
                cluster.settle();
                assert_eq!(cluster.decode.handle.status(decode.id).state, State::Success);
                assert_eq!(cluster.prefill.handle.status(prefill.id).state, State::Success);
                let sent = Cluster::kv(&cluster.prefill.memory, &from_pages, tokens);
                let came = Cluster::kv(&cluster.decode.memory, &to_pages, tokens);
                assert_eq!(sent, came, "{tokens} tokens, pages of {from} to pages of {to}");
                let aux = cluster
                    .end_decode(decode, &to_pages, None)
                    .expect("the lease returns the aux record");
                assert!(aux.belongs_to(Room(room), decode.generation));
                assert_eq!(FirstTokenRecord::of_aux(&aux).token, 4242);
                cluster.end_prefill(prefill, &from_pages, None);
                cluster.assert_idle();
            }
        }
    }
}

#[test]
fn a_copy_after_the_source_took_its_pages_back_is_void() {
    let mut cluster = Cluster::new(16, 16, Transport::Shm);
    let ids = prompt(40);
    let decode = cluster.submit(DECODE, 9, &ids).unwrap();
    let to_pages = cluster.expect(decode, 9, 40);
    let prefill = cluster.submit(PREFILL, 9, &ids).unwrap();
    let target = cluster.granted().unwrap();
    let from_pages = cluster.begin(prefill, target, 40);
    cluster.chunk(prefill, 9, 0..40, true);
    // The source posts its offer, which the destination has not read. Then the source is cancelled,
    // and another request gets its pages.
    cluster.mover.sources[0].step();
    assert!(cluster.prefill.handle.fail(prefill.id, prefill.generation, Cause::Deadline));
    cluster.mover.sources[0].step();
    cluster.end_prefill(prefill, &from_pages, Some(Cause::Deadline));
    let mut again = Vec::new();
    assert!(cluster.prefill.pool.allocate(3, &mut again));
    cluster.fill(&again, 99);
    cluster.prefill.pool.release(&again);
    cluster.settle();
    let status = cluster.decode.handle.status(decode.id);
    assert_eq!(status.state, State::Failed);
    cluster.end_decode(decode, &to_pages, status.cause);
    cluster.settle();
    cluster.assert_idle();
}

#[test]
fn nothing_lands_after_the_destination_cancelled() {
    let mut cluster = Cluster::new(16, 16, Transport::Shm);
    let ids = prompt(40);
    let decode = cluster.submit(DECODE, 9, &ids).unwrap();
    let to_pages = cluster.expect(decode, 9, 40);
    let prefill = cluster.submit(PREFILL, 9, &ids).unwrap();
    let target = cluster.granted().unwrap();
    let from_pages = cluster.begin(prefill, target, 40);
    cluster.chunk(prefill, 9, 0..40, true);
    // The offer is in the ring. The destination fails before its mover reads it.
    cluster.mover.sources[0].step();
    assert!(cluster.decode.handle.fail(decode.id, decode.generation, Cause::ClientGone));
    let before = Cluster::kv(&cluster.decode.memory, &to_pages, 40);
    cluster.settle();
    assert_eq!(
        Cluster::kv(&cluster.decode.memory, &to_pages, 40),
        before,
        "bytes were written late"
    );
    cluster.end_decode(decode, &to_pages, Some(Cause::ClientGone));
    cluster.settle();
    assert_eq!(cluster.prefill.handle.status(prefill.id).cause, Some(Cause::ClientGone));
    cluster.end_prefill(prefill, &from_pages, Some(Cause::ClientGone));
    cluster.assert_idle();
}

#[test]
fn legs_that_mean_different_prompts_both_fail() {
    for decode_first in [true, false] {
        let mut cluster = Cluster::new(16, 16, Transport::Shm);
        let (ours, theirs) = (prompt(20), prompt(21));
        let (prefill, decode, pages);
        if decode_first {
            decode = cluster.submit(DECODE, 5, &theirs).unwrap();
            pages = cluster.expect(decode, 5, 21);
            prefill = cluster.submit(PREFILL, 5, &ours).unwrap();
        } else {
            prefill = cluster.submit(PREFILL, 5, &ours).unwrap();
            decode = cluster.submit(DECODE, 5, &theirs).unwrap();
            pages = cluster.expect(decode, 5, 21);
        }
        cluster.settle();
        assert_eq!(cluster.decode.handle.status(decode.id).cause, Some(Cause::Mismatch));
        let told = cluster.prefill.commands.try_iter().any(|command| {
            matches!(
                command,
                TransferAnswer::Abort { slot, cause: Cause::Mismatch, .. } if slot == prefill.id
            )
        });
        assert!(told);
        cluster.end_decode(decode, &pages, Some(Cause::Mismatch));
        cluster.handoff.handle_finished(PREFILL, prefill, Some(Cause::Mismatch), cluster.now);
        cluster.assert_idle();
    }
}

#[test]
fn a_failure_of_prefill_before_any_post_reaches_decode() {
    let mut cluster = Cluster::new(16, 16, Transport::Shm);
    let ids = prompt(20);
    let prefill = cluster.submit(PREFILL, 5, &ids).unwrap();
    let decode = cluster.submit(DECODE, 5, &ids).unwrap();
    let pages = cluster.expect(decode, 5, 20);
    assert!(cluster.prefill.handle.fail(prefill.id, prefill.generation, Cause::Deadline));
    cluster.handoff.handle_finished(PREFILL, prefill, Some(Cause::Deadline), cluster.now);
    cluster.settle();
    assert_eq!(cluster.decode.handle.status(decode.id).cause, Some(Cause::Deadline));
    cluster.end_decode(decode, &pages, Some(Cause::Deadline));
    cluster.assert_idle();
}

#[test]
fn the_fake_transport_says_success_without_bytes() {
    let mut cluster = Cluster::new(16, 16, Transport::Fake);
    let ids = prompt(20);
    let decode = cluster.submit(DECODE, 5, &ids).unwrap();
    let pages = cluster.expect(decode, 5, 20);
    cluster.settle();
    assert_eq!(cluster.decode.handle.status(decode.id).state, State::Success);
    cluster.end_decode(decode, &pages, None);
    cluster.assert_idle();
}

#[test]
fn invariants_find_a_name_that_outlives_its_request() {
    let source = Source::Named { host: "prefill.test".into(), port: 8998 };
    for mistake in [None, Some("name outlives its request")] {
        let mut cluster = Cluster::new(16, 16, Transport::Shm);
        let slot = cluster.submit_from(Some(&source), DECODE, 5, &prompt(20)).unwrap();
        cluster.handoff.expire(cluster.now);
        set_failpoint(mistake);
        cluster.handoff.handle_finished(DECODE, slot, Some(Cause::ClientGone), cluster.now);
        set_failpoint(None);
        cluster.handoff.release_slot(DECODE, slot);
        let found = catch_unwind(AssertUnwindSafe(|| cluster.handoff.expire(cluster.now)));
        assert_eq!(found.is_err(), mistake.is_some(), "{mistake:?}");
        if let Err(message) = found {
            let message = message.downcast::<&str>().unwrap();
            assert!(message.contains("a slot that waits has a request"), "{message}");
        }
    }
}
