//! Checks that `include/baton.h` is the header of `src/abi`. With `--write`, writes it.

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (abi, path) = (here.join("../../../src/abi"), here.join("../include/baton.h"));
    let config = cbindgen::Config::from_file(here.join("cbindgen.toml")).expect("a configuration");
    let made = cbindgen::Builder::new()
        .with_config(config)
        .with_src(abi.join("types.rs"))
        .with_src(abi.join("exports.rs"))
        .generate()
        .expect("the ABI has a header");
    let mut text = Vec::new();
    made.write(&mut text);
    if std::env::args().any(|argument| argument == "--write") {
        std::fs::write(&path, &text).expect("the header can be written");
    }
    if std::fs::read(&path).unwrap_or_default() == text {
        return ExitCode::SUCCESS;
    }
    eprintln!("tools/libbaton/include/baton.h differs from src/abi. To write it:");
    eprintln!("cargo run --manifest-path tools/libbaton/header/Cargo.toml -- --write");
    ExitCode::FAILURE
}
