//! The parts that both engines have: KV memory, pages, a slot, the scheduler's ends of the rings,
//! and the mover's thread. This engine serves one request at a time, so one slot is enough.

use crate::link::Link;
use baton::ids::{PageId, Room, SlotId};
use baton::kv::layout::{KeyValue, KvDtype, KvLayout};
use baton::kv::{lease::MoverRight, pool::PagePool, region::Region};
use baton::stdx::event_count::EventCount;
use baton::sys::host;
use baton::transfer::aux::AUX_PAYLOAD_BYTES;
use baton::transfer::command::{Cancel, LeaseEnd};
use baton::transfer::manager::identity::WorkerIdentity;
use baton::transfer::manager::rooms::{Prompt, Slot};
use baton::transfer::mover::{Links, Mover, Report};
use baton::transfer::rings::{Bells, Rings};
use baton::transfer::status::{SlotStatus, StatusTable};
use baton::transfer::transport::Memory;
use baton::transfer::{event_loop::Waiter, handle::TransferHandle, pages::PageLists};
use baton::wire::message::{
    BitClass, Fingerprint, HostId, Rank, ShmGrant, SocketName, Token, ids_hash,
};
use crossbeam_channel::Receiver;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The number of the only link.
pub const LINK: u32 = 0;
pub const SESSIONS: usize = 1;
const SLOT: SlotId = SlotId(0);
const PAGES: u32 = 64;
/// The source keeps KV layer by layer, the destination page by page. Both have 2 layers and 1 head
/// of 4 elements of 2 bytes, which are one word of a region.
pub const SOURCE_LAYOUT: KvLayout = KvLayout::layer_major(16, 2, 1, 4, KvDtype::F16, PAGES);
pub const DESTINATION_LAYOUT: KvLayout = KvLayout::page_major(8, 2, 1, 4, KvDtype::F16);
const WORDS_OF_A_TOKEN: [(u32, KeyValue); 4] =
    [(0, KeyValue::Key), (0, KeyValue::Value), (1, KeyValue::Key), (1, KeyValue::Value)];
/// The content of each aux record. The mover does not read it.
pub const AUX_PAYLOAD: [u8; AUX_PAYLOAD_BYTES] = [42; AUX_PAYLOAD_BYTES];
/// The time between two turns of a scheduler. A real engine computes a batch in it.
const TURN: Duration = Duration::from_millis(1);

pub struct Worker<C> {
    pub identity: WorkerIdentity,
    pub memory: Memory,
    pub pool: PagePool,
    pub handle: TransferHandle<C>,
    pub reports: Receiver<Report>,
    pub link: Link,
    stop: Arc<AtomicBool>,
    mover: Option<JoinHandle<()>>,
}

impl<C: Cancel + Send + 'static> Worker<C> {
    /// A worker, and the place where its mover parks. `new_mover` makes the mover, which runs on
    /// its own thread as long as the worker.
    pub fn new(
        layout: KvLayout,
        link: Link,
        new_mover: impl FnOnce(Links<C>, Memory, MoverRight) -> Mover,
    ) -> io::Result<(Worker<C>, Arc<Waiter>)> {
        let bytes = u64::from(PAGES) * layout.page_bytes();
        let memory = Memory {
            region: Arc::new(Region::new(c"kv", bytes as usize)?),
            layout,
            pages: PAGES,
            lists: Arc::new(PageLists::new(1, PAGES as usize)?),
            counters: Arc::default(),
            copy_pool: Default::default(),
        };
        let one = [1; 32];
        let identity = WorkerIdentity {
            // A real engine puts hashes of its model here.
            fingerprint: Fingerprint {
                config: one,
                weights: one,
                kernels: one,
                tokenizer: one,
                template: one,
            },
            // The name of the kernels that give these bits.
            bit_class: BitClass::named("example"),
            layout,
            pages: PAGES,
            pool_bytes: memory.region.len() as u64,
            slots: 1,
            host: HostId(host::id()),
        };
        let waiter = Arc::new(Waiter::new(false)?);
        // The main thread polls, so no bell wakes it.
        let silent = Arc::new(EventCount::new(|| ()));
        let bells = Bells { engine: silent.clone(), ctl: silent, mover: waiter.bell.clone() };
        let status = Arc::new(StatusTable::new(1));
        let rings = Rings::new(&status, &memory.lists, SESSIONS, &bells);
        let mut mover = new_mover(rings.links, memory.clone(), MoverRight::for_mover_thread());
        let stop = Arc::new(AtomicBool::new(false));
        let (parked, stopped) = (waiter.clone(), stop.clone());
        let run = move || parked.run(&mut mover, &stopped);
        let mover = Some(thread::Builder::new().name("move".into()).spawn(run)?);
        let (pool, handle, reports) = (PagePool::new(PAGES), rings.handle, rings.reports);
        Ok((Worker { identity, memory, pool, handle, reports, link, stop, mover }, waiter))
    }

    /// A new use of the slot.
    pub fn open_slot(&self) -> Slot {
        Slot { id: SLOT, generation: self.handle.status.open(SLOT) }
    }

    pub fn status(&self) -> SlotStatus {
        self.handle.status(SLOT)
    }

    /// The status of a request that has ended, and the end of its lease.
    pub fn poll_end(&self) -> Option<(SlotStatus, LeaseEnd)> {
        let status = self.status();
        if status.state.is_terminal() { Some((status, self.handle.poll_end()?)) } else { None }
    }

    /// Sends a command of the manager to the mover.
    pub fn command(&self, command: C) {
        let sent = self.handle.commands.try_send(command);
        assert!(sent.is_ok(), "the ring has room for all commands of one slot");
        self.handle.bell.notify();
    }

    /// This worker's description of itself in a session.
    pub fn rank(&self) -> Rank {
        // The descriptors have been exchanged, so there is no socket to name.
        let socket = SocketName::new(b"-").expect("one byte fits");
        let shm = ShmGrant { host: self.identity.host, socket, token: Token([0; 16]) };
        let regions = self.identity.regions();
        Rank { regions, lanes: 1, shm: Some(shm), rdma: None, tcp: None, fake: false }
    }

    pub fn take_pages(&mut self, tokens: u32) -> io::Result<Vec<PageId>> {
        let mut pages = Vec::new();
        let has_taken = self.pool.allocate(self.memory.layout.pages_for(tokens), &mut pages);
        check(has_taken, "the pool has too few pages").map(|()| pages)
    }

    pub fn return_pages(&mut self, end: LeaseEnd, pages: &[PageId]) -> io::Result<()> {
        self.pool.end_lease(end.ended, pages);
        self.pool.release(pages);
        self.pool.invariants();
        check(self.pool.counts().free == PAGES, "a page did not come back")
    }

    /// The words of the KV of `tokens`: offset in the region, and value.
    pub fn kv_words(&self, room: Room, tokens: Range<u32>, pages: &[PageId]) -> Vec<(usize, u64)> {
        let (layout, mut words) = (&self.memory.layout, Vec::new());
        for token in tokens {
            let (page, within) = (token / layout.page_size, token % layout.page_size);
            for (number, &(layer, which)) in WORDS_OF_A_TOKEN.iter().enumerate() {
                let at = layout.offset(pages[page as usize], layer, which, 0, within);
                let value = room.0 << 32 | u64::from(token) << 8 | number as u64;
                words.push((at as usize, value));
            }
        }
        words
    }
}

/// The rings must outlive the mover, which asserts that a lease end has room in its ring.
impl<C> Drop for Worker<C> {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.handle.bell.notify();
        if let Some(Err(panic)) = self.mover.take().map(JoinHandle::join) {
            std::panic::resume_unwind(panic);
        }
    }
}

/// Each turn of an engine handles messages and reports.
pub trait Engine {
    fn turn(&mut self, now: Instant) -> io::Result<()>;

    /// Takes turns until `poll` returns something.
    fn wait_for<T>(
        &mut self,
        until: Instant,
        poll: impl Fn(&mut Self) -> Option<T>,
    ) -> io::Result<T> {
        loop {
            thread::sleep(TURN);
            let now = Instant::now();
            self.turn(now)?;
            if let Some(found) = poll(self) {
                return Ok(found);
            }
            check(now < until, "the deadline is over")?;
        }
    }
}

/// The values that must be equal for both legs. The ids of this prompt are 0, 1, 2 and so on.
pub fn prompt(tokens: u32) -> Prompt {
    Prompt { tokens, hash: ids_hash(&(0..tokens).collect::<Vec<u32>>()) }
}

pub fn check(holds: bool, otherwise: &str) -> io::Result<()> {
    if holds { Ok(()) } else { Err(io::Error::other(otherwise)) }
}
