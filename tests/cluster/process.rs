//! A `baton` process of a test: started on free ports, ended with the value.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// No wait of a test is longer; a live process answers in milliseconds.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub struct Process {
    child: Child,
    pub address: SocketAddr,
    /// Of a prefill worker.
    pub bootstrap_port: u16,
}

impl Process {
    /// Starts `baton ARGS` and waits until it is ready.
    #[allow(clippy::zombie_processes)] // `drop` waits; a panic before it ends the whole test process.
    pub fn start(args: &[&str]) -> Process {
        let mut child = Command::new(env!("CARGO_BIN_EXE_baton"))
            .args(args)
            .stderr(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("the binary was built");
        let (lines, log) = mpsc::channel();
        let stderr = BufReader::new(child.stderr.take().expect("piped"));
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                eprintln!("{line}");
                let _ = lines.send(line);
            }
        });
        let mut bootstrap_port = 0;
        loop {
            let line = log.recv_timeout(PATIENCE).expect("the process says that it is ready");
            if let Some(port) = field(&line, "bootstrap_port=") {
                bootstrap_port = port.parse().expect("a port");
            }
            if line.contains(" ready ")
                && let Some(address) = field(&line, "address=")
            {
                return Process { child, address: address.parse().expect("an address"), bootstrap_port };
            }
        }
    }

    /// Ends it without a chance to say goodbye.
    pub fn kill(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it was a child");
    }

    pub fn get(&self, path: &str) -> (u16, String) {
        exchange(self.address, &format!("GET {path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n"))
    }

    pub fn post(&self, path: &str, body: &str) -> (u16, String) {
        post(self.address, path, body)
    }

    /// The value of a metric whose line begins so.
    pub fn metric(&self, start: &str) -> f64 {
        let (_, metrics) = self.get("/metrics");
        let line = metrics.lines().find(|line| line.starts_with(start)).expect("the metric is there");
        line.rsplit(' ').next().expect("a value").parse().expect("a number")
    }

    /// Waits until every page is free.
    pub fn await_idle(&self) {
        let begun = Instant::now();
        loop {
            let taken: f64 = ["in_use", "leased", "cached"]
                .iter()
                .map(|state| {
                    let (_, metrics) = self.get("/metrics");
                    let state = format!("state=\"{state}\"");
                    let line = metrics
                        .lines()
                        .find(|line| line.starts_with("baton_pages{") && line.contains(&state));
                    line.expect("pages").rsplit(' ').next().unwrap().parse::<f64>().unwrap()
                })
                .sum();
            if taken == 0.0 {
                return;
            }
            assert!(begun.elapsed() < PATIENCE, "{taken} pages are not free");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn post(address: SocketAddr, path: &str, body: &str) -> (u16, String) {
    let length = body.len();
    let head =
        format!("POST {path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
    exchange(address, &(head + body))
}

/// One request on a connection of its own; the body as it came, without chunk sizes.
fn exchange(address: SocketAddr, request: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    // A process that was killed resets; what it had said is what counts.
    let _ = stream.read_to_string(&mut answer);
    let status = answer.get(9..12).and_then(|status| status.parse().ok()).unwrap_or(0);
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    (status, if head.contains("chunked") { unchunked(body) } else { body.to_owned() })
}

fn unchunked(mut body: &str) -> String {
    let mut whole = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap_or(0);
        if size == 0 {
            break;
        }
        whole += rest.get(..size).unwrap_or_default();
        body = rest.get(size + 2..).unwrap_or_default();
    }
    whole
}

fn field<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = line.split_once(name)?;
    rest.split_whitespace().next()
}
