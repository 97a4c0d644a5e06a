//! The cost of posting a hand-off over RDMA, without a NIC: `cargo bench --bench post`.
//!
//! One thread plans, fills chains, rings doorbells, and takes completions. The provider writes a
//! 64-byte entry for each work request, as for a NIC, and completes at once. Two other forms run in
//! turn. In the split form this thread posts and another one polls, as `post-n` and `poll-n` do.
//! The verbs leaf alone fills the same chains from a list made in advance. Both layouts are
//! layer-major with pages in random order. So each page of each buffer is a work request: 1024
//! pages of 2 KiB in each of 56 buffers. Figures are medians over repeats.

use baton::ids::{Generation, PageId, Room, SlotId};
use baton::kv::groups::GroupCounts;
use baton::kv::layout::{KvDtype, KvLayout};
use baton::kv::page_span::PageSpan;
use baton::kv::region::Region;
use baton::stdx::event_count::EventCount;
use baton::stdx::seal::{SealingAllocator, seal_thread, violations};
use baton::sys::event::WaitSet;
use baton::sys::verbs::provider::{Fabric, StepMode};
use baton::sys::verbs::{
    Access, Capacity, Chain, CompletionQueue, Completions, Domain, LocalPiece, Marks, QueuePair,
    Registration, RemoteAddress,
};
use baton::transfer::copy_pool::CopyPool;
use baton::transfer::event_loop::LoopTask;
use baton::transfer::pages::PageLists;
use baton::transfer::plan::Template;
use baton::transfer::target::{SessionId, Target};
use baton::transfer::transport::rdma::{
    Nic, PendingQueuePairs, Poller, Poster, Rails, RdmaSource, Settings, Split,
};
use baton::transfer::transport::{Memory, Post, SourceHalf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

#[global_allocator]
static ALLOCATOR: SealingAllocator = SealingAllocator;

const PAGES: u32 = 1024;
const LAYERS: u32 = 28;
const ITEM: u32 = 2048;
const SLOT: SlotId = SlotId(0);
const REPEATS: usize = 301;
const CHAIN: usize = 64;

fn main() {
    let requests = f64::from(PAGES * LAYERS * 2);
    let mut fused = Session::new(false);
    let mut split = Session::new(true);
    // 0: the poller sleeps; 1: it starts to reap; 2: it reaps; 3: it ends.
    let state = Arc::new(AtomicU8::new(0));
    let poller = split.poller.take().map(|mut poller| {
        let state = state.clone();
        thread::spawn(move || {
            let _seal = seal_thread();
            loop {
                match state.load(Ordering::Acquire) {
                    0 => thread::park(),
                    1 => state.store(2, Ordering::Release),
                    2 => drop(poller.step()),
                    _ => break,
                }
            }
        })
    });
    let wake = |now: u8| {
        state.store(now, Ordering::Release);
        poller.iter().for_each(|poller| poller.thread().unpark());
    };
    let (bare_fabric, mut bare) = Bare::new();
    bare_fabric.set_pace(StepMode::Discarded);
    let (mut whole, mut leaf) = (Vec::new(), Vec::new());
    let (mut apart, mut posting) = (Vec::new(), Vec::new());
    for _ in 0..REPEATS {
        whole.push(fused.hand_over().0 / requests);
        wake(1);
        while state.load(Ordering::Acquire) != 2 {}
        let (all, posted) = split.hand_over();
        wake(0);
        apart.push(all / requests);
        posting.push(posted / requests);
        leaf.push(bare.run() / requests);
    }
    wake(3);
    poller.map(JoinHandle::join);
    assert_eq!(violations(), 0, "the hot path allocates");
    let ratio = median(whole.iter().zip(&leaf).map(|(whole, leaf)| whole / leaf).collect());
    println!(
        "{requests} work requests, {} doorbells",
        fused.memory.counters.counts().doorbells / REPEATS as u64
    );
    println!("plan, post, reap   {:6.1} ns a work request", median(whole));
    println!("split, all of it   {:6.1} ns a work request", median(apart));
    println!("split, the poster  {:6.1} ns a work request", median(posting));
    println!("the leaf alone     {:6.1} ns a work request, ratio {ratio:.2}", median(leaf));
}

fn layout() -> KvLayout {
    KvLayout::layer_major(1, LAYERS, 8, ITEM / 16, KvDtype::F16, PAGES)
}

fn memory(slots: usize) -> Memory {
    let bytes = (PAGES * ITEM * 2 * LAYERS) as usize;
    Memory {
        groups: GroupCounts::FULL,
        region: Arc::new(Region::new(c"pool", bytes).expect("memory")),
        layout: layout(),
        pages: PAGES,
        lists: Arc::new(PageLists::new(slots, PAGES as usize).expect("memory")),
        counters: Arc::default(),
        copy_pool: CopyPool::default(),
    }
}

/// Visits each page once (the factor is odd), with no two neighbours in a row.
fn pages(factor: u32) -> Vec<PageId> {
    (0..PAGES).map(|index| PageId(index * factor % PAGES)).collect()
}

/// A source's half, with its poster and poller in the split form.
struct Session {
    half: RdmaSource,
    memory: Memory,
    poster: Option<Poster>,
    poller: Option<Poller>,
}

impl Session {
    fn new(split: bool) -> Session {
        let fabric = Fabric::new();
        let nic = || {
            [Nic {
                device: fabric.device(),
                route: fabric.route(),
                number: 0,
                node: None,
                chosen: String::new(),
            }]
        };
        let (source, destination) = (memory(1), memory(1));
        let settings = Settings::default();
        let rails = |memory: &Memory| {
            Rails::new(&nic(), memory, 1, PAGES as usize, settings).expect("NICs")
        };
        let (mut from, to) = (rails(&source), Arc::new(rails(&destination)));
        let bell = Arc::new(EventCount::new(|| ()));
        let threads =
            if split { from.split(&bell, true).expect("descriptors").pop() } else { None };
        let (poster, poller) = threads.map(|made: Split| (made.poster.0, made.poller.0)).unzip();
        let (offer, wait) = (
            PendingQueuePairs::new(&to, || 1).expect("queue pairs"),
            WaitSet::new().expect("epoll"),
        );
        let template = Template::new(&source.layout, &destination.layout).expect("they fit");
        let from = Arc::new(from);
        let (half, _) =
            RdmaSource::new(&from, &offer.grant(), template, &wait, || 2).expect("queue pairs");
        source.lists.store(SLOT, PageSpan::whole(&pages(401)));
        from.targets.store(SLOT, PageSpan::whole(&pages(613)));
        fabric.set_pace(StepMode::Discarded);
        // They are never dropped. The provider does not need them, because it discards all work.
        std::mem::forget((offer, destination, fabric));
        Session { half, memory: source, poster, poller }
    }

    /// Time from the post to the last completion, and the part of that time in which a poster
    /// posted; in nanoseconds.
    fn hand_over(&mut self) -> (f64, f64) {
        let target = Target {
            session: SessionId(0),
            slot: SLOT,
            generation: Generation(1),
            room: Room(1),
            prefix: 0,
        };
        let post = Post { slot: SLOT, target, tokens: 0..PAGES, last: None };
        let _seal = seal_thread();
        let begun = Instant::now();
        self.half.post(&self.memory, &post).expect("there is room");
        let (mut over, mut posting) = (false, Duration::ZERO);
        while !over {
            if let Some(poster) = &mut self.poster {
                let turned = Instant::now();
                if poster.step() {
                    posting += turned.elapsed();
                }
            }
            self.half.step(&self.memory, &mut |_| over = true).expect("nothing fails");
        }
        (begun.elapsed().as_nanos() as f64, posting.as_nanos() as f64)
    }
}

/// The verbs leaf without plan, slots and lanes.
struct Bare {
    pair: QueuePair,
    chain: Chain,
    completions: CompletionQueue,
    taken: Completions,
    blocks: Vec<(usize, u64)>,
}

impl Bare {
    fn new() -> (Fabric, Bare) {
        let fabric = Fabric::new();
        let (device, memory) = (fabric.device(), memory(1));
        let domain = Domain::new(&device).expect("it opens");
        let access = Access { remote_write: true, relaxed_ordering: true };
        let registration =
            Registration::new(&domain, &memory.region, 0..memory.region.len(), access);
        let registration = Arc::new(registration.expect("it registers"));
        let completions = CompletionQueue::new(&device, 1024).expect("memory");
        let wanted = Capacity { requests: 512, receives: 1, pieces: 1, inline: 0 };
        let pair = || {
            QueuePair::new(&domain, &completions, &completions, wanted, true).expect("queue pairs")
        };
        let (mut pair, mut peer) = (pair(), pair());
        let ends =
            [&mut pair, &mut peer].map(|pair| pair.open(&fabric.route(), 1).expect("it opens"));
        pair.connect(&ends[1]).expect("it connects");
        std::mem::forget(peer);
        let chain = Chain::new(std::slice::from_ref(&registration), CHAIN, 1);
        let (from, to) = (pages(401), pages(613));
        let at = |buffer: u32, page: PageId| u64::from((buffer * PAGES + page.0) * ITEM);
        let blocks = (0..2 * LAYERS).flat_map(|buffer| {
            from.iter()
                .zip(&to)
                .map(move |(&from, &to)| (at(buffer, from) as usize, at(buffer, to)))
        });
        let blocks = blocks.collect();
        (fabric, Bare { pair, chain, completions, taken: Completions::new(64), blocks })
    }

    fn run(&mut self) -> f64 {
        let _seal = seal_thread();
        let begun = Instant::now();
        for chain in self.blocks.chunks(CHAIN) {
            self.chain.clear();
            for &(offset, to) in chain {
                let piece = LocalPiece { registration: 0, offset, len: ITEM };
                self.chain.write(
                    0,
                    &[piece],
                    RemoteAddress { address: 1 << 40 | to, key: 7 },
                    Marks::default(),
                );
            }
            self.chain.signal_last(0);
            self.pair.post(&mut self.chain).expect("there is room");
            while self.completions.poll(&mut self.taken).expect("nothing fails") == 0 {}
        }
        begun.elapsed().as_nanos() as f64
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
