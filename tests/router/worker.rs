//! A scripted worker. It answers `/health`, `/server_info` and `/v1/loads` itself and passes every
//! other request to the test.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Longer than anything here takes; ends a test that hangs.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub struct Worker {
    pub address: SocketAddr,
    shared: Arc<Shared>,
    asked: Receiver<Asked>,
}

/// Status and body.
pub type IdentityReply = Option<(&'static str, &'static str)>;

struct Shared {
    stopped: AtomicBool,
    /// Reported by `/health`.
    draining: AtomicBool,
    /// Number of health probes so far.
    probes: AtomicUsize,
    /// Number of probes that it will not answer.
    ignored: AtomicUsize,
    /// Probes wait for their answers.
    holds: AtomicBool,
    /// Number of identity queries so far.
    identity_queries: AtomicUsize,
    /// Its answer to identity queries.
    identity: Mutex<IdentityReply>,
    /// Its load report, and how often it was sent.
    report: Mutex<Option<String>>,
    reports: AtomicUsize,
    connections: Mutex<Vec<TcpStream>>,
}

/// A request as the worker received it, to be answered by the test.
pub struct Asked {
    pub line: String,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// The connection that it came on, counted from 0.
    pub connection: usize,
    stream: TcpStream,
    /// Ends with the connection.
    open: Receiver<()>,
}

impl Worker {
    pub fn start() -> Worker {
        Worker::with_identity("{}")
    }

    /// A worker that answers identity queries with this.
    pub fn with_identity(identity: &'static str) -> Worker {
        Worker::at("127.0.0.1:0".parse().unwrap(), Some(("200 OK", identity)))
    }

    /// A worker at this address that answers identity queries with this, or not at all.
    pub fn at(address: SocketAddr, identity: IdentityReply) -> Worker {
        let listener = TcpListener::bind(address).unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            stopped: false.into(),
            draining: false.into(),
            probes: 0.into(),
            ignored: 0.into(),
            holds: false.into(),
            identity_queries: AtomicUsize::new(0),
            identity: Mutex::new(identity),
            report: Mutex::default(),
            reports: AtomicUsize::new(0),
            connections: Mutex::default(),
        });
        let (sender, asked) = channel();
        let inside = shared.clone();
        thread::spawn(move || accept(&listener, &inside, &sender));
        Worker { address, shared, asked }
    }

    /// The next request.
    pub fn asked(&self) -> Asked {
        self.asked.recv_timeout(PATIENCE).expect("a request comes")
    }

    /// A request, if there is one.
    pub fn try_asked(&self) -> Option<Asked> {
        self.asked.try_recv().ok()
    }

    /// Answers identity queries with this from now on.
    pub fn will_identify(&self, identity: &'static str) {
        *self.shared.identity.lock().unwrap() = Some(("200 OK", identity));
    }

    /// How many identity queries it has received.
    pub fn identity_queries(&self) -> usize {
        self.shared.identity_queries.load(Ordering::SeqCst)
    }

    /// Waits until it has received an identity query.
    pub fn await_identity_query(&self) {
        for _ in 0..400 {
            if self.shared.identity_queries.load(Ordering::SeqCst) > 0 {
                return;
            }
            thread::sleep(Duration::from_millis(50));
        }
        panic!("there is no identity query");
    }

    /// Reports this many sequences from now on.
    pub fn will_report(&self, sequences: u32) {
        let used = 100 * sequences;
        let report = format!(
            r#"{{"loads":[{{"num_running_reqs":{sequences},"num_waiting_reqs":0,
                "num_used_tokens":{used}}}]}}"#
        );
        *self.shared.report.lock().unwrap() = Some(report);
    }

    /// Waits for two more load queries, so that the first answer has been read.
    pub fn await_report(&self) {
        let (begun, last) = (Instant::now(), self.shared.reports.load(Ordering::SeqCst) + 2);
        while self.shared.reports.load(Ordering::SeqCst) < last {
            assert!(begun.elapsed() < PATIENCE, "it is not asked what it has to do");
            thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn is_unasked(&self) -> bool {
        matches!(self.asked.try_recv(), Err(TryRecvError::Empty))
    }

    /// Reports from now on that it drains.
    pub fn drain(&self) {
        self.shared.draining.store(true, Ordering::SeqCst);
    }

    /// Does not answer this many of the next probes.
    pub fn ignore_probes(&self, count: usize) {
        self.shared.ignored.store(count, Ordering::SeqCst);
    }

    /// Whether answers to probes wait from now on. They report the state at the time of the probe.
    pub fn hold_probes(&self, holds: bool) {
        self.shared.holds.store(holds, Ordering::SeqCst);
    }

    /// Waits until it has received this many more probes.
    pub fn await_probes(&self, count: usize) {
        let (begun, last) = (Instant::now(), self.shared.probes.load(Ordering::SeqCst) + count);
        while self.shared.probes.load(Ordering::SeqCst) < last {
            assert!(begun.elapsed() < PATIENCE, "it is not asked how it is");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Refuses connections from now on, and closes the open ones.
    pub fn stop(&self) {
        self.shared.stopped.store(true, Ordering::SeqCst);
        // Wakes the accepting thread, which then closes the port.
        let _ = TcpStream::connect(self.address);
        while TcpStream::connect(self.address).is_ok() {
            thread::yield_now();
        }
        for connection in self.shared.connections.lock().unwrap().drain(..) {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }
}

impl Asked {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).expect("a JSON body")
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// A complete answer.
    pub fn answer(&mut self, status: &str, body: &str) {
        let length = body.len();
        let head = format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\n");
        self.send(
            format!("{head}retry-after: 7\r\ncontent-length: {length}\r\n\r\n{body}").as_bytes(),
        );
    }

    pub fn open_stream(&mut self) {
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n";
        self.send(format!("{head}transfer-encoding: chunked\r\n\r\n").as_bytes());
    }

    pub fn chunk(&mut self, data: &str) {
        self.send(format!("{:x}\r\n{data}\r\n", data.len()).as_bytes());
    }

    pub fn end_stream(&mut self) {
        self.send(b"0\r\n\r\n");
    }

    /// Sends this again and again, until none of it was read for a while. Returns how often it was
    /// sent completely.
    pub fn flood(&mut self, data: &str) -> usize {
        self.stream.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
        let chunk = format!("{:x}\r\n{data}\r\n", data.len());
        (0..1 << 12).take_while(|_| self.stream.write_all(chunk.as_bytes()).is_ok()).count()
    }

    /// Waits until the other side has closed the connection.
    pub fn is_closed(&self) -> bool {
        self.open.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Disconnected)
    }

    pub fn is_open(&self) -> bool {
        self.open.try_recv() == Err(TryRecvError::Empty)
    }

    /// Breaks the connection.
    pub fn hang_up(self) {
        self.stream.shutdown(Shutdown::Both).unwrap();
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>, asked: &Sender<Asked>) {
    for (number, stream) in listener.incoming().enumerate() {
        if shared.stopped.load(Ordering::SeqCst) {
            return;
        }
        let stream = stream.unwrap();
        shared.connections.lock().unwrap().push(stream.try_clone().unwrap());
        let (asked, shared) = (asked.clone(), shared.clone());
        thread::spawn(move || serve(stream, number, &shared, &asked));
    }
}

/// Reads requests until the connection ends.
fn serve(
    mut stream: TcpStream,
    connection: usize,
    shared: &Shared,
    asked: &Sender<Asked>,
) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    // Each request of this connection is notified of its end.
    let mut ends = Vec::new();
    loop {
        let line = line(&mut reader)?;
        let mut headers = Vec::new();
        loop {
            let field = self::line(&mut reader)?;
            if field.is_empty() {
                break;
            }
            let (name, value) = field.split_once(": ")?;
            headers.push((name.to_lowercase(), value.to_owned()));
        }
        let length = headers.iter().find(|(name, _)| name == "content-length");
        let mut body = vec![0; length.map_or(0, |(_, value)| value.parse().unwrap())];
        reader.read_exact(&mut body).ok()?;
        let report;
        let own = match line.as_str() {
            "GET /health HTTP/1.1" => {
                shared.probes.fetch_add(1, Ordering::SeqCst);
                let ignored = |left: usize| left.checked_sub(1);
                if shared.ignored.fetch_update(Ordering::SeqCst, Ordering::SeqCst, ignored).is_ok()
                {
                    continue;
                }
                let drains = shared.draining.load(Ordering::SeqCst);
                while shared.holds.load(Ordering::SeqCst) && !shared.stopped.load(Ordering::SeqCst)
                {
                    thread::sleep(Duration::from_millis(5));
                }
                Some(Some(("200 OK", if drains { "draining" } else { "OK" })))
            }
            "GET /server_info HTTP/1.1" => {
                shared.identity_queries.fetch_add(1, Ordering::SeqCst);
                Some(*shared.identity.lock().unwrap())
            }
            "GET /v1/loads HTTP/1.1" => {
                report = shared.report.lock().unwrap().clone();
                shared.reports.fetch_add(1, Ordering::SeqCst);
                Some(Some(
                    report.as_deref().map_or(("404 Not Found", ""), |report| ("200 OK", report)),
                ))
            }
            _ => None,
        };
        if let Some(answer) = own {
            if let Some((status, body)) = answer {
                let length = body.len();
                let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n{body}");
                stream.write_all(answer.as_bytes()).ok()?;
            }
            continue;
        }
        let (end, open) = channel();
        ends.push(end);
        let stream = stream.try_clone().ok()?;
        asked.send(Asked { line, headers, body, connection, stream, open }).ok()?;
    }
}

fn line(reader: &mut impl BufRead) -> Option<String> {
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|&count| count > 0)?;
    Some(line.trim_end().to_owned())
}
