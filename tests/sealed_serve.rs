//! `baton serve` in this process with a counting allocator. Over the full life of requests, the
//! threads of engine and mover neither allocate nor free. Model, pages and hand-off over shm are
//! real.

#[allow(dead_code)]
#[path = "serve/client.rs"]
mod client;

use baton::cli::{self, HostInfo, Invocation};
use baton::config::RoleConfig;
use baton::http::Method;
use baton::process;
use baton::server::drain::DrainOutcome;
use baton::stdx::seal::{SealingAllocator, seal_thread, violations};
use client::Client;
use serde_json::{Value, json};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

#[global_allocator]
static ALLOCATOR: SealingAllocator = SealingAllocator;

/// One test, as the count is the process's.
#[test]
fn engine_and_mover_allocate_nothing_while_requests_live_and_die() {
    for (model, flags) in [
        ("llama-f32", "--mixed"),
        ("llama-f32", "--transfer shm"),
        ("llama-f32", "--prefill-workers 2 --decode-workers 2 --chunk-ms 1"),
        ("qwen2-moe-f32", "--transfer shm"),
        ("gemma3-f32", "--transfer shm"),
        ("mamba2-f32", "--transfer shm"),
        ("falcon-h1-f32", "--transfer shm"),
        ("qwen3-next-f32", "--transfer shm"),
    ] {
        serve(model, flags, |address| {
            thread::scope(|scope| {
                (0..6).for_each(|user| drop(scope.spawn(move || use_it(address, user))))
            });
            assert_eq!(violations(), 0, "{model} {flags}");
        });
        assert_eq!(violations(), 0, "{model} {flags}, at its end");
    }
    let seal = seal_thread();
    let allocated = vec![1u8];
    drop(seal);
    assert_eq!(violations(), 1, "the allocator does not watch");
    drop(allocated);
}

/// Serves in a thread while `visit` runs, then drains.
fn serve(model: &str, flags: &str, visit: impl FnOnce(SocketAddr)) {
    let model = format!("{}/tests/fixtures/{model}", env!("CARGO_MANIFEST_DIR"));
    // The port was free a moment ago. No other test here takes ports by number.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let arguments = format!(
        "baton serve {model} --port {} --kv-memory 2MiB --max-running-requests 4 \
         --max-queued-requests 6 --chunked-prefill-size 32 --threads 2 {flags}",
        address.port()
    );
    let parsed = cli::parse(
        arguments.split_whitespace().map(std::ffi::OsString::from),
        &HostInfo::of_this_process(),
    );
    let Ok(Invocation::Run { command, .. }) = parsed else { panic!("{arguments}") };
    let RoleConfig::Serve(config) = *command else { panic!("{arguments}") };
    let server = thread::spawn(move || process::serve(&config));
    while TcpStream::connect(address).is_err() {
        assert!(!server.is_finished(), "the server has ended");
        thread::sleep(Duration::from_millis(5));
    }
    visit(address);
    let own = std::process::id().to_string();
    assert!(
        std::process::Command::new("kill").args(["-s", "TERM", &own]).status().unwrap().success()
    );
    assert_eq!(server.join().unwrap().unwrap(), DrainOutcome::Drained);
}

/// Requests of all kinds; some are left, some aborted, some refused, some too many.
fn use_it(address: SocketAddr, user: u64) {
    for round in 0..25 {
        let seed = user * 100 + round;
        let mut client = Client::new(address);
        client.post("/v1/completions", &body(seed));
        match seed % 5 {
            0 => {
                client.wait_for("HTTP/1.1");
                continue;
            }
            1 => {
                thread::sleep(Duration::from_micros(seed * 40));
                continue;
            }
            2 => {
                let mut other = Client::new(address);
                other.post("/abort_request", &json!({"rid": format!("user-{user}-")}));
                assert_eq!(other.reply(Method::Post).status(), 200);
            }
            _ => {}
        }
        let status = client.reply(Method::Post).status();
        assert!([200, 429, 499].contains(&status), "{status}");
    }
}

fn body(seed: u64) -> Value {
    let prompt: Vec<u64> = (0..1 + seed * 37 % 300).map(|i| 3 + (seed + i * 31) % 380).collect();
    json!({
        "prompt": prompt, "max_tokens": 1 + seed * 13 % 90, "ignore_eos": seed.is_multiple_of(2),
        "stream": !seed.is_multiple_of(3),
        "n": 1 + seed % 2, "rid": format!("user-{}-{seed}", seed / 100),
        "temperature": (seed % 4) as f32 * 20.0, "seed": seed, "top_p": 0.9, "top_k": seed % 7 * 10,
        "min_p": 0.01, "presence_penalty": 0.2, "frequency_penalty": 0.3, "repetition_penalty": 1.1,
        "logprobs": seed % 21, "stop": ["never said", "e"], "stop_token_ids": [9, 10],
    })
}
