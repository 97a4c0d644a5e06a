//! The transport that `--transfer auto` chooses, on this host and between two hosts.

use super::{Diagnosis, Verdict};
use crate::cmd::bench::transfer::Survey;
use crate::transfer::manager::choice::TransportChoice;
use crate::wire::message::Transport;

const TOPIC: &str = "transfer";

/// The part of the choice that depends only on this host.
pub(super) fn here(nics: &Result<String, String>) -> Diagnosis {
    let between = match nics {
        Ok(nics) => format!("rdma by {nics} if both hosts have it, else tcp"),
        Err(why) => format!("tcp ({why})"),
    };
    Diagnosis::good(TOPIC, format!("auto chooses shm between workers of one host, else {between}"))
}

/// The choice between this host and the host at `peer`. `theirs` is the answer of that host.
pub fn between(ours: &Survey, peer: &str, theirs: Result<Survey, String>) -> Diagnosis {
    let theirs = match theirs {
        Ok(theirs) => theirs,
        Err(why) => {
            let advice =
                "run baton bench transfer --listen ADDRESS:PORT there; this host must reach it";
            return Diagnosis::with(
                TOPIC,
                Verdict::Bad,
                format!("{peer} does not answer: {why}"),
                advice,
            );
        }
    };
    if theirs.version != ours.version {
        let found = format!("{peer} runs baton {}, this host {}", theirs.version, ours.version);
        return Diagnosis::with(TOPIC, Verdict::Bad, found, "run the same version on both hosts");
    }
    // A session chooses in the same way: the best transport that both support.
    let same_host = ours.host == theirs.host;
    let takes = |survey: &Survey| -> Vec<Transport> {
        let has = |way: &Transport| match way {
            Transport::Shm => true,
            Transport::Rdma => survey.nics.is_ok(),
            Transport::Tcp => true,
            Transport::Fake => false,
        };
        Transport::ALL.into_iter().filter(has).collect()
    };
    let (here, there) = (takes(ours), takes(&theirs));
    let fits = |way: &Transport| there.contains(way) && (*way != Transport::Shm || same_host);
    let chosen = here.iter().copied().find(fits).unwrap_or(Transport::Tcp);
    let TransportChoice { transport, why } =
        TransportChoice::explain(chosen, &here, &[], Some(&there));
    let mut found = format!("auto chooses {transport} between this host and {peer} ({why})");
    let lacks = match (chosen, &ours.nics, &theirs.nics) {
        (Transport::Rdma, Ok(here), Ok(there)) => {
            found += &format!(": {here} here, {there} there, if a network connects them");
            None
        }
        (Transport::Tcp, Err(why), _) => Some(format!("no rdma here: {why}")),
        (Transport::Tcp, _, Err(why)) => Some(format!("no rdma there: {why}")),
        _ => None,
    };
    match lacks {
        None => Diagnosis::good(TOPIC, found),
        Some(lacks) => Diagnosis::good(TOPIC, format!("{found}; {lacks}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str, nics: Result<&str, &str>) -> Survey {
        let nics = nics.map(String::from).map_err(String::from);
        Survey { version: "1".into(), host: name.into(), nics }
    }

    #[test]
    fn the_transport_between_two_hosts_is_one_that_both_support() {
        let ours = host("a", Ok("mlx5_0"));
        let found = |theirs| between(&ours, "b:1", Ok(theirs)).found;
        assert!(
            found(host("a", Err("none")))
                .starts_with("auto chooses shm between this host and b:1 (same_host)")
        );
        let rdma = found(host("b", Ok("mlx5_1")));
        assert!(
            rdma.starts_with("auto chooses rdma") && rdma.contains("mlx5_0 here, mlx5_1 there"),
            "{rdma}"
        );
        let tcp = found(host("b", Err("no RDMA device")));
        assert!(
            tcp.contains("tcp") && tcp.ends_with("(no_rdma_there); no rdma there: no RDMA device"),
            "{tcp}"
        );
        let without = host("a", Err("no RDMA device"));
        let tcp = between(&without, "b:1", Ok(host("b", Ok("mlx5_1")))).found;
        assert!(tcp.ends_with("(no_rdma_here); no rdma here: no RDMA device"), "{tcp}");
    }

    #[test]
    fn an_unreachable_peer_or_another_version_is_reported() {
        let ours = host("a", Ok("mlx5_0"));
        let finding = between(&ours, "b:1", Err("connection refused".into()));
        assert_eq!((finding.verdict, finding.advice.is_some()), (Verdict::Bad, true));
        let other = Survey { version: "2".into(), ..host("b", Ok("x")) };
        assert!(between(&ours, "b:1", Ok(other)).found.starts_with("b:1 runs baton 2"));
    }
}
