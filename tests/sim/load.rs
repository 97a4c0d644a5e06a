//! The load mode. Its times agree with its models, no resource stays in use, and runs repeat
//! exactly. Settings that must be worse are worse.

use baton::cli::flags::{SimCommand, SimEngine};
use baton::cli::{self, HostInfo, Invocation};
use baton::ids::DecodeAllocation;
use baton::planner::cluster::LoadCluster;
use baton::planner::place::{FleetResult, Search};
use baton::planner::plan::LoadPlan;
use baton::planner::report::Summary;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// An excerpt of a Mooncake trace.
const TRACE: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/tests/traces/mooncake_conversation_100.jsonl");

/// The plan of `baton sim --load` with these words.
fn plan(words: &str) -> Result<LoadPlan, String> {
    let arguments = ["baton", "sim", "--load"].into_iter().chain(words.split_whitespace());
    match cli::parse(arguments, &HostInfo::of_this_process()) {
        Ok(Invocation::Sim(flags)) => LoadPlan::new(&flags).map_err(|error| error.to_string()),
        Ok(_) => unreachable!("that is another command"),
        Err(error) => Err(error.to_string()),
    }
}

/// Runs the plan. The run itself checks that nothing is left over.
fn simulate(words: &str) -> Summary {
    super::quiet();
    let plan = plan(words).unwrap_or_else(|error| panic!("{words}: {error}"));
    let arrivals = plan.arrivals().unwrap_or_else(|error| panic!("{words}: {error}"));
    LoadCluster::new(&plan, &arrivals).run().unwrap_or_else(|failure| panic!("{words}: {failure}"))
}

/// A trace of these requests: milliseconds, prompt, answer, blocks.
fn trace(name: &str, requests: &[(u32, u32, u32, &str)]) -> PathBuf {
    let line = |&(at, input, output, blocks): &(u32, u32, u32, &str)| {
        format!(
            "{{\"timestamp\": {at}, \"input_length\": {input}, \
             \"output_length\": {output}, \"hash_ids\": [{blocks}]}}\n"
        )
    };
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.jsonl"));
    fs::write(&path, requests.iter().map(line).collect::<String>()).unwrap();
    path
}

/// A token takes 50 µs to compute and 1 µs to move, a step 10 ms more, a message 0.1 ms, a session
/// nothing.
const PLAIN: &str = "--prefill 1 --decode 1 --prefill-ms 10,0.05,0 --decode-ms 10,0,0 \
          --kv-bytes-per-token 25000 \
                     --nic-gigabytes 25 --latency-us 100 --kv-tokens 65536 --session-ms 0";

#[test]
fn an_idle_cluster_takes_the_time_that_the_models_say() {
    let path = trace("idle", &[(0, 12_000, 5, "1,2"), (5000, 1024, 1, "1,2")]);
    let one = simulate(&format!("{PLAIN} --trace-file {} --requests 1", path.display()));
    let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-5, "{a} is not {b}");
    // Two chunks: the first is transferred while the second is computed. Then the request,
    // Destination and the last byte.
    let ttft = (10.0 + 0.05 * 8192.0) + (10.0 + 0.05 * 3808.0) + 3.808 + 3.0 * 0.1;
    close(one.ttft_ms.mean, ttft);
    // The first token is sent before the step of the second.
    close(one.e2e_ms.mean, ttft + 4.0 * 10.0);
    close(one.tpot_ms.mean, 10.0);
    // Late: nothing is transferred before all is computed. Then the request, Interest, Ready,
    // Destination and the last byte.
    let late =
        format!("{PLAIN} --trace-file {} --requests 1 --decode-allocation late", path.display());
    let late_ttft = (10.0 + 0.05 * 8192.0) + (10.0 + 0.05 * 3808.0) + 12.0 + 5.0 * 0.1;
    close(simulate(&late).ttft_ms.mean, late_ttft);
    assert_eq!((one.kv_bytes, one.prefix_reuse), (12_000 * 25_000, 0.0));

    // Both workers have the second prompt except the part that is computed for its logits: the last
    // page.
    let two = simulate(&format!("{PLAIN} --trace-file {}", path.display()));
    close(two.ttft_ms.mean * 2.0 - ttft, 10.0 + 0.05 * 16.0 + 0.016 + 3.0 * 0.1);
    assert_eq!(two.kv_bytes, (12_000 + 16) * 25_000);
    close(two.prefix_reuse, 1008.0 / 13_024.0);

    let without =
        simulate(&format!("{PLAIN} --disable-radix-cache --trace-file {}", path.display()));
    close(without.ttft_ms.mean * 2.0 - ttft, 10.0 + 0.05 * 1024.0 + 1.024 + 3.0 * 0.1);
    assert_eq!(without.prefix_reuse, 0.0);
}

/// KV that only the prefill worker has is transferred while the rest is computed.
#[test]
fn cached_kv_is_sent_before_the_pass() {
    let path =
        trace("cached", &[(0, 4096, 1, "1,2,3,4,5,6,7,8"), (2000, 8192, 1, "1,2,3,4,5,6,7,8")]);
    let two = PLAIN.replace("--decode 1", "--decode 2");
    let summary = simulate(&format!("{two} --policy round_robin --trace-file {}", path.display()));
    let first = 10.0 + 0.05 * 4096.0 + 4.096 + 0.3;
    let second = 10.0 + 0.05 * 4096.0 + 4.096 + 0.3;
    assert!((summary.ttft_ms.mean - (first + second) / 2.0).abs() < 1e-5, "{:?}", summary.ttft_ms);
    assert_eq!(summary.kv_bytes, (4096 + 8192) * 25_000, "the other decode worker has none of it");
}

#[test]
fn transfers_that_share_a_nic_wait_for_it() {
    // Two prompts of a page, each of which uses its NICs for 16 s. Nothing else takes time.
    let path = trace("nic", &[(0, 16, 1, ""), (0, 16, 1, "")]);
    let ttft = |prefill: u32, decode: u32| {
        let words = format!(
            "--prefill {prefill} --decode {decode} --prefill-ms 0,0,0 --decode-ms 0,0,0 \
             --kv-bytes-per-token 1000000000 --nic-gigabytes 1 --latency-us 0 --session-ms 0 \
             --kv-tokens 65536 --policy round_robin --trace-file {}",
            path.display()
        );
        let summary = simulate(&words);
        (summary.ttft_ms.p50, summary.ttft_ms.max)
    };
    assert_eq!(ttft(1, 2), (16_000.0, 32_000.0), "the source's");
    assert_eq!(ttft(2, 1), (16_000.0, 32_000.0), "the destination's");
    assert_eq!(ttft(2, 2), (16_000.0, 16_000.0));
}

/// A decode worker has one session, with prefill workers that take turns.
#[test]
fn a_session_takes_time_and_an_idle_one_gives_way() {
    let path = trace("sessions", &[0, 1000, 2000, 3000].map(|at| (at, 16, 1, "")));
    let words = |sessions: u32, allocation: &str| {
        format!(
            "--prefill 2 --decode 1 --prefill-ms 10,0,0 --decode-ms 10,0,0 --latency-us 0 \
             --kv-tokens 65536 --policy round_robin --nic-gigabytes 1e9 --session-ms 40 \
             --sessions {sessions} --decode-allocation {allocation} --trace-file {}",
            path.display()
        )
    };
    // The prompt is computed when its worker knows where its KV goes.
    for allocation in ["early", "late"] {
        let [one, two] = [1, 2].map(|sessions| simulate(&words(sessions, allocation)));
        assert_eq!((one.sessions, one.sessions_replaced), (4, 3));
        assert_eq!((two.sessions, two.sessions_replaced), (2, 0));
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-3, "{allocation}: {a} is not {b}");
        let slow = [one.ttft_ms.p50, one.ttft_ms.max, two.ttft_ms.max];
        slow.into_iter().for_each(|found| close(found, 40.0 + 10.0));
        close(two.ttft_ms.p50, 10.0);
    }
    // The second prompt comes while the only session has a request.
    let at_once = trace("busy", &[(0, 16, 1, ""), (0, 16, 1, "")]);
    let (apart, at_once) = (path.display().to_string(), at_once.display().to_string());
    let busy = simulate(&words(1, "early").replace(&apart, &at_once));
    assert_eq!((busy.completed, busy.sessions, busy.refused["overloaded"]), (1, 1, 1));
}

const SMALL: &str = "--kv-tokens 16384 --requests 400";

#[test]
fn a_load_repeats_itself_and_another_seed_is_another() {
    let figures = |words: &str| {
        let mut value = serde_json::to_value(simulate(words)).unwrap();
        for wall in ["wall_s", "simulated_per_wall", "requests_per_wall_minute"] {
            assert!(value.as_object_mut().unwrap().shift_remove(wall).is_some());
        }
        value
    };
    let one = figures(SMALL);
    assert_eq!(one, figures(SMALL));
    assert_ne!(one["hash"], figures(&format!("{SMALL} --seed 2"))["hash"]);
    assert_eq!(one["completed"], 400);
    // The same hash, wherever it is shown.
    let summary = simulate(SMALL);
    assert_eq!((summary.hash.len(), one["hash"].as_str()), (16, Some(summary.hash.as_str())));
    assert!(summary.to_string().ends_with(&format!("hash {}", summary.hash)));
}

#[test]
fn a_trace_is_served_to_its_end() {
    let words = format!(
        "--prefill 2 --decode 2 --page-size 64 --kv-tokens 131072 --requests 16 \
         --trace-file {TRACE}"
    );
    let summary = simulate(&words);
    assert_eq!((summary.requests, summary.completed), (16, 16));
    assert!(summary.prefix_reuse > 0.0, "all prompts of this trace begin with one block");
    let faster = simulate(&format!("{words} --speed 20"));
    assert!(faster.ttft_ms.mean > 1.3 * summary.ttft_ms.mean, "they come nearly at once");
    let spread = simulate(&format!("{words} --jitter-ms 3000"));
    assert!(spread.ttft_ms.mean < 0.9 * summary.ttft_ms.mean, "they do not come in bursts");
}

#[test]
fn a_request_that_finds_all_workers_full_is_refused_and_leaves_nothing() {
    let words = format!(
        "{SMALL} --prefill 1 --decode 1 --rate 1e5 --max-running-requests 4 --max-queued-requests 2"
    );
    let summary = simulate(&words);
    let refused: usize = summary.refused.values().sum();
    assert!(summary.refused["overloaded"] == refused && refused > 300, "{:?}", summary.refused);
    assert_eq!(summary.completed + refused, 400);
    assert!(summary.good <= summary.completed && summary.goodput < 0.3);
    // If memory admits only one or two, places in the batch are no places to wait.
    let scarce = SMALL.replace("16384", "256");
    let places =
        "--prefill 1 --decode 1 --rate 1e5 --max-running-requests 64 --max-queued-requests 2";
    let summary = simulate(&format!("{scarce} {places}"));
    assert!((3..33).contains(&summary.completed), "{} are served", summary.completed);
}

#[test]
fn a_policy_that_sees_less_is_worse_and_more_workers_are_not() {
    // Every other prompt is long, so a policy that takes turns gives all long ones to one of two
    // workers.
    let long_and_short = (0..60)
        .map(|index| (index * 150, if index % 2 == 0 { 4000 } else { 40 }, 3, ""))
        .collect::<Vec<_>>();
    let path = trace("turns", &long_and_short);
    let words = |policy: &str, prefill: u32| {
        format!(
            "--prefill {prefill} --decode 2 --prefill-ms 10,0.08,0 --kv-tokens 65536 \
             --session-ms 0 --policy {policy} --trace-file {}",
            path.display()
        )
    };
    let (turns, least) = (simulate(&words("round_robin", 2)), simulate(&words("least_loaded", 2)));
    assert!(
        turns.ttft_ms.mean > 1.5 * least.ttft_ms.mean,
        "{} {}",
        turns.ttft_ms.mean,
        least.ttft_ms.mean
    );
    assert!(turns.prefill.tokens_max_to_mean > 1.9 && least.prefill.tokens_max_to_mean < 1.6);
    let (one, four) = (simulate(&words("least_loaded", 1)), simulate(&words("least_loaded", 4)));
    assert!(one.ttft_ms.mean > least.ttft_ms.mean && least.ttft_ms.mean >= four.ttft_ms.mean);
    assert!(one.e2e_ms.p99 >= least.e2e_ms.p99 && least.e2e_ms.p99 >= four.e2e_ms.p99);
}

#[test]
fn without_a_prefill_worker_decode_reads_the_prompts_itself() {
    let path = trace("whole", &[(0, 12_000, 5, "1,2"), (5000, 1024, 1, "1,2")]);
    let alone = PLAIN.replace("--prefill 1", "--prefill 0");
    let summary = simulate(&format!("{alone} --trace-file {}", path.display()));
    let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-5, "{a} is not {b}");
    // Two chunks and a message. What the first request left in the cache is not computed again.
    let first = (10.0 + 0.05 * 8192.0) + (10.0 + 0.05 * 3808.0) + 0.1;
    // Sent with the step after the pass.
    close(summary.ttft_ms.max, first + 10.0);
    close(summary.ttft_ms.p50, 10.0 + 0.05 * 16.0 + 0.1);
    close(summary.e2e_ms.max, first + 4.0 * 10.0);
    assert_eq!((summary.kv_bytes, summary.prefill.workers, summary.wasted_tokens), (0, 0, 0));
    close(summary.prefix_reuse, 1008.0 / 13_024.0);
}

#[test]
fn packed_traces_of_both_kinds_are_read() {
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/data");
    let arrivals =
        |file: &str| plan(&format!("--trace-file {data}/{file}")).unwrap().arrivals().unwrap();
    let conversation = arrivals("mooncake/conversation_trace.jsonl.zst");
    let input = |list: &[baton::planner::arrivals::RequestArrival]| {
        list.iter().map(|request| u64::from(request.input)).sum::<u64>()
    };
    assert_eq!((conversation.list().len(), input(conversation.list())), (12_031, 144_793_823));
    let (code, chat) =
        ("azure/AzureLLMInferenceTrace_code.csv.zst", "azure/AzureLLMInferenceTrace_conv.csv.zst");
    assert_eq!((arrivals(code).list().len(), arrivals(chat).list().len()), (8819, 19_366));
    let last = arrivals(code).list().last().unwrap().at;
    assert_eq!(last / 1_000_000_000, 3435, "they come for so many seconds");
}

#[test]
fn recorded_runs_are_run_again_beside_theirs() {
    let data = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/benches/data/baselines/dynamo_replay_1.6.1.jsonl.zst"
    );
    let words =
        format!("--against {data} --rows poly_4P4D --requests 100 --policies round_robin,slo");
    assert!(baton::planner::run(&plan(&words).unwrap()).unwrap());
    let none = plan(&format!("--against {data} --rows none")).unwrap();
    assert!(baton::planner::run(&none).unwrap_err().to_string().contains("none of its runs"));
    assert!(plan(&format!("--against {data} --policy slo")).unwrap_err().contains("--policy"));
}

#[test]
fn slo_refuses_requests_that_no_worker_would_serve_in_time() {
    let words = format!(
        "--prefill 3 --decode 3 --page-size 64 --kv-tokens 524288 --speed 20 --trace-file {TRACE}"
    );
    let [turns, foretells] =
        ["round_robin", "slo"].map(|policy| simulate(&format!("{words} --policy {policy}")));
    assert!(turns.early == 0 && foretells.early > 0);
    assert_eq!(foretells.refused["overloaded"], foretells.early);
    assert!(foretells.goodput > turns.goodput && foretells.ttft_ms.p99 < turns.ttft_ms.p99);
    let all = simulate(&format!("{words} --policy slo --admit-late"));
    assert_eq!((all.early, all.completed), (0, 100));
}

#[test]
fn checkpoints_let_prompts_with_state_reuse_their_beginning() {
    // The second prompt shows where the three part. They have whole pages.
    let path = trace(
        "state",
        &[
            (0, 3008, 1, "1, 2, 3, 4, 5, 6"),
            (9000, 3008, 1, "1, 2, 3, 4, 7, 8"),
            (18_000, 3008, 1, "1, 2, 3, 4, 9, 10"),
        ],
    );
    let words = format!(
        "--prefill 1 --decode 1 --page-size 64 --kv-tokens 65536 --trace-file {}",
        path.display()
    );
    let run = |more: &str| simulate(&format!("{words} {more}"));
    let (plain, none) = (run(""), run("--state-tokens 640 --checkpoints 0"));
    let kept = run("--state-tokens 640");
    assert_eq!((plain.prefix_reuse, none.prefix_reuse), (4096.0 / 9024.0, 0.0));
    assert_eq!(kept.prefix_reuse, 2048.0 / 9024.0);
    // Decode has the common KV in each run.
    assert_eq!(none.kv_bytes - plain.kv_bytes, 3 * 640 * (128 << 10));
    assert_eq!(kept.kv_bytes, none.kv_bytes);
}

#[test]
fn invalid_flags_and_traces_are_refused_by_name() {
    let refused = |words: &str, what: &str| {
        let plan = plan(words);
        let error =
            plan.and_then(|plan| plan.arrivals().map(|_| ()).map_err(|error| error.to_string()));
        let error = error.expect_err(words);
        assert!(error.contains(what), "{words}: {error}");
    };
    refused("--rate 0", "--rate 0: a number above 0");
    refused("--rate 1 --trace-file x", "--rate and --trace-file");
    refused("--speed 2", "--trace-file is needed: --speed");
    refused("--page-size 24", "--page-size 24: a power of two");
    refused("--prefill-ms 1,2", "--prefill-ms 1,2: three or four numbers");
    refused(
        "--prefill-ms -1,2,3",
        "--prefill-ms -1,2,3: a step of up to 8192 tokens must not take less than 0 ms",
    );
    refused("--decode-ms 1,2,-3", "--decode-ms 1,2,-3: a step of up to 819200 tokens");
    refused("--decode-ms 1,2,3,-4", "--decode-ms 1,2,3,-4: a step");
    refused("--decode-ms 1,2,inf", "--decode-ms 1,2,inf: three or four numbers that are finite");
    // A cost that grows more and more slowly is still above 0.
    assert!(plan("--kv-tokens 1048576 --decode-ms 5.74,5.1508e-5,0,-2.3411e-11").is_ok());
    refused("--rate -1", "--rate -1: a number above 0");
    refused("--slo-ttft-ms=-1", "--slo-ttft-ms -1");
    refused("--slo-ttft-ms 0", "--slo-ttft-ms 0: above 0");
    refused("--slo-itl-ms 0", "--slo-itl-ms 0: above 0");
    refused("--checkpoints 3", "--checkpoints 3: is only for --state-tokens");
    refused("--state-tokens 9 --checkpoints 3 --disable-radix-cache", "--checkpoints 3: must be 0");
    refused("--flow dual", "--flow and --load: load mode calls both workers at once");
    refused("--trace-file /nowhere.jsonl", "--trace-file /nowhere.jsonl");
    refused("--seeds 3", "cannot be used with '--seeds <K>'");
    refused("--calm", "cannot be used with '--calm'");
    refused("--prefill 1025", "--prefill");
    let path = trace("long", &[(0, 100, 1, ""), (1, 5000, 1, "")]);
    refused(
        &format!("--kv-tokens 4096 --trace-file {}", path.display()),
        "--kv-tokens 4096: a request has 5001",
    );
    refused(
        &format!("--requests 3 --trace-file {}", path.display()),
        "--requests 3: there are 2 in --trace-file",
    );
    let path = trace("bad", &[(0, 100, 1, ""), (1, 100, 0, "")]);
    refused(&format!("--trace-file {}", path.display()), "line 2: output_length 0");
}

/// Long prompts with a decode worker that is short of KV. Waiting prompts are computed meanwhile,
/// and empty pages are not reserved. With enough pages, late is a little later.
#[test]
fn late_allocation_pays_if_decode_is_short_of_kv() {
    let requests: Vec<_> = (0..40).map(|at| (at * 100, 8000, 100, "")).collect();
    let path = trace("late", &requests);
    let ttft = |allocation: &str, tokens: u32| {
        let words = "--prefill 2 --decode 1 --prefill-ms 10,0.05,0 --decode-ms 10,0,0 \
            --disable-radix-cache";
        let file = path.display();
        simulate(&format!(
            "{words} --kv-tokens {tokens} --trace-file {file} --decode-allocation {allocation}"
        ))
        .ttft_ms
        .mean
    };
    let (early, late) = (ttft("early", 20_000), ttft("late", 20_000));
    assert!(late < early * 0.9, "short of KV: {late} ms beside {early} ms");
    // A Destination is seen at the end of a pass, so it waits for up to one pass.
    let (early, late) = (ttft("early", 800_000), ttft("late", 800_000));
    assert!(
        early < late && late < early + 10.0 + 0.05 * 8192.0,
        "enough of it: {late} ms beside {early} ms"
    );
}

/// In the recorded engine, KV is transferred when a prompt is computed, whatever its prefill worker
/// computes next.
#[test]
fn the_recorded_engine_hands_over_while_the_next_prompt_is_read() {
    super::quiet();
    let path = trace("recorded", &[(0, 8192, 5, ""), (0, 8192, 5, "")]);
    let plan = plan(&format!("{PLAIN} --trace-file {}", path.display())).unwrap();
    let plan = LoadPlan { engine: SimEngine::Recorded, allocation: DecodeAllocation::Late, ..plan };
    let arrivals = plan.arrivals().unwrap();
    let two = LoadCluster::new(&plan, &arrivals).run().unwrap();
    // The request's transfer, its pass, the message that it is computed, all of its KV, and the
    // step of its first token.
    let first = 0.1 + (10.0 + 0.05 * 8192.0) + 0.1 + 8.192 + 10.0;
    assert!((two.ttft_ms.p50 - first).abs() < 1e-5, "{} is not {first}", two.ttft_ms.p50);
}

/// The plan of `baton sim place` with these words.
fn search(words: &str) -> Result<Search, String> {
    let arguments = ["baton", "sim", "place"].into_iter().chain(words.split_whitespace());
    match cli::parse(arguments, &HostInfo::of_this_process()) {
        Ok(Invocation::Sim(flags)) => match &flags.command {
            Some(SimCommand::Place(place)) => Search::new(place).map_err(|error| error.to_string()),
            None => unreachable!("that is another command"),
        },
        Ok(_) => unreachable!("that is another command"),
        Err(error) => Err(error.to_string()),
    }
}

/// The result of the search.
fn place(words: &str) -> Result<Vec<FleetResult>, String> {
    search(words)?.run().map_err(|error| error.to_string())?.map_err(|failure| failure.to_string())
}

/// One fleet at a time.
#[test]
fn a_search_reports_each_fleet_that_it_tries() {
    super::quiet();
    let words = "--workers 3 --rate 1 --prefill-ms 0,1,0 --decode-ms 4,0,1 --slo-ttft-ms 2000 \
        --slo-itl-ms 11 \
                 --requests 20 --kv-tokens 8192";
    let told = Mutex::new(Vec::new());
    let found =
        search(words).unwrap().run_telling(&|words| told.lock().unwrap().push(words.to_owned()));
    let (found, told) = (found.unwrap().unwrap(), told.into_inner().unwrap());
    assert!(told.len() >= found.len(), "{told:?}");
    for standing in &found {
        assert!(
            told.iter().any(|words| words.contains(&format!(": {}: ", standing.fleet))),
            "{told:?}"
        );
    }
}

/// A prefill worker computes a thousand tokens a second, and a decode worker generates 640 within
/// the limit. So three compute what one answers, or one computes what three answer. A mixed worker
/// delays its streams.
#[test]
fn the_fleet_that_sustains_most_is_the_one_that_the_work_asks_for() {
    super::quiet();
    let load = |input: u32, output: u32| {
        format!(
            "--prefill-ms 0,1,0 --decode-ms 4,0,1 --input-len {input} --output-len {output} \
             --slo-ttft-ms 2000 \
             --slo-itl-ms 11 --requests 120 --kv-tokens 8192 --page-size 64"
        )
    };
    let find = |workers, input, output| {
        place(&format!("--workers {workers} --rate 1 {}", load(input, output))).unwrap()
    };
    let found = find(4, 450, 64);
    let best = &found[0];
    assert_eq!((best.fleet.prefill, best.fleet.decode), (3, 1), "{found:?}");
    assert_eq!(found.len(), 4, "each split, and workers that do both");
    assert!(found[..3].windows(2).all(|pair| pair[0].factor >= pair[1].factor), "{found:?}");
    // The best fleet sustains the reported rate, and misses a higher one.
    let flags = load(450, 64).replace("--requests 120", &format!("--requests {}", best.requests));
    let at = |rate: f64| simulate(&format!("--prefill 3 --decode 1 --rate {rate} {flags}")).goodput;
    assert!(
        (at(best.factor) - best.goodput).abs() < 0.02 && at(best.factor * 1.3) < 0.9,
        "{found:?}"
    );
    let other = find(4, 100, 192)[0].fleet;
    assert_eq!((other.prefill, other.decode), (1, 3));
    let twice = [(); 2].map(|()| format!("{:?}", find(2, 100, 64)));
    assert_eq!(twice[0], twice[1], "it repeats itself");
    assert!(found.iter().all(|one| one.is_bounded));
    // However few requests are given, each rate is judged by all that arrive in the same time.
    let flags = load(450, 64).replace("--requests 120", "--requests 5");
    let few = place(&format!("--workers 1 --rate 1 {flags}")).unwrap();
    let more = place(&format!("--workers 1 --rate 1 {}", load(450, 64))).unwrap();
    assert!(few[0].is_bounded, "they would keep the limits if they came at once: {few:?}");
    // With about twenty requests, chance matters much.
    let ratio = few[0].requests_per_s / more[0].requests_per_s;
    assert!((0.3..3.0).contains(&ratio), "{few:?} {more:?}");
    assert!(place("--trace-file x").unwrap_err().contains("--workers"));
    assert!(place("--gpus 7 --gpus-per-worker 2").unwrap_err().contains("--gpus 7: a multiple of"));
    assert!(place("--workers 2 --goodput 0").unwrap_err().contains("--goodput 0"));
}

/// A trace with a priority for each request: milliseconds, prompt tokens, priority.
fn urgent_trace(name: &str, requests: impl Iterator<Item = (u32, u32, i32)>) -> PathBuf {
    let line = |(at, input, priority): (u32, u32, i32)| {
        format!(
            "{{\"timestamp\": {at}, \"input_length\": {input}, \"output_length\": 1, \
             \"priority\": {priority}}}\n"
        )
    };
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.jsonl"));
    fs::write(&path, requests.map(line).collect::<String>()).unwrap();
    path
}

/// A prompt of a whole chunk, and its time of 419.6 ms.
const CHUNK: u32 = 8192;
const CHUNK_MS: f64 = 10.0 + 0.05 * CHUNK as f64;

/// [`PLAIN`] with memory for all prompts.
fn roomy() -> String {
    PLAIN.replace("--kv-tokens 65536", "--kv-tokens 1000000")
}

#[test]
fn a_request_with_a_high_priority_passes_those_that_wait() {
    let good = |priority: i32| {
        // At 2 s, the first four prompts are computed, the fifth is begun, and three wait.
        let usual = (0..8).map(|_| (0, CHUNK, 0));
        let path =
            urgent_trace(&format!("urgent{priority}"), usual.chain([(2000, CHUNK, priority)]));
        let words = format!("{} --slo-ttft-ms 900 --trace-file {}", roomy(), path.display());
        simulate(&words).good
    };
    // Two of the others have their first token within 900 ms.
    assert_eq!((good(-1), good(0), good(1)), (3, 2, 2));
}

/// Urgent requests come as fast as they are served, and one request of the usual priority waits.
#[test]
fn no_request_starves_behind_urgent_ones() {
    let steady = (0..150).map(|number| (number * 420, CHUNK, -1));
    let queued = (0..5).map(|_| (0, CHUNK, -1));
    let plain = roomy();
    let path = urgent_trace("starved", queued.chain([(1, CHUNK, 0)]).chain(steady));
    let run = simulate(&format!("{plain} --trace-file {}", path.display()));
    assert_eq!(run.completed, 156);
    // 32 requests pass it, and some are before it. Without a bound it would be the last of 156.
    let most = 45.0 * CHUNK_MS;
    assert!(run.ttft_ms.max < most, "{} ms, at most {most} ms", run.ttft_ms.max);
    assert!(run.ttft_ms.max > 30.0 * CHUNK_MS, "it is passed");
}
