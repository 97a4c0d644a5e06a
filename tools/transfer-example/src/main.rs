//! Another engine over Baton's transfer engine (feature `transfer`), in two processes.
//!
//! ```text
//!  prefill process                          decode process
//!   main: SourceManager ◀── unix socket ──▶ main: DestinationManager
//!   move: SourceMover ════ shared memory ══▶ move: DestinationMover
//! ```
//! One request completes. The destination cancels a second one during its transfer. The exit code
//! is 0 only if both processes find the expected results. The processes know each other, so there
//! is no handshake. A real engine proves its peer first.

mod decode;
mod link;
mod prefill;
mod worker;

use baton::ids::Room;
use link::Link;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};
use std::{env, io, thread};

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
    let outcome = match env::args().nth(1).as_deref() {
        Some("decode") => Link::from_stdin().and_then(|link| decode::run(link, until)),
        _ => run_both(until),
    };
    let Err(error) = outcome else { return ExitCode::SUCCESS };
    eprintln!("transfer-example: {error}");
    ExitCode::FAILURE
}

/// Prefill runs in this process. Decode runs in a child, with the other end of the link as stdin.
fn run_both(until: Instant) -> io::Result<()> {
    let (link, other) = Link::pair()?;
    let mut child = Command::new(env::current_exe()?).arg("decode").stdin(other).spawn()?;
    // `run` drops the link. The child ends with it.
    let outcome = prefill::run(link, until);
    loop {
        match child.try_wait()? {
            Some(status) if status.success() => return outcome,
            Some(status) => return outcome.and(Err(io::Error::other(format!("decode: {status}")))),
            None if Instant::now() >= until => child.kill()?,
            None => {}
        }
        thread::sleep(Duration::from_millis(5));
    }
}
