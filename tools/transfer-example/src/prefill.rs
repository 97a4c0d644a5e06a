//! The prefill engine: it computes a prompt in chunks and hands over each chunk.

use crate::link::Link;
use crate::worker::{self, Engine, LINK, SESSIONS, Worker, check};
use crate::{REQUESTS, Request};
use baton::cause::Cause;
use baton::ids::{DecodeAllocation, PageId};
use baton::transfer::aux::AuxRecord;
use baton::transfer::command::SourceCommand;
use baton::transfer::manager::source::{SourceEffects, SourceManager, SourceSetup};
use baton::transfer::manager::{identity::Mismatch, rooms::Slot};
use baton::transfer::mover::{Mover, source::SourceMover};
use baton::transfer::target::{SessionId, Target};
use baton::transfer::transport::SourceBinding;
use baton::transfer::transport::shm::{DestinationDescriptors, ShmRing, SourceDescriptors};
use baton::wire::message::{Message, Transport};
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Tokens that are computed at a time.
const CHUNK: u32 = 32;

struct Prefill {
    manager: SourceManager<u32>,
    side: Side,
}

/// The state that the manager's effects change.
struct Side {
    worker: Worker<SourceCommand>,
    /// This side of the transport, until the destination announces the session.
    binding: Option<Box<SourceBinding>>,
    announced: Option<SessionId>,
    granted: Option<Target>,
}

pub fn run(link: Link, until: Instant) -> io::Result<()> {
    let (worker, _) = Worker::new(worker::SOURCE_LAYOUT, link, |links, memory, right| Mover {
        sources: vec![SourceMover::new(links, memory, SESSIONS, right)],
        destinations: vec![],
    })?;
    let ring = ShmRing::new()?;
    let SourceDescriptors { pool, lists, ring: offers } = ring.descriptors(&worker.memory)?;
    let [cursor, doorbell] =
        worker.link.exchange(&[pool.as_fd(), lists.as_fd(), offers.as_fd()])?;
    let half = ring.connect(DestinationDescriptors { cursor, doorbell })?;
    let (identity, status) = (worker.identity.clone(), worker.handle.status.clone());
    let (allowed, allocation) = (vec![Transport::Shm], DecodeAllocation::Early);
    let manager = SourceManager::new(identity, allowed, allocation, status, SESSIONS);
    let side = Side { worker, binding: Some(Box::new(half)), announced: None, granted: None };
    let mut prefill = Prefill { manager, side };
    REQUESTS.iter().try_for_each(|request| prefill.serve(request, until))
}

impl Prefill {
    fn serve(&mut self, request: &Request, until: Instant) -> io::Result<()> {
        let &Request { room, tokens, is_cancelled } = request;
        let slot @ Slot { id, generation } = self.side.worker.open_slot();
        let prompt = worker::prompt(tokens);
        let entered = self.manager.enter(room, slot, prompt, Instant::now(), &mut self.side);
        entered.map_err(|cause| io::Error::other(cause.name()))?;
        let target = self.wait_for(until, |prefill| prefill.side.granted.take())?;
        let worker = &mut self.side.worker;
        let pages = worker.take_pages(tokens)?;
        let lease = worker.pool.lease(id, generation, &pages);
        worker.handle.begin(id, generation, target, &pages, lease);
        let mut computed = target.prefix;
        // The client of a cancelled request leaves before the last chunk.
        while computed < tokens && !(is_cancelled && computed + CHUNK >= tokens) {
            let chunk = computed..tokens.min(computed + CHUNK);
            computed = chunk.end;
            self.wait_for(until, |prefill| prefill.side.worker.handle.has_room().then_some(()))?;
            let worker = &self.side.worker;
            for (at, value) in worker.kv_words(room, chunk.clone(), &pages) {
                worker.memory.region.word(at).store(value, Ordering::Relaxed);
            }
            let aux = (computed == tokens).then(|| AuxRecord::new(room, worker::AUX_PAYLOAD));
            worker.handle.chunk(id, generation, chunk, aux);
        }
        let (status, end) = self.wait_for(until, |prefill| prefill.side.worker.poll_end())?;
        self.manager.leave(slot, status.cause, Instant::now(), &mut self.side);
        println!("prefill: {room:?}, {computed} of {tokens} tokens computed, {:?}", status.state);
        check(status.cause == is_cancelled.then_some(Cause::ClientGone), "prefill: another end")?;
        self.side.worker.return_pages(end, &pages)
    }
}

impl Engine for Prefill {
    fn turn(&mut self, now: Instant) -> io::Result<()> {
        let Prefill { manager, side } = self;
        while let Some(parts) = side.worker.link.receive() {
            let message = Message::decode(parts.parts(), None).map_err(io::Error::other)?;
            message.inspect(|message| manager.receive(LINK, message, now, side));
        }
        if let Some(session) = side.announced.take() {
            let parts = manager.mover_generation(session).zip(side.binding.take());
            if let Some((generation, binding)) = parts {
                side.worker.command(SourceCommand::Open { session, generation, binding });
                manager.bound(session, Ok(side.worker.rank()), side);
            }
        }
        while let Ok(report) = side.worker.reports.try_recv() {
            manager.report(report, now, side);
        }
        manager.expire(now, side);
        // With several links, `link_down` fails the rooms of this one.
        check(!side.worker.link.has_ended, "prefill: the other process is gone")
    }
}

impl SourceEffects<u32> for Side {
    fn send(&mut self, _: u32, message: &Message<'_>) {
        self.worker.link.send(message);
    }

    fn mover(&mut self, command: SourceCommand) {
        self.worker.command(command);
    }

    fn bind(&mut self, _: u32, session: SessionId, _: SourceSetup<'_>) {
        self.announced = Some(session);
    }

    fn granted(&mut self, _: Slot, target: Target, _: usize, _: &[PageId]) {
        self.granted = Some(target);
    }

    fn hang_up(&mut self, _: u32) {
        self.worker.link.has_ended = true;
    }

    fn refused(&mut self, _: u32, mismatch: &Mismatch) {
        eprintln!("prefill: session refused: {mismatch}");
    }

    // Only for late allocation.
    fn awaited(&mut self, _: Slot) {}

    // The engine polls the status table.
    fn failed(&mut self, _: Slot, _: Cause) {}
}
