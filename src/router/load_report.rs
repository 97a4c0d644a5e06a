//! The load that a worker reports: the answer of `/v1/loads`, in SGLang's format. A worker is one
//! process, so the loads of its data-parallel ranks are added.

use crate::routing::load::LoadReport;
use serde::Deserialize;

/// Path of the load query.
pub const PATH: &str = "/v1/loads";

#[derive(Deserialize)]
struct Answer {
    loads: Vec<Rank>,
}

#[derive(Deserialize)]
struct Rank {
    num_running_reqs: u32,
    num_waiting_reqs: u32,
    #[serde(default)]
    num_waiting_uncached_tokens: u64,
    #[serde(default)]
    num_used_tokens: u64,
}

/// Parses an answer. `None` if it is not a load report.
pub fn of(body: &[u8]) -> Option<LoadReport> {
    let Answer { loads } = serde_json::from_slice(body).ok()?;
    let mut report = LoadReport::default();
    for rank in loads {
        let sequences = rank.num_running_reqs.saturating_add(rank.num_waiting_reqs);
        report.sequences = report.sequences.saturating_add(sequences);
        report.uncomputed = report.uncomputed.saturating_add(rank.num_waiting_uncached_tokens);
        report.used = report.used.saturating_add(rank.num_used_tokens);
    }
    Some(report)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::info::{Load, Loads};

    #[test]
    fn a_load_report_of_our_worker_is_read_and_nonsense_is_not() {
        let load = Load {
            num_running_reqs: 2,
            num_waiting_reqs: 3,
            num_waiting_uncached_tokens: 700,
            num_used_tokens: 900,
            ..Load::default()
        };
        let body = serde_json::to_vec(&Loads::new(load, 0.0, "1")).unwrap();
        assert_eq!(of(&body), Some(LoadReport { sequences: 5, uncomputed: 700, used: 900 }));
        let two = br#"{"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 0},
            {"num_running_reqs": 4294967295, "num_waiting_reqs": 9}]}"#;
        assert_eq!(of(two), Some(LoadReport { sequences: u32::MAX, ..LoadReport::default() }));
        for strange in
            [&b"OK"[..], b"{}", br#"{"loads": [{"num_running_reqs": -1, "num_waiting_reqs": 0}]}"#]
        {
            assert_eq!(of(strange), None);
        }
    }
}
