//! Tests of command lines: the configuration that each resolves to, or the reason of its refusal.

use super::super::parse;
use super::*;
use crate::config::FirstToken;
use crate::config::hub::HubVariables;
use crate::ids::DecodeAllocation;
use crate::sys::file_access::FileAccess;
use std::io::Write;
use std::path::PathBuf;

fn machine() -> HostInfo {
    HostInfo {
        cpus: vec![0, 1, 2, 3],
        parallelism: 4,
        log_level: None,
        files: FileAccess::Host,
        hub: HubVariables::default(),
    }
}

fn words(line: &str) -> Vec<String> {
    std::iter::once("baton").chain(line.split_whitespace()).map(String::from).collect()
}

fn run(line: &str) -> (RoleConfig, Vec<String>) {
    match parse(words(line), &machine()) {
        Ok(Invocation::Run { command, warnings }) => (*command, warnings),
        Ok(other) => panic!("{line}: {other:?}"),
        Err(error) => panic!("{line}: {error}"),
    }
}

fn refusal(line: &str) -> String {
    match parse(words(line), &machine()) {
        Err(error) => error.to_string(),
        Ok(other) => panic!("{line} was taken: {other:?}"),
    }
}

/// A file that is deleted at the end of the test.
struct TestFile(PathBuf);

impl TestFile {
    fn new(name: &str, bytes: &[u8], mode: u32) -> TestFile {
        use std::os::unix::fs::OpenOptionsExt;
        let path = std::env::temp_dir().join(format!("baton-config-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let mut options = std::fs::OpenOptions::new();
        options
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&path)
            .unwrap()
            .write_all(bytes)
            .unwrap();
        TestFile(path)
    }

    fn name(&self) -> std::path::Display<'_> {
        self.0.display()
    }
}

impl Drop for TestFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn serve_has_a_default_for_everything() {
    let (RoleConfig::Serve(config), warnings) = run("serve /models/Smol.Q4_1.gguf") else {
        panic!()
    };
    assert_eq!(config.worker.model.served_names, ["Smol.Q4_1", "/models/Smol.Q4_1.gguf"]);
    assert_eq!(config.worker.server.address(), "127.0.0.1:8000".parse().unwrap());
    assert_eq!(
        config.layout,
        WorkerLayout::Split {
            prefill: 1,
            decode: 1,
            transfer: Transfer::Auto,
            decode_allocation: DecodeAllocation::Early,
            first_token: FirstToken::Decode,
        },
        "separate prefill and decode workers are the default"
    );
    assert_eq!(config.worker.cores.threads, 4);
    assert_eq!(config.worker.kv.memory, ByteSize(1 << 30));
    assert_eq!(warnings, [""; 0]);
}

#[test]
fn names_of_directories() {
    let (RoleConfig::Serve(config), _) = run("serve models/SmolLM2-1.7B/") else { panic!() };
    assert_eq!(config.worker.model.served_names, ["SmolLM2-1.7B", "models/SmolLM2-1.7B/"]);
    let (RoleConfig::Serve(config), _) = run("serve m --served-model-name a --served-model-name b")
    else {
        panic!()
    };
    assert_eq!(config.worker.model.served_names, ["a", "b"]);
}

#[test]
fn a_model_on_a_hub_has_its_own_name_and_a_revision() {
    let hub = HubVariables { user_cache: Some("/c".into()), ..HubVariables::default() };
    let host = HostInfo { hub, ..machine() };
    let model = |line: &str| match parse(words(line), &host) {
        Ok(Invocation::Run { command, .. }) => match *command {
            RoleConfig::Serve(config) => config.worker.model,
            RoleConfig::Prefill(config) | RoleConfig::Decode(config) => config.worker.model,
            other => panic!("{other:?}"),
        },
        other => panic!("{line}: {other:?}"),
    };
    for command in ["serve", "prefill", "decode"] {
        let model = model(&format!("{command} owner/tiny:Q4_0 --revision v1"));
        let hub = model.hub.unwrap();
        assert_eq!((hub.name.repository.as_str(), hub.revision.as_str()), ("owner/tiny", "v1"));
        assert_eq!(model.served_names, ["owner/tiny:Q4_0"]);
    }
    assert_eq!(model("serve owner/tiny").hub.unwrap().revision, "main");
    assert_eq!(model("serve owner/tiny --served-model-name a").served_names, ["a"]);
    for path in ["tiny", "./owner/tiny", "/owner/tiny", "src/cli"] {
        assert!(model(&format!("serve {path}")).hub.is_none(), "{path}");
        let refused = parse(words(&format!("serve {path} --revision main")), &host);
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("--revision main: only a model on a hub"), "{refused}");
    }
    let refused = parse(words("serve owner/tiny --revision ../x"), &host).unwrap_err().to_string();
    assert!(refused.contains("--revision ../x"), "{refused}");
}

#[test]
fn a_pair_on_one_host_needs_no_port() {
    let (RoleConfig::Prefill(prefill), _) = run("prefill m") else { panic!() };
    let (RoleConfig::Decode(decode), _) = run("decode m") else { panic!() };
    assert_eq!((prefill.worker.server.port, prefill.bootstrap_port), (30000, 8998));
    assert_eq!(decode.worker.server.port, 30001);
    assert_eq!(decode.bootstrap_allow, Cidr::LOOPBACK);
    assert_eq!(prefill.handoff.advertise_host.as_deref(), Some("127.0.0.1"));
}

/// A worker can change its role, so either command accepts the flags of both roles.
#[test]
fn either_command_accepts_the_flags_of_both_roles() {
    let line = "--bootstrap-port 9000 --control-port 9001 --data-port 9002 \
                --bootstrap-allow 10.0.0.0/8 --swap-memory 0";
    for command in ["prefill", "decode"] {
        let (RoleConfig::Prefill(config) | RoleConfig::Decode(config), _) =
            run(&format!("{command} m {line}"))
        else {
            panic!()
        };
        assert_eq!(
            (config.bootstrap_port, config.control_port, config.data_port),
            (9000, 9001, 9002)
        );
        assert_eq!(Role::ALL.map(|role| config.check_role(role)), [const { Ok(()) }; 3]);
        assert!(config.bootstrap_allow.len() == 1 && config.retraction.memory.0 == 0);
    }
    let (RoleConfig::Decode(decode), _) = run("decode m") else { panic!() };
    assert_eq!(decode.bootstrap_port, 0, "8998 usually belongs to a prefill worker on that host");
    let line = "decode m --host 0.0.0.0 --advertise-host 10.0.0.1 --transfer shm";
    let (RoleConfig::Decode(decode), _) = run(line) else { panic!() };
    assert!(
        decode.check_role(Role::Prefill).unwrap_err().contains("--cluster-key-file or --insecure")
    );
    assert_eq!([Role::Decode, Role::Mixed].map(|role| decode.check_role(role)), [Ok(()), Ok(())]);
    let (RoleConfig::Prefill(named), _) = run("prefill m --advertise-host node-7") else {
        panic!()
    };
    assert!(named.check_role(Role::Decode).unwrap_err().contains("--advertise-host node-7"));
}

#[test]
fn local_prefill_is_refused_with_the_fake_transfer() {
    let fake = refusal("decode m --local-prefill --transfer fake");
    assert!(fake.contains("--local-prefill"), "{fake}");
}

#[test]
fn memory_for_retracted_requests_follows_the_pool() {
    let of = |line: &str| match run(line).0 {
        RoleConfig::Decode(config) => {
            (config.retraction.reserved_tokens, config.retraction.memory.0)
        }
        _ => panic!(),
    };
    assert_eq!(of("decode m --kv-memory 2GiB"), (512, 2 << 30));
    let line = "decode m --disaggregation-num-reserved-decode-tokens 0 --swap-memory 0";
    assert_eq!(of(line), (0, 0));
    for size in ["100TiB", "5"] {
        let error = refusal(&format!("serve m --swap-memory {size}"));
        assert!(
            error.contains("must be 0, or 1MiB to 64TiB; a number without a unit is bytes"),
            "{error}"
        );
    }
}

#[test]
fn chunk_bounds_follow_each_other() {
    let chunks = |line: &str| match run(line).0 {
        RoleConfig::Serve(config) => {
            (config.chunks.max_prefill_tokens, config.chunks.chunked_prefill_size)
        }
        _ => panic!(),
    };
    assert_eq!(chunks("serve m"), (16384, 2048));
    assert_eq!(chunks("serve m --chunked-prefill-size 32768"), (32768, 32768));
    assert_eq!(chunks("serve m --max-prefill-tokens 512"), (512, 512));
}

#[test]
fn a_router_needs_no_workers_and_takes_anybodys_on_loopback_alone() {
    for (line, anybody) in [
        ("router", true),
        ("router --host 0.0.0.0", false),
        ("router --host 0.0.0.0 --insecure", true),
        ("router --registry etcd://127.0.0.1:1,localhost:2", true),
    ] {
        let (RoleConfig::Router(config), _) = run(line) else { panic!("{line}") };
        assert!(config.prefill.is_empty() && config.decode.is_empty());
        assert_eq!(config.takes_anybody, anybody, "{line}");
    }
}

#[test]
fn an_invalid_flag_is_named_with_its_value_and_limit() {
    for (line, parts) in [
        ("serve m --page-size 24", &["--page-size 24", "power of two"][..]),
        ("serve m --page-size 512", &["512", "--page-size", "1..=256"]),
        ("serve m --max-model-len -1", &["--max-model-len", "-1", "is not in 2..="]),
        ("serve m --chunk-ms -5", &["--chunk-ms", "-5"]),
        ("serve m --kv-memory -1", &["--kv-memory", "-1", "2GiB"]),
        ("prefill m --bootstrap-port -1", &["--bootstrap-port", "-1"]),
        ("sim --load --rate nothing", &["--rate", "nothing"]),
        ("serve m --state-memory 2GiB", &["--state-memory 2GiB", "at most --kv-memory, 1GiB"]),
        (
            "serve m --state-memory 1MiB --disable-radix-cache",
            &["--state-memory 1MiB", "must be 0"],
        ),
        ("serve m --kv-memory 1KiB", &["--kv-memory 1KiB", "1MiB", "64TiB"]),
        ("serve m --kv-memory 2XB", &["2XB", "--kv-memory", "2GiB"]),
        ("serve m --max-running-requests 0", &["0", "--max-running-requests", "1..=4096"]),
        (
            "serve m --chunked-prefill-size 32 --max-prefill-tokens 16",
            &["--chunked-prefill-size 32", "16"],
        ),
        ("serve m --cpus 2-5", &["--cpus 4", "0-3"]),
        ("serve m --mixed --prefill-workers 2", &["--mixed", "--prefill-workers"]),
        ("serve m --mixed --transfer shm", &["--mixed", "--transfer"]),
        ("serve m --prefill-workers 0", &["0", "--prefill-workers", "1..=16"]),
        ("serve m --host example.org", &["example.org", "--host", "IP address"]),
        ("serve", &["<MODEL>"]),
        ("serve m --bootstrap-port 1", &["--bootstrap-port"]),
        ("prefill m --bootstrap-port 30000", &["--bootstrap-port 30000", "--port"]),
        ("prefill m --advertise-host 0.0.0.0", &["0.0.0.0", "--advertise-host"]),
        ("decode m --advertise-host node-7", &["--advertise-host node-7", "IP address"]),
        ("prefill m --host 0.0.0.0", &["--cluster-key-file or --insecure", "0.0.0.0"]),
        ("decode m --host 10.0.0.1", &["--cluster-key-file or --insecure", "10.0.0.1"]),
        ("decode m --cluster-key-file /k --insecure", &["--cluster-key-file", "--insecure"]),
        ("decode m --cluster-key-file /nowhere", &["--cluster-key-file /nowhere", "No such file"]),
        (
            "decode m --bootstrap-allow 10.0.0.0/99",
            &["10.0.0.0/99", "--bootstrap-allow", "32 bits"],
        ),
        (
            "prefill m --host 0.0.0.0 --insecure --registry http://a:1",
            &["--advertise-host", "0.0.0.0"],
        ),
        ("decode m --registry ftp://a:1", &["ftp://a:1", "--registry", "etcd://HOST[:PORT]"]),
        ("decode m --peer-timeout 0.4", &["0.4", "--peer-timeout", "0.5 to 60"]),
        ("router --registry http://a:1", &["--registry http://a:1", "etcd://"]),
        ("router --registry etcd://10.0.0.1:2379", &["--cluster-key-file or --insecure", "etcd"]),
        ("router --cluster-key-file /k --insecure", &["--cluster-key-file", "--insecure"]),
        ("router --rebalance --rebalance-fill 1.5", &["--rebalance-fill 1.5", "up to 1"]),
        ("router --min-decode 2", &["--rebalance"]),
        ("router --prefill 9000 --decode http://c:3", &["--prefill 9000", "before"]),
        ("router --prefill http://a:1 99999 --decode http://c:3", &["--prefill 99999", "65535"]),
        (
            "router --prefill https://a:1 --decode http://c:3",
            &["--tls-ca-file", "--prefill https://a:1"],
        ),
        ("router --decode https://a:1", &["--tls-ca-file", "--decode https://a:1"]),
        ("prefill m --registry https://a:1", &["--tls-ca-file", "--registry https://a:1"]),
        ("drain https://a:1", &["--tls-ca-file", "https://a:1"]),
        (
            "router --prefill http://a:1 --prefill http://a:1/ --decode http://c:3",
            &["http://a:1", "twice"],
        ),
        ("router --prefill http://a:1 --decode http://a:1", &["--decode http://a:1", "--prefill"]),
        (
            "router --tls-ca-file c --decode http://a:1 --decode https://a:1",
            &["https://a:1", "twice"],
        ),
        ("serve m --log-level loud", &["loud", "--log-level"]),
    ] {
        let message = refusal(line);
        for part in parts {
            assert!(message.contains(part), "{line}: {message:?} lacks {part:?}");
        }
    }
}

#[test]
fn prefixes_are_cached_unless_told_otherwise_or_nothing_is_computed() {
    for (line, cached) in [
        ("serve m", true),
        ("serve m --disable-radix-cache", false),
        ("serve m --no-enable-prefix-caching", false),
        ("serve m --transfer fake", false),
    ] {
        let (RoleConfig::Serve(config), _) = run(line) else { panic!("{line}") };
        assert_eq!(config.worker.kv.prefix_cache, cached, "{line}");
    }
    for (line, cached) in [("decode m", true), ("decode m --transfer fake", false)] {
        let (RoleConfig::Decode(config), _) = run(line) else { panic!("{line}") };
        assert_eq!(config.worker.kv.prefix_cache, cached, "{line}");
    }
}

#[test]
fn an_unsupported_flag_is_refused_by_name() {
    for (line, name) in [
        ("serve m --tensor-parallel-size 2", "--tensor-parallel-size"),
        ("serve m --tensor-parallel-size=2", "--tensor-parallel-size"),
        ("serve m --tp 2", "--tp"),
        ("serve m --enable-prefix-caching", "--enable-prefix-caching"),
        ("decode m --swap-space 4", "--swap-space"),
        ("decode m --transfer cuda_ipc", "--transfer cuda_ipc"),
        ("serve m --transfer=cuda_ipc", "--transfer cuda_ipc"),
        ("router --prefill http://a:1 --decode http://b:1 --policy bucket", "--policy bucket"),
    ] {
        let message = refusal(line);
        assert!(
            message.starts_with(&format!("{name} is not supported by this version: ")),
            "{line}: {message}"
        );
    }
    assert!(refusal("serve m --no-such-flag").contains("unexpected argument '--no-such-flag'"));
}

#[test]
fn ports_for_peers_beyond_loopback() {
    let key = TestFile::new("key", &[7; 32], 0o600);
    let short = TestFile::new("short", &[7; 31], 0o600);
    let (RoleConfig::Prefill(config), warnings) =
        run(&format!("prefill m --host 0.0.0.0 --cluster-key-file {}", key.name()))
    else {
        panic!()
    };
    assert_eq!(config.handoff.cluster_keys.first().map(|key| key.bytes()), Some(&[7; 32][..]));
    assert_eq!(config.handoff.advertise_host, None, "every address is no address to dial");
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("--api-key-file"), "{warnings:?}");

    let message = refusal(&format!("prefill m --cluster-key-file {}", short.name()));
    assert!(message.contains("31 bytes") && message.contains("32"), "{message}");

    // Nothing listens for peers here, so there is nothing to protect.
    run("decode m --host 0.0.0.0 --transfer shm");
    run("decode m --host 0.0.0.0 --transfer fake");
    run("decode m --host 0.0.0.0 --insecure");
}

#[test]
fn keys_are_read_and_never_shown() {
    let keys = TestFile::new("api-keys", b"# staff\nsk-open-sesame \n\nsk-second\n", 0o644);
    let cluster = TestFile::new("cluster", b"an-unguessable-cluster-key-of-32b", 0o600);
    let admin = TestFile::new("admin-keys", b"\nak-abracadabra\nak-second", 0o600);
    let line = format!(
        "decode m --api-key-file {} --admin-key-file {} --cluster-key-file {}",
        keys.name(),
        admin.name(),
        cluster.name()
    );
    let (command, warnings) = run(&line);
    let RoleConfig::Decode(config) = &command else { panic!() };
    let found = |keys: &[Secret]| keys.iter().map(|key| key.bytes().to_vec()).collect::<Vec<_>>();
    let server = &config.worker.server;
    let api_keys: Vec<Secret> = server.api_keys.iter().map(|key| key.secret.clone()).collect();
    assert_eq!(found(&api_keys), [&b"sk-open-sesame"[..], b"sk-second"]);
    assert_eq!(found(&server.admin_keys), [&b"ak-abracadabra"[..], b"ak-second"]);
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("chmod 600"), "others may read it: {warnings:?}");

    let Ok(Invocation::Print(json)) = parse(words(&format!("{line} --print-config")), &machine())
    else {
        panic!()
    };
    for shown in [format!("{command:?}"), json] {
        for secret in ["sesame", "abracadabra", "unguessable"] {
            assert!(!shown.contains(secret), "{shown}");
        }
    }
    let empty = TestFile::new("empty", b"# nothing\n", 0o600);
    assert!(refusal(&format!("serve m --api-key-file {}", empty.name())).contains("no key"));
    assert!(refusal("serve m --api-key-file /dev/zero").contains("more than"), "bounded");
    let message = refusal(&format!("serve m --admin-key-file {}", empty.name()));
    assert!(message.contains("--admin-key-file") && message.contains("no key"), "{message}");
}

#[test]
fn limits_of_keys_need_keys_and_lines_can_have_their_own() {
    let keys = TestFile::new("limited", b"one tokens-per-minute=7\ntwo\n", 0o600);
    let flags = "--key-requests-per-minute 60 --key-tokens-per-minute 5000";
    for command in ["serve m", "prefill m", "decode m", "router"] {
        let (config, _) = run(&format!("{command} --api-key-file {} {flags}", keys.name()));
        let server = match config {
            RoleConfig::Serve(config) => config.worker.server,
            RoleConfig::Prefill(config) | RoleConfig::Decode(config) => config.worker.server,
            RoleConfig::Router(config) => config.server,
        };
        assert_eq!((server.key_limits.requests, server.key_limits.tokens), (Some(60), Some(5000)));
        assert_eq!(server.api_keys[0].limits.tokens, Some(7), "{command}");
        assert_eq!(server.api_keys[1].secret.bytes(), b"two");
        for flag in ["--key-requests-per-minute", "--key-tokens-per-minute"] {
            let message = refusal(&format!("{command} {flag} 60"));
            assert!(message.contains(flag) && message.contains("--api-key-file"), "{message}");
            let message = refusal(&format!("{command} --api-key-file {} {flag} 0", keys.name()));
            assert!(message.contains(flag), "{message}");
        }
    }
    let odd = TestFile::new("odd", b"secret-one\nsecret-two secret-three\n", 0o600);
    let message = refusal(&format!("serve m --api-key-file {}", odd.name()));
    assert!(message.contains("key 2: ") && !message.contains("secret-t"), "{message}");
}

#[test]
fn keys_of_clients_that_can_administer_are_warned_of() {
    let keys = TestFile::new("clients", b"one\ntwo\n", 0o600);
    let others = TestFile::new("chiefs", b"three\n", 0o600);
    let both = TestFile::new("both", b"three\ntwo\n", 0o600);
    let api = format!("--api-key-file {}", keys.name());
    let admin = |file: &TestFile| format!("--admin-key-file {}", file.name());
    for command in ["serve m", "prefill m", "decode m", "router"] {
        for (flags, warning) in [
            (String::new(), None),
            (api.clone(), Some("without --admin-key-file, every client")),
            (admin(&others), None),
            (format!("{api} {}", admin(&others)), None),
            (format!("{api} {}", admin(&both)), Some("it has a key of --api-key-file")),
        ] {
            let (_, warnings) = run(&format!("{command} {flags}"));
            assert_eq!(warnings.len(), warning.iter().len(), "{command} {flags}: {warnings:?}");
            let is_told = warning.is_none_or(|words| warnings[0].contains(words));
            assert!(is_told, "{command} {flags}: {warnings:?}");
        }
    }
}

#[test]
fn a_drain_sends_one_key() {
    let [keys, admin] = ["one", "chief"].map(|key| TestFile::new(key, key.as_bytes(), 0o600));
    for (flags, sent) in [
        (String::new(), None),
        (format!("--api-key-file {}", keys.name()), Some(&b"one"[..])),
        (format!("--admin-key-file {}", admin.name()), Some(b"chief")),
    ] {
        let line = format!("drain http://127.0.0.1:1 {flags}");
        let Ok(Invocation::Drain { config, .. }) = parse(words(&line), &machine()) else {
            panic!("{line}")
        };
        assert_eq!(config.key.as_ref().map(Secret::bytes), sent, "{line}");
    }
    let line = format!(
        "drain http://127.0.0.1:1 --api-key-file {} --admin-key-file {}",
        keys.name(),
        admin.name()
    );
    assert!(refusal(&line).contains("cannot be used with"), "which of the two is sent?");
}

#[test]
fn print_config_is_json_of_all_that_was_decided() {
    let line = "decode m --kv-memory 2GiB --transfer fake \
                --bootstrap-allow 10.0.0.0/8,fd00::/8 --print-config";
    let Ok(Invocation::Print(json)) = parse(words(line), &machine()) else { panic!() };
    let config: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(config["command"], "decode");
    assert_eq!(config["worker"]["kv"]["memory"], 2u64 << 30);
    assert_eq!(config["bootstrap_allow"], serde_json::json!(["10.0.0.0/8", "fd00::/8"]));
    assert_eq!(config["handoff"]["transfer"], "fake");
    assert_eq!(config["handoff"]["fake_bootstrap"], true, "--transfer fake honours 2.2.2.2");
    assert_eq!(config["worker"]["cores"]["cpus"], serde_json::json!([0, 1, 2, 3]));
}

#[test]
fn the_log_level_of_a_flag_wins_over_the_environment() {
    let with = |line: &str, environment: Option<&str>| {
        let surroundings = HostInfo { log_level: environment.map(String::from), ..machine() };
        match parse(words(line), &surroundings) {
            Ok(Invocation::Run { command, .. }) => Ok(format!("{:?}", command.log().level)),
            Ok(_) => unreachable!(),
            Err(error) => Err(error.to_string()),
        }
    };
    assert_eq!(with("serve m", None).as_deref(), Ok("Info"));
    assert_eq!(with("serve m", Some("debug")).as_deref(), Ok("Debug"));
    assert_eq!(with("serve m --log-level error", Some("debug")).as_deref(), Ok("Error"));
    assert!(with("serve m", Some("loud")).unwrap_err().contains("BATON_LOG loud"));
}

#[test]
fn threads_follow_the_cpus_and_the_quota() {
    let threads = |line: &str, parallelism: usize| {
        let surroundings = HostInfo { parallelism, ..machine() };
        match parse(words(line), &surroundings) {
            Ok(Invocation::Run { command, warnings }) => match *command {
                RoleConfig::Serve(config) => (config.worker.cores.threads, warnings.len()),
                _ => unreachable!(),
            },
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(threads("serve m", 4), (4, 0));
    assert_eq!(threads("serve m", 2), (2, 0));
    assert_eq!(threads("serve m --cpus 1,3", 4), (2, 0));
    assert_eq!(threads("serve m --threads 8", 4), (8, 1));
}

#[test]
fn only_workers_of_a_cluster_post_over_rdma() {
    let threads = |line: &str| match run(line).0 {
        RoleConfig::Prefill(config) | RoleConfig::Decode(config) => config.data_threads,
        other => panic!("{other:?}"),
    };
    assert_eq!(threads("prefill m"), DataThreadMode::Fused);
    assert_eq!(threads("prefill m --data-threads split --transfer rdma"), DataThreadMode::Split);
    assert_eq!(
        refusal("prefill m --data-threads split --transfer tcp"),
        "--data-threads split: only with --transfer auto or rdma"
    );
    // A decode worker can become a prefill worker.
    assert_eq!(threads("decode m --data-threads split"), DataThreadMode::Split);
    let refused = refusal("serve m --data-threads split");
    assert_eq!(
        refused,
        "--data-threads is not a flag of baton serve, but of baton prefill and baton decode"
    );
}

#[test]
fn bench_listen_refuses_the_flags_of_the_connect_process() {
    for flags in [
        "--case small",
        "--transport tcp",
        "--pages 8",
        "--pages 8 --fragmented --kv-heads 2",
        "--layout layer-major",
        "--src-tp 1",
        "--lanes 1",
        "--duration 2",
        "--busy-poll",
        "--through-library",
        "--data-threads fused",
        "--json",
        "--report page.html",
    ] {
        let said = refusal(&format!("bench transfer --listen 127.0.0.1:7000 {flags}"));
        let named = flags.split(' ').filter(|word| word.starts_with("--")).any(|flag| {
            said == format!(
                "--listen 127.0.0.1:7000: cannot be used with {flag}; the --connect process \
                 selects what is measured"
            )
        });
        assert!(named, "{said}");
    }
    for flags in ["", "--until-eof"] {
        let taken =
            parse(words(&format!("bench transfer --listen 127.0.0.1:7000 {flags}")), &machine());
        assert!(matches!(taken, Ok(Invocation::BenchTransfer(_))), "{taken:?}");
    }
}

#[test]
fn flags_of_a_custom_case_are_refused_with_a_named_case() {
    for flag in ["--pages 8", "--layers 3", "--item-bytes 4096", "--kv-heads 2", "--fragmented"] {
        let said = refusal(&format!("bench transfer --case tiny-2k {flag}"));
        let name = flag.split(' ').next().unwrap();
        assert!(
            said.contains(name) && said.contains("--case") && said.contains("cannot be used"),
            "{said}"
        );
    }
}

#[test]
fn clap_finds_no_fault_with_the_definitions() {
    <Cli as clap::CommandFactory>::command().debug_assert();
}

#[test]
fn commands_without_configuration() {
    let doctor = |typed| match parse(words(typed), &machine()) {
        Ok(Invocation::Doctor(flags, cores)) => (flags.peer, cores.cpus, cores.threads),
        other => panic!("{other:?}"),
    };
    assert_eq!(doctor("doctor"), (None, vec![0, 1, 2, 3], 4));
    let peer = Some("ten:7000".to_owned());
    assert_eq!(doctor("doctor --peer ten:7000 --cpus 1-3 --threads 2"), (peer, vec![1, 2, 3], 2));
    let bench = parse(words("bench transfer --transport all --json"), &machine());
    assert!(matches!(bench, Ok(Invocation::BenchTransfer(flags)) if flags.json));
    assert!(matches!(parse(words("bench"), &machine()), Err(ConfigError::Usage(_))));
}

#[test]
fn a_limit_that_no_step_keeps_is_warned_of() {
    let warned = |ms: &str| {
        let costs = "--prefill-ms 1,0.1,0 --decode-ms 5,0,0";
        run(&format!("router --policy slo {costs} --slo-tpot-ms {ms}")).1
    };
    assert!(
        warned("5")[0].contains("--slo-tpot-ms 5: a step takes 5 ms (--decode-ms)"),
        "{:?}",
        warned("5")
    );
    assert_eq!(warned("5.1"), [""; 0]);
    let (_, unfounded) = run("router --policy conditional --decode-ms 5,0,0");
    assert!(unfounded[0].contains("without --prefill-ms"), "{unfounded:?}");
}
