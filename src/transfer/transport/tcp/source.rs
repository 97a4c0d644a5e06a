//! The sending half: posts are cut into one share per lane. Lanes send one frame of each slot in
//! turn, so that a long prompt does not delay a short one.

use super::frame::{FRAME_MAX, Frame, HEAD_MAX};
use super::preamble::Preamble;
use super::stream;
use crate::ids::{SessionGeneration, SlotId};
use crate::limits::LANES_MAX;
use crate::sys::event::{WaitInterest, WaitSet};
use crate::sys::stream::ByteStream;
use crate::transfer::plan::Template;
use crate::transfer::transport::{
    CompletionMode, Full, Memory, Notice, Post, SessionLost, SourceHalf, share,
};
use crate::wire::message::Token;
use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::sync::Arc;

/// The source's half of a session.
#[derive(Debug)]
pub struct TcpSource {
    sending: Sending,
    lanes: Box<[Lane]>,
}

/// The data that all lanes send from.
#[derive(Debug)]
struct Sending {
    template: Template,
    /// One post per slot at a time; the mover merges further chunks.
    jobs: Box<[Option<Job>]>,
    lanes: usize,
    frame_max: u64,
    wait: Arc<WaitSet>,
}

#[derive(Debug)]
struct Job {
    post: Post,
    /// One bit for each lane that has not sent its share. After a withdrawal: one bit for each lane
    /// that is in the middle of a frame.
    unsent: u32,
    withdrawn: bool,
}

#[derive(Debug)]
struct Lane {
    number: usize,
    stream: ByteStream,
    /// Slots with unsent bytes, and the offset in their chunk.
    queue: VecDeque<(SlotId, u64)>,
    begun: Option<Begun>,
    head: [u8; HEAD_MAX],
    waits_for_room: bool,
}

/// A frame that is being sent: its head and its bytes.
#[derive(Clone, Debug)]
struct Begun {
    /// The slot; None for the preamble.
    slot: Option<SlotId>,
    head_bytes: usize,
    /// Bytes of the chunk.
    bytes: Range<u64>,
    /// Bytes sent, head included.
    sent: usize,
}

impl TcpSource {
    /// A session over `streams`, which were dialled to the destination's data port and need not be
    /// connected yet. `slots` is the number of this worker's slots. Its mover parks in `wait`.
    pub fn new(
        streams: Vec<impl Into<ByteStream>>,
        (token, session): (Token, SessionGeneration),
        template: Template,
        slots: usize,
        wait: Arc<WaitSet>,
    ) -> io::Result<TcpSource> {
        let lanes = streams.len();
        assert!((1..=LANES_MAX).contains(&lanes), "{lanes} lanes");
        let lane = |(number, stream)| {
            let preamble = Preamble { token, session, lane: number as u16, lanes: lanes as u16 };
            Lane::new(number, stream, &preamble, slots, &wait)
        };
        let lanes_open =
            streams.into_iter().map(Into::into).enumerate().map(lane).collect::<io::Result<_>>()?;
        let jobs = (0..slots).map(|_| None).collect();
        let sending = Sending { template, jobs, lanes, frame_max: FRAME_MAX, wait };
        Ok(TcpSource { sending, lanes: lanes_open })
    }

    /// Sets a shorter frame length than [`FRAME_MAX`].
    #[must_use]
    pub fn with_frames_of(mut self, bytes: u64) -> TcpSource {
        self.sending.frame_max = bytes.clamp(1, FRAME_MAX);
        self
    }
}

impl SourceHalf for TcpSource {
    fn completion(&self) -> CompletionMode {
        CompletionMode::Pushed
    }

    fn post(&mut self, _memory: &Memory, post: &Post) -> Result<(), Full> {
        let job = &mut self.sending.jobs[post.slot.index()];
        if job.is_some() {
            return Err(Full);
        }
        let mut post = post.clone();
        if let Some(aux) = &mut post.last {
            aux.generation = post.target.generation.0;
        }
        let slot = post.slot;
        *job = Some(Job { post, unsent: u32::MAX >> (32 - self.lanes.len()), withdrawn: false });
        for lane in &mut self.lanes {
            let share = self.sending.share(slot, lane.number);
            lane.queue.push_back((slot, share.start));
        }
        Ok(())
    }

    fn step(
        &mut self,
        memory: &Memory,
        completed: &mut dyn FnMut(SlotId),
    ) -> Result<bool, SessionLost> {
        let mut moved = false;
        for lane in &mut self.lanes {
            moved |= lane.step(&mut self.sending, memory, completed)?;
        }
        Ok(moved)
    }

    fn withdraw(&mut self, slot: SlotId) -> bool {
        let Some(job) = &mut self.sending.jobs[slot.index()] else { return true };
        (job.withdrawn, job.unsent) = (true, 0);
        for lane in &mut self.lanes {
            lane.queue.retain(|&(queued, _)| queued != slot);
            let Some(begun) = lane.begun.as_ref().filter(|begun| begun.slot == Some(slot)) else {
                continue;
            };
            if begun.sent == 0 {
                lane.begun = None;
            } else {
                job.unsent |= 1 << lane.number;
            }
        }
        let quiet = job.unsent == 0;
        if quiet {
            self.sending.jobs[slot.index()] = None;
        }
        quiet
    }
}

impl Sending {
    /// The part of the slot's post that `lane` carries.
    fn share(&self, slot: SlotId, lane: usize) -> Range<u64> {
        let tokens = self.jobs[slot.index()].as_ref().map_or(0..0, |job| job.post.tokens.clone());
        share(self.template.bytes(tokens), lane, self.lanes)
    }

    /// The slot's next frame on a lane, from offset `at`.
    fn frame(&self, slot: SlotId, lane: usize, at: u64) -> Option<Frame> {
        let post = &self.jobs[slot.index()].as_ref()?.post;
        let share = self.share(slot, lane);
        let bytes = at..share.end.min(at + self.frame_max);
        let last = post.last.is_some() && bytes.end == share.end;
        Some(Frame {
            notice: Notice {
                slot: post.target.slot,
                generation: post.target.generation,
                room: post.target.room,
            },
            tokens: post.tokens.clone(),
            bytes,
            last,
            aux: post.last.filter(|_| last && lane == 0),
        })
    }

    /// Sends the rest of a frame, as far as the stream takes it.
    fn send(
        &self,
        stream: &ByteStream,
        head: &[u8],
        begun: &Begun,
        memory: &Memory,
    ) -> io::Result<usize> {
        let head = &head[begun.sent.min(begun.head_bytes)..begun.head_bytes];
        let payload = begun.sent.saturating_sub(begun.head_bytes) as u64;
        let (slot, tokens) = match begun.slot.and_then(|slot| self.jobs[slot.index()].as_ref()) {
            Some(job) => (job.post.slot, job.post.tokens.clone()),
            None => (SlotId(0), 0..0),
        };
        let bytes = begun.bytes.start + payload..begun.bytes.end;
        let page = |index| memory.lists.page(slot, index);
        let pieces = self.template.source_pieces(tokens, bytes, page);
        memory.counters.add(u64::from(begun.sent == 0), 1);
        stream::send(stream, head, &memory.region, pieces)
    }

    /// Notes that a lane has sent a frame. Returns the offset at which the lane continues, and
    /// whether nothing of the slot is outstanding.
    fn sent(&mut self, slot: SlotId, lane: usize, end: u64) -> (Option<u64>, bool) {
        let share = self.share(slot, lane);
        let Some(job) = &mut self.jobs[slot.index()] else { return (None, false) };
        if end < share.end && !job.withdrawn {
            return (Some(end), false);
        }
        job.unsent &= !(1 << lane);
        let quiet = job.unsent == 0;
        if quiet {
            self.jobs[slot.index()] = None;
        }
        (None, quiet)
    }
}

impl Lane {
    fn new(
        number: usize,
        stream: ByteStream,
        preamble: &Preamble,
        slots: usize,
        wait: &WaitSet,
    ) -> io::Result<Lane> {
        stream.set_nodelay()?;
        stream.adopt(wait, WaitInterest::ReadableOrWritable)?;
        let mut head = [0; HEAD_MAX];
        head[..Preamble::BYTES].copy_from_slice(&preamble.encode());
        let begun = Begun { slot: None, head_bytes: Preamble::BYTES, bytes: 0..0, sent: 0 };
        Ok(Lane {
            number,
            stream,
            queue: VecDeque::with_capacity(slots),
            begun: Some(begun),
            head,
            waits_for_room: true,
        })
    }

    /// Sends up to one frame, or checks that the stream is still open.
    fn step(
        &mut self,
        sending: &mut Sending,
        memory: &Memory,
        completed: &mut dyn FnMut(SlotId),
    ) -> Result<bool, SessionLost> {
        if self.begun.is_none() {
            self.begin(sending);
        }
        let Some(mut begun) = self.begun.take() else {
            self.wait_for_room(false, sending)?;
            return self.listen();
        };
        let length = begun.head_bytes + (begun.bytes.end - begun.bytes.start) as usize;
        let before = begun.sent;
        while begun.sent < length {
            match sending.send(&self.stream, &self.head, &begun, memory) {
                Ok(sent) => begun.sent += sent,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => return Err(SessionLost::GONE),
            }
        }
        let moved = begun.sent > before;
        if begun.sent < length {
            self.begun = Some(begun);
            self.wait_for_room(true, sending)?;
            return Ok(moved);
        }
        if let Some(slot) = begun.slot {
            let (next, quiet) = sending.sent(slot, self.number, begun.bytes.end);
            self.queue.extend(next.map(|at| (slot, at)));
            if quiet {
                completed(slot);
            }
        }
        Ok(true)
    }

    fn begin(&mut self, sending: &Sending) {
        let Some((slot, at)) = self.queue.pop_front() else { return };
        let Some(frame) = sending.frame(slot, self.number, at) else { return };
        let head_bytes = frame.encode(&mut self.head);
        self.begun = Some(Begun { slot: Some(slot), head_bytes, bytes: frame.bytes, sent: 0 });
    }

    /// Checks that the stream is still open. The destination sends no data, so a readable stream
    /// has ended or carries invalid data.
    fn listen(&mut self) -> Result<bool, SessionLost> {
        match self.stream.read(&mut [0]) {
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                Ok(false)
            }
            _ => Err(SessionLost::GONE),
        }
    }

    fn wait_for_room(&mut self, wanted: bool, sending: &Sending) -> Result<(), SessionLost> {
        if self.waits_for_room != wanted {
            let interest =
                if wanted { WaitInterest::ReadableOrWritable } else { WaitInterest::Readable };
            let changed = self.stream.change(&sending.wait, interest);
            changed.map_err(|_| SessionLost::because(crate::cause::Cause::Internal))?;
            self.waits_for_room = wanted;
        }
        Ok(())
    }
}
