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
    /// `None` until the dial arrives, and after the end of both directions.
    kernel: Option<StreamKernel>,
    /// What travels to this end, and when it arrives.
    travelling: VecDeque<(Nanos, Travel)>,
    /// Bytes that travel to this end.
    bytes: usize,
    /// Nothing more is sent from this end.
    finished: bool,
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
        let is_open = |connection: &&Connection| connection.ends.iter().all(End::is_open);
        let open = self.connections.iter().filter(is_open).count();
        let chosen = self.dice.next_u64() as usize % open.max(1);
        let connection =
            self.connections.iter_mut().filter(|one| one.ends.iter().all(End::is_open));
        let connection = connection.into_iter().nth(chosen)?;
        digest.note([3, chosen as u64]);
        for end in &mut connection.ends {
            end.finished = true;
            if let Some(kernel) = &end.kernel {
                kernel.reset();
            }
        }
        Some(connection.ends.each_ref().map(|end| end.host))
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

    /// The next piece arrives at this end of a connection. Returns the hosts that notice it.
    pub fn arrive(&mut self, connection: usize, end: usize, digest: &mut RunDigest) -> [usize; 2] {
        let ends = &mut self.connections[connection].ends;
        let (_, travel) = ends[end].travelling.pop_front().expect("an arrival has travelled");
        let bytes = match &travel {
            Travel::Bytes(segment) => segment.bytes.len(),
            Travel::End | Travel::Reset => 0,
        };
        ends[end].bytes -= bytes;
        digest.note([2, connection as u64, end as u64, bytes as u64]);
        let other = ends[1 - end].kernel.clone();
        if let Some(kernel) = &ends[end].kernel {
            match travel {
                Travel::Bytes(segment) => {
                    digest.note(segment.bytes.iter().map(|&byte| byte.into()));
                    // The program does not read them any more, so a reset ends the writer's side.
                    if kernel.is_closed()
                        && let Some(other) = other
                    {
                        other.reset();
                    }
                    kernel.receive(segment);
                }
                Travel::End => kernel.end(),
                Travel::Reset => kernel.reset(),
            }
        }
        [ends[end].host, ends[1 - end].host]
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
            let Some(kernel) = from.kernel.as_ref().filter(|_| !from.finished) else { return };
            let Some(other) = &to.kernel else { return };
            let room = ROOM.saturating_sub(to.bytes + other.unread());
            let travel = match kernel.unsent() {
                0 if kernel.is_reset() => Travel::Reset,
                0 if kernel.is_closed() && kernel.unread() > 0 => Travel::Reset,
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
                Travel::End | Travel::Reset => ends[end].finished = true,
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
