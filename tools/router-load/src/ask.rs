//! Clients in one thread, each with its own connection. A client sends a request, reads the whole
//! answer, and sends the next request.

use crate::answer::Answer;
use crate::case::Case;
use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token};
use serde_json::json;
use std::fs;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Time before the measurement starts.
const WARM_UP: Duration = Duration::from_millis(300);
/// Longer than any answer takes. If no bytes arrive for this time, the run fails.
const PATIENCE: Duration = Duration::from_secs(20);

/// The load of one measurement.
pub struct Load {
    /// Address of the router.
    pub target: SocketAddr,
    /// Kind of the requests.
    pub case: Case,
    /// Number of connections; each has one request at a time.
    pub connections: usize,
    /// Length of the measurement.
    pub seconds: f64,
    /// The CPU time of this process is measured.
    pub pid: Option<u32>,
}

struct Client {
    stream: TcpStream,
    /// Bytes of the request that are written.
    written: usize,
    asked: Instant,
    first: Option<Duration>,
    answer: Answer,
}

#[derive(Default)]
struct Found {
    whole: Vec<Duration>,
    first: Vec<Duration>,
    events: usize,
}

/// Runs the load and prints one line of JSON. It counts the answers that end within the measured
/// time, also those of requests that were sent before it.
pub fn run(load: &Load) -> io::Result<()> {
    let request = load.case.request(&load.target.to_string());
    let mut poll = Poll::new()?;
    let mut clients = Vec::new();
    for token in 0..load.connections {
        let stream = std::net::TcpStream::connect(load.target)?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let mut stream = TcpStream::from_std(stream);
        poll.registry().register(
            &mut stream,
            Token(token),
            Interest::READABLE | Interest::WRITABLE,
        )?;
        let now = Instant::now();
        clients.push(Client {
            stream,
            written: 0,
            asked: now,
            first: None,
            answer: Answer::default(),
        });
    }
    let mut events = Events::with_capacity(load.connections.max(16));
    let mut buffer = vec![0; 256 << 10];
    let begin = Instant::now() + WARM_UP;
    let end = begin + Duration::from_secs_f64(load.seconds);
    let (mut found, mut started, mut heard) = (Found::default(), None, Instant::now());
    for client in &mut clients {
        client.write(&request)?;
    }
    let (from, cpu) = loop {
        poll.poll(&mut events, Some(Duration::from_millis(100)))?;
        let now = Instant::now();
        let counts = now >= begin;
        if counts && started.is_none() {
            started = Some((now, cpu_time(load.pid)?));
            found = Found::default();
        }
        if let Some(start) = started.filter(|_| now >= end) {
            break start;
        }
        if now > heard + PATIENCE {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "no answer arrives"));
        }
        for event in &events {
            heard = now;
            clients[event.token().0].turn(&request, load.case, &mut buffer, &mut found)?;
        }
    };
    let (elapsed, cpu) = (from.elapsed().as_secs_f64(), cpu_time(load.pid)? - cpu);
    let requests = found.whole.len();
    found.whole.sort_unstable();
    found.first.sort_unstable();
    let us = |times: &[Duration], share: f64| {
        let at = ((times.len() as f64 * share) as usize).min(times.len().saturating_sub(1));
        times.get(at).map(|time| time.as_nanos() as f64 / 1e3)
    };
    println!(
        "{}",
        json!({
            "requests": requests,
            "rate": requests as f64 / elapsed,
            "events_rate": found.events as f64 / elapsed,
            "p50_us": us(&found.whole, 0.5),
            "p99_us": us(&found.whole, 0.99),
            "first_p50_us": us(&found.first, 0.5),
            "cpu_us": load.pid.map(|_| cpu.as_nanos() as f64 / 1e3 / requests.max(1) as f64),
        })
    );
    Ok(())
}

impl Client {
    fn write(&mut self, request: &[u8]) -> io::Result<()> {
        while self.written < request.len() {
            match self.stream.write(&request[self.written..]) {
                Ok(sent) => self.written += sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn turn(
        &mut self,
        request: &[u8],
        case: Case,
        buffer: &mut [u8],
        found: &mut Found,
    ) -> io::Result<()> {
        self.write(request)?;
        loop {
            let got = match self.stream.read(buffer) {
                Ok(0) => {
                    return Err(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "closed by the router",
                    ));
                }
                Ok(got) => got,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            };
            if self.first.is_none() {
                self.first = Some(self.asked.elapsed());
            }
            if !self.answer.take(&buffer[..got])? {
                continue;
            }
            let answer = std::mem::take(&mut self.answer);
            if answer.events != case.events() {
                let what = format!("{} events instead of {}", answer.events, case.events());
                return Err(io::Error::new(io::ErrorKind::InvalidData, what));
            }
            found.whole.push(self.asked.elapsed());
            found.first.extend(self.first.take());
            found.events += answer.events;
            (self.asked, self.written) = (Instant::now(), 0);
            self.write(request)?;
        }
    }
}

/// CPU time of all threads of a process, from `/proc/PID/task/TID/schedstat`.
fn cpu_time(pid: Option<u32>) -> io::Result<Duration> {
    let Some(pid) = pid else { return Ok(Duration::ZERO) };
    let mut sum = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = fs::read_to_string(task?.path().join("schedstat")).unwrap_or_default();
        sum += text.split(' ').next().and_then(|ns| ns.parse::<u64>().ok()).unwrap_or(0);
    }
    Ok(Duration::from_nanos(sum))
}
