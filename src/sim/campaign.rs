//! Seeds one after the other, and what is said of them: `baton sim`.

use super::agenda::{MILLI, SECOND};
use super::checkers::Checker;
use super::cluster::{Cluster, Failure, Report};
use super::plan::{Plan, Scale};
use crate::cause::Cause;
use crate::config::error::ConfigError;
use crate::config::flags::{SimFlags, SimFlow, SimTransfer};
use crate::ids::Room;
use crate::say;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

/// Requests of a seed where nothing is said,
const REQUESTS: u32 = 100;
/// and most of them.
const REQUESTS_MAX: u32 = 4096;
/// Most workers of a role: sessions are few, and every pair is tried after faults.
const WORKERS_MAX: u32 = 16;

/// What is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Campaign {
    /// The first seed.
    pub seed: u64,
    /// How many.
    pub seeds: u64,
    /// How much of each.
    pub scale: Scale,
    /// Whose story is told.
    pub trace: Option<Room>,
}

impl Campaign {
    /// As typed.
    ///
    /// # Errors
    /// A flag is for `--load` alone, or a size is, or there are not so many seeds from the first one on.
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
            command: _,
        } = *flags;
        if let Some(flag) = load.first_typed() {
            let why = format!("{flag} has no meaning without it");
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
        if seed.checked_add(seeds - 1).is_none() {
            let limit = format!("the last seed is {}, and the first here {seed}", u64::MAX);
            return Err(ConfigError::Value { flag: "--seeds", value: seeds.to_string(), limit });
        }
        let scale = Scale { prefill, decode, requests, faults: !calm, transfer, flow };
        Ok(Campaign { seed, seeds, scale, trace: trace.map(Room) })
    }

    /// Runs all seeds and says what came of them. True when all is well.
    pub fn run(&self) -> bool {
        let begun = Instant::now();
        let mut sum = Report::default();
        let mut told = false;
        for seed in (0..self.seeds).map(|number| self.seed + number) {
            match self.run_one(seed) {
                Ok(report) => {
                    told |= report.rooms.iter().any(|&(_, room)| Some(room) == self.trace);
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
            "{} seeds from {}: {} requests, and {} more to see whether each pair serves again; {} ended well, {} were sent again; {} changes of role came about, and {} did not; {} happenings, {seconds:.1} s for {:.0} s simulated ({each_minute} requests a minute)",
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
            say!("the others failed for what was done to them:");
            for (cause, count) in &sum.failures {
                say!("{count:>8} {cause}: {}", meaning(cause));
            }
        }
        if let Some(room) = self.trace.filter(|_| !told) {
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

    fn run_one(&self, seed: u64) -> Result<Report, Failure> {
        let plan = Plan::new(seed, self.scale);
        let (result, lines) = run(&plan, self.trace);
        lines.iter().for_each(|line| say!("{line}"));
        result
    }

    /// What is said of a seed that fails, with the command that replays it.
    pub fn tell(&self, seed: u64, failure: &Failure) -> String {
        let Failure { by, what, at, room } = failure;
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
            "baton sim --seed {seed} --prefill {prefill} --decode {decode} --requests {requests}{calm}{transfer}{flow}"
        );
        let trace = room.map_or(String::new(), |room| format!(" --trace {}", room.0));
        let time = *at as f64 / MILLI as f64;
        format!("seed {seed} fails at {time:.3} ms ({by:?}): {what}\nreplay: {replay}{trace}")
    }
}

/// What a cause means of a simulated request.
fn meaning(cause: &str) -> &'static str {
    match Cause::named(cause) {
        Some(Cause::ClientGone) => "its client left",
        Some(Cause::Aborted) => "somebody had it end",
        Some(Cause::Refused) => "one of its legs was sent twice, and the other copy came first",
        Some(Cause::Overloaded) => {
            "its worker had no place for it, or a line it would not have outlasted"
        }
        Some(Cause::Deadline) => "its client waited no longer",
        Some(Cause::PeerLost) => "a worker was lost, or none was to be had",
        Some(Cause::OtherLeg) => "its other leg ended first",
        Some(Cause::Draining) => "its worker was about to leave",
        Some(Cause::Unreachable) => "a NIC was not answered for as long as it tries",
        Some(Cause::Flushed) => "a NIC was not answered, and it stood beside what that was",
        _ => "see the causes of failures",
    }
}

/// Of the rooms, those of the first seed.
fn add(sum: &mut Report, report: Report) {
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

/// Runs a plan to its end, or to what is not as it must be; a panic of production is that, too. The lines are
/// those of the room asked for.
pub fn run(plan: &Plan, trace: Option<Room>) -> (Result<Report, Failure>, Vec<String>) {
    let mut cluster = None;
    let all = || cluster.insert(Cluster::new(plan, trace)).run();
    let result = catch_unwind(AssertUnwindSafe(all)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no text");
        let (by, what) = (Checker::Assertion, format!("panic: {text}"));
        let at = cluster.as_ref().map_or(0, Cluster::now);
        Err(Failure { by, what, at, room: None })
    });
    (result, cluster.map_or_else(Vec::new, |cluster| cluster.story.lines().to_vec()))
}
