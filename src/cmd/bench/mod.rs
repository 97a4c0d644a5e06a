//! Measurements that users run: `baton bench`.

pub mod transfer;
