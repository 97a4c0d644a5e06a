//! A NIC and one worker's memory on it: registered once, used by all sessions.
//!
//! Thread: `ctl` makes it and its queue pairs.

use super::{Nic, RECORD_STRIDE, SLOTS_MAX};
use crate::ids::SlotId;
use crate::kv::region::Region;
use crate::sys::verbs::{
    Access, Capacity, CompletionQueue, Domain, Endpoint, QueuePair, Registration, Route,
};
use crate::transfer::aux::AuxRecord;
use crate::transfer::pages::PageLists;
use crate::transfer::transport::Memory;
use crate::wire::message::{QueuePairName, RdmaGrant};
use std::io;
use std::sync::Arc;

/// Queue pairs of a session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    /// Between the two NICs: what one has in flight keeps few parts of a NIC busy.
    pub lanes: usize,
    /// Work requests of a lane under way.
    pub requests: u32,
    /// Local pieces that may feed one work request.
    pub pieces: u32,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { lanes: 2, requests: 512, pieces: 16 }
    }
}

/// A worker's way onto a fabric.
#[derive(Debug)]
pub struct Rail {
    pub(super) domain: Arc<Domain>,
    route: Route,
    settings: Settings,
    slots: usize,
    /// The pool; then a record for each slot.
    pub(super) kv: Arc<Registration>,
    pub(super) records: Arc<Registration>,
    pub(super) record_region: Arc<Region>,
    /// Where at their destinations this worker's slots go, by slot.
    pub targets: Arc<PageLists>,
}

/// Made, not connected.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) pairs: Vec<QueuePair>,
    pub(super) completions: CompletionQueue,
    names: Vec<QueuePairName>,
}

impl Rail {
    /// Registers a worker's memory with a device. `context` is the most tokens of a prompt, which may take as many
    /// pages at a destination.
    ///
    /// # Errors
    /// The device refuses, or has no room for the pool in one region.
    pub fn new(
        nic: &Nic,
        memory: &Memory,
        slots: usize,
        context: usize,
        settings: Settings,
    ) -> io::Result<Rail> {
        if slots > SLOTS_MAX {
            return Err(io::Error::other(format!("{slots} slots: rdma has room for {SLOTS_MAX}")));
        }
        if !(1..=RdmaGrant::LANES_MAX).contains(&settings.lanes) {
            let (lanes, most) = (settings.lanes, RdmaGrant::LANES_MAX);
            return Err(io::Error::other(format!("{lanes} lanes: rdma has 1 to {most}")));
        }
        let domain = Domain::new(&nic.device)?;
        let remote = Access { remote_write: true, relaxed_ordering: true };
        let kv = Registration::new(&domain, &memory.region, 0..memory.region.len(), remote)?;
        let record_region = Arc::new(Region::new(c"baton-records", slots * RECORD_STRIDE)?);
        // A record is read once its immediate has come, behind which it may not lie.
        let ordered = Access { remote_write: true, relaxed_ordering: false };
        let records = Registration::new(&domain, &record_region, 0..record_region.len(), ordered)?;
        Ok(Rail {
            domain,
            route: nic.route,
            settings,
            slots,
            kv: Arc::new(kv),
            records: Arc::new(records),
            record_region,
            targets: Arc::new(PageLists::new(slots, context)?),
        })
    }

    /// Lanes of its sessions.
    pub fn lanes(&self) -> usize {
        self.settings.lanes
    }

    pub(super) fn settings(&self) -> &Settings {
        &self.settings
    }

    pub(super) fn slots(&self) -> usize {
        self.slots
    }

    /// Queue pairs of a session: what they post, or what they are told, completes into one queue.
    pub(super) fn open(
        &self,
        lanes: usize,
        takes_writes: bool,
        sequences: impl Fn() -> u32,
    ) -> io::Result<Opened> {
        // A receive for each slot, and for those that are on their way out.
        let receives = if takes_writes { self.slots as u32 + SPARE_RECEIVES } else { 1 };
        let requests = if takes_writes { 1 } else { self.settings.requests };
        let entries = (receives + requests) * lanes as u32;
        let completions = CompletionQueue::with_events(self.domain.device(), entries)?;
        let wanted = Capacity { requests, receives, pieces: self.settings.pieces, inline: 0 };
        let (mut pairs, mut names) = (Vec::new(), Vec::new());
        for _ in 0..lanes {
            let mut pair = QueuePair::new(&self.domain, &completions, &completions, wanted, takes_writes)?;
            let end = pair.open(&self.route, sequences())?;
            names.push(QueuePairName { number: end.number, sequence: end.sequence });
            pairs.push(pair);
        }
        Ok(Opened { pairs, completions, names })
    }

    /// What a peer has written of a slot.
    pub(super) fn record(&self, slot: SlotId) -> AuxRecord {
        self.record_region.read(slot.index() * RECORD_STRIDE)
    }

    /// What peers are told of memory and queue pairs.
    pub(super) fn grant(&self, opened: &Opened) -> RdmaGrant {
        RdmaGrant {
            gid: self.route.gid,
            lid: self.route.lid,
            mtu: self.route.mtu,
            kv_address: self.kv.address(),
            kv_key: self.kv.remote_key(),
            records_address: self.records.address(),
            records_key: self.records.remote_key(),
            pairs: RdmaGrant::pairs(&opened.names),
            lanes: opened.names.len() as u16,
            pad: 0,
        }
    }
}

/// Receives beyond one for each slot.
pub(super) const SPARE_RECEIVES: u32 = 8;

impl Opened {
    /// Connects all to a peer's.
    pub(super) fn connect(&mut self, peer: &RdmaGrant) -> io::Result<()> {
        if usize::from(peer.lanes) != self.pairs.len() {
            return Err(io::Error::other(format!("{} lanes here, {} there", self.pairs.len(), peer.lanes)));
        }
        for (pair, name) in self.pairs.iter_mut().zip(&peer.pairs) {
            pair.connect(&Endpoint {
                number: name.number,
                sequence: name.sequence,
                gid: peer.gid,
                lid: peer.lid,
                mtu: peer.mtu,
            })?;
        }
        Ok(())
    }
}
