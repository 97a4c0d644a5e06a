//! What the standard library lacks, without a word of the domain.

pub mod bell;
pub mod parts;
pub mod phase;
pub mod planted;
pub mod seal;
pub mod sync;
pub mod team;
