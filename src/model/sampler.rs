//! placeholder merged later
/// Sampling parameters.
#[derive(Clone, Debug, Default)]
pub struct SamplingParams {}
