//! `baton bench transfer` as users run it: rows, two separate processes, and errors.

use baton::cmd::bench::transfer::Survey;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

fn bench(arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["bench", "transfer"]).args(arguments.split_whitespace()).stdin(Stdio::null());
    command
}

fn run(arguments: &str) -> Output {
    bench(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// The rows of a run that must go well, and its standard error.
fn measured(arguments: &str) -> (Vec<Value>, String) {
    let output = run(arguments);
    let said = text(&output.stderr).to_owned();
    assert!(output.status.success(), "{}{said}", text(&output.stdout));
    let rows = text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap());
    (rows.collect(), said)
}

fn rows(arguments: &str) -> Vec<Value> {
    measured(arguments).0
}

#[test]
fn every_small_case_goes_each_way_and_is_verified() {
    let rows = rows("--case small --duration 0 --json");
    let named = |case: &str, layout: &str, transport: &str| {
        let found = rows.iter().find(|row| {
            row["case"] == case && row["layout"] == layout && row["transport"] == transport
        });
        found.unwrap_or_else(|| panic!("no row {case} {layout} {transport}"))
    };
    assert_eq!(rows.len(), 4 * 2 * 2);
    for row in &rows {
        assert_eq!(row["verified"], true, "{row}");
        for field in ["p50_us", "p99_us", "gb_per_s", "limit_p50_us", "ratio"] {
            assert!(row[field].as_f64().unwrap() > 0.0, "{field}: {row}");
        }
        assert!(row["runs"].as_u64().unwrap() >= 5, "{row}");
    }
    // A block per page and buffer, or one per page; as neighbours of random pages hardly ever are
    // neighbours.
    let copies = |case, layout| named(case, layout, "shm")["work_requests"].as_f64().unwrap();
    assert!((200.0..=224.0).contains(&copies("qwen-64", "layer-major")));
    assert!((3.0..=4.0).contains(&copies("qwen-64", "page-major")));
    assert_eq!(named("tiny-2k", "page-major", "tcp")["bytes"], 2048);
}

#[test]
fn lanes_and_busy_polling_move_the_same_bytes() {
    for arguments in [
        "--case smol-128 --transport tcp --layout page-major --lanes 3 --duration 0 --json",
        "--case smol-128 --transport tcp --layout page-major --lanes 32 --duration 0 --json",
        "--case smol-128 --transport tcp --layout layer-major --busy-poll --duration 0 --json",
        "--case smol-128 --transport shm --layout layer-major --busy-poll --duration 0 --json",
        "--pages 7 --layers 3 --item-bytes 4096 --fragmented --layout layer-major --duration 0 \
         --json",
    ] {
        assert!(rows(arguments).iter().all(|row| row["verified"] == true), "{arguments}");
    }
}

#[test]
fn workers_of_other_layouts_and_ranks_fit_together() {
    for arguments in [
        "--case qwen-64 --src-tp 2 --dst-tp 4 --layout layer-to-page --duration 0 --json",
        "--case qwen-64 --src-tp 4 --dst-tp 1 --layout page-to-layer --duration 0 --json",
        "--case smol-128 --src-tp 3 --dst-tp 6 --layout layer-major --duration 0 --json",
        "--case p1-32 --src-tp 8 --dst-tp 16 --layout page-major --duration 0 --json",
        // One latent on all ranks.
        "--case tiny-2k --src-tp 4 --dst-tp 2 --layout page-major --duration 0 --json",
    ] {
        let rows = rows(arguments);
        assert!(rows.len() >= 2 && rows.iter().all(|row| row["verified"] == true), "{arguments}");
    }
    let twice =
        &rows("--case smol-128 --src-tp 3 --dst-tp 6 --transport tcp --duration 0 --json")[0];
    assert_eq!(twice["bytes"], 2 * 8 * 60 * (6 << 10), "each replica its own");
    assert_eq!((&twice["src_tp"], &twice["dst_tp"]), (&Value::from(3), &Value::from(6)));
}

#[test]
fn hand_offs_through_the_library_are_beside_direct_ones() {
    let (rows, said) =
        measured("--case smol-128 --src-tp 3 --dst-tp 6 --through-library --duration 0 --json");
    // The kernel counts system calls for root alone, and not on each host.
    let uncounted = said.split_once("system calls are not counted: ").map(|(_, why)| why);
    let missing = ["is tracefs mounted?", "(os error 1)", "(os error 13)"];
    let is_missing = |why: &str| missing.iter().any(|missing| why.contains(missing));
    assert!(uncounted.is_none_or(is_missing), "{said}");
    let of = |via: &str| rows.iter().filter(|row| row["transport"] == via).count();
    assert_eq!((of("shm"), of("tcp")), (2, 2));
    for row in &rows {
        let number = |field: &str| row[field].as_f64().unwrap_or_else(|| panic!("{field}: {row}"));
        assert_eq!(row["verified"], true, "{row}");
        assert!(number("runs") >= 10.0, "{row}");
        for field in ["direct_p50_us", "library_p50_us", "library_ratio"] {
            assert!(number(field) > 0.0, "{field}: {row}");
        }
        assert!(number("direct_spread") >= 1.0, "{row}");
        for field in ["direct_system_calls", "library_system_calls"] {
            match uncounted {
                Some(_) => assert!(row[field].is_null(), "{field}: {row}"),
                None => assert!(number(field) > 1.0, "{field}: {row}"),
            }
        }
        if cfg!(debug_assertions) {
            // A mean of few hand-offs: a table that grows meanwhile is a part of it.
            let most = number("direct_allocations") + 2.0;
            assert!(number("library_allocations") < most, "{row}");
        }
    }
}

#[test]
fn the_table_has_a_line_for_each_row() {
    let output = run("--case tiny-2k --layout page-major --duration 0");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let lines: Vec<&str> = text(&output.stdout).lines().collect();
    assert_eq!(lines.len(), 4, "{lines:?}");
    assert!(lines[0].ends_with("ratio") && lines[1].starts_with("tiny-2k"), "{lines:?}");
    assert!(lines[3].contains("shows wake-ups") && lines[3].contains("--busy-poll"), "{lines:?}");
    let spinning =
        run("--case tiny-2k --layout page-major --transport shm --duration 0 --busy-poll");
    assert_eq!(text(&spinning.stdout).lines().count(), 2, "{}", text(&spinning.stdout));
    // A machine with a NIC has nothing to say, and one line more.
    assert!(text(&output.stderr).starts_with("rdma is left out: "), "{}", text(&output.stderr));
}

#[test]
fn the_report_is_one_page_with_every_row() {
    let path = std::env::temp_dir().join(format!("baton-bench-{}.html", std::process::id()));
    let report = format!("--case tiny-2k --duration 0 --report {}", path.display());
    let output = run(&report);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let page = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));
    // One chart of all rows, and one of each.
    assert_eq!(page.matches("<svg").count(), 1 + 4);
    assert_eq!(page.matches("<tr><td>tiny-2k").count(), 4);
    assert!(!page.contains("http") && !page.contains("NaN"), "{page}");
    let output = run("--case tiny-2k --duration 0 --report /nowhere/page.html");
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains("--report /nowhere/page.html: "),
        "{}",
        text(&output.stderr)
    );
    assert_eq!(text(&output.stdout), "", "nothing was measured for it");
}

/// A process that follows, and where.
struct Follower(Child, String);

impl Follower {
    fn start() -> Follower {
        let mut child = bench("--listen 127.0.0.1:0")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Follower(child, line.trim().strip_prefix("listening on ").unwrap().to_string())
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn one_process_leads_another_that_listens() {
    let follower = Follower::start();
    for _ in 0..2 {
        let arguments = format!("--connect {} --case small --duration 0 --json", follower.1);
        assert_eq!(rows(&arguments).len(), 16);
    }
}

fn doctor(peer: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_baton")).args(["doctor", "--peer", peer]).output().unwrap()
}

#[test]
fn doctor_asks_the_listen_process_for_the_transport_of_auto() {
    let follower = Follower::start();
    let chosen = format!("auto chooses shm between this host and {} (same_host)", follower.1);
    let output = doctor(&follower.1);
    assert!(text(&output.stdout).contains(&chosen), "{}", text(&output.stdout));
    let rows = rows(&format!(
        "--connect {} --case tiny-2k --transport shm --duration 0 --json",
        follower.1
    ));
    assert_eq!(rows.len(), 2, "it listens on");
}

/// Listens, and does this with each connection, on a thread of its own.
fn stranger(answer: impl Fn(TcpStream) + Clone + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        for stream in listener.incoming().map(Result::unwrap) {
            let answer = answer.clone();
            thread::spawn(move || answer(stream));
        }
    });
    address
}

#[test]
fn a_peer_that_does_not_listen_for_a_bench_is_reported_once_and_in_time() {
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let web = stranger(|mut stream| {
        let _ = stream.read(&mut [0; 100]);
        let _ = stream.write_all(b"HTTP/1.0 400 Bad request\r\nServer: web\r\n\r\n");
    });
    let mute = stranger(|stream| {
        let _ = BufReader::new(stream).read_line(&mut String::new());
    });
    let idle = stranger(|mut stream| {
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let slow = stranger(|mut stream| {
        while stream.write_all(b"x").is_ok() {
            thread::sleep(Duration::from_millis(100));
        }
    });
    let peers = [
        (nobody, "Connection refused"),
        (web, "it answered \"HTTP/1.0 400 Bad request"),
        (mute, "it closed the connection without an answer"),
        (idle, "no answer within 5 s; it may be measuring"),
        (slow, "no answer within 5 s"),
    ];
    let check = |peer: &str, why: &str| {
        let begun = Instant::now();
        let output = run(&format!("--connect {peer} --case small"));
        let said = text(&output.stderr);
        let wanted = format!("error: no `baton bench transfer --listen` at {peer}: {why}");
        assert!(said.starts_with(&wanted) && said.lines().count() == 1, "{said}");
        assert_eq!((output.status.code(), text(&output.stdout)), (Some(1), ""), "{said}");
        assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    };
    let check_doctor = |peer: &str, why: &str| {
        let output = doctor(peer);
        let said = text(&output.stdout);
        assert!(said.contains(&format!("{peer} does not answer: {why}")), "{said}");
        assert!(said.contains("-> run baton bench transfer"), "{said}");
        assert_eq!(output.status.code(), Some(1));
    };
    // At the same time: each of them waits.
    thread::scope(|scope| {
        for (peer, why) in &peers {
            scope.spawn(|| check(peer, why));
            scope.spawn(|| check_doctor(peer, why));
        }
    });
    let output = doctor("nowhere");
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(2), ""));
    assert!(text(&output.stderr).contains("'--peer <HOST:PORT>': a peer is HOST:PORT"));
}

/// An error that would fail all rows is reported once, before the first row.
#[test]
fn a_way_that_a_host_has_not_is_told_once() {
    let lacks = Survey::here().nics.is_err();
    if lacks {
        let output = run("--transport rdma --duration 0");
        let said = text(&output.stderr);
        assert!(said.starts_with("error: no rdma here: ") && said.lines().count() == 1, "{said}");
        assert_eq!((output.status.code(), text(&output.stdout)), (Some(1), ""), "{said}");
    } else {
        eprintln!("SKIPPED: this host has NICs");
    }
}

#[test]
fn doctor_knows_a_router_when_it_meets_one() {
    let mut router = Command::new(env!("CARGO_BIN_EXE_baton"));
    let mut router = router.args(["router", "--port", "0"]).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(router.stderr.take().unwrap()).lines().map_while(Result::ok);
    let address = lines
        .find_map(|line| Some(line.split_once("address=")?.1.split(' ').next()?.to_owned()))
        .unwrap();
    let output = doctor(&address);
    let said = text(&output.stdout);
    router.kill().unwrap();
    router.wait().unwrap();
    assert!(
        said.contains(&format!("{address} does not answer: an HTTP server is there")),
        "{said}"
    );
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_row_without_figures_is_told_and_is_a_failure() {
    let follower = Follower::start();
    let address = follower.1.clone();
    // It says what it can, and takes part in no row.
    let surveyed = stranger(move |mut stream| {
        let mut asked = String::new();
        let _ = BufReader::new(&stream).read_line(&mut asked);
        if asked == "\"Survey\"\n" {
            let mut other = TcpStream::connect(&address).unwrap();
            other.write_all(asked.as_bytes()).unwrap();
            std::io::copy(&mut other, &mut stream).unwrap();
        }
    });
    let path = std::env::temp_dir().join(format!("baton-bench-{}-kept.html", std::process::id()));
    std::fs::write(&path, "of another day").unwrap();
    let report = path.display();
    let output =
        run(&format!("--connect {surveyed} --case tiny-2k --layout page-major --report {report}"));
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("tiny-2k page-major tcp: "), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("2 of 2 rows"), "{}", text(&output.stderr));
    assert_eq!(
        std::fs::read_to_string(&path).unwrap(),
        "of another day",
        "there is nothing to write"
    );
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn strangers_to_the_bench_cost_it_nothing() {
    let follower = Follower::start();
    for nonsense in ["GET / HTTP/1.1\r\n\r\n", "\"Ask\"\n", "{}\n", ""] {
        let mut stream = TcpStream::connect(&follower.1).unwrap();
        stream.write_all(nonsense.as_bytes()).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut said = String::new();
        stream.read_to_string(&mut said).unwrap();
        assert!(said.contains("Failed"), "{said}");
    }
    let arguments = format!("--connect {} --case tiny-2k --duration 0 --json", follower.1);
    assert_eq!(rows(&arguments).len(), 4);
}

/// A row that a stranger asks for.
fn row_of_a_stranger(through_library: bool) -> Value {
    json!({
        "case": {
            "name": "own", "pages": 1, "buffers": 2, "item_bytes": 64, "kv_heads": 1,
            "page_size": 1, "pool": 4, "spread": "Contiguous",
        },
        "layouts": { "source": "page-major", "destination": "page-major" },
        "source_ranks": 1, "destination_ranks": 1, "transport": "tcp", "lanes": 1, "pieces": 1,
        "busy_poll": false, "data_threads": "fused", "through_library": through_library,
    })
}

/// The process dials the one that asks, and no other address.
#[test]
fn a_stranger_to_the_bench_names_no_address_that_it_dials() {
    let follower = Follower::start();
    for (through_library, open) in
        [(true, json!({ "source": "127.0.0.2:9" })), (false, json!({ "port": 9 }))]
    {
        let (version, row) = (env!("CARGO_PKG_VERSION"), row_of_a_stranger(through_library));
        let prepare = json!({ "version": version, "row": row, "control_port": 9 });
        let mut stream = TcpStream::connect(&follower.1).unwrap();
        let mut answers = BufReader::new(stream.try_clone().unwrap()).lines();
        writeln!(stream, "{}", json!({ "Prepare": prepare })).unwrap();
        let prepared = answers.next().unwrap().unwrap();
        assert!(prepared.contains("Prepared"), "{prepared}");
        writeln!(stream, "{}", json!({ "Open": open })).unwrap();
        let said = answers.next().unwrap().unwrap();
        assert!(said.contains("Failed"), "{said}");
    }
}

#[test]
fn names_that_mean_nothing_are_wrong_usage() {
    let output = run("--case smol");
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("qwen-p1-frag-1024"), "{}", text(&output.stderr));
}
