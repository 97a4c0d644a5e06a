//! All flows give the same answers, survive every death, and leave nothing behind when a client
//! disconnects.

use crate::dummy::Dummy;
use crate::fleet::Fleet;
use crate::leg::Leg;
use crate::moves::{Slow, cases, check_same, events, open};
use crate::process::{PATIENCE, Process, post};
use crate::{body, prefill, start};
use baton::limits::KEPT_KV_LIFE;
use serde_json::{Value, json};
use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::thread;
use std::time::Instant;

const FLOWS: [[&str; 2]; 2] = [["--flow", "prefill-first"], ["--flow", "decode-first"]];

/// Another router with the workers of a fleet.
fn beside(fleet: &Fleet, flags: &[&str]) -> Process {
    let url = |worker: &Process| format!("http://{}", worker.address);
    let mut args: Vec<String> = ["router", "--port", "0"].map(String::from).into();
    for worker in &fleet.prefill {
        args.extend(["--prefill".into(), url(worker), worker.bootstrap_port.to_string()]);
    }
    for worker in &fleet.decode {
        args.extend(["--decode".into(), url(worker)]);
    }
    let args: Vec<&str> = args.iter().map(String::as_str).chain(flags.iter().copied()).collect();
    let router = Process::start(&args);
    let begun = Instant::now();
    while router.metric("smg_worker_health{", "") < fleet.workers().count() as f64 {
        assert!(begun.elapsed() < PATIENCE, "the router never sees all its workers");
        thread::sleep(std::time::Duration::from_millis(20));
    }
    router
}

/// Requests beside the usual ones: lists of prompts, ends by the first token, echoes.
fn more() -> Vec<(&'static str, Value)> {
    let ids: Vec<u32> = (0..40).map(|i| 3 + (7 + i * 131) % 300).collect();
    let mut more = Vec::new();
    let mut list = body(4, 40, 8);
    list["prompt"] = json!([ids, [5, 6, 7, 8, 9]]);
    list["n"] = json!(2);
    more.push(("/v1/completions", list));
    let mut echo = body(5, 60, 1);
    (echo["echo"], echo["logprobs"]) = (json!(true), json!(null));
    more.push(("/v1/completions", echo.clone()));
    (echo["logprobs"], echo["n"]) = (json!(20), json!(2));
    more.push(("/v1/completions", echo));
    let text = json!({"text": ["The Seine", "A longer one: where does the baton go?"],
        "return_logprob": true,
        "sampling_params": {"max_new_tokens": 6, "temperature": 0, "n": 2}});
    more.push(("/generate", text));
    more
}

/// Requests that cannot be streams.
fn only_whole() -> Vec<(&'static str, Value)> {
    let (mut ranks, mut alone) = (body(7, 45, 3), body(8, 45, 0));
    for body in [&mut ranks, &mut alone] {
        body["stream"] = json!(false);
    }
    ranks["prompt_logprobs"] = json!(2);
    (alone["echo"], alone["logprobs"]) = (json!(true), json!(1));
    vec![("/v1/completions", ranks), ("/v1/completions", alone)]
}

/// A request that ends by a stop string.
fn stopped() -> (&'static str, Value) {
    let stops: Vec<String> = ('a'..='z').map(|letter| letter.to_string()).collect();
    let mut stopped = body(6, 50, 12);
    stopped["stop"] = json!(stops);
    ("/v1/completions", stopped)
}

/// An answer without its creation time and without the number of cached prompt tokens.
#[track_caller]
fn whole(address: SocketAddr, path: &str, body: &Value) -> Value {
    let mut body = body.clone();
    body.as_object_mut().unwrap().remove("stream_options");
    body["rid"] = json!("one");
    let (status, answer) = post(address, path, &body.to_string());
    assert_eq!(status, 200, "{answer}");
    let mut answer: Value = serde_json::from_str(&answer).unwrap();
    forget(&mut answer);
    answer
}

fn forget(answer: &mut Value) {
    match answer {
        Value::Object(fields) => {
            let of_cache = ["cached_tokens", "cache_read_input_tokens", "input_tokens"];
            for name in ["created", "created_at", "id", "call_id"].iter().chain(&of_cache) {
                fields.remove(*name);
            }
            fields.values_mut().for_each(forget);
        }
        Value::Array(items) => items.iter_mut().for_each(forget),
        _ => {}
    }
}

fn says_the_same(transfer: &str, allocation: &str) {
    let workers = vec![prefill(&[
        "--transfer",
        transfer,
        "--decode-allocation",
        allocation,
        "--chunked-prefill-size",
        "32",
    ])];
    let mut fleet = Fleet::new(workers, vec![start("decode", &["--transfer", transfer])]);
    let plain = fleet.router.address;
    let compare = |other: &Process, case: &(&'static str, Value)| {
        let expected = events(&open(plain, case).end());
        check_same(&open(other.address, case).end(), &expected, &case.1);
        let (path, body) = case;
        assert_eq!(whole(other.address, path, body), whole(plain, path, body), "{body}");
    };
    let routers = FLOWS.map(|flow| beside(&fleet, &flow));
    for (other, flow) in routers.iter().zip(FLOWS) {
        for case in cases().into_iter().chain(more()) {
            compare(other, &case);
        }
        for (path, body) in only_whole() {
            assert_eq!(whole(other.address, path, &body), whole(plain, path, &body), "{flow:?}");
        }
        assert_eq!(other.get("/health_generate").0, 200, "{flow:?}");
        assert_eq!(other.metric("baton_router_retries_total{", ""), 0.0, "{flow:?}");
    }
    fleet.check_idle();
    for worker in fleet.workers() {
        let (_, metrics) = worker.get("/metrics");
        let failed = |line: &&str| {
            line.starts_with("baton_request_failures_total{") && !line.ends_with(" 0")
        };
        assert_eq!(metrics.lines().find(failed), None);
    }
    // Ends that workers count as those of clients that disconnect.
    for other in &routers {
        compare(other, &stopped());
    }
    fleet.check_idle();
}

#[test]
fn every_flow_says_the_same_over_shm() {
    says_the_same("shm", "early");
}

#[test]
fn every_flow_says_the_same_over_tcp_with_late_pages() {
    says_the_same("tcp", "late");
}

#[test]
fn streams_of_every_flow_survive_deaths() {
    for flow in FLOWS {
        let mut slow = Slow::with("shm", &flow);
        let address = slow.fleet.router.address;
        for case in cases() {
            let expected = events(&open(address, &case).end());
            let mut stream = open(address, &case);
            stream.await_events(5);
            let victim = slow.busy();
            slow.kill_decode(victim);
            check_same(&stream.end(), &expected, &case.1);
            slow.restart_decode(victim);
        }
        let resumed = slow.fleet.router.metric("baton_router_resumed_total", "");
        assert_eq!(resumed, cases().len() as f64, "{flow:?}: each of them was met in its midst");
        let case = &cases()[0];
        let expected = events(&open(address, case).end());
        let victim = slow.harm_reader(case, &expected, Process::kill);
        slow.restart_prefill(victim);
        slow.fleet.check_idle();
    }
}

/// A stopped process accepts connections and data, and closes nothing.
#[test]
fn a_prefill_worker_that_stands_still_is_gone_round_in_every_flow() {
    for flow in FLOWS {
        let mut slow = Slow::with("tcp", &[&flow[..], &["--policy", "round_robin"]].concat());
        let address = slow.fleet.router.address;
        let case = &cases()[0];
        let expected = events(&open(address, case).end());
        // While it computes the prompt.
        let victim = slow.harm_reader(case, &expected, |worker| worker.pause());
        slow.fleet.prefill[victim].go_on();
        slow.await_all();
        // Before it has received the request: one of the two is for it.
        slow.fleet.prefill[0].pause();
        let streams = [open(address, case), open(address, case)];
        for stream in streams {
            check_same(&stream.end(), &expected, &case.1);
        }
        if flow[1] == "decode-first" {
            assert!(
                slow.fleet
                    .decode
                    .iter()
                    .any(|worker| worker.has_said("did not name the kept KV in time"))
            );
        }
        slow.fleet.prefill[0].go_on();
        slow.await_all();
        let mut fleet = slow.fleet;
        fleet.check_idle();
    }
}

/// Long before kept KV would be dropped by itself.
#[test]
fn a_client_that_leaves_frees_both_workers_in_every_flow() {
    let dummy = Dummy::slow();
    let flags = ["--max-running-requests", "4", "--chunked-prefill-size", "16"];
    let prefill = dummy.start("prefill", &[&flags[..], &["--bootstrap-port", "0"]].concat());
    let mut fleet = Fleet::new(vec![prefill], vec![dummy.start("decode", &flags[..2])]);
    let ids: Vec<u32> = (0..600).map(|i| 3 + (i * 7) % 380).collect();
    let asked = |tokens: u32| {
        json!({"prompt": ids, "max_tokens": tokens, "ignore_eos": true,
            "stream": true})
    };
    for flow in FLOWS {
        let router = beside(&fleet, &flow);
        let reading = |worker: &Process| worker.metric("sglang:num_running_reqs{", "") > 0.0;
        for at_decode in [false, true] {
            fleet.prefill[0].post("/flush_cache", "");
            let mut leg = Leg::open(router.address, "/v1/completions", "", &asked(300));
            if at_decode {
                leg.await_events(2);
            } else {
                let begun = Instant::now();
                while !reading(&fleet.prefill[0]) {
                    assert!(begun.elapsed() < PATIENCE, "no worker computes the prompt");
                }
            }
            drop(leg);
            for worker in fleet.workers() {
                worker.await_idle_within(KEPT_KV_LIFE / 2);
            }
        }
        // The next client is served.
        assert_eq!(
            post(
                router.address,
                "/v1/completions",
                &json!({"prompt": [5, 6], "max_tokens": 2}).to_string()
            )
            .0,
            200
        );
    }
    fleet.check_idle();
}

/// KV that decode cannot take is not kept any longer.
#[test]
fn kv_that_decode_refuses_is_not_kept() {
    let dummy = Dummy::new(&json!({ "max_position_embeddings": 8192 }));
    let prefill = dummy.start("prefill", &["--bootstrap-port", "0", "--max-running-requests", "4"]);
    let small = dummy.start("decode", &["--kv-memory", "1MiB", "--max-running-requests", "4"]);
    let mut fleet = Fleet::new(vec![prefill], vec![small]);
    let ids: Vec<u32> = (0..5000).map(|i| 3 + (i * 7) % 380).collect();
    let body = json!({ "prompt": ids, "max_tokens": 4 }).to_string();
    let expected = fleet.router.post("/v1/completions", &body);
    assert_eq!(expected.0, 400, "{}", expected.1);
    for flow in FLOWS {
        let router = beside(&fleet, &flow);
        assert_eq!(router.post("/v1/completions", &body), expected, "{flow:?}");
        for worker in fleet.workers() {
            worker.await_idle_within(KEPT_KV_LIFE / 2);
        }
    }
    fleet.check_idle();
}

/// A prefill worker refuses: its cause reaches the client, and another worker is tried first.
#[test]
fn a_prefill_worker_that_drains_is_gone_round_in_every_flow() {
    for flow in FLOWS {
        let workers = vec![prefill(&[]), prefill(&[])];
        let fleet = Fleet::with(
            workers,
            vec![start("decode", &[])],
            &[&flow[..], &["--policy", "round_robin"]].concat(),
        );
        // During its drain it still keeps the KV of the first request, so it does not end.
        let keep = json!({"prompt": [1, 2, 3], "kv_transfer_params": {"do_remote_decode": true}});
        assert_eq!(fleet.prefill[0].post("/v1/completions", &keep.to_string()).0, 200);
        fleet.prefill[0].post("/drain", "");
        for salt in 0..6 {
            let (status, answer) =
                fleet.router.post("/v1/completions", &body(salt, 40, 4).to_string());
            assert_eq!(status, 200, "{flow:?} {answer}");
        }
    }
}

/// The answer and the abort can cross on their way.
#[test]
fn kept_kv_of_a_request_is_released_by_its_name() {
    let worker = prefill(&[]);
    let mut keep = body(1, 40, 1);
    keep["kv_transfer_params"] = json!({"do_remote_decode": true});
    keep["rid"] = json!("job-7");
    assert_eq!(worker.post("/v1/completions", &keep.to_string()).0, 200);
    let abort = |rid: &str| {
        let (status, answer) = worker.post("/abort_request", &json!({ "rid": rid }).to_string());
        assert_eq!(status, 200, "{answer}");
        serde_json::from_str::<Value>(&answer).unwrap()["aborted"].clone()
    };
    assert_eq!((abort("job-8"), abort("job-7")), (json!(0), json!(1)));
    worker.await_idle();
    assert_eq!(abort("job-7"), 0);
}

/// That one choice has begun says nothing about the others: their prefill worker can be another
/// process by now.
#[test]
fn a_choice_that_has_not_begun_does_not_wait_for_a_prefill_worker_that_is_lost() {
    let (reader, decode) = (prefill(&[]), start("decode", &[]));
    // KV of the first choice alone; the room after it is unknown.
    let mut keep = body(1, 40, 1);
    keep["kv_transfer_params"] = json!({"do_remote_decode": true});
    let (status, kept) = reader.post("/v1/completions", &keep.to_string());
    assert_eq!(status, 200, "{kept}");
    let kept: Value = serde_json::from_str(&kept).unwrap();
    let event = json!({ "kv_transfer_params": kept["kv_transfer_params"] });
    let front = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut asked = body(1, 40, 8);
    (asked["n"], asked["stream"]) = (json!(2), json!(true));
    asked["baton_prefill"] =
        json!({"host": "127.0.0.1", "port": front.local_addr().unwrap().port()});
    let mut leg = Leg::open(decode.address, "/v1/completions", "", &asked);
    let (mut prefill, _) = front.accept().unwrap();
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";
    prefill.write_all(format!("{head}data: {event}\n\n").as_bytes()).unwrap();
    leg.await_words("\"index\":0");
    drop(prefill);
    let answer = leg.end();
    assert!(
        answer.contains("\"code\":\"peer_lost\"") && !answer.contains("\"index\":1"),
        "{answer}"
    );
    for worker in [&reader, &decode] {
        worker.await_idle();
    }
}

/// Prefill's refusal reaches the client unchanged, in every flow.
#[test]
fn a_refusal_by_prefill_reaches_the_client_unchanged() {
    let (reader, decode) = (prefill(&["--max-model-len", "64"]), start("decode", &[]));
    let mut body = body(1, 80, 4);
    body["kv_transfer_params"] = json!({"do_remote_decode": true});
    let expected = reader.post("/v1/completions", &body.to_string());
    assert!(expected.0 == 400 && expected.1.contains("context_length_exceeded"), "{expected:?}");
    body.as_object_mut().unwrap().remove("kv_transfer_params");
    body["baton_prefill"] = json!({"host": "127.0.0.1", "port": reader.address.port()});
    assert_eq!(decode.post("/v1/completions", &body.to_string()), expected);
    decode.await_idle();
}

/// While decode generates an answer that is sent as a whole, prefill has finished its part.
#[test]
fn a_prefill_worker_is_no_longer_charged_once_decode_generates() {
    let dummy = Dummy::slow();
    let reader = dummy.start("prefill", &["--bootstrap-port", "0"]);
    let mut fleet = Fleet::with(vec![reader], vec![dummy.start("decode", &[])], &FLOWS[1]);
    let address = fleet.router.address;
    let body = json!({"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": true}).to_string();
    let client = thread::spawn(move || post(address, "/v1/completions", &body));
    let active = |worker: &Process| {
        fleet
            .router
            .metric("smg_worker_requests_active{", &format!("\"http://{}\"", worker.address))
    };
    let begun = Instant::now();
    while active(&fleet.decode[0]) < 1.0 || active(&fleet.prefill[0]) > 0.0 {
        assert!(
            !client.is_finished() && begun.elapsed() < PATIENCE,
            "prefill is charged to the end"
        );
    }
    assert!(!client.is_finished() && active(&fleet.decode[0]) == 1.0, "it is still being made");
    let (status, answer) = client.join().unwrap();
    assert_eq!(status, 200, "{answer}");
    fleet.check_idle();
}

#[test]
fn a_prefill_worker_that_may_not_be_asked_is_refused_by_name() {
    let (reader, decode) = (prefill(&[]), start("decode", &[]));
    let asking = |address: Value| {
        let mut body = body(1, 20, 4);
        body["baton_prefill"] = address;
        body.to_string()
    };
    let address = json!({"host": "127.0.0.1", "port": reader.address.port()});
    let (status, answer) = reader.post("/v1/completions", &asking(address.clone()));
    assert!(
        status == 400 && answer.contains("baton_prefill") && answer.contains("no decode worker"),
        "{answer}"
    );
    let (status, answer) = decode.post("/v1/completions", &asking(json!({"host": "127.0.0.1"})));
    assert!(status == 400 && answer.contains("baton_prefill"), "{answer}");
    for nobody in [
        json!({"host": "192.0.2.1", "port": 9}),
        json!({"host": "nowhere.invalid", "port": 9}),
        json!({"host": "127.0.0.1", "port": reader.bootstrap_port}),
    ] {
        let (status, answer) = decode.post("/v1/completions", &asking(nobody.clone()));
        assert!(
            status >= 400 && answer.contains("\"param\":\"bootstrap_host\""),
            "{nobody}: {answer}"
        );
    }
    // The same if only the end of a choice was missing.
    let mut behind: Value =
        serde_json::from_str(&asking(json!({"host": "127.0.0.1", "port": 9}))).unwrap();
    (behind["stream"], behind["n"], behind["stop"]) = (json!(true), json!(2), json!(null));
    behind["baton_resume"] = json!({"created": 1, "choices": [{"ids": [5, 6, 7, 8]}, null]});
    let answer = Leg::open(decode.address, "/v1/completions", "", &behind).end();
    assert!(
        answer.contains("\"finish_reason\":\"length\"") && answer.contains("bootstrap_host"),
        "{answer}"
    );
    let well: Value = serde_json::from_str(&asking(address)).unwrap();
    let answer = Leg::open(decode.address, "/v1/completions", "", &well).end();
    assert!(answer.starts_with("HTTP/1.1 102 ") && answer.contains("HTTP/1.1 200 OK"), "{answer}");
    reader.await_idle();
    decode.await_idle();
}
