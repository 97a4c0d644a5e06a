//! KV memory: where a token's keys and values lie ([`layout`]), the mapping that holds them
//! ([`region`]).

pub mod layout;
pub mod lease;
pub mod region;
