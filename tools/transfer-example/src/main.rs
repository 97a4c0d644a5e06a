//! Another engine over Baton's transfer engine (feature `transfer`), in two processes.
//!
//! ```text
//!  prefill process                       decode process
//!   main: SourceAgent ◀── control link ──▶ main: DestinationAgent
//!   move-0 ═══════════════ KV (shm) ═════▶ move-0
//! ```
//! One request completes. The destination cancels a second one during its transfer. The exit code
//! is 0 only if both processes find the expected results.

mod decode;
mod engine;
mod prefill;

use baton::ids::Room;
use std::net::SocketAddr;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};
use std::{env, thread};

/// A hand-off takes milliseconds. On a machine that is busy with other tests, it takes longer.
const DEADLINE: Duration = Duration::from_secs(30);

/// The data of a request that both engines need. A router would send it.
struct Request {
    room: Room,
    tokens: u32,
    /// The client leaves before the last chunk is computed.
    is_cancelled: bool,
}

const REQUESTS: [Request; 2] = [
    Request { room: Room(1), tokens: 100, is_cancelled: false },
    Request { room: Room(2), tokens: 90, is_cancelled: true },
];

fn main() -> ExitCode {
    let until = Instant::now() + DEADLINE;
    let outcome = match env::args().nth(1) {
        Some(source) => source.parse().map_err(engine::text).and_then(|at| decode::run(at, until)),
        None => prefill::run(spawn_decode, until),
    };
    let Err(error) = outcome else { return ExitCode::SUCCESS };
    eprintln!("transfer-example: {error}");
    ExitCode::FAILURE
}

/// Runs decode in a child, which connects to the source at this address. Returns a function that
/// waits for the child.
fn spawn_decode(
    source: SocketAddr,
    until: Instant,
) -> Result<impl FnOnce() -> Result<(), String>, String> {
    let program = env::current_exe().map_err(engine::text)?;
    let child = Command::new(program).arg(source.to_string()).spawn();
    let mut child = child.map_err(engine::text)?;
    Ok(move || {
        loop {
            match child.try_wait().map_err(engine::text)? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(format!("decode: {status}")),
                None if Instant::now() >= until => child.kill().map_err(engine::text)?,
                None => thread::sleep(Duration::from_millis(5)),
            }
        }
    })
}
