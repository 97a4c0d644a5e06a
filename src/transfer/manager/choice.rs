//! Which transport a session has, and why: for logs and metrics of both sides.
//!
//! Each side knows what it would have taken itself; of the other a source knows all that was offered, a
//! destination no more than what was chosen.

use crate::wire::message::Transport;
use std::fmt;

/// Why no better one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Why {
    /// This worker takes no other.
    Asked,
    /// The other worker offers no other.
    OnlyOffered,
    /// A better one could not be set up.
    NotSetUp,
    /// The other worker, which chooses, took no better one; its log says why.
    ChosenThere,
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
            Why::OnlyOffered => "only_offered",
            Why::NotSetUp => "not_set_up",
            Why::ChosenThere => "chosen_there",
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
    pub const ALL: [Choice; 16] = {
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
            choice(Shm, Why::OnlyOffered),
            choice(Rdma, Why::OnlyOffered),
            choice(Tcp, Why::OnlyOffered),
            choice(Fake, Why::OnlyOffered),
            choice(Rdma, Why::NotSetUp),
            choice(Tcp, Why::NotSetUp),
            choice(Rdma, Why::ChosenThere),
            choice(Tcp, Why::ChosenThere),
        ]
    };

    /// Why `transport` was chosen, where this side takes `ours` and would have taken `failed`, which could not be
    /// set up, and the other, as far as known, takes `theirs`.
    pub fn explain(
        transport: Transport,
        ours: &[Transport],
        failed: &[Transport],
        theirs: Option<&[Transport]>,
    ) -> Choice {
        let took = |way| ours.contains(&way);
        let better = Transport::ALL.into_iter().take_while(|&way| way != transport);
        let why = match transport {
            _ if failed.iter().any(|failed| better.clone().any(|better| better == *failed)) => {
                Why::NotSetUp
            }
            _ if ours.len() == 1 => Why::Asked,
            _ if theirs.is_some_and(|theirs| theirs.len() == 1) => Why::OnlyOffered,
            Transport::Shm => Why::SameHost,
            _ if theirs.is_none() => Why::ChosenThere,
            Transport::Rdma if took(Transport::Shm) => Why::OtherHost,
            Transport::Tcp if !took(Transport::Rdma) => Why::NoRdmaHere,
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
        let explain =
            |transport, ours: &[Transport], failed: &[Transport], theirs: Option<&[Transport]>| {
                let choice = Choice::explain(transport, ours, failed, theirs);
                assert_eq!(Choice::ALL[choice.index()], choice);
                choice.why
            };
        let why = |transport, ours: &[Transport], theirs: Option<&[Transport]>| {
            explain(transport, ours, &[], theirs)
        };
        let all = [Shm, Rdma, Tcp];
        assert_eq!(why(Shm, &all, Some(&all)), Why::SameHost);
        assert_eq!(why(Shm, &all, None), Why::SameHost);
        assert_eq!(why(Rdma, &all, Some(&all)), Why::OtherHost);
        assert_eq!(why(Tcp, &all, Some(&[Shm, Tcp])), Why::NoRdmaThere);
        assert_eq!(why(Tcp, &[Shm, Tcp], Some(&all)), Why::NoRdmaHere);
        assert_eq!([why(Tcp, &all, None), why(Rdma, &all, None)], [Why::ChosenThere; 2]);
        for transport in [Shm, Rdma, Tcp, Fake] {
            assert_eq!(why(transport, &[transport], Some(&all)), Why::Asked);
            assert_eq!(why(transport, &all, Some(&[transport])), Why::OnlyOffered);
        }
        assert_eq!(explain(Tcp, &[Tcp], &[Shm], None), Why::NotSetUp);
        assert_eq!(explain(Rdma, &[Rdma, Tcp], &[Shm], None), Why::NotSetUp);
        assert_eq!(explain(Shm, &[Shm, Tcp], &[Rdma], None), Why::SameHost, "it was no better one");
    }
}
