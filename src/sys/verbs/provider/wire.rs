//! What the device does with work: carries requests out one by one, as the test that steps it says.
//!
//! All under one lock, but for the work queues' entries. A packet that is held has left its queue pair: nothing
//! the source does brings it back, and it lands unless the destination was reset in between.
#![allow(unsafe_code)]

use super::queue::{Request, WorkQueue};
use crate::sys::verbs::abi::{self, Sge, Wc};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// All that is known of a fabric.
#[derive(Default)]
pub(super) struct Wire {
    pub(super) pairs: BTreeMap<u32, Pair>,
    pub(super) registrations: BTreeMap<u32, Registered>,
    /// Held, or waiting for a receive; in order for each source.
    packets: VecDeque<Packet>,
    /// Sources whose packets are held, also those that are gone.
    pub(super) held: BTreeSet<u32>,
    /// Requests are forgotten but for their completions, at the least cost, since benches count it, too.
    pub(super) discards: bool,
    pub(super) last_number: u32,
}

/// The device's side of a queue pair.
pub(super) struct Pair {
    pub(super) queue: Arc<WorkQueue>,
    pub(super) sent: Arc<Entries>,
    pub(super) received: Arc<Entries>,
    pub(super) domain: usize,
    /// Of its device.
    pub(super) place: u32,
    /// `QPS_*`.
    pub(super) state: u32,
    pub(super) takes_writes: bool,
    pub(super) peer: u32,
    /// First sequence numbers: of what comes, and of what leaves.
    pub(super) expected: u32,
    pub(super) sequence: u32,
    pub(super) receive_retries: u8,
    pub(super) receives: VecDeque<u64>,
    pub(super) receives_max: usize,
    /// Set by tests.
    pub(super) next_status: Option<u32>,
    pub(super) completions_lost: u32,
}

/// Memory as the device knows it.
#[derive(Clone, Copy)]
pub(super) struct Registered {
    pub(super) domain: usize,
    pub(super) address: u64,
    pub(super) len: u64,
    pub(super) remote_write: bool,
}

struct Packet {
    source: u32,
    destination: u32,
    sequence: u32,
    request: Request,
    bytes: Vec<u8>,
    /// The source waits for its end; false once it was flushed or forgotten.
    is_awaited: bool,
    fate: Fate,
}

/// How far a packet is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    OnItsWay,
    /// Its source has not heard of that.
    Landed,
    /// Likewise.
    Refused(u32),
}

/// The device's side of a completion queue.
pub(super) struct Entries {
    waiting: Mutex<VecDeque<Finished>>,
    room: usize,
    pub(super) armed: AtomicBool,
    /// Counts events; -1: none are wanted.
    pub(super) events: libc::c_int,
}

struct Finished {
    entry: Wc,
    /// Of a work request.
    retires: Option<(Arc<WorkQueue>, u64)>,
}

/// What became of a packet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Landing {
    /// From this address on, so many bytes.
    Done(u64, u64),
    /// No receive is there, and the source waits.
    Later,
    Refused(u32),
}

impl Wire {
    /// Everything that can be.
    pub(super) fn step_all(&mut self) -> usize {
        if self.discards {
            return self.pairs.iter_mut().map(|(&number, pair)| pair.discard_all(number)).sum();
        }
        let mut steps = 0;
        loop {
            let before = steps;
            let mut number = 0;
            while let Some(next) = self.next_source(number) {
                number = next;
                while self.step(number) {
                    steps += 1;
                }
            }
            if steps == before {
                return steps;
            }
        }
    }

    /// The least number above `number` of a queue pair, or of one that is gone and has left packets.
    fn next_source(&self, number: u32) -> Option<u32> {
        let pair = self.pairs.range(number + 1..).next().map(|(&number, _)| number);
        let packet =
            self.packets.iter().map(|packet| packet.source).filter(|&source| source > number).min();
        pair.into_iter().chain(packet).min()
    }

    /// Carries out the next request of a queue pair, or lets one that was held land. False: there is nothing
    /// to do.
    pub(super) fn step(&mut self, number: u32) -> bool {
        let held = self.held.contains(&number);
        if !held && self.packets.iter().any(|packet| packet.source == number) {
            return self.land_next(number);
        }
        let departed = self.depart(number);
        if !held {
            self.land_next(number);
        }
        departed
    }

    /// The next request of a queue pair is read from memory and is on its way, or fails where it is. False: there is
    /// none.
    pub(super) fn depart(&mut self, number: u32) -> bool {
        let Some(pair) = self.pairs.get(&number) else {
            return false;
        };
        if pair.state == abi::QPS_ERR {
            return self.flush(number);
        }
        let (abi::QPS_RTS, Some(request)) = (pair.state, pair.queue.front()) else {
            return false;
        };
        if let Some(status) = pair.next_status {
            self.pairs.get_mut(&number).expect("looked up above").next_status = None;
            self.fail(number, &request, status);
            return true;
        }
        let bytes = match self.gather(pair, &request) {
            Ok(bytes) => bytes,
            Err(status) => {
                self.fail(number, &request, status);
                return true;
            }
        };
        pair.queue.take(&request);
        let (destination, sequence, fate) = (pair.peer, pair.sequence, Fate::OnItsWay);
        let packet = Packet {
            source: number,
            destination,
            sequence,
            request,
            bytes,
            is_awaited: true,
            fate,
        };
        self.packets.push_back(packet);
        true
    }

    /// Ends a queue pair: what is posted, and what is on its way, completes as flushed.
    pub(super) fn end(&mut self, number: u32) {
        let Some(pair) = self.pairs.get_mut(&number) else {
            return;
        };
        pair.state = abi::QPS_ERR;
        while let Some(id) = pair.receives.pop_front() {
            pair.received.push(Wc { status: abi::WC_WR_FLUSH_ERR, ..entry(number, id) }, None);
        }
        let queue = &pair.queue;
        for packet in
            self.packets.iter_mut().filter(|packet| packet.source == number && packet.is_awaited)
        {
            packet.is_awaited = false;
            let flushed = Wc { status: abi::WC_WR_FLUSH_ERR, ..entry(number, packet.request.id) };
            pair.sent.push(flushed, Some((queue.clone(), packet.request.index)));
        }
        self.drop_landed(number);
        while self.flush(number) {}
    }

    /// Forgets what is posted. What is on its way is no longer awaited, and goes on.
    pub(super) fn forget(&mut self, number: u32) {
        if let Some(pair) = self.pairs.get_mut(&number) {
            pair.queue.reset();
            pair.receives.clear();
        }
        for packet in self.packets.iter_mut().filter(|packet| packet.source == number) {
            packet.is_awaited = false;
        }
        self.drop_landed(number);
    }

    /// Nobody waits to hear of what has landed.
    fn drop_landed(&mut self, number: u32) {
        self.packets.retain(|packet| packet.source != number || packet.fate == Fate::OnItsWay);
    }

    fn flush(&mut self, number: u32) -> bool {
        let Some(request) = self.pairs.get(&number).and_then(|pair| pair.queue.front()) else {
            return false;
        };
        self.take_with(number, &request, abi::WC_WR_FLUSH_ERR);
        true
    }

    /// This one fails; the rest is flushed.
    fn fail(&mut self, number: u32, request: &Request, status: u32) {
        self.take_with(number, request, status);
        self.end(number);
    }

    fn take_with(&mut self, number: u32, request: &Request, status: u32) {
        let pair = self.pairs.get_mut(&number).expect("its request was just seen");
        pair.queue.take(request);
        let entry = Wc { status, ..entry(number, request.id) };
        pair.complete(entry, request.index);
    }

    fn finish(&mut self, number: u32, request: &Request) {
        if let Some(pair) = self.pairs.get_mut(&number).filter(|_| request.signalled) {
            let entry = Wc { opcode: abi::WC_RDMA_WRITE, ..entry(number, request.id) };
            pair.complete(entry, request.index);
        }
    }

    fn gather(&self, pair: &Pair, request: &Request) -> Result<Vec<u8>, u32> {
        let (mut inline, mut pieces) = (Vec::new(), Vec::new());
        pair.queue.bytes(request, |byte| inline.push(byte), |piece| pieces.push(piece));
        for Sge { addr, length, lkey } in pieces {
            let within = |memory: &Registered| memory.holds(pair.domain, addr, length.into());
            if !self.registrations.get(&lkey).is_some_and(within) {
                return Err(abi::WC_LOC_PROT_ERR);
            }
            let base = std::ptr::with_exposed_provenance::<u8>(addr as usize);
            // SAFETY: within a registration, which keeps its memory mapped; others may be writing it.
            inline.extend((0..length as usize).map(|at| unsafe { base.add(at).read_volatile() }));
        }
        Ok(inline)
    }

    /// The oldest packet of `source` lands, and its source hears of that.
    fn land_next(&mut self, source: u32) -> bool {
        match self.land_oldest(source) {
            None | Some(Landing::Later) => false,
            Some(Landing::Done(..) | Landing::Refused(_)) => {
                self.answer(source);
                true
            }
        }
    }

    /// The oldest of what is on its way from `source` comes to the other end. None: nothing is.
    pub(super) fn land_oldest(&mut self, source: u32) -> Option<Landing> {
        let is_next = |packet: &Packet| packet.source == source && packet.fate == Fate::OnItsWay;
        let at = self.packets.iter().position(is_next)?;
        let mut packet = self.packets.remove(at).expect("found there");
        let is_patient = self.pairs.get(&source).is_some_and(|pair| pair.receive_retries == 7);
        let landing = match self.land(&packet) {
            Landing::Later if packet.is_awaited && !is_patient => {
                Landing::Refused(abi::WC_RNR_RETRY_EXC_ERR)
            }
            landing => landing,
        };
        if packet.is_awaited {
            packet.fate = match landing {
                Landing::Done(..) => Fate::Landed,
                Landing::Later => Fate::OnItsWay,
                Landing::Refused(status) => Fate::Refused(status),
            };
            self.packets.insert(at, packet);
        }
        Some(landing)
    }

    /// `source` hears what became of its oldest packet, if that has come to the other end.
    pub(super) fn answer(&mut self, source: u32) {
        let Some(at) = self.packets.iter().position(|packet| packet.source == source) else {
            return;
        };
        match self.packets[at].fate {
            Fate::OnItsWay => {}
            Fate::Landed => {
                let packet = self.packets.remove(at).expect("found there");
                self.finish(source, &packet.request);
            }
            Fate::Refused(status) => {
                let packet = self.packets.remove(at).expect("found there");
                self.fail_landed(source, &packet.request, status);
            }
        }
    }

    /// `source` has sent its oldest packet often enough, and heard nothing. False: it waits for none.
    pub(super) fn give_up(&mut self, source: u32) -> bool {
        let is_oldest = |packet: &Packet| packet.source == source && packet.is_awaited;
        let Some(at) = self.packets.iter().position(is_oldest) else { return false };
        self.packets[at].is_awaited = false;
        let request = self.packets[at].request;
        self.fail_landed(source, &request, abi::WC_RETRY_EXC_ERR);
        true
    }

    fn fail_landed(&mut self, source: u32, request: &Request, status: u32) {
        let pair = self.pairs.get_mut(&source).expect("it waits");
        let entry = Wc { status, ..entry(source, request.id) };
        pair.complete(entry, request.index);
        self.end(source);
    }

    fn land(&mut self, packet: &Packet) -> Landing {
        let Some(pair) = self.pairs.get_mut(&packet.destination) else {
            return Landing::Refused(abi::WC_RETRY_EXC_ERR);
        };
        let receives = matches!(pair.state, abi::QPS_RTR | abi::QPS_RTS);
        if !receives || pair.peer != packet.source || pair.expected != packet.sequence {
            return Landing::Refused(abi::WC_RETRY_EXC_ERR);
        }
        let Packet { request, bytes, .. } = packet;
        let allowed = |memory: &Registered| {
            memory.remote_write && memory.holds(pair.domain, request.remote, bytes.len() as u64)
        };
        if !pair.takes_writes || !self.registrations.get(&request.key).is_some_and(allowed) {
            self.end(packet.destination);
            return Landing::Refused(abi::WC_REM_ACCESS_ERR);
        }
        let receive = match request.immediate {
            None => None,
            Some(immediate) => match pair.receives.pop_front() {
                None => return Landing::Later,
                Some(id) => Some((id, immediate)),
            },
        };
        let base = std::ptr::with_exposed_provenance_mut::<u8>(request.remote as usize);
        for (at, &byte) in bytes.iter().enumerate() {
            // SAFETY: within a registration that may be written.
            unsafe { base.add(at).write_volatile(byte) };
        }
        if let Some((id, immediate)) = receive {
            let entry = Wc {
                opcode: abi::WC_RECV_RDMA_WITH_IMM,
                byte_len: bytes.len() as u32,
                imm_data: immediate,
                wc_flags: abi::WC_WITH_IMM,
                ..entry(packet.destination, id)
            };
            pair.received.push(entry, None);
        }
        Landing::Done(request.remote, bytes.len() as u64)
    }
}

impl Pair {
    fn discard_all(&mut self, number: u32) -> usize {
        let mut steps = 0;
        while let Some(request) = self.queue.front() {
            self.queue.take(&request);
            if request.signalled {
                let entry = Wc { opcode: abi::WC_RDMA_WRITE, ..entry(number, request.id) };
                self.complete(entry, request.index);
            }
            steps += 1;
        }
        steps
    }

    /// Of a work request.
    fn complete(&mut self, entry: Wc, index: u64) {
        if self.completions_lost > 0 {
            self.completions_lost -= 1;
            return;
        }
        self.sent.push(entry, Some((self.queue.clone(), index)));
    }
}

impl Registered {
    fn holds(&self, domain: usize, address: u64, len: u64) -> bool {
        let offset = address.checked_sub(self.address);
        domain == self.domain
            && offset.is_some_and(|offset| offset <= self.len && len <= self.len - offset)
    }
}

impl Entries {
    pub(super) fn new(room: usize, events: libc::c_int) -> Entries {
        let waiting = Mutex::new(VecDeque::with_capacity(room));
        Entries { waiting, room, armed: AtomicBool::new(false), events }
    }

    pub(super) fn take(&self, mut into: impl FnMut(Wc), room: usize) -> usize {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let count = room.min(waiting.len());
        for finished in waiting.drain(..count) {
            if let Some((queue, index)) = finished.retires {
                queue.retire(index);
            }
            into(finished.entry);
        }
        count
    }

    fn push(&self, entry: Wc, retires: Option<(Arc<WorkQueue>, u64)>) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        // A NIC would end all queue pairs; here a test has gone wrong.
        assert!(waiting.len() < self.room, "a completion queue has overflowed");
        waiting.push_back(Finished { entry, retires });
        if self.events >= 0 && self.armed.swap(false, Ordering::AcqRel) {
            let one = 1u64.to_ne_bytes();
            // SAFETY: eight readable bytes; the channel lives as long as the queue.
            unsafe { libc::write(self.events, one.as_ptr().cast(), one.len()) };
        }
    }
}

/// A success of no kind yet.
fn entry(number: u32, id: u64) -> Wc {
    Wc {
        wr_id: id,
        status: abi::WC_SUCCESS,
        opcode: 0,
        vendor_err: 0,
        byte_len: 0,
        imm_data: 0,
        qp_num: number,
        src_qp: 0,
        wc_flags: 0,
        pkey_index: 0,
        slid: 0,
        sl: 0,
        dlid_path_bits: 0,
    }
}
