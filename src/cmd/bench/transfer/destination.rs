//! The destination process. It runs the rows that the source process requests.

use super::bytes::{self, touch};
use super::case::TransferEnd;
use super::count::CountStart;
use super::library::LibraryAgent;
use super::limit::{CopyLimit, StreamLimit, VerbsLimit};
use super::side::{BenchWorker, PATIENCE};
use super::talk::{BenchMessage, BenchRow, LINE_MAX, Survey};
use super::way::{BenchPrompts, DestinationEnd, Way};
use crate::sys::clock::{monotonic_ns, process_cpu_ns};
use crate::transfer::command::DestinationCommand;
use crate::transfer::manager::identity::host_id;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::rc::Rc;

/// Serves one row after the other until the process ends. An error goes to the source and to `log`.
///
/// # Errors
/// The listener fails.
pub fn serve(listener: &TcpListener, mut log: impl FnMut(&str)) -> std::io::Result<()> {
    loop {
        let (stream, peer) = listener.accept()?;
        if let Err(why) = answer(stream) {
            log(&format!("{peer}: {why}"));
        }
    }
}

fn answer(stream: TcpStream) -> Result<(), String> {
    let text = |error: std::io::Error| error.to_string();
    let last_words = stream.try_clone().map_err(text)?;
    let outcome = first_line(&stream).and_then(|line| {
        let asked: BenchMessage =
            serde_json::from_str(&line).map_err(|error| format!("invalid message: {error}"))?;
        if asked == BenchMessage::Survey {
            return say_last(&last_words, &BenchMessage::Surveyed(Survey::here())).map_err(text);
        }
        Following::new(stream, asked)?.follow()
    });
    if let Err(why) = &outcome {
        // Nothing is lost if the source has already closed the connection.
        let _ = say_last(&last_words, &BenchMessage::Failed { why: why.clone() });
    }
    outcome
}

fn say_last(mut stream: &TcpStream, what: &BenchMessage) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(what).expect("all keys are strings");
    line.push(b'\n');
    stream.set_nonblocking(false)?;
    stream.write_all(&line)
}

/// Reads one line. The source waits for an answer before it sends more, so the read does not go
/// past this line.
fn first_line(stream: &TcpStream) -> Result<String, String> {
    stream.set_read_timeout(Some(PATIENCE)).map_err(|error| error.to_string())?;
    let mut line = String::new();
    let read = BufReader::new(stream.take(LINE_MAX as u64)).read_line(&mut line);
    read.map_err(|error| error.to_string())?;
    Ok(line)
}

/// A row in progress.
struct Following {
    row: BenchRow,
    /// The direct way, and the connection to the source.
    side: BenchWorker<DestinationCommand>,
    /// The way through the library, if it is open.
    library: Option<LibraryAgent>,
    prompts: Rc<BenchPrompts>,
    host: IpAddr,
    /// The address of the source. No message can name another one.
    source: IpAddr,
    limit: Limit,
}

enum Limit {
    /// The row has no bare runs.
    Unused,
    Copy(Box<CopyLimit>),
    Listening(TcpListener),
    Streams(StreamLimit),
    Verbs(Box<VerbsLimit>),
}

impl Following {
    fn new(stream: TcpStream, asked: BenchMessage) -> Result<Following, String> {
        let BenchMessage::Prepare { version, row, control_port } = asked else {
            return Err("the first message must be Prepare".into());
        };
        if version != env!("CARGO_PKG_VERSION") {
            let ours = env!("CARGO_PKG_VERSION");
            return Err(format!("this is baton {ours}, the other process {version}"));
        }
        let text = |error: std::io::Error| error.to_string();
        let host = stream.local_addr().map_err(text)?.ip();
        let source = stream.peer_addr().map_err(text)?.ip();
        let control = SocketAddr::new(source, control_port);
        let mut side = BenchWorker::destination(&row, stream, host, control)?;
        touch(&side.agent.memory.region);
        let (mut bare_port, mut verbs) = (None, None);
        let limit = match row.transport.as_str() {
            _ if row.through_library => Limit::Unused,
            "tcp" => {
                let (listener, port) = StreamLimit::listen(host).map_err(text)?;
                bare_port = Some(port);
                Limit::Listening(listener)
            }
            "rdma" => {
                let (limit, ends) = VerbsLimit::new(&row.moved(), row.lanes, PATIENCE)?;
                verbs = Some(ends);
                Limit::Verbs(Box::new(limit))
            }
            _ => Limit::Copy(Box::new(CopyLimit::new(&row.moved(), row.lanes).map_err(text)?)),
        };
        side.send(&BenchMessage::Prepared { bare_port, verbs, host: format!("{:?}", host_id()) })?;
        let prompts = Rc::new(BenchPrompts::new(&row.case, TransferEnd::Destination));
        Ok(Following { row, side, library: None, prompts, host, source, limit })
    }

    fn follow(mut self) -> Result<(), String> {
        loop {
            match self.side.receive()? {
                BenchMessage::Ask => self.side.send(&BenchMessage::Time { at: monotonic_ns() })?,
                BenchMessage::Open { port } => self.open_library(port)?,
                BenchMessage::Expect { way, room, verify } => self.expect(way, room, verify)?,
                BenchMessage::Count { way, room, rooms } => {
                    self.count(way, room..room.saturating_add(rooms))?
                }
                BenchMessage::Bare { run } => self.bare(run)?,
                BenchMessage::Connect { verbs } => {
                    let Limit::Verbs(limit) = &mut self.limit else {
                        return Err("no bare verbs in this row".into());
                    };
                    limit.connect(verbs).map_err(|error| format!("bare verbs: {error}"))?;
                }
                BenchMessage::Finish => {
                    let counts = self.side.agent.memory.counters.counts();
                    let (work_requests, doorbells) = (counts.work_requests, counts.doorbells);
                    return self.side.send(&BenchMessage::Finished { work_requests, doorbells });
                }
                other => return Err(format!("unexpected message: {other:?}")),
            }
        }
    }

    fn open_library(&mut self, port: u16) -> Result<(), String> {
        if !self.row.through_library {
            return Err("no library in this row".into());
        }
        let (end, source) = (TransferEnd::Destination, SocketAddr::new(self.source, port));
        let agent = LibraryAgent::new(&self.row, end, self.host, Some(source))?;
        touch(agent.region());
        self.library = Some(agent);
        self.side.send(&BenchMessage::Opened)
    }

    fn end_of(&mut self, way: Way) -> Result<&mut dyn DestinationEnd, String> {
        match (way, &mut self.library) {
            (Way::Direct, _) => Ok(&mut self.side),
            (Way::Library, Some(library)) => Ok(library),
            (Way::Library, None) => Err("the library is not open".into()),
        }
    }

    fn expect(&mut self, way: Way, room: u64, verify: bool) -> Result<(), String> {
        let (at, [before, after]) = self.take_prompt(way, room, process_cpu_ns)?;
        if verify {
            self.verify(way, room)?;
        }
        self.side.send(&BenchMessage::Landed { at, cpu: after - before })
    }

    /// Takes the prompt of this room. Returns the time at which its KV has landed, and what `read`
    /// returns before the lease and then.
    fn take_prompt<T>(
        &mut self,
        way: Way,
        room: u64,
        read: impl Fn() -> T,
    ) -> Result<(u64, [T; 2]), String> {
        let prompts = Rc::clone(&self.prompts);
        self.end_of(way)?.wish(room, &prompts.ids)?;
        let before = read();
        self.end_of(way)?.lease(prompts.pages(room))?;
        let at = self.end_of(way)?.land()?;
        let after = read();
        self.end_of(way)?.end()?;
        Ok((at, [before, after]))
    }

    /// Compares each byte of a prompt with those of the source.
    fn verify(&self, way: Way, room: u64) -> Result<(), String> {
        let memory = &self.side.agent.memory;
        let region = match (way, &self.library) {
            (Way::Library, Some(library)) => library.region(),
            _ => &memory.region,
        };
        let source = BenchPrompts::new(&self.row.case, TransferEnd::Source);
        bytes::verify(region, &memory.layout, source.pages(room), self.prompts.pages(room))
    }

    fn count(&mut self, way: Way, rooms: Range<u64>) -> Result<(), String> {
        let counted = CountStart::now();
        for room in rooms {
            self.take_prompt(way, room, || ())?;
        }
        self.side.send(&BenchMessage::Counted(counted.finish()))
    }

    fn bare(&mut self, run: u32) -> Result<(), String> {
        let text = |error: std::io::Error| format!("bare limit: {error}");
        if let Limit::Listening(listener) = &self.limit {
            let (lanes, bytes) = (self.row.lanes, self.row.moved().bytes());
            self.limit = Limit::Streams(
                StreamLimit::accept(listener, lanes, bytes, PATIENCE).map_err(text)?,
            );
        }
        let at = match &mut self.limit {
            Limit::Copy(limit) => limit.run(run),
            Limit::Streams(streams) => {
                self.side.send(&BenchMessage::BareReady)?;
                streams.receive().map_err(text)?;
                monotonic_ns()
            }
            Limit::Verbs(limit) => {
                limit.expect().map_err(text)?;
                self.side.send(&BenchMessage::BareReady)?;
                limit.receive().map_err(text)?;
                monotonic_ns()
            }
            Limit::Listening(_) | Limit::Unused => return Err("no bare runs in this row".into()),
        };
        self.side.send(&BenchMessage::BareDone { at })
    }
}
