//! The part of a worker of this process that `ctl` owns.
//!
//! Owns: its free slots, its rings to engine and mover, and the promises of each slot's request.
//! Thread: `ctl`. Invariant: a command that finds its ring full waits in an ordered queue for a
//! later turn. The worker's slots bound that queue, and no command is lost.

use crate::cause::Cause;
use crate::ids::{Generation, Room, SlotId, WorkerId};
use crate::kv::groups::GroupCounts;
use crate::kv::layout::KvLayout;
use crate::stdx::event_count::EventCount;
use crate::stdx::failpoint::is_failpoint_active;
use crate::transfer::answer::TransferAnswer;
use crate::transfer::command::{DestinationCommand, SourceCommand};
use crate::transfer::manager::destination::PromptRequest;
use crate::transfer::manager::rooms::{Prompt, Slot};
use crate::transfer::pages::PageLists;
use crate::transfer::status::StatusTable;
use crate::transfer::transport::Memory;
use crate::transfer::transport::rdma::Rails;
use crate::wire::message::Transport;
use crossbeam_channel::{Receiver, Sender, TrySendError};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// A bounded ring with a queue for commands that find it full.
#[derive(Debug)]
pub struct Ring<T> {
    ring: Sender<T>,
    bell: Arc<EventCount>,
    waiting: VecDeque<T>,
}

impl<T> Ring<T> {
    /// A ring; each command notifies `bell`.
    pub fn new(ring: Sender<T>, bell: Arc<EventCount>) -> Ring<T> {
        Ring { ring, bell, waiting: VecDeque::new() }
    }

    /// Sends an item after all earlier ones.
    pub fn send(&mut self, item: T) {
        self.waiting.push_back(item);
        self.flush();
    }

    /// Sends queued items while the ring has space. True if the queue is empty.
    pub fn flush(&mut self) -> bool {
        while let Some(item) = self.waiting.pop_front() {
            match self.ring.try_send(item) {
                Ok(()) => self.bell.notify(),
                Err(TrySendError::Full(item) | TrySendError::Disconnected(item)) => {
                    self.waiting.push_front(item);
                    self.bell.notify();
                    return false;
                }
            }
        }
        true
    }
}

/// The values that the request of a slot has promised to the other leg.
#[derive(Clone, Copy, Debug)]
pub struct SlotRequest {
    /// Generation of the slot.
    pub generation: Generation,
    /// The prompt that both legs must agree on.
    pub prompt: Prompt,
    /// When the request fails.
    pub deadline: Instant,
    /// On a decode worker: the transport of its KV, once Destination is sent. Always `None` on a
    /// prefill worker.
    pub transport: Option<Transport>,
    /// Prompt tokens of which decode already has the KV, so that it does not ask for them.
    pub prefix: u32,
}

impl SlotRequest {
    /// The request that a decode worker sends to its prefill worker.
    pub fn prompt_request(&self, room: Room) -> PromptRequest {
        PromptRequest { room, prompt: self.prompt, deadline: self.deadline }
    }
}

/// The part of a worker that all roles share. Its engine takes messages of type `E`.
#[derive(Debug)]
pub struct LocalWorker<E = TransferAnswer> {
    /// Its index in this process.
    pub id: WorkerId,
    /// Commands to its engine.
    pub engine: Ring<E>,
    /// Slots and their states.
    pub status: Arc<StatusTable>,
    /// KV and page lists.
    pub memory: Memory,
    /// Its registration with RDMA NICs.
    pub rails: Option<Arc<Rails>>,
    free: Vec<SlotId>,
    slot_requests: Vec<Option<SlotRequest>>,
}

impl<E> LocalWorker<E> {
    /// A worker with all slots free.
    pub fn new(
        id: WorkerId,
        engine: Ring<E>,
        status: Arc<StatusTable>,
        memory: Memory,
    ) -> LocalWorker<E> {
        let slots = status.slots() as u32;
        LocalWorker {
            id,
            engine,
            status,
            memory,
            rails: None,
            free: (0..slots).rev().map(SlotId).collect(),
            slot_requests: (0..slots).map(|_| None).collect(),
        }
    }

    /// Number of free slots.
    pub fn free_slots(&self) -> usize {
        self.free.len()
    }

    /// Number of all slots.
    pub fn slots(&self) -> usize {
        self.slot_requests.len()
    }

    /// Most tokens of a sequence in this pool.
    pub fn tokens(&self) -> usize {
        let (pages, page_size) = (self.memory.pages, self.memory.layout.page_size);
        self.memory.groups.sequence_tokens(pages, page_size) as usize
    }

    /// The groups of layers, each with pages of its own.
    pub fn groups(&self) -> GroupCounts {
        self.memory.groups
    }

    /// Layout of the KV.
    pub fn layout(&self) -> &KvLayout {
        &self.memory.layout
    }

    /// Page lists by slot.
    pub fn lists(&self) -> &PageLists {
        &self.memory.lists
    }

    /// Takes a slot for a new request, in `Bootstrapping`. `None`: no slot is free.
    pub fn take_slot(&mut self, prompt: Prompt, deadline: Instant) -> Option<Slot> {
        let id = self.free.pop()?;
        debug_assert!(self.slot_requests[id.index()].is_none(), "a free slot has no request");
        let generation = self.status.open(id);
        self.slot_requests[id.index()] =
            Some(SlotRequest { generation, prompt, deadline, transport: None, prefix: 0 });
        Some(Slot { id, generation })
    }

    /// Sets the prompt of a slot that was taken before its request came.
    pub fn set_prompt(&mut self, slot: Slot, prompt: Prompt, deadline: Instant) {
        let slot_request = self.slot_requests[slot.id.index()].as_mut();
        if let Some(held) = slot_request.filter(|held| held.generation == slot.generation) {
            (held.prompt, held.deadline) = (prompt, deadline);
        }
    }

    /// The request in this generation of a slot.
    pub fn slot_request(&self, slot: Slot) -> Option<&SlotRequest> {
        self.slot_requests[slot.id.index()]
            .as_ref()
            .filter(|slot_request| slot_request.generation == slot.generation)
    }

    /// Records that this decode worker has sent Destination for the KV after its own prefix.
    pub fn record_transport(&mut self, slot: Slot, prefix: u32, transport: Option<Transport>) {
        if let Some(slot_request) = self.slot_requests[slot.id.index()].as_mut()
            && slot_request.generation == slot.generation
        {
            debug_assert!(prefix <= slot_request.prompt.tokens, "a prefix is a part of the prompt");
            (slot_request.transport, slot_request.prefix) = (transport, prefix);
        }
    }

    /// Frees a slot: the engine has returned the request, its pages and its lease.
    pub fn release(&mut self, slot: Slot) {
        debug_assert!(self.slot_request(slot).is_some(), "a slot is released by its request, once");
        if self.slot_request(slot).is_some() && !is_failpoint_active("slot is not given back") {
            if !is_failpoint_active("free slot keeps its request") {
                self.slot_requests[slot.id.index()] = None;
            }
            self.free.push(slot.id);
        }
    }

    /// Panics unless each slot is either free or has a request.
    pub fn invariants(&self) {
        assert_eq!(self.slot_requests.len(), self.status.slots(), "each slot has a place");
        let mut is_free = vec![false; self.slot_requests.len()];
        for slot in &self.free {
            assert!(!std::mem::replace(&mut is_free[slot.index()], true), "a slot is free once");
        }
        for (slot_request, is_free) in self.slot_requests.iter().zip(is_free) {
            assert!(slot_request.is_some() != is_free, "a slot is free or has a request");
        }
    }
}

impl<E: From<TransferAnswer>> LocalWorker<E> {
    /// Sends the engine an answer of the hand-off.
    pub fn tell(&mut self, answer: TransferAnswer) {
        debug_assert_eq!(answer.worker(), self.id, "an answer is for the engine of its worker");
        self.engine.send(answer.into());
    }

    /// Tells the engine to end the request in any state.
    pub fn abort(&mut self, slot: Slot, cause: Cause) {
        if is_failpoint_active("abort is not passed on") {
            return;
        }
        let Slot { id: slot, generation } = slot;
        self.tell(TransferAnswer::Abort { worker: self.id, slot, generation, cause });
    }
}

/// Commands to the mover of a prefill worker.
pub type SourceRing = Ring<SourceCommand>;
/// Commands to the mover of a decode worker.
pub type DestinationRing = Ring<DestinationCommand>;
/// Reports of movers to `ctl`.
pub type Reports = Receiver<crate::transfer::mover::Report>;
