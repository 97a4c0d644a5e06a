//! A router's rules for requests and workers, in the types that `routing` uses.

use super::{FirstToken, Policy, SchedulingPolicy};
use crate::limits::{
    RETRIES_DEFAULT, RETRY_DELAY, RETRY_DELAY_MAX, ROUTER_PROBE_FAILURES, ROUTER_PROBE_INTERVAL,
    ROUTER_PROBE_TIME, ROUTER_SUSPECT_TIME,
};
use clap::ValueEnum;
use serde::Serialize;
use std::time::Duration;

/// How a pair is selected.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Policies {
    /// Policy for the prefill worker.
    pub prefill: Policy,
    /// Policy for the decode worker.
    pub decode: Policy,
}

impl Policies {
    /// Both policies.
    pub fn all(&self) -> [Policy; 2] {
        [self.prefill, self.decode]
    }
}

impl From<Policy> for Policies {
    fn from(both: Policy) -> Policies {
        Policies { prefill: both, decode: both }
    }
}

/// Thresholds of the policy `cache_aware`: they decide when it selects the worker that has a prompt
/// cached. Rule and defaults are those of SGLang's router.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct CacheAwareConfig {
    /// Share of a prompt, 0 to 1. If a worker has a larger share cached, it is selected.
    pub threshold: f64,
    /// Maximum difference in sequences between the busiest and the idlest worker.
    pub ahead: u32,
    /// Maximum ratio of these two numbers of sequences. If both limits are exceeded, the least
    /// loaded worker is selected.
    pub ratio: f64,
}

impl Default for CacheAwareConfig {
    fn default() -> CacheAwareConfig {
        CacheAwareConfig { threshold: 0.3, ahead: 64, ratio: 1.5 }
    }
}

/// Order in which the workers of a pair are called.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Flow {
    /// Both at once, with one room.
    #[default]
    Dual,
    /// Prefill first. It keeps the KV and reports its place; the router then sends that to decode.
    PrefillFirst,
    /// Only decode, which calls prefill itself.
    DecodeFirst,
}

/// How often a request is retried, and when.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct RetryConfig {
    /// Maximum number of retries, counted from the last data that the client received.
    pub most: u32,
    /// Maximum wait before the first retry.
    pub first: Duration,
    /// Maximum wait before any retry.
    pub longest: Duration,
    /// Factor by which the wait grows with each retry, at least 1.
    pub growth: f64,
    /// Random share of each wait, 0 to 1.
    pub jitter: f64,
}

impl RetryConfig {
    /// This number of retries, with defaults for the rest.
    pub fn of(most: u32) -> RetryConfig {
        RetryConfig { most, ..RetryConfig::default() }
    }
}

impl Default for RetryConfig {
    fn default() -> RetryConfig {
        RetryConfig {
            most: RETRIES_DEFAULT,
            first: RETRY_DELAY,
            longest: RETRY_DELAY_MAX,
            growth: 10.0,
            jitter: 0.5,
        }
    }
}

/// The rules that decide when, and for how long, a worker with failed requests is selected last.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct BreakerConfig {
    /// Number of failures that opens its circuit; `None`: the circuit never opens.
    pub failures: Option<u32>,
    /// Time within which these failures must occur.
    pub window: Duration,
    /// Time that the circuit stays open.
    pub open: Duration,
    /// Number of successful answers that closes it.
    pub successes: u32,
}

impl Default for BreakerConfig {
    fn default() -> BreakerConfig {
        BreakerConfig {
            failures: Some(1),
            window: Duration::from_secs(120),
            open: ROUTER_SUSPECT_TIME,
            successes: 1,
        }
    }
}

/// How a worker's health is probed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct HealthConfig {
    /// Time between two probes.
    pub interval: Duration,
    /// Maximum duration of a probe.
    pub time: Duration,
    /// Number of failed probes in a row after which a worker is down.
    pub failures: u32,
    /// Number of successful probes in a row after which it is up.
    pub successes: u32,
    /// Time between two probes of a worker that was never up.
    pub first_interval: Duration,
    /// A worker that was never up is probed for this time after its registration; `None`: for ever.
    pub first_time: Option<Duration>,
}

impl Default for HealthConfig {
    fn default() -> HealthConfig {
        HealthConfig {
            interval: ROUTER_PROBE_INTERVAL,
            time: ROUTER_PROBE_TIME,
            failures: ROUTER_PROBE_FAILURES,
            successes: 1,
            first_interval: ROUTER_PROBE_INTERVAL,
            first_time: None,
        }
    }
}

/// When workers change their roles automatically; see `routing::role_balancer`.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct BalanceConfig {
    /// Maximum predicted time to compute the queued prompts, as a mean over the prefill workers.
    pub queue: Duration,
    /// Maximum share of the decode workers' capacity in use, above 0 and up to 1.
    pub fill: f64,
    /// Time that a shortage must last.
    pub window: Duration,
    /// Minimum time between two changes.
    pub dwell: Duration,
    /// Minimum number of prefill workers.
    pub min_prefill: u32,
    /// Minimum number of decode workers.
    pub min_decode: u32,
}

/// Rules for clients' requests.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct RequestConfig {
    /// Maximum time of a request, if shorter than the workers' own limit.
    pub timeout: Option<Duration>,
    /// Maximum number of requests sent to workers at once; `None`: no limit.
    pub concurrent: Option<u32>,
    /// Maximum number of requests that wait because of `concurrent`.
    pub queue: u32,
    /// Maximum time that one waits.
    pub queue_time: Duration,
    /// Order in which they wait.
    pub scheduling: SchedulingPolicy,
    /// Order in which the workers of a request are called.
    pub flow: Flow,
    /// Worker that sends the first token of a stream.
    pub first_token: FirstToken,
    /// Headers that may contain a request's ID; the first one present is used.
    pub id_headers: Vec<String>,
}

impl Default for RequestConfig {
    fn default() -> RequestConfig {
        RequestConfig {
            timeout: None,
            concurrent: None,
            queue: 0,
            queue_time: Duration::ZERO,
            scheduling: SchedulingPolicy::default(),
            flow: Flow::default(),
            first_token: FirstToken::default(),
            id_headers: vec!["x-request-id".into()],
        }
    }
}
