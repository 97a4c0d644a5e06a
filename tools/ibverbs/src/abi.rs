//! Sizes, offsets and numbers. The build script writes the list of comparisons.

#[allow(clippy::wildcard_imports)]
use ibverbs_sys::*;

/// The crate's rdma-core has one more word at the end of this struct than Debian's header. Baton
/// calls the library's exported symbol, which fills only the old fields.
const GROWN: &str = "struct ibv_port_attr";

/// Compares all values, and panics if any of them differ.
pub fn compare() {
    let compared: &[(&str, usize, usize)] = &include!(concat!(env!("OUT_DIR"), "/compared.rs"));
    let same =
        |name: &str, ours: usize, theirs: usize| ours == theirs || name == GROWN && ours < theirs;
    let different: Vec<_> =
        compared.iter().filter(|(name, ours, theirs)| !same(name, *ours, *theirs)).collect();
    for (name, ours, theirs) in &different {
        println!("{name}: {ours} here, {theirs} in the crate");
    }
    assert!(compared.len() > 200, "only {} compared", compared.len());
    assert!(different.is_empty(), "{} of {} differ", different.len(), compared.len());
    println!(
        "abi: {} sizes, offsets and numbers are the same, except the size of {GROWN}, which has \
         grown. struct ibv_wc is checked by the exchange and tests/verbs_abi.rs, because the crate \
         declares it by hand with private fields",
        compared.len()
    );
}
