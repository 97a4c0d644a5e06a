//! What `--transfer auto` comes to, on this host and between two.

use super::{Finding, Verdict};
use crate::bench::transfer::Survey;
use crate::transfer::manager::choice::Choice;
use crate::wire::message::Transport;

const TOPIC: &str = "transfer";

/// As far as one host tells.
pub(super) fn here(nics: &Result<String, String>) -> Finding {
    let between = match nics {
        Ok(nics) => format!("rdma by {nics}, where both have it, else tcp"),
        Err(why) => format!("tcp ({why})"),
    };
    Finding::good(TOPIC, format!("auto chooses shm between workers of one host, else {between}"))
}

/// Between this host and the one at `peer`, by what that one has answered.
pub fn between(ours: &Survey, peer: &str, theirs: Result<Survey, String>) -> Finding {
    let theirs = match theirs {
        Ok(theirs) => theirs,
        Err(why) => {
            let advice =
                "run baton bench transfer --listen ADDRESS:PORT there, and let this host reach it";
            return Finding::with(
                TOPIC,
                Verdict::Bad,
                format!("{peer} cannot be asked: {why}"),
                advice,
            );
        }
    };
    if theirs.version != ours.version {
        let found = format!("{peer} runs baton {}, this host {}", theirs.version, ours.version);
        return Finding::with(TOPIC, Verdict::Bad, found, "run one version on both");
    }
    // As a session does: the best that both take.
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
    let Choice { transport, why } = Choice::explain(chosen, &here, &[], Some(&there));
    let mut found = format!("auto chooses {transport} between this host and {peer} ({why})");
    let lacks = match (chosen, &ours.nics, &theirs.nics) {
        (Transport::Rdma, Ok(here), Ok(there)) => {
            found += &format!(": {here} here, {there} there, if a fabric joins them");
            None
        }
        (Transport::Tcp, Err(why), _) => Some(format!("no rdma here: {why}")),
        (Transport::Tcp, _, Err(why)) => Some(format!("no rdma there: {why}")),
        _ => None,
    };
    match lacks {
        None => Finding::good(TOPIC, found),
        Some(lacks) => Finding::good(TOPIC, format!("{found}; {lacks}")),
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
    fn between_two_hosts_it_is_what_both_take() {
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
    fn who_cannot_be_asked_is_told_with_what_to_do() {
        let ours = host("a", Ok("mlx5_0"));
        let finding = between(&ours, "b:1", Err("connection refused".into()));
        assert_eq!((finding.verdict, finding.advice.is_some()), (Verdict::Bad, true));
        let other = Survey { version: "2".into(), ..host("b", Ok("x")) };
        assert!(between(&ours, "b:1", Ok(other)).found.starts_with("b:1 runs baton 2"));
    }
}
