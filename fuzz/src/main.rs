//! Runs the code that reads bytes from outside on many inputs. A target is a file in `targets/` and
//! a folder of small inputs in `corpus/`. The file has a function `run(&[u8])`, which panics if a
//! result is wrong.
//!
//! `cargo run -- [--runs N] [--seed S] [TARGET [FILE]]` replays the corpora and then mutates them,
//! in the same way each time (`tools/test` does this). Without a target, it also plants mistakes
//! that targets must find. `./run TARGET` searches with libFuzzer, guided by coverage.

#![cfg_attr(fuzzing, no_main)]

mod memory;
#[cfg(not(fuzzing))]
mod mutate;
#[cfg(not(fuzzing))]
mod planted;

#[path = "../targets/mod.rs"]
mod targets;

/// Runs a target on one input. Panics if the memory used is out of proportion to the input.
fn run(target: fn(&[u8]), input: &[u8]) {
    let peak = memory::peak_of(|| target(input));
    let allowed = memory::BASE + memory::PER_BYTE * input.len() + memory::take_allowance();
    assert!(peak <= allowed, "{peak} bytes of memory for {} of input", input.len());
}

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    static TARGET: std::sync::LazyLock<fn(&[u8])> = std::sync::LazyLock::new(|| {
        let name = std::env::var("BATON_FUZZ_TARGET").expect("BATON_FUZZ_TARGET names the target");
        targets::ALL.iter().find(|(known, _)| *known == name).expect("a known target").1
    });
    run(*TARGET, input);
});

#[cfg(not(fuzzing))]
fn main() -> std::process::ExitCode {
    let options = match mutate::Options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(message) => {
            eprintln!(
                "{message}\nusage: baton-fuzz [--runs N] [--seed S] [--plant MISTAKE | TARGET \
                 [FILE]]"
            );
            return std::process::ExitCode::from(2);
        }
    };
    let is_well = match &options.mistake {
        Some(mistake) => planted::search(mistake, options.seed),
        None => mutate::all(&options) && (options.target.is_some() || planted::all()),
    };
    std::process::ExitCode::from(u8::from(!is_well))
}
