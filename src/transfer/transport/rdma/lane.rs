//! A lane: one queue pair that writes, and the chain of work requests that is filled for it.
//!
//! Thread: the posting thread of the lane's NIC. Consecutive runs that are contiguous at the
//! destination become one work request, gathered from several pieces. No request crosses the edge
//! of a slab on either side, because a key is valid for one slab.
//! Not here: when a chain is posted (`posts`), and how it completes (`completions`).

use super::flight::WorkRequestId;
use super::rails::Rails;
use super::slabs::Slabs;
use super::{RECORD_STRIDE, immediate};
use crate::ids::SlotId;
use crate::sys::verbs::{Chain, LocalPiece, Marks, PostError, QueuePair, RemoteAddress};
use crate::transfer::aux::AuxRecord;
use crate::transfer::plan::Run;
use crate::transfer::target::Target;
use crate::wire::message::{RailGrant, RdmaGrant};
use std::collections::VecDeque;

/// Work requests of a chain: enough to make a doorbell and a completion cheap, and few enough that
/// lanes and slots take turns.
pub(super) const CHAIN_MAX: usize = 64;
/// Bytes of a work request: far below the limit of any device, and enough for a large page. Longer
/// requests gain nothing, and a chain of them would delay other lanes and slots.
const REQUEST_BYTES_MAX: u64 = 1 << 20;
/// Most local pieces of a work request, even if the device allows more.
pub(super) const PIECES_MAX: usize = 16;

/// A queue pair and the memory that it can write.
#[derive(Debug)]
pub(super) struct Lane {
    pair: QueuePair,
    /// Index among the session's lanes.
    pub(super) number: u8,
    chain: Chain,
    pieces_max: usize,
    /// Slabs of this worker's pool. The chain's registrations list them first, then the records.
    slabs: Slabs,
    /// Whether either pool has several slabs.
    cuts: bool,
    kv: Pool,
    records: RemoteAddress,
    /// Free places for work requests.
    pub(super) room: u32,
    /// Slots with unposted bytes, and the offset in their chunk.
    pub(super) queue: VecDeque<(SlotId, u64)>,
}

/// The destination's pool, as the lane's NIC addresses it.
#[derive(Debug)]
struct Pool {
    address: u64,
    /// Key of the first slab, usually the only one.
    key: u32,
    slabs: Slabs,
    keys: Box<[u32]>,
}

impl Pool {
    /// If `CUT` is true, there are several slabs.
    #[inline(always)]
    fn at<const CUT: bool>(&self, offset: u64) -> RemoteAddress {
        let address = self.address.wrapping_add(offset);
        if !CUT {
            return RemoteAddress { address, key: self.key };
        }
        // The grant was checked to open the whole pool. The last key opens nothing beyond its own
        // slab.
        let slab = self.slabs.slab(offset).min(self.keys.len() - 1);
        RemoteAddress { address, key: self.keys[slab] }
    }
}

impl Lane {
    /// A lane with a connected queue pair of this worker's NIC `place`. It writes the memory that
    /// `peer` grants through its NIC `partner`.
    pub(super) fn new(
        (pair, number): (QueuePair, u8),
        (rails, place): (&Rails, usize),
        (peer, partner): (&RdmaGrant, &RailGrant),
        pieces_max: usize,
    ) -> Lane {
        let rail = rails.rail(place);
        let registrations = [&rail.kv, std::slice::from_ref(&rail.records)].concat();
        let room = pair.capacity().requests.min(rails.settings().requests);
        Lane {
            chain: Chain::new(&registrations, CHAIN_MAX.min(room as usize), pieces_max),
            room,
            pair,
            number,
            pieces_max,
            slabs: rail.slabs,
            cuts: rail.kv.len() > 1 || partner.slab_keys().len() > 1,
            kv: Pool {
                address: peer.kv_address,
                key: partner.slab_keys()[0],
                slabs: Slabs::of(partner.slab_bytes),
                keys: partner.slab_keys().into(),
            },
            records: RemoteAddress { address: peer.records_address, key: partner.records_key },
            queue: VecDeque::with_capacity(rails.slots()),
        }
    }

    /// Fills the chain with up to `most` work requests of a slot's runs. Returns their bytes.
    #[inline]
    pub(super) fn fill(
        &mut self,
        slot: SlotId,
        runs: impl Iterator<Item = Run>,
        most: usize,
    ) -> u64 {
        // A search for edges that do not exist would add a tenth to the cost of a work request.
        if self.cuts {
            self.fill_by::<true>(slot, runs, most)
        } else {
            self.fill_by::<false>(slot, runs, most)
        }
    }

    // Not inlined, so that the values of a run stay in registers.
    #[inline(never)]
    fn fill_by<const CUT: bool>(
        &mut self,
        slot: SlotId,
        runs: impl Iterator<Item = Run>,
        most: usize,
    ) -> u64 {
        let mut filling = Filling::<CUT> {
            id: WorkRequestId { slot, lane: self.number, requests: 0 }.id(),
            chain: &mut self.chain,
            source: self.slabs,
            destination: &self.kv,
            most,
            open: None,
            pieces: [LocalPiece { registration: 0, offset: 0, len: 0 }; PIECES_MAX],
            pieces_max: self.pieces_max,
        };
        let mut filled = 0;
        'full: for run in runs {
            let mut done = 0;
            while done < run.bytes {
                let mut part = Run {
                    source: run.source + done,
                    destination: run.destination + done,
                    bytes: run.bytes - done,
                };
                part.bytes = filling.part(&part);
                if !filling.add(&part) {
                    break 'full;
                }
                done += part.bytes;
                filled += part.bytes;
            }
        }
        filling.close();
        filled
    }

    /// Adds the write that announces the lane's last bytes. On the first lane it also writes the
    /// record.
    pub(super) fn tell(&mut self, slot: SlotId, target: Target, aux: &AuxRecord, rails: &Rails) {
        let id = WorkRequestId { slot, lane: self.number, requests: 0 }.id();
        let marks = Marks {
            immediate: Some(immediate(target.slot, target.generation)),
            ..Marks::default()
        };
        let (at, offset) = (slot.index() * RECORD_STRIDE, target.slot.index() * RECORD_STRIDE);
        let to = RemoteAddress {
            address: self.records.address.wrapping_add(offset as u64),
            ..self.records
        };
        let (len, registration) = (size_of_val(aux), self.chain.registrations().len() - 1);
        let record = LocalPiece { registration, offset: at, len: len as u32 };
        let first = self.number == 0;
        if first {
            rails.record_region.store(at, aux, len);
        }
        self.chain.write(id, if first { std::slice::from_ref(&record) } else { &[] }, to, marks);
    }

    /// Work requests in the chain.
    pub(super) fn filled(&self) -> usize {
        self.chain.len()
    }

    /// Posts the chain with one doorbell and one completion with the id of `last`.
    #[inline]
    pub(super) fn ring(&mut self, last: WorkRequestId) -> Result<(), PostError> {
        self.chain.signal_last(last.id());
        let posted = self.pair.post(&mut self.chain);
        self.chain.clear();
        posted
    }
}

/// A chain that is filled run by run. If `CUT` is true, requests are cut at the slab edges of both
/// pools.
struct Filling<'a, const CUT: bool> {
    chain: &'a mut Chain,
    id: u64,
    source: Slabs,
    destination: &'a Pool,
    most: usize,
    /// Destination offset, bytes and pieces of the open request.
    open: Option<(u64, u64, usize)>,
    pieces: [LocalPiece; PIECES_MAX],
    pieces_max: usize,
}

impl<const CUT: bool> Filling<'_, CUT> {
    /// Bytes of a run that fit one request.
    #[inline(always)]
    fn part(&self, run: &Run) -> u64 {
        let bytes = run.bytes.min(REQUEST_BYTES_MAX);
        if !CUT {
            return bytes;
        }
        bytes.min(self.source.left(run.source)).min(self.destination.slabs.left(run.destination))
    }

    /// Adds a run; false if there is no room.
    #[inline(always)]
    fn add(&mut self, run: &Run) -> bool {
        let (slab, offset) = match CUT {
            true => (self.source.slab(run.source), self.source.within(run.source)),
            false => (0, run.source),
        };
        let piece =
            LocalPiece { registration: slab, offset: offset as usize, len: run.bytes as u32 };
        if let Some((to, bytes, count)) = &mut self.open
            && *to + *bytes == run.destination
            && (!CUT || self.destination.slabs.within(run.destination) != 0)
            && *bytes + run.bytes <= REQUEST_BYTES_MAX
            && *count < self.pieces_max
        {
            self.pieces[*count] = piece;
            (*bytes, *count) = (*bytes + run.bytes, *count + 1);
            return true;
        }
        if self.chain.len() + usize::from(self.open.is_some()) == self.most {
            return false;
        }
        self.close();
        self.pieces[0] = piece;
        self.open = Some((run.destination, run.bytes, 1));
        true
    }

    #[inline(always)]
    fn close(&mut self) {
        if let Some((to, _, count)) = self.open.take() {
            self.chain.write(
                self.id,
                &self.pieces[..count],
                self.destination.at::<CUT>(to),
                Marks::default(),
            );
        }
    }
}
