//! The receiving half. It compares each frame's head with the live leases, and scatters the frame's
//! bytes into pages or discards them.
//!
//! It judges a head one step after it was read; [`DestinationHalf::step`] gives the reason.

use super::frame::{Frame, HEAD_MAX};
use super::stream;
use crate::cause::Cause;
use crate::ids::SlotId;
use crate::limits::LANES_MAX;
use crate::stdx::failpoint::is_failpoint_active;
use crate::sys::event::{WaitInterest, WaitSet};
use crate::sys::stream::ByteStream;
use crate::transfer::aux::AuxRecord;
use crate::transfer::plan::{Piece, Template};
use crate::transfer::transport::{
    Arrival, DestinationHalf, Landings, Memory, Notice, SessionLost, share, vectored_io,
};
use bytemuck::Zeroable;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::sync::Arc;

/// Bytes to discard in one read.
const SCRAP_BYTES: usize = 64 << 10;

/// The destination's half of a session.
#[derive(Debug)]
pub struct TcpDestination {
    lanes: Box<[Option<Lane>]>,
    landing: Landing,
    /// A stream belongs to no lane, or cannot be used.
    broken: bool,
    wait: Arc<WaitSet>,
}

/// The target of the bytes.
#[derive(Debug)]
struct Landing {
    template: Template,
    lanes: usize,
    /// By slot, then lane.
    progress: Box<[Progress]>,
    /// By slot; the records that came on lane 0.
    aux: Box<[AuxRecord]>,
    scrap: Box<[u8]>,
}

/// Progress of a lane with a slot.
#[derive(Clone, Default, Debug)]
struct Progress {
    /// Tokens of complete chunks, plus those that this worker already held.
    tokens: u32,
    /// The chunk in progress: its end token, and the next offset.
    chunk: Option<(u32, u64)>,
}

#[derive(Debug)]
struct Lane {
    number: usize,
    incoming: Incoming,
    head: [u8; HEAD_MAX],
    head_read: usize,
    frame: Option<Body>,
}

#[derive(Debug)]
struct Incoming {
    stream: ByteStream,
    /// Bytes that `ctl` read behind the preamble. They stay until the session ends, because this
    /// thread frees nothing.
    early: Vec<u8>,
    early_used: usize,
}

/// A frame with a judged head.
#[derive(Debug)]
struct Body {
    frame: Frame,
    /// Bytes read of `frame.bytes`.
    read: u64,
    /// Whether the bytes go to pages; otherwise they are discarded.
    live: bool,
}

impl TcpDestination {
    /// A session of `lanes` lanes. Their streams join later. `slots` is the number of this worker's
    /// slots. Its mover parks in `wait`.
    pub fn new(
        template: Template,
        lanes: usize,
        slots: usize,
        wait: Arc<WaitSet>,
    ) -> TcpDestination {
        assert!((1..=LANES_MAX).contains(&lanes), "{lanes} lanes");
        TcpDestination {
            lanes: (0..lanes).map(|_| None).collect(),
            landing: Landing {
                template,
                lanes,
                progress: vec![Progress::default(); slots * lanes].into(),
                aux: vec![AuxRecord::zeroed(); slots].into(),
                scrap: vec![0; SCRAP_BYTES].into(),
            },
            broken: false,
            wait,
        }
    }
}

impl DestinationHalf for TcpDestination {
    fn join(&mut self, arrival: Arrival) {
        let number = usize::from(arrival.lane);
        match self.lanes.get_mut(number) {
            Some(free @ None) => match Lane::new(number, arrival, &self.wait) {
                Ok(lane) => *free = Some(lane),
                Err(_) => self.broken = true,
            },
            _ => self.broken = true,
        }
    }

    fn step(&mut self, memory: &Memory, landings: &mut dyn Landings) -> Result<bool, SessionLost> {
        if self.broken {
            return Err(SessionLost::NONSENSE);
        }
        let mut moved = false;
        for index in 0..self.lanes.len() {
            let Some(lane) = &mut self.lanes[index] else { continue };
            let (judged, failed) = lane.judge(&self.landing, landings)?;
            moved |= judged | lane.receive(&mut self.landing, memory, landings)?;
            if let Some(slot) = failed {
                self.revoke(slot);
            }
        }
        Ok(moved)
    }

    fn revoke(&mut self, slot: SlotId) {
        for lane in self.lanes.iter_mut().flatten() {
            if let Some(body) = lane.frame.as_mut().filter(|body| body.frame.notice.slot == slot) {
                body.live = is_failpoint_active("revoked frame goes on landing");
            }
        }
    }

    fn expect(&mut self, notice: &Notice, first: u32, _landings: &mut dyn Landings) {
        if !is_failpoint_active("progress outlives its room") {
            self.landing.of(notice.slot).fill(Progress { tokens: first, chunk: None });
        }
    }
}

impl Landing {
    /// A slot's progress, by lane.
    fn of(&mut self, slot: SlotId) -> &mut [Progress] {
        &mut self.progress[slot.index() * self.lanes..][..self.lanes]
    }

    /// Whether a frame is the next of its room on its lane; the prompt ends at token `wanted`.
    fn continues(&self, frame: &Frame, lane: usize, wanted: u32) -> bool {
        let Frame { tokens, bytes, last, aux, .. } = frame;
        if tokens.start >= tokens.end || tokens.end > wanted {
            return false;
        }
        let share = self.share(tokens, lane);
        let progress = &self.progress[frame.notice.slot.index() * self.lanes + lane];
        let (end, at) = progress.chunk.unwrap_or((tokens.end, share.start));
        let in_order = progress.tokens == tokens.start && end == tokens.end && at == bytes.start;
        let inside = bytes.end <= share.end && (bytes.start < bytes.end || share.is_empty());
        let ends = bytes.end == share.end && tokens.end == wanted;
        in_order && inside && *last == ends && aux.is_some() == (ends && lane == 0)
    }

    fn share(&self, tokens: &Range<u32>, lane: usize) -> Range<u64> {
        share(self.template.bytes(tokens.clone()), lane, self.lanes)
    }

    /// Handles a live frame that has arrived completely.
    fn landed(&mut self, frame: &Frame, lane: usize, landings: &mut dyn Landings) {
        let Frame { notice: Notice { slot, .. }, tokens, bytes, last, aux } = frame;
        let ended = self.share(tokens, lane).end == bytes.end;
        let progress = &mut self.of(*slot)[lane];
        if !ended {
            progress.chunk = Some((tokens.end, bytes.end));
            return;
        }
        *progress = Progress { tokens: tokens.end, chunk: None };
        let landed = self.of(*slot).iter().map(|progress| progress.tokens).min().unwrap_or(0);
        landings.landed(*slot, landed);
        if let Some(aux) = aux {
            self.aux[slot.index()] = *aux;
        }
        if *last {
            let lanes =
                if is_failpoint_active("first lane ends for all") { lane + 1 } else { self.lanes };
            let all = u32::MAX >> (32 - lanes);
            landings.lane_ended(*slot, lane as u8, all, &self.aux[slot.index()]);
        }
    }
}

impl Lane {
    fn new(number: usize, arrival: Arrival, wait: &WaitSet) -> io::Result<Lane> {
        let Arrival { stream, early, .. } = arrival;
        stream.adopt(wait, WaitInterest::Readable)?;
        let early_used =
            if is_failpoint_active("early bytes are dropped") { early.len() } else { 0 };
        let incoming = Incoming { stream, early, early_used };
        Ok(Lane { number, incoming, head: [0; HEAD_MAX], head_read: 0, frame: None })
    }

    /// Judges a head that was read completely in an earlier step. Returns whether there was one,
    /// and a slot that failed because of it.
    fn judge(
        &mut self,
        landing: &Landing,
        landings: &mut dyn Landings,
    ) -> Result<(bool, Option<SlotId>), SessionLost> {
        if self.frame.is_some() || self.head_read < Frame::head_bytes(&self.head[..self.head_read])?
        {
            return Ok((false, None));
        }
        let frame = Frame::parse(&self.head[..self.head_read]);
        let Notice { slot, generation, room } = frame.notice;
        if slot.index() >= landing.aux.len() {
            return Err(SessionLost::NONSENSE);
        }
        let wanted = landings.expected(&frame.notice);
        let mut failed = None;
        if let Some(wanted) = &wanted {
            if !landing.continues(&frame, self.number, wanted.end) {
                return Err(SessionLost::NONSENSE);
            }
            if frame.aux.is_some_and(|aux| !aux.belongs_to(room, generation)) {
                landings.fail(slot, Cause::Corrupt);
                failed = Some(slot);
            }
        }
        let is_wanted = wanted.is_some() || is_failpoint_active("frame lands unasked");
        self.frame = Some(Body { frame, read: 0, live: is_wanted && failed.is_none() });
        self.head_read = 0;
        Ok((true, failed))
    }

    /// Reads the rest of the current frame, then the next head.
    fn receive(
        &mut self,
        landing: &mut Landing,
        memory: &Memory,
        landings: &mut dyn Landings,
    ) -> Result<bool, SessionLost> {
        let mut moved = false;
        while let Some(body) = &mut self.frame {
            let Frame { notice: Notice { slot, .. }, tokens, bytes, .. } = &body.frame;
            let rest = bytes.start + body.read..bytes.end;
            if rest.is_empty() {
                moved = true;
                if let Some(Body { frame, live: true, .. }) = self.frame.take() {
                    landing.landed(&frame, self.number, landings);
                }
                break;
            }
            let read = if body.live {
                let page = |index| memory.lists.page(*slot, index);
                let pieces = landing.template.destination_pieces(tokens.clone(), rest, page);
                self.incoming.scatter(memory, pieces)?
            } else {
                let most = landing.scrap.len().min((rest.end - rest.start) as usize);
                self.incoming.read(&mut landing.scrap[..most])?
            };
            let Some(read) = read else { return Ok(moved) };
            body.read += read as u64;
            moved = true;
        }
        loop {
            let length = Frame::head_bytes(&self.head[..self.head_read])?;
            if self.head_read == length {
                return Ok(moved);
            }
            let Some(read) = self.incoming.read(&mut self.head[self.head_read..length])? else {
                return Ok(moved);
            };
            self.head_read += read;
            moved = true;
        }
    }
}

impl Incoming {
    /// Reads from the stream. Returns `None` if no bytes are available now.
    fn read(&mut self, into: &mut [u8]) -> Result<Option<usize>, SessionLost> {
        let early = self.early();
        if early.is_empty() {
            return some_of(self.stream.read(into));
        }
        let read = early.len().min(into.len());
        into[..read].copy_from_slice(&early[..read]);
        self.early_used += read;
        Ok(Some(read))
    }

    fn scatter(
        &mut self,
        memory: &Memory,
        pieces: impl Iterator<Item = Piece>,
    ) -> Result<Option<usize>, SessionLost> {
        let early = self.early();
        if early.is_empty() {
            return some_of(stream::receive(&self.stream, &memory.region, pieces));
        }
        let read = vectored_io::fill(early, &memory.region, pieces);
        self.early_used += read;
        Ok(Some(read))
    }

    fn early(&self) -> &[u8] {
        &self.early[self.early_used..]
    }
}

/// Interprets the result of a read. The read asked for at least one byte, so 0 means the end of the
/// stream.
fn some_of(read: io::Result<usize>) -> Result<Option<usize>, SessionLost> {
    match read {
        Ok(0) => Err(SessionLost::GONE),
        Ok(read) => Ok(Some(read)),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
            Ok(None)
        }
        Err(_) => Err(SessionLost::GONE),
    }
}
