//! What a router does with requests and workers, in terms that its cores take.

use super::FirstToken;
use super::Policy;
use crate::limits::{
    RETRIES_DEFAULT, RETRY_DELAY, RETRY_DELAY_MAX, ROUTER_PROBE_FAILURES, ROUTER_PROBE_INTERVAL,
    ROUTER_PROBE_TIME, ROUTER_SUSPECT_TIME,
};
use clap::ValueEnum;
use serde::Serialize;
use std::time::Duration;

/// How a pair is chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Policies {
    /// Its prefill worker.
    pub prefill: Policy,
    /// Its decode worker.
    pub decode: Policy,
}

impl From<Policy> for Policies {
    fn from(both: Policy) -> Policies {
        Policies { prefill: both, decode: both }
    }
}

/// When `cache_aware` goes where a prompt is cached: the rule of SGLang's router, and what it has unless told otherwise.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct CacheTerms {
    /// Share of a prompt, 0 to 1; more than that is worth going where it is.
    pub threshold: f64,
    /// Sequences by which the busiest may be ahead of the idlest, and
    pub ahead: u32,
    /// how many times as many it may have; beyond both who has fewest is chosen.
    pub ratio: f64,
}

impl Default for CacheTerms {
    fn default() -> CacheTerms {
        CacheTerms { threshold: 0.3, ahead: 64, ratio: 1.5 }
    }
}

/// In which order the workers of a pair are asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Flow {
    /// Both at once, under one room.
    #[default]
    Dual,
    /// Prefill, which keeps the KV and says where; then decode, which is told that.
    PrefillFirst,
    /// Decode alone, which asks prefill itself.
    DecodeFirst,
}

/// How often a request is tried again, and when.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct RetryTerms {
    /// Further tries of a request, since its client last got something.
    pub most: u32,
    /// Longest wait before the first of them.
    pub first: Duration,
    /// What it grows to.
    pub longest: Duration,
    /// How many times as long it is each time, at least 1.
    pub growth: f64,
    /// Share of a wait that is drawn, 0 to 1.
    pub jitter: f64,
}

impl RetryTerms {
    /// So many further tries, everything else as usual.
    pub fn of(most: u32) -> RetryTerms {
        RetryTerms { most, ..RetryTerms::default() }
    }
}

impl Default for RetryTerms {
    fn default() -> RetryTerms {
        RetryTerms {
            most: RETRIES_DEFAULT,
            first: RETRY_DELAY,
            longest: RETRY_DELAY_MAX,
            growth: 10.0,
            jitter: 0.5,
        }
    }
}

/// When a worker at which requests fail is asked last, and until when.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct BreakerTerms {
    /// Failures that open its circuit; `None`: none do.
    pub failures: Option<u32>,
    /// Within which they come.
    pub window: Duration,
    /// How long it is open.
    pub open: Duration,
    /// Answers that close it.
    pub successes: u32,
}

impl Default for BreakerTerms {
    fn default() -> BreakerTerms {
        BreakerTerms {
            failures: Some(1),
            window: Duration::from_secs(120),
            open: ROUTER_SUSPECT_TIME,
            successes: 1,
        }
    }
}

/// How a worker's health is looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct HealthTerms {
    /// Between two probes.
    pub interval: Duration,
    /// How long one may take.
    pub time: Duration,
    /// Those in a row that fail before a worker is down.
    pub failures: u32,
    /// Those in a row that succeed before it is up.
    pub successes: u32,
    /// Between two probes of a worker that has not been up yet.
    pub first_interval: Duration,
    /// When one that has not been up is given up, from when it joined.
    pub first_time: Option<Duration>,
}

impl Default for HealthTerms {
    fn default() -> HealthTerms {
        HealthTerms {
            interval: ROUTER_PROBE_INTERVAL,
            time: ROUTER_PROBE_TIME,
            failures: ROUTER_PROBE_FAILURES,
            successes: 1,
            first_interval: ROUTER_PROBE_INTERVAL,
            first_time: None,
        }
    }
}

/// When workers change their roles by themselves; see `cluster::roles`.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct BalanceTerms {
    /// How long prefill workers may still read what they were given, on average.
    pub queue: Duration,
    /// Share of what decode workers have room for that may be taken, 0 to 1.
    pub fill: f64,
    /// How long one side must be pressed, and the other not.
    pub window: Duration,
    /// How long nothing changes after a change.
    pub dwell: Duration,
    /// Prefill workers that stay in any case.
    pub min_prefill: u32,
    /// Decode workers that do.
    pub min_decode: u32,
}

/// What is taken from clients.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct RequestTerms {
    /// When a request is given up, where that is sooner than workers do.
    pub timeout: Option<Duration>,
    /// Most at workers at once; `None`: no matter how many.
    pub concurrent: Option<u32>,
    /// Most that wait for that.
    pub queue: u32,
    /// How long one may wait there.
    pub queue_time: Duration,
    /// In which order their workers are asked.
    pub flow: Flow,
    /// Whose token a stream begins with.
    pub first_token: FirstToken,
    /// Where their names are looked for, in this order.
    pub id_headers: Vec<String>,
}

impl Default for RequestTerms {
    fn default() -> RequestTerms {
        RequestTerms {
            timeout: None,
            concurrent: None,
            queue: 0,
            queue_time: Duration::ZERO,
            flow: Flow::default(),
            first_token: FirstToken::default(),
            id_headers: vec!["x-request-id".into()],
        }
    }
}
