//! Models with recurrent state: a hand-over sends the state of a prompt, once and as a whole. The
//! next prompt of a conversation begins with a checkpoint.

use crate::fleet::Fleet;
use crate::prefix::{ask, next_turn, sent};
use crate::{body, start_model};

const MAMBA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/mamba2-f32");
/// 2 layers of 8 heads of 16 × 16 elements, and of 4 columns of 192 channels, of 4 bytes each.
const MAMBA_STATE: u64 = 2 * (8 * 16 * 16 + 4 * 192) * 4;
const FALCON: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/falcon-h1-f32");
/// A page: 16 tokens of 2 heads of 16 elements of 4 bytes, for keys and values, in 2 layers.
const FALCON_PAGE: u64 = 16 * 2 * 16 * 4 * 2 * 2;
/// 2 layers of 6 heads of 16 × 16 elements, and of 4 columns of 160 channels in 3 pieces of 64,
/// make 18 pieces of 1 KiB. A page has 8.
const FALCON_STATE_PAGES: u64 = 3;

/// `bytes` says how many cross for a prompt of so many tokens, of which decode has the first
/// `held`.
fn state_crosses(
    (model, bytes): (&str, fn(u64, u64) -> u64),
    transfer: &str,
    flow: &[&str],
    chunk: &str,
) {
    let start = |command: &str, more: &[&str]| start_model(model, command, more);
    let whole = start("serve", &["--mixed"]);
    let flags = ["--bootstrap-port", "0", "--transfer", transfer, "--chunked-prefill-size", chunk];
    let fleet = Fleet::with(
        vec![start("prefill", &flags)],
        vec![start("decode", &["--transfer", transfer])],
        flow,
    );
    let mut turn = body(1, 150, 30);
    let (mut cached_before, mut held) = (0, 0);
    for _ in 0..3 {
        let tokens = turn["prompt"].as_array().unwrap().len() as u64;
        let (expected, before) = (ask(&whole, &turn).1, sent(&fleet));
        let (cached, choices) = ask(&fleet.router, &turn);
        assert_eq!(choices, expected, "{transfer}, {flow:?}");
        assert_eq!(cached, cached_before, "{transfer}, {flow:?}, {model}");
        assert_eq!(sent(&fleet) - before, bytes(tokens, held) as f64, "{transfer}, {flow:?}");
        // The last checkpoint is behind the last full page, without the last token.
        (cached_before, held) = ((tokens - 1) / 16 * 16, tokens + 30 - 1);
        // A checkpoint that spares few tokens more than the last one is not made.
        turn = next_turn(&turn, &choices, 70);
    }
}

#[test]
fn state_crosses_with_the_last_chunk() {
    let mamba: (&str, fn(u64, u64) -> u64) = (MAMBA, |_, _| MAMBA_STATE);
    let falcon: (&str, fn(u64, u64) -> u64) = (FALCON, |tokens, held| {
        (tokens.div_ceil(16) - held / 16 + FALCON_STATE_PAGES) * FALCON_PAGE
    });
    for (model, transfer) in [(mamba, "shm"), (mamba, "tcp"), (falcon, "shm"), (falcon, "tcp")] {
        state_crosses(model, transfer, &[], "32");
        state_crosses(model, transfer, &["--flow", "prefill-first"], "100");
    }
}
