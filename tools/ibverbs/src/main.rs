//! Our bindings beside the `ibverbs` crate, whose own are made from rdma-core's headers: the same sizes, offsets and
//! numbers (`abi`), and on a device the same fabric (`exchange`): what the crate sends arrives with us, what we
//! write arrives with the crate, and the crate's own SEND and RECV do as its documentation says.

mod abi;
mod exchange;

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("abi") => abi::compare(),
        Some("exchange") => exchange::run(),
        _ => {
            eprintln!("usage: baton-ibverbs abi|exchange    (tools/ibverbs/run does both)");
            std::process::exit(2);
        }
    }
}
