//! Sizes, offsets and numbers; what is compared is written by the build script.

#[allow(clippy::wildcard_imports)]
use ibverbs_sys::*;

/// The crate's rdma-core has put a word behind the last that Debian's header has. The library's own symbol, which is
/// what we call, fills the old ones.
const GROWN: &str = "struct ibv_port_attr";

/// Ends the process where two differ.
pub fn compare() {
    let compared: &[(&str, usize, usize)] = &include!(concat!(env!("OUT_DIR"), "/compared.rs"));
    let same = |name: &str, ours: usize, theirs: usize| ours == theirs || name == GROWN && ours < theirs;
    let different: Vec<_> =
        compared.iter().filter(|(name, ours, theirs)| !same(name, *ours, *theirs)).collect();
    for (name, ours, theirs) in &different {
        println!("{name}: {ours} here, {theirs} in the crate");
    }
    assert!(compared.len() > 200, "only {} compared", compared.len());
    assert!(different.is_empty(), "{} of {} differ", different.len(), compared.len());
    println!(
        "abi: {} sizes, offsets and numbers are the same (but for the size of {GROWN}, which has grown; struct ibv_wc \
         is left to the exchange and to tests/verbs_abi.rs, as the crate writes it by hand with private fields)",
        compared.len()
    );
}
