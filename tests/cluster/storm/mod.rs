//! A steady load on a cluster whose processes each have a host of their own, while one after the other of them is killed
//! and started again, stands still, loses its link, or its packets, all of them or one way, or is heard late; and so are
//! those who keep the entries of workers.
//!
//! Shown: all but a few requests end well, each with the right tokens, the others by a typed error, and in time; what is
//! left over in the end is nothing. `BATON_STORM_SECONDS` says how long it lasts, `BATON_STORM_SEED` which harm comes when,
//! `BATON_STORM_MODEL` which model; `tools/storm` runs the long ones.

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
/// Who waits for longer waits for ever: a silent worker is noticed in some seconds, at most twice in the life of a request.
/// Most of it is left to machines that do much else.
const LONGEST: Duration = PATIENCE;
/// By which a router's memory may grow: buffers of as many requests as are asked at once are far less.
const GROWTH_MAX: u64 = 16 << 20;

/// The number that a variable of the environment says, if it is there.
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
        "STORM {registry:?}, seed {seed}, {seconds} s: {} well, {} failed {:?}, {} wrong; {tried} tried again, {resumed} went on \
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
