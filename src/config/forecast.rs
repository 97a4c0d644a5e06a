//! The step times and link speeds that a router uses to predict latencies. The formulas are in
//! `routing::forecast`.

use serde::Serialize;
use std::time::Duration;

/// Coefficients of the time of a forward pass, in milliseconds.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Cost {
    /// `a + Σ (b·new + c·new·(prefix + new/2)) + d·(Σ new)²` over the prompts of a step.
    pub prefill: [f64; 4],
    /// `a + b·Σ context + c·batch + d·(Σ context)²` over its sequences.
    pub decode: [f64; 4],
}

/// The default: Qwen3-32B-FP8 on two H200 with vLLM 0.24, fitted to the table of an estimator (mean
/// error 2.4 % and 1.7 %).
pub const COST_DEFAULT: Cost =
    Cost { prefill: [8.322, 0.033051, 1.7068e-6, 0.0], decode: [9.7902, 2.0797e-5, 0.028017, 0.0] };

/// The values that a router uses to predict latencies.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Forecast {
    /// Time of a forward pass.
    pub cost: Cost,
    /// Maximum prompt tokens of a pass.
    pub chunk: u32,
    /// Bytes of KV for each token, as transferred.
    pub bytes_per_token: u64,
    /// Bandwidth of a worker's link.
    pub bytes_per_second: f64,
    /// Mean tokens of an answer.
    pub output: u32,
    /// Maximum predicted time to first token of an admitted request.
    pub ttft: Option<Duration>,
    /// Maximum predicted time per output token of an admitted request.
    pub tpot: Option<Duration>,
}

impl Default for Forecast {
    fn default() -> Forecast {
        Forecast {
            cost: COST_DEFAULT,
            chunk: 8192,
            bytes_per_token: 128 << 10,
            bytes_per_second: 25e9,
            output: 256,
            ttft: None,
            tpot: None,
        }
    }
}
