//! An operating system in memory, for one process of the simulator. It has no peers of its own: the
//! simulator takes its [`Dial`]s, offers streams to its listeners, and moves the bytes.
//!
//! Thread: any; the simulator has one. Invariants: time moves only by [`MemoryKernel::set_now`];
//! under the same seed and the same calls, all results are the same.

use super::address::Address;
use super::entropy::Entropy;
use super::waker::Waker;
use crate::stdx::rng::Rng;
use crate::sys::clock::TimeSource;
use crate::sys::stream::memory::{self, MemoryStream, StreamKernel};
use crate::sys::stream::ready::{Readiness, ReadySet};
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The lowest port of connections, and of listeners that ask for any port (IANA's dynamic ports).
const FIRST_PORT: u16 = 49_152;
/// A kernel begins at a random one of so many ports, as Linux does.
const BEGIN_PORTS: u64 = 8192;

/// The time of day at which a kernel begins: 2001-09-09 UTC.
const EPOCH: Duration = Duration::from_secs(1_000_000_000);

/// The operating system of one simulated process. The process has one handle, the simulator
/// another.
#[derive(Clone, Debug)]
pub struct MemoryKernel(Arc<Mutex<Node>>);

/// A connection that a process has begun to open.
#[derive(Debug)]
pub struct Dial {
    /// Where it connects to.
    pub address: Address,
    /// The address that the other side sees, over TCP.
    pub from: Option<SocketAddr>,
    /// The kernel's side of the stream. It connects, or fails.
    pub stream: StreamKernel,
}

/// A signal to a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Signal {
    /// SIGTERM or SIGINT.
    Terminate,
    /// SIGHUP.
    Hangup,
}

#[derive(Debug)]
struct Node {
    host: IpAddr,
    /// Capacity of each stream in bytes.
    room: usize,
    begun: Instant,
    now: Instant,
    random: Rng,
    ready: ReadySet,
    next_port: u16,
    listeners: BTreeMap<Name, Backlog>,
    dials: VecDeque<Dial>,
    /// Signals that the process watches, their tokens, and how many it has not seen.
    signals: Vec<(Signal, usize, usize)>,
}

/// What a listener is found by.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Name {
    Port(u16),
    Abstract(Vec<u8>),
}

#[derive(Debug)]
struct Backlog {
    token: usize,
    waiting: VecDeque<(MemoryStream, Option<SocketAddr>)>,
}

/// A listener; closed when dropped. Connections that wait are closed with it.
#[derive(Debug)]
pub(super) struct MemoryListener {
    kernel: MemoryKernel,
    name: Name,
    address: Option<SocketAddr>,
}

impl TimeSource for MemoryKernel {
    fn now(&self) -> Instant {
        self.node().now
    }

    fn since_epoch(&self) -> Duration {
        let node = self.node();
        EPOCH + (node.now - node.begun)
    }
}

impl MemoryKernel {
    /// The kernel of a process on this host. A stream takes `room` unsent bytes.
    pub fn new(host: IpAddr, room: usize, now: Instant, random: Rng) -> MemoryKernel {
        let port = random.fork("port").range_u64(0, BEGIN_PORTS - 1);
        MemoryKernel(Arc::new(Mutex::new(Node {
            host,
            room,
            begun: now,
            now,
            random,
            ready: ReadySet::default(),
            next_port: FIRST_PORT + port as u16,
            listeners: BTreeMap::new(),
            dials: VecDeque::new(),
            signals: Vec::new(),
        })))
    }

    fn node(&self) -> MutexGuard<'_, Node> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The address of its host.
    pub fn host(&self) -> IpAddr {
        self.node().host
    }

    /// The time.
    pub fn now(&self) -> Instant {
        self.node().now
    }

    /// Sets the time.
    ///
    /// # Panics
    /// The time would go back.
    pub fn set_now(&self, now: Instant) {
        let mut node = self.node();
        assert!(node.now <= now, "time goes back");
        node.now = now;
    }

    /// The connections that the process has begun to open since the last call.
    pub fn take_dials(&self) -> VecDeque<Dial> {
        std::mem::take(&mut self.node().dials)
    }

    /// Whether a listener of the process has this address.
    pub fn has_listener(&self, address: &Address) -> bool {
        self.node().listeners.contains_key(&name_of(address))
    }

    /// Opens a connection to a listener of the process. `from` is the address of the other side,
    /// over TCP. Returns the kernel's side of the stream, or `None` if no listener has this
    /// address.
    pub fn offer(&self, address: &Address, from: Option<SocketAddr>) -> Option<StreamKernel> {
        let mut node = self.node();
        let room = node.room;
        let backlog = node.listeners.get_mut(&name_of(address))?;
        let (stream, kernel) = memory::stream(true, room);
        backlog.waiting.push_back((stream, from));
        let token = backlog.token;
        node.ready.push(token);
        Some(kernel)
    }

    /// Sends a signal to the process.
    ///
    /// # Panics
    /// The process does not watch the signal. A real one would be killed.
    pub fn raise(&self, signal: Signal) {
        let mut node = self.node();
        let watched = node.signals.iter_mut().find(|(watched, ..)| *watched == signal);
        let (_, token, count) = watched.expect("the process watches the signal");
        *count += 1;
        let token = *token;
        node.ready.push(token);
    }

    /// Whether the process has a reason to wake before its deadline.
    pub fn is_ready(&self) -> bool {
        !self.node().ready.is_empty()
    }

    pub(super) fn entropy(&self) -> Entropy {
        let mut node = self.node();
        // Each source differs from the one before.
        let part = node.random.next_u64().to_string();
        Entropy::Seeded(node.random.fork(&part))
    }

    pub(super) fn waker(&self, token: usize) -> Waker {
        let ready = self.ready_set();
        Waker::memory(move || ready.push(token))
    }

    pub(super) fn watch(&self, signal: Signal, token: usize) {
        self.node().signals.push((signal, token, 0));
    }

    pub(super) fn ready_set(&self) -> ReadySet {
        self.node().ready.clone()
    }

    pub(super) fn collect(&self, into: &mut Vec<Readiness>) {
        let ready = self.ready_set();
        into.extend(std::iter::from_fn(|| ready.next()));
    }

    pub(super) fn take_signals(&self, token: usize) -> usize {
        let mut node = self.node();
        let watched = node.signals.iter_mut().find(|(_, watched, _)| *watched == token);
        watched.map_or(0, |(.., count)| std::mem::take(count))
    }

    pub(super) fn listen(&self, address: &Address, token: usize) -> io::Result<MemoryListener> {
        let mut node = self.node();
        let mut address = address.clone();
        if let Address::Tcp(socket) = &mut address
            && socket.port() == 0
        {
            socket.set_port(node.take_port());
        }
        let name = name_of(&address);
        if node.listeners.contains_key(&name) {
            return Err(ErrorKind::AddrInUse.into());
        }
        node.listeners.insert(name.clone(), Backlog { token, waiting: VecDeque::new() });
        let address = match address {
            Address::Tcp(socket) => Some(socket),
            Address::Abstract(_) => None,
        };
        Ok(MemoryListener { kernel: self.clone(), name, address })
    }

    pub(super) fn connect(&self, address: &Address) -> MemoryStream {
        let mut node = self.node();
        let (stream, kernel) = memory::stream(false, node.room);
        let from = match address {
            Address::Tcp(_) => Some(SocketAddr::new(node.host, node.take_port())),
            Address::Abstract(_) => None,
        };
        node.dials.push_back(Dial { address: address.clone(), from, stream: kernel });
        stream
    }
}

impl Node {
    /// A port that no listener has. Two connections may share one after many dials.
    fn take_port(&mut self) -> u16 {
        loop {
            let port = self.next_port;
            self.next_port = port.checked_add(1).unwrap_or(FIRST_PORT);
            if !self.listeners.contains_key(&Name::Port(port)) {
                return port;
            }
        }
    }
}

fn name_of(address: &Address) -> Name {
    match address {
        Address::Tcp(socket) => Name::Port(socket.port()),
        Address::Abstract(name) => Name::Abstract(name.clone()),
    }
}

impl MemoryListener {
    pub(super) fn accept(&self) -> io::Result<(MemoryStream, Option<SocketAddr>)> {
        let mut node = self.kernel.node();
        let backlog = node.listeners.get_mut(&self.name).ok_or(ErrorKind::NotFound)?;
        backlog.waiting.pop_front().ok_or_else(|| ErrorKind::WouldBlock.into())
    }

    pub(super) fn address(&self) -> Option<SocketAddr> {
        self.address
    }
}

impl Drop for MemoryListener {
    fn drop(&mut self) {
        self.kernel.node().listeners.remove(&self.name);
    }
}
