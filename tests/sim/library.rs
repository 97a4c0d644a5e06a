//! Agents of the library under engines that poll late, cancel at any time, forget to release, and
//! lease pages that they must not lease. Each planted mistake is found.

use super::{CALM, FAULTS, quiet, well};
use baton::cli::flags::SimTransfer;
use baton::sim::RunScale;

const LIBRARY: RunScale = RunScale { is_library: true, ..FAULTS };
const TRANSFERS: [SimTransfer; 4] =
    [SimTransfer::Auto, SimTransfer::Shm, SimTransfer::Rdma, SimTransfer::Tcp];

#[test]
fn agents_end_all_requests_after_any_fault_of_peers_and_engines() {
    quiet();
    let (mut landed, mut failed) = (0, 0);
    for transfer in TRANSFERS {
        for seed in 1..=6 {
            let report = well(seed, RunScale { transfer, ..LIBRARY });
            (landed, failed) = (landed + report.well, failed + report.failed);
        }
    }
    assert!(3 * landed > failed && failed > 0, "{landed} landed, {failed} failed");
}

#[test]
fn agents_hand_over_all_that_nothing_disturbs() {
    quiet();
    for transfer in TRANSFERS {
        for seed in 7..=10 {
            well(seed, RunScale { transfer, is_library: true, ..CALM });
        }
    }
}

#[test]
fn a_seed_of_agents_repeats_its_run() {
    quiet();
    for seed in 1..=3 {
        assert_eq!(well(seed, LIBRARY), well(seed, LIBRARY), "seed {seed}");
    }
}
