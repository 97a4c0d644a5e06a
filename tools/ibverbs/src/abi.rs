//! Sizes, offsets and numbers; what is compared is written by the build script.

#[allow(clippy::wildcard_imports)]
use ibverbs_sys::*;

/// Ends the process where two differ.
pub fn compare() {
    let compared: &[(&str, usize, usize)] = &include!(concat!(env!("OUT_DIR"), "/compared.rs"));
    let different: Vec<_> = compared.iter().filter(|(_, ours, theirs)| ours != theirs).collect();
    for (name, ours, theirs) in &different {
        println!("{name}: {ours} here, {theirs} in the crate");
    }
    assert!(compared.len() > 200, "only {} compared", compared.len());
    assert!(different.is_empty(), "{} of {} differ", different.len(), compared.len());
    println!("abi: {} sizes, offsets and numbers are the same", compared.len());
}
