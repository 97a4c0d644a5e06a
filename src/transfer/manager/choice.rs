//! Which transport a session has, and why: for logs and metrics of both sides.
//!
//! Each side knows what it would have taken itself; of the other a source knows all that was offered, a
//! destination no more than what was chosen.

use crate::wire::message::Transport;
use std::fmt;

/// Why no better one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Why {
    /// One side takes no other.
    Asked,
    /// Both workers are on one host, in one network namespace.
    SameHost,
    /// They are not.
    OtherHost,
    /// This worker has no NIC for RDMA, or leaves it out after what happened there.
    NoRdmaHere,
    /// The other worker does.
    NoRdmaThere,
}

/// A transport with its reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Choice {
    /// How bytes move.
    pub transport: Transport,
    /// Why so.
    pub why: Why,
}

impl Why {
    /// As in log and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Why::Asked => "asked_for",
            Why::SameHost => "same_host",
            Why::OtherHost => "other_host",
            Why::NoRdmaHere => "no_rdma_here",
            Why::NoRdmaThere => "no_rdma_there",
        }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Choice {
    /// All there are.
    pub const ALL: [Choice; 8] = {
        use Transport::{Fake, Rdma, Shm, Tcp};
        const fn choice(transport: Transport, why: Why) -> Choice {
            Choice { transport, why }
        }
        [
            choice(Shm, Why::SameHost),
            choice(Rdma, Why::OtherHost),
            choice(Tcp, Why::NoRdmaHere),
            choice(Tcp, Why::NoRdmaThere),
            choice(Shm, Why::Asked),
            choice(Rdma, Why::Asked),
            choice(Tcp, Why::Asked),
            choice(Fake, Why::Asked),
        ]
    };

    /// Why `transport` was chosen, where this side takes `ours` and the other, as far as known, `theirs`.
    pub fn explain(transport: Transport, ours: &[Transport], theirs: Option<&[Transport]>) -> Choice {
        let asked = ours.len() == 1 || theirs.is_some_and(|theirs| theirs.len() == 1);
        let why = match transport {
            _ if asked => Why::Asked,
            Transport::Shm => Why::SameHost,
            Transport::Rdma if ours.contains(&Transport::Shm) => Why::OtherHost,
            Transport::Tcp if !ours.contains(&Transport::Rdma) => Why::NoRdmaHere,
            Transport::Tcp => Why::NoRdmaThere,
            Transport::Rdma | Transport::Fake => Why::Asked,
        };
        Choice { transport, why }
    }

    /// Its place in [`Choice::ALL`].
    pub fn index(self) -> usize {
        Choice::ALL.iter().position(|&known| known == self).expect("explain makes no others")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Transport::{Fake, Rdma, Shm, Tcp};

    #[test]
    fn every_choice_has_its_reason() {
        let why = |transport, ours: &[Transport], theirs: Option<&[Transport]>| {
            let choice = Choice::explain(transport, ours, theirs);
            assert_eq!(Choice::ALL[choice.index()], choice);
            choice.why
        };
        let all = [Shm, Rdma, Tcp];
        assert_eq!(why(Shm, &all, Some(&all)), Why::SameHost);
        assert_eq!(why(Rdma, &all, Some(&all)), Why::OtherHost);
        assert_eq!(why(Tcp, &all, Some(&[Shm, Tcp])), Why::NoRdmaThere);
        assert_eq!(why(Tcp, &[Shm, Tcp], Some(&all)), Why::NoRdmaHere);
        assert_eq!(why(Tcp, &all, None), Why::NoRdmaThere);
        for transport in [Shm, Rdma, Tcp, Fake] {
            assert_eq!(why(transport, &[transport], None), Why::Asked);
            assert_eq!(why(transport, &all, Some(&[transport])), Why::Asked);
        }
    }
}
