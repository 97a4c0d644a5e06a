//! The transport of a session and the reason for it, for logs and metrics of both sides.
//!
//! Each side knows its own preferences. A source also knows everything the destination offered; a
//! destination knows only the source's choice.

use crate::wire::message::Transport;
use std::fmt;

/// The reason why this transport was chosen and not a better one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ChoiceReason {
    /// This worker allows no other transport.
    Asked,
    /// The other worker offers no other transport.
    OnlyOffered,
    /// A better transport could not be set up.
    NotSetUp,
    /// The other worker has chosen; its log gives the reason.
    ChosenThere,
    /// Both workers are on one host, in one network namespace.
    SameHost,
    /// The workers are not on one host in one network namespace.
    OtherHost,
    /// This worker has no NIC for RDMA, or leaves RDMA out after failures.
    NoRdmaHere,
    /// The other worker has no NIC for RDMA, or leaves RDMA out after failures.
    NoRdmaThere,
}

/// A transport with its reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TransportChoice {
    /// The chosen transport.
    pub transport: Transport,
    /// The reason.
    pub why: ChoiceReason,
}

impl ChoiceReason {
    /// The name in logs and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            ChoiceReason::Asked => "asked_for",
            ChoiceReason::OnlyOffered => "only_offered",
            ChoiceReason::NotSetUp => "not_set_up",
            ChoiceReason::ChosenThere => "chosen_there",
            ChoiceReason::SameHost => "same_host",
            ChoiceReason::OtherHost => "other_host",
            ChoiceReason::NoRdmaHere => "no_rdma_here",
            ChoiceReason::NoRdmaThere => "no_rdma_there",
        }
    }
}

impl fmt::Display for ChoiceReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl TransportChoice {
    /// All possible choices.
    pub const ALL: [TransportChoice; 16] = {
        use Transport::{Fake, Rdma, Shm, Tcp};
        const fn choice(transport: Transport, why: ChoiceReason) -> TransportChoice {
            TransportChoice { transport, why }
        }
        [
            choice(Shm, ChoiceReason::SameHost),
            choice(Rdma, ChoiceReason::OtherHost),
            choice(Tcp, ChoiceReason::NoRdmaHere),
            choice(Tcp, ChoiceReason::NoRdmaThere),
            choice(Shm, ChoiceReason::Asked),
            choice(Rdma, ChoiceReason::Asked),
            choice(Tcp, ChoiceReason::Asked),
            choice(Fake, ChoiceReason::Asked),
            choice(Shm, ChoiceReason::OnlyOffered),
            choice(Rdma, ChoiceReason::OnlyOffered),
            choice(Tcp, ChoiceReason::OnlyOffered),
            choice(Fake, ChoiceReason::OnlyOffered),
            choice(Rdma, ChoiceReason::NotSetUp),
            choice(Tcp, ChoiceReason::NotSetUp),
            choice(Rdma, ChoiceReason::ChosenThere),
            choice(Tcp, ChoiceReason::ChosenThere),
        ]
    };

    /// The reason for `transport`. This side allows `ours` and could not set up `failed`; the other
    /// side offers `theirs`, if known.
    pub fn explain(
        transport: Transport,
        ours: &[Transport],
        failed: &[Transport],
        theirs: Option<&[Transport]>,
    ) -> TransportChoice {
        let took = |way| ours.contains(&way);
        let better = Transport::ALL.into_iter().take_while(|&way| way != transport);
        let why = match transport {
            _ if failed.iter().any(|failed| better.clone().any(|better| better == *failed)) => {
                ChoiceReason::NotSetUp
            }
            _ if ours.len() == 1 => ChoiceReason::Asked,
            _ if theirs.is_some_and(|theirs| theirs.len() == 1) => ChoiceReason::OnlyOffered,
            Transport::Shm => ChoiceReason::SameHost,
            _ if theirs.is_none() => ChoiceReason::ChosenThere,
            Transport::Rdma if took(Transport::Shm) => ChoiceReason::OtherHost,
            Transport::Tcp if !took(Transport::Rdma) => ChoiceReason::NoRdmaHere,
            Transport::Tcp => ChoiceReason::NoRdmaThere,
            Transport::Rdma | Transport::Fake => ChoiceReason::Asked,
        };
        TransportChoice { transport, why }
    }

    /// Its index in [`TransportChoice::ALL`].
    pub fn index(self) -> usize {
        TransportChoice::ALL
            .iter()
            .position(|&known| known == self)
            .expect("explain makes no others")
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
                let choice = TransportChoice::explain(transport, ours, failed, theirs);
                assert_eq!(TransportChoice::ALL[choice.index()], choice);
                choice.why
            };
        let why = |transport, ours: &[Transport], theirs: Option<&[Transport]>| {
            explain(transport, ours, &[], theirs)
        };
        let all = [Shm, Rdma, Tcp];
        assert_eq!(why(Shm, &all, Some(&all)), ChoiceReason::SameHost);
        assert_eq!(why(Shm, &all, None), ChoiceReason::SameHost);
        assert_eq!(why(Rdma, &all, Some(&all)), ChoiceReason::OtherHost);
        assert_eq!(why(Tcp, &all, Some(&[Shm, Tcp])), ChoiceReason::NoRdmaThere);
        assert_eq!(why(Tcp, &[Shm, Tcp], Some(&all)), ChoiceReason::NoRdmaHere);
        assert_eq!([why(Tcp, &all, None), why(Rdma, &all, None)], [ChoiceReason::ChosenThere; 2]);
        for transport in [Shm, Rdma, Tcp, Fake] {
            assert_eq!(why(transport, &[transport], Some(&all)), ChoiceReason::Asked);
            assert_eq!(why(transport, &all, Some(&[transport])), ChoiceReason::OnlyOffered);
        }
        assert_eq!(explain(Tcp, &[Tcp], &[Shm], None), ChoiceReason::NotSetUp);
        assert_eq!(explain(Rdma, &[Rdma, Tcp], &[Shm], None), ChoiceReason::NotSetUp);
        assert_eq!(
            explain(Shm, &[Shm, Tcp], &[Rdma], None),
            ChoiceReason::SameHost,
            "it was no better one"
        );
    }
}
