//! Flags of `baton router` by which workers change their roles while they run.

use crate::limits::{BALANCE_MS_MAX, BALANCE_SECONDS_MAX, ROUTER_WORKERS_MAX};
use clap::{Args, value_parser};

#[derive(Args, Debug)]
#[command(next_help_heading = "Roles of workers")]
pub(in crate::config) struct BalanceFlags {
    /// Have a decode worker become a prefill worker, or the other way, where one side stays short of workers and the other
    /// can spare one; of several routers over the same workers one alone should, as each knows its own requests
    #[arg(long)]
    pub(in crate::config) rebalance: bool,
    /// Prefill workers are short where they still read, on average, for so long what they were given, by --prefill-ms
    #[arg(long, value_name = "MS", requires = "rebalance", default_value_t = 2000, value_parser = value_parser!(u32).range(1..=i64::from(BALANCE_MS_MAX)))]
    pub(in crate::config) rebalance_queue_ms: u32,
    /// Decode workers are short where such a share of their --max-running-requests, or of their KV memory, is taken; above 0,
    /// up to 1
    #[arg(long, value_name = "SHARE", requires = "rebalance", default_value_t = 0.9)]
    pub(in crate::config) rebalance_fill: f64,
    /// Seconds for which that must last
    #[arg(long, value_name = "SECONDS", requires = "rebalance", default_value_t = 10, value_parser = value_parser!(u32).range(1..=i64::from(BALANCE_SECONDS_MAX)))]
    pub(in crate::config) rebalance_window_secs: u32,
    /// Seconds between two changes
    #[arg(long, value_name = "SECONDS", requires = "rebalance", default_value_t = 60, value_parser = value_parser!(u32).range(1..=i64::from(BALANCE_SECONDS_MAX)))]
    pub(in crate::config) rebalance_dwell_secs: u32,
    /// Prefill workers that there are at least
    #[arg(long, value_name = "N", requires = "rebalance", default_value_t = 1, value_parser = value_parser!(u32).range(1..=ROUTER_WORKERS_MAX as i64))]
    pub(in crate::config) min_prefill: u32,
    /// Decode workers that there are at least
    #[arg(long, value_name = "N", requires = "rebalance", default_value_t = 1, value_parser = value_parser!(u32).range(1..=ROUTER_WORKERS_MAX as i64))]
    pub(in crate::config) min_decode: u32,
}
