//! The writing half: plans become chains of work requests, completions become room for more.
//!
//! One chain, one doorbell, one completion; a chain is of one slot. Consecutive runs that one stretch of the
//! destination takes in go into one work request, gathered from several pieces; none crosses an edge of either side's
//! slabs, since a key is good for one.

use super::rails::{Opened, Rails};
use super::slabs::Slabs;
use super::{RECORD_STRIDE, immediate};
use crate::cause::Cause;
use crate::ids::SlotId;
use crate::sys::event::{Interest, WaitSet};
use crate::sys::verbs::{Chain, CompletionQueue, Completions, Fault, Marks, Piece, QueuePair, Remote};
use crate::transfer::plan::{Run, Template};
use crate::transfer::transport::{Completion, Full, Lost, Memory, Post, SourceHalf, share};
use crate::wire::message::{QueuePairName, RailGrant, RdmaGrant};
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Work requests of a chain: enough that a doorbell and a completion cost little, few enough that lanes and slots
/// take turns.
const CHAIN_MAX: usize = 64;
/// Completions taken at once.
const TAKEN_MAX: usize = 32;
/// Bytes of a work request: far below what any device carries in one, and what a large page takes. Nothing is gained
/// by longer ones, and a chain of them would keep lanes and slots waiting.
const REQUEST_BYTES_MAX: u64 = 1 << 20;
/// Most local pieces of a work request, whatever the device could.
const PIECES_MAX: usize = 16;

/// The source's half of a session.
#[derive(Debug)]
pub struct RdmaSource {
    // Dropped first: they complete into the queues.
    lanes: Box<[Lane]>,
    completions: Box<[CompletionQueue]>,
    rails: Arc<Rails>,
    template: Template,
    /// Where the destination's pool and its records begin.
    kv_address: u64,
    records_address: u64,
    /// One post per slot at a time; the mover merges the rest.
    jobs: Box<[Option<Job>]>,
    taken: Completions,
    pieces_max: usize,
}

#[derive(Debug)]
struct Job {
    post: Post,
    /// Bit per lane that has not posted its share.
    unposted: u32,
    /// Chains whose completions are still to come.
    outstanding: u32,
}

#[derive(Debug)]
struct Lane {
    pair: QueuePair,
    /// Our NIC, by its place; and what opens the destination's memory to its partner.
    rail: usize,
    kv_keys: Box<[u32]>,
    kv_slabs: Slabs,
    records_key: u32,
    /// Of our pool's slabs, which come first among its registrations; behind them are the records.
    slabs: Slabs,
    /// Either pool has several.
    cuts: bool,
    chain: Chain,
    /// Slots with something to post, and from where in their chunk.
    queue: VecDeque<(SlotId, u64)>,
    /// Chains under way, oldest first: whose, and of how many work requests.
    chains: VecDeque<(SlotId, u32)>,
    /// Work requests that can be posted.
    room: u32,
}

impl RdmaSource {
    /// A session with the destination that has granted `peer`; also gives what it is to be told. `wait` is where
    /// the mover parks, `sequences` gives numbers that nobody guesses.
    pub fn new(
        rails: &Arc<Rails>,
        peer: &RdmaGrant,
        template: Template,
        wait: &WaitSet,
        sequences: impl Fn() -> u32,
    ) -> io::Result<(RdmaSource, RdmaGrant)> {
        let mut joined = Vec::new();
        for (place, (nic, names)) in partners(rails, peer) {
            let mut opened = rails.open(place, names.len(), false, &sequences)?;
            opened.connect(nic, names)?;
            if let Some(events) = opened.completions.events() {
                wait.add(events, Interest::Readable)?;
            }
            joined.push((nic, opened));
        }
        let told = rails.grant(joined.iter().map(|(nic, opened)| (nic.number, opened)));
        let pairs = joined.iter().flat_map(|(_, opened)| &opened.pairs);
        let granted = pairs.map(|pair| pair.capacity().pieces).min().unwrap_or(1);
        let pieces_max = (granted.min(rails.settings().pieces) as usize).clamp(1, PIECES_MAX);
        let (mut lanes, mut completions) = (Vec::new(), Vec::new());
        for (nic, Opened { pairs, completions: queue, rail, .. }) in joined {
            completions.push(queue);
            lanes.extend(pairs.into_iter().map(|pair| Lane::new(pair, rails, rail, nic, pieces_max)));
        }
        let source = RdmaSource {
            lanes: lanes.into(),
            completions: completions.into(),
            rails: rails.clone(),
            template,
            kv_address: peer.kv_address,
            records_address: peer.records_address,
            jobs: (0..rails.slots()).map(|_| None).collect(),
            taken: Completions::new(TAKEN_MAX),
            pieces_max,
        };
        Ok((source, told))
    }

    /// What `lane` carries of a slot's post.
    fn share(&self, slot: SlotId, lane: usize) -> Range<u64> {
        let tokens = self.jobs[slot.index()].as_ref().map_or(0..0, |job| job.post.tokens.clone());
        share(self.template.bytes(tokens), lane, self.lanes.len())
    }

    /// Posts one chain of a lane, if there is something and room. `CUT`: there are edges to look for, which would cost
    /// all others some time.
    fn post_chain<const CUT: bool>(&mut self, index: usize, memory: &Memory) -> Result<bool, Lost> {
        let Some(&(slot, at)) = self.lanes[index].queue.front() else { return Ok(false) };
        let share = self.share(slot, index);
        let lane = &mut self.lanes[index];
        // The immediate takes one as well.
        let most = (lane.room as usize).min(CHAIN_MAX);
        let Some(job) = self.jobs[slot.index()].as_mut().filter(|_| most >= 2) else { return Ok(false) };
        let mut filling = Filling::<CUT> {
            chain: &mut lane.chain,
            source: lane.slabs,
            destination: Pool {
                address: self.kv_address,
                key: lane.kv_keys[0],
                slabs: lane.kv_slabs,
                keys: &lane.kv_keys,
            },
            most: most - 1,
            open: None,
            pieces: [Piece { registration: 0, offset: 0, len: 0 }; PIECES_MAX],
            pieces_max: self.pieces_max,
        };
        let tokens = job.post.tokens.clone();
        let runs = self.template.runs(
            tokens,
            at..share.end,
            |page| memory.lists.page(slot, page),
            |page| self.rails.targets.page(slot, page),
        );
        let mut next = at;
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
                next += part.bytes;
            }
        }
        filling.close();
        let ends = next == share.end;
        if ends && let Some(aux) = &job.post.last {
            let target = job.post.target;
            let marks =
                Marks { immediate: Some(immediate(target.slot, target.generation)), ..Marks::default() };
            let at = slot.index() * RECORD_STRIDE;
            let offset = target.slot.index() * RECORD_STRIDE;
            let to =
                Remote { address: self.records_address.wrapping_add(offset as u64), key: lane.records_key };
            let (len, registration) = (size_of_val(aux), lane.chain.registrations().len() - 1);
            let record = Piece { registration, offset: at, len: len as u32 };
            if index == 0 {
                self.rails.record_region.store(at, aux, len);
            }
            // The other lanes only tell.
            lane.chain.write(0, if index == 0 { std::slice::from_ref(&record) } else { &[] }, to, marks);
        }
        if ends {
            lane.queue.pop_front();
            job.unposted &= !(1 << index);
        } else if let Some(front) = lane.queue.front_mut() {
            front.1 = next;
        }
        let requests = lane.chain.len() as u32;
        lane.chain.signal_last();
        memory.tally.add(u64::from(requests), 1);
        let posted = lane.pair.post(&mut lane.chain);
        lane.chain.clear();
        posted.map_err(|_| Lost::because(Cause::Internal))?;
        lane.room -= requests;
        lane.chains.push_back((slot, requests));
        job.outstanding += 1;
        Ok(true)
    }

    fn reap(&mut self, completed: &mut dyn FnMut(SlotId)) -> Result<bool, Lost> {
        let mut moved = false;
        let each = self.lanes.len() / self.completions.len();
        for (queue, lanes) in self.completions.iter_mut().zip(self.lanes.chunks_mut(each)) {
            moved |= queue.poll(&mut self.taken).map_err(|_| Lost::because(Cause::Internal))? > 0;
            for completion in self.taken.iter() {
                // Two NICs may give their queue pairs the same number.
                let lane = lanes.iter_mut().find(|lane| lane.pair.number() == completion.queue_pair);
                let lane = lane.ok_or(BEYOND_US)?;
                let (slot, requests) = lane.chains.pop_front().ok_or(BEYOND_US)?;
                let rail = self.rails.rail(lane.rail);
                // A queue pair's first error is its oldest chain's; all behind it is flushed.
                if let Err(fault) = completion.outcome {
                    // Another cause is not the way's.
                    if cause_of(fault) == Cause::Unreachable {
                        rail.breaks();
                    }
                    return Err(Lost { cause: cause_of(fault), slot: Some(slot) });
                }
                rail.carries();
                lane.room += requests;
                let Some(job) = &mut self.jobs[slot.index()] else { continue };
                job.outstanding -= 1;
                if job.outstanding == 0 && job.unposted == 0 {
                    self.jobs[slot.index()] = None;
                    completed(slot);
                }
            }
        }
        Ok(moved)
    }
}

impl SourceHalf for RdmaSource {
    fn completion(&self) -> Completion {
        Completion::Pushed
    }

    fn post(&mut self, _memory: &Memory, post: &Post) -> Result<(), Full> {
        let job = &mut self.jobs[post.slot.index()];
        if job.is_some() {
            return Err(Full);
        }
        let mut post = post.clone();
        if let Some(aux) = &mut post.last {
            aux.generation = post.target.generation.0;
        }
        let slot = post.slot;
        let tells = post.last.is_some();
        *job = Some(Job { post, unposted: 0, outstanding: 0 });
        for index in 0..self.lanes.len() {
            let share = self.share(slot, index);
            // Few tokens are not for all lanes, but each says when it has brought its last.
            if share.is_empty() && !tells {
                continue;
            }
            self.lanes[index].queue.push_back((slot, share.start));
            if let Some(job) = &mut self.jobs[slot.index()] {
                job.unposted |= 1 << index;
            }
        }
        Ok(())
    }

    fn step(&mut self, memory: &Memory, completed: &mut dyn FnMut(SlotId)) -> Result<bool, Lost> {
        let mut moved = self.reap(completed)?;
        for index in 0..self.lanes.len() {
            let cuts = self.lanes[index].cuts;
            while if cuts {
                self.post_chain::<true>(index, memory)
            } else {
                self.post_chain::<false>(index, memory)
            }? {
                moved = true;
            }
        }
        Ok(moved)
    }

    fn withdraw(&mut self, slot: SlotId) -> bool {
        for lane in &mut self.lanes {
            lane.queue.retain(|&(queued, _)| queued != slot);
        }
        let Some(job) = &mut self.jobs[slot.index()] else { return true };
        job.unposted = 0;
        let quiet = job.outstanding == 0;
        if quiet {
            self.jobs[slot.index()] = None;
        }
        quiet
    }

    fn park(&mut self, parked: bool) {
        if parked {
            // Fails only with a queue that is broken; the next poll says so.
            for queue in &mut self.completions {
                let _ = queue.request_event();
            }
        } else {
            self.completions.iter_mut().for_each(CompletionQueue::clear_events);
        }
    }
}

impl Lane {
    fn new(pair: QueuePair, rails: &Rails, place: usize, partner: &RailGrant, pieces_max: usize) -> Lane {
        let rail = rails.rail(place);
        let room = pair.capacity().requests.min(rails.settings().requests);
        let registrations = [&rail.kv, std::slice::from_ref(&rail.records)].concat();
        Lane {
            chain: Chain::new(&registrations, CHAIN_MAX.min(room as usize), pieces_max),
            pair,
            rail: place,
            kv_keys: partner.slab_keys().into(),
            kv_slabs: Slabs::of(partner.slab_bytes),
            records_key: partner.records_key,
            slabs: rail.slabs,
            cuts: rail.kv.len() > 1 || partner.slab_keys().len() > 1,
            queue: VecDeque::with_capacity(rails.slots()),
            chains: VecDeque::with_capacity(room as usize),
            room,
        }
    }
}

/// Which of our NICs is joined to which of the destination's: those of one number; where there are none, as they
/// come.
fn partners<'a>(rails: &Rails, peer: &'a RdmaGrant) -> Vec<(usize, (&'a RailGrant, &'a [QueuePairName]))> {
    let ours = rails.usable();
    let same = |number| ours.iter().copied().find(|&place| rails.rail(place).number == number);
    let pairs: Vec<_> = peer.rails().filter_map(|theirs| Some((same(theirs.0.number)?, theirs))).collect();
    if pairs.is_empty() { ours.iter().copied().zip(peer.rails()).collect() } else { pairs }
}

/// A completion of what was never posted.
const BEYOND_US: Lost = Lost::because(Cause::Internal);

fn cause_of(fault: Fault) -> Cause {
    match fault {
        Fault::Flushed => Cause::Flushed,
        Fault::RemoteAccess | Fault::RemoteOperation => Cause::Denied,
        Fault::LocalOperation | Fault::NoAnswer | Fault::NoReceive => Cause::Unreachable,
        Fault::LocalProtection | Fault::Other(_) => Cause::Internal,
    }
}

/// The destination's pool, as a lane's NIC may write it.
#[derive(Clone, Copy)]
struct Pool<'a> {
    address: u64,
    /// Of the first slab, mostly the only one.
    key: u32,
    slabs: Slabs,
    keys: &'a [u32],
}

impl Pool<'_> {
    /// `CUT`: there are several slabs.
    #[inline(always)]
    fn at<const CUT: bool>(&self, offset: u64) -> Remote {
        let address = self.address.wrapping_add(offset);
        if !CUT {
            return Remote { address, key: self.key };
        }
        // The grant was checked to open the whole pool; the last key opens nothing beyond its own slab.
        let slab = self.slabs.slab(offset).min(self.keys.len() - 1);
        Remote { address, key: self.keys[slab] }
    }
}

/// A chain that is being filled, run by run; `CUT`: cut wherever either pool's slabs end.
struct Filling<'a, const CUT: bool> {
    chain: &'a mut Chain,
    source: Slabs,
    destination: Pool<'a>,
    most: usize,
    /// Where the request at hand goes, its bytes and its pieces so far.
    open: Option<(u64, u64, usize)>,
    pieces: [Piece; PIECES_MAX],
    pieces_max: usize,
}

impl<const CUT: bool> Filling<'_, CUT> {
    /// Bytes of a run that one request takes.
    #[inline(always)]
    fn part(&self, run: &Run) -> u64 {
        let bytes = run.bytes.min(REQUEST_BYTES_MAX);
        if !CUT {
            return bytes;
        }
        bytes.min(self.source.left(run.source)).min(self.destination.slabs.left(run.destination))
    }

    /// False: no room for it.
    #[inline(always)]
    fn add(&mut self, run: &Run) -> bool {
        let (slab, offset) = match CUT {
            true => (self.source.slab(run.source), self.source.within(run.source)),
            false => (0, run.source),
        };
        let piece = Piece { registration: slab, offset: offset as usize, len: run.bytes as u32 };
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
            self.chain.write(0, &self.pieces[..count], self.destination.at::<CUT>(to), Marks::default());
        }
    }
}
