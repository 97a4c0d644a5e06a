//! TCP lanes: the bytes of movers travel in segments between two kernels with bounded buffers.
//!
//! A lane keeps its order; two lanes have no common order, and some lanes are always slow. Bytes
//! that a partition loses are resent. Bytes that have left arrive even if their process is gone. A
//! process that ends closes its lanes after its written bytes; a dead host does not. A write to a
//! closed lane causes a reset as soon as a host can answer. Not here: the acceptance of a lane
//! (`edge::lanes`), the bytes (`transfer::transport::tcp`).

use super::stream::Stream;
use super::{Cluster, RESENT, SimEvent};
use crate::ids::Leg;
use crate::sim::checkers::reasons::{Effect, FaultSite};
use crate::sim::edge::Input;
use crate::sim::machines::Streams;
use crate::sim::process::{Process, Thread};
use crate::stdx::event_queue::{MICRO, Nanos, SECOND};
use crate::stdx::rng::Rng;
use crate::sys::stream::memory::{self, StreamKernel};
use std::collections::BTreeMap;

/// Longest time from a write, or from the previous segment, until a segment leaves.
const READ: Nanos = 5 * MICRO;
/// Time between two tries of a dial with lost packets, as in kernels.
const DIAL_AGAIN: Nanos = SECOND;

/// Names a lane in the whole simulation.
pub(super) type LaneNumber = u32;

/// A step of a lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// The dial reaches the other host, or fails.
    Reaches,
    /// The next segment leaves this end.
    Leaves(usize),
    /// The next segment arrives at this end.
    Lands(usize),
}

#[derive(Debug)]
enum Segment {
    Bytes(Vec<u8>),
    /// The end of the stream.
    End,
    /// The connection is reset.
    Reset,
}

#[derive(Debug)]
struct Lane {
    /// The dialling host and the dialled host.
    hosts: [usize; 2],
    lives: [u32; 2],
    /// `None` if the host is gone. The dialled end is also `None` until the dial reaches it.
    kernels: [Option<StreamKernel>; 2],
    stands: bool,
    to: [Stream<Segment>; 2],
    /// Bytes on their way to each end.
    under_way: [usize; 2],
    /// Whether the next segment is about to leave each end.
    leaves: [bool; 2],
    /// Whether no more segments leave each end.
    ended: [bool; 2],
    /// A factor of its delays.
    slowness: Nanos,
    held_until: Nanos,
}

impl Lane {
    /// Bytes that can leave this end now.
    fn window(&self, end: usize, room: usize) -> usize {
        let unread = self.kernels[1 - end].as_ref().map_or(0, StreamKernel::unread);
        room.saturating_sub(self.under_way[1 - end] + unread)
    }

    /// Whether a segment can leave this end now.
    fn sends(&self, end: usize, room: usize) -> bool {
        let Some(kernel) = self.kernels[end].as_ref().filter(|_| self.stands && !self.ended[end])
        else {
            return false;
        };
        match kernel.unsent() {
            0 => kernel.is_closed() && !kernel.is_reset(),
            _ => self.window(end, room) > 0,
        }
    }

    fn is_end(&self, end: usize, host: usize, life: u32) -> bool {
        (self.hosts[end], self.lives[end]) == (host, life)
    }

    /// Whether both ends are closed and nothing is in flight.
    fn is_over(&self) -> bool {
        let is_left = |end: usize| {
            self.kernels[end]
                .as_ref()
                .is_none_or(|kernel| kernel.is_closed() && (kernel.is_reset() || self.ended[end]))
        };
        self.stands
            && self.leaves == [false; 2]
            && is_left(0)
            && is_left(1)
            && self.to.iter().all(Stream::is_empty)
    }
}

/// All lanes.
pub(super) struct Lanes {
    streams: Option<Streams>,
    lanes: BTreeMap<LaneNumber, Lane>,
    last: LaneNumber,
    /// Time until which no segment arrives from one host at another.
    held: BTreeMap<(usize, usize), Nanos>,
    dice: Rng,
}

impl Lanes {
    pub(super) fn new(streams: Option<Streams>, dice: Rng) -> Lanes {
        Lanes { streams, lanes: BTreeMap::new(), last: 0, held: BTreeMap::new(), dice }
    }

    fn room(&self) -> usize {
        self.streams.map_or(0, |streams| streams.room)
    }

    /// Delay of a packet on a lane of this slowness.
    fn delay(&mut self, (least, most): (Nanos, Nanos), slowness: Nanos) -> Nanos {
        let resent = if self.dice.one_in(200) { self.dice.range_u64(0, RESENT) } else { 0 };
        self.dice.range_u64(least, most) * slowness + resent
    }

    /// Draws the slowness of a new lane. A lane with small buffers does not also get a high
    /// slowness.
    fn slowness(&mut self) -> Nanos {
        let slow: &[Nanos] = if self.room() < 1000 { &[1, 1, 1, 3] } else { &[1, 1, 1, 1, 10, 50] };
        self.dice.pick(slow)
    }

    /// Forgets lanes that are over.
    pub(super) fn forget(&mut self) {
        self.lanes.retain(|_, lane| !lane.is_over());
    }

    /// Whether a lane wakes the wait set of a process's mover.
    pub(super) fn are_ready(&self, host: usize, life: u32) -> bool {
        self.lanes.values().any(|lane| {
            [0, 1].into_iter().any(|end| {
                lane.is_end(end, host, life)
                    && lane.kernels[end].as_ref().is_some_and(StreamKernel::is_ready)
            })
        })
    }
}

impl Cluster<'_> {
    /// Dials a destination's data port for a source.
    pub(super) fn dial_lane(&mut self, from: usize, to: usize, kernel: StreamKernel) {
        let now = self.agenda.now();
        let lanes = &mut self.lanes;
        let slowness = lanes.slowness();
        lanes.last += 1;
        let lane = Lane {
            hosts: [from, to],
            lives: [self.hosts[from].life, 0],
            kernels: [Some(kernel), None],
            stands: false,
            to: Default::default(),
            under_way: [0; 2],
            leaves: [false; 2],
            ended: [false; 2],
            slowness,
            held_until: 0,
        };
        lanes.lanes.insert(lanes.last, lane);
        let at = now + lanes.delay(self.plan.delay, 1) + lanes.delay(self.plan.delay, 1);
        self.agenda.schedule(at, SimEvent::Lane(Step::Reaches, lanes.last));
    }

    /// After a turn of a process, sends the bytes that it has written, and frees room for the bytes
    /// that it has read.
    pub(super) fn read_lanes(&mut self, host: usize) {
        let now = self.agenda.now();
        let room = self.lanes.room();
        let Lanes { lanes, dice, .. } = &mut self.lanes;
        for (&number, lane) in lanes.iter_mut().filter(|(_, lane)| lane.hosts.contains(&host)) {
            for end in [0, 1] {
                if !lane.leaves[end] && lane.sends(end, room) {
                    lane.leaves[end] = true;
                    let at = now + dice.range_u64(0, READ);
                    self.agenda.schedule(at, SimEvent::Lane(Step::Leaves(end), number));
                }
            }
        }
    }

    pub(super) fn carry(&mut self, step: Step, number: LaneNumber) {
        match step {
            Step::Reaches => self.reach_port(number),
            Step::Leaves(end) => self.leave_end(number, end),
            Step::Lands(end) => self.land_segment(number, end),
        }
    }

    /// Applies an arrived dial. The kernel of the dialled host accepts the connection, even if its
    /// process hangs.
    fn reach_port(&mut self, number: LaneNumber) {
        let now = self.agenda.now();
        let room = self.lanes.room();
        let Some(lane) = self.lanes.lanes.get(&number) else { return };
        let [from, to] = lane.hosts;
        if lane.lives[0] != self.hosts[from].life
            || lane.kernels[0].as_ref().is_none_or(|kernel| kernel.is_closed())
        {
            self.lanes.lanes.remove(&number);
            return;
        }
        let target = &self.hosts[to];
        if self.is_parted(from, to) || target.dark_until > now {
            return self.agenda.schedule(now + DIAL_AGAIN, SimEvent::Lane(Step::Reaches, number));
        }
        let listens = target.process.is_some() && target.role == Leg::Decode;
        let life = listens.then_some(target.life);
        let Some(lane) = self.lanes.lanes.get_mut(&number) else { return };
        lane.stands = true;
        let Some(life) = life else {
            lane.ended = [true; 2];
            return self.reset_lane(number, 0, now);
        };
        let (stream, kernel) = memory::stream(true, room);
        (lane.lives[1], lane.kernels[1]) = (life, Some(kernel));
        if let Some(kernel) = &lane.kernels[0] {
            kernel.connected();
        }
        self.trace.record(now, "lane", number as usize, "stands", None, to as u64);
        self.deliver(to, life, Input::Lane(stream));
        self.rouse_end(number, 0);
        self.read_lanes(from);
    }

    fn leave_end(&mut self, number: LaneNumber, end: usize) {
        let now = self.agenda.now();
        let slowness = self.lanes.lanes.get(&number).map_or(1, |lane| lane.slowness);
        let delay = self.lanes.delay(self.plan.delay, slowness);
        let room = self.lanes.room();
        let most = self.lanes.streams.map_or(0, |streams| streams.segment);
        let Lanes { lanes, dice, .. } = &mut self.lanes;
        let Some(lane) = lanes.get_mut(&number) else { return };
        lane.leaves[end] = false;
        if !lane.sends(end, room) {
            return;
        }
        let most = most.min(lane.window(end, room));
        let Some(kernel) = &lane.kernels[end] else { return };
        let segment = match kernel.unsent() {
            0 => {
                lane.ended[end] = true;
                if kernel.unread() > 0 { Segment::Reset } else { Segment::End }
            }
            _ => Segment::Bytes(kernel.take(dice.range_u64(1, most as u64) as usize).bytes),
        };
        if let Segment::Bytes(bytes) = &segment {
            lane.under_way[1 - end] += bytes.len();
        }
        let at = lane.to[1 - end].put(now + delay, segment);
        self.agenda.schedule(at, SimEvent::Lane(Step::Lands(1 - end), number));
        if lane.sends(end, room) {
            lane.leaves[end] = true;
            let at = now + dice.range_u64(1, READ);
            self.agenda.schedule(at, SimEvent::Lane(Step::Leaves(end), number));
        }
        self.rouse_end(number, end);
    }

    fn land_segment(&mut self, number: LaneNumber, end: usize) {
        let now = self.agenda.now();
        let delay = self.lanes.delay(self.plan.delay, 1);
        let Lanes { lanes, held, .. } = &mut self.lanes;
        let Some(lane) = lanes.get_mut(&number) else { return };
        let (from, to) = (lane.hosts[1 - end], lane.hosts[end]);
        if self.parted.contains_key(&(from, to)) {
            return lane.to[end].lose();
        }
        let until = held.get(&(from, to)).copied().unwrap_or(0).max(lane.held_until);
        if until > now {
            return self.agenda.schedule(until + delay, SimEvent::Lane(Step::Lands(end), number));
        }
        let Some(segment) = lane.to[end].take(now) else { return };
        let (what, detail) = match &segment {
            Segment::Bytes(bytes) => ("brings", bytes.len()),
            Segment::End => ("ends", 0),
            Segment::Reset => ("breaks", 0),
        };
        if let Segment::Bytes(bytes) = &segment {
            lane.under_way[end] -= bytes.len();
        }
        let is_dark = self.hosts[to].dark_until > now;
        match (&lane.kernels[end], segment) {
            (Some(kernel), segment) if !kernel.is_closed() => {
                match segment {
                    Segment::Bytes(bytes) => kernel.receive_bytes(&bytes),
                    Segment::End => kernel.end(),
                    Segment::Reset => kernel.reset(),
                }
                self.trace.record(now, "lane", number as usize, what, None, detail as u64);
                self.rouse_end(number, end);
            }
            // The host at this address does not know the connection.
            (_, Segment::Bytes(_)) if !is_dark => {
                lane.ended[1 - end] = true;
                self.reset_lane(number, 1 - end, now);
            }
            (Some(kernel), Segment::Reset) => kernel.reset(),
            _ => {}
        }
        self.read_lanes(from);
    }

    /// Resets an end of a lane, at `from` or later.
    fn reset_lane(&mut self, number: LaneNumber, end: usize, from: Nanos) {
        let delay = self.lanes.delay(self.plan.delay, 1);
        let Some(lane) = self.lanes.lanes.get_mut(&number) else { return };
        let at = lane.to[end].put(from + delay, Segment::Reset);
        self.agenda.schedule(at, SimEvent::Lane(Step::Lands(end), number));
    }

    /// Breaks an established lane at any byte. Both ends notice it, each at its time.
    pub(super) fn cut_lane(&mut self) {
        let now = self.agenda.now();
        let Some(number) = self.pick_lane() else { return };
        let late =
            [(); 2].map(|()| if self.dice.one_in(2) { self.dice.range_u64(0, RESENT) } else { 0 });
        let Some(lane) = self.lanes.lanes.get_mut(&number) else { return };
        let [from, to] = lane.hosts;
        lane.to.iter_mut().for_each(Stream::clear);
        (lane.under_way, lane.ended) = ([0; 2], [true; 2]);
        self.reasons.add(Effect::Breaks, FaultSite::Way(from, to), now, now);
        self.trace.record(now, "lane", number as usize, "is cut", None, to as u64);
        for end in [0, 1] {
            self.reset_lane(number, end, now + late[end]);
        }
    }

    /// Stops the arrivals on a lane for a while. Other lanes of its session continue.
    pub(super) fn hold_lane(&mut self, over: Nanos) {
        let now = self.agenda.now();
        let Some(number) = self.pick_lane() else { return };
        let Some(lane) = self.lanes.lanes.get_mut(&number) else { return };
        let [from, to] = lane.hosts;
        lane.held_until = over.max(lane.held_until);
        self.reasons.add(Effect::Holds, FaultSite::Way(from, to), now, over);
        self.trace.record(now, "lane", number as usize, "hangs", None, to as u64);
    }

    fn pick_lane(&mut self) -> Option<LaneNumber> {
        let open = |kernel: &Option<StreamKernel>| {
            kernel.as_ref().is_some_and(|kernel| !kernel.is_closed())
        };
        let standing = self
            .lanes
            .lanes
            .iter()
            .filter(|(_, lane)| lane.stands && lane.kernels.iter().all(open));
        let standing: Vec<LaneNumber> = standing.map(|(&number, _)| number).collect();
        (!standing.is_empty()).then(|| self.lanes.dice.pick(&standing))
    }

    pub(super) fn hold_lanes(&mut self, from: usize, to: usize, over: Nanos) {
        let until = self.lanes.held.entry((from, to)).or_default();
        *until = over.max(*until);
    }

    /// Closes the lanes of a process that is gone, unless its host is also gone.
    pub(super) fn leave_lanes(&mut self, host: usize, life: u32, silent: bool) {
        if silent {
            for lane in self.lanes.lanes.values_mut() {
                for end in (0..2).filter(|&end| lane.is_end(end, host, life)).collect::<Vec<_>>() {
                    (lane.kernels[end], lane.ended[end]) = (None, true);
                }
            }
        }
        self.read_lanes(host);
    }

    /// Resends data that was lost between hosts that can reach each other again.
    pub(super) fn carry_again(&mut self) {
        let now = self.agenda.now();
        let Lanes { lanes, dice, .. } = &mut self.lanes;
        for (&number, lane) in lanes {
            for end in [0, 1] {
                if self.parted.contains_key(&(lane.hosts[1 - end], lane.hosts[end])) {
                    continue;
                }
                for _ in 0..lane.to[end].resend() {
                    let at = now + dice.range_u64(0, RESENT);
                    self.agenda.schedule(at, SimEvent::Lane(Step::Lands(end), number));
                }
            }
        }
    }

    /// Wakes the mover of a lane's end after an event, if it sleeps, or `ctl` if `ctl` still owns
    /// the lane.
    fn rouse_end(&mut self, number: LaneNumber, end: usize) {
        let Some(lane) = self.lanes.lanes.get(&number) else { return };
        let Some(kernel) = &lane.kernels[end] else { return };
        let host = lane.hosts[end];
        if self.hosts[host].life != lane.lives[end] || kernel.is_closed() {
            return;
        }
        match kernel.is_adopted() {
            false => self.wake_soon(host, Thread::Ctl),
            true if kernel.is_ready()
                && self.hosts[host].process.as_ref().is_some_and(Process::sleeps) =>
            {
                self.wake_soon(host, Thread::Move);
            }
            true => {}
        }
    }
}
