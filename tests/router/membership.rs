//! Workers that join and leave while the router runs: by `/workers`, and by entries in `/registry`.

use crate::client::{Client, Router};
use crate::worker::{PATIENCE, Worker};
use crate::{PROMPT, STREAM};
use baton::config::secret::{Secret, read_cluster_key};
use baton::registry::proof::{SignedRequest, prove};
use baton::sys::file_access::FileAccess;
use serde_json::{Value, json};
use std::net::TcpListener;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

fn url(worker: &Worker) -> String {
    format!("http://{}", worker.address)
}

fn ask(router: &Router, method: &str, path: &str, fields: &str, body: &str) -> (u16, Value) {
    let mut client = router.connect();
    client.ask(method, path, fields, body);
    let (status, body) = client.answer();
    (status, serde_json::from_str(&body).unwrap_or_else(|_| panic!("{path} answers {body}")))
}

fn add(router: &Router, body: Value) -> (u16, Value) {
    ask(router, "POST", "/workers", "", &body.to_string())
}

fn entry(worker: &Worker, role: &str, incarnation: u8) -> Value {
    let mut entry = json!({
        "id": format!("{:032x}", worker.address.port()),
        "incarnation": format!("{incarnation:032x}"),
        "role": role, "url": url(worker), "kind": "ab".repeat(32),
    });
    if role == "prefill" {
        entry["bootstrap_port"] = 9000.into();
    }
    entry
}

fn enter(router: &Router, entry: &Value) -> (u16, Value) {
    ask(router, "PUT", "/registry", "", &entry.to_string())
}

/// The exposed metrics of this worker.
fn metrics(router: &Router, worker: &Worker) -> Vec<String> {
    let text = router.get("/metrics").answer().1;
    let url = url(worker);
    text.lines().filter(|line| line.contains(&url)).map(str::to_owned).collect()
}

/// A request through a pair, whichever it is.
fn serves(router: &Router, prefill: &Worker, decode: &Worker) {
    let mut client = router.post("/v1/completions", PROMPT);
    prefill.asked().answer("200 OK", "{}");
    decode.asked().answer("200 OK", r#"{"is":"well"}"#);
    assert_eq!(client.answer(), (200, r#"{"is":"well"}"#.into()));
}

#[test]
fn workers_are_added_and_removed_while_requests_run() {
    let router = Router::start(&[], &[], &[]);
    assert_eq!(router.get("/readiness").answer().0, 503, "there is no worker yet");
    assert_eq!(router.post("/v1/completions", PROMPT).answer().0, 503);
    let (prefill, first, second) = (Worker::start(), Worker::start(), Worker::start());
    let added = add(
        &router,
        json!({"url": url(&prefill), "worker_type": "prefill", "bootstrap_port": 9001}),
    );
    assert_eq!(
        (added.0, &added.1["status"], &added.1["url"]),
        (202, &"accepted".into(), &url(&prefill).into())
    );
    let (_, added) =
        add(&router, json!({"url": url(&first), "worker_type": "decode", "api_key": null}));
    let id = added["worker_id"].as_str().unwrap();
    assert_eq!(added["location"], format!("/workers/{id}"));
    router.wait_for("/readiness", 200);
    serves(&router, &prefill, &first);

    let (_, listed) = ask(&router, "GET", "/workers", "", "");
    assert_eq!((&listed["total"], &listed["stats"]["decode_count"]), (&2.into(), &1.into()));
    let (_, told) = ask(&router, "GET", &format!("/workers/{id}"), "", "");
    assert_eq!((&told["url"], &told["worker_type"]), (&url(&first).into(), &"decode".into()));
    assert_eq!((&told["is_healthy"], &told["load"]), (&true.into(), &0.into()));
    assert_eq!(listed["workers"][0]["bootstrap_port"], 9001);

    let mut stream = router.post("/v1/completions", STREAM);
    let (mut at_prefill, mut at_first) = (prefill.asked(), first.asked());
    at_first.open_stream();
    at_first.chunk("data: 1\n\n");
    assert_eq!(stream.piece().as_deref(), Some("data: 1\n\n"));
    assert_eq!(metrics(&router, &first).len(), 2);
    let (status, removed) = ask(&router, "DELETE", &format!("/workers/{id}"), "", "");
    assert_eq!((status, &removed["worker_id"]), (202, &id.into()));
    assert!(metrics(&router, &first).is_empty(), "its metrics go with it");
    assert_eq!(router.get("/readiness").answer().0, 503);
    assert_eq!(ask(&router, "DELETE", &format!("/workers/{id}"), "", "").0, 404);
    assert_eq!(ask(&router, "GET", &format!("/workers/{id}"), "", "").0, 404);

    let again = json!({"url": url(&second), "worker_type": "decode"});
    let (_, added) = add(&router, again.clone());
    assert!(added["worker_id"] != id, "a number is never reused");
    let same = add(&router, again);
    assert_eq!((same.0, &same.1["worker_id"]), (202, &added["worker_id"]), "it is there already");
    router.wait_for("/readiness", 200);
    for _ in 0..3 {
        serves(&router, &prefill, &second);
    }
    at_first.chunk("data: 2\n\n");
    assert_eq!(stream.piece().as_deref(), Some("data: 2\n\n"), "what runs on it runs on");
    at_prefill.answer("200 OK", "{}");
    at_first.end_stream();
    assert_eq!(stream.piece(), None);
    assert!(at_first.is_closed(), "and then it is no longer needed");
    assert!(first.is_unasked());
}

#[test]
fn a_draining_worker_is_distinguished_from_a_worker_that_is_down() {
    let (prefill, decode) = (Worker::start(), Worker::start());
    let router = Router::ready(&[&prefill], &[&decode], &[]);
    router.wait_for_workers(2);
    let await_status = |status: [&str; 2]| {
        let begun = Instant::now();
        loop {
            let listed = ask(&router, "GET", "/workers", "", "").1;
            let told = |at: usize| listed["workers"][at]["status"].as_str().unwrap().to_owned();
            if [told(0), told(1)] == status {
                return;
            }
            assert!(begun.elapsed() < PATIENCE, "{status:?}: {listed}");
            thread::sleep(Duration::from_millis(20));
        }
    };
    let reason =
        |at: usize| ask(&router, "GET", "/workers", "", "").1["workers"][at]["reason"].clone();
    await_status(["ready", "ready"]);
    assert_eq!([reason(0), reason(1)], [Value::Null, Value::Null]);
    prefill.drain();
    decode.stop();
    await_status(["draining", "down"]);
    assert_eq!(reason(0), Value::Null);
    assert!(reason(1).as_str().unwrap().contains("accepts no connection"), "{}", reason(1));
    assert!(!router.has_said("worker is down role=prefill"), "it runs");
    // After its end it is down, no longer draining.
    prefill.stop();
    await_status(["down", "down"]);
    assert!(reason(0).as_str().unwrap().contains("accepts no connection"), "{}", reason(0));
    router.await_said("worker drains role=prefill");
    router.await_said("worker is down role=prefill");
}

/// With the reason in the line.
#[test]
fn a_worker_that_is_gone_is_told_of_once() {
    let (prefill, decode) = (Worker::start(), Worker::start());
    let router = Router::ready(&[&prefill], &[&decode], &[]);
    router.wait_for_workers(2);
    decode.stop();
    let gone =
        |role: &str, worker: &Worker| format!("worker is down role={role} worker={}", url(worker));
    router.await_said(&gone("decode", &decode));
    // The other worker is probed again after it.
    prefill.stop();
    router.await_said(&gone("prefill", &prefill));
    router.wait_for_workers(0);
    let told =
        router.times_said(&format!("{} why=\"it accepts no connection", gone("decode", &decode)));
    assert_eq!((told, router.times_said("worker is not up")), (1, 0));
}

/// A healthy worker that fits no other does not count as serving.
#[test]
fn a_worker_that_fits_no_other_is_listed_as_unpaired() {
    let told = |weights: &str| format!(r#"{{"handoff":{{"weights":"{weights}"}}}}"#).leak();
    let (prefill, decode) = (Worker::with_identity(told("aa")), Worker::with_identity(told("bb")));
    let router = Router::start(&[&prefill], &[&decode], &[]);
    router.wait_for_workers(2);
    let listed = ask(&router, "GET", "/workers", "", "").1;
    for (at, other, differs) in [(0, &decode, "aa and bb"), (1, &prefill, "bb and aa")] {
        let worker = &listed["workers"][at];
        assert_eq!(
            (&worker["status"], &worker["is_healthy"]),
            (&json!("unpaired"), &json!(true)),
            "{listed}"
        );
        let reason = worker["reason"].as_str().unwrap();
        assert!(reason.contains(&url(other)) && reason.contains(differs), "{reason}");
    }
    let fitting = Worker::with_identity(told("aa"));
    assert_eq!(add(&router, json!({"url": url(&fitting), "worker_type": "decode"})).0, 202);
    router.wait_for("/readiness", 200);
    let listed = ask(&router, "GET", "/workers", "", "").1;
    let status = |at: usize| listed["workers"][at]["status"].as_str().unwrap();
    assert_eq!([status(0), status(1), status(2)], ["ready", "unpaired", "ready"]);
}

/// A mixed worker is named and reported as such, and is no misfit among workers that hand over.
#[test]
fn a_mixed_worker_is_told_of_as_one() {
    const MIXED: &str = r#"{"disaggregation_mode":"null","role_changes":1}"#;
    let prefill =
        Worker::with_identity(r#"{"disaggregation_mode":"prefill","handoff":{"wire":"3.1"}}"#);
    let mixed = Worker::with_identity(MIXED);
    let router = Router::start(&[], &[], &[]);
    assert_eq!(add(&router, json!({"url": url(&mixed), "worker_type": "mixed"})).0, 202);
    router.await_said(&format!("worker is up role=mixed worker={}", url(&mixed)));
    assert_eq!(
        add(
            &router,
            json!({"url": url(&prefill), "worker_type": "prefill", "bootstrap_port": 9000})
        )
        .0,
        202
    );
    router.wait_for_workers(2);
    let listed = ask(&router, "GET", "/workers", "", "").1;
    let told = |at: usize, field: &str| listed["workers"][at][field].as_str().map(str::to_owned);
    assert_eq!(
        [told(0, "worker_type"), told(0, "status")],
        [Some("mixed".into()), Some("ready".into())]
    );
    assert_eq!(told(1, "status").as_deref(), Some("unpaired"), "{listed}");
    let why = format!(
        "no worker of the other role is here: {} is mixed and never hands over",
        url(&mixed)
    );
    assert_eq!(told(1, "reason"), Some(why));
    let decode =
        Worker::with_identity(r#"{"disaggregation_mode":"decode","handoff":{"wire":"4.0"}}"#);
    assert_eq!(add(&router, json!({"url": url(&decode), "worker_type": "decode"})).0, 202);
    router.await_said("two workers do not fit");
    let listed = ask(&router, "GET", "/workers", "", "").1;
    let why = listed["workers"][1]["reason"].as_str().unwrap();
    assert!(
        why.ends_with(&format!("compared with {}: wire differs: 3 and 4", url(&decode))),
        "{why}"
    );
    assert_eq!(router.times_said("two workers do not fit"), 1, "it is of those two");
    let up = "worker is up role=decode worker=http://";
    router.await_said(up);
    assert_eq!(router.times_said(up), 1, "of the decode worker");
    mixed.stop();
    router.await_said(&format!("worker is down role=mixed worker={}", url(&mixed)));
}

#[test]
fn an_invalid_worker_is_refused_by_name() {
    let router = Router::start(&[], &[], &[]);
    for (body, param) in [
        (json!({"worker_type": "decode"}), "url"),
        (json!({"url": "https://a:1", "worker_type": "decode"}), "url"),
        (json!({"url": "foo", "worker_type": "decode"}), "url"),
        (json!({"url": "", "worker_type": "decode"}), "url"),
        (json!({"url": "http://", "worker_type": "decode"}), "url"),
        (json!({"url": "http://a:0", "worker_type": "decode"}), "url"),
        (json!({"url": "http://a:1/path", "worker_type": "decode"}), "url"),
        (json!({"url": "http://a:1"}), "worker_type"),
        (json!({"url": "http://a:1", "worker_type": "regular"}), "worker_type"),
        (
            json!({"url": "http://a:1", "worker_type": "decode", "bootstrap_port": 1}),
            "bootstrap_port",
        ),
        (
            json!({"url": "http://a:1", "worker_type": "mixed", "bootstrap_port": 1}),
            "bootstrap_port",
        ),
        (
            json!({"url": "http://a:1", "worker_type": "prefill", "bootstrap_port": 0}),
            "bootstrap_port",
        ),
        (
            json!({"url": "http://a:1", "worker_type": "prefill", "bootstrap_port": 65536}),
            "bootstrap_port",
        ),
        (
            json!({"url": "http://a:1", "worker_type": "prefill", "bootstrap_port": -1}),
            "bootstrap_port",
        ),
        (
            json!({"url": "http://a:1", "worker_type": "prefill", "bootstrap_port": "80"}),
            "bootstrap_port",
        ),
        (json!({"url": "http://a:1", "worker_type": "decode", "priority": 9}), "priority"),
    ] {
        let (status, told) = add(&router, body.clone());
        assert_eq!((status, &told["error"]["param"]), (400, &param.into()), "{body} {told}");
    }
    assert_eq!(add(&router, json!(7)).0, 400);
    assert_eq!(ask(&router, "PUT", "/workers", "", "{}").0, 405);
    let (status, told) = enter(&router, &json!({"id": "x"}));
    assert_eq!((status, &told["error"]["code"]), (400, &"invalid_entry".into()));
    assert_eq!(ask(&router, "GET", "/workers", "", "").1["total"], 0);
}

#[test]
fn an_entry_lasts_while_it_is_renewed_and_a_new_incarnation_is_a_new_worker() {
    let router = Router::start(&[], &[], &[]);
    let (prefill, decode) = (Worker::start(), Worker::start());
    let (reader, writer) = (entry(&prefill, "prefill", 1), entry(&decode, "decode", 1));
    let mut life = 0;
    for entry in [&reader, &writer] {
        let (status, told) = enter(&router, entry);
        assert_eq!(status, 200);
        life = told["life_ms"].as_u64().unwrap();
    }
    router.wait_for("/readiness", 200);
    serves(&router, &prefill, &decode);
    let number = |router: &Router| {
        let (_, listed) = ask(router, "GET", "/workers", "", "");
        let workers = listed["workers"].as_array().unwrap().clone();
        let decode = workers.into_iter().find(|worker| worker["worker_type"] == "decode");
        decode.map(|worker| worker["id"].as_str().unwrap().to_owned())
    };
    let old = number(&router).unwrap();
    enter(&router, &entry(&decode, "decode", 2));
    let new = number(&router).unwrap();
    assert!(old != new, "{old} {new}");
    // Messages of its predecessor have no effect.
    assert_eq!(ask(&router, "DELETE", "/registry", "", &writer.to_string()).0, 200);
    assert_eq!(number(&router), Some(new.clone()));

    // Decode renews its entry, prefill does not.
    enter(&router, &reader);
    router.wait_for("/readiness", 200);
    let mut client = router.post("/v1/completions", STREAM);
    let (mut at_prefill, mut at_decode) = (prefill.asked(), decode.asked());
    let begun = Instant::now();
    while ask(&router, "GET", "/workers", "", "").1["total"] == 2 {
        assert!(begun.elapsed() < PATIENCE + Duration::from_millis(life), "it is never dropped");
        assert_eq!(enter(&router, &entry(&decode, "decode", 2)).0, 200);
        thread::sleep(Duration::from_millis(life / 20));
    }
    assert!(begun.elapsed() > Duration::from_millis(life / 2));
    assert_eq!(number(&router), Some(new), "it has renewed");
    at_decode.open_stream();
    at_decode.chunk("data: 1\n\n");
    at_decode.end_stream();
    assert_eq!(client.piece().as_deref(), Some("data: 1\n\n"), "what ran goes on");
    at_prefill.answer("200 OK", "{}");
    assert_eq!(
        ask(&router, "DELETE", "/registry", "", &entry(&decode, "decode", 2).to_string()).0,
        200
    );
    assert_eq!(ask(&router, "GET", "/workers", "", "").1["total"], 0, "it withdrew its entry");
}

#[test]
fn misfits_are_not_paired() {
    let router = Router::start(&[], &[], &[]);
    let (prefill, decode) = (Worker::start(), Worker::start());
    enter(&router, &entry(&prefill, "prefill", 1));
    let mut other = entry(&decode, "decode", 1);
    other["kind"] = "cd".repeat(32).into();
    enter(&router, &other);
    let begun = Instant::now();
    let why = loop {
        let (status, told) = router.post("/v1/completions", PROMPT).answer();
        assert_eq!(status, 503);
        if told.contains("fits") {
            break told;
        }
        assert!(begun.elapsed() < PATIENCE, "{told}");
        thread::sleep(Duration::from_millis(50));
    };
    assert!(why.contains("no reachable decode worker fits"), "{why}");
    assert!(prefill.is_unasked() && decode.is_unasked());
    assert_eq!(router.get("/readiness").answer().0, 503);
}

/// A cluster key in a file of this test.
fn key(name: &str, byte: u8) -> (PathBuf, Secret) {
    let path = std::env::temp_dir().join(format!("baton-{}-{name}.key", std::process::id()));
    std::fs::write(&path, [byte; 32]).unwrap();
    let secret = read_cluster_key(&FileAccess::Host, &path, &mut Vec::new()).unwrap();
    (path, secret)
}

/// Header fields that prove a key.
fn proof(router: &Router, key: &Secret, method: &str, path: &str, body: &str) -> String {
    let (_, invited) = ask(router, "POST", "/challenge", "", "");
    let nonce = invited["nonce"].as_str().unwrap();
    let proof = prove(key, SignedRequest { method, path, body: body.as_bytes() }, nonce);
    format!("x-baton-nonce: {nonce}\r\nx-baton-proof: {proof}\r\n")
}

#[test]
fn with_a_key_a_stranger_changes_nothing_and_no_write_is_accepted_twice() {
    let ((path, ours), (other_path, theirs)) = (key("ours", 7), key("theirs", 8));
    let router = Router::start(&[], &[], &["--cluster-key-file", path.to_str().unwrap()]);
    let worker = Worker::start();
    let body = entry(&worker, "decode", 1).to_string();
    let total = || ask(&router, "GET", "/workers", "", "").1["total"].clone();
    assert_eq!(ask(&router, "PUT", "/registry", "", &body).0, 401);
    let fields = proof(&router, &theirs, "PUT", "/registry", &body);
    assert_eq!(ask(&router, "PUT", "/registry", &fields, &body).0, 401);
    let fields = proof(&router, &ours, "PUT", "/registry", &body);
    let elsewhere = body.replace(&url(&worker), "http://10.9.9.9:1");
    assert!(elsewhere != body);
    assert_eq!(
        ask(&router, "PUT", "/registry", &fields, &elsewhere).0,
        401,
        "it is bound to the URL"
    );
    let successor = entry(&worker, "decode", 2).to_string();
    assert_eq!(
        ask(&router, "PUT", "/registry", &fields, &successor).0,
        401,
        "and to the incarnation"
    );
    assert_eq!(total(), 0);
    assert_eq!(ask(&router, "PUT", "/registry", &fields, &body).0, 200);
    assert_eq!(total(), 1);
    assert_eq!(ask(&router, "PUT", "/registry", &fields, &body).0, 401, "replayed");

    let named = json!({"url": "http://10.9.9.9:1", "worker_type": "decode"}).to_string();
    assert_eq!(ask(&router, "POST", "/workers", "", &named).0, 401);
    let fields = proof(&router, &ours, "POST", "/workers", &named);
    let (status, added) = ask(&router, "POST", "/workers", &fields, &named);
    assert_eq!(status, 202);
    let path_of = added["location"].as_str().unwrap();
    assert_eq!(ask(&router, "DELETE", path_of, "", "").0, 401);
    let fields = proof(&router, &ours, "DELETE", path_of, "");
    assert_eq!(ask(&router, "DELETE", path_of, &fields, "").0, 202);
    assert_eq!(ask(&router, "DELETE", "/registry", "", &body).0, 401);
    assert_eq!(total(), 1);
    let fields = proof(&router, &ours, "DELETE", "/registry", &body);
    assert_eq!(ask(&router, "DELETE", "/registry", &fields, &body).0, 200);
    assert_eq!(total(), 0);
    for path in [path, other_path] {
        let _ = std::fs::remove_file(path);
    }
}

#[test]
fn beyond_loopback_workers_are_taken_only_with_a_key_or_insecure() {
    let worker = Worker::start();
    let body = entry(&worker, "decode", 1);
    for (flags, status) in
        [(&["--host", "0.0.0.0"][..], 403), (&["--host", "0.0.0.0", "--insecure"], 200)]
    {
        let router = Router::start(&[], &[], flags);
        let (got, told) = enter(&router, &body);
        assert_eq!(got, status, "{told}");
        let named = json!({"url": url(&worker), "worker_type": "decode"});
        let (got, _) = add(&router, named);
        assert_eq!(got == 403, status == 403, "{got}");
    }
}

#[test]
fn a_clients_key_is_no_workers() {
    let path = std::env::temp_dir().join(format!("baton-{}-clients.keys", std::process::id()));
    std::fs::write(&path, "k\n").unwrap();
    let router = Router::start(&[], &[], &["--api-key-file", path.to_str().unwrap()]);
    let worker = Worker::start();
    assert_eq!(add(&router, json!({"url": url(&worker), "worker_type": "decode"})).0, 401);
    assert_eq!(ask(&router, "GET", "/workers", "", "").0, 401);
    let (status, told) = enter(&router, &entry(&worker, "decode", 1));
    assert_eq!(
        (status, &told["error"]["code"]),
        (403, &"not_trusted".into()),
        "it would be shown the clients' key"
    );
    let key = "authorization: Bearer k\r\n";
    let seat = json!({"url": url(&worker), "worker_type": "decode"}).to_string();
    let page = "authorization: Bearer k\r\norigin: http://elsewhere.test\r\n";
    assert_eq!(ask(&router, "POST", "/workers", page, &seat).0, 403, "no page adds a worker");
    assert_eq!(ask(&router, "POST", "/drain", page, "").0, 403, "nor drains");
    assert!(ask(&router, "POST", "/workers", key, &seat).0 < 300);
    let (status, listed) = ask(&router, "GET", "/workers", key, "");
    assert_eq!((status, &listed["total"]), (200, &1.into()));
    let mut client: Client = router.connect();
    client.ask("POST", "/challenge", "", "");
    assert_eq!(client.answer().0, 200);
    let _ = std::fs::remove_file(path);
}

/// A role change would show the admin key to a worker that nobody knows.
#[test]
fn admin_keys_alone_let_no_stranger_in() {
    let path = std::env::temp_dir().join(format!("baton-{}-admins.keys", std::process::id()));
    std::fs::write(&path, "k\n").unwrap();
    let router = Router::start(&[], &[], &["--admin-key-file", path.to_str().unwrap()]);
    let worker = Worker::start();
    let (status, told) = enter(&router, &entry(&worker, "decode", 1));
    assert_eq!((status, &told["error"]["code"]), (403, &"not_trusted".into()));
    let seat = json!({"url": url(&worker), "worker_type": "decode"});
    assert_eq!(add(&router, seat.clone()).0, 401);
    let key = "authorization: Bearer k\r\n";
    let (status, added) = ask(&router, "POST", "/workers", key, &seat.to_string());
    assert_eq!(status, 202, "{added}");
    let path_of_it = added["location"].as_str().unwrap();
    assert_eq!(ask(&router, "DELETE", path_of_it, "", "").0, 401);
    assert_eq!(ask(&router, "GET", path_of_it, "", "").0, 200, "a read needs no key here");
    assert_eq!(ask(&router, "DELETE", path_of_it, key, "").0, 202);
    let _ = std::fs::remove_file(path);
}

/// Their reported keys are possibly outdated.
#[test]
fn workers_are_asked_for_their_identity_again_when_the_cluster_key_changes() {
    let path =
        std::env::temp_dir().join(format!("baton-router-cluster-key-{}", std::process::id()));
    std::fs::write(&path, [1; 40]).unwrap();
    let (prefill, decode) = (Worker::start(), Worker::start());
    let flags = ["--cluster-key-file", path.to_str().unwrap()];
    let router = Router::ready(&[&prefill], &[&decode], &flags);
    assert_eq!([prefill.identity_queries(), decode.identity_queries()], [1, 1]);
    std::fs::write(&path, [2; 40]).unwrap();
    router.await_said("file reloaded what=\"cluster keys\"");
    let begun = Instant::now();
    while [&prefill, &decode].into_iter().any(|worker| worker.identity_queries() < 2) {
        assert!(begun.elapsed() < PATIENCE, "they are not asked");
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(router.get("/readiness").answer().0, 200, "they are used meanwhile");
    std::fs::remove_file(path).unwrap();
}

/// A router that starts during a rotation can ask a worker that has not read its new file yet.
#[test]
fn a_worker_with_other_keys_is_identified_until_it_has_read_its_new_keys() {
    const OLD: &str = r#"{"disaggregation_mode":"prefill","handoff":{"cluster_keys":["old"]}}"#;
    const NEW: &str = r#"{"disaggregation_mode":"prefill","handoff":{"cluster_keys":["new"]}}"#;
    let decode = Worker::with_identity(
        r#"{"disaggregation_mode":"decode","handoff":{"cluster_keys":["new"]}}"#,
    );
    let prefill = Worker::with_identity(OLD);
    let router = Router::start(&[&prefill], &[&decode], &[]);
    router.await_said("two workers do not fit");
    for worker in [&prefill, &decode] {
        let begun = Instant::now();
        while worker.identity_queries() < 3 {
            assert!(begun.elapsed() < PATIENCE, "its keys are final");
            thread::sleep(Duration::from_millis(20));
        }
    }
    assert_eq!(router.get("/readiness").answer().0, 503);
    assert!(router.times_said("two workers do not fit") <= 2, "once of each worker");
    prefill.will_identify(NEW);
    let begun = Instant::now();
    while router.get("/readiness").answer().0 != 200 {
        assert!(begun.elapsed() < PATIENCE, "the two are not paired");
        thread::sleep(Duration::from_millis(20));
    }
    let asked = [prefill.identity_queries(), decode.identity_queries()];
    for worker in [&prefill, &decode] {
        worker.await_probes(3);
    }
    let more = [prefill.identity_queries() - asked[0], decode.identity_queries() - asked[1]];
    assert!(more.iter().all(|&more| more <= 1), "they are asked on: {more:?}");
}

/// A worker removes its entry before it changes its role, and enters itself again in the new one.
#[test]
fn a_worker_between_two_roles_is_told_from_one_that_has_left() {
    let [reader, turns, leaves] = [(); 3].map(|()| Worker::start());
    let router = Router::run(&[]);
    enter(&router, &entry(&reader, "prefill", 1));
    for worker in [&turns, &leaves] {
        enter(&router, &entry(worker, "decode", 1));
    }
    router.wait_for_workers(3);
    let listed = ask(&router, "GET", "/workers", "", "").1["workers"].clone();
    let path_of = |worker: &Worker| {
        let mut workers = listed.as_array().unwrap().iter();
        let listed = workers.find(|listed| listed["url"] == url(worker)).unwrap();
        format!("/workers/{}", listed["id"].as_str().unwrap())
    };
    let (turning, leaving) = (path_of(&turns), path_of(&leaves));
    let mut client = router.post(&format!("{turning}/role"), r#"{"role":"prefill"}"#);
    turns.asked().answer("202 Accepted", "{}");
    assert_eq!(client.answer().0, 202);
    for worker in [&turns, &leaves] {
        let entry = entry(worker, "decode", 1).to_string();
        assert_eq!(ask(&router, "DELETE", "/registry", "", &entry).0, 200);
    }
    for (method, more) in [("GET", ""), ("GET", "/role"), ("DELETE", "")] {
        let code = |path: &str| {
            let (status, told) = ask(&router, method, &format!("{path}{more}"), "", "");
            (status, told["error"]["code"].clone())
        };
        assert_eq!(code(&turning), (503, json!("role_changes")), "{method} {more}");
        assert_eq!(code(&leaving), (404, json!("worker_not_found")), "{method} {more}");
    }
    enter(&router, &entry(&turns, "prefill", 2));
    let (status, found) = ask(&router, "GET", &turning, "", "");
    assert_eq!((status, &found["worker_type"]), (200, &json!("prefill")), "{found}");
}

/// The port is in use, so a router that resolves no name ends with another error.
#[test]
fn a_router_does_not_start_with_a_name_that_it_cannot_resolve() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let nowhere = "http://no-such-host.invalid:8000";
    let known = "http://127.0.0.1:8000";
    for (args, flag) in [
        (["--prefill", nowhere, "9000", "--decode", known], "--prefill"),
        (["--prefill", known, "9000", "--decode", nowhere], "--decode"),
    ] {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_baton"));
        let output = command.args(["router", "--port", &port]).args(args).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        let error = format!("error: {flag}: cannot resolve {nowhere}: ");
        assert!(said.lines().any(|line| line.starts_with(&error)), "{said}");
    }
}
