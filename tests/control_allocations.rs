//! After a warm-up, control messages between two workers need no allocation. The test covers every
//! step: encode, seal, frame, send, receive, unframe, open, decode.
#![allow(unsafe_code)]

use baton::ids::{Generation, PageId, Peer, Role, Room, SessionGeneration, SlotId};
use baton::net::{ConnId, Event, Reactor, Timers};
use baton::wire::auth::{ClusterKey, Side};
use baton::wire::link::{self, ControlLink};
use baton::wire::message::{Destination, Done, Hello, MINOR, Message, PageList, TransferId};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::{Duration, Instant};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const ID: TransferId = TransferId { room: Room(1), slot: SlotId(2), generation: Generation(3) };
const PATIENCE: Duration = Duration::from_secs(20);

struct Node {
    reactor: Reactor,
    link: ControlLink,
    conn: ConnId,
}

impl Node {
    fn new(side: Side, reactor: Reactor, conn: ConnId) -> Node {
        let hello = Hello {
            peer: Peer::default(),
            connection: 1,
            capabilities: 0,
            software: [0; 3],
            ranks: 1,
            role: Role::Mixed,
            nonce: [side as u8; 32],
            minor: MINOR,
            keys: Default::default(),
        };
        let key = ClusterKey::new(&[5; 32]).unwrap();
        Node { reactor, link: ControlLink::new(side, hello, Some(key)), conn }
    }

    fn flush(&mut self) {
        self.reactor.send(self.conn, self.link.transmit()).unwrap();
        self.link.transmitted(self.link.transmit().len());
        // The other one is asked for it before this one waits again.
        self.reactor.poll(Some(Instant::now())).unwrap();
    }

    /// Polls once; messages that came.
    fn turn(&mut self) -> usize {
        self.reactor.poll(Some(Instant::now() + Duration::from_millis(1))).unwrap();
        let mut messages = 0;
        while let Some(event) = self.reactor.next_event() {
            let Event::Received(conn) = event else { continue };
            let input = self.reactor.received(conn);
            let mut taken = 0;
            while taken < input.len() {
                taken += self.link.handle_input(&input[taken..]).unwrap();
                if let Some(link::LinkEvent::Message(_)) = self.link.poll_event().unwrap() {
                    messages += 1;
                }
            }
            self.reactor.consume(conn, taken);
        }
        messages
    }
}

#[test]
fn a_warm_control_plane_allocates_nothing() {
    let (mut theirs, mut ours) = (Reactor::new().unwrap(), Reactor::new().unwrap());
    let loopback: std::net::SocketAddr = "127.0.0.1:0".parse().unwrap();
    let listener = theirs.listen(&loopback.into(), 1).unwrap();
    let address = theirs.local_address(listener).unwrap().into();
    let dialled = ours.connect(&address, Instant::now() + PATIENCE).unwrap();
    let accepted = loop {
        theirs.poll(None).unwrap();
        if let Some(Event::Accepted { conn, .. }) = theirs.next_event() {
            break conn;
        }
    };
    let mut acceptor = Node::new(Side::Acceptor, theirs, accepted);
    let mut dialer = Node::new(Side::Dialer, ours, dialled);
    let deadline = Instant::now() + PATIENCE;
    while dialer.link.peer().is_none() || acceptor.link.peer().is_none() {
        assert!(Instant::now() < deadline);
        for node in [&mut dialer, &mut acceptor] {
            node.flush();
            node.turn();
        }
    }

    let pages = [PageId(9); 1024];
    let destination = Message::Destination(Destination {
        id: ID,
        session: SessionGeneration(1),
        tokens: 16 * 1024,
        prefix_tokens: 0,
        ids_hash: [0; 16],
        aux_index: 0,
        deadline_ms: 1,
        pages: PageList::from(&pages[..]),
    });
    let mut timers = Timers::new(4);
    let mut round = || {
        dialer.link.send(&destination).unwrap();
        dialer.link.ping(0, 1).unwrap();
        dialer.flush();
        let timer = timers.schedule(deadline, ()).unwrap();
        while acceptor.turn() == 0 {
            assert!(Instant::now() < deadline);
        }
        timers.cancel(timer);
        acceptor.link.send(&Message::Done(Done { id: ID })).unwrap();
        acceptor.flush();
        while dialer.turn() == 0 {
            assert!(Instant::now() < deadline);
        }
    };
    (0..10).for_each(|_| round());
    let before = ALLOCATIONS.get();
    (0..100).for_each(|_| round());
    assert_eq!(ALLOCATIONS.get() - before, 0);
}
