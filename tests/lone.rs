//! A single prefill or decode worker, and a decode worker with a prefill worker at a host name.

#[path = "cluster/process.rs"]
#[allow(dead_code)] // Others use the rest.
mod process;

use process::{PATIENCE, Process, post};
use serde_json::{Value, json};
use std::fs::File;
use std::net::{IpAddr, ToSocketAddrs};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/llama-f32");

fn start(command: &str, more: &[&str]) -> Process {
    let common = [
        command,
        MODEL,
        "--port",
        "0",
        "--kv-memory",
        "8MiB",
        "--threads",
        "1",
        "--max-running-requests",
        "4",
    ];
    Process::start(&[&common[..], more].concat())
}

fn body(prefill: &Process, host: &str, room: u64) -> String {
    let prompt: Vec<u32> = (10..310).collect();
    json!({
        "prompt": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": true,
        "return_timings": true,
        "bootstrap_host": host, "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": room,
    })
    .to_string()
}

/// Both legs at once; decode's answer.
fn dual(prefill: &Process, decode: &Process, body: &str) -> Value {
    let (address, same) = (prefill.address, body.to_owned());
    let reader = thread::spawn(move || post(address, "/v1/completions", &same));
    let (status, answer) = decode.post("/v1/completions", body);
    assert_eq!(status, 200, "{answer}");
    let read = reader.join().unwrap();
    assert_eq!(read.0, 200, "{}", read.1);
    serde_json::from_str(&answer).unwrap()
}

#[test]
fn a_worker_alone_shows_that_tokens_come() {
    for (command, flags) in [("prefill", &["--bootstrap-port", "0"][..]), ("decode", &[])] {
        let worker = start(command, flags);
        for _ in 0..3 {
            let (status, answer) = worker.get("/health_generate");
            assert_eq!(status, 200, "{command}: {answer}");
            let answer: Value = serde_json::from_str(&answer).unwrap();
            let tokens = if command == "prefill" { 1 } else { 2 };
            assert_eq!(answer["meta_info"]["completion_tokens"], tokens, "{answer}");
        }
        // Without a router other requests are refused.
        let (status, answer) = worker.post("/v1/completions", r#"{"prompt":[5],"max_tokens":1}"#);
        assert!(status == 400 && answer.contains("bootstrap_room"), "{status} {answer}");
        worker.await_idle();
    }
}

#[test]
fn trials_do_not_disturb_a_hand_off() {
    let (prefill, decode) = (start("prefill", &["--bootstrap-port", "0"]), start("decode", &[]));
    let expected = dual(&prefill, &decode, &body(&prefill, "127.0.0.1", 1))["choices"].clone();
    for room in 2..8 {
        for worker in [&prefill, &decode] {
            assert_eq!(worker.get("/health_generate").0, 200);
        }
        assert_eq!(
            dual(&prefill, &decode, &body(&prefill, "127.0.0.1", room))["choices"],
            expected
        );
    }
    prefill.await_idle();
    decode.await_idle();
}

/// Without the flag the fake host is an address like any other.
#[test]
fn no_request_waits_at_the_fake_host_if_the_flag_is_set() {
    let prefill = start("prefill", &["--bootstrap-port", "0", "--fake-bootstrap"]);
    for room in 0..5 {
        let (status, answer) = prefill.post("/v1/completions", &body(&prefill, "2.2.2.2", room));
        assert_eq!(status, 200, "{answer}");
    }
    prefill.await_idle();
}

/// Decode cannot see what prefill does, and does not call its own wait prefill's work.
#[test]
fn decodes_timings_name_its_wait_for_kv() {
    let (prefill, decode) = (start("prefill", &["--bootstrap-port", "0"]), start("decode", &[]));
    let begun = Instant::now();
    let (address, late) = (prefill.address, body(&prefill, "127.0.0.1", 9));
    let same = late.clone();
    let delay = std::time::Duration::from_millis(700);
    // Prefill's leg comes late: nothing of this time is prefill.
    let reader = thread::spawn(move || {
        thread::sleep(delay);
        post(address, "/v1/completions", &same)
    });
    let (status, answer) = decode.post("/v1/completions", &late);
    assert_eq!(status, 200, "{answer}");
    assert_eq!(reader.join().unwrap().0, 200);
    let whole = begun.elapsed().as_secs_f64() * 1e3;
    let answer: Value = serde_json::from_str(&answer).unwrap();
    let timings = &answer["timings"];
    let ms = |name: &str| timings[name].as_f64().unwrap_or_else(|| panic!("no {name}: {timings}"));
    assert_eq!((&timings["prefill_tokens"], &timings["decode_tokens"]), (&json!(300), &json!(4)));
    assert!(timings["handover_ms"].is_null(), "{timings}");
    assert_eq!(
        (&timings["transport"], timings["handover_bytes"].as_u64() > Some(0)),
        (&json!("shm"), true)
    );
    // The session's set-up comes before the wait, and can take of the delay.
    assert!(ms("prefill_ms") > 0.0 && ms("prefill_ms") <= whole - 700.0, "{timings} of {whole}");
    assert!(
        ms("kv_wait_ms") > ms("prefill_ms") && ms("kv_wait_ms") <= whole,
        "{timings} of {whole}"
    );
    // The stages of the time to first token keep the two apart as well.
    let seconds = |stage: &str| {
        let (_, metrics) = decode.get("/metrics");
        let label = format!("stage=\"{stage}\"");
        let is_sum =
            |line: &&str| line.starts_with("baton_stage_seconds_sum{") && line.contains(&label);
        let line = metrics.lines().find(is_sum).expect("a stage").to_owned();
        line.rsplit(' ').next().unwrap().parse::<f64>().unwrap() * 1e3
    };
    assert!(
        (seconds("prefill") - ms("prefill_ms")).abs() < 1.0,
        "{} {timings}",
        seconds("prefill")
    );
    assert!(seconds("handover") > 0.0);
}

/// A name of this host that is neither an address nor `localhost`, if it has one that leads to it.
fn name() -> Option<String> {
    let hostname = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let names = [hostname.trim(), "localhost.localdomain", "ip6-localhost", "LOCALHOST"];
    let leads_here = |name: &&str| {
        let found = (*name, 0)
            .to_socket_addrs()
            .map(|addresses| addresses.map(|a| a.ip()).collect::<Vec<_>>());
        found.is_ok_and(|found| found.iter().any(IpAddr::is_ipv4))
    };
    names.into_iter().find(leads_here).map(str::to_owned)
}

#[test]
fn a_bootstrap_host_may_be_a_name() {
    let Some(name) = name() else {
        eprintln!("SKIPPED: this host has no name that leads to it");
        return;
    };
    eprintln!("the name is {name}");
    let prefill = start("prefill", &["--bootstrap-port", "0", "--host", "0.0.0.0", "--insecure"]);
    let decode = start("decode", &["--bootstrap-allow", "0.0.0.0/0"]);
    for room in 1..4 {
        dual(&prefill, &decode, &body(&prefill, &name, room));
    }
    // Only a name's addresses decide whether it is dialled.
    let strict = start("decode", &["--bootstrap-allow", "203.0.113.0/24"]);
    let begun = Instant::now();
    for host in [name.as_str(), "no-such-host.invalid"] {
        let (status, answer) = strict.post("/v1/completions", &body(&prefill, host, 7));
        assert!(status == 502 && begun.elapsed() < PATIENCE, "{host}: {status} {answer}");
    }
    strict.await_idle();
}

/// A model can take minutes to load. A signal ends the process before that, with status 0.
#[test]
fn a_process_that_is_told_to_end_while_it_starts_ends_well() {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};
    for command in ["serve", "prefill", "decode"] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_baton"))
            .args([command, MODEL, "--port", "0", "--kv-memory", "8MiB"])
            .args(if command == "prefill" { &["--bootstrap-port", "0"][..] } else { &[] })
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        assert!(lines.by_ref().any(|line| line.unwrap().contains("opening")));
        assert!(
            Command::new("kill")
                .args(["-TERM", &child.id().to_string()])
                .status()
                .unwrap()
                .success()
        );
        lines.for_each(drop);
        assert_eq!(child.wait().unwrap().code(), Some(0), "{command}");
    }
}

/// The error of `baton ARGS`, which must not start, and its status.
fn refusal(args: &[&str]) -> (Option<i32>, String) {
    let output =
        std::process::Command::new(env!("CARGO_BIN_EXE_baton")).args(args).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    let error = said.lines().find(|line| line.starts_with("error: ")).unwrap_or_default();
    (output.status.code(), error.to_owned())
}

/// The model does not exist, so a worker that looks for no device ends with another error.
#[test]
fn a_worker_that_must_use_rdma_does_not_start_without_a_device() {
    for role in ["prefill", "decode"] {
        let refusal =
            |flags: &[&str]| refusal(&[&[role, "/no/such/model", "--port", "0"], flags].concat());
        for transfer in ["auto", "rdma"] {
            let flags = ["--transfer", transfer, "--rdma-devices", "no_such_nic"];
            let (status, error) = refusal(&flags);
            assert_eq!(status, Some(1), "{error}");
            assert!(error.starts_with("error: --rdma-devices: "), "{error}");
        }
        let has_devices = std::fs::read_dir("/sys/class/infiniband")
            .is_ok_and(|mut devices| devices.next().is_some());
        if !has_devices {
            let (status, error) = refusal(&["--transfer", "rdma"]);
            assert_eq!(status, Some(1), "{error}");
            assert!(error.starts_with("error: --transfer: rdma: "), "{error}");
        }
    }
}

/// Opens a named pipe for writing as soon as a process reads it. The second handle waits in
/// writes; the first one keeps the pipe open until then.
fn open_read_pipe(path: &Path) -> File {
    let deadline = Instant::now() + PATIENCE;
    let _first = loop {
        match File::options().write(true).custom_flags(libc::O_NONBLOCK).open(path) {
            Ok(first) => break first,
            Err(error) => assert!(Instant::now() < deadline, "no process reads: {error}"),
        }
        thread::sleep(Duration::from_millis(5));
    };
    File::options().write(true).open(path).unwrap()
}

/// The model waits in a pipe, and no port is open. A client would take an open port for a server
/// that answers.
#[test]
fn a_worker_opens_its_ports_after_it_has_loaded_its_model() {
    use std::net::{Ipv4Addr, TcpListener, TcpStream};
    let directory = std::env::temp_dir().join(format!("baton-lone-{}", std::process::id()));
    for command in ["serve", "prefill", "decode"] {
        std::fs::create_dir(&directory).unwrap();
        for entry in std::fs::read_dir(MODEL).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), directory.join(entry.file_name())).unwrap();
        }
        let tokenizer = directory.join("tokenizer.json");
        std::fs::remove_file(&tokenizer).unwrap();
        let made = std::process::Command::new("mkfifo").arg(&tokenizer).status().unwrap();
        assert!(made.success());
        let free = [(); 2].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
        let ports = free.map(|listener| listener.local_addr().unwrap().port());
        let is_open = |port: &u16| TcpStream::connect((Ipv4Addr::LOCALHOST, *port)).is_ok();
        let [http, bootstrap] = ports.map(|port| port.to_string());
        let mut args = vec![command, directory.to_str().unwrap(), "--port", &http];
        args.extend(["--kv-memory", "8MiB", "--threads", "1"]);
        let ports = if command == "prefill" { &ports[..] } else { &ports[..1] };
        if command == "prefill" {
            args.extend(["--bootstrap-port", &bootstrap]);
        }
        let worker = Process::unheard(&args);
        let mut pipe = open_read_pipe(&tokenizer);
        assert!(!ports.iter().any(is_open), "{command}: a port is open while the model loads");
        let text = std::fs::read(format!("{MODEL}/tokenizer.json")).unwrap();
        std::io::Write::write_all(&mut pipe, &text).unwrap();
        drop(pipe);
        worker.await_said(" ready ");
        assert!(ports.iter().all(is_open), "{command}");
        drop(worker);
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
