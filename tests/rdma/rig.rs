//! One end of a test: a device, memory, and a queue pair.

use baton::kv::region::Region;
use baton::sys::verbs::{
    self, Access, Capacity, Chain, Completion, CompletionQueue, Completions, Device, Domain,
    GidKind, QueuePair, Registration, Route,
};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// No wait of a test is longer; a loaded guest answers within a second.
pub const PATIENCE: Duration = Duration::from_secs(30);
pub const REGION_BYTES: usize = 8 << 20;

pub struct Node {
    pub device: Arc<Device>,
    pub region: Arc<Region>,
    pub registration: Arc<Registration>,
    pub route: Route,
    pub pair: QueuePair,
    pub sent: CompletionQueue,
    pub received: CompletionQueue,
    completions: Completions,
}

impl Node {
    /// An end that writes.
    pub fn source() -> Node {
        Node::new(false)
    }

    /// An end that is written to.
    pub fn destination() -> Node {
        Node::new(true)
    }

    fn new(takes_writes: bool) -> Node {
        let (name, route) = first_route();
        let device = Device::open(&name).expect("it was listed");
        let domain = Domain::new(&device).expect("a domain");
        let region = Arc::new(Region::new(c"rdma-test", REGION_BYTES).expect("memory"));
        let access = Access { remote_write: takes_writes, relaxed_ordering: true };
        let registration =
            Registration::new(&domain, &region, 0..region.len(), access).expect("registered");
        let sent = CompletionQueue::new(&device, 512).expect("a queue");
        let received = CompletionQueue::with_events(&device, 64).expect("a queue");
        let wanted = Capacity { requests: 320, receives: 32, pieces: 8, inline: 64 };
        let pair =
            QueuePair::new(&domain, &sent, &received, wanted, takes_writes).expect("a queue pair");
        let granted = pair.capacity();
        assert!(
            granted.requests >= 320 && granted.pieces >= 8 && granted.inline >= 64,
            "{granted:?}"
        );
        let completions = Completions::new(1);
        let registration = Arc::new(registration);
        Node { device, region, registration, route, pair, sent, received, completions }
    }

    pub fn chain(&self, requests: usize, pieces: usize) -> Chain {
        Chain::new(std::slice::from_ref(&self.registration), requests, pieces)
    }

    /// Writes the whole region, in words, since an emulated processor is slow.
    pub fn fill(&self, byte: impl Fn(usize) -> u8) {
        for at in (0..REGION_BYTES).step_by(8) {
            let word = u64::from_le_bytes(std::array::from_fn(|i| byte(at + i)));
            self.region.word(at).store(word, Ordering::Relaxed);
        }
    }

    /// Reads the whole region.
    pub fn memory(&self) -> Vec<u8> {
        let words =
            (0..REGION_BYTES).step_by(8).map(|at| self.region.word(at).load(Ordering::Relaxed));
        words.flat_map(u64::to_le_bytes).collect()
    }

    #[track_caller]
    pub fn await_sent(&mut self) -> Completion {
        let begun = Instant::now();
        while self.sent.poll(&mut self.completions).expect("the queue is sound") == 0 {
            assert!(begun.elapsed() < PATIENCE, "no completion");
            std::thread::yield_now();
        }
        self.completions.iter().next().expect("one was taken")
    }

    pub fn none_sent(&mut self) -> bool {
        self.sent.poll(&mut self.completions).expect("the queue is sound") == 0
    }
}

/// Differs from place to place and from seed to seed.
pub fn pattern(seed: usize, at: usize) -> u8 {
    let mixed = (at as u64 ^ (seed as u64) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8
}

/// The first address that can be used; of RoCE v2 one of IPv4.
fn first_route() -> (String, Route) {
    let devices = verbs::list().expect("there are verbs");
    for device in devices.into_iter().flatten() {
        for port in device.ports.iter().filter(|port| port.active) {
            let usable = port.addresses.iter().find(|address| match address.kind {
                GidKind::RoceV2 => address.gid.to_ipv4_mapped().is_some(),
                kind => kind == GidKind::InfiniBand,
            });
            if let Some(address) = usable {
                return (device.name.clone(), Route::new(port, address));
            }
        }
    }
    panic!("no RDMA device with an address that can be used");
}
