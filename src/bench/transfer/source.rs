//! The process that hands KV over, and measures: one row at a time, hand-offs and bare runs in turn.

use super::bytes::{fill, touch};
use super::case::{End, LISTS};
use super::limit::{CopyLimit, StreamLimit, VerbsLimit};
use super::report::{Figures, Samples};
use super::side::{PATIENCE, Side};
use super::talk::{Row, Say};
use crate::ids::{PageId, Room};
use crate::model::logprobs::{Sampled, TopLogprobs};
use crate::role::host_id;
use crate::sched::mailbox::Command;
use crate::sys::clock::{monotonic_ns, process_cpu_ns};
use crate::transfer::aux::AuxRecord;
use crate::transfer::command::SourceCommand;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Hand-offs of a row, whatever time there is: a median needs some, and a tiny one is done a hundred thousand
/// times in a few seconds.
const RUNS: std::ops::RangeInclusive<u32> = 5..=2000;
/// Questions for the time: the quickest answer is the most exact.
const ASKS: u32 = 32;

/// Measures one row with whoever answers at `peer`, for about `duration`.
pub fn measure(peer: SocketAddr, row: &Row, duration: Duration) -> Result<Figures, String> {
    let text = |error: std::io::Error| format!("{peer}: {error}");
    let stream = TcpStream::connect_timeout(&peer, PATIENCE).map_err(text)?;
    let host = stream.local_addr().map_err(text)?.ip();
    let (mut side, control_port) = Side::source(row, stream, host)?;
    let version = env!("CARGO_PKG_VERSION").to_string();
    side.say(&Say::Prepare { version, row: row.clone(), control_port })?;
    fill_lists(&side, row);
    let Say::Prepared { bare_port, verbs, host: theirs } = side.hear()? else {
        return Err("the other process did not prepare".into());
    };
    let same_host = theirs == format!("{:?}", host_id());
    if row.transport == "shm" && !same_host {
        return Err("shm: the other process is on another host".into());
    }
    let clock = if same_host { Clock::default() } else { Clock::compare(&mut side)? };
    let bare = match (bare_port, verbs) {
        (Some(port), _) => Bare::Unconnected(SocketAddr::new(peer.ip(), port)),
        (None, Some(theirs)) => {
            let (mut limit, ours) = VerbsLimit::new(&row.moved(), row.lanes, PATIENCE)?;
            limit.connect(theirs).map_err(|error| format!("bare verbs: {error}"))?;
            side.say(&Say::Connect { verbs: ours })?;
            Bare::Verbs(Box::new(limit))
        }
        (None, None) => Bare::There,
    };
    Leading { row, side, clock, bare, runs: 0 }.measure(duration)
}

/// How the destination's clock differs from ours.
#[derive(Clone, Copy, Default, Debug)]
struct Clock {
    /// Nanoseconds, around 2^64.
    ahead: u64,
    /// Nanoseconds that this may be wrong by.
    error: u64,
}

impl Clock {
    fn compare(side: &mut Side<SourceCommand>) -> Result<Clock, String> {
        let mut best = Clock { ahead: 0, error: u64::MAX };
        for _ in 0..ASKS {
            let asked = monotonic_ns();
            side.say(&Say::Ask)?;
            let Say::Time { at } = side.hear()? else {
                return Err("the other process has no clock".into());
            };
            let half = (monotonic_ns() - asked) / 2;
            if half < best.error {
                best = Clock { ahead: at.wrapping_sub(asked + half), error: half };
            }
        }
        Ok(best)
    }

    /// Nanoseconds from `begun` here to `at` there.
    fn since(&self, begun: u64, at: u64) -> u64 {
        (at.wrapping_sub(self.ahead).wrapping_sub(begun) as i64).max(0) as u64
    }
}

/// A row under way.
struct Leading<'a> {
    row: &'a Row,
    side: Side<SourceCommand>,
    clock: Clock,
    bare: Bare,
    runs: u32,
}

/// Our part in bare runs.
enum Bare {
    /// The destination copies alone.
    There,
    Unconnected(SocketAddr),
    Streams(StreamLimit),
    Verbs(Box<VerbsLimit>),
}

impl Leading<'_> {
    fn measure(mut self, duration: Duration) -> Result<Figures, String> {
        let mut samples = Samples::new();
        // The first touches everything, and is looked at byte for byte; no figure is made of it.
        self.hand_over(true)?;
        self.bare_run()?;
        let begun = Instant::now();
        while self.runs <= *RUNS.start() || begun.elapsed() < duration && self.runs <= *RUNS.end() {
            let (took, cpu) = self.hand_over(false)?;
            samples.add(took, self.bare_run()?, cpu);
        }
        self.side.say(&Say::Finish)?;
        let Say::Finished { work_requests, doorbells } = self.side.hear()? else {
            return Err("the other process did not finish".into());
        };
        let ours = self.side.memory.tally.counts();
        let each = |count: u64| count as f64 / f64::from(self.runs);
        Ok(Figures {
            row: self.row.clone(),
            samples,
            work_requests: each(ours.work_requests + work_requests),
            doorbells: each(ours.doorbells + doorbells),
            limit: self.limit(),
            clock_error: self.clock.error,
        })
    }

    fn limit(&self) -> String {
        match self.row.transport.as_str() {
            "tcp" => format!("bare sockets, {}", plural(self.row.lanes, "stream")),
            "rdma" => format!("bare verbs, {}", plural(self.row.lanes, "queue pair")),
            _ => CopyLimit::name(&self.row.moved(), self.row.lanes),
        }
    }

    /// Nanoseconds from the call at the source to the notice seen at the destination, and of CPU time on both.
    fn hand_over(&mut self, verify: bool) -> Result<(u64, u64), String> {
        let (case, room, list) = (&self.row.case, u64::from(self.runs), self.runs % LISTS);
        let tokens = case.tokens();
        let pages = case.list(End::Source, list);
        self.runs += 1;
        let slot = self.side.enter(room, tokens, None)?;
        self.side.say(&Say::Expect { room, list, verify })?;
        let target = self.side.command("a Destination", |command| match *command {
            Command::Granted { target, .. } => Some(target),
            _ => None,
        })?;
        let lease = self.side.lease(slot, &pages);
        self.side.handle.begin(slot.id, slot.generation, target, &pages, lease);
        let first = Sampled { token: 1, logprob: 0.0, top: TopLogprobs::EMPTY };
        let aux = AuxRecord::new(Room(room), &first, 0);
        let (cpu, begun) = (process_cpu_ns(), monotonic_ns());
        self.side.handle.chunk(slot.id, slot.generation, 0..tokens, Some(aux));
        let Say::Landed { at, cpu: theirs } = self.side.hear_beside(slot)? else {
            return Err("the other process did not tell when the KV was there".into());
        };
        let cpu = (process_cpu_ns() - cpu).saturating_add(theirs);
        match self.side.leave(slot, &pages)? {
            None => Ok((self.clock.since(begun, at), cpu)),
            Some(cause) => Err(format!("the hand-off failed: {cause}")),
        }
    }

    /// Nanoseconds of the bare limit.
    fn bare_run(&mut self) -> Result<u64, String> {
        let text = |error: std::io::Error| format!("bare limit: {error}");
        self.side.say(&Say::Bare { run: self.runs })?;
        if let Bare::There = self.bare {
            let Say::BareDone { at } = self.side.hear()? else { return Err("no bare run".into()) };
            return Ok(at);
        }
        if let Bare::Unconnected(address) = self.bare {
            let (lanes, bytes) = (self.row.lanes, self.row.moved().bytes());
            self.bare =
                Bare::Streams(StreamLimit::connect(address, lanes, bytes, PATIENCE).map_err(text)?);
        }
        let Say::BareReady = self.side.hear()? else { return Err("no bare run".into()) };
        let begun = monotonic_ns();
        match &mut self.bare {
            Bare::Streams(streams) => streams.send().map_err(text)?,
            Bare::Verbs(verbs) => verbs.send().map_err(text)?,
            Bare::There | Bare::Unconnected(_) => {}
        }
        let Say::BareDone { at } = self.side.hear()? else { return Err("no bare run".into()) };
        Ok(self.clock.since(begun, at))
    }
}

/// Writes the case's bytes into every page that any list names.
fn fill_lists(side: &Side<SourceCommand>, row: &Row) {
    let region = &side.memory.region;
    touch(region);
    let mut pages: Vec<PageId> =
        (0..LISTS).flat_map(|list| row.case.list(End::Source, list)).collect();
    pages.sort_unstable();
    pages.dedup();
    pages.into_iter().for_each(|page| fill(region, &side.memory.layout, page));
}

fn plural(count: u16, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}
