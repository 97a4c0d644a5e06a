//! Runs `baton` in the other guest. An agent there starts one process for each connection.

use crate::process::{PATIENCE, Process};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use std::{env, thread};

/// Set in the guest that leads: there is another.
pub const LEADS: &str = "BATON_RDMA_LEADS";
pub const FAR: &str = "10.9.2.1";
pub const NEAR: &str = "10.9.2.2";
const AGENT_PORT: u16 = 4700;
/// What the helper process says to the agent.
const ARGUMENTS: &str = "BATON_RDMA_FAR_ARGUMENTS";

/// A worker in the other guest.
pub fn start(args: &[&str]) -> Process {
    let mut helper = Command::new(env::current_exe().expect("a path"));
    helper.args(["--ignored", "--exact", "far::helper", "--nocapture"]);
    helper.env(ARGUMENTS, serde_json::to_string(args).expect("strings"));
    Process::run(helper)
}

/// The local process that stands for one in the other guest. It prints the output of that process
/// and ends with it; that process ends with this one. Run alone it does nothing.
#[test]
#[ignore = "a helper of other tests"]
fn helper() {
    if let Ok(arguments) = env::var(ARGUMENTS) {
        let _ = io::copy(&mut run(&arguments), &mut io::stderr());
    }
}

/// The agent, in the guest that does not lead. Alone it does nothing.
#[test]
#[ignore = "the other guest's end of other tests"]
fn agent() {
    // Another machine has another address.
    let Ok(listener) = TcpListener::bind((FAR, AGENT_PORT)) else { return };
    for stream in listener.incoming() {
        let stream = stream.expect("a connection");
        thread::spawn(|| serve(stream).expect("a process that runs"));
    }
}

/// The output of a process there.
pub struct Output(BufReader<TcpStream>);

impl Output {
    pub fn of(args: &[&str]) -> Output {
        Output(BufReader::new(run(&serde_json::to_string(args).expect("strings"))))
    }

    /// The next line with these words in it.
    pub fn await_line(&mut self, words: &str) -> String {
        loop {
            let mut line = String::new();
            let length =
                self.0.read_line(&mut line).unwrap_or_else(|error| panic!("{words}: {error}"));
            assert!(length > 0, "the process there has ended and not said {words}");
            eprint!("far: {line}");
            if line.contains(words) {
                return line;
            }
        }
    }
}

/// Runs it there; the connection carries its output.
fn run(arguments: &str) -> TcpStream {
    let begun = Instant::now();
    let mut stream = loop {
        // The other guest may not be up yet.
        match TcpStream::connect((FAR, AGENT_PORT)) {
            Ok(stream) => break stream,
            Err(error) => assert!(begun.elapsed() < PATIENCE, "the other guest: {error}"),
        }
        thread::sleep(Duration::from_millis(50));
    };
    stream.set_read_timeout(Some(3 * PATIENCE)).expect("a socket");
    stream.write_all(format!("{arguments}\n").as_bytes()).expect("it listens");
    stream
}

fn serve(stream: TcpStream) -> io::Result<()> {
    let mut arguments = String::new();
    // Nothing follows it.
    BufReader::new(&stream).read_line(&mut arguments)?;
    let arguments: Vec<String> = serde_json::from_str(&arguments)?;
    let output = || stream.try_clone().map(|stream| Stdio::from(OwnedFd::from(stream)));
    let mut child = Command::new(env!("CARGO_BIN_EXE_baton"))
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(output()?)
        .stderr(output()?)
        .spawn()?;
    let (gone, is_gone) = mpsc::channel();
    let mut other_end = stream.try_clone()?;
    thread::spawn(move || {
        // An end and an error are one here.
        let _ = other_end.read(&mut [0]);
        let _ = gone.send(());
    });
    while child.try_wait()?.is_none() {
        if is_gone.recv_timeout(Duration::from_millis(20)).is_ok() {
            child.kill()?;
            child.wait()?;
        }
    }
    // Ends the thread above as well; the other end may be gone.
    let _ = stream.shutdown(Shutdown::Both);
    Ok(())
}
