//! Exports the C ABI of Baton's transfer engine. `include/baton.h` describes it.

pub use baton::abi::*;
