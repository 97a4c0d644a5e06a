//! Tests of `baton router` command lines, including lines written for sglang-router.

use crate::cli::{HostInfo, Invocation, parse};
use crate::config::{
    BreakerConfig, CacheAwareConfig, FirstToken, Flow, HealthConfig, Policies, Policy,
    RequestConfig, RetryConfig, RoleConfig, RouterConfig, SchedulingPolicy,
};
use crate::limits::RETRIES_DEFAULT;
use std::time::Duration;

fn here() -> HostInfo {
    HostInfo::of_one_cpu()
}

fn router(line: &str) -> (RouterConfig, Vec<String>) {
    match parse(format!("baton router {line}").split_whitespace(), &here()) {
        Ok(Invocation::Run { command, warnings }) => match *command {
            RoleConfig::Router(config) => (config, warnings),
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

fn refusal(line: &str) -> String {
    parse(format!("baton router {line}").split_whitespace(), &here()).unwrap_err().to_string()
}

#[test]
fn each_setting_without_a_flag_has_its_default() {
    let (config, warnings) = router("");
    assert_eq!(
        (config.retries, config.breaker),
        (RetryConfig::default(), BreakerConfig::default())
    );
    assert_eq!((config.health, &config.health_path[..]), (HealthConfig::default(), "/health"));
    let RequestConfig { queue, queue_time, .. } = config.requests;
    assert_eq!(config.requests, RequestConfig { queue, queue_time, ..RequestConfig::default() });
    assert_eq!((config.policies, config.metrics), (Policies::default(), None));
    assert_eq!(warnings, [""; 0]);
}

#[test]
fn urls_are_grouped_with_their_ports() {
    let (config, _) = router(
        "--pd-disaggregation --prefill http://a:1 9000 --prefill http://b:2 none --prefill http://c:3 \
         --decode http://e:5 --decode http://d:4",
    );
    let prefill: Vec<_> =
        config.prefill.iter().map(|e| (e.url.to_string(), e.bootstrap_port)).collect();
    let named = |url: &str, port| (url.to_owned(), port);
    assert_eq!(
        prefill,
        [named("http://a:1", Some(9000)), named("http://b:2", None), named("http://c:3", None)]
    );
    assert_eq!((config.decode.len(), config.server.port), (2, 8000));
    for line in
        ["--prefill none", "--prefill http://a:1 0", "--prefill http://a:1 65536", "--prefill 9000"]
    {
        assert!(refusal(line).starts_with("--prefill "), "{line}");
    }
}

#[test]
fn tries_are_counted_or_left_out() {
    assert_eq!(router("--retry-max-retries 7").0.retries.most, 6, "the first is counted");
    assert_eq!(router("--retry-max-retries 1").0.retries.most, 0);
    assert_eq!(router("").0.retries.most, RETRIES_DEFAULT);
    assert_eq!(router("--disable-retries").0.retries.most, 0);
    let both = refusal("--disable-retries --retry-max-retries 7");
    assert!(both.contains("--disable-retries") && both.contains("--retry-max-retries"), "{both}");
    let negative = refusal("--retry-max-retries -1");
    assert!(negative.contains("1..=100"), "{negative}");
}

#[test]
fn a_flow_is_dual_unless_said_and_no_other_has_prefill_s_token_first() {
    assert_eq!(router("").0.requests.flow, Flow::Dual);
    for (name, flow) in [
        ("dual", Flow::Dual),
        ("prefill-first", Flow::PrefillFirst),
        ("decode-first", Flow::DecodeFirst),
    ] {
        assert_eq!(router(&format!("--flow {name}")).0.requests.flow, flow);
        let both = format!("--flow {name} --first-token prefill");
        if flow == Flow::Dual {
            router(&both);
        } else {
            let why = refusal(&both);
            assert!(why.contains("--flow") && why.contains("--first-token prefill"), "{why}");
        }
    }
}

#[test]
fn thresholds_of_caches_are_for_the_policy_that_has_them() {
    let typed = "--cache-threshold 0.5 --balance-abs-threshold 8 --balance-rel-threshold 1.1";
    let cache = CacheAwareConfig { threshold: 0.5, ahead: 8, ratio: 1.1 };
    for policy in ["--policy", "--prefill-policy", "--decode-policy"] {
        assert_eq!(router(&format!("{policy} cache_aware {typed}")).0.cache, cache);
    }
    let (tuned, _) = router(typed);
    assert_eq!((tuned.cache, tuned.policies), (cache, Policies::from(Policy::CacheAware)));
    assert_eq!(router("--policy cache_aware").0.cache, CacheAwareConfig::default());
    let why = refusal("--policy slo --balance-abs-threshold 8");
    assert!(why.contains("--policy cache_aware is needed: --balance-abs-threshold"), "{why}");
    for odd in [
        "--cache-threshold 1.1",
        "--cache-threshold NaN",
        "--balance-rel-threshold 0.9",
        "--balance-rel-threshold inf",
    ] {
        let why = refusal(&format!("--policy cache_aware {odd}"));
        assert!(why.contains(odd.split(' ').next().unwrap()), "{why}");
    }
}

#[test]
fn flags_of_the_forecast_are_for_the_policies_that_have_one() {
    let flags = [
        "--slo-ttft-ms 500",
        "--slo-tpot-ms 50",
        "--prefill-ms 1,0,0",
        "--decode-ms 1,0,0",
        "--kv-bytes-per-token 1024",
        "--nic-gigabytes 25",
    ];
    for flag in flags {
        for policy in ["--policy slo", "--policy conditional", "--prefill-policy slo"] {
            router(&format!("{policy} {flag}"));
        }
        let name = flag.split(' ').next().unwrap();
        for policy in ["", "--policy least_loaded", "--policy lmetric", "--decode-policy random"] {
            let why = refusal(&format!("{policy} {flag}"));
            let needed = format!("--policy slo or conditional is needed: {name} has no effect");
            assert!(why.contains(&needed), "{policy} {flag}: {why}");
        }
    }
    // The role balancer uses the times of prefill.
    router("--rebalance --prefill-ms 1,0,0");
    assert!(refusal("--rebalance --decode-ms 1,0,0").contains("--decode-ms has no effect"));
}

/// All flags of sglang-router that Baton accepts, each with a value other than the default, and the
/// order of the queue.
#[test]
fn each_accepted_flag_of_sglang_router_sets_its_value() {
    let (config, warnings) = router(
        "--pd-disaggregation --prefill http://a:1 9000 --decode http://b:1 \
         --host 0.0.0.0 --port 30000 --policy round_robin --decode-policy least_loaded \
         --prometheus-port 29000 --prometheus-host 127.0.0.1 \
         --log-level warn --request-timeout-secs 600 --max-concurrent-requests 32 --queue-size 5 \
         --queue-timeout-secs 7 --first-token prefill --max-payload-size 1048576 \
         --scheduling-policy priority \
         --request-id-headers X-Trace-Id x-request-id \
         --retry-max-retries 2 --retry-initial-backoff-ms 50 --retry-max-backoff-ms 30000 \
         --retry-backoff-multiplier 1.5 --retry-jitter-factor 0.2 --cb-failure-threshold 10 \
         --cb-success-threshold 3 --cb-timeout-duration-secs 60 --cb-window-duration-secs 100 \
         --health-failure-threshold 3 --health-success-threshold 2 --health-check-timeout-secs 5 \
         --health-check-interval-secs 60 --health-check-endpoint /ready \
         --worker-startup-timeout-secs 1800 \
         --worker-startup-check-interval 30 --model-path m --tokenizer-path t",
    );
    let seconds = Duration::from_secs;
    assert_eq!(config.server.address(), "0.0.0.0:30000".parse().unwrap());
    assert_eq!(config.server.body_max, 1 << 20);
    assert_eq!(config.metrics, Some("127.0.0.1:29000".parse().unwrap()));
    assert_eq!(
        config.policies,
        Policies { prefill: Policy::RoundRobin, decode: Policy::LeastLoaded }
    );
    assert_eq!(
        config.requests,
        RequestConfig {
            timeout: Some(seconds(600)),
            concurrent: Some(32),
            queue: 5,
            queue_time: seconds(7),
            scheduling: SchedulingPolicy::Priority,
            flow: Flow::Dual,
            first_token: FirstToken::Prefill,
            id_headers: vec!["x-trace-id".into(), "x-request-id".into()],
        }
    );
    assert_eq!(
        config.retries,
        RetryConfig {
            most: 1,
            first: Duration::from_millis(50),
            longest: seconds(30),
            growth: 1.5,
            jitter: 0.2,
        }
    );
    assert_eq!(
        config.breaker,
        BreakerConfig { failures: Some(10), window: seconds(100), open: seconds(60), successes: 3 }
    );
    assert_eq!(
        config.health,
        HealthConfig {
            interval: seconds(60),
            time: seconds(5),
            failures: 3,
            successes: 2,
            first_interval: seconds(30),
            first_time: Some(seconds(1800)),
        }
    );
    assert_eq!(config.health_path, "/ready");
    let about =
        |flag: &str| warnings.iter().any(|warning| warning.starts_with(&format!("{flag}: ")));
    assert!(about("--model-path") && about("--tokenizer-path"), "{warnings:?}");
    assert_eq!(router("--disable-circuit-breaker").0.breaker.failures, None);
    assert_eq!(router("--max-concurrent-requests -1").0.requests.concurrent, None);
    assert_eq!(router("--health-check-interval-secs 9").0.health.first_interval, seconds(9));
    assert_eq!(router("--request-timeout-secs 1800").0.requests.timeout, None);
}

/// Baton accepts each flag or refuses it by name. Flags with a warning are tested above.
#[test]
fn every_flag_of_sglang_router_is_taken_or_refused_by_name() {
    let command = crate::cli::command_line();
    let router = command.find_subcommand("router").unwrap();
    let is_ours = |flag: &str| {
        let name = flag.strip_prefix("--").unwrap();
        let is_named =
            |arg: &clap::Arg| arg.get_all_aliases().is_some_and(|all| all.contains(&name));
        router.get_arguments().any(|arg| arg.get_long() == Some(name) || is_named(arg))
    };
    let theirs = include_str!("../../../tests/recordings/sglang-router-0.3.2.flags");
    let (taken, refused): (Vec<&str>, Vec<&str>) = theirs.lines().partition(|flag| is_ours(flag));
    assert_eq!((taken.len(), refused.len()), (43, 55));
    for flag in refused {
        let refusal = refusal(flag);
        let is_named = ["supported by this version: ", "a flag of baton router, but of "]
            .iter()
            .any(|why| refusal.starts_with(&format!("{flag} is not {why}")));
        assert!(is_named, "{refusal}");
    }
}

#[test]
fn an_invalid_value_is_refused_with_its_flag() {
    let port = refusal("--prefill http://a:1 abc --decode http://b:1");
    assert!(port.contains("--prefill abc") && port.contains("or none"), "{port}");
    for (line, flag) in [
        ("--max-concurrent-requests 0", "--max-concurrent-requests"),
        ("--max-payload-size 1GiB", "--max-payload-size"),
        ("--max-payload-size 0", "--max-payload-size"),
        ("--retry-backoff-multiplier 0.5", "--retry-backoff-multiplier"),
        ("--retry-backoff-multiplier nan", "--retry-backoff-multiplier"),
        ("--retry-jitter-factor 1.5", "--retry-jitter-factor"),
        ("--retry-initial-backoff-ms 0", "--retry-initial-backoff-ms"),
        ("--request-timeout-secs 1801", "--request-timeout-secs"),
        ("--prometheus-host 127.0.0.1", "--prometheus-port"),
        ("--port 9 --prometheus-port 9", "--prometheus-port"),
        ("--health-check-endpoint health", "--health-check-endpoint"),
        ("--request-id-headers x:y", "--request-id-headers"),
        ("--disable-circuit-breaker --cb-failure-threshold 3", "--cb-failure-threshold"),
    ] {
        assert!(refusal(line).contains(flag), "{line}: {}", refusal(line));
    }
}
