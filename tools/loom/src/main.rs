//! Models of what threads and processes share without a lock: every order in which they may run, and every
//! value that a weak memory may show them, within a bound on preemptions.
//!
//! The files under test are the product's own, compiled here by their paths; only the modules they build on are
//! others: atomics are loom's ([`stdx`]), regions are memory that loom watches ([`kv`]). A model that holds
//! proves little unless it can fail, so `./run` also breaks a copy of each rule (`mutations`) and wants its model
//! to fail.
//!
//! `cargo run -- [MODEL...]`; without names all. Exit status 101: one did not hold.

// Of the product's files a model needs a part.
#![allow(dead_code)]

#[path = "../../../src/cause.rs"]
mod cause;
mod channel;
#[path = "../../../src/ids.rs"]
mod ids;
mod kv;
mod limits;
mod models;
mod obs;
mod stdx;
mod sys;
mod transfer;

// The product's `use crossbeam_channel` means this crate.
extern crate self as crossbeam_channel;
pub use channel::{Receiver, Sender, TrySendError, bounded};

fn main() {
    let report = std::panic::take_hook();
    // The first is the one that counts: others come of unwinding what loom holds.
    std::panic::set_hook(Box::new(move |info| {
        report(info);
        std::process::exit(101);
    }));
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    for name in &wanted {
        assert!(models::ALL.iter().any(|(known, _)| known == name), "no model is called {name}");
    }
    for (name, check) in models::ALL {
        if wanted.is_empty() || wanted.iter().any(|wanted| wanted == name) {
            check(name);
        }
    }
}
