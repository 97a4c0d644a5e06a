//! HTTPS workers: routers, registries and `baton drain` reach them over TLS, and accept no other
//! server at their address.

use crate::dummy::Dummy;
use crate::members::{await_workers, listed, router, serves};
use crate::moves::{check_same, events, open};
use crate::process::{PATIENCE, Process, post};
use crate::tls::{Files, ask, connect, fetch, fixture, hang_up, rest};
use crate::{body, choices, prefill, start};
use serde_json::{Value, json};
use std::net::TcpListener;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// Flags of a process with this certificate.
pub fn shows(name: &str) -> [String; 4] {
    let file = |kind: &str| fixture(&format!("{name}.{kind}")).to_str().unwrap().to_owned();
    ["--tls-cert-file".into(), file("pem"), "--tls-key-file".into(), file("key")]
}

fn believed() -> String {
    fixture("ca.pem").to_str().unwrap().to_owned()
}

/// A worker with this certificate.
fn worker(role: &str, name: &str, more: &[&str]) -> Process {
    let shows = shows(name);
    let flags: Vec<&str> = shows.iter().map(String::as_str).chain(more.iter().copied()).collect();
    if role == "prefill" { prefill(&flags) } else { start(role, &flags) }
}

/// A router with these workers. It trusts `ca`.
fn over(reader: &Process, decode: &[String], ca: &str, more: &[&str]) -> Process {
    let url = format!("https://{}", reader.address);
    let port = reader.bootstrap_port.to_string();
    let mut args = vec!["router", "--port", "0", "--tls-ca-file", ca, "--prefill", &url, &port];
    args.extend(decode.iter().flat_map(|url| ["--decode", url]));
    args.extend(more);
    Process::start(&args)
}

/// Waits until the router reports this status and reason for the worker at this URL.
#[track_caller]
fn await_state(router: &Process, url: &str, status: &str, why: &str) {
    let begun = Instant::now();
    loop {
        let told: Value = serde_json::from_str(&router.get("/workers").1).unwrap();
        let worker = told["workers"].as_array().unwrap().iter().find(|worker| worker["url"] == url);
        let worker = worker.expect("it is listed");
        if worker["status"] == status && worker["reason"].as_str().unwrap_or_default().contains(why)
        {
            return;
        }
        assert!(begun.elapsed() < PATIENCE, "{url} is not {status}, {why:?}: {worker}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Complete and streamed, large and small, by address and by name, in all flows; and requests to
/// every worker.
#[test]
fn a_router_reaches_workers_over_tls() {
    let ca = believed();
    let (reader, writer) =
        (worker("prefill", "one", &[]), worker("decode", "two", &["--tls-ca-file", &ca]));
    let alone = start("serve", &[]);
    let decode = format!("https://localhost:{}", writer.address.port());
    for flow in ["dual", "prefill-first", "decode-first"] {
        let flags = ["--flow", flow, "--policy", "least_loaded"];
        let router = over(&reader, std::slice::from_ref(&decode), &ca, &flags);
        await_workers(&router, 2);
        let mut asked = body(3, 300, 60);
        asked["note"] = json!("x".repeat(1 << 20));
        let expected = choices(&alone.post("/v1/completions", &asked.to_string()));
        assert_eq!(
            choices(&router.post("/v1/completions", &asked.to_string())),
            expected,
            "{flow}"
        );
        asked["stream"] = json!(true);
        let (status, text) = router.post("/v1/completions", &asked.to_string());
        assert!(status == 200 && text.contains("data: [DONE]"), "{flow}: {text}");
        assert!(text.matches("data: ").count() > 60, "{flow}: {text}");
        let (status, told) = router.post("/flush_cache", "");
        assert!(status == 200 && told.contains("\"workers\":2"), "{flow}: {told}");
    }
}

/// A worker with a bad certificate is refused with the reason, and used once its certificate is
/// good. A worker that is no longer trusted is not used.
#[test]
fn a_worker_without_a_trusted_certificate_is_not_used() {
    const STRANGER: &str = "its certificate is not signed by a trusted CA";
    let files = Files::new("believed");
    let [ca, other_ca] =
        ["ca.pem", "other-ca.pem"].map(|name| std::fs::read(fixture(name)).unwrap());
    let path = files.put("ca.pem", &ca);
    let (reader, writer) = (worker("prefill", "one", &[]), worker("decode", "one", &[]));
    let (late, other) = (worker("decode", "expired", &[]), worker("decode", "elsewhere", &[]));
    let plain = start("decode", &[]);
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let addresses =
        [writer.address, late.address, other.address, plain.address, silent.local_addr().unwrap()];
    let urls = addresses.map(|address| format!("https://{address}"));
    let router = over(&reader, &urls, &path, &[]);
    let [good, late, other, plain, silent] = &urls;
    await_state(&router, good, "ready", "");
    await_state(&router, late, "down", "its certificate has expired");
    await_state(&router, other, "down", STRANGER);
    await_state(&router, plain, "down", "it does not speak TLS");
    await_state(&router, silent, "down", "its TLS handshake takes too long");
    serves(&router, 1);
    files.put("ca.pem", &[&ca[..], &other_ca].concat());
    hang_up(&router);
    await_state(&router, other, "down", "its certificate is for another host");
    await_state(&router, late, "down", "its certificate has expired");
    // The log has the present reason too, and none twice.
    let said = |url: &str, why: &str| {
        let address = url.strip_prefix("https://").unwrap();
        format!("worker is not up worker={url} address={address} why=\"TLS failed: {why}")
    };
    router.await_said(&said(other, "its certificate is for another host"));
    let times = |url: &str, why: &str| router.times_said(&said(url, why));
    assert_eq!([times(other, STRANGER), times(other, ""), times(late, "")], [1, 2, 1]);
    serves(&router, 2);
    // A changed file is found without a signal.
    files.put("ca.pem", &other_ca);
    await_state(&router, good, "down", STRANGER);
    let (status, _) = router.post("/v1/completions", &body(3, 40, 4).to_string());
    assert_eq!(status, 503);
    files.put("ca.pem", &ca);
    hang_up(&router);
    await_state(&router, good, "ready", "");
    await_state(&router, &format!("https://{}", reader.address), "ready", "");
    serves(&router, 4);
}

/// `openssl req -x509` makes an authority's certificate by default. The error is reported by the
/// server that shows it and by the client that gets it.
#[test]
fn an_authoritys_own_certificate_cannot_serve_and_is_told_so() {
    const WHY: &str = "its certificate is a CA certificate (CA:TRUE), which a server cannot use";
    let ca = fixture("authority.pem");
    let shown = worker("decode", "authority", &[]);
    shown.await_said(&format!(
        "routers and workers do not accept this certificate file={}",
        ca.display()
    ));
    assert!(shown.has_said(WHY));
    let url = format!("https://{}", shown.address);
    let router = Process::start(&[
        "router",
        "--port",
        "0",
        "--tls-ca-file",
        ca.to_str().unwrap(),
        "--decode",
        &url,
    ]);
    await_state(&router, &url, "down", WHY);
    let other = worker("decode", "one", &[]);
    other.await_said(" ready ");
    assert!(!other.has_said("do not accept this certificate"));
}

/// A worker that speaks HTTPS and is named with `http://` is reported as such.
#[test]
fn a_worker_that_is_to_be_named_as_https_is_told_of() {
    const WHY: &str = "it accepts only HTTPS";
    let worker = worker("decode", "one", &[]);
    let url = format!("http://{}", worker.address);
    let router = Process::start(&["router", "--port", "0", "--decode", &url]);
    await_state(&router, &url, "down", WHY);
    router.await_said(&format!("{WHY}; use https://HOST:PORT"));
    let drained = Command::new(env!("CARGO_BIN_EXE_baton")).args(["drain", &url]).output().unwrap();
    let said = String::from_utf8(drained.stderr).unwrap();
    assert!(
        drained.status.code() == Some(1)
            && said.contains("the server accepts only HTTPS")
            && !said.contains('{'),
        "{said}"
    );
}

#[track_caller]
fn await_reading(reader: &Process) {
    let begun = Instant::now();
    let is_busy =
        |line: &str| line.starts_with("sglang:num_running_reqs{") && !line.ends_with(" 0");
    while !fetch(reader.address, "/metrics").lines().any(is_busy) {
        assert!(begun.elapsed() < PATIENCE, "no worker computes the prompt");
    }
}

/// A worker that is no longer trusted gets no new requests, and finishes the running ones. This
/// holds at a router, and at a decode worker that asks prefill itself.
#[test]
fn authorities_that_change_end_no_stream() {
    let files = Files::new("changing");
    let [ca, other] = ["ca.pem", "other-ca.pem"].map(|name| std::fs::read(fixture(name)).unwrap());
    let path = files.put("ca.pem", &ca);
    let dummy = Dummy::slow();
    let worker = |role: &str, name: &str, more: &[&str]| {
        let shows = shows(name);
        let flags: Vec<&str> =
            shows.iter().map(String::as_str).chain(more.iter().copied()).collect();
        dummy.start(role, &flags)
    };
    let reader =
        worker("prefill", "one", &["--bootstrap-port", "0", "--chunked-prefill-size", "16"]);
    let writer = worker("decode", "two", &["--tls-ca-file", &path]);
    let url = format!("https://localhost:{}", writer.address.port());
    let ids: Vec<u32> = (0..600).map(|i| 3 + (i * 7) % 380).collect();
    let asked = json!({"prompt": ids, "max_tokens": 300, "temperature": 0, "ignore_eos": true});
    let case = ("/v1/completions", asked);
    for flow in ["dual", "decode-first"] {
        let router = over(&reader, std::slice::from_ref(&url), &path, &["--flow", flow]);
        await_workers(&router, 2);
        let expected = events(&open(router.address, &case).end());
        for at_decode in [false, true] {
            router.post("/flush_cache", "");
            let mut stream = open(router.address, &case);
            if at_decode {
                stream.await_events(5);
            } else {
                await_reading(&reader);
            }
            files.put("ca.pem", &other);
            let read = [&router, &writer].map(|process| process.times_said("file reloaded"));
            [&router, &writer].into_iter().for_each(hang_up);
            for (process, times) in [&router, &writer].into_iter().zip(read) {
                process.await_times("file reloaded", times + 1);
            }
            check_same(&stream.end(), &expected, &case.1);
            await_state(&router, &url, "down", "not signed by a trusted CA");
            files.put("ca.pem", &ca);
            [&router, &writer].into_iter().for_each(hang_up);
            await_workers(&router, 2);
        }
        assert_eq!(router.metric("baton_router_retries_total{", ""), 0.0, "{flow}");
    }
}

/// The order goes through its router, which follows the change.
#[test]
fn a_worker_changes_its_role_over_tls() {
    let reader = worker("prefill", "one", &[]);
    let writers = [(); 2].map(|()| worker("decode", "two", &["--bootstrap-port", "0"]));
    let urls = writers.each_ref().map(|writer| format!("https://{}", writer.address));
    let router = over(&reader, &urls, &believed(), &[]);
    await_workers(&router, 3);
    let role = |url: &str| listed(&router).into_iter().find(|(_, at, ..)| at == url);
    let (.., id, _) = role(&urls[1]).expect("it is listed");
    let path = format!("/workers/{id}/role");
    assert!(router.get(&path).1.contains("\"role\":\"decode\""));
    let (status, told) = router.post(&path, &json!({"role": "prefill"}).to_string());
    assert_eq!(status, 202, "{told}");
    let begun = Instant::now();
    while !role(&urls[1]).is_some_and(|(role, .., is_well)| role == "prefill" && is_well) {
        assert!(begun.elapsed() < PATIENCE, "it is never used as what it is");
        thread::sleep(Duration::from_millis(50));
    }
    serves(&router, 9);
}

/// A worker with HTTPS enters itself at a router with HTTPS.
#[test]
fn workers_enter_themselves_over_tls() {
    let ca = believed();
    let shows = shows("one");
    let mut flags = vec!["--tls-ca-file", &ca];
    flags.extend(shows.iter().map(String::as_str));
    let secured = router(0, &flags);
    let registry = format!("https://localhost:{}", secured.address.port());
    let flags = ["--registry", &registry, "--tls-ca-file", &ca];
    let _reader = worker("prefill", "one", &flags);
    let _writer = worker("decode", "two", &flags);
    let begun = Instant::now();
    loop {
        let mut stream = connect(secured.address);
        ask(&mut stream, "connection: close\r\n", &body(5, 40, 4).to_string());
        let answer = rest(stream);
        if answer.starts_with("HTTP/1.1 200") {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "{answer}");
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_router_without_authorities_takes_no_worker_over_tls() {
    let plain = router(0, &[]);
    let registry = format!("http://{}", plain.address);
    let reader = worker("prefill", "one", &["--registry", &registry]);
    reader.await_said("--tls-ca-file");
    let named = json!({"url": "https://10.0.0.1:1", "worker_type": "decode"});
    let (status, said) = post(plain.address, "/workers", &named.to_string());
    assert!(status == 400 && said.contains("--tls-ca-file"), "{said}");
    assert!(listed(&plain).is_empty());
}

#[test]
fn a_worker_that_speaks_https_drains() {
    let worker = worker("decode", "one", &[]);
    let url = format!("https://{}", worker.address);
    let drain = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.args(["drain", &url]).args(more).output().unwrap()
    };
    let refused = drain(&[]);
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(refused.status.code() == Some(2) && said.contains("--tls-ca-file"), "{said}");
    let other = fixture("other-ca.pem");
    let refused = drain(&["--tls-ca-file", other.to_str().unwrap()]);
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(
        refused.status.code() == Some(1) && said.contains("not signed by a trusted CA"),
        "{said}"
    );
    let told = drain(&["--wait", "--tls-ca-file", &believed()]);
    let said = String::from_utf8(told.stdout).unwrap();
    assert!(
        told.status.success() && said.contains(" drains; ") && said.contains(" has ended"),
        "{said}"
    );
    assert_eq!(worker.exit_code(), Some(0));
}
