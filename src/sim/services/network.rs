//! The network between hosts: bytes in pieces, with delays, in order for each direction.
//!
//! Invariants: a stream's bytes arrive once and in order, before its end. A reader that does not
//! read stops its writer. If a program closes a stream with unread bytes, the stream is reset, as
//! on Linux.

use super::{Event, RunDigest};
use crate::net::{Address, MemoryKernel};
use crate::stdx::event_queue::{EventQueue, MICRO, MILLI, Nanos};
use crate::stdx::rng::Rng;
use crate::sys::stream::memory::{Segment, StreamKernel};
use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

/// Capacity of a stream in bytes, at each side.
const ROOM: usize = 4 << 10;
/// The longest piece in bytes.
const PIECE_MAX: u64 = 1500;
/// The shortest and the usual longest delay of a piece.
const DELAY: (Nanos, Nanos) = (20 * MICRO, 300 * MICRO);
/// The longest delay of some pieces: of a packet that was sent twice.
const LATE: Nanos = 20 * MILLI;

/// The address of a host.
pub fn address_of(host: usize) -> IpAddr {
    Ipv4Addr::new(10, 0, (host >> 8) as u8, host as u8 + 1).into()
}

/// All hosts and connections.
#[derive(Debug)]
pub struct Network {
    hosts: Vec<MemoryKernel>,
    connections: Vec<Connection>,
    dice: Rng,
}

#[derive(Debug)]
struct Connection {
    address: Address,
    from: Option<std::net::SocketAddr>,
    ends: [End; 2],
}

#[derive(Debug)]
struct End {
    host: usize,
    /// `None` until the dial arrives, or if no listener has the address.
    kernel: Option<StreamKernel>,
    /// What travels to this end, and when it arrives.
    travelling: VecDeque<(Nanos, Travel)>,
    /// Bytes that travel to this end.
    bytes: usize,
    /// Nothing more is sent from this end, but a reset.
    finished: bool,
    /// The reset was sent.
    is_reset: bool,
}

#[derive(Debug)]
enum Travel {
    Bytes(Segment),
    End,
    Reset,
}

impl End {
    fn is_open(&self) -> bool {
        self.kernel.as_ref().is_some_and(|kernel| !kernel.is_closed() && !kernel.is_reset())
    }
}

impl Network {
    /// A network without hosts.
    pub fn new(dice: Rng) -> Network {
        Network { hosts: Vec::new(), connections: Vec::new(), dice }
    }

    /// Adds a host, and returns its kernel.
    pub fn add_host(&mut self, base: Instant, random: Rng) -> MemoryKernel {
        let kernel = MemoryKernel::new(address_of(self.hosts.len()), ROOM, base, random);
        self.hosts.push(kernel.clone());
        kernel
    }

    /// A new kernel for a host that has restarted. Its old connections lead nowhere.
    pub fn reboot(&mut self, host: usize, base: Instant, now: Nanos) -> MemoryKernel {
        let random = self.dice.fork(&format!("reboot of {host} at {now}"));
        let kernel = MemoryKernel::new(address_of(host), ROOM, base, random);
        kernel.set_now(base + Duration::from_nanos(now));
        self.hosts[host] = kernel.clone();
        kernel
    }

    /// Resets a random open connection at both ends. Returns its hosts.
    pub fn reset_one(&mut self, digest: &mut RunDigest) -> Option<[usize; 2]> {
        let is_open = |connection: &Connection| connection.ends.iter().all(End::is_open);
        let all = 0..self.connections.len();
        let open: Vec<usize> = all.filter(|&at| is_open(&self.connections[at])).collect();
        if open.is_empty() {
            return None;
        }
        let chosen = self.dice.pick(&open);
        digest.note([3, chosen as u64]);
        let connection = &mut self.connections[chosen];
        for end in &mut connection.ends {
            (end.finished, end.is_reset) = (true, true);
            if let Some(kernel) = &end.kernel {
                kernel.reset();
            }
        }
        Some(connection.ends.each_ref().map(|end| end.host))
    }

    /// Whether a host has a reason to take a turn now.
    pub fn is_ready(&self, host: usize) -> bool {
        self.hosts[host].is_ready()
    }

    /// A process dies: its streams take no more bytes from it.
    pub fn freeze(&self, host: usize) {
        let ends = self.connections.iter().flat_map(|connection| &connection.ends);
        for end in ends.filter(|end| end.host == host) {
            end.kernel.iter().for_each(StreamKernel::freeze);
        }
    }

    /// A dial reaches its host. Returns the hosts that notice it.
    pub fn open(&mut self, connection: usize, digest: &mut RunDigest) -> [usize; 2] {
        let Connection { address, from, ends: [near, far] } = &mut self.connections[connection];
        far.kernel = self.hosts[far.host].offer(address, *from);
        if let Some(kernel) = &near.kernel {
            match far.kernel {
                Some(_) => kernel.connected(),
                None => kernel.fail(std::io::ErrorKind::ConnectionRefused),
            }
        }
        digest.note([1, connection as u64, far.kernel.is_some().into()]);
        [near.host, far.host]
    }

    /// The next piece arrives at this end of a connection. Returns its host.
    pub fn arrive(&mut self, connection: usize, end: usize, digest: &mut RunDigest) -> usize {
        let end = &mut self.connections[connection].ends[end];
        let (_, travel) = end.travelling.pop_front().expect("an arrival has travelled");
        digest.note([2, connection as u64]);
        match travel {
            Travel::Bytes(segment) => {
                digest.note(segment.bytes.iter().map(|&byte| byte.into()));
                end.bytes -= segment.bytes.len();
                if let Some(kernel) = &end.kernel {
                    // The bytes stay unread if the program has closed the stream: a reset follows.
                    kernel.receive(segment);
                }
            }
            Travel::End => end.kernel.iter().for_each(StreamKernel::end),
            Travel::Reset => {
                (end.finished, end.is_reset) = (true, true);
                end.kernel.iter().for_each(StreamKernel::reset);
            }
        }
        end.host
    }

    /// Sends what the program of this host has written, and what its reads let others send.
    pub fn pump(&mut self, host: usize, queue: &mut EventQueue<Event>) {
        for dial in self.hosts[host].take_dials() {
            let to = match &dial.address {
                Address::Tcp(socket) => {
                    self.hosts.iter().position(|kernel| kernel.host() == socket.ip())
                }
                Address::Abstract(_) => Some(host),
            };
            let Some(to) = to else {
                dial.stream.fail(std::io::ErrorKind::HostUnreachable);
                continue;
            };
            let end = |host, kernel| End {
                host,
                kernel,
                travelling: VecDeque::new(),
                bytes: 0,
                finished: false,
                is_reset: false,
            };
            let ends = [end(host, Some(dial.stream)), end(to, None)];
            self.connections.push(Connection { address: dial.address, from: dial.from, ends });
            let at = queue.now() + self.delay();
            queue.schedule(at, Event::Dial(self.connections.len() - 1));
        }
        for connection in 0..self.connections.len() {
            if self.connections[connection].ends.iter().any(|end| end.host == host) {
                (0..2).for_each(|end| self.send(connection, end, queue));
            }
        }
    }

    /// Sends what was written at this end, as far as the other end has room.
    fn send(&mut self, connection: usize, end: usize, queue: &mut EventQueue<Event>) {
        loop {
            let ends = &self.connections[connection].ends;
            let (from, to) = (&ends[end], &ends[1 - end]);
            let Some(kernel) = from.kernel.as_ref() else { return };
            let Some(other) = &to.kernel else { return };
            let room = ROOM.saturating_sub(to.bytes + other.unread());
            // A closed stream with unread bytes loses what it has not sent.
            let is_cut = kernel.is_closed() && kernel.unread() > 0 && !from.is_reset;
            let travel = match kernel.unsent() {
                _ if is_cut => Travel::Reset,
                _ if from.finished => return,
                0 if kernel.is_shut() => Travel::End,
                0 => return,
                _ if room == 0 && !other.is_closed() => return,
                _ => {
                    let most = self.dice.range_u64(1, PIECE_MAX) as usize;
                    Travel::Bytes(kernel.take(most.min(room.max(1))))
                }
            };
            let last = ends[1 - end].travelling.back().map_or(0, |(at, _)| *at);
            let at = (queue.now() + self.delay()).max(last + 1);
            let ends = &mut self.connections[connection].ends;
            match &travel {
                Travel::Bytes(segment) => ends[1 - end].bytes += segment.bytes.len(),
                Travel::End => ends[end].finished = true,
                Travel::Reset => (ends[end].finished, ends[end].is_reset) = (true, true),
            }
            ends[1 - end].travelling.push_back((at, travel));
            queue.schedule(at, Event::Arrival { connection, end: 1 - end });
        }
    }

    fn delay(&mut self) -> Nanos {
        let (least, most) = DELAY;
        let most = if self.dice.one_in(30) { LATE } else { most };
        self.dice.range_u64(least, most)
    }
}
