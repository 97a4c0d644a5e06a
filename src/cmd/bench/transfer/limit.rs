//! The bare limits: the time to move the same bytes with the minimum of work. Each run is between
//! two hand-offs.
//!
//! shm: the same number of threads copy with streaming stores between two contiguous regions; for
//! few bytes, a spinning thread signals by a flag. tcp: the same number of sockets, contiguous
//! buffers. rdma: the same number of queue pairs; each work request writes one item, a chain has
//! one doorbell, and contiguous memory is cut into slabs like a pool.

use super::case::Case;
use crate::kv::region::{PeerRegion, Region};
use crate::net::Entropy;
use crate::sys::clock::monotonic_ns;
use crate::sys::verbs::{
    Access, Capacity, Chain, CompletionQueue, Completions, Domain, Endpoint, LocalPiece, Marks,
    QueuePair, Registration, RemoteAddress, Route,
};
use crate::transfer::copy::{Pull, store_fence};
use crate::transfer::copy_pool::CopyPool;
use crate::transfer::plan::Run;
use crate::transfer::transport::rdma::{Nic, Slabs};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Up to this size, the signal takes longer than the copy, so the limit uses a ring.
pub const RING_BYTES_MAX: u64 = 16 << 10;

/// The limit of shm: copies inside this process.
#[derive(Debug)]
pub struct CopyLimit {
    from: PeerRegion,
    to: Region,
    bytes: u64,
    copiers: CopyPool,
    lanes: u64,
    flag: Option<Flag>,
}

/// A thread that answers a signal with the time of its answer.
#[derive(Debug)]
struct Flag {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default, Debug)]
struct Shared {
    asked: AtomicU64,
    /// Whether a signal follows soon.
    awake: AtomicBool,
    said: AtomicU64,
    at: AtomicU64,
    over: AtomicBool,
}

impl CopyLimit {
    /// Creates regions of the size of the case's pools, and this number of copy threads.
    pub fn new(case: &Case, lanes: u16) -> io::Result<CopyLimit> {
        let source = Region::new(c"baton-bare", case.pool_bytes() as usize)?;
        let to = Region::new(c"baton-bare", case.pool_bytes() as usize)?;
        for region in [&source, &to] {
            (0..region.len())
                .step_by(4096)
                .for_each(|at| region.word(at).store(1, Ordering::Relaxed));
        }
        let from = PeerRegion::map(source.descriptor(), source.len())?;
        let flag = (case.bytes() <= RING_BYTES_MAX).then(Flag::start).transpose()?;
        let (copiers, lanes) = (CopyPool::new(lanes.into())?, lanes.into());
        Ok(CopyLimit { from, to, bytes: case.bytes(), copiers, lanes, flag })
    }

    /// Description of this limit, for the report.
    pub fn name(case: &Case, lanes: u16) -> String {
        match (case.bytes(), lanes) {
            (..=RING_BYTES_MAX, _) => "ring and streaming copy, two spinning threads".into(),
            (_, 1) => "streaming copy, one thread".into(),
            _ => format!("streaming copy, {lanes} threads"),
        }
    }

    /// Runs once. Returns nanoseconds.
    pub fn run(&self, run: u32) -> u64 {
        let rooms = self.from.len() as u64 - self.bytes + 1;
        // Each run uses other memory than the previous run, because that memory is in the CPU
        // caches.
        let at = u64::from(run) * self.bytes.next_multiple_of(4096) % rooms / 64 * 64;
        let begun = self.flag.as_ref().map_or_else(monotonic_ns, Flag::wait);
        // Several shares for each thread, so that no thread waits long for another.
        let shares = if self.lanes > 1 && self.flag.is_none() { 8 * self.lanes } else { 1 };
        let share = self.bytes.div_ceil(shares).next_multiple_of(64);
        self.copiers.share(shares as usize, |index| {
            let first = (share * index as u64).min(self.bytes);
            let bytes = share.min(self.bytes - first);
            let mut pull = Pull::new(&self.from, &self.to);
            pull.add(&Run { source: at + first, destination: at + first, bytes });
            pull.finish();
            store_fence();
        });
        monotonic_ns() - begun
    }
}

impl Flag {
    fn start() -> io::Result<Flag> {
        let shared = Arc::new(Shared::default());
        let theirs = shared.clone();
        let thread = thread::Builder::new().name("bare".into()).spawn(move || theirs.serve())?;
        Ok(Flag { shared, thread: Some(thread) })
    }

    /// Signals the thread. Returns the time of its answer.
    fn wait(&self) -> u64 {
        self.shared.awake.store(true, Ordering::Release);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
        let run = self.shared.said.load(Ordering::Acquire) + 1;
        // The thread spins already, so its wake-up is not measured.
        while self.shared.awake.load(Ordering::Acquire) {
            std::hint::spin_loop();
        }
        self.shared.asked.store(run, Ordering::Release);
        while self.shared.said.load(Ordering::Acquire) != run {
            std::hint::spin_loop();
        }
        self.shared.at.load(Ordering::Relaxed)
    }
}

impl Shared {
    fn serve(&self) {
        while !self.over.load(Ordering::Acquire) {
            if !self.awake.load(Ordering::Acquire) {
                thread::park();
                continue;
            }
            let run = self.said.load(Ordering::Relaxed) + 1;
            self.awake.store(false, Ordering::Release);
            while self.asked.load(Ordering::Acquire) != run {
                std::hint::spin_loop();
            }
            self.at.store(monotonic_ns(), Ordering::Relaxed);
            self.said.store(run, Ordering::Release);
        }
    }
}

impl Drop for Flag {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // This thread cannot panic.
            let _ = thread.join();
        }
    }
}

/// The limit of rdma, one end: as many queue pairs as the session has lanes, on the same NICs,
/// between contiguous memory.
#[derive(Debug)]
pub struct VerbsLimit {
    rails: Vec<VerbsRail>,
    taken: Completions,
    /// Start address of the other end's memory.
    peer: Option<u64>,
    bytes: u64,
    block: u64,
    patience: Duration,
}

#[derive(Debug)]
struct VerbsRail {
    lanes: Vec<VerbsLane>,
    // After the queue pairs, because their completions go into it.
    completions: CompletionQueue,
    ours: Slabs,
    theirs: Slabs,
    /// Remote keys of the other end's memory, one for each slab.
    keys: Vec<u32>,
}

#[derive(Debug)]
struct VerbsLane {
    pair: QueuePair,
    chain: Chain,
    room: u32,
    /// Numbers of work requests in the posted chains.
    chains: VecDeque<u32>,
    at: u64,
    end: u64,
}

/// The data that the other end needs to connect.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VerbsEnds {
    address: u64,
    rails: Vec<VerbsRailEnds>,
}

/// The data of one NIC that the other end needs.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct VerbsRailEnds {
    gid: [u8; 16],
    lid: u16,
    mtu: u16,
    /// Bytes of each slab of the memory except the last.
    slab_bytes: u64,
    /// Remote keys of the slabs.
    keys: Vec<u32>,
    /// Number and first sequence number of each queue pair.
    pairs: Vec<(u32, u32)>,
}

/// Maximum posted work requests of a lane, and work requests of one doorbell.
const UNDER_WAY: u32 = 512;
const CHAIN: usize = 64;
/// Value of `VerbsLane::at` when the lane has posted everything.
const OVER: u64 = u64::MAX;

impl VerbsLimit {
    /// Creates queue pairs, `lanes` on each NIC, and memory for the case's bytes. Also returns the
    /// data that the other end needs.
    pub fn new(
        case: &Case,
        lanes: u16,
        patience: Duration,
    ) -> Result<(VerbsLimit, VerbsEnds), String> {
        let limit = VerbsLimit::on(&Nic::choose(&[], &[])?, case, lanes, patience);
        limit.map_err(|error| format!("bare verbs: {error}"))
    }

    fn on(
        nics: &[Nic],
        case: &Case,
        lanes: u16,
        patience: Duration,
    ) -> io::Result<(VerbsLimit, VerbsEnds)> {
        let region = Arc::new(Region::new(c"baton-bare", case.bytes() as usize)?);
        let mut all_ends = VerbsEnds { address: region.base().as_ptr() as u64, rails: Vec::new() };
        let mut rails = Vec::new();
        for nic in nics {
            let (rail, ends) = VerbsRail::new(nic, &region, lanes)?;
            rails.push(rail);
            all_ends.rails.push(ends);
        }
        let block = u64::from(case.item_bytes).min(case.bytes());
        let (taken, bytes) = (Completions::new(64), case.bytes());
        Ok((VerbsLimit { rails, taken, peer: None, bytes, block, patience }, all_ends))
    }

    /// Connects to the other end.
    pub fn connect(&mut self, peer: VerbsEnds) -> io::Result<()> {
        if peer.rails.is_empty() {
            return Err(io::Error::other("the other process has no NIC"));
        }
        // The number of NICs that both ends have, as in a session.
        self.rails.truncate(peer.rails.len());
        for (rail, ends) in self.rails.iter_mut().zip(&peer.rails) {
            let VerbsRailEnds { gid, lid, mtu, slab_bytes, ref keys, .. } = *ends;
            if !slab_bytes.is_power_of_two()
                || Slabs::of(slab_bytes).count(self.bytes) != keys.len()
            {
                return Err(io::Error::other(
                    "the other process sent slabs that do not fit its memory",
                ));
            }
            (rail.theirs, rail.keys) = (Slabs::of(slab_bytes), keys.clone());
            for (lane, &(number, sequence)) in rail.lanes.iter_mut().zip(&ends.pairs) {
                lane.pair.connect(&Endpoint { number, sequence, gid, lid, mtu })?;
            }
        }
        self.peer = Some(peer.address);
        Ok(())
    }

    /// Prepares to receive the writes of the other end.
    pub fn expect(&mut self) -> io::Result<()> {
        for lane in self.rails.iter_mut().flat_map(|rail| &mut rail.lanes) {
            let posted = lane.pair.post_receive(0);
            posted.map_err(|refused| io::Error::from_raw_os_error(refused.error))?;
        }
        Ok(())
    }

    /// Waits until every lane has signalled its end.
    pub fn receive(&mut self) -> io::Result<()> {
        let mut left: usize = self.rails.iter().map(|rail| rail.lanes.len()).sum();
        let until = Instant::now() + self.patience;
        while left > 0 {
            for rail in &mut self.rails {
                rail.completions.poll(&mut self.taken)?;
                for completion in self.taken.iter() {
                    completion.outcome.map_err(io::Error::other)?;
                    left -= 1;
                }
            }
            if Instant::now() > until {
                return Err(ErrorKind::TimedOut.into());
            }
        }
        Ok(())
    }

    /// Writes everything, block by block, and waits for the last completion.
    pub fn send(&mut self) -> io::Result<()> {
        let Some(address) = self.peer else { return Err(ErrorKind::NotConnected.into()) };
        let until = Instant::now() + self.patience;
        let lanes: usize = self.rails.iter().map(|rail| rail.lanes.len()).sum();
        let share = (self.bytes / self.block).div_ceil(lanes as u64) * self.block;
        for (index, lane) in self.rails.iter_mut().flat_map(|rail| &mut rail.lanes).enumerate() {
            let edge = |index: usize| (share * index as u64).min(self.bytes);
            (lane.at, lane.end) = (edge(index), edge(index + 1));
        }
        let mut under_way = 0;
        loop {
            let mut is_over = true;
            for rail in &mut self.rails {
                let VerbsRail { lanes, ours, theirs, keys, .. } = rail;
                for lane in lanes {
                    under_way += lane.post(address, keys, [*ours, *theirs], self.block)?;
                    is_over &= lane.is_over();
                }
                rail.completions.poll(&mut self.taken)?;
                for completion in self.taken.iter() {
                    completion.outcome.map_err(io::Error::other)?;
                    let mut lanes = rail.lanes.iter_mut();
                    if let Some(lane) =
                        lanes.find(|lane| lane.pair.number() == completion.queue_pair)
                    {
                        lane.room += lane.chains.pop_front().unwrap_or(0);
                        under_way -= 1;
                    }
                }
            }
            if under_way == 0 && is_over {
                return Ok(());
            }
            if Instant::now() > until {
                return Err(ErrorKind::TimedOut.into());
            }
        }
    }
}

impl VerbsRail {
    fn new(nic: &Nic, region: &Arc<Region>, lanes: u16) -> io::Result<(VerbsRail, VerbsRailEnds)> {
        let domain = Domain::new(&nic.device)?;
        let access = Access { remote_write: true, relaxed_ordering: true };
        // Cut like a pool, because a device limits the size of a registration.
        let bytes = region.len() as u64;
        let slabs = Slabs::cut(bytes, nic.device.info()?.max_region).map_err(io::Error::other)?;
        let register = |slab: Range<u64>| {
            let slab = slab.start as usize..slab.end as usize;
            Ok(Arc::new(Registration::new(&domain, region, slab, access)?))
        };
        let memory = slabs.ranges(bytes).map(register).collect::<io::Result<Vec<_>>>()?;
        let completions = CompletionQueue::new(&nic.device, (UNDER_WAY + 1) * u32::from(lanes))?;
        let wanted = Capacity { requests: UNDER_WAY, receives: 1, pieces: 1, inline: 0 };
        let (mut ends, mut pairs) = (Vec::new(), Vec::new());
        for _ in 0..lanes {
            let mut pair = QueuePair::new(&domain, &completions, &completions, wanted, true)?;
            let end = pair.open(&nic.route, Entropy::System.next_u32())?;
            pairs.push((end.number, end.sequence));
            let chain = Chain::new(&memory, CHAIN, 1);
            ends.push(VerbsLane {
                pair,
                chain,
                room: UNDER_WAY,
                chains: VecDeque::new(),
                at: 0,
                end: 0,
            });
        }
        let Route { gid, lid, mtu, .. } = nic.route;
        let keys = memory.iter().map(|slab| slab.remote_key()).collect();
        let rail_ends = VerbsRailEnds { gid, lid, mtu, slab_bytes: slabs.bytes(), keys, pairs };
        Ok((
            VerbsRail { lanes: ends, completions, ours: slabs, theirs: slabs, keys: Vec::new() },
            rail_ends,
        ))
    }
}

impl VerbsLane {
    /// Whether everything is posted, including the signal of the end.
    fn is_over(&self) -> bool {
        self.at == OVER
    }

    /// Posts as many chains as the queue pair has room for, to memory at `address`. No request
    /// crosses the edge of a slab at either end. Returns the number of chains.
    fn post(
        &mut self,
        address: u64,
        keys: &[u32],
        [ours, theirs]: [Slabs; 2],
        block: u64,
    ) -> io::Result<usize> {
        let mut chains = 0;
        while !self.is_over() && self.room as usize >= CHAIN {
            while !self.chain.is_full() && !self.is_over() {
                let len =
                    block.min(self.end - self.at).min(ours.left(self.at)).min(theirs.left(self.at));
                let last = self.at + len == self.end;
                // A lane without bytes can start at the end of the memory.
                let slab = theirs.slab(self.at).min(keys.len() - 1);
                let to = RemoteAddress { address: address + self.at, key: keys[slab] };
                let (registration, offset) = (ours.slab(self.at), ours.within(self.at) as usize);
                let piece = LocalPiece { registration, offset, len: len as u32 };
                let pieces = if len == 0 { &[][..] } else { &[piece][..] };
                self.chain.write(
                    0,
                    pieces,
                    to,
                    Marks { immediate: last.then_some(0), ..Marks::default() },
                );
                self.at = if last { OVER } else { self.at + len };
            }
            self.chain.signal_last(0);
            let posted = self.pair.post(&mut self.chain);
            posted.map_err(|refused| io::Error::from_raw_os_error(refused.error))?;
            self.room -= self.chain.len() as u32;
            self.chains.push_back(self.chain.len() as u32);
            self.chain.clear();
            chains += 1;
        }
        Ok(chains)
    }
}

/// The limit of tcp, one end: as many sockets as the session has lanes.
#[derive(Debug)]
pub struct StreamLimit {
    streams: Vec<TcpStream>,
    buffer: Vec<u8>,
    patience: Duration,
}

impl StreamLimit {
    /// Connects the source's end.
    pub fn connect(
        address: SocketAddr,
        lanes: u16,
        bytes: u64,
        patience: Duration,
    ) -> io::Result<StreamLimit> {
        let streams = (0..lanes).map(|_| TcpStream::connect_timeout(&address, patience)).collect();
        StreamLimit::over(streams, bytes, patience)
    }

    /// Accepts the destination's end.
    pub fn accept(
        listener: &TcpListener,
        lanes: u16,
        bytes: u64,
        patience: Duration,
    ) -> io::Result<StreamLimit> {
        let until = Instant::now() + patience;
        listener.set_nonblocking(true)?;
        let accept = |_| loop {
            match listener.accept() {
                Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < until => {
                    thread::sleep(Duration::from_millis(1));
                }
                accepted => break accepted.map(|(stream, _)| stream),
            }
        };
        StreamLimit::over((0..lanes).map(accept).collect(), bytes, patience)
    }

    /// Opens the port where the destination accepts.
    pub fn listen(host: IpAddr) -> io::Result<(TcpListener, u16)> {
        let listener = TcpListener::bind((host, 0))?;
        let port = listener.local_addr()?.port();
        Ok((listener, port))
    }

    fn over(
        streams: io::Result<Vec<TcpStream>>,
        bytes: u64,
        patience: Duration,
    ) -> io::Result<StreamLimit> {
        let streams = streams?;
        for stream in &streams {
            stream.set_nodelay(true)?;
            // One stream blocks in the kernel; several are polled in turn.
            stream.set_nonblocking(streams.len() > 1)?;
            stream.set_read_timeout(Some(patience))?;
            stream.set_write_timeout(Some(patience))?;
        }
        Ok(StreamLimit { streams, buffer: vec![1; bytes as usize], patience })
    }

    /// Sends everything.
    pub fn send(&mut self) -> io::Result<()> {
        self.each_share(|stream, share, done| stream.write(&share[done..]))
    }

    /// Receives everything.
    pub fn receive(&mut self) -> io::Result<()> {
        self.each_share(|stream, share, done| stream.read(&mut share[done..]))
    }

    fn each_share(
        &mut self,
        mut step: impl FnMut(&mut TcpStream, &mut [u8], usize) -> io::Result<usize>,
    ) -> io::Result<()> {
        let until = Instant::now() + self.patience;
        let share = self.buffer.len().div_ceil(self.streams.len());
        let mut shares: Vec<_> =
            self.streams.iter_mut().zip(self.buffer.chunks_mut(share)).collect();
        let mut done = vec![0; shares.len()];
        while shares.iter().zip(&done).any(|((_, share), &done)| done < share.len()) {
            for ((stream, share), done) in shares.iter_mut().zip(&mut done) {
                if *done == share.len() {
                    continue;
                }
                match step(stream, share, *done) {
                    Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                    Ok(moved) => *done += moved,
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error)
                        if error.kind() == ErrorKind::WouldBlock && Instant::now() < until => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::verbs::provider::{Fabric, StepMode};

    const PATIENCE: Duration = Duration::from_secs(20);

    fn case(name: &str) -> Case {
        Case::known().into_iter().find(|case| case.name == name).unwrap()
    }

    #[test]
    fn a_run_takes_time() {
        for (name, lanes) in [("tiny-2k", 1), ("smol-128", 1), ("smol-128", 2)] {
            let limit = CopyLimit::new(&case(name), lanes).unwrap();
            assert_eq!(limit.flag.is_some(), name == "tiny-2k");
            for run in 0..300 {
                assert!((1..1_000_000_000).contains(&limit.run(run)), "{name}");
            }
        }
    }

    #[test]
    fn queue_pairs_write_between_slabs_of_other_sizes() {
        let case = case("smol-128");
        for regions in [[1 << 40; 2], [1 << 20, (512 << 10) - 1], [300_000, 1 << 40]] {
            let fabric = Fabric::new();
            fabric.set_pace(StepMode::Polled);
            let [mut near, mut far] = regions.map(|region_max| {
                fabric.limit_regions(region_max);
                let nic = |number| Nic {
                    device: fabric.device(),
                    route: fabric.route(),
                    number,
                    node: None,
                    chosen: String::new(),
                };
                VerbsLimit::on(&[nic(0), nic(1)], &case, 2, PATIENCE).unwrap()
            });
            near.0.connect(far.1).unwrap();
            far.0.connect(near.1).unwrap();
            for _ in 0..2 {
                far.0.expect().unwrap();
                near.0.send().unwrap();
                far.0.receive().unwrap();
            }
        }
    }

    #[test]
    fn streams_carry_all_bytes() {
        for lanes in [1, 3] {
            let (listener, port) = StreamLimit::listen("127.0.0.1".parse().unwrap()).unwrap();
            let address = SocketAddr::from(([127, 0, 0, 1], port));
            let bytes = 5_000_001;
            let mut near = StreamLimit::connect(address, lanes, bytes, PATIENCE).unwrap();
            let mut far = StreamLimit::accept(&listener, lanes, bytes, PATIENCE).unwrap();
            near.buffer.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i * 7) as u8);
            let expected = near.buffer.clone();
            let sender = thread::spawn(move || near.send().map(|()| near));
            far.receive().unwrap();
            sender.join().unwrap().unwrap();
            assert_eq!(far.buffer, expected);
        }
    }
}
