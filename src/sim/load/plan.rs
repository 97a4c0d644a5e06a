//! What the command line asks of the load mode, resolved and checked.

use super::super::agenda::{MICRO, MILLI, Nanos, SECOND};
use super::super::dice::Dice;
use super::arrivals::{Arrivals, BLOCK, Drawn};
use super::cost::{self, Cost};
use super::trace::File;
use crate::cluster::forecast::Forecast;
use crate::config::error::ConfigError;
use crate::config::flags::{Engine, SimFlags, WorkloadFlags};
use crate::config::quantities::{coefficients, positive, value};
use crate::config::resolved::{DecodeAllocation, Policies, Policy};
use crate::limits::{RESERVED_TOKENS, RETRIES_DEFAULT};
use crate::sched::config::SchedConfig;
use std::path::PathBuf;
use std::time::Duration;

/// Requests that are drawn where `--requests` says nothing.
const REQUESTS: u32 = 10_000;

/// One worker.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Bounds of its engine's turns.
    pub config: SchedConfig,
    /// Pages of its pool.
    pub pages: u32,
    /// Requests it can hold.
    pub slots: usize,
}

/// What lies between hosts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Fabric {
    /// That each NIC carries for a token.
    pub bytes_per_token: u64,
    /// Of each NIC, each way.
    pub bytes_per_second: f64,
    /// One way of a message, and of the last byte of a transfer.
    pub latency: Nanos,
}

impl Fabric {
    /// How long a NIC is taken by the KV of so many tokens; never no time at all, so that chunks stay in order.
    pub fn time_of(&self, tokens: u32) -> Nanos {
        let bytes = self.bytes_per_token as f64 * f64::from(tokens);
        (bytes / self.bytes_per_second * SECOND as f64).round().max(1.0) as Nanos
    }
}

/// What a request must keep to count as good.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Objective {
    /// Longest time to its first token.
    pub ttft: Nanos,
    /// Longest time between two of its tokens, on average.
    pub itl: Nanos,
}

/// Runs of another simulator that are recorded.
#[derive(Clone, PartialEq, Debug)]
pub struct Against {
    /// Where.
    pub path: PathBuf,
    /// Their names; none: all.
    pub rows: Vec<String>,
    /// The first requests of each.
    pub most: Option<usize>,
    /// Policies of ours to run beside each.
    pub policies: Vec<Policy>,
}

/// Where requests come from.
#[derive(Clone, PartialEq, Debug)]
pub enum Traffic {
    /// A trace.
    File(File),
    /// Chance.
    Drawn(Drawn),
}

/// Everything that a run follows from.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Of all chance.
    pub seed: u64,
    /// Prefill workers.
    pub prefill: usize,
    /// Decode workers.
    pub decode: usize,
    /// How workers are chosen.
    pub policies: Policies,
    /// Whether decode workers read prompts, too.
    pub local_prefill: bool,
    /// When decode workers take pages.
    pub allocation: DecodeAllocation,
    /// How often a request that no worker takes is tried again.
    pub retries: u32,
    /// What comes.
    pub traffic: Traffic,
    /// What a step costs.
    pub cost: Cost,
    /// What a transfer costs.
    pub fabric: Fabric,
    /// What is good.
    pub objective: Objective,
    /// Whether who is foretold to miss that is turned away, where the policy foretells.
    pub early_reject: bool,
    /// The summary as JSON.
    pub json: bool,
    /// Recorded runs that this is to be compared with.
    pub against: Option<Against>,
    /// Whose time workers take.
    pub engine: Engine,
    /// Share of requests that must be good, or it ends as soon as that cannot be any more.
    pub least_good: Option<f64>,
    /// Tokens of KV that a worker holds.
    pub kv_tokens: u32,
    /// Bounds of workers' turns; their context is set when it is known what comes.
    pub config: SchedConfig,
}

impl Plan {
    /// What these flags mean.
    ///
    /// # Errors
    /// The first that means nothing.
    pub fn new(flags: &SimFlags) -> Result<Plan, ConfigError> {
        let load = &flags.load;
        let fleet = (flags.prefill as usize, flags.decode as usize);
        let plan = Plan::of(&load.workload, flags.seed, fleet, flags.requests)?;
        let Some(path) = load.against.clone() else { return Ok(Plan { json: load.json, ..plan }) };
        let late = load.workload.decode_allocation.unwrap_or(DecodeAllocation::Late);
        Ok(Plan {
            json: load.json,
            engine: load.engine,
            allocation: if load.engine == Engine::Recorded { late } else { plan.allocation },
            against: Some(Against {
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

    /// The same load on so many prefill and decode workers, as they are.
    ///
    /// # Errors
    /// The first flag that means nothing.
    pub fn of(
        load: &WorkloadFlags,
        seed: u64,
        (prefill, decode): (usize, usize),
        requests: Option<u32>,
    ) -> Result<Plan, ConfigError> {
        let page_size = load.page_size.unwrap_or(16);
        if !page_size.is_power_of_two() {
            return Err(value("--page-size", page_size, "a power of two".into()));
        }
        let kv_tokens = load.kv_tokens.unwrap_or(800 << 10);
        let chunk = load.chunked_prefill_size.unwrap_or(8192);
        Ok(Plan {
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
            fabric: Fabric {
                bytes_per_token: load.kv_bytes_per_token.unwrap_or(128 << 10),
                bytes_per_second: positive("--nic-gigabytes", load.nic_gigabytes.unwrap_or(25.0))?
                    * 1e9,
                latency: time("--latency-us", load.latency_us.unwrap_or(20.0), MICRO)?,
            },
            objective: Objective {
                ttft: limit("--slo-ttft-ms", load.slo_ttft_ms.unwrap_or(2000.0))?,
                itl: limit("--slo-itl-ms", load.slo_itl_ms.unwrap_or(25.0))?,
            },
            early_reject: !load.admit_late,
            engine: Engine::Own,
            json: false,
            against: None,
            least_good: None,
            kv_tokens,
            config: SchedConfig {
                max_running: load.max_running_requests.unwrap_or(256) as usize,
                max_queued: load.max_queued_requests.unwrap_or(256) as usize,
                max_prefill_tokens: chunk,
                chunked_prefill_size: chunk,
                chunk_ms: load.chunk_ms.unwrap_or(0),
                page_size,
                // Set by `size`, when it is known what comes.
                context: 0,
                prefix_cache: !load.disable_radix_cache,
                vocab: cost::VOCAB,
                reserve: RESERVED_TOKENS,
            },
        })
    }

    /// All that will come.
    ///
    /// # Errors
    /// The trace cannot be used, or asks for more than a worker can ever hold.
    pub fn arrivals(&self) -> Result<Arrivals, ConfigError> {
        let mut dice = Dice::new(self.seed).fork("arrivals");
        let arrivals = match &self.traffic {
            Traffic::File(file) => file.read(&mut dice)?,
            Traffic::Drawn(drawn) => drawn.draw(&mut dice),
        };
        let (longest, pages) = (arrivals.longest(), self.kv_tokens / self.config.page_size);
        let needed = longest.div_ceil(self.config.page_size);
        if needed > pages {
            let limit =
                format!("a request has {longest} tokens, and each worker must be able to hold it");
            return Err(value("--kv-tokens", self.kv_tokens, limit));
        }
        Ok(arrivals)
    }

    /// The same with pages of so many tokens.
    pub fn with_page_size(self, page_size: u32) -> Plan {
        Plan { config: SchedConfig { page_size, ..self.config }, ..self }
    }

    /// What the router foretells by: what is so here.
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

    /// Blocks of prompts that a worker's pool holds.
    pub fn blocks(&self) -> usize {
        (self.kv_tokens / BLOCK).max(1) as usize
    }

    /// A worker that is asked for sequences of at most so many tokens.
    pub fn size(&self, context: u32) -> Size {
        // The recorded engine's first token is one more here.
        let context = context + u32::from(self.engine == Engine::Recorded);
        Size {
            config: SchedConfig { context, ..self.config },
            pages: self.kv_tokens / self.config.page_size,
            slots: self.config.slots(),
        }
    }
}

/// What comes: a trace, or what is drawn.
fn traffic(load: &WorkloadFlags, requests: Option<u32>) -> Result<Traffic, ConfigError> {
    match &load.trace_file {
        Some(path) => {
            let drawn = [
                ("--rate", load.rate.is_some()),
                ("--input-len", load.input_len.is_some()),
                ("--output-len", load.output_len.is_some()),
            ];
            if let Some((flag, _)) = drawn.into_iter().find(|(_, given)| *given) {
                let why = "lengths and times are the trace's; --speed makes it faster";
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
                let why = format!("{flag} is about its requests; those that are drawn have --rate");
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

/// So many milliseconds, in which something can happen.
fn limit(flag: &'static str, number: f64) -> Result<Nanos, ConfigError> {
    match time(flag, number, MILLI) {
        Ok(nanos @ 1..) => Ok(nanos),
        _ => Err(value(flag, number, "above 0, and not beyond a day".into())),
    }
}

/// `number` of a unit, up to a day.
fn time(flag: &'static str, number: f64, unit: Nanos) -> Result<Nanos, ConfigError> {
    let nanos = number * unit as f64;
    match (0.0..=86_400.0 * SECOND as f64).contains(&nanos) {
        true => Ok(nanos.round() as Nanos),
        false => Err(value(flag, number, "0 or more, and not beyond a day".into())),
    }
}
