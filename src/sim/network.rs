//! The network between hosts: bytes in pieces, with delays, in order for each direction.
//!
//! Invariants: a stream's bytes arrive once and in order, before its end. A reader that does not
//! read stops its writer. If a program closes a stream with unread bytes, the stream is reset, as
//! on Linux. An abstract name leads to a process on the same machine. Nothing arrives at a host, or
//! from it, while it is cut off, and nothing passes between two hosts that are cut from each other.
//! A stream with a limit of silence is reset after that time. Its other end hears of that with the
//! next piece that it sends.

use super::{Event, RunDigest};
use crate::limits::NET_CLIENT_SILENCE_MAX;
use crate::net::{Address, Dial, MemoryKernel};
use crate::stdx::event_queue::{EventQueue, MICRO, MILLI, Nanos};
use crate::stdx::rng::Rng;
use crate::sys::stream::memory::{Segment, StreamKernel};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

/// Capacity of a stream in bytes, at each side. A run has one of them.
const ROOMS: [usize; 3] = [600, 4 << 10, 4 << 10];
/// The longest piece in bytes. A run has one of them.
const PIECES: [u64; 4] = [60, 300, 1500, 1500];
/// The shortest and the usual longest delay of a piece.
const DELAY: (Nanos, Nanos) = (20 * MICRO, 300 * MICRO);
/// The longest delay of some pieces: of a packet that was sent twice.
const LATE: Nanos = 20 * MILLI;
/// The longest delay of a few pieces: of a packet that was sent again after a timeout.
const SENT_AGAIN: Nanos = 300 * MILLI;
/// One end of a stream can be reset so long before the other.
const HALF_RESET: Nanos = 500 * MILLI;

/// The address of a host.
pub fn address_of(host: usize) -> IpAddr {
    Ipv4Addr::new(10, 0, (host / 250) as u8, (host % 250) as u8 + 1).into()
}

/// All hosts and connections.
#[derive(Debug)]
pub struct Network {
    hosts: Vec<MemoryKernel>,
    /// By host: the machine that it is on. Processes of one machine can share memory.
    machines: Vec<u8>,
    /// Connections that have an open end, or bytes on their way.
    connections: BTreeMap<usize, Connection>,
    /// By host: its connections.
    of_host: Vec<BTreeSet<usize>>,
    /// Hosts between which no connection opens until a time.
    refusals: BTreeMap<(usize, usize), Nanos>,
    /// The last cut of each place.
    cuts: BTreeMap<CutPlace, Cut>,
    /// Number of connections dialled so far.
    dialled: usize,
    /// Hosts that have sent bytes, so that their programs can write again.
    drained: BTreeSet<usize>,
    /// Capacity of a stream in bytes, at each side.
    room: usize,
    /// The longest piece in bytes.
    piece_max: u64,
    dice: Rng,
}

/// Where nothing passes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum CutPlace {
    /// Between this host and all others.
    Host(usize),
    /// Between these two hosts.
    Between(usize, usize),
}

impl CutPlace {
    fn covers(self, one: usize, other: usize) -> bool {
        match self {
            CutPlace::Host(host) => host == one || host == other,
            CutPlace::Between(near, far) => [(one, other), (other, one)].contains(&(near, far)),
        }
    }
}

#[derive(Clone, Copy, Default, Debug)]
struct Cut {
    since: Nanos,
    until: Nanos,
}

#[derive(Debug)]
struct Connection {
    address: Address,
    from: Option<std::net::SocketAddr>,
    /// The dial has reached its host.
    is_answered: bool,
    ends: [End; 2],
}

#[derive(Debug)]
struct End {
    host: usize,
    /// `None` until the dial arrives, or if no listener has the address.
    kernel: Option<StreamKernel>,
    /// Pieces in transit to this end, with their arrival times.
    travelling: VecDeque<(Nanos, Travel)>,
    /// Bytes that travel to this end.
    bytes: usize,
    /// Nothing more is sent from this end, but a reset.
    finished: bool,
    /// The reset was sent.
    is_reset: bool,
    /// The stream was reset because of silence, and the other end does not know it.
    is_silenced: bool,
}

#[derive(Debug)]
enum Travel {
    Bytes(Segment),
    End,
    Reset,
}

impl End {
    fn new(host: usize, kernel: Option<StreamKernel>) -> End {
        let travelling = VecDeque::new();
        End {
            host,
            kernel,
            travelling,
            bytes: 0,
            finished: false,
            is_reset: false,
            is_silenced: false,
        }
    }

    fn reset(&mut self) {
        (self.finished, self.is_reset) = (true, true);
        self.kernel.iter().for_each(StreamKernel::reset);
    }

    /// A reset arrives at this time, or after what travels already. Returns the time.
    fn add_reset(&mut self, at: Nanos) -> Nanos {
        let at = self.travelling.back().map_or(at, |(last, _)| at.max(last + 1));
        self.travelling.push_back((at, Travel::Reset));
        at
    }

    fn is_open(&self) -> bool {
        self.kernel.as_ref().is_some_and(|kernel| !kernel.is_closed() && !kernel.is_reset())
    }
}

impl Connection {
    /// Whether no cut can touch it.
    fn is_local(&self) -> bool {
        let [near, far] = &self.ends;
        near.host == far.host || !matches!(self.address, Address::Tcp(_))
    }

    /// How long each end permits the other one to be silent.
    fn limits(&self) -> [Option<Duration>; 2] {
        let [near, far] = [0, 1].map(|end: usize| self.ends[end].kernel.as_ref()?.silence_max());
        // A process that has not accepted the stream yet sets its limit then.
        let far = far.or_else(|| self.ends[1].kernel.as_ref().map(|_| NET_CLIENT_SILENCE_MAX));
        [near, far]
    }

    fn is_at(&self, place: CutPlace) -> bool {
        let [near, far] = &self.ends;
        place.covers(near.host, far.host)
    }

    /// Both programs have closed it, and nothing travels.
    fn is_over(&self) -> bool {
        let is_over = |end: &End| {
            end.travelling.is_empty() && end.kernel.as_ref().is_none_or(StreamKernel::is_closed)
        };
        self.is_answered && self.ends.iter().all(is_over)
    }
}

impl Network {
    /// A network without hosts.
    pub fn new(dice: Rng) -> Network {
        Network {
            hosts: Vec::new(),
            machines: Vec::new(),
            connections: BTreeMap::new(),
            of_host: Vec::new(),
            refusals: BTreeMap::new(),
            cuts: BTreeMap::new(),
            dialled: 0,
            drained: BTreeSet::new(),
            room: dice.fork("room").pick(&ROOMS),
            piece_max: dice.fork("pieces").pick(&PIECES),
            dice,
        }
    }

    /// Adds a host on this machine, and returns its kernel.
    pub fn add_host(&mut self, machine: u8, base: Instant, random: Rng) -> MemoryKernel {
        let kernel = MemoryKernel::new(address_of(self.hosts.len()), self.room, base, random);
        self.hosts.push(kernel.clone());
        self.machines.push(machine);
        self.of_host.push(BTreeSet::new());
        kernel
    }

    /// A new kernel for a host that has restarted. Its old connections lead nowhere.
    pub fn reboot(&mut self, host: usize, base: Instant, now: Nanos) -> MemoryKernel {
        let random = self.dice.fork(&format!("reboot of {host} at {now}"));
        let kernel = MemoryKernel::new(address_of(host), self.room, base, random);
        kernel.set_now(base + Duration::from_nanos(now));
        self.hosts[host] = kernel.clone();
        kernel
    }

    /// Resets a random open TCP connection. One of its ends can notice it later, or only when it
    /// sends or its limit of silence has passed. Returns the hosts that notice it now.
    pub fn reset_one(
        &mut self,
        queue: &mut EventQueue<Event>,
        digest: &mut RunDigest,
    ) -> BTreeSet<usize> {
        let can_reset = |(&at, connection): (&usize, &Connection)| {
            let is_open = connection.ends.iter().all(End::is_open);
            (is_open && matches!(connection.address, Address::Tcp(_))).then_some(at)
        };
        let open: Vec<usize> = self.connections.iter().filter_map(can_reset).collect();
        if open.is_empty() {
            return BTreeSet::new();
        }
        let number = self.dice.pick(&open);
        let first = self.dice.pick(&[None, Some(0), Some(1)]);
        let delay = self.dice.range_u64(MILLI, HALF_RESET);
        let is_lost = first.is_some() && self.dice.one_in(2);
        digest.note([3, number as u64]);
        let connection = self.connections.get_mut(&number).expect("it was just listed");
        let (limits, mut noticed) = (connection.limits(), BTreeSet::new());
        for (place, end) in connection.ends.iter_mut().enumerate() {
            if first.is_none_or(|first| first == place) {
                end.reset();
                end.is_silenced = is_lost;
                noticed.insert(end.host);
            } else {
                let delay = match limits[place] {
                    _ if !is_lost => delay,
                    Some(limit) => limit.as_nanos() as Nanos,
                    None => continue,
                };
                let at = end.add_reset(queue.now() + delay);
                queue.schedule(at, Event::Arrival { connection: number, end: place });
            }
        }
        noticed
    }

    /// Resets all connections between two hosts, and refuses new ones until this time.
    pub fn break_pair(
        &mut self,
        (one, other): (usize, usize),
        until: Nanos,
        digest: &mut RunDigest,
    ) {
        self.refusals.insert((one.min(other), one.max(other)), until);
        let place = CutPlace::Between(one, other);
        for (number, connection) in &mut self.connections {
            let is_open = connection.ends.iter().all(End::is_open);
            if is_open && connection.is_at(place) && !connection.is_local() {
                digest.note([5, *number as u64]);
                connection.ends.iter_mut().for_each(End::reset);
            }
        }
    }

    /// Lets nothing pass at this place until this time. Streams that limit the silence of the other
    /// side are reset in time.
    pub fn cut(&mut self, place: CutPlace, until: Nanos, queue: &mut EventQueue<Event>) {
        let now = queue.now();
        let Cut { since, until: end } = self.cuts.entry(place).or_default();
        if *end <= now {
            *since = now;
        }
        *end = (*end).max(until);
        let since = *since;
        let connections = self.connections.values().filter(|connection| connection.is_at(place));
        let limits = connections.flat_map(Connection::limits).flatten();
        for limit in limits.collect::<BTreeSet<_>>() {
            let at = (since + limit.as_nanos() as Nanos).max(now);
            queue.schedule(at, Event::Silence { place, limit });
        }
    }

    /// Resets the streams at this place that have this limit of silence, if nothing has passed
    /// there for so long. The other end of such a stream notices it by its own limit. Returns the
    /// hosts that notice it now.
    pub fn reset_silent(
        &mut self,
        place: CutPlace,
        limit: Duration,
        queue: &mut EventQueue<Event>,
        digest: &mut RunDigest,
    ) -> BTreeSet<usize> {
        let (now, mut noticed) = (queue.now(), BTreeSet::new());
        let Cut { since, until } = self.cuts[&place];
        if until <= now || now - since < limit.as_nanos() as Nanos {
            return noticed;
        }
        for (number, connection) in &mut self.connections {
            if connection.is_local() || !connection.is_at(place) {
                continue;
            }
            let (limits, mut is_reset, mut later) = (connection.limits(), false, None);
            for (place, end) in connection.ends.iter_mut().enumerate() {
                let Some(kernel) = end.kernel.as_ref().filter(|_| end.is_open()) else { continue };
                match limits[place] {
                    Some(most) if most <= limit => {
                        digest.note([4, *number as u64]);
                        kernel.reset();
                        (end.finished, end.is_silenced) = (true, true);
                        noticed.insert(end.host);
                        is_reset = true;
                    }
                    Some(most) => later = Some((place, now + most.as_nanos() as Nanos)),
                    None => {}
                }
            }
            if let Some((place, at)) = later.filter(|_| is_reset) {
                let at = connection.ends[place].add_reset(at);
                queue.schedule(at, Event::Arrival { connection: *number, end: place });
            }
        }
        noticed
    }

    /// The time at which a piece can pass, if one of its hosts is cut off.
    fn passes_at(&self, number: usize, now: Nanos) -> Option<Nanos> {
        let connection = &self.connections[&number];
        let [near, far] = &connection.ends;
        let until = self.cut_end(near.host, far.host);
        (until > now && !connection.is_local()).then_some(until)
    }

    /// The end of the last cut between two hosts.
    pub fn cut_end(&self, one: usize, other: usize) -> Nanos {
        let places = self.cuts.iter().filter(|(place, _)| place.covers(one, other));
        let until = places.map(|(_, cut)| cut.until).max().unwrap_or(0);
        if one == other { 0 } else { until }
    }

    /// Returns the event, unless it is an arrival during a cut: that happens again after the cut.
    pub fn hold_back(&mut self, event: Event, queue: &mut EventQueue<Event>) -> Option<Event> {
        let number = match event {
            Event::Dial(number) | Event::Arrival { connection: number, .. } => number,
            other => return Some(other),
        };
        match self.passes_at(number, queue.now()) {
            Some(until) => {
                let at = until + self.delay();
                queue.schedule(at, event);
                None
            }
            None => Some(event),
        }
    }

    /// Whether a host has a reason to take a turn now.
    pub fn is_ready(&self, host: usize) -> bool {
        self.hosts[host].is_ready()
    }

    /// Whether a lane of a host has a reason to wake its mover.
    pub fn has_ready_lane(&self, host: usize) -> bool {
        let ends = self.of_host[host].iter().flat_map(|at| &self.connections[at].ends);
        let mut ends = ends.filter(|end| end.host == host);
        ends.any(|end| end.kernel.as_ref().is_some_and(StreamKernel::is_ready))
    }

    /// Takes the hosts with programs that can write again.
    pub fn take_drained(&mut self) -> BTreeSet<usize> {
        std::mem::take(&mut self.drained)
    }

    /// A process dies: its streams take no more bytes from it.
    pub fn freeze(&self, host: usize) {
        let ends = self.of_host[host].iter().flat_map(|at| &self.connections[at].ends);
        for end in ends.filter(|end| end.host == host) {
            end.kernel.iter().for_each(StreamKernel::freeze);
        }
    }

    /// A dial reaches its host. Returns the hosts that notice it.
    pub fn open(&mut self, number: usize, now: Nanos, digest: &mut RunDigest) -> [usize; 2] {
        let connection = self.connections.get_mut(&number).expect("a dial has a connection");
        let is_local = connection.is_local();
        let Connection { address, from, is_answered, ends: [near, far] } = connection;
        *is_answered = true;
        let pair = (near.host.min(far.host), near.host.max(far.host));
        let is_refused = self.refusals.get(&pair).is_some_and(|until| now < *until);
        if is_local || !is_refused {
            far.kernel = self.hosts[far.host].offer(address, *from);
        }
        if let Some(kernel) = &near.kernel {
            match far.kernel {
                Some(_) => kernel.connected(),
                None => kernel.fail(std::io::ErrorKind::ConnectionRefused),
            }
        }
        digest.note([1, number as u64, far.kernel.is_some().into()]);
        [near.host, far.host]
    }

    /// The next piece arrives at this end of a connection. Returns its host.
    pub fn arrive(
        &mut self,
        (number, end): (usize, usize),
        queue: &mut EventQueue<Event>,
        digest: &mut RunDigest,
    ) -> usize {
        let delay = self.delay();
        let connection = self.connections.get_mut(&number).expect("an arrival has a connection");
        if std::mem::take(&mut connection.ends[end].is_silenced) {
            connection.ends[end].is_reset = true;
            let at = queue.now() + delay;
            connection.ends[1 - end].travelling.push_back((at, Travel::Reset));
            queue.schedule(at, Event::Arrival { connection: number, end: 1 - end });
        }
        let end = &mut connection.ends[end];
        let (_, travel) = end.travelling.pop_front().expect("an arrival has travelled");
        digest.note([2, number as u64]);
        match travel {
            Travel::Bytes(segment) => {
                digest.note_bytes(&segment.bytes);
                end.bytes -= segment.bytes.len();
                if let Some(kernel) = &end.kernel {
                    // The bytes stay unread if the program has closed the stream: a reset follows.
                    kernel.receive(segment);
                }
            }
            Travel::End => end.kernel.iter().for_each(StreamKernel::end),
            Travel::Reset => end.reset(),
        }
        end.host
    }

    /// Sends what the program of this host has written, and what its reads let others send. Forgets
    /// connections that are over.
    pub fn pump(&mut self, host: usize, queue: &mut EventQueue<Event>) {
        for dial in self.hosts[host].take_dials() {
            self.dial(host, dial, queue);
        }
        for number in self.of_host[host].iter().copied().collect::<Vec<_>>() {
            (0..2).for_each(|end| self.send(number, end, queue));
            if self.connections[&number].is_over() {
                let ends = self.connections.remove(&number).map(|connection| connection.ends);
                for end in ends.into_iter().flatten() {
                    self.of_host[end.host].remove(&number);
                }
            }
        }
    }

    fn dial(&mut self, host: usize, dial: Dial, queue: &mut EventQueue<Event>) {
        let to = match &dial.address {
            Address::Tcp(socket) => {
                self.hosts.iter().position(|kernel| kernel.host() == socket.ip())
            }
            Address::Abstract(_) => {
                let is_near = |other: &usize| self.machines[*other] == self.machines[host];
                let mut near = (0..self.hosts.len()).filter(is_near);
                Some(
                    near.find(|&other| self.hosts[other].has_listener(&dial.address))
                        .unwrap_or(host),
                )
            }
        };
        let Some(to) = to else {
            return dial.stream.fail(std::io::ErrorKind::HostUnreachable);
        };
        let ends = [End::new(host, Some(dial.stream)), End::new(to, None)];
        let Dial { address, from, .. } = dial;
        let number = self.dialled;
        self.dialled += 1;
        self.connections.insert(number, Connection { address, from, is_answered: false, ends });
        self.of_host[host].insert(number);
        self.of_host[to].insert(number);
        let at = queue.now() + self.delay();
        queue.schedule(at, Event::Dial(number));
    }

    /// Sends what was written at this end, as far as the other end has room.
    fn send(&mut self, number: usize, end: usize, queue: &mut EventQueue<Event>) {
        loop {
            let ends = &self.connections[&number].ends;
            let (from, to) = (&ends[end], &ends[1 - end]);
            let Some(kernel) = from.kernel.as_ref() else { return };
            let Some(other) = &to.kernel else { return };
            let room = self.room.saturating_sub(to.bytes + other.unread());
            // A closed stream with unread bytes loses what it has not sent.
            let is_cut = kernel.is_closed() && kernel.unread() > 0 && !from.is_reset;
            let travel = match kernel.unsent() {
                _ if is_cut => Travel::Reset,
                _ if from.finished => return,
                0 if kernel.is_shut() => Travel::End,
                0 => return,
                _ if room == 0 && !other.is_closed() => return,
                _ => {
                    let most = self.dice.range_u64(1, self.piece_max) as usize;
                    self.drained.insert(from.host);
                    Travel::Bytes(kernel.take(most.min(room.max(1))))
                }
            };
            let at = queue.now() + self.delay();
            let connection = self.connections.get_mut(&number).expect("it has just been read");
            let (from, to) = match &mut connection.ends {
                [near, far] if end == 0 => (near, far),
                [near, far] => (far, near),
            };
            let at = at.max(to.travelling.back().map_or(0, |(at, _)| *at) + 1);
            match &travel {
                Travel::Bytes(segment) => to.bytes += segment.bytes.len(),
                Travel::End => from.finished = true,
                Travel::Reset => (from.finished, from.is_reset) = (true, true),
            }
            to.travelling.push_back((at, travel));
            queue.schedule(at, Event::Arrival { connection: number, end: 1 - end });
        }
    }

    fn delay(&mut self) -> Nanos {
        let (least, most) = DELAY;
        let most = match self.dice.range_u64(0, 999) {
            0 => SENT_AGAIN,
            1..=33 => LATE,
            _ => most,
        };
        self.dice.range_u64(least, most)
    }
}
