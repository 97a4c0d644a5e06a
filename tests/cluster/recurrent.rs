//! Models with recurrent state: a hand-over sends the state of a prompt, once and as a whole.

use crate::fleet::Fleet;
use crate::prefix::{ask, next_turn, sent};
use crate::{body, start_model};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/mamba2-f32");
/// 2 layers of 8 heads of 16 × 16 elements, and of 4 columns of 192 channels, of 4 bytes each.
const STATE: f64 = (2 * (8 * 16 * 16 + 4 * 192) * 4) as f64;

fn state_crosses(transfer: &str, flow: &[&str], chunk: &str) {
    let start = |command: &str, more: &[&str]| start_model(MODEL, command, more);
    let whole = start("serve", &["--mixed"]);
    let flags = ["--bootstrap-port", "0", "--transfer", transfer, "--chunked-prefill-size", chunk];
    let fleet = Fleet::with(
        vec![start("prefill", &flags)],
        vec![start("decode", &["--transfer", transfer])],
        flow,
    );
    let mut turn = body(1, 300, 30);
    for _ in 0..3 {
        let (expected, before) = (ask(&whole, &turn).1, sent(&fleet));
        let (cached, choices) = ask(&fleet.router, &turn);
        assert_eq!(choices, expected, "{transfer}, {flow:?}");
        assert_eq!(cached, 0, "the state behind a prefix is not kept");
        assert_eq!(sent(&fleet) - before, STATE, "{transfer}, {flow:?}");
        turn = next_turn(&turn, &choices, 7);
    }
}

#[test]
fn state_crosses_with_the_last_chunk() {
    for transfer in ["shm", "tcp"] {
        state_crosses(transfer, &[], "32");
        state_crosses(transfer, &["--flow", "prefill-first"], "100");
    }
}
