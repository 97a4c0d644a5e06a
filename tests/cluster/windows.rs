//! Models with windows: only the last window of a prompt crosses, whatever the pages of the
//! workers.

use crate::fleet::Fleet;
use crate::prefix::{ask, next_turn, sent};
use crate::process::Process;
use crate::{body, start_model};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/mistral-f32");
/// Tokens that a token of the model sees.
const WINDOW: u64 = 24;

fn start(command: &str, more: &[&str]) -> Process {
    start_model(MODEL, command, more)
}

fn turns_with_windows(transfer: &str, flow: &[&str], page_sizes: [u64; 2]) {
    let whole = start("serve", &["--mixed", "--disable-radix-cache"]);
    let [from, to] = page_sizes.map(|size| size.to_string());
    let flags = ["--bootstrap-port", "0", "--transfer", transfer, "--chunked-prefill-size", "32"];
    let fleet = Fleet::with(
        vec![start("prefill", &[&flags[..], &["--page-size", &from]].concat())],
        vec![start("decode", &["--transfer", transfer, "--page-size", &to])],
        flow,
    );
    let [from, to] = page_sizes;
    let behind = |tokens: u64| (tokens + 1).saturating_sub(WINDOW) / to;
    let mut bytes_of_a_page = None;
    // Prefill keeps pages for a destination with pages of 256 tokens. Some go back all the same.
    let mut turn = body(1, 300, 30);
    let (mut read, mut held) = (0, 0);
    for _ in 0..3 {
        let tokens = turn["prompt"].as_array().unwrap().len() as u64;
        let (expected, before) = (ask(&whole, &turn).1, sent(&fleet));
        let (cached, choices) = ask(&fleet.router, &turn);
        assert_eq!(choices, expected, "{transfer}, {flow:?}, {page_sizes:?}");
        assert_eq!(cached, read / from * from, "{transfer}, {flow:?}, {page_sizes:?}");
        let pages = tokens.div_ceil(to) - behind(tokens).max(held / to);
        let bytes = sent(&fleet) - before;
        let page = *bytes_of_a_page.get_or_insert(bytes / pages as f64);
        assert_eq!(bytes, page * pages as f64, "{transfer}, {flow:?}, {page_sizes:?}");
        (read, held) = (tokens, tokens + 30 - 1);
        turn = next_turn(&turn, &choices, 7);
    }
    // 4 heads of 16 elements of 4 bytes, for keys and values, in 2 layers.
    assert_eq!(bytes_of_a_page, Some((to * 2 * 2 * 2 * 16 * 4) as f64));
}

#[test]
fn the_last_window_of_a_prompt_crosses_over_shm() {
    turns_with_windows("shm", &[], [16, 16]);
    turns_with_windows("shm", &[], [8, 32]);
    turns_with_windows("shm", &["--flow", "prefill-first"], [4, 64]);
}

#[test]
fn the_last_window_of_a_prompt_crosses_over_tcp() {
    turns_with_windows("tcp", &[], [16, 4]);
    turns_with_windows("tcp", &["--flow", "prefill-first"], [8, 16]);
}

/// Gemma has a full layer between two window layers. Each is a group, and the groups cross one
/// after the other: the whole prompt of the first one, and the last window of the others.
fn groups_cross(transfer: &str, flow: &[&str]) {
    const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/gemma3-f32");
    let start = |command: &str, more: &[&str]| start_model(MODEL, command, more);
    let whole = start("serve", &["--mixed", "--disable-radix-cache"]);
    let flags = ["--bootstrap-port", "0", "--transfer", transfer, "--chunked-prefill-size", "32"];
    let fleet = Fleet::with(
        vec![start("prefill", &flags)],
        vec![start("decode", &["--transfer", transfer])],
        flow,
    );
    let mut turn = body(1, 300, 30);
    let (mut read, mut held) = (0, 0);
    for _ in 0..3 {
        let tokens = turn["prompt"].as_array().unwrap().len() as u64;
        let (expected, before) = (ask(&whole, &turn).1, sent(&fleet));
        let (cached, choices) = ask(&fleet.router, &turn);
        assert_eq!(choices, expected, "{transfer}, {flow:?}");
        assert_eq!(cached, read / 16 * 16, "{transfer}, {flow:?}");
        let behind = (tokens + 1).saturating_sub(WINDOW) / 16;
        let [full, narrow] = [0, behind].map(|gone| tokens.div_ceil(16) - gone.max(held / 16));
        // A page has 1 head of 16 elements of 4 bytes, for keys and values, in 1 layer.
        let page = 16 * 2 * 16 * 4;
        let bytes = ((full + 2 * narrow) * page) as f64;
        assert_eq!(sent(&fleet) - before, bytes, "{transfer}, {flow:?}");
        (read, held) = (tokens, tokens + 30 - 1);
        turn = next_turn(&turn, &choices, 7);
    }
}

#[test]
fn groups_of_full_and_window_layers_cross() {
    for transfer in ["shm", "tcp"] {
        groups_cross(transfer, &[]);
        groups_cross(transfer, &["--flow", "prefill-first"]);
    }
}
