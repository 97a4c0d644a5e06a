//! KV memory: where a token's keys and values lie ([`layout`]), the mapping that holds them
//! ([`region`]), who holds which page ([`pool`], [`lease`]), which page holds what ([`prefix`]), KV of requests that wait
//! for pages ([`tier`]).

mod bits;
pub mod layout;
pub mod lease;
pub mod pool;
pub mod prefix;
pub mod region;
pub mod tier;
