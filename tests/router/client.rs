//! A client of the router, and the router's process.

use crate::worker::{PATIENCE, Worker};
use baton::http::client::{ResponseDecoder, ResponseEvent, ResponseHead};
use baton::http::{HttpLimits, Method};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// A `baton router` process, killed on drop.
pub struct Router {
    child: Child,
    address: String,
    /// Its log since it listens.
    log: Arc<Mutex<String>>,
}

impl Router {
    /// A router with these workers. Prefill workers have the bootstrap ports 9000, 9001 and so on.
    pub fn start(prefill: &[&Worker], decode: &[&Worker], flags: &[&str]) -> Router {
        let mut args: Vec<String> = flags.iter().map(|flag| flag.to_string()).collect();
        for (number, worker) in prefill.iter().enumerate() {
            args.extend(["--prefill".into(), url(worker), format!("{}", 9000 + number)]);
        }
        for worker in decode {
            args.extend(["--decode".into(), url(worker)]);
        }
        Router::run(&args)
    }

    /// A router with these arguments and a free port.
    pub fn run(args: &[String]) -> Router {
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.args(["router", "--port", "0"]).args(args);
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let address = lines.by_ref().map_while(Result::ok).find_map(|line| {
            line.split(' ').find_map(|word| word.strip_prefix("address=").map(str::to_owned))
        });
        let log = Arc::<Mutex<String>>::default();
        let kept = log.clone();
        // The pipe must be read, otherwise it blocks the router's log.
        thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                eprintln!("{line}");
                kept.lock().unwrap().extend([&line, "\n"]);
            }
        });
        Router { child, address: address.expect("it says where it listens"), log }
    }

    /// Whether its log, as far as it was read, contains these words.
    pub fn has_said(&self, words: &str) -> bool {
        self.log.lock().unwrap().contains(words)
    }

    /// How often its log, as far as it was read, contains these words.
    pub fn times_said(&self, words: &str) -> usize {
        self.log.lock().unwrap().matches(words).count()
    }

    /// Waits until its log contains these words. The log is read a moment after it is written.
    #[track_caller]
    pub fn await_said(&self, words: &str) {
        let begun = Instant::now();
        while !self.has_said(words) {
            assert!(begun.elapsed() < PATIENCE, "it never says: {words}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Like [`Router::start`], once it has a pair.
    pub fn ready(prefill: &[&Worker], decode: &[&Worker], flags: &[&str]) -> Router {
        let router = Router::start(prefill, decode, flags);
        router.wait_for("/readiness", 200);
        router
    }

    pub fn wait_for(&self, path: &str, status: u16) {
        for _ in 0..400 {
            if self.get(path).answer().0 == status {
                return;
            }
            thread::sleep(Duration::from_millis(50));
        }
        panic!("{path} never has status {status}");
    }

    /// Waits until this many workers are up.
    pub fn wait_for_workers(&self, count: usize) {
        let is_up = |line: &str| line.starts_with("smg_worker_health{") && line.ends_with(" 1");
        for _ in 0..400 {
            if self.get("/metrics").answer().1.lines().filter(|line| is_up(line)).count() == count {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
        panic!("{count} workers are never up");
    }

    pub fn get(&self, path: &str) -> Client {
        let mut client = self.connect();
        client.send(&format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n"));
        client
    }

    pub fn post(&self, path: &str, body: &str) -> Client {
        let mut client = self.connect();
        client.post(path, "", body);
        client
    }

    pub fn connect(&self) -> Client {
        Router::client_of(&self.address)
    }

    /// A client of the server at this address.
    pub fn client_of(address: &str) -> Client {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Client { stream, decoder: decoder(), input: Vec::new(), head: None }
    }

    pub fn terminate(&self) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    }

    pub fn exit_status(mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

/// A worker's URL.
pub fn url(worker: &Worker) -> String {
    format!("http://{}", worker.address)
}

impl Drop for Router {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A client's connection.
pub struct Client {
    stream: TcpStream,
    decoder: ResponseDecoder,
    input: Vec<u8>,
    pub head: Option<ResponseHead>,
}

impl Client {
    /// `fields` are complete header lines.
    pub fn post(&mut self, path: &str, fields: &str, body: &str) {
        self.ask("POST", path, fields, body);
    }

    /// Like [`Client::post`], with any method.
    pub fn ask(&mut self, method: &str, path: &str, fields: &str, body: &str) {
        let length = body.len();
        self.send(&format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\n{fields}content-length: {length}\r\n\r\n{body}"
        ));
    }

    fn send(&mut self, request: &str) {
        (self.decoder, self.head) = (decoder(), None);
        self.stream.write_all(request.as_bytes()).unwrap();
    }

    /// The next piece of the body. `None` at its proper end.
    pub fn piece(&mut self) -> Option<String> {
        loop {
            let (used, event) = self.decoder.read(&self.input).expect("an answer in HTTP");
            let piece = match event {
                Some(ResponseEvent::Head(head)) => {
                    self.head = Some(head);
                    None
                }
                Some(ResponseEvent::Body(piece)) => {
                    Some(String::from_utf8_lossy(piece).into_owned())
                }
                Some(ResponseEvent::End { .. }) => {
                    self.input.drain(..used);
                    return None;
                }
                None => {
                    self.fill();
                    continue;
                }
            };
            self.input.drain(..used);
            if piece.is_some() {
                return piece;
            }
        }
    }

    /// Status and body.
    pub fn answer(&mut self) -> (u16, String) {
        let body = std::iter::from_fn(|| self.piece()).collect();
        (self.head.as_ref().expect("a head comes first").status, body)
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.as_ref().and_then(|head| head.headers.get(name))
    }

    fn fill(&mut self) {
        self.input.clear();
        self.input.resize(64 << 10, 0);
        let count = self.stream.read(&mut self.input).expect("an answer comes");
        assert!(count > 0, "the connection is closed before the answer's end");
        self.input.truncate(count);
    }
}

fn decoder() -> ResponseDecoder {
    ResponseDecoder::new(Method::Post, HttpLimits { body: usize::MAX, ..HttpLimits::default() })
}
