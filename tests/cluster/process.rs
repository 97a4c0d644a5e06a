//! A `baton` process of a test. It starts on free ports, and drop ends it.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// No wait of a test is longer. A live process answers in milliseconds.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub struct Process {
    child: Child,
    pub address: SocketAddr,
    /// Of a prefill worker.
    pub bootstrap_port: u16,
    /// Of a prefill worker: the port that decode workers dial.
    pub control_port: u16,
    /// Of a decode worker: the port for tcp lanes.
    pub data_port: u16,
    log: Arc<Mutex<String>>,
    /// Reads the log until it ends.
    listener: Option<JoinHandle<()>>,
}

impl Process {
    /// Starts `baton ARGS` and waits until it is ready.
    pub fn start(args: &[&str]) -> Process {
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.args(args);
        Process::run(command)
    }

    /// Starts `baton ARGS` without waiting, because it possibly logs too little.
    pub fn unheard(args: &[&str]) -> Process {
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.args(args);
        Process::spawn(command).0
    }

    /// The same with a command that logs like `baton`.
    pub fn run(command: Command) -> Process {
        let (mut process, said) = Process::spawn(command);
        let mut ports = [("bootstrap_port=", 0), ("control_port=", 0), ("data_port=", 0)];
        loop {
            let line = said.recv_timeout(PATIENCE).expect("the process says that it is ready");
            for (name, port) in &mut ports {
                if let Some(found) = field(&line, name) {
                    *port = found.parse().expect("a port");
                }
            }
            if (line.contains(" ready ") || line.contains(" listening "))
                && let Some(address) = field(&line, "address=")
            {
                [process.bootstrap_port, process.control_port, process.data_port] =
                    ports.map(|(_, port)| port);
                process.address = address.parse().expect("an address");
                return process;
            }
        }
    }

    /// Returns the process and its log lines.
    // `drop` waits; a panic before it ends the whole test process.
    #[allow(clippy::zombie_processes)]
    fn spawn(mut command: Command) -> (Process, mpsc::Receiver<String>) {
        let mut child = command
            .stderr(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("the binary was built");
        let (lines, said) = mpsc::channel();
        let stderr = BufReader::new(child.stderr.take().expect("piped"));
        let log = Arc::<Mutex<String>>::default();
        let kept = log.clone();
        let listener = std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                eprintln!("{line}");
                kept.lock().unwrap().extend([&line, "\n"]);
                let _ = lines.send(line);
            }
        });
        let address = SocketAddr::from(([0; 4], 0));
        let listener = Some(listener);
        let process = Process {
            child,
            address,
            bootstrap_port: 0,
            control_port: 0,
            data_port: 0,
            log,
            listener,
        };
        (process, said)
    }

    /// Waits for its end. Returns its complete log.
    pub fn log_to_end(mut self) -> String {
        self.child.wait().expect("it was a child");
        self.listener.take().into_iter().for_each(|listener| listener.join().expect("it reads"));
        self.log.lock().unwrap().clone()
    }

    /// How often its log contains these words.
    pub fn times_said(&self, words: &str) -> usize {
        self.log.lock().unwrap().matches(words).count()
    }

    /// Whether its log contains these words.
    pub fn has_said(&self, words: &str) -> bool {
        self.times_said(words) > 0
    }

    /// Waits until its log contains these words.
    #[track_caller]
    pub fn await_said(&self, words: &str) {
        let begun = Instant::now();
        while !self.has_said(words) {
            assert!(begun.elapsed() < PATIENCE, "it never says: {words}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until its log contains these words this often.
    #[track_caller]
    pub fn await_times(&self, words: &str, times: usize) {
        let begun = Instant::now();
        while self.times_said(words) < times {
            assert!(begun.elapsed() < PATIENCE, "it does not say {words:?} {times} times");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// It runs, and none of its threads has panicked.
    #[track_caller]
    pub fn check_alive(&mut self) {
        assert_eq!(self.child.try_wait().expect("it was a child"), None, "the process has ended");
        assert!(!self.has_said("panicked"), "a thread has panicked");
    }

    /// Its threads, first `ctl`: the name and the CPUs of each in the kernel's format.
    pub fn threads(&self) -> Vec<(String, String)> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).expect("it runs");
        let mut tasks: Vec<_> = tasks.map(|task| task.expect("a thread").path()).collect();
        tasks.sort_by_key(|task| task.file_name().and_then(|id| id.to_str()?.parse::<u32>().ok()));
        let threads = tasks.iter().filter_map(|task| {
            // A thread can end while this function reads.
            let name = std::fs::read_to_string(task.join("comm")).ok()?.trim().to_owned();
            let status = std::fs::read_to_string(task.join("status")).ok()?;
            let cpus = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
            Some((name, cpus.trim().to_owned()))
        });
        threads.collect()
    }

    /// Its resident memory in bytes.
    pub fn resident(&self) -> u64 {
        self.memory("VmRSS:")
    }

    /// The same without files (its model is one) and without KV, which is shared.
    pub fn resident_alone(&self) -> u64 {
        self.memory("RssAnon:")
    }

    fn memory(&self, kind: &str) -> u64 {
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("it runs");
        let line = status.lines().find(|line| line.starts_with(kind)).expect("a line for it");
        let kib: u64 =
            line.split_whitespace().nth(1).and_then(|size| size.parse().ok()).expect("a number");
        kib << 10
    }

    /// Orders it to drain.
    pub fn terminate(&self) {
        self.signal("TERM");
    }

    /// Stops it.
    pub fn pause(&self) {
        self.signal("STOP");
    }

    /// Continues it.
    pub fn go_on(&self) {
        self.signal("CONT");
    }

    /// Sends it a signal.
    pub fn signal(&self, name: &str) {
        let (name, id) = (format!("-{name}"), self.child.id().to_string());
        assert!(Command::new("kill").args([name, id]).status().expect("kill is there").success());
    }

    /// Waits for its end.
    pub fn exit_code(mut self) -> Option<i32> {
        self.child.wait().expect("it was a child").code()
    }

    /// Kills it without a clean shutdown.
    pub fn kill(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it was a child");
    }

    pub fn get(&self, path: &str) -> (u16, String) {
        get(self.address, path)
    }

    pub fn post(&self, path: &str, body: &str) -> (u16, String) {
        post(self.address, path, body)
    }

    /// The sum of all values of a metric in lines that begin with `name` and contain `label`.
    #[track_caller]
    pub fn metric(&self, name: &str, label: &str) -> f64 {
        let (_, metrics) = self.get("/metrics");
        sum(&metrics, name, label)
    }

    /// Waits until nothing is left of any request: no page is in use or leased, and no request runs
    /// or waits.
    #[track_caller]
    pub fn await_idle(&self) {
        self.await_idle_within(PATIENCE);
    }

    /// Like [`Process::await_idle`], with its own deadline.
    #[track_caller]
    pub fn await_idle_within(&self, patience: Duration) {
        let begun = Instant::now();
        loop {
            let (_, metrics) = self.get("/metrics");
            let pages = |state: &str| sum(&metrics, "baton_pages{", &format!("state=\"{state}\""));
            let taken = ["in_use", "leased"].map(pages);
            let requests = ["sglang:num_running_reqs{", "vllm:num_requests_waiting{"];
            let requests = requests.map(|name| sum(&metrics, name, ""));
            if taken == [0.0; 2] && requests == [0.0; 2] {
                return;
            }
            assert!(
                begun.elapsed() < patience,
                "pages in use, leased: {taken:?}; requests running, waiting: {requests:?}"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The sum of all values in lines that begin with `name` and contain `label`. There must be one.
#[track_caller]
pub fn sum(metrics: &str, name: &str, label: &str) -> f64 {
    let lines = metrics.lines().filter(|line| line.starts_with(name) && line.contains(label));
    let values =
        lines.map(|line| line.rsplit(' ').next().and_then(|value| value.parse::<f64>().ok()));
    values.map(|value| value.expect("a number")).reduce(|a, b| a + b).expect("the metric is there")
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn get(address: SocketAddr, path: &str) -> (u16, String) {
    exchange(address, &format!("GET {path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n"))
}

/// With this key as a bearer token, if there is one.
pub fn ask(
    address: SocketAddr,
    method: &str,
    path: &str,
    key: Option<&str>,
    body: &str,
) -> (u16, String) {
    let key = key.map(|key| format!("authorization: Bearer {key}\r\n")).unwrap_or_default();
    let head = format!("{method} {path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\n{key}");
    exchange(address, &format!("{head}content-length: {}\r\n\r\n{body}", body.len()))
}

pub fn post(address: SocketAddr, path: &str, body: &str) -> (u16, String) {
    post_with(address, path, "", body)
}

/// `fields` are complete header lines.
pub fn post_with(address: SocketAddr, path: &str, fields: &str, body: &str) -> (u16, String) {
    exchange(address, &asking(path, fields, body))
}

fn asking(path: &str, fields: &str, body: &str) -> String {
    let length = body.len();
    let head = format!("POST {path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\n{fields}");
    format!("{head}content-length: {length}\r\n\r\n{body}")
}

/// Like [`get`], for a process that is possibly gone.
pub fn try_get(address: SocketAddr, path: &str) -> io::Result<(u16, String)> {
    try_exchange(address, &format!("GET {path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n"))
}

/// Like [`post_with`], for a process that is possibly gone.
pub fn try_post(
    address: SocketAddr,
    path: &str,
    fields: &str,
    body: &str,
) -> io::Result<(u16, String)> {
    try_exchange(address, &asking(path, fields, body))
}

/// Like [`try_exchange`], for a process that is there.
fn exchange(address: SocketAddr, request: &str) -> (u16, String) {
    try_exchange(address, request).expect("it listens")
}

/// One request on its own connection. Returns the body without chunk sizes.
fn try_exchange(address: SocketAddr, request: &str) -> io::Result<(u16, String)> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    // A killed process resets the connection. What it sent before counts.
    let _ = stream.read_to_string(&mut answer);
    Ok(parse(&answer))
}

/// Status and body of an answer, without chunk sizes. The status is 0 if there is no answer.
pub fn parse(answer: &str) -> (u16, String) {
    let status = answer.get(9..12).and_then(|status| status.parse().ok()).unwrap_or(0);
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((answer, ""));
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
