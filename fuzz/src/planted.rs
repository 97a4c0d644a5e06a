//! Mistakes planted in the product, one at a time. A target must find each within a few inputs.

use crate::{mutate, targets};
use baton::stdx::failpoint::set_failpoint;
use baton::stdx::panic_message::panic_message;
use std::env;
use std::panic::catch_unwind;
use std::process::Command;

/// Inputs within which a target finds its mistake.
const INPUTS: usize = 400;
/// The target, the mistake that it must find, and a part of its message.
const ALL: &[(&str, &str, &str)] = &[
    ("abi", "handle of a freed object names the next one", "handle names nothing"),
    (
        "abi",
        "request has the number of a former one in its slot",
        // Which of its two calls fails depends on when its end comes.
        "a cancelled request ",
    ),
    ("abi", "failure is said to be the end", "an outcome comes before the end"),
    ("abi", "failure has no cause", "a failure has a cause"),
];

/// Plants each mistake in a process of its own, because it can leave agents that no input can use.
/// Returns whether all are found.
pub fn all() -> bool {
    let mut missed = 0;
    for (_, mistake, _) in ALL {
        let program = env::current_exe().expect("this program has a path");
        let ended = Command::new(program).args(["--plant", mistake]).output();
        let ended = ended.expect("this program can be started again");
        let words = String::from_utf8_lossy(&ended.stdout);
        if ended.status.success() {
            print!("{words}");
        } else {
            missed += 1;
            eprintln!("MISSED: {mistake}: {words}{}", String::from_utf8_lossy(&ended.stderr));
        }
    }
    missed == 0
}

/// Plants one mistake and runs its target. Returns whether it is found.
pub fn search(mistake: &str, seed: u64) -> bool {
    let Some(&(name, mistake, message)) = ALL.iter().find(|known| known.1 == mistake) else {
        eprintln!("there is no such mistake");
        return false;
    };
    let target = targets::ALL.iter().find(|(known, _)| *known == name).expect("a known target").1;
    let inputs = mutate::inputs(name, seed).expect("the target has a corpus");
    set_failpoint(Some(mistake));
    for (number, input) in inputs.take(INPUTS).enumerate() {
        if let Err(panic) = catch_unwind(|| crate::run(target, &input)) {
            println!("{name} finds by input {}: {mistake}", number + 1);
            return panic_message(&*panic).contains(message);
        }
    }
    false
}
