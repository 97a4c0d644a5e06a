//! Both movers of one hand-off between a prefill and a decode worker. They copy tokens from source
//! pages to destination pages.

use baton::cause::Cause;
use baton::ids::{Generation, Room, SlotId};
use baton::kv::layout::KeyValue;
use baton::kv::lease::{Lease, MoverRight};
use baton::sched::worker::KvMemory;
use baton::transfer::aux::AuxRecord;
use baton::transfer::command::{DestinationCommand, LeaseEnd, SourceCommand};
use baton::transfer::pages::PageLists;
use baton::transfer::status::{Move, StatusTable};
use baton::transfer::target::Target;
use crossbeam_channel::{Receiver, Sender};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// One worker's side.
pub struct Side<C> {
    pub commands: Receiver<C>,
    pub ends: Sender<LeaseEnd>,
    pub status: Arc<StatusTable>,
    pub lists: Arc<PageLists>,
    pub kv: KvMemory,
}

pub struct TestMover {
    source: Side<SourceCommand>,
    destination: Side<DestinationCommand>,
    right: MoverRight,
    begun: HashMap<SlotId, (Generation, Target, Lease)>,
    expected: HashMap<SlotId, (Generation, Room, Lease)>,
    /// The next token of each destination slot.
    next: HashMap<SlotId, u32>,
    /// Number of copied tokens.
    pub copied: u32,
    /// Source commands taken per step; 0 stops the source.
    pub speed: usize,
    /// Whether the source's slot fails at its next chunk.
    pub corrupt: bool,
    /// Changes an aux record in transit.
    pub spoil: fn(&mut AuxRecord),
}

/// The pages of a slot.
struct SideMemory<'a> {
    kv: &'a KvMemory,
    lists: &'a PageLists,
    slot: SlotId,
}

impl SideMemory<'_> {
    fn word(&self, position: u32, layer: u32, which: KeyValue) -> &AtomicU64 {
        let layout = &self.kv.layout;
        let page = self.lists.page(self.slot, (position / layout.page_size) as usize);
        let at = layout.offset(page, layer, which, 0, position % layout.page_size);
        self.kv.region.word(at as usize)
    }
}

impl TestMover {
    pub fn new(source: Side<SourceCommand>, destination: Side<DestinationCommand>) -> TestMover {
        TestMover {
            source,
            destination,
            right: MoverRight::for_mover_thread(),
            begun: HashMap::new(),
            expected: HashMap::new(),
            next: HashMap::new(),
            copied: 0,
            speed: usize::MAX,
            corrupt: false,
            spoil: |_| (),
        }
    }

    pub fn step(&mut self) {
        while let Ok(command) = self.destination.commands.try_recv() {
            self.take_destination(command);
        }
        for _ in 0..self.speed {
            let Ok(command) = self.source.commands.try_recv() else { break };
            self.take_source(command);
        }
    }

    /// Whether every lease has ended.
    pub fn is_empty(&self) -> bool {
        self.begun.is_empty() && self.expected.is_empty()
    }

    fn take_destination(&mut self, command: DestinationCommand) {
        match command {
            DestinationCommand::Expect { slot, generation, room, tokens, lease, .. } => {
                self.next.insert(slot, tokens.start);
                self.expected.insert(slot, (generation, room, lease));
                if !self.destination.status.is_open(slot, generation) {
                    self.end_expected(slot, generation, None);
                }
            }
            DestinationCommand::Cancel { slot, generation } => {
                self.end_expected(slot, generation, None)
            }
            _ => panic!("this mover has no sessions"),
        }
    }

    fn take_source(&mut self, command: SourceCommand) {
        match command {
            SourceCommand::Begin { slot, generation, target, lease } => {
                self.begun.insert(slot, (generation, target, lease));
                if !self.source.status.is_open(slot, generation) {
                    self.end_begun(slot, generation);
                }
            }
            SourceCommand::Chunk { slot, generation, tokens, last } => {
                self.copy(slot, generation, tokens, last);
            }
            SourceCommand::Cancel { slot, generation } => self.end_begun(slot, generation),
            _ => panic!("this mover has no sessions"),
        }
    }

    fn copy(
        &mut self,
        slot: SlotId,
        generation: Generation,
        tokens: Range<u32>,
        last: Option<AuxRecord>,
    ) {
        let Some(&(begun, target, _)) = self.begun.get(&slot) else { return };
        if begun != generation || !self.source.status.is_open(slot, generation) {
            return;
        }
        let _ = self.source.status.advance(slot, generation, Move::Start);
        let open = self.expected.get(&target.slot).is_some_and(|(generation, room, _)| {
            (*generation, *room) == (target.generation, target.room)
        });
        if !open || std::mem::take(&mut self.corrupt) {
            let cause = if open { Cause::Corrupt } else { Cause::PeerLost };
            let _ = self.source.status.advance(slot, generation, Move::Fail(cause));
            self.end_begun(slot, generation);
            return;
        }
        let _ = self.destination.status.advance(target.slot, target.generation, Move::Start);
        let next = self.next.insert(target.slot, tokens.end);
        assert_eq!(
            next,
            Some(tokens.start),
            "a transfer must not write what the destination already holds"
        );
        self.copied += tokens.end - tokens.start;
        self.copy_tokens(slot, target.slot, tokens);
        if let Some(mut aux) = last {
            aux.generation = target.generation.0;
            (self.spoil)(&mut aux);
            self.end_expected(target.slot, target.generation, Some(aux));
            let _ = self.destination.status.advance(target.slot, target.generation, Move::Finish);
            let _ = self.source.status.advance(slot, generation, Move::Finish);
            self.end_begun(slot, generation);
        }
    }

    fn copy_tokens(&self, source: SlotId, destination: SlotId, tokens: Range<u32>) {
        let from = SideMemory { kv: &self.source.kv, lists: &self.source.lists, slot: source };
        let (kv, lists) = (&self.destination.kv, &self.destination.lists);
        let to = SideMemory { kv, lists, slot: destination };
        for position in tokens {
            for layer in 0..kv.layout.layers {
                for which in [KeyValue::Key, KeyValue::Value] {
                    let value = from.word(position, layer, which).load(Relaxed);
                    to.word(position, layer, which).store(value, Relaxed);
                }
            }
        }
    }

    fn end_begun(&mut self, slot: SlotId, generation: Generation) {
        if self.begun.get(&slot).is_some_and(|(begun, ..)| *begun == generation) {
            let (_, _, lease) = self.begun.remove(&slot).unwrap();
            self.source
                .ends
                .try_send(LeaseEnd { ended: lease.end(&self.right), aux: None })
                .unwrap();
        }
    }

    fn end_expected(&mut self, slot: SlotId, generation: Generation, aux: Option<AuxRecord>) {
        if self.expected.get(&slot).is_some_and(|(expected, ..)| *expected == generation) {
            let (_, _, lease) = self.expected.remove(&slot).unwrap();
            self.destination
                .ends
                .try_send(LeaseEnd { ended: lease.end(&self.right), aux })
                .unwrap();
        }
    }
}
