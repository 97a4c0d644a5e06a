//! What the two processes of a bench say to each other: one JSON object a line over a TCP connection, which
//! lives as long as one row of figures.

use super::case::{Case, CaseError, End, Layouts};
use super::limit::VerbsEnds;
use super::survey::Survey;
use crate::config::resolved::DataThreads;
use crate::kv::layout::KvLayout;
use crate::limits::LANES_MAX;
use crate::net::{ConnId, Reactor};
use serde::{Deserialize, Serialize};

/// A line longer than this is nonsense.
pub const LINE_MAX: usize = 64 << 10;

/// Most local pieces of an rdma work request that can be asked for.
pub const PIECES_MAX: usize = 16;

/// A row, as the source wants it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Row {
    /// What is handed over.
    pub case: Case,
    /// Of the pools.
    pub layouts: Layouts,
    /// Tensor-parallel ranks of the source,
    pub source_ranks: u32,
    /// and of the destination.
    pub destination_ranks: u32,
    /// `shm`, `tcp` or `rdma`.
    pub transport: String,
    /// Of the session.
    pub lanes: u16,
    /// Most local pieces of an rdma work request.
    pub pieces: u32,
    /// Nobody parks.
    pub busy_poll: bool,
    /// Who posts and reaps over rdma.
    pub data_threads: DataThreads,
}

impl Row {
    /// One side's layout; none where its ranks cannot share the case's heads evenly.
    pub fn layout(&self, end: End) -> Option<KvLayout> {
        let ranks = match end {
            End::Source => self.source_ranks,
            End::Destination => self.destination_ranks,
        };
        self.case.layout(self.layouts.of(end), ranks)
    }

    /// As many bytes as are handed over, each replica of a rank its own.
    pub fn moved(&self) -> Case {
        self.case.times(self.destination_ranks.div_ceil(self.case.kv_heads))
    }

    /// Whether there is KV of this shape.
    ///
    /// # Errors
    /// Why there is not.
    pub fn check(&self) -> Result<(), CaseError> {
        self.case.check()?;
        self.case.check_ranks(End::Source, self.source_ranks)?;
        self.case.check_ranks(End::Destination, self.destination_ranks)?;
        CaseError::unless_within("--lanes", self.lanes.into(), LANES_MAX)?;
        CaseError::unless_within("--pieces", self.pieces, PIECES_MAX)
    }

    /// Ranks of both sides, for people.
    pub fn ranks(&self) -> String {
        format!("{}:{}", self.source_ranks, self.destination_ranks)
    }
}

/// All that is said.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Say {
    /// Whoever connects, first and last: what can this host take part in?
    Survey,
    /// The answer.
    Surveyed(Survey),
    /// Source, first: which program, which row, and the port of its control link.
    Prepare { version: String, row: Row, control_port: u16 },
    /// Destination: pools are there; the port of its bare streams, where there are any.
    Prepared { bare_port: Option<u16>, verbs: Option<VerbsEnds>, host: String },
    /// Source, of rdma: its bare queue pairs.
    Connect { verbs: VerbsEnds },
    /// Source: what time is it?
    Ask,
    /// Destination: nanoseconds of its own clock.
    Time { at: u64 },
    /// Source: expect the KV of this room in the pages of this list; see to every byte of it where told.
    Expect { room: u64, list: u32, verify: bool },
    /// Destination: it was there at this time of its clock, and what CPU time that took since Expect.
    Landed { at: u64, cpu: u64 },
    /// Source: move as many bytes barely.
    Bare { run: u32 },
    /// Destination: reads its bare streams from now on.
    BareReady,
    /// Destination: how long it took (shm), or when it was there (tcp).
    BareDone { at: u64 },
    /// Source: that was all.
    Finish,
    /// Destination: what its side took, over all rooms.
    Finished { work_requests: u64, doorbells: u64 },
    /// Either, last: why it cannot go on.
    Failed { why: String },
}

/// One end.
#[derive(Debug)]
pub struct Talk(pub ConnId);

impl Talk {
    /// Says something.
    pub fn say(&self, reactor: &mut Reactor, what: &Say) -> Result<(), String> {
        let mut line = serde_json::to_vec(what).expect("only strings are keys");
        line.push(b'\n');
        reactor.send(self.0, &line).map_err(|error| format!("the other process: {error:?}"))?;
        // A bare stream may be waited for next.
        reactor.write_due();
        Ok(())
    }

    /// What has been said, if a line is whole.
    pub fn hear(&self, reactor: &mut Reactor) -> Result<Option<Say>, String> {
        let received = reactor.received(self.0);
        let Some(end) = received.iter().position(|&byte| byte == b'\n') else {
            let too_long = received.len() > LINE_MAX;
            return if too_long {
                Err("the other process: an endless line".into())
            } else {
                Ok(None)
            };
        };
        let said = serde_json::from_slice(&received[..end]);
        reactor.consume(self.0, end + 1);
        match said {
            Ok(Say::Failed { why }) => Err(format!("the other process: {why}")),
            Ok(said) => Ok(Some(said)),
            Err(error) => Err(format!("the other process says nonsense: {error}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_of_a_stranger_is_held_to_the_bounds() {
        let case = Case { kv_heads: 1, item_bytes: 32, ..Case::known().remove(0) };
        let good = Row {
            case,
            layouts: Layouts::ALL[0],
            source_ranks: 1,
            destination_ranks: 64,
            transport: "shm".into(),
            lanes: 1,
            pieces: 16,
            data_threads: DataThreads::Fused,
            busy_poll: false,
        };
        assert_eq!(good.check(), Ok(()));
        for (bad, said) in [
            (Row { source_ranks: 0, ..good.clone() }, "--src-tp 0: must be 1 to 64"),
            (
                Row { destination_ranks: 1 << 24, ..good.clone() },
                "--dst-tp 16777216: must be 1 to 64",
            ),
            (Row { lanes: 0, ..good.clone() }, "--lanes 0: must be 1 to 32"),
            (Row { lanes: 33, ..good.clone() }, "--lanes 33: must be 1 to 32"),
            (Row { pieces: 17, ..good.clone() }, "--pieces 17: must be 1 to 16"),
        ] {
            assert_eq!(bad.check().unwrap_err().to_string(), said);
        }
    }
}
