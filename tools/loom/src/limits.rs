//! Replaces the product's limits: as little as the models need.

pub const SESSIONS_MAX: usize = 2;
