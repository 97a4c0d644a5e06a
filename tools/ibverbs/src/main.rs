//! Compares Baton's bindings with the `ibverbs` crate, which is generated from rdma-core's headers.
//!
//! `abi` compares sizes, offsets and numbers. `exchange` needs a device. It checks that Baton's
//! WRITE arrives at the crate and that the crate's SEND arrives at Baton. It also checks SEND and
//! RECV between two queue pairs of the crate.

mod abi;
mod exchange;

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("abi") => abi::compare(),
        Some("exchange") => exchange::run(),
        _ => {
            eprintln!("usage: baton-ibverbs abi|exchange    (tools/ibverbs/run does both)");
            std::process::exit(2);
        }
    }
}
