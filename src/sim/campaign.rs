//! `baton sim`: runs one seed after the other and prints the results.

use super::checkers::Checker;
use super::cluster::{Cluster, SeedFailure, SeedReport};
use super::plan::{Plan, Scale};
use crate::cause::Cause;
use crate::cli::flags::{SimFlags, SimFlow, SimTransfer};
use crate::config::error::ConfigError;
use crate::ids::Room;
use crate::say;
use crate::stdx::event_queue::{MILLI, SECOND};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

/// Default number of requests per seed,
const REQUESTS: u32 = 100;
/// and its maximum.
const REQUESTS_MAX: u32 = 4096;
/// Maximum number of workers per role, because sessions are few and every pair is tried after the
/// faults.
const WORKERS_MAX: u32 = 16;

/// A series of runs.
#[derive(Clone, Copy, Debug)]
pub struct Campaign {
    /// The first seed.
    pub seed: u64,
    /// Number of seeds.
    pub seeds: u64,
    /// The size of each run.
    pub scale: Scale,
    /// The room to trace.
    pub trace: Option<Room>,
}

impl Campaign {
    /// Reads the flags.
    ///
    /// # Errors
    /// A flag needs `--load`, a size is out of range, or the last seed does not fit into 64 bits.
    pub fn new(flags: &SimFlags) -> Result<Campaign, ConfigError> {
        let SimFlags {
            seed,
            seeds,
            prefill,
            decode,
            requests,
            calm,
            transfer,
            flow,
            trace,
            ref load,
            services: _,
            command: _,
        } = *flags;
        if let Some(flag) = load.first_typed() {
            let why = format!("{flag} has no effect without it");
            return Err(ConfigError::Missing { flag: "--load", why });
        }
        let requests = requests.unwrap_or(REQUESTS);
        for (flag, value, most) in [
            ("--prefill", prefill, WORKERS_MAX),
            ("--decode", decode, WORKERS_MAX),
            ("--requests", requests, REQUESTS_MAX),
        ] {
            if !(1..=most).contains(&value) {
                let limit = format!("1 to {most} without --load");
                return Err(ConfigError::Value { flag, value: value.to_string(), limit });
            }
        }
        flags.last_seed()?;
        let scale = Scale { prefill, decode, requests, faults: !calm, transfer, flow };
        Ok(Campaign { seed, seeds, scale, trace: trace.map(Room) })
    }

    /// Runs all seeds and prints the result. Returns whether all is well.
    pub fn run(&self) -> bool {
        let begun = Instant::now();
        let mut sum = SeedReport::default();
        let mut is_traced = false;
        for seed in (0..self.seeds).map(|number| self.seed + number) {
            match self.run_one(seed) {
                Ok(report) => {
                    is_traced |= report.rooms.iter().any(|&(_, room)| Some(room) == self.trace);
                    add(&mut sum, report);
                }
                Err(failure) => {
                    say!("{}", self.tell(seed, &failure));
                    return false;
                }
            }
        }
        let seconds = begun.elapsed().as_secs_f64();
        let each_minute = (sum.requests as f64 / seconds * 60.0) as u64;
        say!(
            "{} seeds from {}: {} requests, and {} more to check that each pair serves again; \
             {} ended well, {} were retried; {} role changes were made, and {} were not; \
             {} events, {seconds:.1} s for {:.0} s simulated ({each_minute} requests a minute)",
            self.seeds,
            self.seed,
            sum.requests - sum.trials,
            sum.trials,
            sum.well,
            sum.retries,
            sum.turned,
            sum.stayed,
            sum.happenings,
            sum.time as f64 / SECOND as f64,
        );
        if !sum.failures.is_empty() {
            say!("the others failed because of injected faults:");
            for (cause, count) in &sum.failures {
                say!("{count:>8} {cause}: {}", meaning(cause));
            }
        }
        if let Some(room) = self.trace.filter(|_| !is_traced) {
            say!("no request met in room {}; those of seed {} did in these:", room.0, self.seed);
            for (request, room) in &sum.rooms {
                say!("request {request:>4}: --trace {}", room.0);
            }
            return false;
        }
        if self.seeds == 1 {
            say!("hash {:016x}", sum.hash);
        }
        true
    }

    fn run_one(&self, seed: u64) -> Result<SeedReport, SeedFailure> {
        let plan = Plan::new(seed, self.scale);
        let (result, lines) = run(&plan, self.trace);
        lines.iter().for_each(|line| say!("{line}"));
        result
    }

    /// The message about a seed that fails, with the command that repeats it.
    pub fn tell(&self, seed: u64, failure: &SeedFailure) -> String {
        let SeedFailure { by, what, at, room } = failure;
        let Scale { prefill, decode, requests, faults, transfer, flow } = self.scale;
        let calm = if faults { "" } else { " --calm" };
        let transfer = match transfer {
            SimTransfer::Auto => String::new(),
            other => format!(" --transfer {other}"),
        };
        let flow = match flow {
            SimFlow::Auto => String::new(),
            other => format!(" --flow {other}"),
        };
        let replay = format!(
            "baton sim --seed {seed} --prefill {prefill} --decode {decode} \
             --requests {requests}{calm}{transfer}{flow}"
        );
        let trace = room.map_or(String::new(), |room| format!(" --trace {}", room.0));
        let time = *at as f64 / MILLI as f64;
        format!("seed {seed} fails at {time:.3} ms ({by:?}): {what}\nreplay: {replay}{trace}")
    }
}

/// The meaning of a cause for a simulated request.
fn meaning(cause: &str) -> &'static str {
    match Cause::named(cause) {
        Some(Cause::ClientGone) => "its client left",
        Some(Cause::Aborted) => "it was aborted",
        Some(Cause::Refused) => "one of its legs was sent twice, and the other copy came first",
        Some(Cause::Overloaded) => {
            "its worker had no slot for it, or a queue in which its deadline would have passed"
        }
        Some(Cause::Deadline) => "its client stopped waiting",
        Some(Cause::PeerLost) => "a worker was lost, or no worker was available",
        Some(Cause::OtherLeg) => "its other leg ended first",
        Some(Cause::Draining) => "its worker was draining",
        Some(Cause::Unreachable) => "a NIC got no answer for as long as it retries",
        Some(Cause::Flushed) => "a NIC got no answer to another transfer of the same session",
        _ => "see the list of causes",
    }
}

/// Adds a seed's report to the sum. The rooms of the first seed stay.
fn add(sum: &mut SeedReport, report: SeedReport) {
    sum.hash = report.hash;
    sum.happenings += report.happenings;
    sum.requests += report.requests;
    sum.trials += report.trials;
    if sum.rooms.is_empty() {
        sum.rooms = report.rooms;
    }
    sum.well += report.well;
    sum.retries += report.retries;
    sum.turned += report.turned;
    sum.stayed += report.stayed;
    sum.time += report.time;
    let failures: &mut BTreeMap<_, _> = &mut sum.failures;
    for (cause, count) in report.failures {
        *failures.entry(cause).or_default() += count;
    }
}

/// Runs a plan to its end or to the first violation. A panic of production code is also a
/// violation. The lines are the trace of the selected room.
pub fn run(plan: &Plan, trace: Option<Room>) -> (Result<SeedReport, SeedFailure>, Vec<String>) {
    let mut cluster = None;
    let all = || cluster.insert(Cluster::new(plan, trace)).run();
    let result = catch_unwind(AssertUnwindSafe(all)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no text");
        let (by, what) = (Checker::Assertion, format!("panic: {text}"));
        let at = cluster.as_ref().map_or(0, Cluster::now);
        Err(SeedFailure { by, what, at, room: None })
    });
    (result, cluster.map_or_else(Vec::new, |cluster| cluster.trace.lines().to_vec()))
}
