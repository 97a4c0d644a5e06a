//! Execution of work by the simulated device: one request at a time, in the order that the test
//! chooses.
//!
//! One lock protects everything except the entries of the work queues. A held packet has already
//! left its queue pair, so that its source cannot stop it. It lands unless the destination is reset
//! before.
#![allow(unsafe_code)]

use super::queue::{Request, WorkQueue};
use crate::sys::verbs::abi::{self, Sge, Wc};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The state of a fabric.
#[derive(Default)]
pub(super) struct Wire {
    pub(super) pairs: BTreeMap<u32, Pair>,
    pub(super) registrations: BTreeMap<u32, Registered>,
    /// Packets that are held or wait for a receive, in order for each source.
    packets: VecDeque<Packet>,
    /// Sources with held packets, including sources that are gone.
    pub(super) held: BTreeSet<u32>,
    /// Requests only produce completions. This path is as cheap as possible, because benches
    /// measure it, too.
    pub(super) discards: bool,
    pub(super) last_number: u32,
}

/// The device's side of a queue pair.
pub(super) struct Pair {
    pub(super) queue: Arc<WorkQueue>,
    pub(super) sent: Arc<Entries>,
    pub(super) received: Arc<Entries>,
    pub(super) domain: usize,
    /// The place of its device.
    pub(super) place: u32,
    /// `QPS_*`.
    pub(super) state: u32,
    pub(super) takes_writes: bool,
    pub(super) peer: u32,
    /// First sequence numbers of incoming and of outgoing packets.
    pub(super) expected: u32,
    pub(super) sequence: u32,
    pub(super) receive_retries: u8,
    pub(super) receives: VecDeque<u64>,
    pub(super) receives_max: usize,
    /// Set by tests.
    pub(super) next_status: Option<u32>,
    pub(super) completions_lost: u32,
}

/// A registration as the device sees it.
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
    /// The source waits for the outcome; false once the packet was flushed or forgotten.
    is_awaited: bool,
    fate: Fate,
}

/// The progress of a packet.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    OnItsWay,
    /// Landed; its source has no answer yet.
    Landed,
    /// Refused; its source has no answer yet.
    Refused(u32),
}

/// The device's side of a completion queue.
pub(super) struct Entries {
    waiting: Mutex<VecDeque<Finished>>,
    room: usize,
    pub(super) armed: AtomicBool,
    /// An eventfd that counts events; -1: no events.
    pub(super) events: libc::c_int,
}

struct Finished {
    entry: Wc,
    /// The work request that this completion retires.
    retires: Option<(Arc<WorkQueue>, u64)>,
}

/// The outcome of a packet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Landing {
    /// First address and number of bytes.
    Done(u64, u64),
    /// No receive was posted, and the source waits.
    Later,
    Refused(u32),
}

impl Wire {
    /// Executes everything that can run. Returns the number of steps.
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

    /// The smallest number above `number` of a queue pair, or of a removed one with packets left.
    fn next_source(&self, number: u32) -> Option<u32> {
        let pair = self.pairs.range(number + 1..).next().map(|(&number, _)| number);
        let packet =
            self.packets.iter().map(|packet| packet.source).filter(|&source| source > number).min();
        pair.into_iter().chain(packet).min()
    }

    /// Executes the next request of a queue pair, or lands one that was held. Returns false if
    /// there is nothing to do.
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

    /// Reads the next request of a queue pair from memory and puts it in flight, or fails it at the
    /// source. Returns false if there is none.
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

    /// Ends a queue pair: posted requests and packets in flight complete as flushed.
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

    /// Discards everything posted. Packets in flight continue, but are no longer awaited.
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

    /// Drops landed packets, because no source waits for them.
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

    /// Fails this request and flushes the rest.
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
            // SAFETY: within a registration, which keeps its memory mapped. Other threads may write
            // it at the same time.
            inline.extend((0..length as usize).map(|at| unsafe { base.add(at).read_volatile() }));
        }
        Ok(inline)
    }

    /// Lands the oldest packet of `source` and answers the source.
    fn land_next(&mut self, source: u32) -> bool {
        match self.land_oldest(source) {
            None | Some(Landing::Later) => false,
            Some(Landing::Done(..) | Landing::Refused(_)) => {
                self.answer(source);
                true
            }
        }
    }

    /// Lands the oldest packet in flight from `source`. `None`: no packet is in flight.
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

    /// Gives `source` the outcome of its oldest packet, if that packet has landed.
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

    /// Fails the oldest packet of `source` after its last retry without an answer. Returns false if
    /// `source` waits for none.
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
            // SAFETY: within a registration with write access.
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

    /// Adds a completion of a work request.
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
        // A NIC would fail all queue pairs of this queue. Here it shows an error in the test.
        assert!(waiting.len() < self.room, "a completion queue has overflowed");
        waiting.push_back(Finished { entry, retires });
        if self.events >= 0 && self.armed.swap(false, Ordering::AcqRel) {
            let one = 1u64.to_ne_bytes();
            // SAFETY: eight bytes are readable; the channel lives as long as the queue.
            unsafe { libc::write(self.events, one.as_ptr().cast(), one.len()) };
        }
    }
}

/// A successful completion without a kind.
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
