//! The decode engine: it leases pages, waits for their KV, and compares it with what prefill wrote.

use crate::link::Link;
use crate::worker::{self, Engine, LINK, SESSIONS, Worker, check};
use crate::{REQUESTS, Request};
use baton::cause::Cause;
use baton::ids::SessionGeneration;
use baton::transfer::command::DestinationCommand;
use baton::transfer::manager::destination::{
    DestinationEffects, DestinationManager, DestinationSetup, MissingPages, PromptRequest,
};
use baton::transfer::manager::{identity::Mismatch, rooms::Slot};
use baton::transfer::mover::{Mover, destination::DestinationMover};
use baton::transfer::status::State;
use baton::transfer::target::SessionId;
use baton::transfer::transport::DestinationBinding;
use baton::transfer::transport::shm::{PeerShape, ShmCursor, SourceDescriptors};
use baton::wire::message::{Message, Rank, Transport};
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The address of the only source.
const SOURCE: &str = "prefill";

struct Decode {
    manager: DestinationManager<u32, &'static str>,
    side: Side,
}

/// The state that the manager's effects change.
struct Side {
    worker: Worker<DestinationCommand>,
    is_dialled: bool,
    /// This side of the transport, and that of the source, until the source accepts the session.
    shared: Option<(ShmCursor, SourceDescriptors)>,
    bound: Option<(SessionId, SessionGeneration, Result<Box<DestinationBinding>, String>)>,
    ready: Option<SessionId>,
}

pub fn run(link: Link, until: Instant) -> io::Result<()> {
    let layout = worker::DESTINATION_LAYOUT;
    let (worker, waiter) = Worker::new(layout, link, |links, memory, right| Mover {
        sources: vec![],
        destinations: vec![DestinationMover::new(links, memory, SESSIONS, right)],
    })?;
    let cursor = ShmCursor::new()?;
    let shown = cursor.descriptors(&waiter.doorbell)?;
    let both = [shown.cursor.as_fd(), shown.doorbell.as_fd()];
    let [pool, lists, ring] = worker.link.exchange(&both)?;
    let shared = Some((cursor, SourceDescriptors { pool, lists, ring }));
    let (identity, status) = (worker.identity.clone(), worker.handle.status.clone());
    let manager = DestinationManager::new(identity, status, SESSIONS);
    let side = Side { worker, is_dialled: false, shared, bound: None, ready: None };
    let mut decode = Decode { manager, side };
    REQUESTS.iter().try_for_each(|request| decode.serve(request, until))?;
    // Prefill ends the link when it has the last messages.
    decode.wait_for(until, |decode| decode.side.worker.link.has_ended.then_some(()))
}

impl Decode {
    fn serve(&mut self, request: &Request, until: Instant) -> io::Result<()> {
        let &Request { room, tokens, is_cancelled } = request;
        let slot @ Slot { id, generation } = self.side.worker.open_slot();
        let asked = PromptRequest { room, prompt: worker::prompt(tokens), deadline: until };
        let entered = self.manager.enter(slot, asked, &SOURCE, Instant::now(), &mut self.side);
        entered.map_err(|cause| io::Error::other(cause.name()))?;
        let session = self.wait_for(until, |decode| decode.side.ready.take())?;
        let worker = &mut self.side.worker;
        let pages = worker.take_pages(tokens)?;
        let lease = worker.pool.lease_to_write(id, generation, &pages);
        worker.handle.expect(id, generation, (session, room), 0..tokens, &pages, lease);
        let missing = MissingPages { prefix: 0, pages: &pages };
        self.manager.expecting(slot, missing, Instant::now(), &mut self.side);
        if is_cancelled {
            let state = |decode: &mut Decode| Some(decode.side.worker.status().state);
            self.wait_for(until, |decode| state(decode).filter(|now| *now == State::Transferring))?;
            self.side.worker.handle.fail(id, generation, Cause::ClientGone);
        }
        let (status, end) = self.wait_for(until, |decode| decode.side.worker.poll_end())?;
        self.manager.leave(slot, status.cause, Instant::now(), &mut self.side);
        let worker = &mut self.side.worker;
        let mut words = worker.kv_words(room, 0..tokens, &pages);
        words.retain(|&(at, value)| worker.memory.region.word(at).load(Ordering::Relaxed) != value);
        println!("decode: {room:?}, {} words differ, {:?}", words.len(), status.state);
        let aux = end.aux.filter(|aux| aux.belongs_to(room, generation));
        let is_whole =
            words.is_empty() && aux.is_some_and(|aux| aux.payload == worker::AUX_PAYLOAD);
        check(status.cause == is_cancelled.then_some(Cause::ClientGone), "decode: another end")?;
        check(is_whole != is_cancelled, "decode: the KV or the aux record differs")?;
        worker.return_pages(end, &pages)
    }
}

impl Engine for Decode {
    fn turn(&mut self, now: Instant) -> io::Result<()> {
        let Decode { manager, side } = self;
        while let Some(parts) = side.worker.link.receive() {
            let message = Message::decode(parts.parts(), None).map_err(io::Error::other)?;
            message.inspect(|message| manager.receive(LINK, message, now, side));
        }
        if std::mem::take(&mut side.is_dialled) {
            manager.link_up(&SOURCE, LINK, now, side);
        }
        if let Some((session, generation, half)) = side.bound.take() {
            manager.bound(session, generation, half, now, side);
        }
        while let Ok(report) = side.worker.reports.try_recv() {
            manager.report(report, now, side);
        }
        if side.worker.link.has_ended {
            manager.link_down(LINK, Cause::PeerLost, now, side);
        }
        manager.expire(now, side);
        Ok(())
    }
}

impl DestinationEffects<u32, &'static str> for Side {
    fn send(&mut self, _: u32, message: &Message<'_>) {
        self.worker.link.send(message);
    }

    fn mover(&mut self, command: DestinationCommand) {
        self.worker.command(command);
    }

    fn dial(&mut self, _: &&'static str) {
        self.is_dialled = true;
    }

    fn hang_up(&mut self, _: u32) {
        self.worker.link.has_ended = true;
    }

    fn make_rank(&mut self, _: SessionId, _: &&'static str, without: &[Transport]) -> Option<Rank> {
        (!without.contains(&Transport::Shm)).then(|| self.worker.rank())
    }

    fn bind(&mut self, _: u32, session: SessionId, how: DestinationSetup<'_>) {
        let Some((cursor, from)) = self.shared.take() else { return };
        let shape = PeerShape {
            pool_bytes: how.welcome.ranks[0].regions.kv,
            pages: how.welcome.kv.pages,
            // Both workers have lists of one shape. A real source sends its shape.
            lists: self.worker.memory.lists.shape(),
        };
        let half = cursor.connect(from, &shape, how.layout.page_size, how.template);
        let half = half.map(|half| Box::new(half) as _).map_err(|error| error.to_string());
        self.bound = Some((session, how.welcome.session, half));
    }

    fn ready(&mut self, _: Slot, session: SessionId) {
        self.ready = Some(session);
    }

    fn refused(&mut self, _: &&'static str, mismatch: &Mismatch) {
        eprintln!("decode: session refused: {mismatch}");
    }

    // The offer of shared memory holds nothing that must be returned.
    fn withdraw(&mut self, _: SessionId) {}

    // No request of this example asks for logprobs of its prompt.
    fn record(&mut self, _: Slot, _: &[u8]) {}

    // The engine polls the status table.
    fn failed(&mut self, _: Slot, _: Cause) {}

    // Only for RDMA.
    fn left_out(&mut self, _: &&'static str, _: Transport, _: Duration) {}
}
