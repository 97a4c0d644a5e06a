//! Upper bounds of histogram buckets, in the unit at the end of each name.

/// 1 ms to 300 s.
pub const TTFT_SECONDS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0, 160.0, 300.0,
];
/// 5 ms to 2.5 s.
pub const ITL_SECONDS: &[f64] =
    &[0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5];
/// 100 ms to an hour.
pub const E2E_SECONDS: &[f64] = &[
    0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 900.0,
    3600.0,
];
/// From 100 µs (a hand-off through shared memory) to the longest time to a first token.
pub const STAGE_SECONDS: &[f64] = &[
    0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    40.0, 300.0,
];
/// From 10 µs (a text that is forced) to the limit of the parser.
pub const MASK_SECONDS: &[f64] = &[
    0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025,
];
/// SGLang's bounds, and shorter ones for shared memory.
pub const TRANSFER_MS: &[f64] =
    &[0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0];
/// SGLang's bounds.
pub const TRANSFER_GB_S: &[f64] = &[0.1, 0.5, 1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0, 400.0];
/// 0.1 MB to 10 GB.
pub const TRANSFER_MB: &[f64] =
    &[0.1, 0.5, 1.0, 5.0, 10.0, 50.0, 100.0, 500.0, 1000.0, 5000.0, 10000.0];
