//! The plan of a load run: its flags, resolved and checked.

use super::arrivals::{Arrivals, BLOCK, Drawn};
use super::cost::{self, Cost};
use super::trace::File;
use crate::cli::flags::{SimEngine, SimFlags, WorkloadFlags};
use crate::cli::quantities::{coefficients, positive, value};
use crate::config::error::ConfigError;
use crate::config::{Policies, Policy};
use crate::ids::DecodeAllocation;
use crate::kv::groups::GroupCounts;
use crate::limits::{
    CHECKPOINT_TOKENS, RESERVED_TOKENS, RETRIES_DEFAULT, SESSIONS_MAX, STATE_MEMORY_SHARE,
};
use crate::routing::forecast::Forecast;
use crate::sched::config::SchedConfig;
use crate::stdx::event_queue::{MICRO, MILLI, Nanos, SECOND};
use crate::stdx::rng::Rng;
use std::path::PathBuf;
use std::time::Duration;

/// Default milliseconds of a session's set-up: over tcp, on one host beside other work.
const SESSION_MS: f64 = 3.0;

/// Default number of drawn requests.
const REQUESTS: u32 = 10_000;
/// Default number of prefill workers,
const PREFILL: u32 = 3;
/// and of decode workers.
const DECODE: u32 = 5;

/// The size of one worker.
#[derive(Clone, Copy, Debug)]
pub struct LoadWorkerSize {
    /// Limits of its engine's turns.
    pub config: SchedConfig,
    /// Pages of its pool.
    pub pages: u32,
    /// Requests that it can hold.
    pub slots: usize,
    /// Sessions that it can have, as a decode worker.
    pub sessions: usize,
}

/// The model of the network between hosts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct FabricModel {
    /// Bytes of KV per token that each NIC carries.
    pub bytes_per_token: u64,
    /// Bandwidth of each NIC, in each direction.
    pub bytes_per_second: f64,
    /// Latency of a message, and of the last byte of a transfer.
    pub latency: Nanos,
}

impl FabricModel {
    /// Time for which the KV of `tokens` tokens occupies a NIC. It is above 0, so that chunks stay
    /// in order.
    pub fn time_of(&self, tokens: u32) -> Nanos {
        let bytes = self.bytes_per_token as f64 * f64::from(tokens);
        (bytes / self.bytes_per_second * SECOND as f64).round().max(1.0) as Nanos
    }
}

/// The limits within which a request counts as good.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Objective {
    /// Longest time to the first token.
    pub ttft: Nanos,
    /// Longest mean time between two tokens.
    pub itl: Nanos,
}

/// Recorded runs of another simulator.
#[derive(Clone, PartialEq, Debug)]
pub struct Baselines {
    /// Path of the file.
    pub path: PathBuf,
    /// Names of the runs; empty: all.
    pub rows: Vec<String>,
    /// Number of first requests to use of each.
    pub most: Option<usize>,
    /// The policies to run for each of them.
    pub policies: Vec<Policy>,
}

/// The source of requests.
#[derive(Clone, PartialEq, Debug)]
pub enum Traffic {
    /// A trace.
    File(File),
    /// Drawn requests.
    Drawn(Drawn),
}

/// All inputs of a run.
#[derive(Clone, Debug)]
pub struct LoadPlan {
    /// Seed of all random numbers.
    pub seed: u64,
    /// Prefill workers.
    pub prefill: usize,
    /// Decode workers.
    pub decode: usize,
    /// The policies that choose workers.
    pub policies: Policies,
    /// Whether decode workers also compute prompts.
    pub local_prefill: bool,
    /// Time at which decode workers take pages.
    pub allocation: DecodeAllocation,
    /// Maximum number of retries of a refused request.
    pub retries: u32,
    /// The requests.
    pub traffic: Traffic,
    /// Cost of a step.
    pub cost: Cost,
    /// Cost of a transfer.
    pub fabric: FabricModel,
    /// Most sessions of a decode worker.
    pub sessions: usize,
    /// Time from the first request of a session until it is ready.
    pub session_setup: Duration,
    /// Limits of a good request.
    pub objective: Objective,
    /// Whether a request is rejected if the policy's forecast misses the limits.
    pub early_reject: bool,
    /// Print the summary as JSON.
    pub json: bool,
    /// Recorded runs to compare with.
    pub against: Option<Baselines>,
    /// The engine that sets the timing of workers.
    pub engine: SimEngine,
    /// Share of requests that must be good. If it can no longer be reached, the run ends early.
    pub least_good: Option<f64>,
    /// Tokens of KV that a worker holds.
    pub kv_tokens: u32,
    /// Limits of workers' turns. The context is set later, when the requests are known.
    pub config: SchedConfig,
}

impl LoadPlan {
    /// Reads the flags.
    ///
    /// # Errors
    /// The first invalid flag.
    pub fn new(flags: &SimFlags) -> Result<LoadPlan, ConfigError> {
        let load = &flags.load;
        let fleet =
            (flags.prefill.unwrap_or(PREFILL) as usize, flags.decode.unwrap_or(DECODE) as usize);
        let plan = LoadPlan::of(&load.workload, flags.seed, fleet, flags.requests)?;
        let Some(path) = load.against.clone() else {
            return Ok(LoadPlan { json: load.json, ..plan });
        };
        let late = load.workload.decode_allocation.unwrap_or(DecodeAllocation::Late);
        let is_recorded = load.engine == SimEngine::Recorded;
        Ok(LoadPlan {
            json: load.json,
            engine: load.engine,
            allocation: if is_recorded { late } else { plan.allocation },
            // The recorded runs have no sessions.
            session_setup: match load.workload.session_ms {
                None if is_recorded => Duration::ZERO,
                _ => plan.session_setup,
            },
            against: Some(Baselines {
                path,
                rows: load.rows.clone(),
                most: flags.requests.map(|most| most as usize),
                policies: match &load.policies[..] {
                    [] => vec![Policy::RoundRobin, Policy::Slo],
                    given => given.to_vec(),
                },
            }),
            ..plan
        })
    }

    /// The plan of a load on this many prefill and decode workers.
    ///
    /// # Errors
    /// The first invalid flag.
    pub fn of(
        load: &WorkloadFlags,
        seed: u64,
        (prefill, decode): (usize, usize),
        requests: Option<u32>,
    ) -> Result<LoadPlan, ConfigError> {
        let page_size = load.page_size.unwrap_or(16);
        if !page_size.is_power_of_two() {
            return Err(value("--page-size", page_size, "a power of two".into()));
        }
        let kv_tokens = load.kv_tokens.unwrap_or(800 << 10);
        let chunk = load.chunked_prefill_size.unwrap_or(8192);
        Ok(LoadPlan {
            seed,
            prefill,
            decode,
            policies: Policies {
                prefill: load.prefill_policy.or(load.policy).unwrap_or_default(),
                decode: load.decode_policy.or(load.policy).unwrap_or_default(),
            },
            local_prefill: load.local_prefill || prefill == 0,
            allocation: load.decode_allocation.unwrap_or_default(),
            retries: RETRIES_DEFAULT,
            traffic: traffic(load, requests)?,
            cost: Cost {
                prefill: coefficients(
                    "--prefill-ms",
                    &load.prefill_ms,
                    cost::DEFAULT.prefill,
                    chunk,
                )?,
                decode: coefficients(
                    "--decode-ms",
                    &load.decode_ms,
                    cost::DEFAULT.decode,
                    kv_tokens,
                )?,
            },
            fabric: fabric(load)?,
            sessions: load.sessions.map_or(SESSIONS_MAX, |sessions| sessions as usize),
            session_setup: Duration::from_nanos(time(
                "--session-ms",
                load.session_ms.unwrap_or(SESSION_MS),
                MILLI,
            )?),
            objective: Objective {
                ttft: limit("--slo-ttft-ms", load.slo_ttft_ms.unwrap_or(2000.0))?,
                itl: limit("--slo-itl-ms", load.slo_itl_ms.unwrap_or(25.0))?,
            },
            early_reject: !load.admit_late,
            engine: SimEngine::Own,
            json: false,
            against: None,
            least_good: None,
            kv_tokens,
            config: scheduler(load, (kv_tokens, page_size, chunk))?,
        })
    }

    /// All requests of the run.
    ///
    /// # Errors
    /// The trace cannot be used, or a request does not fit into a worker.
    pub fn arrivals(&self) -> Result<Arrivals, ConfigError> {
        let mut dice = Rng::new(self.seed).fork("arrivals");
        let arrivals = match &self.traffic {
            Traffic::File(file) => file.read(&mut dice)?,
            Traffic::Drawn(drawn) => drawn.draw(&mut dice),
        };
        let (longest, pages) = (arrivals.longest(), self.kv_tokens / self.config.page_size);
        let state = self.config.groups.state_pages;
        if longest.div_ceil(self.config.page_size) + state > pages {
            let beside = if state > 0 { ", beside its state" } else { "" };
            let limit = format!(
                "a request has {longest} tokens, and each worker must be able to hold it{beside}"
            );
            return Err(value("--kv-tokens", self.kv_tokens, limit));
        }
        Ok(arrivals)
    }

    /// The same plan with another page size.
    pub fn with_page_size(self, page_size: u32) -> LoadPlan {
        LoadPlan {
            config: SchedConfig { page_size, largest_page: page_size, ..self.config },
            ..self
        }
    }

    /// The router's forecast, with the true costs of this plan.
    pub fn forecast(&self) -> Forecast {
        let limit = |limit: Nanos| self.early_reject.then(|| Duration::from_nanos(limit));
        Forecast {
            cost: self.cost,
            chunk: self.config.chunked_prefill_size,
            bytes_per_token: self.fabric.bytes_per_token,
            bytes_per_second: self.fabric.bytes_per_second,
            ttft: limit(self.objective.ttft),
            tpot: limit(self.objective.itl),
            ..Forecast::default()
        }
    }

    /// Blocks of prompts that a worker's pool can hold.
    pub fn blocks(&self) -> usize {
        (self.kv_tokens / BLOCK).max(1) as usize
    }

    /// A worker for sequences of at most `context` tokens.
    pub fn size(&self, context: u32) -> LoadWorkerSize {
        // The recorded engine samples one more token on the decode worker.
        let context = context + u32::from(self.engine == SimEngine::Recorded);
        LoadWorkerSize {
            config: SchedConfig { context, ..self.config },
            pages: self.kv_tokens / self.config.page_size,
            slots: self.config.slots(),
            sessions: self.sessions,
        }
    }
}

/// The settings of the scheduler. `size` sets the context, when the requests are known.
fn scheduler(
    load: &WorkloadFlags,
    (kv_tokens, page_size, chunk): (u32, u32, u32),
) -> Result<SchedConfig, ConfigError> {
    let state_pages = load.state_tokens.unwrap_or(0).div_ceil(page_size);
    if let (Some(checkpoints), 0) = (load.checkpoints, state_pages) {
        return Err(value("--checkpoints", checkpoints, "is only for --state-tokens".into()));
    }
    if let (Some(checkpoints @ 1..), true) = (load.checkpoints, load.disable_radix_cache) {
        let limit = "must be 0 with --disable-radix-cache, which keeps no checkpoint";
        return Err(value("--checkpoints", checkpoints, limit.into()));
    }
    let quarter = kv_tokens / page_size / STATE_MEMORY_SHARE as u32;
    let checkpoints = load.checkpoints.unwrap_or(quarter.checked_div(state_pages).unwrap_or(0));
    Ok(SchedConfig {
        max_running: load.max_running_requests.unwrap_or(256) as usize,
        max_queued: load.max_queued_requests.unwrap_or(256) as usize,
        max_prefill_tokens: chunk,
        chunked_prefill_size: chunk,
        chunk_ms: load.chunk_ms.unwrap_or(0),
        page_size,
        largest_page: page_size,
        context: 0,
        groups: GroupCounts { state_pages, ..GroupCounts::FULL },
        prefix_cache: !load.disable_radix_cache,
        checkpoint_gap: page_size,
        checkpoint_pages: checkpoints.saturating_mul(state_pages),
        checkpoint_tokens: CHECKPOINT_TOKENS,
        vocab: cost::VOCAB,
        reserve: RESERVED_TOKENS,
    })
}

/// The network between hosts.
fn fabric(load: &WorkloadFlags) -> Result<FabricModel, ConfigError> {
    let gigabytes = positive("--nic-gigabytes", load.nic_gigabytes.unwrap_or(25.0))?;
    Ok(FabricModel {
        bytes_per_token: load.kv_bytes_per_token.unwrap_or(128 << 10),
        bytes_per_second: gigabytes * 1e9,
        latency: time("--latency-us", load.latency_us.unwrap_or(20.0), MICRO)?,
    })
}

/// The requests: a trace, or drawn ones.
fn traffic(load: &WorkloadFlags, requests: Option<u32>) -> Result<Traffic, ConfigError> {
    match &load.trace_file {
        Some(path) => {
            let drawn = [
                ("--rate", load.rate.is_some()),
                ("--input-len", load.input_len.is_some()),
                ("--output-len", load.output_len.is_some()),
            ];
            if let Some((flag, _)) = drawn.into_iter().find(|(_, given)| *given) {
                let why = "lengths and times come from the trace; --speed makes it faster";
                return Err(ConfigError::Conflict { flag, other: "--trace-file", why });
            }
            Ok(Traffic::File(File {
                path: path.clone(),
                most: requests.map(|most| most as usize),
                speed: positive("--speed", load.speed.unwrap_or(1.0))?,
                jitter: time("--jitter-ms", load.jitter_ms.unwrap_or(0.0), MILLI)?,
            }))
        }
        None => {
            let of_trace =
                [("--speed", load.speed.is_some()), ("--jitter-ms", load.jitter_ms.is_some())];
            if let Some((flag, _)) = of_trace.into_iter().find(|(_, given)| *given) {
                let why = format!("{flag} changes a trace; random requests have --rate");
                return Err(ConfigError::Missing { flag: "--trace-file", why });
            }
            Ok(Traffic::Drawn(Drawn {
                requests: requests.unwrap_or(REQUESTS) as usize,
                rate: positive("--rate", load.rate.unwrap_or(100.0))?,
                input: load.input_len.unwrap_or(64),
                output: load.output_len.unwrap_or(16),
            }))
        }
    }
}

/// A limit in milliseconds, at least 1 ns.
fn limit(flag: &'static str, number: f64) -> Result<Nanos, ConfigError> {
    match time(flag, number, MILLI) {
        Ok(nanos @ 1..) => Ok(nanos),
        _ => Err(value(flag, number, "above 0, and not beyond a day".into())),
    }
}

/// `number` of a unit, up to one day.
fn time(flag: &'static str, number: f64, unit: Nanos) -> Result<Nanos, ConfigError> {
    let nanos = number * unit as f64;
    match (0.0..=86_400.0 * SECOND as f64).contains(&nanos) {
        true => Ok(nanos.round() as Nanos),
        false => Err(value(flag, number, "0 or more, and not beyond a day".into())),
    }
}
