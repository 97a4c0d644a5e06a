//! Both movers of one pair of workers, stepped by the test. The test replaces both schedulers and
//! `ctl`, and keeps an image of the expected memory of the destination.

use crate::way::{Kind, Way};
use baton::cause::Cause;
use baton::ids::{Generation, PageId, Room, SlotId};
use baton::kv::groups::GroupCounts;
use baton::kv::layout::{KeyValue, KvDtype, KvLayout};
use baton::kv::lease::{Lease, MoverRight};
use baton::kv::page_span::PageSpan;
use baton::kv::pool::PagePool;
use baton::kv::region::Region;
use baton::model::logprobs::{Sampled, TopLogprobs};
use baton::sched::first_token::FirstTokenRecord;
use baton::stdx::event_count::EventCount;
use baton::sys::event::WaitSet;
use baton::transfer::aux::AuxRecord;
use baton::transfer::command::{DestinationCommand, SourceCommand};
use baton::transfer::copy_pool::CopyPool;
use baton::transfer::handle::{DestinationHandle, SourceHandle, TransferHandle};
use baton::transfer::mover::destination::DestinationMover;
use baton::transfer::mover::source::SourceMover;
use baton::transfer::mover::{Links, Report};
use baton::transfer::pages::PageLists;
use baton::transfer::rings::{Bells, Rings};
use baton::transfer::status::{Move, State, StatusTable};
use baton::transfer::target::{SessionId, Target};
use baton::transfer::transport::Memory;
use baton::transfer::transport::fault_injection::Script;
use crossbeam_channel as channel;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

pub const SLOTS: usize = 8;
/// Tokens of each pool.
pub const POOL: u32 = 512;
/// Sessions of each mover.
const SESSIONS: usize = 4;
/// Maximum turns of a wait, each with a nap if nothing moved. No transfer here needs nearly as
/// many.
const TURNS_MAX: usize = 20_000;

pub fn page_major(page_size: u32) -> KvLayout {
    KvLayout::page_major(page_size, 2, 2, 4, KvDtype::F16)
}

/// A layout with one block over all pages per layer and per K or V, as in other engines.
pub fn layer_major(page_size: u32) -> KvLayout {
    layer_major_of(page_major(page_size))
}

/// The layer-major form of any layout.
pub fn layer_major_of(ours: KvLayout) -> KvLayout {
    let KvLayout { page_size, layers, kv_heads, head_dim, dtype, .. } = ours;
    KvLayout::layer_major(page_size, layers, kv_heads, head_dim, dtype, POOL.div_ceil(page_size))
}

/// Divides a layout with all heads of a model on one rank over `ranks` ranks.
pub fn on_ranks(whole: KvLayout, ranks: u32) -> KvLayout {
    let held = KvLayout::heads_per_rank(whole.kv_heads, ranks).expect("even");
    let KvLayout { page_size, layers, kv_heads, head_dim, dtype, .. } = whole;
    let rank = KvLayout::page_major(page_size, layers, held, head_dim, dtype);
    let is_page_major = whole.kv_stride < whole.page_stride;
    let rank = if is_page_major { rank } else { layer_major_of(rank) };
    let pages = u64::from(POOL.div_ceil(page_size));
    rank.on_ranks(ranks, pages * rank.page_bytes(), kv_heads).expect("even")
}

/// One worker.
pub struct Side<H, C> {
    pub memory: Memory,
    pub pool: PagePool,
    pub status: Arc<StatusTable>,
    pub handle: H,
    pub commands: channel::Sender<C>,
    pub reports: channel::Receiver<Report>,
    /// Whether pages are taken from the last, so that runs are split if the other side's are
    /// adjacent.
    reversed: bool,
    /// Pages that transfers hold.
    pub leased: HashMap<SlotId, Vec<PageId>>,
}

/// The side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum At {
    Source,
    Destination,
}

/// A room, with its slot and pages on both sides.
#[derive(Clone, Debug)]
pub struct Handoff {
    pub room: Room,
    pub tokens: u32,
    /// Tokens that the destination already has.
    pub prefix: u32,
    pub from: (SlotId, Generation, Vec<PageId>),
    pub to: (SlotId, Generation, Vec<PageId>),
}

pub struct Rig {
    pub source: Side<SourceHandle, SourceCommand>,
    pub destination: Side<DestinationHandle, DestinationCommand>,
    pub source_mover: SourceMover,
    pub destination_mover: DestinationMover,
    pub ways: Vec<Way>,
    /// Where the movers of the source and of the destination would park.
    pub waits: [Arc<WaitSet>; 2],
    /// Faults of the source's half and of the destination's half.
    pub scripts: [Script; 2],
    /// All reports of the movers except `Arrived`.
    pub reports: Vec<(At, Report)>,
    /// The last received aux record, by the destination's slot.
    pub aux: HashMap<SlotId, AuxRecord>,
    /// Whether each step compares the destination's memory with the image.
    pub watches: bool,
    rooms: HashMap<Room, Handoff>,
    /// Withdrawn slots of the source, with destinations that do not know it yet.
    quiet: Vec<(SlotId, Generation)>,
    kind_moves_nothing: bool,
    image: Vec<u8>,
    points: usize,
}

impl Rig {
    pub fn new(kind: Kind) -> Rig {
        Rig::with_layouts(kind, page_major(16), page_major(16))
    }

    /// A pair of workers with one session.
    pub fn with_layouts(kind: Kind, from: KvLayout, to: KvLayout) -> Rig {
        let (source_mover, source) = source_side(from);
        let lanes = if let Kind::ShmLanes(lanes) = kind { lanes } else { 1 };
        let (destination_mover, destination) = destination_side(to, lanes);
        let mut rig = Rig {
            source,
            destination,
            source_mover,
            destination_mover,
            ways: Vec::new(),
            waits: std::array::from_fn(|_| Arc::new(WaitSet::new().unwrap())),
            scripts: [Script::new(), Script::new()],
            reports: Vec::new(),
            aux: HashMap::new(),
            watches: true,
            rooms: HashMap::new(),
            quiet: Vec::new(),
            kind_moves_nothing: kind == Kind::Fake,
            image: Vec::new(),
            points: 0,
        };
        let bytes = rig.destination.memory.region.len();
        let pattern: Vec<u8> = (0..bytes).map(|i| (i * 13 + i / 256) as u8).collect();
        write(&rig.destination.memory, 0, &pattern);
        rig.image = pattern;
        rig.open(kind);
        rig
    }

    /// Opens a session at `index`. A previous one there has ended.
    pub fn open_at(&mut self, index: usize, kind: Kind) -> SessionId {
        let session = SessionId(index as u32);
        let way = Way::open(self, session, kind);
        if index < self.ways.len() {
            self.ways[index] = way;
        } else {
            self.ways.push(way);
        }
        session
    }

    pub fn open(&mut self, kind: Kind) -> SessionId {
        self.open_at(self.ways.len(), kind)
    }

    /// Both legs have arrived, the pages are leased, and the source's pages have the room's bytes.
    pub fn begin(&mut self, session: SessionId, room: u64, tokens: u32) -> Handoff {
        self.begin_behind(session, room, 0..tokens)
    }

    /// Like [`Rig::begin`], but the destination already has the tokens before `tokens`, in pages
    /// that another request reads.
    pub fn begin_behind(&mut self, session: SessionId, room: u64, tokens: Range<u32>) -> Handoff {
        let (handoff, grant) = self.prepare(session, room, tokens);
        grant(self);
        handoff
    }

    /// Like [`Rig::begin`], but the first bytes reach the destination's mover just before its
    /// command.
    pub fn begin_overtaken(&mut self, session: SessionId, room: u64, tokens: u32) -> Handoff {
        let (handoff, grant) = self.prepare(session, room, 0..tokens);
        self.chunk(&handoff, 0..tokens);
        self.step_source();
        self.step_destination();
        grant(self);
        handoff
    }

    /// Everything except the command to the destination's mover, which the caller sends.
    fn prepare(
        &mut self,
        session: SessionId,
        room: u64,
        tokens: Range<u32>,
    ) -> (Handoff, impl FnOnce(&Rig) + use<>) {
        let Range { start: prefix, end } = tokens;
        let (to, to_lease) = self.destination.take(tokens.clone());
        let (from, from_lease) = self.source.take(0..end);
        self.source.status.advance(from.0, from.1, Move::Grant).unwrap();
        fill(&self.source.memory, &from.2, room);
        if let Some(rails) = self.ways.get(session.0 as usize).and_then(|way| way.rails.as_ref()) {
            let first = (prefix / self.destination.memory.layout.page_size) as usize;
            rails.targets.store(from.0, PageSpan { first, pages: &to.2[first..] });
        }
        let target = Target { session, slot: to.0, generation: to.1, room: Room(room), prefix };
        self.source.handle.begin(from.0, from.1, target, [PageSpan::whole(&from.2)], from_lease);
        let handoff = Handoff { room: Room(room), tokens: end, prefix, from, to };
        self.rooms.insert(handoff.room, handoff.clone());
        let (slot, generation, pages) = handoff.to.clone();
        let grant = move |rig: &Rig| {
            let handle = &rig.destination.handle;
            handle.expect(
                slot,
                generation,
                (session, Room(room)),
                tokens,
                [PageSpan::whole(&pages)],
                to_lease,
            );
        };
        (handoff, grant)
    }

    pub fn chunk(&self, handoff: &Handoff, tokens: Range<u32>) {
        let first =
            Sampled { token: handoff.room.0 as u32, logprob: -0.5, top: TopLogprobs::EMPTY };
        let last = (tokens.end == handoff.tokens)
            .then(|| FirstTokenRecord::new(&first, 0).to_aux(handoff.room));
        let (slot, generation, _) = handoff.from;
        self.source.handle.chunk(slot, generation, tokens, last);
    }

    /// Sends all chunks; each ends at a multiple of `size` tokens.
    pub fn chunks(&self, handoff: &Handoff, size: u32) {
        let mut start = handoff.prefix;
        while start < handoff.tokens {
            let end = ((start / size + 1) * size).min(handoff.tokens);
            self.chunk(handoff, start..end);
            start = end;
        }
    }

    /// A part of a turn: the source's mover, the network, its pollers, its posters, or the
    /// destination's mover.
    pub fn point(&mut self) -> bool {
        self.points += 1;
        match self.points % self.turn_points() {
            1 => self.step_source(),
            2 => self.step_ways(),
            3 => self.ways.iter_mut().fold(false, |moved, way| moved | way.step_pollers()),
            4 => self.ways.iter_mut().fold(false, |moved, way| moved | way.step_posters()),
            _ => self.step_destination(),
        }
    }

    /// Points of a turn: three if the source's mover posts and polls itself.
    fn turn_points(&self) -> usize {
        if self.ways.iter().any(Way::is_split) { 5 } else { 3 }
    }

    pub fn step_ways(&mut self) -> bool {
        if self.ways.iter().any(Way::has_threads) {
            // Give the threads time to wake up.
            std::thread::sleep(std::time::Duration::from_micros(20));
        }
        self.ways.iter_mut().fold(false, |moved, way| moved | way.step())
    }

    pub fn turn(&mut self) -> bool {
        (0..self.turn_points()).fold(false, |moved, _| moved | self.point())
    }

    pub fn step_source(&mut self) -> bool {
        let moved = self.source_mover.step();
        self.collect();
        moved
    }

    pub fn step_destination(&mut self) -> bool {
        let moved = self.destination_mover.step();
        self.collect();
        self.assert_image();
        moved
    }

    #[track_caller]
    pub fn until(&mut self, what: &str, mut done: impl FnMut(&Rig) -> bool) {
        for _ in 0..TURNS_MAX {
            if done(self) {
                return;
            }
            if !self.turn() {
                std::thread::sleep(std::time::Duration::from_micros(20));
            }
        }
        panic!("never: {what}; reports {:?}", self.reports);
    }

    /// Waits until both sides have `Success`, all leases are back, and every byte is in place.
    #[track_caller]
    pub fn until_success(&mut self, handoff: &Handoff) {
        self.until("success", |rig| {
            rig.states(handoff) == [State::Success; 2] && rig.holds_no_lease(handoff)
        });
        let aux = self.aux[&handoff.to.0];
        assert!(aux.belongs_to(handoff.room, handoff.to.1));
        assert_eq!(FirstTokenRecord::of_aux(&aux).token, handoff.room.0 as u32);
        self.release(handoff);
    }

    /// Waits until the room has failed on both sides and its leases are back.
    #[track_caller]
    pub fn until_failed(&mut self, handoff: &Handoff) {
        self.until("failure", |rig| {
            rig.states(handoff) == [State::Failed; 2] && rig.holds_no_lease(handoff)
        });
        self.release(handoff);
    }

    /// The states at the source and at the destination.
    pub fn states(&self, handoff: &Handoff) -> [State; 2] {
        [
            self.source.status.load(handoff.from.0).state,
            self.destination.status.load(handoff.to.0).state,
        ]
    }

    /// The cause of the failure at the source.
    pub fn cause(&self, handoff: &Handoff) -> Option<Cause> {
        self.source.handle.status(handoff.from.0).cause
    }

    pub fn holds_no_lease(&self, handoff: &Handoff) -> bool {
        !self.source.leased.contains_key(&handoff.from.0)
            && !self.destination.leased.contains_key(&handoff.to.0)
    }

    /// Fails a slot, as a deadline, a departed client or the other side's `Abort` does.
    pub fn fail(&self, handoff: &Handoff, at: At, cause: Cause) -> bool {
        let failed = match at {
            At::Source => self.source.handle.fail(handoff.from.0, handoff.from.1, cause),
            At::Destination => self.destination.handle.fail(handoff.to.0, handoff.to.1, cause),
        };
        if self.states(handoff) == [State::Success, State::Failed] {
            // All posted writes have completed, so `ctl` answers `Quiet` at once.
            let (slot, generation, _) = handoff.to;
            self.destination.commands.send(DestinationCommand::Quiet { slot, generation }).unwrap();
        }
        failed
    }

    pub fn close(&self, session: SessionId, at: At) {
        match at {
            At::Source => self.source.commands.send(SourceCommand::Close { session }).unwrap(),
            At::Destination => {
                self.destination.commands.send(DestinationCommand::Close { session }).unwrap()
            }
        }
    }

    /// Gives the destination's pages of an ended room to another request, which writes them.
    pub fn reuse(&mut self, handoff: &Handoff) {
        assert!(!self.destination.leased.contains_key(&handoff.to.0), "still leased");
        fill(&self.destination.memory, &handoff.to.2, 0xdead);
        self.resync(&handoff.to.2);
    }

    /// Does the same with the source's pages.
    pub fn reuse_source(&mut self, handoff: &Handoff) {
        assert!(!self.source.leased.contains_key(&handoff.from.0), "still leased");
        fill(&self.source.memory, &handoff.from.2, 0xbeef);
    }

    pub fn release(&mut self, handoff: &Handoff) {
        self.source.pool.release(&handoff.from.2);
        self.destination.pool.release(&handoff.to.2);
    }

    /// Every lease and page is back.
    #[track_caller]
    pub fn assert_idle(&mut self) {
        self.assert_image();
        self.source.pool.invariants();
        self.destination.pool.invariants();
        assert_eq!(self.source.pool.counts().free, self.source.memory.pages);
        assert_eq!(self.destination.pool.counts().free, self.destination.memory.pages);
    }

    pub fn lost(&self, at: At) -> bool {
        self.reports
            .iter()
            .any(|(side, report)| *side == at && matches!(report, Report::Lost { .. }))
    }

    /// Whether the source's mover has reported that no write of a room is in flight.
    pub fn has_withdrawn(&self) -> bool {
        let withdrawn = |(at, report): &(At, Report)| {
            *at == At::Source && matches!(report, Report::Withdrawn { .. })
        };
        self.reports.iter().any(withdrawn)
    }

    /// Handles ends and reports. Acts as `ctl` and tells a source that its pages were read.
    fn collect(&mut self) {
        while let Some(end) = self.source.handle.poll_end() {
            let pages = self.source.leased.remove(&end.ended.slot()).expect("a lease ends once");
            self.source.pool.end_lease(end.ended, &pages);
        }
        while let Some(end) = self.destination.handle.poll_end() {
            let slot = end.ended.slot();
            let pages = self.destination.leased.remove(&slot).expect("a lease ends once");
            self.destination.pool.end_lease(end.ended, &pages);
            match end.aux {
                Some(aux) => {
                    self.aux.insert(slot, aux);
                    self.expect_bytes(Room(aux.room));
                }
                // Bytes that were written under the lease stay, but no more may come.
                None => self.resync(&pages),
            }
        }
        while let Ok(report) = self.source.reports.try_recv() {
            if let Report::Withdrawn { slot, generation } = report {
                self.quiet.push((slot, generation));
            }
            self.reports.push((At::Source, report));
        }
        self.answer();
        while let Ok(report) = self.destination.reports.try_recv() {
            match report {
                Report::Arrived { room, .. } => self.arrived(room),
                other => self.reports.push((At::Destination, other)),
            }
        }
    }

    /// Acts as `ctl` after a destination has failed and its source is quiet.
    fn answer(&mut self) {
        let rooms = &self.rooms;
        let status = &self.destination.status;
        let commands = &self.destination.commands;
        self.quiet.retain(|&(slot, generation)| {
            let mut of_slot =
                rooms.values().filter(|room| (room.from.0, room.from.1) == (slot, generation));
            let Some(Handoff { to: (slot, generation, _), .. }) = of_slot.next() else {
                return false;
            };
            let is_open = status.is_open(*slot, *generation);
            if !is_open {
                let quiet = DestinationCommand::Quiet { slot: *slot, generation: *generation };
                commands.send(quiet).unwrap();
            }
            is_open
        });
    }

    fn arrived(&self, room: Room) {
        let (slot, generation, _) = self.rooms[&room].from;
        self.source.commands.send(SourceCommand::Done { slot, generation }).unwrap();
    }

    /// Sets the image to the bytes that the destination's pages must now have.
    fn expect_bytes(&mut self, room: Room) {
        let Handoff { tokens, prefix, to: (_, _, pages), .. } = &self.rooms[&room];
        if self.kind_moves_nothing {
            return;
        }
        // Transfers move whole tiles.
        let tile =
            gcd(self.source.memory.layout.page_size, self.destination.memory.layout.page_size);
        let layout = &self.destination.memory.layout;
        let sent = elements(layout, pages, tokens.next_multiple_of(tile))
            .filter(|(token, ..)| token >= prefix);
        for (token, element, at) in sent {
            let bytes = (layout.head_dim as usize) * layout.dtype.bytes() as usize;
            for (i, byte) in self.image[at..at + bytes].iter_mut().enumerate() {
                *byte = value(room.0, token, element, i);
            }
        }
    }

    /// Copies the content of these pages into the image.
    fn resync(&mut self, pages: &[PageId]) {
        let memory = &self.destination.memory;
        let now = read(memory);
        let bytes = (memory.layout.head_dim as usize) * memory.layout.dtype.bytes() as usize;
        let tokens = pages.len() as u32 * memory.layout.page_size;
        for (_, _, at) in elements(&memory.layout, pages, tokens) {
            self.image[at..at + bytes].copy_from_slice(&now[at..at + bytes]);
        }
    }

    /// Outside leased pages, every byte equals the image.
    #[track_caller]
    pub fn assert_image(&mut self) {
        if !self.watches {
            return;
        }
        let leased: Vec<_> = self.destination.leased.values().flatten().copied().collect();
        self.resync(&leased);
        let now = read(&self.destination.memory);
        if now != self.image {
            let at = (0..now.len()).find(|&at| now[at] != self.image[at]).unwrap_or_default();
            let wrong = (at..now.len()).filter(|&at| now[at] != self.image[at]).count();
            panic!("{wrong} bytes are wrong, the first at {at}");
        }
    }
}

fn bell() -> Arc<EventCount> {
    Arc::new(EventCount::new(|| ()))
}

fn memory(layout: KvLayout, copy_lanes: usize) -> Memory {
    let pages = POOL.div_ceil(layout.page_size);
    let bytes = u64::from(layout.ranks) * u64::from(pages) * layout.page_bytes();
    Memory {
        groups: GroupCounts::FULL,
        region: Arc::new(Region::new(c"kv", bytes as usize).unwrap()),
        layout,
        pages,
        lists: Arc::new(PageLists::new(SLOTS, POOL as usize).unwrap()),
        counters: Arc::default(),
        copy_pool: CopyPool::new(copy_lanes).unwrap(),
    }
}

fn source_side(layout: KvLayout) -> (SourceMover, Side<SourceHandle, SourceCommand>) {
    side(layout, true, 1, |links, memory| {
        SourceMover::new(links, memory, SESSIONS, MoverRight::for_mover_thread())
    })
}

fn destination_side(
    layout: KvLayout,
    copy_lanes: usize,
) -> (DestinationMover, Side<DestinationHandle, DestinationCommand>) {
    side(layout, false, copy_lanes, |links, memory| {
        DestinationMover::new(links, memory, SESSIONS, MoverRight::for_mover_thread())
    })
}

fn side<M, C>(
    layout: KvLayout,
    reversed: bool,
    copy_lanes: usize,
    mover: impl FnOnce(Links<C>, Memory) -> M,
) -> (M, Side<TransferHandle<C>, C>) {
    let (memory, status) = (memory(layout, copy_lanes), Arc::new(StatusTable::new(SLOTS)));
    let bells = Bells { engine: bell(), ctl: bell(), mover: bell() };
    let Rings { links, handle, commands, reports } =
        Rings::new(&status, &memory.lists, SESSIONS, &bells);
    let mover = mover(links, memory.clone());
    let pool = PagePool::new(memory.pages);
    let leased = HashMap::new();
    (mover, Side { memory, pool, status, handle, commands, reports, reversed, leased })
}

impl<H, C> Side<H, C> {
    /// Takes a slot and pages for a request, and leases the pages of `tokens`.
    fn take(&mut self, tokens: Range<u32>) -> ((SlotId, Generation, Vec<PageId>), Lease) {
        let slot = self.free_slot();
        let generation = self.status.open(slot);
        let mut pages = Vec::new();
        assert!(self.pool.allocate(self.memory.layout.pages_for(tokens.end), &mut pages));
        if self.reversed {
            pages.reverse();
        }
        let leased = &pages[(tokens.start / self.memory.layout.page_size) as usize..];
        let lease = self.pool.lease(slot, generation, leased);
        self.leased.insert(slot, leased.to_vec());
        ((slot, generation, pages), lease)
    }

    fn free_slot(&self) -> SlotId {
        let is_free = |slot: &SlotId| {
            self.status.load(*slot).state.is_terminal() && !self.leased.contains_key(slot)
        };
        (0..SLOTS as u32).map(SlotId).find(is_free).expect("a slot is free")
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// (token, index of its head, offset in the region) for the first `tokens` tokens of a list of
/// pages, on all ranks.
fn elements(
    layout: &KvLayout,
    pages: &[PageId],
    tokens: u32,
) -> impl Iterator<Item = (u32, u32, usize)> {
    let per_rank = layout.layers * 2 * layout.kv_heads;
    let per_token = layout.ranks * per_rank;
    (0..tokens * per_token).map(move |i| {
        let (token, rank, at_rank) = (i / per_token, i % per_token / per_rank, i % per_rank);
        let (layer_and_which, own) = (at_rank / layout.kv_heads, at_rank % layout.kv_heads);
        let head = layout.heads_of(rank).start + own;
        let which = if layer_and_which % 2 == 0 { KeyValue::Key } else { KeyValue::Value };
        let page = pages[(token / layout.page_size) as usize];
        let inside = layout.offset(page, layer_and_which / 2, which, own, token % layout.page_size);
        let at = u64::from(rank) * layout.rank_stride + inside;
        (token, layer_and_which * layout.model_kv_heads + head, at as usize)
    })
}

/// A byte of a room's KV.
fn value(room: u64, token: u32, element: u32, byte: usize) -> u8 {
    let seed = room ^ u64::from(token) << 32 ^ u64::from(element) << 16 ^ byte as u64;
    (seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// Fills whole pages with a room's KV.
fn fill(memory: &Memory, pages: &[PageId], room: u64) {
    let bytes = (memory.layout.head_dim as usize) * memory.layout.dtype.bytes() as usize;
    for (token, element, at) in
        elements(&memory.layout, pages, pages.len() as u32 * memory.layout.page_size)
    {
        let head: Vec<u8> = (0..bytes).map(|i| value(room, token, element, i)).collect();
        write(memory, at, &head);
    }
}

#[allow(unsafe_code)]
fn write(memory: &Memory, at: usize, bytes: &[u8]) {
    assert!(at + bytes.len() <= memory.region.len());
    // SAFETY: inside the region; no other thread runs.
    unsafe { memory.region.base().add(at).as_ptr().copy_from(bytes.as_ptr(), bytes.len()) };
}

#[allow(unsafe_code)]
fn read(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.region.len()];
    // SAFETY: inside the region; no other thread runs.
    unsafe { memory.region.base().as_ptr().copy_to(bytes.as_mut_ptr(), bytes.len()) };
    bytes
}
