//! A steady load on a cluster with one host for each process. One process after the other gets a
//! fault: it is killed and restarted, stopped, loses its link or packets, or is delayed. The
//! registries get faults, too.
//!
//! The test shows that almost all requests succeed with the right tokens. The others end in time
//! with a typed error, and no resource stays in use.
//! `BATON_STORM_SECONDS` sets the duration, `BATON_STORM_SEED` the faults, `BATON_STORM_MODEL` the
//! model. `tools/storm` does the long runs.

mod clients;
mod cluster;
mod crowd;
mod harm;
mod slow;

use crate::dummy::Dummy;
use crate::network::{self, Network};
use crate::process::PATIENCE;
use clients::{Clients, cases};
use cluster::{Cluster, Model, Registry};
use harm::Fate;
use std::thread;
use std::time::{Duration, Instant};

const SECONDS: u64 = 20;
const CLIENTS: usize = 6;
/// A request that takes longer is hung. A silent worker is noticed within seconds, at most twice in
/// the life of a request. The rest is reserve for busy machines.
const LONGEST: Duration = PATIENCE;
/// Limit for the growth of a router's memory. The buffers of all concurrent requests are far
/// smaller.
const GROWTH_MAX: u64 = 16 << 20;

/// The number in an environment variable, or the default.
fn number(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .map_or(default, |value| value.parse().unwrap_or_else(|_| panic!("{name}: a number")))
}

#[test]
fn requests_end_well_whatever_happens_to_workers_and_to_the_routers_that_list_them() {
    storm(Registry::Routers);
}

#[test]
fn requests_end_well_whatever_happens_to_workers_and_to_the_etcd_that_lists_them() {
    storm(Registry::Etcd);
}

fn storm(registry: Registry) {
    let Some(network) = Network::get() else { return };
    if !network::has_nft() {
        return eprintln!("SKIPPED: nft cannot be had");
    }
    let (seconds, seed) = (number("BATON_STORM_SECONDS", SECONDS), number("BATON_STORM_SEED", 1));
    let model = Model::get_or(Dummy::slow);
    network.enter("client");
    let cases = cases(&model, |_| {});
    let flags = ["--max-running-requests", "16"];
    let Some(mut cluster) = Cluster::start(network, model, registry, &flags) else { return };
    let clients = Clients::new(cases, cluster.addresses());
    let mut fate = Fate::new(seed);
    let tag = cluster.network.tag.clone();
    let mut before = 0;
    thread::scope(|scope| {
        let stops = clients.until_dropped();
        clients.spawn(scope, CLIENTS, &tag);
        thread::sleep(Duration::from_secs(2));
        before = cluster.largest_router();
        eprintln!("STORM before: {}", cluster.memory());
        let until = Instant::now() + Duration::from_secs(seconds);
        while Instant::now() < until {
            fate.strike(&mut cluster);
        }
        drop(stops);
    });
    let tally = clients.into_tally();
    let (tried, resumed) = cluster.tries();
    let killed = cluster.routers_killed;
    eprintln!("STORM after: {}", cluster.memory());
    eprintln!(
        "STORM {registry:?}, seed {seed}, {seconds} s: {} well, {} failed {:?}, {} wrong; \
         {tried} tried again, {resumed} went on \
         elsewhere; {killed} routers died, asked again for {:?}; longest {:.1} s",
        tally.well,
        tally.failed(),
        tally.failures,
        tally.wrong.len(),
        tally.elsewhere,
        tally.longest.as_secs_f64(),
    );
    cluster.check_idle();
    eprintln!("STORM no page is held, no request is left");
    assert_eq!(tally.wrong, [""; 0]);
    assert!(
        tally.failed() * 100 <= tally.well,
        "more than one in a hundred failed: {:?}",
        tally.failures
    );
    assert!(tally.longest < LONGEST, "a client waited {:?}", tally.longest);
    assert!(tally.broken() <= CLIENTS * killed, "a router that lives broke an answer off");
    assert!(killed > 0 || tally.elsewhere.is_empty(), "{:?}", tally.elsewhere);
    assert!(tried > 0 || !tally.elsewhere.is_empty(), "nothing went wrong");
    let after = cluster.largest_router();
    assert!(after < before + GROWTH_MAX, "a router's memory grew from {before} to {after}");
}
