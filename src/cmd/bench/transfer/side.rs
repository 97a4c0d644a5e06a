//! One worker of a bench: an agent that the bench drives, and the connection to the other process.
//!
//! Thread: the caller's thread is `ctl` and the engine of the agent. Invariant: every wait has a
//! deadline. Not here: the worker itself (`agent`), an agent of the C library (`library`).

use super::case::TransferEnd;
use super::talk::{BenchChannel, BenchMessage, BenchRow};
use super::way::{DestinationEnd, SourceEnd};
use crate::agent::{Agent, AgentConfig, DestinationAgent, SourceAgent};
use crate::cause::Cause;
use crate::config::DataThreadMode;
use crate::ids::{PageId, Room};
use crate::kv::region::Region;
use crate::link::control::LinkTimeouts;
use crate::link::handoff::{Source, prompt_of};
use crate::net::{Event, Reactor};
use crate::stdx::cidr::Cidr;
use crate::sys::clock::monotonic_ns;
use crate::transfer::answer::TransferAnswer;
use crate::transfer::aux::{AUX_PAYLOAD_BYTES, AuxRecord};
use crate::transfer::command::{Cancel, DestinationCommand, SourceCommand};
use crate::transfer::manager::rooms::Slot;
use crate::transfer::target::{SessionId, Target};
use crate::transfer::transport::rdma::Nic;
use crate::wire::auth::{ClusterKey, Keyring};
use crate::wire::message::Transport;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum time of each step, also on an emulated processor.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Timeouts of control links. They are long, because a peer does not answer while it checks bytes
/// or runs the bare limit.
const STILL: LinkTimeouts = LinkTimeouts { proof: PATIENCE, silence: PATIENCE };
/// There is one room at a time, and the previous one can still be ending.
pub const SLOTS: usize = 4;
/// There is one peer.
pub const SESSIONS: usize = 4;
/// The cluster key of rows through the library. Between hosts, the library has no links without a
/// key. It protects nothing: the test data of a bench is no secret.
pub const KEY: [u8; 32] = [7; 32];
/// What the destination gets with the last tokens.
pub const PAYLOAD: [u8; AUX_PAYLOAD_BYTES] = [1; AUX_PAYLOAD_BYTES];
/// Steps of the mover between two polls of the sockets, if no thread parks.
const TURNS: usize = 1024;

/// An agent and the other process.
pub struct BenchWorker<C> {
    /// The worker.
    pub agent: Agent<C>,
    talk: BenchChannel,
    /// Whether the other process has closed its connection.
    gone: bool,
    /// The source, at a destination.
    source: Option<Source>,
    open: Option<OpenRequest>,
}

/// The request of the present hand-off.
#[derive(Clone, Copy)]
struct OpenRequest {
    slot: Slot,
    room: Room,
    tokens: u32,
    /// The session with the source, at a destination.
    session: Option<SessionId>,
}

/// The transport with this name.
///
/// # Errors
/// There is no transport with this name.
pub fn transport_of(name: &str) -> Result<Transport, String> {
    let transport = Transport::named(name).filter(|transport| *transport != Transport::Fake);
    transport.ok_or_else(|| format!("there is no transport {name} here"))
}

/// Number of copy threads; only the destination copies.
pub fn copy_lanes(row: &BenchRow, end: TransferEnd) -> usize {
    if row.transport == "shm" && end == TransferEnd::Destination { row.lanes.into() } else { 1 }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// The worker of one side of a row. It connects to sources at `source`, if any.
fn config(
    row: &BenchRow,
    end: TransferEnd,
    host: IpAddr,
    source: Option<IpAddr>,
) -> Result<AgentConfig, String> {
    let transport = transport_of(&row.transport)?;
    row.check().map_err(text)?;
    let layout = row.layout(end).ok_or("ranks that do not share the heads")?;
    let region_bytes = u64::from(layout.ranks) * layout.rank_stride;
    let region = Region::new(c"baton-kv", region_bytes as usize).map_err(text)?;
    let region = Arc::new(region);
    let key = row.through_library.then(|| ClusterKey::new(&KEY)).transpose().map_err(text)?;
    Ok(AgentConfig {
        slots: SLOTS,
        prompt_pages: row.case.pages as usize,
        sessions: SESSIONS,
        transports: vec![transport],
        lanes: row.lanes,
        copy_threads: copy_lanes(row, end),
        nics: if transport == Transport::Rdma { Nic::choose(&[], &[])? } else { Vec::new() },
        pieces: row.pieces,
        has_data_threads: row.data_threads == DataThreadMode::Split,
        allowed: source.map(Cidr::from).into_iter().collect(),
        keys: Keyring::from(key),
        timeouts: STILL,
        busy_poll: row.busy_poll,
        ..AgentConfig::new(region, layout, row.case.pool, [0; 32], host)
    })
}

fn open(talk: TcpStream) -> Result<(Reactor, BenchChannel), String> {
    let mut reactor = Reactor::new().map_err(text)?;
    let talk = BenchChannel(reactor.adopt(talk).map_err(text)?);
    Ok((reactor, talk))
}

impl BenchWorker<SourceCommand> {
    /// Creates a prefill worker; `talk` is the connection to the destination. Also returns its
    /// control port.
    pub fn source(row: &BenchRow, talk: TcpStream, host: IpAddr) -> Result<(Self, u16), String> {
        let (reactor, talk) = open(talk)?;
        let agent = SourceAgent::source(config(row, TransferEnd::Source, host, None)?, reactor)?;
        let port = agent.address().ok_or("a source without a port")?.port();
        Ok((BenchWorker { agent, talk, gone: false, source: None, open: None }, port))
    }
}

impl BenchWorker<DestinationCommand> {
    /// Creates a decode worker. `talk` is the connection to the source; its control link is at
    /// `control`.
    pub fn destination(
        row: &BenchRow,
        talk: TcpStream,
        host: IpAddr,
        control: SocketAddr,
    ) -> Result<Self, String> {
        let (reactor, talk) = open(talk)?;
        let config = config(row, TransferEnd::Destination, host, Some(control.ip()))?;
        let agent = DestinationAgent::destination(config, reactor)?;
        let source = Some(Source::Remote(control));
        Ok(BenchWorker { agent, talk, gone: false, source, open: None })
    }
}

impl<C: Cancel> BenchWorker<C> {
    /// Sends a message to the other process.
    pub fn send(&mut self, what: &BenchMessage) -> Result<(), String> {
        self.talk.send(&mut self.agent.reactor, what)
    }

    /// Waits for the other process's next message.
    pub fn receive(&mut self) -> Result<BenchMessage, String> {
        self.until("a message of the other process", |side| {
            match side.talk.receive(&mut side.agent.reactor)? {
                None if side.gone => Err("the other process is gone".into()),
                said => Ok(said),
            }
        })
    }

    /// Opens a room for a prompt. At a destination, the source computes it.
    fn enter(&mut self, room: u64, ids: &[u32]) -> Result<(), String> {
        let (room, prompt) = (Room(room), prompt_of(ids));
        let (tokens, deadline) = (prompt.tokens, Instant::now() + 2 * PATIENCE);
        let slot = self.agent.enter(room, prompt, self.source.as_ref(), deadline)?;
        self.open = Some(OpenRequest { slot, room, tokens, session: None });
        Ok(())
    }

    fn open(&self) -> Result<OpenRequest, String> {
        self.open.ok_or_else(|| "there is no request".into())
    }

    /// Waits for the answer that `wanted` accepts.
    fn answer<T>(
        &mut self,
        what: &str,
        wanted: impl Fn(&TransferAnswer) -> Option<T>,
    ) -> Result<T, String> {
        self.until(what, |side| {
            if let Some(said) = side.talk.receive(&mut side.agent.reactor)? {
                return Err(format!("the other process sent {said:?}, not {what}"));
            }
            if side.gone {
                return Err("the other process is gone".into());
            }
            while let Some(answer) = side.agent.poll_answer() {
                if let TransferAnswer::Abort { cause, .. } = answer {
                    return Err(format!("{what}: {cause}"));
                }
                if let Some(found) = wanted(&answer) {
                    return Ok(Some(found));
                }
            }
            Ok(None)
        })
    }

    /// Waits until the transfer has succeeded or failed, and frees its slot.
    fn leave(&mut self) -> Result<(), String> {
        let OpenRequest { slot, .. } = self.open()?;
        self.until("the end of a lease", |side| Ok(side.agent.poll_end()))?;
        let cause = self.outcome(slot)?;
        self.agent.leave(slot, cause);
        self.open = None;
        landed(cause)
    }

    /// Waits until the transfer has succeeded or failed.
    fn outcome(&mut self, slot: Slot) -> Result<Option<Cause>, String> {
        self.until("the end of a transfer", |side| {
            let status = side.agent.status(slot);
            Ok(status.state.is_terminal().then_some(status.cause))
        })
    }

    /// Runs the worker until `done` returns a value.
    fn until<T>(
        &mut self,
        what: &str,
        mut done: impl FnMut(&mut Self) -> Result<Option<T>, String>,
    ) -> Result<T, String> {
        let until = Instant::now() + PATIENCE;
        loop {
            for _ in 0..TURNS {
                if let Some(done) = done(self)? {
                    return Ok(done);
                }
                if !self.agent.step_mover() {
                    break;
                }
            }
            self.agent.bell().prepare_wait();
            // Checks again, because an event can come before the announcement above.
            let found = done(self)?;
            if found.is_none() {
                self.turn()?;
            }
            self.agent.bell().cancel_wait();
            if let Some(found) = found {
                return Ok(found);
            }
            if Instant::now() > until {
                return Err(format!("{what}: not within {} s", PATIENCE.as_secs()));
            }
        }
    }

    fn turn(&mut self) -> Result<(), String> {
        let BenchWorker { agent, talk, gone, .. } = self;
        agent.turn(true, |event| {
            match event {
                // Messages sent before the end are still read.
                Event::Eof(conn) if conn == talk.0 => *gone = true,
                Event::Closed { conn, .. } if conn == talk.0 => {
                    return Err("the other process is gone".into());
                }
                _ => {}
            }
            Ok(())
        })
    }
}

fn landed(cause: Option<Cause>) -> Result<(), String> {
    cause.map_or(Ok(()), |cause| Err(format!("the hand-off failed: {cause}")))
}

impl SourceEnd for BenchWorker<SourceCommand> {
    fn offer(&mut self, room: u64, ids: &[u32]) -> Result<(), String> {
        self.enter(room, ids)
    }

    fn meet(&mut self, pages: &[PageId]) -> Result<(), String> {
        let target: Target = self.answer("a Destination", |answer| match *answer {
            TransferAnswer::Granted { target, .. } => Some(target),
            _ => None,
        })?;
        let OpenRequest { slot, .. } = self.open()?;
        self.agent.begin(slot, target, pages);
        Ok(())
    }

    fn send(&mut self) -> Result<(), String> {
        let OpenRequest { slot, room, tokens, .. } = self.open()?;
        self.agent.chunk(slot, 0..tokens, Some(AuxRecord::new(room, PAYLOAD)));
        Ok(())
    }

    fn end(&mut self) -> Result<(), String> {
        self.leave()
    }
}

impl DestinationEnd for BenchWorker<DestinationCommand> {
    fn wish(&mut self, room: u64, ids: &[u32]) -> Result<(), String> {
        self.enter(room, ids)?;
        let OpenRequest { slot, .. } = self.open()?;
        let session = self.answer("a session with the source", |answer| match *answer {
            TransferAnswer::SessionReady { slot: id, session, .. } if id == slot.id => {
                Some(session)
            }
            _ => None,
        })?;
        self.open = Some(OpenRequest { session: Some(session), ..self.open()? });
        Ok(())
    }

    fn lease(&mut self, pages: &[PageId]) -> Result<(), String> {
        let OpenRequest { slot, room, tokens, session } = self.open()?;
        let session = session.ok_or("there is no session")?;
        self.agent.expect(slot, (session, room), 0..tokens, pages);
        Ok(())
    }

    fn land(&mut self) -> Result<u64, String> {
        let OpenRequest { slot, .. } = self.open()?;
        let (at, cause) = self.until("the KV", |side| {
            let status = side.agent.status(slot);
            Ok(status.state.is_terminal().then(|| (monotonic_ns(), status.cause)))
        })?;
        landed(cause).map(|()| at)
    }

    fn end(&mut self) -> Result<(), String> {
        self.leave()
    }
}
