//! What the standard library lacks, without a word of the domain.

pub mod bell;
pub mod seal;
pub mod sync;
