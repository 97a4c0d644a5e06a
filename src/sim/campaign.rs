//! `baton sim`: runs one seed after the other and prints the results.

use super::{RunReport, RunScale, run};
use crate::cli::flags::{SimFlags, SimFlow, SimTransfer};
use crate::config::error::ConfigError;
use crate::say;
use std::ops::RangeInclusive;
use std::time::Instant;

/// Default number of requests of a seed.
const REQUESTS: u32 = 20;
/// The largest number.
const REQUESTS_MAX: u32 = 4096;

/// Runs the seeds of these flags and prints the result. Returns whether all is well.
///
/// # Errors
/// A flag is out of range.
pub fn run_seeds(flags: &SimFlags) -> Result<bool, ConfigError> {
    let &SimFlags { seed: first, seeds, calm, requests, transfer, flow, is_library, .. } = flags;
    if let Some(flag) = flags.load.first_typed() {
        let why = format!("{flag} has no effect without it");
        return Err(ConfigError::Missing { flag: "--load", why });
    }
    if flags.prefill == Some(0) {
        let limit = "at least 1 without --load".to_owned();
        return Err(ConfigError::Value { flag: "--prefill", value: "0".to_owned(), limit });
    }
    let requests = requests.unwrap_or(REQUESTS);
    if requests > REQUESTS_MAX {
        let limit = format!("1 to {REQUESTS_MAX} without --load");
        let value = requests.to_string();
        return Err(ConfigError::Value { flag: "--requests", value, limit });
    }
    let last = flags.last_seed()?;
    let workers = [flags.prefill, flags.decode].map(|count| count.map(|count| count as usize));
    let requests = requests as usize;
    let scale = RunScale { workers, requests, faults: !calm, transfer, flow, is_library };
    let begun = Instant::now();
    let sum = match run_each(first..=last, scale) {
        Ok(sum) => sum,
        Err(failure) => {
            say!("seed {} fails: {}", failure.seed, failure.why);
            say!("replay: {}", failure.command);
            return Ok(false);
        }
    };
    let RunReport { well, failed, refused, left, aborted, roles, turns, hash } = sum;
    say!(
        "{seeds} seeds from {first}: {well} requests ended well, {failed} failed because of \
         injected faults, {refused} were refused, {aborted} were aborted, {left} clients left, \
         {roles} roles taken; {turns} turns, {:.1} s",
        begun.elapsed().as_secs_f64()
    );
    if seeds == 1 {
        say!("hash {hash:016x}");
    }
    Ok(true)
}

/// A seed that fails.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SeedFailure {
    /// The seed.
    pub seed: u64,
    /// The reason.
    pub why: String,
    /// The command that repeats the run.
    pub command: String,
}

/// Runs one seed after the other, and adds their reports. The hash is that of the last seed.
///
/// # Errors
/// The first seed that fails.
pub fn run_each(seeds: RangeInclusive<u64>, scale: RunScale) -> Result<RunReport, SeedFailure> {
    let mut sum = RunReport::default();
    for seed in seeds {
        let report = run(seed, scale).map_err(|why| SeedFailure {
            seed,
            why,
            command: scale.command_of(seed),
        })?;
        sum = RunReport {
            well: sum.well + report.well,
            failed: sum.failed + report.failed,
            refused: sum.refused + report.refused,
            left: sum.left + report.left,
            aborted: sum.aborted + report.aborted,
            roles: sum.roles + report.roles,
            turns: sum.turns + report.turns,
            hash: report.hash,
        };
    }
    Ok(sum)
}

impl RunScale {
    /// The command that runs this seed.
    pub fn command_of(&self, seed: u64) -> String {
        let RunScale { workers, requests, faults, transfer, flow, is_library } = self;
        let mut command = format!("baton sim --seed {seed} --requests {requests}");
        for (flag, count) in ["prefill", "decode"].into_iter().zip(workers) {
            if let Some(count) = count {
                command += &format!(" --{flag} {count}");
            }
        }
        if *transfer != SimTransfer::Auto {
            command += &format!(" --transfer {transfer}");
        }
        if *flow != SimFlow::Auto {
            command += &format!(" --flow {flow}");
        }
        if *is_library {
            command += " --library";
        }
        command + if *faults { "" } else { " --calm" }
    }
}
