//! Flags of `baton router` that let workers change their roles while they run.

use crate::limits::{BALANCE_MS_MAX, BALANCE_SECONDS_MAX, ROUTER_WORKERS_MAX};
use clap::{Args, value_parser};

#[derive(Args, Debug)]
#[command(next_help_heading = "Roles of workers")]
pub(in crate::cli) struct BalanceFlags {
    /// Change the role of a worker automatically if prefill or decode stays short of workers and
    /// the other role can spare one. If several routers share workers, set this flag on one of them
    /// only
    #[arg(long)]
    pub(in crate::cli) rebalance: bool,
    /// Queued prefill work from which prefill is short of workers: milliseconds for each prefill
    /// worker, on average. --prefill-ms predicts these milliseconds
    #[arg(
        long, value_name = "MS", requires = "rebalance", default_value_t = 2000,
        value_parser = value_parser!(u32).range(1..=i64::from(BALANCE_MS_MAX)),
    )]
    pub(in crate::cli) rebalance_queue_ms: u32,
    /// Load from which decode is short of workers, above 0 and up to 1. It is the used share of the
    /// decode workers' --max-running-requests or KV memory
    #[arg(long, value_name = "SHARE", requires = "rebalance", default_value_t = 0.9)]
    pub(in crate::cli) rebalance_fill: f64,
    /// Seconds that a shortage must last before a role changes
    #[arg(
        long, value_name = "SECONDS", requires = "rebalance", default_value_t = 10,
        value_parser = value_parser!(u32).range(1..=i64::from(BALANCE_SECONDS_MAX)),
    )]
    pub(in crate::cli) rebalance_window_secs: u32,
    /// Minimum seconds between two role changes
    #[arg(
        long, value_name = "SECONDS", requires = "rebalance", default_value_t = 60,
        value_parser = value_parser!(u32).range(1..=i64::from(BALANCE_SECONDS_MAX)),
    )]
    pub(in crate::cli) rebalance_dwell_secs: u32,
    /// Minimum number of prefill workers
    #[arg(
        long, value_name = "N", requires = "rebalance", default_value_t = 1,
        value_parser = value_parser!(u32).range(1..=ROUTER_WORKERS_MAX as i64),
    )]
    pub(in crate::cli) min_prefill: u32,
    /// Minimum number of decode workers
    #[arg(
        long, value_name = "N", requires = "rebalance", default_value_t = 1,
        value_parser = value_parser!(u32).range(1..=ROUTER_WORKERS_MAX as i64),
    )]
    pub(in crate::cli) min_decode: u32,
}
