//! `baton sim --services`: runs one seed after the other and prints the results.

use super::{ServiceReport, ServiceScale, run};
use crate::cli::flags::SimFlags;
use crate::config::error::ConfigError;
use crate::say;
use std::time::Instant;

/// Default number of requests of a seed.
const REQUESTS: u32 = 20;
/// The largest number.
const REQUESTS_MAX: u32 = 1000;
/// Most workers of each role.
const WORKERS: usize = 3;

/// Runs the seeds of these flags and prints the result. Returns whether all is well.
///
/// # Errors
/// A flag is out of range.
pub fn run_seeds(flags: &SimFlags) -> Result<bool, ConfigError> {
    let &SimFlags { seed: first, seeds, calm, requests, .. } = flags;
    let requests = requests.unwrap_or(REQUESTS);
    if requests > REQUESTS_MAX {
        let limit = format!("1 to {REQUESTS_MAX} with --services");
        let value = requests.to_string();
        return Err(ConfigError::Value { flag: "--requests", value, limit });
    }
    let last = flags.last_seed()?;
    let scale = ServiceScale { workers: WORKERS, requests: requests as usize, faults: !calm };
    let (begun, mut sum) = (Instant::now(), ServiceReport::default());
    for seed in first..=last {
        match run(seed, scale) {
            Ok(report) => {
                sum.well += report.well;
                sum.failed += report.failed;
                sum.left += report.left;
                sum.refused += report.refused;
                sum.roles += report.roles;
                sum.turns += report.turns;
                sum.hash = report.hash;
            }
            Err(why) => {
                let calm = if calm { " --calm" } else { "" };
                say!("seed {seed} fails: {why}");
                say!("replay: baton sim --services --seed {seed} --requests {requests}{calm}");
                return Ok(false);
            }
        }
    }
    let ServiceReport { well, failed, refused, left, roles, turns, hash } = sum;
    say!(
        "{seeds} seeds from {first}: {well} requests ended well, {failed} failed because of \
         injected faults, {refused} had a wrong key, {left} clients left, {roles} roles taken; \
         {turns} turns, {:.1} s",
        begun.elapsed().as_secs_f64()
    );
    if seeds == 1 {
        say!("hash {hash:016x}");
    }
    Ok(true)
}
