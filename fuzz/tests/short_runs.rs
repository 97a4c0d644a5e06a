//! The corpora and some mutations of them, and planted mistakes that targets must find.
//! `fuzz/src/main.rs` describes the program.

use std::process::Command;

#[test]
fn no_input_breaks_a_target_and_planted_mistakes_are_found() {
    let ended = Command::new(env!("CARGO_BIN_EXE_baton-fuzz")).output();
    let ended = ended.expect("the program starts");
    print!("{}", String::from_utf8_lossy(&ended.stdout));
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
}
