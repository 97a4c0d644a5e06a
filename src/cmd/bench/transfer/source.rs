//! The source process. It controls the run and measures. In each row, hand-offs and bare runs
//! alternate.
//!
//! Not here: rows that compare two ways to a hand-off (`comparison`).

use super::bytes::{fill, touch};
use super::case::{LISTS, TransferEnd};
use super::count::{BenchCounts, CountStart};
use super::library::LibraryAgent;
use super::limit::{CopyLimit, StreamLimit, VerbsLimit};
use super::report::{BenchSamples, Figures};
use super::side::{BenchWorker, PATIENCE};
use super::talk::{BenchMessage, BenchRow};
use super::way::{BenchPrompts, SourceEnd, Way};
use crate::ids::PageId;
use crate::kv::region::Region;
use crate::sys::clock::{monotonic_ns, process_cpu_ns};
use crate::transfer::command::SourceCommand;
use crate::transfer::manager::identity::host_id;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Minimum and maximum number of hand-offs in a row. A median needs several runs. Tiny cases would
/// otherwise run a hundred thousand times in a few seconds.
pub const RUNS: std::ops::RangeInclusive<u32> = 5..=2000;
/// Number of clock comparisons; the one with the shortest answer is the most exact.
const ASKS: u32 = 32;

/// Difference between the destination's clock and this one.
#[derive(Clone, Copy, Default, Debug)]
struct Clock {
    /// Nanoseconds, modulo 2^64.
    ahead: u64,
    /// Maximum error in nanoseconds.
    error: u64,
}

impl Clock {
    fn compare(side: &mut BenchWorker<SourceCommand>) -> Result<Clock, String> {
        let mut best = Clock { ahead: 0, error: u64::MAX };
        for _ in 0..ASKS {
            let asked = monotonic_ns();
            side.send(&BenchMessage::Ask)?;
            let BenchMessage::Time { at } = side.receive()? else {
                return Err("the other process did not send its time".into());
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

/// A row in progress.
pub struct Leading<'a> {
    row: &'a BenchRow,
    /// The direct way, and the connection to the destination.
    side: BenchWorker<SourceCommand>,
    /// The way through the library, if it is open.
    library: Option<LibraryAgent>,
    prompts: Rc<BenchPrompts>,
    host: IpAddr,
    clock: Clock,
    bare: Bare,
    /// Hand-offs so far. Each has a room of its own.
    runs: u32,
}

/// This side's part of bare runs.
enum Bare {
    /// None: the destination copies alone.
    There,
    Unconnected(SocketAddr),
    Streams(StreamLimit),
    Verbs(Box<VerbsLimit>),
}

impl<'a> Leading<'a> {
    /// Prepares a row with the destination at `peer`.
    ///
    /// # Errors
    /// The destination does not take part.
    pub fn new(peer: SocketAddr, row: &'a BenchRow) -> Result<Leading<'a>, String> {
        let text = |error: std::io::Error| format!("{peer}: {error}");
        let stream = TcpStream::connect_timeout(&peer, PATIENCE).map_err(text)?;
        let host = stream.local_addr().map_err(text)?.ip();
        let (mut side, control_port) = BenchWorker::source(row, stream, host)?;
        let version = env!("CARGO_PKG_VERSION").to_string();
        side.send(&BenchMessage::Prepare { version, row: row.clone(), control_port })?;
        let prompts = Rc::new(BenchPrompts::new(&row.case, TransferEnd::Source));
        fill_lists(&side.agent.memory.region, row)?;
        let BenchMessage::Prepared { bare_port, verbs, host: theirs } = side.receive()? else {
            return Err("the other process did not prepare the row".into());
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
                side.send(&BenchMessage::Connect { verbs: ours })?;
                Bare::Verbs(Box::new(limit))
            }
            (None, None) => Bare::There,
        };
        Ok(Leading { row, side, library: None, prompts, host, clock, bare, runs: 0 })
    }

    /// Measures hand-offs and the bare limit for about `duration`.
    ///
    /// # Errors
    /// The destination or the hand-off fails.
    pub fn measure(mut self, duration: Duration) -> Result<Figures, String> {
        let mut samples = BenchSamples::new();
        // The first hand-off touches all memory and is not measured. The destination checks every
        // byte.
        self.hand_over(Way::Direct, true)?;
        self.bare_run()?;
        let begun = Instant::now();
        while self.runs <= *RUNS.start() || begun.elapsed() < duration && self.runs <= *RUNS.end() {
            let (took, cpu) = self.hand_over(Way::Direct, false)?;
            samples.add(took, self.bare_run()?, cpu);
        }
        let (work_requests, doorbells) = self.finish()?;
        let ours = self.side.agent.memory.counters.counts();
        let each = |count: u64| count as f64 / f64::from(self.runs);
        Ok(Figures {
            row: self.row.clone(),
            samples,
            work_requests: each(ours.work_requests + work_requests),
            doorbells: each(ours.doorbells + doorbells),
            limit: self.limit(),
            clock_error: self.clock_error(),
        })
    }

    /// Ends the row. Returns the work requests and doorbells of the other process.
    ///
    /// # Errors
    /// The destination fails.
    pub fn finish(&mut self) -> Result<(u64, u64), String> {
        self.side.send(&BenchMessage::Finish)?;
        let BenchMessage::Finished { work_requests, doorbells } = self.side.receive()? else {
            return Err("the other process did not finish the row".into());
        };
        Ok((work_requests, doorbells))
    }

    /// Starts an agent of the library at both ends.
    ///
    /// # Errors
    /// An agent does not start.
    pub fn open_library(&mut self) -> Result<(), String> {
        let agent = LibraryAgent::new(self.row, TransferEnd::Source, self.host, None)?;
        fill_lists(agent.region(), self.row)?;
        self.side.send(&BenchMessage::Open { port: agent.address()?.port() })?;
        self.library = Some(agent);
        match self.side.receive()? {
            BenchMessage::Opened => Ok(()),
            _ => Err("the other process did not start an agent of the library".into()),
        }
    }

    fn end_of(&mut self, way: Way) -> Result<&mut dyn SourceEnd, String> {
        match (way, &mut self.library) {
            (Way::Direct, _) => Ok(&mut self.side),
            (Way::Library, Some(library)) => Ok(library),
            (Way::Library, None) => Err("the library is not open".into()),
        }
    }

    /// The maximum error of each time, in nanoseconds.
    pub fn clock_error(&self) -> u64 {
        self.clock.error
    }

    fn limit(&self) -> String {
        match self.row.transport.as_str() {
            "tcp" => format!("bare sockets, {}", plural(self.row.lanes, "stream")),
            "rdma" => format!("bare verbs, {}", plural(self.row.lanes, "queue pair")),
            _ => CopyLimit::name(&self.row.moved(), self.row.lanes),
        }
    }

    /// Runs one hand-off. Returns the nanoseconds from the call at the source to the completion
    /// seen at the destination, and the CPU time of both processes.
    ///
    /// # Errors
    /// The destination or the hand-off fails.
    pub fn hand_over(&mut self, way: Way, verify: bool) -> Result<(u64, u64), String> {
        self.side.send(&BenchMessage::Expect { way, room: self.runs.into(), verify })?;
        let (cpu, begun) = self.send_prompt(way, || (process_cpu_ns(), monotonic_ns()))?;
        let BenchMessage::Landed { at, cpu: theirs } = self.side.receive()? else {
            return Err("the other process did not report the arrival of the KV".into());
        };
        let cpu = (process_cpu_ns() - cpu).saturating_add(theirs);
        Ok((self.clock.since(begun, at), cpu))
    }

    /// Counts what so many hand-offs take from both processes.
    ///
    /// # Errors
    /// The destination or a hand-off fails.
    pub fn count(&mut self, way: Way, rooms: u64) -> Result<BenchCounts, String> {
        let counted = CountStart::now();
        self.side.send(&BenchMessage::Count { way, room: self.runs.into(), rooms })?;
        for _ in 0..rooms {
            self.send_prompt(way, || ())?;
        }
        let ours = counted.finish();
        match self.side.receive()? {
            BenchMessage::Counted(theirs) => Ok(ours.and(theirs)),
            _ => Err("the other process did not count".into()),
        }
    }

    /// Hands a prompt over in the next room. Returns what `begin` returns before the KV leaves.
    fn send_prompt<T>(&mut self, way: Way, begin: impl FnOnce() -> T) -> Result<T, String> {
        let (room, prompts) = (u64::from(self.runs), Rc::clone(&self.prompts));
        self.runs += 1;
        self.end_of(way)?.offer(room, &prompts.ids)?;
        let met = self.end_of(way)?.meet(prompts.pages(room));
        self.with_theirs(met)?;
        let begun = begin();
        self.end_of(way)?.send()?;
        let ended = self.end_of(way)?.end();
        self.with_theirs(ended)?;
        Ok(begun)
    }

    /// Adds what the destination tells: it can know more about a failure.
    fn with_theirs(&mut self, ours: Result<(), String>) -> Result<(), String> {
        ours.map_err(|why| match self.side.receive() {
            Err(theirs) => format!("{why}; {theirs}"),
            Ok(_) => why,
        })
    }

    /// Runs the bare limit once. Returns nanoseconds.
    fn bare_run(&mut self) -> Result<u64, String> {
        let text = |error: std::io::Error| format!("bare limit: {error}");
        self.side.send(&BenchMessage::Bare { run: self.runs })?;
        if let Bare::There = self.bare {
            let BenchMessage::BareDone { at } = self.side.receive()? else {
                return Err("no bare run".into());
            };
            return Ok(at);
        }
        if let Bare::Unconnected(address) = self.bare {
            let (lanes, bytes) = (self.row.lanes, self.row.moved().bytes());
            self.bare =
                Bare::Streams(StreamLimit::connect(address, lanes, bytes, PATIENCE).map_err(text)?);
        }
        let BenchMessage::BareReady = self.side.receive()? else {
            return Err("no bare run".into());
        };
        let begun = monotonic_ns();
        match &mut self.bare {
            Bare::Streams(streams) => streams.send().map_err(text)?,
            Bare::Verbs(verbs) => verbs.send().map_err(text)?,
            Bare::There | Bare::Unconnected(_) => {}
        }
        let BenchMessage::BareDone { at } = self.side.receive()? else {
            return Err("no bare run".into());
        };
        Ok(self.clock.since(begun, at))
    }
}

/// Writes the case's bytes into every page of all lists.
fn fill_lists(region: &Region, row: &BenchRow) -> Result<(), String> {
    let layout = row.layout(TransferEnd::Source).ok_or("ranks that do not share the heads")?;
    touch(region);
    let mut pages: Vec<PageId> =
        (0..LISTS).flat_map(|list| row.case.list(TransferEnd::Source, list)).collect();
    pages.sort_unstable();
    pages.dedup();
    pages.into_iter().for_each(|page| fill(region, &layout, page));
    Ok(())
}

fn plural(count: u16, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}
