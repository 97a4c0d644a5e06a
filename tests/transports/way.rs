//! Sets up sessions and connects their ends, as `ctl` does. A relay forwards a stream a few bytes
//! at a time, and can hold it, cut it, record it or add bytes.

use crate::rig::{Rig, SLOTS};
use baton::ids::SessionGeneration;
use baton::stdx::event_count::EventCount;
use baton::sys::event::EventFd;
use baton::sys::verbs::provider::Fabric;
use baton::transfer::command::{DestinationCommand, SourceCommand};
use baton::transfer::event_loop::LoopTask;
use baton::transfer::pages::PageLists;
use baton::transfer::plan::Template;
use baton::transfer::target::SessionId;
use baton::transfer::transport::fake::Fake;
use baton::transfer::transport::fault_injection::Faulty;
use baton::transfer::transport::rdma::{
    DataThreads, Nic, PendingQueuePairs, Rails as Nics, RdmaSource, Settings, Split,
};
use baton::transfer::transport::shm::{PeerShape, ShmCursor, ShmRing};
use baton::transfer::transport::tcp::{FRAME_MAX, Preamble, TcpDestination, TcpSource};
use baton::transfer::transport::{Arrival, DestinationHalf, Memory, SourceHalf};
use baton::wire::message::Token;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Shm,
    /// Number of copying threads.
    ShmLanes(usize),
    /// Number of lanes.
    Tcp(usize),
    /// Number of lanes, with the kernel's default socket buffers.
    Wide(usize),
    /// Number of lanes with short frames, and the bytes that their relays forward at a time.
    Relayed(usize, usize),
    /// Number of lanes on a stepped fabric.
    Rdma(usize),
    /// Number of NICs on each side, with two lanes each.
    Rails(usize),
    /// Number of NICs on each side, with two lanes each. At the source each NIC has a stepped
    /// poster and poller.
    Split(usize),
    /// The same with running threads.
    Threads(usize),
    /// Two NICs on each side, with these limits of region size at the source and at the
    /// destination.
    Slabs(u64, u64),
    /// Queue pairs with a source that has a wrong address of the destination's memory.
    Astray,
    Fake,
}

impl Kind {
    /// Whether the source writes into the destination's memory itself.
    pub fn is_rdma(self) -> bool {
        use Kind::*;
        matches!(self, Rdma(_) | Rails(_) | Split(_) | Threads(_) | Slabs(..) | Astray)
    }
}

/// The connection between the two ends of a session.
#[derive(Default)]
pub struct Way {
    pub relays: Vec<Relay>,
    pub rails: Option<Rails>,
}

/// The NICs of both sides on their own fabric.
pub struct Rails {
    pub fabric: Fabric,
    /// Writing queue pairs, by lane.
    pub pairs: Vec<u32>,
    /// The NICs of the source and of the destination.
    pub nics: [Arc<Nics>; 2],
    /// Where the destination's pages are announced to the source.
    pub targets: Arc<PageLists>,
    pub posters: Posters,
    next: usize,
}

/// The threads that post and poll at the source, unless its mover does.
#[derive(Default)]
pub struct Posters {
    pub stepped: Vec<Split>,
    /// Which of the stepped threads hang.
    pub hangs: Option<Hangs>,
    /// Whether real threads run.
    pub runs: bool,
    pub running: DataThreads,
}

/// Which threads of the NICs hang.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hangs {
    Posters,
    Pollers,
}

pub struct Relay {
    ends: Option<(TcpStream, TcpStream)>,
    bytes: usize,
    pub hold: bool,
    /// All forwarded bytes after the preamble.
    pub passed: Vec<u8>,
}

/// Short enough that a chunk needs several frames.
const SHORT_FRAME: u64 = 300;

impl Way {
    pub fn open(rig: &mut Rig, session: SessionId, kind: Kind) -> Way {
        let template = template(rig);
        match kind {
            Kind::Shm | Kind::ShmLanes(_) => Way::shm(rig, session, template),
            Kind::Fake => {
                open_source(rig, session, Fake);
                open_destination(rig, session, Fake);
                Way::default()
            }
            Kind::Tcp(lanes) => Way::tcp(rig, session, template, pairs(lanes, pair), None),
            Kind::Wide(lanes) => Way::tcp(rig, session, template, pairs(lanes, wide_pair), None),
            Kind::Relayed(lanes, bytes) => {
                Way::tcp(rig, session, template, pairs(lanes, pair), Some(bytes))
            }
            Kind::Rdma(lanes) => {
                let (nics, fabric) = nics(rig, 1, lanes);
                Way::rdma(rig, session, template, &nics, fabric)
            }
            Kind::Split(count) | Kind::Threads(count) => {
                let (mut nics, fabric) = nics(rig, count, 2);
                let source = Arc::get_mut(&mut nics[0]).unwrap();
                let stepped = source.split(&Arc::new(EventCount::new(|| ())), false).unwrap();
                let mut posters = Posters { stepped, ..Posters::default() };
                if let Kind::Threads(_) = kind {
                    posters.runs = true;
                    posters
                        .stepped
                        .drain(..)
                        .for_each(|split| posters.running.start(split, None).unwrap());
                }
                let mut way = Way::rdma(rig, session, template, &nics, fabric);
                way.rails.as_mut().unwrap().posters = posters;
                way
            }
            Kind::Slabs(from, to) => {
                let (nics, fabric) = nics_of(rig, 2, 2, [from, to]);
                Way::rdma(rig, session, template, &nics, fabric)
            }
            Kind::Astray => {
                let (nics, fabric) = nics(rig, 1, 1);
                Way::rdma_to(rig, session, template, &nics, fabric, 1 << 44)
            }
            Kind::Rails(count) => {
                let (nics, fabric) = nics(rig, count, 2);
                Way::rdma(rig, session, template, &nics, fabric)
            }
        }
    }

    fn shm(rig: &mut Rig, session: SessionId, template: Template) -> Way {
        let memory = &rig.source.memory;
        let (ring, cursor) = (ShmRing::new().unwrap(), ShmCursor::new().unwrap());
        let shown = cursor.descriptors(&EventFd::new().unwrap()).unwrap();
        let descriptors = ring.descriptors(memory).unwrap();
        let shape = PeerShape {
            pool_bytes: memory.region.len() as u64,
            pages: memory.pages,
            lists: memory.lists.shape(),
        };
        let page_size = memory.layout.page_size;
        let destination = cursor.connect(descriptors, &shape, page_size, template).unwrap();
        let source = ring.connect(shown).unwrap();
        open_source(rig, session, source);
        open_destination(rig, session, destination);
        Way::default()
    }

    /// A session over these NICs. They outlive sessions.
    pub fn rdma(
        rig: &mut Rig,
        session: SessionId,
        template: Template,
        nics: &[Arc<Nics>; 2],
        fabric: Fabric,
    ) -> Way {
        Way::rdma_to(rig, session, template, nics, fabric, 0)
    }

    /// Like `rdma`, with an address that is wrong by `beside` bytes.
    fn rdma_to(
        rig: &mut Rig,
        session: SessionId,
        template: Template,
        nics: &[Arc<Nics>; 2],
        fabric: Fabric,
        beside: u64,
    ) -> Way {
        let [from, to] = nics;
        let offer = PendingQueuePairs::new(to, || 5).unwrap();
        let mut grant = offer.grant();
        grant.kv_address += beside;
        let (source, told) = RdmaSource::new(from, &grant, template, &rig.waits[0], || 9).unwrap();
        let destination = offer.connect(&told, &rig.waits[1]).unwrap();
        open_source(rig, session, source);
        open_destination(rig, session, destination);
        let pairs = told.rails().flat_map(|(_, names)| names).map(|name| name.number).collect();
        let (targets, posters) = (from.targets.clone(), Posters::default());
        let rails = Some(Rails { fabric, pairs, nics: nics.clone(), targets, posters, next: 0 });
        Way { rails, ..Way::default() }
    }

    fn tcp(
        rig: &mut Rig,
        session: SessionId,
        template: Template,
        pairs: Vec<(TcpStream, TcpStream)>,
        relayed: Option<usize>,
    ) -> Way {
        let lanes = pairs.len();
        let (mut dialled, mut accepted, mut relays) = (Vec::new(), Vec::new(), Vec::new());
        for (near, far) in pairs {
            dialled.push(near);
            accepted.push(match relayed {
                None => far,
                Some(bytes) => {
                    let (down, end) = pair();
                    far.set_nonblocking(true).unwrap();
                    down.set_nonblocking(true).unwrap();
                    relays.push(Relay {
                        ends: Some((far, down)),
                        bytes,
                        hold: false,
                        passed: Vec::new(),
                    });
                    end
                }
            });
        }
        let id = (Token([7; 16]), SessionGeneration(5));
        let source =
            TcpSource::new(dialled, id, template.clone(), SLOTS, rig.waits[0].clone()).unwrap();
        let frame = relayed.map_or(FRAME_MAX, |_| SHORT_FRAME);
        open_source(rig, session, source.with_frames_of(frame));
        open_destination(
            rig,
            session,
            TcpDestination::new(template, lanes, SLOTS, rig.waits[1].clone()),
        );
        for (lane, stream) in accepted.into_iter().enumerate() {
            if let Some(relay) = relays.get_mut(lane) {
                relay.pass_preamble();
            }
            let arrival = prove(stream, (lane, lanes), 0);
            rig.destination.commands.send(DestinationCommand::Join { session, arrival }).unwrap();
        }
        rig.step_destination();
        Way { relays, rails: None }
    }

    pub fn step(&mut self) -> bool {
        let moved = self.relays.iter_mut().fold(false, |moved, relay| moved | relay.step());
        moved | self.rails.as_mut().is_some_and(Rails::step)
    }

    /// Whether posters run as threads beside the steps.
    pub fn has_threads(&self) -> bool {
        self.rails.as_ref().is_some_and(|rails| rails.posters.runs)
    }

    /// Whether there are posters to step.
    pub fn is_split(&self) -> bool {
        self.rails.as_ref().is_some_and(|rails| !rails.posters.stepped.is_empty())
    }

    pub fn step_posters(&mut self) -> bool {
        self.splits(Hangs::Posters).fold(false, |moved, split| moved | split.poster.0.step())
    }

    pub fn step_pollers(&mut self) -> bool {
        self.splits(Hangs::Pollers).fold(false, |moved, split| moved | split.poller.0.step())
    }

    /// The posters and pollers to step, unless these hang.
    fn splits(&mut self, unless: Hangs) -> impl Iterator<Item = &mut Split> {
        let posters = self.rails.iter_mut().map(|rails| &mut rails.posters);
        posters
            .filter(move |posters| posters.hangs != Some(unless))
            .flat_map(|posters| &mut posters.stepped)
    }

    pub fn hold(&mut self, hold: bool) {
        self.relays.iter_mut().for_each(|relay| relay.hold = hold);
    }
}

/// What `ctl` does with a stream on the data port, with `early` bytes read too many.
pub fn prove(mut stream: TcpStream, (lane, lanes): (usize, usize), early: usize) -> Arrival {
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut bytes = [0; Preamble::BYTES];
    stream.read_exact(&mut bytes).unwrap();
    let preamble = Preamble::parse(&bytes).unwrap();
    let (token, session) = (Token([7; 16]), SessionGeneration(5));
    assert_eq!(preamble, Preamble { token, session, lane: lane as u16, lanes: lanes as u16 });
    let early = read_some(&mut stream, early);
    Arrival { lane: lane as u16, stream: stream.into(), early }
}

pub fn open_source(rig: &mut Rig, session: SessionId, half: impl SourceHalf + 'static) {
    let binding = Box::new(Faulty::source(half, rig.scripts[0].clone()));
    rig.source
        .commands
        .send(SourceCommand::Open { session, generation: SessionGeneration(5), binding })
        .unwrap();
    rig.step_source();
}

pub fn open_destination(rig: &mut Rig, session: SessionId, half: impl DestinationHalf + 'static) {
    let binding = Box::new(Faulty::destination(half, rig.scripts[1].clone()));
    let generation = SessionGeneration(5);
    rig.destination
        .commands
        .send(DestinationCommand::Open { session, generation, binding })
        .unwrap();
    rig.step_destination();
}

/// A source half over streams that are not proven.
pub fn open_tcp_source(rig: &mut Rig, session: SessionId, streams: Vec<TcpStream>) {
    let id = (Token([7; 16]), SessionGeneration(5));
    let half = TcpSource::new(streams, id, template(rig), SLOTS, rig.waits[0].clone()).unwrap();
    open_source(rig, session, half);
}

/// A session of one lane with an unread stream.
pub fn open_tcp_without_lane(rig: &mut Rig, session: SessionId) -> TcpStream {
    let (near, far) = pair();
    open_tcp_source(rig, session, vec![near]);
    let half = TcpDestination::new(template(rig), 1, SLOTS, rig.waits[1].clone());
    open_destination(rig, session, half);
    far
}

fn read_some(stream: &mut TcpStream, bytes: usize) -> Vec<u8> {
    let mut read = vec![0; bytes];
    stream.read_exact(&mut read).unwrap();
    read
}

/// Both sides' NICs, `count` each.
fn nics(rig: &Rig, count: usize, lanes: usize) -> ([Arc<Nics>; 2], Fabric) {
    nics_of(rig, count, lanes, [1 << 40; 2])
}

/// Both sides' NICs, with regions of at most this many bytes.
fn nics_of(rig: &Rig, count: usize, lanes: usize, regions: [u64; 2]) -> ([Arc<Nics>; 2], Fabric) {
    let fabric = Fabric::new();
    let settings = Settings { lanes, requests: 12, pieces: 3 };
    let nic = |number| Nic {
        device: fabric.device(),
        route: fabric.route(),
        number,
        node: None,
        chosen: String::new(),
    };
    let side = |memory: &Memory, region_max: u64| {
        fabric.limit_regions(region_max);
        let nics: Vec<Nic> = (0..count as u16).map(nic).collect();
        Arc::new(Nics::new(&nics, memory, SLOTS, 512, settings).unwrap())
    };
    ([side(&rig.source.memory, regions[0]), side(&rig.destination.memory, regions[1])], fabric)
}

/// A worker's NICs with these limits of region size.
pub fn nics_over(memory: &Memory, region_max: &[u64]) -> std::io::Result<Nics> {
    let fabric = Fabric::new();
    let nic = |(number, &bytes)| {
        fabric.limit_regions(bytes);
        Nic {
            device: fabric.device(),
            route: fabric.route(),
            number,
            node: None,
            chosen: String::new(),
        }
    };
    let nics: Vec<Nic> = (0..).zip(region_max).map(nic).collect();
    Nics::new(&nics, memory, SLOTS, 512, Settings::default())
}

pub fn template(rig: &Rig) -> Template {
    Template::new(&rig.source.memory.layout, &rig.destination.memory.layout).unwrap()
}

/// Both ends of a loopback connection with small buffers.
pub fn pair() -> (TcpStream, TcpStream) {
    let (near, far) = wide_pair();
    [&near, &far].into_iter().for_each(narrow);
    (near, far)
}

/// Both ends of a loopback connection with the kernel's default buffers.
pub fn wide_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (near, listener.accept().unwrap().0)
}

fn pairs(count: usize, pair: impl Fn() -> (TcpStream, TcpStream)) -> Vec<(TcpStream, TcpStream)> {
    (0..count).map(|_| pair()).collect()
}

/// Shrinks the kernel's buffers, so that streams fill up and writes are partial.
#[allow(unsafe_code)]
fn narrow(stream: &TcpStream) {
    let bytes: libc::c_int = 32 << 10;
    for option in [libc::SO_SNDBUF, libc::SO_RCVBUF] {
        // SAFETY: an open socket and a live integer of the given length.
        let set = unsafe {
            let value = std::ptr::from_ref(&bytes).cast();
            libc::setsockopt(
                stream.as_raw_fd(),
                libc::SOL_SOCKET,
                option,
                value,
                size_of_val(&bytes) as u32,
            )
        };
        assert_eq!(set, 0);
    }
}

impl Rails {
    /// Steps one request, of one lane after the other.
    fn step(&mut self) -> bool {
        (0..self.pairs.len()).any(|_| {
            self.next += 1;
            self.fabric.step_pair(self.pairs[self.next % self.pairs.len()])
        })
    }
}

impl Relay {
    fn step(&mut self) -> bool {
        if self.hold {
            return false;
        }
        let Some((up, down)) = &mut self.ends else { return false };
        let mut bytes = vec![0; self.bytes];
        let moved = match up.read(&mut bytes) {
            Ok(read @ 1..) => {
                self.passed.extend(&bytes[..read]);
                down.write_all(&bytes[..read]).is_ok().then_some(true)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let closed = down.read(&mut [0]).err().map(|error| error.kind());
                (closed == Some(ErrorKind::WouldBlock)).then_some(false)
            }
            _ => None,
        };
        moved.unwrap_or_else(|| {
            self.cut();
            true
        })
    }

    /// Closes both streams.
    pub fn cut(&mut self) {
        self.ends = None;
    }

    /// Sends injected bytes to the destination.
    pub fn inject(&mut self, bytes: &[u8]) {
        if let Some((_, down)) = &mut self.ends {
            // The destination may already have closed the stream.
            let _ = down.write_all(bytes);
        }
    }

    /// Takes bytes from the source instead of forwarding them.
    pub fn take(&mut self, bytes: usize) -> Vec<u8> {
        let (up, _) = self.ends.as_mut().unwrap();
        up.set_nonblocking(false).unwrap();
        let taken = read_some(up, bytes);
        up.set_nonblocking(true).unwrap();
        taken
    }

    fn pass_preamble(&mut self) {
        let (up, down) = self.ends.as_mut().unwrap();
        up.set_nonblocking(false).unwrap();
        up.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut preamble = [0; Preamble::BYTES];
        up.read_exact(&mut preamble).unwrap();
        down.write_all(&preamble).unwrap();
        up.set_nonblocking(true).unwrap();
    }
}
