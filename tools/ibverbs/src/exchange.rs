//! Connects queue pairs of the crate to Baton's queue pairs on one device.
#![allow(unsafe_code)]

use baton::kv::region::Region;
use baton::sys::verbs::{
    self, Access, Capacity, Chain, CompletionKind, CompletionQueue, Completions, Device, Domain,
    Endpoint, GidKind, LocalPiece, Marks, QueuePair, Registration, RemoteAddress, Route,
};
use ibverbs::{QueuePairEndpoint, ibv_access_flags, ibv_qp_type, ibv_wc};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The GID index of soft-RoCE in a guest. The crate counts the device's GIDs from 0.
const GID_INDEX: u32 = 1;
const PATIENCE: Duration = Duration::from_secs(20);
const WORDS: usize = 1024;
const RECEIVED: u64 = 7;
const SENT: u64 = 8;

/// Runs the exchanges, and panics if a message or completion is missing or wrong.
pub fn run() {
    let devices = ibverbs::devices().expect("verbs are available");
    let context = devices.iter().next().expect("a device").open().expect("the device opens");
    alone(&context);
    together(&context);
}

/// SEND and RECV between two of the crate's queue pairs.
fn alone(context: &ibverbs::Context) {
    let queue = context.create_cq(16, 0).expect("a queue");
    let domain = context.alloc_pd().expect("a domain");
    let made = || {
        let mut builder = domain.create_qp(&queue, &queue, ibv_qp_type::IBV_QPT_RC);
        builder.set_gid_index(GID_INDEX).build().expect("a queue pair")
    };
    let (one, other) = (made(), made());
    let (to_one, to_other) = (one.endpoint(), other.endpoint());
    let mut one = one.handshake(to_other).expect("connected");
    let mut other = other.handshake(to_one).expect("connected");
    let mut memory = domain.allocate::<u64>(2).expect("memory");
    memory[1] = 0x42;
    // SAFETY: the memory lives until both requests have completed.
    unsafe { other.post_receive(&mut memory, ..1, RECEIVED) }.expect("posted");
    // SAFETY: as above.
    unsafe { one.post_send(&mut memory, 1.., SENT) }.expect("posted");
    let mut ids = [await_crate(&queue).wr_id(), await_crate(&queue).wr_id()];
    ids.sort_unstable();
    assert_eq!((ids, memory[0]), ([RECEIVED, SENT], 0x42));
    println!("exchange: SEND and RECV between two queue pairs of the crate");
}

/// Baton's WRITE with an immediate goes into the crate's memory and consumes a receive of the
/// crate. The crate's SEND of no bytes consumes a receive of Baton.
fn together(context: &ibverbs::Context) {
    let (device, route) = first_route();
    let ours = Domain::new(&device).expect("a domain");
    let region = Arc::new(Region::new(c"exchange", WORDS * 8).expect("memory"));
    (0..WORDS)
        .for_each(|word| region.word(8 * word).store(word as u64 * 0x9e37_79b9, Ordering::Relaxed));
    let access = Access { remote_write: true, relaxed_ordering: false };
    let registration =
        Arc::new(Registration::new(&ours, &region, 0..region.len(), access).expect("registered"));
    let mut completions = CompletionQueue::new(&device, 16).expect("a queue");
    let wanted = Capacity { requests: 4, receives: 4, pieces: 1, inline: 0 };
    let mut pair =
        QueuePair::new(&ours, &completions, &completions, wanted, true).expect("a queue pair");
    // The crate starts its packet sequence at 0 and expects 0.
    let end = pair.open(&route, 0).expect("open");

    let queue = context.create_cq(16, 0).expect("a queue");
    let domain = context.alloc_pd().expect("a domain");
    let mut builder = domain.create_qp(&queue, &queue, ibv_qp_type::IBV_QPT_RC);
    builder.set_gid_index(GID_INDEX).set_access(
        ibv_access_flags::IBV_ACCESS_LOCAL_WRITE | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE,
    );
    let theirs = builder.build().expect("a queue pair");
    let at = theirs.endpoint();
    let gid = at.gid.expect("an address");
    let mut their_gid = [0; 16];
    their_gid[..8].copy_from_slice(&gid.subnet_prefix().to_be_bytes());
    their_gid[8..].copy_from_slice(&gid.interface_id().to_be_bytes());
    let told = QueuePairEndpoint { num: end.number, lid: end.lid, gid: Some(gid) };
    let mut theirs = theirs.handshake(told).expect("connected");
    pair.connect(&Endpoint { number: at.num, sequence: 0, gid: their_gid, ..end })
        .expect("connected");

    let mut memory = domain.allocate::<u64>(WORDS).expect("memory");
    // SAFETY: the memory lives until the receive has completed.
    unsafe { theirs.post_receive(&mut memory, ..1, RECEIVED) }.expect("posted");
    let mut chain = Chain::new(std::slice::from_ref(&registration), 2, 1);
    let to = RemoteAddress { address: memory.as_ptr() as u64, key: memory.rkey().key };
    let piece = |words: std::ops::Range<usize>| LocalPiece {
        registration: 0,
        offset: 8 * words.start,
        len: 8 * words.len() as u32,
    };
    chain.write(1, &[piece(0..WORDS / 2)], to, Marks::default());
    let behind = RemoteAddress { address: to.address + 8 * (WORDS / 2) as u64, ..to };
    let marks = Marks { signalled: true, immediate: Some(0xba70_0001), ..Marks::default() };
    chain.write(2, &[piece(WORDS / 2..WORDS)], behind, marks);
    pair.post(&mut chain).expect("posted");
    let written = await_ours(&mut completions);
    assert_eq!((written.id, written.outcome), (2, Ok(CompletionKind::Written)));
    let told = await_crate(&queue);
    // The crate returns the immediate in network byte order.
    let immediate = told.imm_data().map(u32::from_be);
    assert_eq!((told.wr_id(), immediate), (RECEIVED, Some(0xba70_0001)), "{told:?}");
    assert!((0..WORDS).all(|word| memory[word] == word as u64 * 0x9e37_79b9), "the bytes differ");
    println!("exchange: our WRITEs and their immediate with the crate");

    pair.post_receive(3).expect("posted");
    // SAFETY: as above.
    unsafe { theirs.post_send(&mut memory, ..0, SENT) }.expect("posted");
    let received = await_ours(&mut completions);
    assert_eq!(received.id, 3, "{received:?}");
    // A SEND carries no notice, so Baton's side gets only the number of its kind.
    assert!(matches!(received.outcome, Ok(CompletionKind::Other(_))), "{received:?}");
    assert_eq!(await_crate(&queue).wr_id(), SENT);
    println!("exchange: the crate's SEND with us");
}

fn await_crate(queue: &ibverbs::CompletionQueue<'_>) -> ibv_wc {
    let (begun, mut one) = (Instant::now(), [ibv_wc::default()]);
    loop {
        if let [found] = queue.poll(&mut one).expect("the queue can be polled") {
            assert!(found.is_valid(), "{:?}", found.error());
            return *found;
        }
        assert!(begun.elapsed() < PATIENCE, "no completion on the crate's side");
        std::thread::yield_now();
    }
}

fn await_ours(queue: &mut CompletionQueue) -> verbs::Completion {
    let (begun, mut one) = (Instant::now(), Completions::new(1));
    while queue.poll(&mut one).expect("the queue can be polled") == 0 {
        assert!(begun.elapsed() < PATIENCE, "no completion on our side");
        std::thread::yield_now();
    }
    one.iter().next().expect("a completion")
}

/// The device that the crate opens, and the route of its GID.
fn first_route() -> (Arc<Device>, Route) {
    let info =
        verbs::list().expect("verbs are available").into_iter().flatten().next().expect("a device");
    let port = info.ports.first().expect("a port");
    let address =
        port.addresses.iter().find(|address| address.index == GID_INDEX).expect("an address");
    assert_eq!(address.kind, GidKind::RoceV2, "{address:?}");
    let route = Route::new(port, address);
    (Device::open(&info.name).expect("the device opens"), route)
}
