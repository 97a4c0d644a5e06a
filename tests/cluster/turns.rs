//! Workers that change their role while they run. No request is lost, no resource stays in use, and
//! other processes see new workers.

use crate::etcd_server::EtcdServer;
use crate::fleet::Fleet;
use crate::keys::KeyFile;
use crate::members::{await_workers, listed, router, serves};
use crate::process::{PATIENCE, Process, get, post, post_with};
use crate::{body, choices, dual, prefill, start, with_room};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// What a worker reports about its role.
#[track_caller]
pub fn role(worker: &Process) -> Value {
    let (status, text) = worker.get("/role");
    assert_eq!(status, 200, "{text}");
    serde_json::from_str(&text).unwrap()
}

/// Waits until it serves after this many changes.
#[track_caller]
pub fn await_changes(worker: &Process, changes: u64) -> Value {
    let begun = Instant::now();
    loop {
        let told = role(worker);
        if told["status"] == "serving" && told["changes"] == changes {
            return told;
        }
        assert!(begun.elapsed() < PATIENCE, "it does not change: {told}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Changes its role, and waits until that is done.
#[track_caller]
pub fn turn(worker: &Process, to: &str) {
    let changes = role(worker)["changes"].as_u64().unwrap();
    let (status, text) = worker.post("/role", &json!({ "role": to }).to_string());
    assert_eq!(status, 202, "{text}");
    assert_eq!(await_changes(worker, changes + 1)["role"], to);
}

/// The registry port that it reports.
fn registry_port(worker: &Process) -> u16 {
    let (status, text) = worker.get("/server_info");
    assert_eq!(status, 200, "{text}");
    let told: Value = serde_json::from_str(&text).unwrap();
    told["disaggregation_bootstrap_port"].as_u64().unwrap_or(0) as u16
}

/// The same answers from a pair after any number of role changes, and from a mixed worker.
fn change_places(transfer: &str) {
    let flags = ["--transfer", transfer, "--bootstrap-port", "0"];
    let (mut one, mut other) = (start("prefill", &flags), start("decode", &flags));
    let request = body(7, 90, 12);
    let expected =
        choices(&dual(one.address, other.address, with_room(request.clone(), &one, 1)).1);
    for round in 0..3 {
        turn(&one, "decode");
        turn(&other, "prefill");
        std::mem::swap(&mut one, &mut other);
        one.bootstrap_port = registry_port(&one);
        assert!(one.bootstrap_port > 0 && registry_port(&other) == 0);
        // The cached prompt was dropped with the role change.
        let (reader, writer) =
            dual(one.address, other.address, with_room(request.clone(), &one, 1));
        assert_eq!(choices(&writer), expected, "round {round}");
        assert_eq!(choices(&reader)[0]["token_ids"][0], expected[0]["token_ids"][0]);
        for worker in [&one, &other] {
            worker.await_idle();
        }
    }
    turn(&one, "mixed");
    assert_eq!(choices(&one.post("/v1/completions", &request.to_string())), expected);
    turn(&one, "prefill");
    one.bootstrap_port = registry_port(&one);
    assert_eq!(choices(&dual(one.address, other.address, with_room(request, &one, 1)).1), expected);
    for worker in [&mut one, &mut other] {
        worker.await_idle();
        worker.check_alive();
    }
}

#[test]
fn workers_change_places_and_say_the_same_over_shm() {
    change_places("shm");
}

#[test]
fn workers_change_places_and_say_the_same_over_tcp() {
    change_places("tcp");
}

/// The names of its counters and histograms above 0.
fn above_zero(worker: &Process) -> BTreeSet<String> {
    let (status, text) = worker.get("/metrics");
    assert_eq!(status, 200, "{text}");
    let mut found = BTreeSet::new();
    let mut is_counted = false;
    for line in text.lines().filter(|line| !line.starts_with("# HELP ")) {
        if let Some(kind) = line.strip_prefix("# TYPE ") {
            is_counted = kind.ends_with(" counter") || kind.ends_with(" histogram");
        } else if is_counted && !line.ends_with(" 0") {
            found.extend(line.split('{').next().map(str::to_owned));
        }
    }
    found
}

#[test]
fn a_new_role_begins_with_an_empty_cache_and_metrics_at_zero() {
    let (reader, writer) = (prefill(&[]), start("decode", &[]));
    let asked = body(1, 100, 8);
    for room in 1..3 {
        let sent = with_room(asked.clone(), &reader, room);
        choices(&dual(reader.address, writer.address, sent).1);
    }
    let cached = |worker: &Process| worker.metric("baton_pages{", "state=\"cached\"");
    for (worker, to) in [(&reader, "decode"), (&writer, "mixed")] {
        worker.await_idle();
        assert!(cached(worker) > 0.0 && above_zero(worker).len() > 10);
        turn(worker, to);
        assert_eq!((cached(worker), above_zero(worker)), (0.0, BTreeSet::new()), "{to}");
    }
    let (status, text) = writer.post("/v1/completions", &asked.to_string());
    assert_eq!(status, 200, "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
}

/// Running requests are finished in the old role, new ones are refused as temporary, and one change
/// runs at a time. A peer of the old role finds no partner.
#[test]
fn running_requests_finish_first_and_no_new_request_is_accepted() {
    let (reader, writer) = (prefill(&[]), start("decode", &[]));
    let (from, to) = (reader.address, writer.address);
    let long = with_room(body(1, 20, 400), &reader, 1);
    let running = thread::spawn(move || dual(from, to, long));
    let begun = Instant::now();
    while writer.metric("sglang:num_running_reqs{", "") == 0.0 {
        assert!(begun.elapsed() < PATIENCE, "it never runs");
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(writer.post("/role", r#"{"role": "decode"}"#).0, 200, "it is that");
    let (status, text) = writer.post("/role", r#"{"role": "prefill"}"#);
    let told: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (status, &told["status"], &told["running"]),
        (202, &json!("changing"), &json!(1)),
        "{text}"
    );
    assert_eq!((&told["role"], &told["wanted"]), (&json!("decode"), &json!("prefill")));
    assert_eq!(writer.post("/role", r#"{"role": "prefill"}"#).0, 202, "it is on its way");
    assert_eq!(writer.post("/role", r#"{"role": "mixed"}"#).0, 409);
    assert_eq!(get(to, "/health"), (200, "draining".into()));
    assert_eq!(get(to, "/readiness").0, 503);
    let (status, text) = writer.post("/v1/completions", &with_room(body(2, 20, 4), &reader, 2));
    assert!(status == 503 && text.contains("changes its role"), "{status} {text}");
    let (_, answer) = running.join().unwrap();
    assert_eq!(choices(&answer)[0]["token_ids"].as_array().unwrap().len(), 400);
    assert_eq!(await_changes(&writer, 1)["role"], "prefill");
    reader.await_said("control link closed after Bye");
    assert_eq!((get(to, "/health").1, get(to, "/readiness").0), ("OK".into(), 200));
    // A leg of a request for the old role.
    let asked = "x-baton-role: decode\r\n";
    let sent = with_room(body(3, 20, 4), &reader, 3);
    let (status, text) = post_with(to, "/v1/completions", asked, &sent);
    assert!(status == 503 && text.contains("to be decode, but it is prefill/1"), "{text}");
    reader.await_idle();
    writer.await_idle();
}

/// A router may have chosen the worker before: the request can be retried elsewhere, which a client
/// error would forbid.
#[test]
fn a_former_prefill_worker_that_is_asked_to_keep_kv_counts_as_draining() {
    let (reader, writer) = (prefill(&[]), start("decode", &[]));
    let mut request = body(1, 20, 4);
    request["baton_prefill"] = json!({"host": "127.0.0.1", "port": reader.address.port()});
    request["stream"] = json!(true);
    assert_eq!(writer.post("/v1/completions", &request.to_string()).0, 200);
    turn(&reader, "decode");
    let (status, text) = writer.post("/v1/completions", &request.to_string());
    let told: Value = serde_json::from_str(&text).unwrap();
    let error = &told["error"];
    assert_eq!(
        (status, &error["code"], &error["param"]),
        (503, &json!("draining"), &json!("bootstrap_host"))
    );
    writer.await_idle();
}

/// An impossible change is refused with the reason. A change that takes too long or fails leaves
/// the worker in its role.
#[test]
fn a_role_change_that_fails_leaves_the_worker_in_its_role() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let (reader, writer) = (prefill(&[]), start("decode", &["--bootstrap-port", &port]));
    assert_eq!(writer.post("/role", r#"{"role": "prefill"}"#).0, 202);
    let begun = Instant::now();
    let failed = loop {
        let told = role(&writer);
        if told["status"] == "serving" {
            break told["failed"].clone();
        }
        assert!(begun.elapsed() < PATIENCE);
        thread::sleep(Duration::from_millis(10));
    };
    assert_eq!(role(&writer)["changes"], 0, "nothing was taken apart for a port that another has");
    let why = failed["reason"].as_str().unwrap();
    assert!(failed["role"] == "prefill" && why.contains("--bootstrap-port"), "{failed}");
    choices(&dual(reader.address, writer.address, with_room(body(1, 40, 4), &reader, 1)).1);
    // A leg without its other leg runs for longer than the change can wait.
    let (to, lone) = (reader.address, with_room(body(2, 40, 4), &reader, 2));
    let waiting = thread::spawn(move || post(to, "/v1/completions", &lone));
    while reader.metric("sglang:num_prefill_bootstrap_queue_reqs{", "") == 0.0 {
        assert!(begun.elapsed() < PATIENCE, "it never waits");
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(reader.post("/role", r#"{"role": "decode", "timeout_secs": 1}"#).0, 202);
    reader.await_said("keeps its role");
    let told = role(&reader);
    let why = told["failed"]["reason"].as_str().unwrap();
    let left =
        "did not finish in time; left: requests=1 sequences=1 flushes=0 registry_entry=false";
    assert!(why.contains(left), "{told}");
    let rest = with_room(body(2, 40, 4), &reader, 2);
    choices(&post(writer.address, "/v1/completions", &rest));
    choices(&waiting.join().unwrap());
    let alone = start("serve", &[]);
    let told = role(&alone);
    assert_eq!((&told["role"], &told["status"]), (&json!("mixed"), &json!("serving")));
    assert_eq!(alone.post("/role", r#"{"role": "mixed"}"#).0, 409);
    let named = ["--host", "0.0.0.0", "--insecure", "--advertise-host", "a-name.test"];
    let (status, text) = prefill(&named).post("/role", r#"{"role": "decode"}"#);
    assert!(status == 409 && text.contains("--advertise-host a-name.test"), "{status} {text}");
    assert!(reader.post("/role", "7").1.contains(r#"such as {\"role\": "#));
    for (wrong, why) in [
        (r#"{"role": 5}"#, "but is 5"),
        ("{}", "but is not given"),
        (
            r#"{"role": "decode", "timeout_secs": "60"}"#,
            r#"must be a whole number from 1 to 1830, but is \"60\""#,
        ),
    ] {
        let (status, text) = reader.post("/role", wrong);
        assert!(status == 400 && text.contains(why), "{status} {text}");
    }
    for wrong in ["", "{}", r#"{"role": "router"}"#, r#"{"role": "decode", "x": 1}"#] {
        assert_eq!(reader.post("/role", wrong).0, 400, "{wrong}");
    }
    let page =
        post_with(reader.address, "/role", "origin: http://evil\r\n", r#"{"role":"decode"}"#);
    assert_eq!(page.0, 403);
}

/// Clients of a router that repeat the same requests and know the answers.
struct Load {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicUsize>,
    clients: Vec<JoinHandle<()>>,
}

impl Load {
    /// This many clients, each with all of these requests in turn.
    fn new(
        router: SocketAddr,
        clients: usize,
        questions: Arc<Vec<(Value, Option<Value>)>>,
    ) -> Load {
        let (stop, answered) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let client = |at: usize| {
            let (stop, answered, questions) = (stop.clone(), answered.clone(), questions.clone());
            thread::spawn(move || {
                for (asked, expected) in questions.iter().cycle().skip(at) {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let told = choices(&post(router, "/v1/completions", &asked.to_string()));
                    assert!(expected.as_ref().is_none_or(|expected| *expected == told), "{told}");
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        Load { clients: (0..clients).map(client).collect(), stop, answered }
    }

    /// Waits until this many more requests are answered.
    #[track_caller]
    fn go_on(&self, more: usize) {
        let (begun, enough) = (Instant::now(), self.answered.load(Ordering::Relaxed) + more);
        while self.answered.load(Ordering::Relaxed) < enough {
            assert!(begun.elapsed() < PATIENCE, "no request is answered any more");
            self.check();
            thread::sleep(Duration::from_millis(10));
        }
    }

    #[track_caller]
    fn check(&self) {
        assert!(self.clients.iter().all(|client| !client.is_finished()), "a request has failed");
    }

    #[track_caller]
    fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients {
            client.join().expect("no request has failed");
        }
    }
}

/// Roles of the workers that are up, by URL.
fn roles(router: &Process) -> BTreeMap<String, String> {
    let well = listed(router).into_iter().filter(|(.., is_well)| *is_well);
    well.map(|(role, url, ..)| (url, role)).collect()
}

#[track_caller]
fn await_role(router: &Process, worker: &Process, role: &str) {
    let (begun, url) = (Instant::now(), format!("http://{}", worker.address));
    while roles(router).get(&url).map(String::as_str) != Some(role) {
        assert!(begun.elapsed() < PATIENCE, "{url} is no {role} worker: {:?}", listed(router));
        thread::sleep(Duration::from_millis(20));
    }
}

/// Orders the role change at the router.
fn ask_role(router: &Process, worker: &Process, role: &str) -> (u16, String) {
    let url = format!("http://{}", worker.address);
    let (.., id, _) =
        listed(router).into_iter().find(|(_, listed, ..)| *listed == url).expect("it is there");
    router.post(&format!("/workers/{id}/role"), &json!({ "role": role }).to_string())
}

fn workers(role: &str, count: usize, more: &[&str]) -> Vec<Process> {
    (0..count).map(|_| start(role, &[&["--bootstrap-port", "0"], more].concat())).collect()
}

/// Prompts of all lengths, with the answers of a mixed worker.
fn questions() -> Arc<Vec<(Value, Option<Value>)>> {
    let mixed = start("serve", &["--mixed", "--disable-radix-cache"]);
    let question = |salt: u32| {
        let asked = body(salt, 10 + salt * 17, 8 + salt * 5 % 40);
        let told = choices(&mixed.post("/v1/completions", &asked.to_string()));
        (asked, Some(told))
    };
    Arc::new((0..10).map(question).collect())
}

fn roles_change_under_load(transfer: &str) {
    let questions = questions();
    let more = ["--transfer", transfer];
    let mut fleet = Fleet::new(workers("prefill", 2, &more), workers("decode", 2, &more));
    let load = Load::new(fleet.router.address, 4, questions);
    load.go_on(20);
    // First ordered at the worker, so that the router finds out. Then ordered at the router.
    for (from, to) in [("decode", "prefill"), ("prefill", "decode")] {
        turn(&fleet.decode[0], to);
        await_role(&fleet.router, &fleet.decode[0], to);
        load.go_on(20);
        let (status, text) = ask_role(&fleet.router, &fleet.prefill[0], from);
        assert_eq!(status, 202, "{text}");
        await_role(&fleet.router, &fleet.prefill[0], from);
        load.go_on(20);
    }
    // Without a pause: a worker that gets a request for its old role refuses it.
    for (worker, to) in [(1, "prefill"), (1, "decode")] {
        turn(&fleet.decode[worker], to);
        assert_eq!(get(fleet.router.address, "/readiness").0, 200);
        load.go_on(10);
    }
    // There and back between two probes of the router: its registry then has another port.
    turn(&fleet.prefill[1], "decode");
    turn(&fleet.prefill[1], "prefill");
    load.go_on(20);
    await_role(&fleet.router, &fleet.prefill[1], "prefill");
    await_role(&fleet.router, &fleet.decode[1], "decode");
    load.end();
    fleet.check_idle();
}

#[test]
fn roles_change_under_load_and_every_answer_is_right_over_shm() {
    roles_change_under_load("shm");
}

#[test]
fn roles_change_under_load_and_every_answer_is_right_over_tcp() {
    roles_change_under_load("tcp");
}

/// A worker that the others need cannot change. A worker that refuses continues to serve.
#[test]
fn a_router_refuses_a_role_change_of_a_worker_that_it_needs() {
    let mut fleet = Fleet::new(workers("prefill", 1, &[]), workers("decode", 2, &[]));
    let router = &fleet.router;
    let (status, text) = ask_role(router, &fleet.prefill[0], "decode");
    assert!(status == 409 && text.contains("no pair of workers would be left"), "{status} {text}");
    assert_eq!(ask_role(router, &fleet.prefill[0], "prefill").0, 200, "it is that");
    assert_eq!(ask_role(router, &fleet.decode[0], "router").0, 400);
    assert_eq!(router.post("/workers/99/role", r#"{"role": "prefill"}"#).0, 404);
    assert_eq!(router.post("/workers/0/name", r#"{"role": "prefill"}"#).0, 404);
    let page = post_with(router.address, "/workers/0/role", "origin: http://evil\r\n", "{}");
    assert_eq!(page.0, 403);
    assert_eq!(ask_role(router, &fleet.decode[0], "prefill").0, 202);
    await_role(router, &fleet.decode[0], "prefill");
    let (status, text) = ask_role(router, &fleet.decode[1], "prefill");
    assert_eq!(status, 409, "the last decode worker: {text}");
    assert_eq!(ask_role(router, &fleet.prefill[0], "decode").0, 202);
    await_role(router, &fleet.prefill[0], "decode");
    serves(router, 1);
    fleet.check_idle();
}

/// A mixed worker serves if no pair is left, and is never paired.
#[test]
fn a_mixed_worker_serves_if_no_pair_is_left() {
    let questions = questions();
    let mut fleet = Fleet::new(workers("prefill", 1, &[]), workers("decode", 1, &[]));
    let ask_all = |router: &Process| {
        for (asked, expected) in questions.iter() {
            let told = choices(&router.post("/v1/completions", &asked.to_string()));
            assert_eq!(Some(told), *expected);
        }
    };
    for worker in [&fleet.decode[0], &fleet.prefill[0]] {
        turn(worker, "mixed");
        await_role(&fleet.router, worker, "mixed");
        assert_eq!(get(fleet.router.address, "/readiness").0, 200);
        ask_all(&fleet.router);
    }
    assert!(fleet.router.has_said("it has another role") && !fleet.router.has_said("never paired"));
    let (status, text) = ask_role(&fleet.router, &fleet.prefill[0], "prefill");
    assert_eq!(status, 202, "{text}");
    await_role(&fleet.router, &fleet.prefill[0], "prefill");
    turn(&fleet.decode[0], "decode");
    await_role(&fleet.router, &fleet.decode[0], "decode");
    ask_all(&fleet.router);
    assert!(fleet.decode[0].metric("baton_sessions_total{", "") > 0.0, "they are a pair again");
    fleet.check_idle();
}

/// A worker renews its entry with its new role and the same ID. Its old entry makes room.
#[test]
fn an_entry_follows_the_role() {
    let router = router(0, &[]);
    let registry = format!("http://{}", router.address);
    entry_follows(&router, &registry);
}

#[test]
fn an_entry_in_etcd_follows_the_role() {
    let Some(etcd) = EtcdServer::alone() else { return };
    entry_follows(&router(0, &["--registry", &etcd.url()]), &etcd.url());
}

fn entry_follows(router: &Process, registry: &str) {
    let flags = ["--registry", registry];
    let (readers, writers) = (workers("prefill", 2, &flags), workers("decode", 1, &flags));
    await_workers(router, 3);
    serves(router, 1);
    turn(&readers[0], "decode");
    await_role(router, &readers[0], "decode");
    await_workers(router, 3);
    serves(router, 2);
    turn(&writers[0], "prefill");
    await_role(router, &writers[0], "prefill");
    serves(router, 3);
    // After a change that fails, the entry returns.
    let lone = with_room(body(2, 40, 4), &readers[1], 2);
    let to = readers[1].address;
    let waiting = thread::spawn(move || post(to, "/v1/completions", &lone));
    let begun = Instant::now();
    while readers[1].metric("sglang:num_prefill_bootstrap_queue_reqs{", "") == 0.0 {
        assert!(begun.elapsed() < PATIENCE, "it never waits");
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(readers[1].post("/role", r#"{"role": "decode", "timeout_secs": 1}"#).0, 202);
    readers[1].await_said("keeps its role");
    await_role(router, &readers[1], "prefill");
    choices(&post(
        readers[0].address,
        "/v1/completions",
        &with_room(body(2, 40, 4), &readers[1], 2),
    ));
    choices(&waiting.join().unwrap());
    for worker in readers.iter().chain(&writers) {
        worker.await_idle();
    }
}

/// An entry that was removed for a change is added again with the present key.
#[test]
fn a_worker_that_stays_is_found_under_a_key_that_is_new() {
    let key = KeyFile::new(1);
    let router = router(0, &["--cluster-key-file", key.path()]);
    let registry = format!("http://{}", router.address);
    let reader = prefill(&["--registry", &registry, "--cluster-key-file", key.path()]);
    await_workers(&router, 1);
    std::fs::write(key.path(), [2; 40]).unwrap();
    for process in [&router, &reader] {
        process.signal("HUP");
        process.await_said("file reloaded");
    }
    let (to, lone) = (reader.address, with_room(body(2, 40, 4), &reader, 2));
    let patience = "x-request-timeout-ms: 5000\r\n";
    let waiting = thread::spawn(move || post_with(to, "/v1/completions", patience, &lone));
    let begun = Instant::now();
    while reader.metric("sglang:num_prefill_bootstrap_queue_reqs{", "") == 0.0 {
        assert!(begun.elapsed() < PATIENCE, "it never waits");
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(reader.post("/role", r#"{"role": "decode", "timeout_secs": 2}"#).0, 202);
    await_workers(&router, 0);
    reader.await_said("keeps its role");
    await_role(&router, &reader, "prefill");
    assert_ne!(waiting.join().unwrap().0, 200);
}

/// The router lacks the API key, so it cannot follow the change, and reports that to its operator.
#[test]
fn a_worker_that_hides_its_role_change_is_down_for_that_reason() {
    let key = KeyFile::new(b'K');
    let keyed = ["--bootstrap-port", "0", "--api-key-file", key.path()];
    let (reader, writer) = (start("prefill", &keyed), start("decode", &keyed));
    let fleet = Fleet::with(vec![reader], vec![writer], &["--health-check-interval-secs", "1"]);
    let worker = &fleet.decode[0];
    let turn_to = |role: &str| {
        let fields = format!("authorization: Bearer {}\r\n", "K".repeat(40));
        let asked = json!({ "role": role }).to_string();
        assert_eq!(post_with(worker.address, "/role", &fields, &asked).0, 202);
    };
    turn_to("prefill");
    let why = "it has another role, and this router has no key to read it";
    fleet.router.await_said(why);
    for _ in 0..30 {
        let told: Value = serde_json::from_str(&fleet.router.get("/workers").1).unwrap();
        let told = &told["workers"][1];
        let reason = told["reason"].as_str().unwrap_or_default();
        assert!(told["status"] == "down" && reason.contains(why), "{told}");
        thread::sleep(Duration::from_millis(100));
    }
    turn_to("decode");
    await_role(&fleet.router, worker, "decode");
    assert_eq!(fleet.router.times_said(why), 1);
}

/// Waiting prompts turn a decode worker into a prefill worker; waiting answers turn one back.
#[test]
fn workers_follow_the_load_there_and_back() {
    let flags = [
        "--rebalance",
        "--rebalance-queue-ms",
        "500",
        "--rebalance-window-secs",
        "1",
        "--rebalance-dwell-secs",
        "2",
        // The predicted time of a single prompt of the first wave is over the limit.
        "--prefill-ms",
        "1,5,0",
        "--min-decode",
        "2",
    ];
    let mut fleet = Fleet::with(workers("prefill", 1, &[]), workers("decode", 3, &[]), &flags);
    let count = |role: &str| roles(&fleet.router).values().filter(|is| *is == role).count();
    let wave = |prompt: u32, answer: u32, clients: usize, decode: usize| {
        let questions = (0..30).map(|salt| (body(salt, prompt, answer), None)).collect();
        let load = Load::new(fleet.router.address, clients, Arc::new(questions));
        let begun = Instant::now();
        while (count("prefill"), count("decode")) != (4 - decode, decode) {
            assert!(
                begun.elapsed() < PATIENCE,
                "no worker changes its role: {:?}",
                listed(&fleet.router)
            );
            load.check();
            thread::sleep(Duration::from_millis(50));
        }
        load.go_on(clients);
        load.end();
    };
    wave(300, 1, 6, 2);
    fleet.router.await_times("changing the role of a worker", 1);
    wave(5, 300, 12, 3);
    fleet.router.await_times("changing the role of a worker", 2);
    fleet.check_idle();
}
