//! Messages between the two processes of a bench: JSON objects, one on each line. Each row has its
//! own TCP connection.

use super::case::{Case, CaseError, Layouts, TransferEnd};
use super::count::BenchCounts;
use super::limit::VerbsEnds;
use super::way::Way;
use crate::config::DataThreadMode;
use crate::kv::layout::KvLayout;
use crate::limits::LANES_MAX;
use crate::net::{ConnId, Reactor};
use serde::{Deserialize, Serialize};

/// Maximum bytes of a line.
pub const LINE_MAX: usize = 64 << 10;

/// Maximum value of `--pieces`.
pub const PIECES_MAX: usize = 16;

/// A host's properties.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Survey {
    /// Version of Baton.
    pub version: String,
    /// Identity of the host; equal hosts can share memory.
    pub host: String,
    /// Description of the NICs that sessions would use, or the reason why there are none.
    pub nics: Result<String, String>,
}

/// A row, as the source requests it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BenchRow {
    /// What is transferred.
    pub case: Case,
    /// Layouts of the pools.
    pub layouts: Layouts,
    /// Tensor-parallel ranks of the source.
    pub source_ranks: u32,
    /// Tensor-parallel ranks of the destination.
    pub destination_ranks: u32,
    /// `shm`, `tcp` or `rdma`.
    pub transport: String,
    /// Lanes of the session.
    pub lanes: u16,
    /// Maximum local pieces of an rdma work request.
    pub pieces: u32,
    /// Whether all threads spin and none parks.
    pub busy_poll: bool,
    /// Threads that post and poll over rdma.
    pub data_threads: DataThreadMode,
    /// Whether the row compares the C library with agents that the bench drives itself.
    pub through_library: bool,
}

impl BenchRow {
    /// The layout of one side; `None` if its ranks cannot divide the case's heads evenly.
    pub fn layout(&self, end: TransferEnd) -> Option<KvLayout> {
        let ranks = match end {
            TransferEnd::Source => self.source_ranks,
            TransferEnd::Destination => self.destination_ranks,
        };
        self.case.layout(self.layouts.of(end), ranks)
    }

    /// The same case with the number of bytes that are transferred, replicas of ranks included.
    pub fn moved(&self) -> Case {
        self.case.times(self.destination_ranks.div_ceil(self.case.kv_heads))
    }

    /// Checks that the shape of KV is possible.
    ///
    /// # Errors
    /// The reason why not.
    pub fn check(&self) -> Result<(), CaseError> {
        self.case.check()?;
        self.case.check_ranks(TransferEnd::Source, self.source_ranks)?;
        self.case.check_ranks(TransferEnd::Destination, self.destination_ranks)?;
        CaseError::unless_within("--lanes", self.lanes.into(), LANES_MAX)?;
        CaseError::unless_within("--pieces", self.pieces, PIECES_MAX)
    }

    /// Ranks of both sides, as text for the table.
    pub fn ranks(&self) -> String {
        format!("{}:{}", self.source_ranks, self.destination_ranks)
    }
}

/// All messages.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum BenchMessage {
    /// From the process that connects, as the only message: requests the survey.
    Survey,
    /// The answer to `Survey`.
    Surveyed(Survey),
    /// Source, first: its version, the row, and the port of its control link.
    Prepare { version: String, row: BenchRow, control_port: u16 },
    /// Destination: its pools exist; the port of its bare streams, if there are any.
    Prepared { bare_port: Option<u16>, verbs: Option<VerbsEnds>, host: String },
    /// Source, for rdma: its bare queue pairs.
    Connect { verbs: VerbsEnds },
    /// Source: requests the time.
    Ask,
    /// Destination: nanoseconds of its clock.
    Time { at: u64 },
    /// Source: start an agent of the library, for the source's agent at this port.
    Open { port: u16 },
    /// Destination: the agent runs.
    Opened,
    /// Source: expect the KV of this room; check every byte if `verify`.
    Expect { way: Way, room: u64, verify: bool },
    /// Destination: its clock when the KV arrived, and its CPU time since `Expect`.
    Landed { at: u64, cpu: u64 },
    /// Source: expect the KV of this room and of the next ones, `rooms` in all, without a message
    /// in between.
    Count { way: Way, room: u64, rooms: u64 },
    /// Destination: what these hand-offs took.
    Counted(BenchCounts),
    /// Source: start a bare run.
    Bare { run: u32 },
    /// Destination: it reads its bare streams from now on.
    BareReady,
    /// Destination: the duration (shm), or its clock at the end (tcp, rdma).
    BareDone { at: u64 },
    /// Source: the row is complete.
    Finish,
    /// Destination: its counters over all rooms.
    Finished { work_requests: u64, doorbells: u64 },
    /// Either, last: the reason of a failure.
    Failed { why: String },
}

/// One end of the connection.
#[derive(Debug)]
pub struct BenchChannel(pub ConnId);

impl BenchChannel {
    /// Sends a message.
    pub fn send(&self, reactor: &mut Reactor, what: &BenchMessage) -> Result<(), String> {
        let mut line = serde_json::to_vec(what).expect("all keys are strings");
        line.push(b'\n');
        reactor.send(self.0, &line).map_err(|error| format!("the other process: {error:?}"))?;
        // The line is written now, because the next step can block on a bare stream.
        reactor.write_due();
        Ok(())
    }

    /// Receives a message, if a complete line has arrived.
    pub fn receive(&self, reactor: &mut Reactor) -> Result<Option<BenchMessage>, String> {
        let received = reactor.received(self.0);
        let Some(end) = received.iter().position(|&byte| byte == b'\n') else {
            let too_long = received.len() > LINE_MAX;
            return if too_long {
                Err("the other process: a line is too long".into())
            } else {
                Ok(None)
            };
        };
        let said = serde_json::from_slice(&received[..end]);
        reactor.consume(self.0, end + 1);
        match said {
            Ok(BenchMessage::Failed { why }) => Err(format!("the other process: {why}")),
            Ok(said) => Ok(Some(said)),
            Err(error) => Err(format!("the other process sent an invalid message: {error}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_of_a_stranger_is_held_to_the_bounds() {
        let case = Case { kv_heads: 1, item_bytes: 32, ..Case::known().remove(0) };
        let good = BenchRow {
            case,
            layouts: Layouts::ALL[0],
            source_ranks: 1,
            destination_ranks: 64,
            transport: "shm".into(),
            lanes: 1,
            pieces: 16,
            data_threads: DataThreadMode::Fused,
            busy_poll: false,
            through_library: false,
        };
        assert_eq!(good.check(), Ok(()));
        for (bad, said) in [
            (BenchRow { source_ranks: 0, ..good.clone() }, "--src-tp 0: must be 1 to 64"),
            (
                BenchRow { destination_ranks: 1 << 24, ..good.clone() },
                "--dst-tp 16777216: must be 1 to 64",
            ),
            (BenchRow { lanes: 0, ..good.clone() }, "--lanes 0: must be 1 to 32"),
            (BenchRow { lanes: 33, ..good.clone() }, "--lanes 33: must be 1 to 32"),
            (BenchRow { pieces: 17, ..good.clone() }, "--pieces 17: must be 1 to 16"),
        ] {
            assert_eq!(bad.check().unwrap_err().to_string(), said);
        }
    }
}
