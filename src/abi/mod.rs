//! The C ABI of the transfer engine, for engines in C, C++ and Python. `tools/libbaton` makes a
//! shared and a static library of it; its `include/baton.h` is generated from these files.
//!
//! Owns: the tables of handles. Thread: any thread of the process calls. Invariants: a handle is a
//! number, so a call after a free is an error. No call unwinds, ends the process, or waits, except
//! those that say so. A forked child can call nothing. Threads of the library get no signals. Not
//! here: the rules of a request (`agent`).

mod exports;
mod guard;
mod handles;
mod log_thread;
mod objects;
mod pointers;
mod types;

pub use exports::{
    baton_abi, baton_address, baton_agent_free, baton_agent_new, baton_cancel, baton_cause_name,
    baton_compute, baton_counters, baton_error_name, baton_event_fd, baton_last_error, baton_lease,
    baton_log, baton_offer, baton_poll, baton_region_adopt, baton_region_base, baton_region_free,
    baton_region_new, baton_release, baton_send_last, baton_status, baton_wait, baton_wish,
};
pub use types::{
    ABI, BatonConfig, BatonCounters, BatonError, BatonEvent, BatonEventKind, BatonLayout,
    BatonLogCallback, BatonLogLevel, BatonRole, ELEMENT_BF16, ELEMENT_F16, ELEMENT_F32, KIND_BYTES,
    PAYLOAD_BYTES,
};
