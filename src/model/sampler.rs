//! placeholder merged later
/// Sampling parameters.
#[derive(Clone, Debug)]
pub struct SamplingParams {}
