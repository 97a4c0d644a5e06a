//! Flags and commands of other servers that this version does not have. The error names the flag
//! and an alternative; it replaces clap's error for an unknown flag.

use crate::config::error::ConfigError;
use clap::error::{ContextKind, ContextValue, ErrorKind};

const ONE_RANK: &str = "each worker is one rank; run more workers instead";
const CPU_ONLY: &str = "models run on CPUs only";
const CACHES: &str = "all workers cache prefixes unless --disable-radix-cache is given";
const NO_SPECULATION: &str = "speculative decoding is not supported";
const POLICIES: &str = "the policies are least_loaded, round_robin, random, power_of_two, \
                        cache_aware, lmetric, slo and conditional";
const FORGETS: &str = "the router's memory for prompts has a fixed size; the least recently used \
                       prompts are removed first";
const BY_COMMAND: &str = "the command selects the role: baton serve, prefill, decode or router";
const NO_CLIENT_CERTIFICATES: &str =
    "workers do not check client certificates; they can require a key (--api-key-file)";
const WORKERS_TOKENISE: &str = "the workers tokenise";
const NO_HISTORY: &str = "conversations are not stored";
const CHANGES: &str =
    "changes to the set of workers need a proof of the cluster key, see --cluster-key-file";
const OWN_TEXTS: &str = "MODEL's own tokenizer and chat template are used";

/// (flag or command, reason or alternative).
const NAMES: &[(&str, &str)] = &[
    ("--tensor-parallel-size", ONE_RANK),
    ("--tp-size", ONE_RANK),
    ("--tp", ONE_RANK),
    ("--pipeline-parallel-size", ONE_RANK),
    ("--pp-size", ONE_RANK),
    ("--data-parallel-size", ONE_RANK),
    ("--dp-size", ONE_RANK),
    ("--dp", ONE_RANK),
    ("--pp", ONE_RANK),
    ("--ep", ONE_RANK),
    ("--dp-aware", ONE_RANK),
    ("--expert-parallel-size", ONE_RANK),
    ("--ep-size", ONE_RANK),
    ("--enable-chunked-prefill", "prompts are always read in chunks; see --chunked-prefill-size"),
    ("--device", CPU_ONLY),
    ("-n", "a request sets max_tokens; models run on CPUs only, so -ngl has no counterpart"),
    ("--n-gpu-layers", CPU_ONLY),
    ("--gpu-layers", CPU_ONLY),
    ("--attention-backend", CPU_ONLY),
    ("--enforce-eager", "Baton compiles and captures no graphs"),
    ("--disable-cuda-graph", "Baton compiles and captures no graphs"),
    ("--trust-remote-code", "code in a model's files is never run"),
    ("--tokenizer", OWN_TEXTS),
    ("--chat-template", OWN_TEXTS),
    ("--enable-metrics", "metrics are always at /metrics"),
    ("--metrics", "metrics are always at /metrics"),
    ("--gpu-memory-utilization", "models run on CPUs only; KV memory is set by --kv-memory"),
    ("--mem-fraction-static", "KV memory is set by --kv-memory"),
    ("--enable-prefix-caching", CACHES),
    ("--disaggregation-decode-enable-radix-cache", CACHES),
    ("--swap-space", "use --swap-memory with a size and its unit"),
    ("--preemption-mode", "a worker keeps the KV or computes it again, whichever is faster"),
    ("--schedule-conservativeness", "use --num-reserved-decode-tokens"),
    ("--verify-kv", "KV checksums are not supported"),
    ("--disaggregation-enable-kv-checksum", "KV checksums are not supported"),
    ("--speculative-algorithm", NO_SPECULATION),
    ("--speculative-config", NO_SPECULATION),
    ("--enable-lora", "LoRA adapters are not supported"),
    ("--lora-modules", "LoRA adapters are not supported"),
    ("--quantization", "weights keep the element types of their file"),
    ("--dtype", "weights keep their types; --kv-dtype sets the KV cache's type"),
    ("--ib-device", "use --rdma-devices"),
    ("--disaggregation-mode", BY_COMMAND),
    ("--model", "give MODEL without a flag"),
    ("-m", "give MODEL without a flag"),
    ("--context-length", "use --max-model-len"),
    ("--ctx-size", "use --max-model-len"),
    ("-c", "use --max-model-len"),
    ("--max-total-tokens", "KV memory is set by --kv-memory"),
    ("--kv-cache-dtype", "use --kv-dtype"),
    ("--max-running-request", "use --max-running-requests"),
    ("--parallel", "use --max-running-requests"),
    ("--alias", "use --served-model-name"),
    ("--disaggregation-transfer-backend", "use --transfer"),
    ("--kv-transfer-config", "use baton prefill and baton decode with --transfer"),
    ("--disaggregation-bootstrap-port", "use --bootstrap-port"),
    ("--api-key", "keys are read from a file, see --api-key-file"),
    ("--admin-api-key", "keys are read from a file, see --admin-key-file"),
    ("--max-num-seqs", "use --max-running-requests"),
    ("--max-num-batched-tokens", "use --chunked-prefill-size"),
    ("--block-size", "use --page-size"),
    ("--config", "configuration files are not supported; use flags"),
    ("--worker-urls", "use --prefill URL BOOTSTRAP_PORT and --decode URL (also for mixed workers)"),
    ("--service-discovery", "workers announce themselves with --registry"),
    ("--prefill-selector", "workers announce themselves with --registry"),
    ("--decode-selector", "workers announce themselves with --registry"),
    ("--selector", "workers announce themselves with --registry"),
    ("--service-discovery-port", "workers announce themselves with --registry"),
    ("--service-discovery-namespace", "workers announce themselves with --registry"),
    ("--bucket-adjust-interval-secs", POLICIES),
    ("--eviction-interval-secs", FORGETS),
    ("--max-tree-size", FORGETS),
    ("--max-idle-secs", POLICIES),
    ("--assignment-mode", POLICIES),
    ("--enable-igw", "one router serves one model"),
    ("--mini-lb", "this router replaces the mini load balancer; omit the flag"),
    ("--log-dir", "the log goes to standard error; redirect it or use a service manager"),
    ("--prometheus-duration-buckets", "histogram buckets are fixed"),
    (
        "--shutdown-grace-period-secs",
        "running requests are always finished; a second signal ends the process at once",
    ),
    ("--allowed-methods", "web pages of --allowed-origins can use GET and POST"),
    ("--allowed-headers", "web pages of --allowed-origins can use all headers"),
    ("--allow-credentials", "no answer depends on cookies; web pages send a key in a header"),
    ("--rate-limit-tokens-per-second", "use --key-requests-per-minute"),
    (
        "--disable-health-check",
        "the router uses healthy workers only; use --health-check-interval-secs",
    ),
    ("--tokenizer-cache-enable-l0", WORKERS_TOKENISE),
    ("--tokenizer-cache-l0-max-entries", WORKERS_TOKENISE),
    ("--tokenizer-cache-enable-l1", WORKERS_TOKENISE),
    ("--tokenizer-cache-l1-max-memory", WORKERS_TOKENISE),
    ("--enable-auto-tool-choice", "tools are always on; see --tool-call-parser"),
    ("--mcp-config-path", "servers of tools are not supported; clients call them"),
    ("--backend", "workers use SGLang's HTTP interface; omit the flag"),
    ("--history-backend", NO_HISTORY),
    ("--oracle-wallet-path", NO_HISTORY),
    ("--oracle-tns-alias", NO_HISTORY),
    ("--oracle-connect-descriptor", NO_HISTORY),
    ("--oracle-username", NO_HISTORY),
    ("--oracle-password", NO_HISTORY),
    ("--oracle-pool-min", NO_HISTORY),
    ("--oracle-pool-max", NO_HISTORY),
    ("--oracle-pool-timeout-secs", NO_HISTORY),
    ("--postgres-db-url", NO_HISTORY),
    ("--postgres-pool-max", NO_HISTORY),
    ("--redis-url", NO_HISTORY),
    ("--redis-pool-max", NO_HISTORY),
    ("--redis-retention-days", NO_HISTORY),
    ("--client-cert-path", NO_CLIENT_CERTIFICATES),
    ("--client-key-path", NO_CLIENT_CERTIFICATES),
    ("--ca-cert-paths", "use --tls-ca-file"),
    ("--enable-trace", "traces are not supported; traceparent is passed on to workers"),
    ("--otlp-traces-endpoint", "traces are not supported; traceparent is passed on to workers"),
    ("--control-plane-api-keys", CHANGES),
    ("--control-plane-audit-enabled", CHANGES),
    ("--jwt-issuer", CHANGES),
    ("--jwt-audience", CHANGES),
    ("--jwt-jwks-uri", CHANGES),
    ("--jwt-role-mapping", CHANGES),
];

/// Flags that `baton router` has and the other commands do not.
const ROUTERS: &[(&str, &str)] = &[
    ("--pd-disaggregation", BY_COMMAND),
    ("--model-path", "give MODEL without a flag"),
    ("--tokenizer-path", OWN_TEXTS),
    ("--prometheus-port", "metrics are at /metrics of the HTTP port"),
    ("--prometheus-host", "metrics are at /metrics of the HTTP port"),
];

/// (flag, value, reason).
const VALUES: &[(&str, &str, &str)] = &[("--transfer", "cuda_ipc", CPU_ONLY)];

/// Policies of other routers, refused for each policy flag.
const LATER_POLICIES: &[&str] = &["manual", "bucket", "prefix_hash", "consistent_hashing"];

/// The error that replaces clap's, if the name is in these lists.
pub fn explain(error: &clap::Error) -> Option<ConfigError> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    match error.kind() {
        ErrorKind::UnknownArgument => by_name(text(ContextKind::InvalidArg)?),
        ErrorKind::InvalidSubcommand => by_name(text(ContextKind::InvalidSubcommand)?),
        ErrorKind::InvalidValue => {
            // clap gives the argument as its usage, `--transfer <TRANSFER>`.
            let flag = text(ContextKind::InvalidArg)?.split(' ').next()?;
            let value = text(ContextKind::InvalidValue)?;
            let is_policy = flag.ends_with("policy") && LATER_POLICIES.contains(&value);
            let known =
                VALUES.iter().find(|(f, v, _)| *f == flag && *v == value).map(|(.., why)| *why);
            let why = known.or(is_policy.then_some(POLICIES))?;
            Some(ConfigError::Later { what: format!("{flag} {value}"), why })
        }
        _ => None,
    }
}

/// The error for a flag that this command does not have and other commands have.
pub fn elsewhere(
    error: &clap::Error,
    cli: &clap::Command,
    words: [&str; 2],
) -> Option<ConfigError> {
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else { return None };
    let name = flag.strip_prefix("--").filter(|_| error.kind() == ErrorKind::UnknownArgument)?;
    let is_it = |arg: &clap::Arg| {
        arg.get_long_and_visible_aliases().is_some_and(|names| names.contains(&name))
    };
    let has = |command: &clap::Command| command.get_arguments().any(is_it);
    let typed = cli.find_subcommand(words[0])?;
    let inner =
        typed.find_subcommand(words[1]).map(|inner| format!("{} {}", words[0], inner.get_name()));
    let typed = inner.unwrap_or_else(|| words[0].to_owned());
    let mut others: Vec<String> = cli
        .get_subcommands()
        .filter(|outer| has(outer))
        .map(|outer| outer.get_name().to_owned())
        .collect();
    if others.is_empty() {
        let inner = |outer: &clap::Command| {
            let inner = outer.get_subcommands().filter(|inner| has(inner));
            inner
                .map(|inner| format!("{} {}", outer.get_name(), inner.get_name()))
                .collect::<Vec<_>>()
        };
        others.extend(cli.get_subcommands().flat_map(inner));
    }
    let (last, before) = others.split_last().filter(|_| !others.contains(&typed))?;
    let others = match before {
        [] => last.clone(),
        before => format!("{} and baton {last}", before.join(", baton ")),
    };
    Some(ConfigError::Elsewhere { flag: flag.clone(), command: typed, others })
}

fn by_name(name: &str) -> Option<ConfigError> {
    let (_, why) = NAMES.iter().chain(ROUTERS).find(|(known, _)| *known == name)?;
    Some(ConfigError::Later { what: name.into(), why })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{HostInfo, parse};

    #[test]
    fn a_flag_of_another_command_is_told_from_a_misspelling() {
        let here = HostInfo::of_one_cpu();
        let said = |line: &[&str]| parse(line, &here).unwrap_err().to_string();
        assert_eq!(
            said(&["baton", "serve", "m", "--local-prefill"]),
            "--local-prefill is not a flag of baton serve, but of baton sim, baton prefill and \
             baton decode"
        );
        assert_eq!(
            said(&["baton", "prefill", "m", "--policy", "round_robin"]),
            "--policy is not a flag of baton prefill, but of baton sim and baton router"
        );
        assert_eq!(
            said(&["baton", "sim", "place", "--workers", "2", "--flow", "dual"]),
            "--flow is not a flag of baton sim place, but of baton sim and baton router"
        );
        assert_eq!(
            said(&["baton", "sim", "--gpus", "2"]),
            "--gpus is not a flag of baton sim, but of baton sim place"
        );
        let misspelt = said(&["baton", "decode", "m", "--local-prefil"]);
        assert!(misspelt.contains("a similar argument exists: '--local-prefill'"), "{misspelt}");
    }

    #[test]
    fn every_name_is_explained_and_none_is_a_flag_of_ours() {
        let here = HostInfo::of_one_cpu();
        let commands = [&["serve", "m"][..], &["prefill", "m"], &["decode", "m"], &["router"]];
        let all = NAMES.iter().map(|name| (name, &commands[..]));
        // A router has the flags of ROUTERS.
        for ((name, why), commands) in all.chain(ROUTERS.iter().map(|name| (name, &commands[..3])))
        {
            for command in commands {
                let line: Vec<&str> = match name.starts_with('-') {
                    true => [&["baton"], *command, &[name]].concat(),
                    false => vec!["baton", name],
                };
                let error = parse(&line, &here).unwrap_err();
                assert_eq!(
                    error.to_string(),
                    format!("{name} is not supported by this version: {why}")
                );
            }
        }
    }

    #[test]
    fn policies_of_others_are_refused_by_name() {
        let here = HostInfo::of_one_cpu();
        for flag in ["--policy", "--prefill-policy", "--decode-policy"] {
            for policy in LATER_POLICIES {
                let error = parse(["baton", "router", flag, policy], &here).unwrap_err();
                assert_eq!(
                    error.to_string(),
                    format!("{flag} {policy} is not supported by this version: {POLICIES}")
                );
            }
        }
    }
}
