//! Models of the state that threads and processes share without a lock. Loom runs each order of
//! steps and shows each value that a weak memory allows, within a bound on preemptions.
//!
//! The files under test are the product's own, compiled here by their paths. Only the modules below
//! them are replaced: atomics are loom's ([`stdx`]), regions are memory that loom checks ([`kv`]).
//! A model proves little unless it can fail. Therefore `./run` also breaks each rule in a copy of
//! the sources (`mutations`) and expects the model to fail.
//!
//! `cargo run -- [MODEL...]` checks the named models. Default: all. Exit status 101: one
//! failed.

// The models use only a part of the product's files.
#![allow(dead_code)]

#[path = "../../../src/cause.rs"]
mod cause;
mod channel;
#[path = "../../../src/ids.rs"]
mod ids;
mod kv;
mod limits;
mod models;
mod stdx;
mod sys;
mod transfer;

// The product's `use crossbeam_channel` means this crate.
extern crate self as crossbeam_channel;
pub use channel::{Receiver, Sender, TrySendError, bounded};

fn main() {
    let report = std::panic::take_hook();
    // Only the first panic counts: unwinding loom's state causes more panics.
    std::panic::set_hook(Box::new(move |info| {
        report(info);
        std::process::exit(101);
    }));
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    for name in &wanted {
        assert!(models::ALL.iter().any(|(known, _)| known == name), "no model has the name {name}");
    }
    for (name, check) in models::ALL {
        if wanted.is_empty() || wanted.iter().any(|wanted| wanted == name) {
            check(name);
        }
    }
}
