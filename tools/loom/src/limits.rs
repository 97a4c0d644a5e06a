//! In the place of the product's bounds: as little as any model needs.

pub const SESSIONS_MAX: usize = 2;
