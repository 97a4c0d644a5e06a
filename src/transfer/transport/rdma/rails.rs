//! The NICs of one worker. The worker's memory is registered once on each, and all sessions use it.
//!
//! A session has some queue pairs on each pair of NICs. NICs with equal numbers form a pair,
//! because fabrics usually connect these by the shortest path. A NIC is left out if its port is
//! down or sessions broke on it repeatedly, and if there is another one.
//!
//! Thread: `ctl` makes queue pairs; the polling thread (`move` or `poll`) reports the success of
//! sessions.

use super::slabs::Slabs;
use super::split::{NicThreads, Split};
use super::{Nic, RECORD_STRIDE, SLOTS_MAX};
use crate::ids::SlotId;
use crate::kv::region::Region;
use crate::limits::{RDMA_BARRED, RDMA_BREAKS_MAX};
use crate::stdx::event_count::EventCount;
use crate::sys::clock::Clock;
use crate::sys::verbs::{
    Access, Capacity, CompletionQueue, Domain, Endpoint, QueuePair, Registration, Route,
};
use crate::transfer::aux::AuxRecord;
use crate::transfer::pages::PageLists;
use crate::transfer::transport::Memory;
use crate::wire::message::{QueuePairName, RailGrant, RdmaGrant};
use bytemuck::Zeroable;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Settings of a session's queue pairs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    /// Lanes between two NICs. A single queue pair uses only a part of a NIC.
    pub lanes: usize,
    /// Work requests in flight per lane.
    pub requests: u32,
    /// Most local pieces per work request.
    pub pieces: u32,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { lanes: 2, requests: 512, pieces: 16 }
    }
}

/// The NICs of a worker.
#[derive(Debug)]
pub struct Rails {
    rails: Vec<Rail>,
    /// NICs that refused to register the memory, each with the reason.
    pub refused: Vec<String>,
    settings: Settings,
    slots: usize,
    memory: Memory,
    /// Handles of each NIC's threads; empty if the mover does their work.
    desks: Vec<NicThreads>,
    /// One record for each slot.
    pub(super) record_region: Arc<Region>,
    /// The destination's pages, by slot of this worker. Entries of the prefix that the destination
    /// holds are not valid.
    pub targets: Arc<PageLists>,
}

/// One NIC.
#[derive(Debug)]
pub(super) struct Rail {
    /// Number among all NICs of the host.
    pub(super) number: u16,
    name: String,
    domain: Arc<Domain>,
    route: Route,
    /// Registrations of the pool, slab by slab.
    pub(super) kv: Box<[Arc<Registration>]>,
    pub(super) slabs: Slabs,
    pub(super) records: Arc<Registration>,
    /// Consecutive sessions that broke on it.
    broken: AtomicU32,
    /// It is left out until this time.
    barred: Mutex<Option<Instant>>,
    clock: Clock,
}

/// A session's queue pairs on one NIC, not connected yet.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) pairs: Vec<QueuePair>,
    /// Declared behind the queue pairs, which complete into it, so that it is dropped after them.
    pub(super) completions: CompletionQueue,
    names: Vec<QueuePairName>,
    /// Index among this worker's NICs.
    pub(super) rail: usize,
}

impl Rails {
    /// Registers a worker's memory with devices. A prompt needs at most `target_pages` pages at a
    /// destination.
    ///
    /// # Errors
    /// If all devices refuse, or accept the pool only in regions that are too small.
    pub fn new(
        nics: &[Nic],
        memory: &Memory,
        slots: usize,
        target_pages: usize,
        settings: Settings,
    ) -> io::Result<Rails> {
        let refuse = |why: String| Err(io::Error::other(why));
        if slots > SLOTS_MAX {
            return refuse(format!("{slots} slots: rdma has room for {SLOTS_MAX}"));
        }
        let (count, most) = (nics.len(), RdmaGrant::RAILS_MAX);
        if !(1..=most).contains(&count) {
            return refuse(format!("{count} NICs: a session has 1 to {most}"));
        }
        let most = RdmaGrant::LANES_MAX / count;
        if !(1..=most).contains(&settings.lanes) {
            return refuse(format!("{} lanes: {count} NICs have 1 to {most} each", settings.lanes));
        }
        let record_region = Arc::new(Region::new(c"baton-records", slots * RECORD_STRIDE)?);
        let (mut rails, mut refused, mut why) = (Vec::new(), Vec::new(), None);
        for nic in nics {
            match Rail::new(nic, memory, &record_region, slots) {
                Ok(rail) => rails.push(rail),
                Err(error) => {
                    refused.push(format!("{}: {error}", nic.device.name()));
                    why = Some(error);
                }
            }
        }
        if let Some(why) = why.filter(|_| rails.is_empty()) {
            return Err(why);
        }
        Ok(Rails {
            rails,
            refused,
            settings,
            slots,
            memory: memory.clone(),
            desks: Vec::new(),
            record_region,
            targets: Arc::new(PageLists::new(slots, target_pages)?),
        })
    }

    /// Moves posting and polling for a source's sessions to two threads per NIC. Start them before
    /// the first session. They wake `mover` after a report. Set `spin` to false if there are more
    /// threads than cores.
    pub fn split(&mut self, mover: &Arc<EventCount>, spin: bool) -> io::Result<Vec<Split>> {
        let made: Vec<_> = self
            .rails
            .iter()
            .map(|rail| Split::new(&rail.name, mover, spin))
            .collect::<io::Result<_>>()?;
        let (splits, desks) = made.into_iter().unzip();
        self.desks = desks;
        Ok(splits)
    }

    pub(super) fn is_split(&self) -> bool {
        !self.desks.is_empty()
    }

    pub(super) fn nic_threads(&self, place: usize) -> Option<&NicThreads> {
        self.desks.get(place)
    }

    /// Uses this clock, before there is a session.
    pub fn with_clock(mut self, clock: &Clock) -> Rails {
        self.rails.iter_mut().for_each(|rail| rail.clock = clock.clone());
        self
    }

    /// The worker's KV and its slots' page lists.
    pub(super) fn memory(&self) -> &Memory {
        &self.memory
    }

    pub(super) fn settings(&self) -> &Settings {
        &self.settings
    }

    pub(super) fn slots(&self) -> usize {
        self.slots
    }

    pub(super) fn rail(&self, place: usize) -> &Rail {
        &self.rails[place]
    }

    /// Names of NICs that are not used if there are others, because they are down or sessions broke
    /// on them.
    pub fn left_out(&self) -> Vec<&str> {
        let used = self.usable();
        let unused = (0..self.rails.len()).filter(|place| !used.contains(place));
        unused.map(|place| self.rails[place].name.as_str()).collect()
    }

    /// NICs to use for a new session; never empty.
    pub(super) fn usable(&self) -> Vec<usize> {
        let all = || 0..self.rails.len();
        let trusted: Vec<usize> = all()
            .filter(|&place| self.rails[place].is_up() && !self.rails[place].is_barred())
            .collect();
        // A barred NIC is better than no NIC.
        if trusted.is_empty() { all().collect() } else { trusted }
    }

    /// Opens queue pairs on one NIC; their requests and receives complete into one queue.
    pub(super) fn open(
        &self,
        place: usize,
        lanes: usize,
        takes_writes: bool,
        mut sequences: impl FnMut() -> u32,
    ) -> io::Result<Opened> {
        let Rail { domain, route, .. } = &self.rails[place];
        // A receive for each slot, and some for slots of earlier uses.
        let receives = if takes_writes { self.receives() } else { 1 };
        let requests = if takes_writes { 1 } else { self.settings.requests };
        let entries = (receives + requests) * lanes as u32;
        let completions = CompletionQueue::with_events(domain.device(), entries)?;
        let wanted = Capacity { requests, receives, pieces: self.settings.pieces, inline: 0 };
        let (mut pairs, mut names) = (Vec::new(), Vec::new());
        for _ in 0..lanes {
            let mut pair =
                QueuePair::new(domain, &completions, &completions, wanted, takes_writes)?;
            let end = pair.open(route, sequences())?;
            names.push(QueuePairName { number: end.number, sequence: end.sequence });
            pairs.push(pair);
        }
        Ok(Opened { pairs, completions, names, rail: place })
    }

    /// Receives of a lane that the peer writes to.
    pub(super) fn receives(&self) -> u32 {
        self.slots as u32 + SPARE_RECEIVES
    }

    /// The record that a peer has written for a slot.
    pub(super) fn record(&self, slot: SlotId) -> AuxRecord {
        self.record_region.read(slot.index() * RECORD_STRIDE)
    }

    /// The grant for a peer: memory and queue pairs, with a number for each NIC.
    pub(super) fn grant<'a>(&self, opened: impl Iterator<Item = (u16, &'a Opened)>) -> RdmaGrant {
        let first = &self.rails[0];
        let mut grant = RdmaGrant::empty(first.kv[0].address(), first.records.address());
        for (number, opened) in opened {
            let Rail { route, kv, slabs, records, .. } = &self.rails[opened.rail];
            let rail = RailGrant {
                gid: route.gid,
                records_key: records.remote_key(),
                lid: route.lid,
                mtu: route.mtu,
                number,
                ..RailGrant::zeroed()
            };
            let keys = kv.iter().map(|slab| slab.remote_key());
            grant.push(rail.with_keys(slabs.bytes(), keys), &opened.names);
        }
        grant
    }
}

/// Receives beyond one per slot.
const SPARE_RECEIVES: u32 = 8;

impl Rail {
    fn new(
        nic: &Nic,
        memory: &Memory,
        record_region: &Arc<Region>,
        slots: usize,
    ) -> io::Result<Rail> {
        let domain = Domain::new(&nic.device)?;
        let remote = Access { remote_write: true, relaxed_ordering: true };
        let bytes = memory.region.len() as u64;
        let slabs = Slabs::cut(bytes, nic.device.info()?.max_region).map_err(io::Error::other)?;
        let register = |slab: Range<u64>| {
            let slab = slab.start as usize..slab.end as usize;
            Ok(Arc::new(Registration::new(&domain, &memory.region, slab, remote)?))
        };
        let kv = slabs.ranges(bytes).map(register).collect::<io::Result<_>>()?;
        // A record is read as soon as its immediate has arrived, so its write must not be reordered
        // behind the immediate.
        let ordered = Access { remote_write: true, relaxed_ordering: false };
        let records = Registration::new(&domain, record_region, 0..slots * RECORD_STRIDE, ordered)?;
        Ok(Rail {
            number: nic.number,
            name: nic.device.name().into(),
            domain,
            route: nic.route,
            kv,
            slabs,
            records: Arc::new(records),
            broken: AtomicU32::new(0),
            barred: Mutex::default(),
            clock: Clock::default(),
        })
    }

    fn is_up(&self) -> bool {
        self.domain.device().is_active(self.route.port).unwrap_or(false)
    }

    fn is_barred(&self) -> bool {
        let barred = self.barred.lock().unwrap_or_else(PoisonError::into_inner);
        barred.is_some_and(|until| self.clock.now() < until)
    }

    /// Counts a session that broke on this NIC.
    pub(super) fn breaks(&self) {
        if self.broken.fetch_add(1, Ordering::Relaxed) + 1 >= RDMA_BREAKS_MAX {
            let mut barred = self.barred.lock().unwrap_or_else(PoisonError::into_inner);
            *barred = Some(self.clock.now() + RDMA_BARRED);
        }
    }

    /// Notes that the NIC has carried data.
    pub(super) fn carries(&self) {
        // Loaded far more often than stored.
        if self.broken.load(Ordering::Relaxed) != 0 {
            self.broken.store(0, Ordering::Relaxed);
        }
    }
}

impl Opened {
    /// Connects all queue pairs to a peer's.
    pub(super) fn connect(&mut self, rail: &RailGrant, names: &[QueuePairName]) -> io::Result<()> {
        if names.len() != self.pairs.len() {
            return Err(io::Error::other(format!(
                "{} lanes here, {} there",
                self.pairs.len(),
                names.len()
            )));
        }
        for (pair, name) in self.pairs.iter_mut().zip(names) {
            pair.connect(&Endpoint {
                number: name.number,
                sequence: name.sequence,
                gid: rail.gid,
                lid: rail.lid,
                mtu: rail.mtu,
            })?;
        }
        Ok(())
    }
}
