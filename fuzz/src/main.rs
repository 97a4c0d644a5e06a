//! Feeds bytes to whatever reads bytes from outside. A target is a file in `targets/` whose
//! `run(&[u8])` panics when something is wrong, and a folder of small inputs in `corpus/`.
//!
//! `cargo run -- [--runs N] [--seed S] [TARGET [FILE]]` replays the corpora and then mutates them,
//! the same way each time (this is what `tools/test` does); `./run TARGET` searches with libFuzzer,
//! guided by coverage.

#![cfg_attr(fuzzing, no_main)]

mod memory;
#[cfg(not(fuzzing))]
mod mutate;

#[path = "../targets/mod.rs"]
mod targets;

/// Runs a target on one input; panics if it takes memory out of proportion to it.
fn run(target: fn(&[u8]), input: &[u8]) {
    let peak = memory::peak_of(|| target(input));
    let allowed = memory::BASE + memory::PER_BYTE * input.len();
    assert!(peak <= allowed, "{peak} bytes of memory for {} of input", input.len());
}

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    static TARGET: std::sync::LazyLock<fn(&[u8])> = std::sync::LazyLock::new(|| {
        let name = std::env::var("BATON_FUZZ_TARGET").expect("BATON_FUZZ_TARGET names the target");
        targets::ALL.iter().find(|(known, _)| *known == name).expect("a target of that name").1
    });
    run(*TARGET, input);
});

#[cfg(not(fuzzing))]
fn main() -> std::process::ExitCode {
    match mutate::Options::parse(std::env::args().skip(1)) {
        Ok(options) => mutate::all(&options),
        Err(message) => {
            eprintln!("{message}\nusage: baton-fuzz [--runs N] [--seed S] [TARGET [FILE]]");
            std::process::ExitCode::from(2)
        }
    }
}
