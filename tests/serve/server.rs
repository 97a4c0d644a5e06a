//! The real binary on a free port, with a tiny model.

use crate::client::{Client, PATIENCE, Reply};
use crate::metrics::Metrics;
use baton::http::Method;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

pub const MODEL: &str = "llama-f32";

/// Tokens of the context of [`Server::start_long`].
pub const LONG_CONTEXT: u32 = 1 << 18;

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// `baton` with these arguments.
pub fn baton(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command.env_remove("BATON_LOG");
    command
}

pub struct Server {
    child: Child,
    pub address: SocketAddr,
    log: Arc<Mutex<String>>,
    /// Directory of a model that was made for this server.
    _made: Option<Made>,
}

/// A model's directory, deleted together with its server.
struct Made(PathBuf);

impl Made {
    /// A copy of the usual model.
    fn copy() -> Made {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = format!("baton-serve-{}-{number}", std::process::id());
        let made = Made(std::env::temp_dir().join(name));
        std::fs::create_dir(&made.0).unwrap();
        for entry in std::fs::read_dir(fixture(MODEL)).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), made.0.join(entry.file_name())).unwrap();
        }
        made
    }

    /// The same with a longer context.
    fn long() -> Made {
        let made = Made::copy();
        let config = std::fs::read_to_string(fixture(MODEL).join("config.json")).unwrap();
        let config = config.replace(
            r#""max_position_embeddings": 512"#,
            &format!(r#""max_position_embeddings": {LONG_CONTEXT}"#),
        );
        assert!(config.contains(&format!(r#""max_position_embeddings": {LONG_CONTEXT}"#)));
        std::fs::write(made.0.join("config.json"), config).unwrap();
        made
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Server {
    /// The usual model.
    pub fn start(flags: &[&str]) -> Server {
        Server::start_model(&fixture(MODEL), flags)
    }

    /// The usual model with this text at the end of its chat template.
    pub fn start_template(more: &str, flags: &[&str]) -> Server {
        let made = Made::copy();
        let path = made.0.join("chat_template.jinja");
        let template = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, template.trim_end().to_owned() + more).unwrap();
        let mut server = Server::start_model(&made.0, flags);
        server._made = Some(made);
        server
    }

    /// The usual model with a context that is long enough for a request of [`endless`].
    pub fn start_long(flags: &[&str]) -> Server {
        let made = Made::long();
        let memory: &[&str] =
            if flags.contains(&"--kv-memory") { &[] } else { &["--kv-memory", "256MiB"] };
        let flags = [memory, flags].concat();
        let mut server = Server::start_model(&made.0, &flags);
        server._made = Some(made);
        server
    }

    pub fn start_model(model: &Path, flags: &[&str]) -> Server {
        let mut command = baton(&["serve", model.to_str().unwrap(), "--port", "0"]);
        if !flags.contains(&"--kv-memory") {
            command.args(["--kv-memory", "16MiB"]);
        }
        if !flags.contains(&"--served-model-name") {
            command.args(["--served-model-name", "tiny"]);
        }
        command.args(flags);
        Server::of_command(command)
    }

    /// A command that becomes a server.
    pub fn of_command(mut command: Command) -> Server {
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let (ready, address) = mpsc::channel();
        let log = Arc::<Mutex<String>>::default();
        let kept = log.clone();
        thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                // Shown if the test fails.
                eprintln!("{line}");
                kept.lock().unwrap().extend([&line, "\n"]);
                // A router listens, and a worker is ready.
                let address = line.split_once(" ready address=");
                let address = address.or_else(|| line.split_once(" listening address="));
                let address = address.map(|(_, rest)| rest);
                if let Some(address) = address.and_then(|rest| rest.split(' ').next()) {
                    let _ = ready.send(address.parse().unwrap());
                }
            }
        });
        let address = address.recv_timeout(PATIENCE).expect("the server becomes ready");
        Server { child, address, log, _made: None }
    }

    /// Lines of its log that contain `words`.
    pub fn said(&self, words: &str) -> Vec<String> {
        let log = self.log.lock().unwrap();
        log.lines().filter(|line| line.contains(words)).map(str::to_owned).collect()
    }

    /// The names of the server's threads.
    pub fn threads(&self) -> Vec<String> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let name = |task: std::io::Result<std::fs::DirEntry>| {
            std::fs::read_to_string(task.unwrap().path().join("comm")).unwrap().trim().to_owned()
        };
        tasks.map(name).collect()
    }

    pub fn connect(&self) -> Client {
        Client::new(self.address)
    }

    pub fn request(
        &self,
        method: Method,
        target: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Reply {
        let mut client = self.connect();
        client.send(method, target, headers, (method == Method::Post).then_some(body));
        client.reply(method)
    }

    pub fn get(&self, target: &str) -> Reply {
        self.request(Method::Get, target, &[], b"")
    }

    pub fn post(&self, target: &str, body: &Value) -> Reply {
        self.request(Method::Post, target, &[], body.to_string().as_bytes())
    }

    pub fn metrics(&self) -> Metrics {
        let reply = self.get("/metrics");
        assert_eq!(reply.status(), 200);
        Metrics::parse(reply.text())
    }

    /// Waits until no request runs and no page is held.
    #[track_caller]
    pub fn wait_until_idle(&self) {
        self.wait_until("idle", |metrics| {
            metrics.running() == 0.0 && metrics.waiting() == 0.0 && metrics.none_held()
        });
    }

    /// Waits until `so` holds for the metrics.
    #[track_caller]
    pub fn wait_until(&self, what: &str, so: impl Fn(&Metrics) -> bool) {
        let begun = Instant::now();
        loop {
            let metrics = self.metrics();
            if so(&metrics) {
                return;
            }
            assert!(begun.elapsed() < PATIENCE, "never {what}: {metrics:#?}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// The server still works. Requests of departed clients can fill the queue for a moment.
    #[track_caller]
    pub fn check_works(&self) {
        let body = serde_json::json!({"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0,
            "ignore_eos": true});
        let begun = Instant::now();
        let mut reply = self.post("/v1/completions", &body);
        while reply.status() == 429 && begun.elapsed() < PATIENCE {
            thread::sleep(Duration::from_millis(5));
            reply = self.post("/v1/completions", &body);
        }
        assert_eq!(reply.ok()["usage"]["completion_tokens"], 4);
    }

    /// The server answers to the model name `name`.
    #[track_caller]
    pub fn check_works_as(&self, name: &str) {
        let body = serde_json::json!({"model": name, "prompt": [5], "max_tokens": 1});
        assert_eq!(self.post("/v1/completions", &body).ok()["model"], name);
    }

    pub fn signal(&self, name: &str) {
        let status =
            Command::new("kill").args(["-s", name, &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }

    pub fn wait(&mut self) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(begun.elapsed() < PATIENCE, "the server does not end");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A router with a prefill worker and a decode worker of a model with a long context.
pub struct Routed {
    pub router: Server,
    pub workers: [Server; 2],
}

impl Routed {
    /// `shared` are flags of all processes, and `flags` those of the router.
    pub fn start(shared: &[&str], flags: &[&str]) -> Routed {
        let made = Made::long();
        let model = made.0.to_str().unwrap();
        let worker = |role: &'static str| {
            let common = [role, model, "--port", "0", "--bootstrap-port", "0", "--threads", "1"];
            let size = ["--kv-memory", "256MiB", "--served-model-name", "tiny"];
            Server::of_command(baton(&[&common[..], &size, shared].concat()))
        };
        let workers = ["prefill", "decode"].map(worker);
        let [prefill, decode] =
            workers.each_ref().map(|worker| format!("http://{}", worker.address));
        let named = ["router", "--port", "0", "--prefill", &prefill, "--decode", &decode];
        let mut router = Server::of_command(baton(&[&named[..], shared, flags].concat()));
        router._made = Some(made);
        let begun = Instant::now();
        while router.get("/health").status() != 200 {
            assert!(begun.elapsed() < PATIENCE, "the router never has a pair");
            thread::sleep(Duration::from_millis(20));
        }
        Routed { router, workers }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A stream that runs until its client stops it.
pub fn endless() -> Value {
    serde_json::json!({"prompt": [5, 6, 7], "max_tokens": 60000, "temperature": 0,
        "ignore_eos": true, "stream": true})
}
