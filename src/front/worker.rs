//! A worker of this process as `ctl` sees it: free slots, rings to its engine and mover, and what must be
//! remembered of a slot while a request is in it.
//!
//! Thread: `ctl`. Invariant: a command that finds its ring full waits in order in a queue bounded by the
//! worker's slots, and goes out at the next turn; none is lost.

use crate::cause::Cause;
use crate::ids::{Generation, Room, SlotId, WorkerId};
use crate::kv::layout::KvLayout;
use crate::sched::mailbox::Command;
use crate::stdx::bell::Bell;
use crate::stdx::planted::is_planted;
use crate::transfer::command::{DestinationCommand, SourceCommand};
use crate::transfer::manager::destination::Asked;
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

/// A bounded ring with a queue behind it for the moments when it is full.
#[derive(Debug)]
pub struct Ring<T> {
    ring: Sender<T>,
    bell: Arc<Bell>,
    waiting: VecDeque<T>,
}

impl<T> Ring<T> {
    /// A ring whose reader listens to `bell`.
    pub fn new(ring: Sender<T>, bell: Arc<Bell>) -> Ring<T> {
        Ring { ring, bell, waiting: VecDeque::new() }
    }

    /// Sends behind everything sent before.
    pub fn send(&mut self, item: T) {
        self.waiting.push_back(item);
        self.flush();
    }

    /// Sends what waits, as far as there is room. True when nothing waits any more.
    pub fn flush(&mut self) -> bool {
        while let Some(item) = self.waiting.pop_front() {
            match self.ring.try_send(item) {
                Ok(()) => self.bell.ring(),
                Err(TrySendError::Full(item) | TrySendError::Disconnected(item)) => {
                    self.waiting.push_front(item);
                    self.bell.ring();
                    return false;
                }
            }
        }
        true
    }
}

/// What a slot's request promised to the other leg.
#[derive(Clone, Copy, Debug)]
pub struct Tenant {
    /// Which use of the slot.
    pub generation: Generation,
    /// What both legs must agree on.
    pub prompt: Prompt,
    /// When it fails.
    pub deadline: Instant,
    /// How its KV comes, once a decode worker has asked for it.
    pub transport: Option<Transport>,
    /// Tokens of the prompt that it has not asked for, since it holds them.
    pub prefix: u32,
}

impl Tenant {
    /// What a decode worker asks of whom reads its prompt.
    pub fn asked(&self, room: Room) -> Asked {
        Asked { room, prompt: self.prompt, deadline: self.deadline }
    }
}

/// The part that all roles share.
#[derive(Debug)]
pub struct Worker {
    /// Its index in this process.
    pub id: WorkerId,
    /// To its engine.
    pub engine: Ring<Command>,
    /// Slots and their states.
    pub status: Arc<StatusTable>,
    /// KV and page lists.
    pub memory: Memory,
    /// Where RDMA NICs have it registered.
    pub rails: Option<Arc<Rails>>,
    free: Vec<SlotId>,
    tenants: Vec<Option<Tenant>>,
}

impl Worker {
    /// A worker with all slots free.
    pub fn new(
        id: WorkerId,
        engine: Ring<Command>,
        status: Arc<StatusTable>,
        memory: Memory,
    ) -> Worker {
        let slots = status.slots() as u32;
        Worker {
            id,
            engine,
            status,
            memory,
            rails: None,
            free: (0..slots).rev().map(SlotId).collect(),
            tenants: (0..slots).map(|_| None).collect(),
        }
    }

    /// Slots that no request is in.
    pub fn free_slots(&self) -> usize {
        self.free.len()
    }

    /// Requests it can hold.
    pub fn slots(&self) -> usize {
        self.tenants.len()
    }

    /// Tokens that the whole pool holds.
    pub fn tokens(&self) -> usize {
        self.memory.pages as usize * self.memory.layout.page_size as usize
    }

    /// Where KV lies.
    pub fn layout(&self) -> &KvLayout {
        &self.memory.layout
    }

    /// Page lists by slot.
    pub fn lists(&self) -> &PageLists {
        &self.memory.lists
    }

    /// A slot for a new request, in Bootstrapping.
    pub fn take_slot(&mut self, prompt: Prompt, deadline: Instant) -> Option<Slot> {
        let id = self.free.pop()?;
        let generation = self.status.open(id);
        self.tenants[id.index()] =
            Some(Tenant { generation, prompt, deadline, transport: None, prefix: 0 });
        Some(Slot { id, generation })
    }

    /// What is remembered of this use of a slot.
    pub fn tenant(&self, slot: Slot) -> Option<&Tenant> {
        self.tenants[slot.id.index()].as_ref().filter(|tenant| tenant.generation == slot.generation)
    }

    /// A decode worker has asked for the KV of this use of a slot, behind a prefix that it holds.
    pub fn expects(&mut self, slot: Slot, prefix: u32, transport: Option<Transport>) {
        if let Some(tenant) = self.tenants[slot.id.index()].as_mut()
            && tenant.generation == slot.generation
        {
            (tenant.transport, tenant.prefix) = (transport, prefix);
        }
    }

    /// The engine has given the request back: pages and lease have returned.
    pub fn release(&mut self, slot: Slot) {
        if self.tenant(slot).is_some() && !is_planted("slot is not given back") {
            self.tenants[slot.id.index()] = None;
            self.free.push(slot.id);
        }
    }

    /// Tells the engine to end the request, wherever it is.
    pub fn abort(&mut self, slot: Slot, cause: Cause) {
        if is_planted("abort is not passed on") {
            return;
        }
        let Slot { id: slot, generation } = slot;
        self.engine.send(Command::Abort { worker: self.id, slot, generation, cause });
    }
}

/// Rings to and from the mover of a prefill worker.
pub type SourceRing = Ring<SourceCommand>;
/// Rings to and from the mover of a decode worker.
pub type DestinationRing = Ring<DestinationCommand>;
/// What movers say to `ctl`.
pub type Reports = Receiver<crate::transfer::mover::Report>;
