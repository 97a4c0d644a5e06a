//! Names that users of the field may type and this version does not have, or not there: refused by name, with what
//! to do instead, rather than as a misspelling.

use super::error::ConfigError;
use clap::error::{ContextKind, ContextValue, ErrorKind};

const ONE_RANK: &str = "a worker is one rank; run more workers instead";
const CPU_ONLY: &str = "models run on CPUs only";
const CACHES: &str = "all workers cache prefixes unless told --disable-radix-cache";
const NO_SPECULATION: &str = "there is no speculative decoding yet";
const POLICIES: &str = "the policies are least_loaded, round_robin, random, power_of_two, cache_aware, lmetric, slo and conditional";
const FORGETS: &str = "of what workers were sent so much is kept in mind as has room; what was asked for longest ago goes first";
const BY_COMMAND: &str = "the role is the command: baton serve, prefill, decode or router";
const NO_CLIENT_CERTIFICATES: &str =
    "workers are shown no certificate; they may ask for a key (--api-key-file)";
const WORKERS_TOKENISE: &str = "the workers tokenise";
const NO_PARSERS: &str = "there are no tools and no parsers of reasoning yet";
const NO_HISTORY: &str = "nothing is kept of conversations";
const CHANGES: &str =
    "who changes the set of workers proves to know the cluster key, see --cluster-key-file";
const OWN_TEXTS: &str = "tokenizer and chat template are MODEL's own";

/// (flag or command, why not, or what instead).
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
    ("--device", CPU_ONLY),
    ("--n-gpu-layers", CPU_ONLY),
    ("--gpu-layers", CPU_ONLY),
    ("--attention-backend", CPU_ONLY),
    ("--enforce-eager", "nothing is compiled or captured at the start"),
    ("--disable-cuda-graph", "nothing is compiled or captured at the start"),
    ("--trust-remote-code", "a model's files are read, never run"),
    ("--tokenizer", OWN_TEXTS),
    ("--chat-template", OWN_TEXTS),
    ("--enable-metrics", "metrics are always at /metrics"),
    ("--metrics", "metrics are always at /metrics"),
    ("--gpu-memory-utilization", "models run on CPUs only; KV memory is set by --kv-memory"),
    ("--mem-fraction-static", "KV memory is set by --kv-memory"),
    ("--enable-prefix-caching", CACHES),
    ("--disaggregation-decode-enable-radix-cache", CACHES),
    ("--swap-space", "use --swap-memory, which takes a unit"),
    ("--preemption-mode", "whether KV is kept or computed again follows from what takes less time"),
    ("--schedule-conservativeness", "use --num-reserved-decode-tokens"),
    ("--verify-kv", "KV is not checksummed yet"),
    ("--disaggregation-enable-kv-checksum", "KV is not checksummed yet"),
    ("--speculative-algorithm", NO_SPECULATION),
    ("--speculative-config", NO_SPECULATION),
    ("--enable-lora", "there are no adapters yet"),
    ("--lora-modules", "there are no adapters yet"),
    ("--quantization", "weights are computed in the types of their file"),
    ("--dtype", "weights are computed in the types of their file; the cache's type is --kv-dtype"),
    ("--ib-device", "use --rdma-devices"),
    ("--disaggregation-mode", BY_COMMAND),
    ("--model", "MODEL is given without a flag"),
    ("-m", "MODEL is given without a flag"),
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
    ("--max-num-seqs", "use --max-running-requests"),
    ("--max-num-batched-tokens", "use --chunked-prefill-size"),
    ("--block-size", "use --page-size"),
    ("--config", "there is no configuration file yet; use flags"),
    (
        "--worker-urls",
        "workers have roles: --prefill URL BOOTSTRAP_PORT, and --decode URL, also for those that do both",
    ),
    ("--service-discovery", "workers enter themselves with --registry"),
    ("--prefill-selector", "workers enter themselves with --registry"),
    ("--decode-selector", "workers enter themselves with --registry"),
    ("--selector", "workers enter themselves with --registry"),
    ("--service-discovery-port", "workers enter themselves with --registry"),
    ("--service-discovery-namespace", "workers enter themselves with --registry"),
    ("--bucket-adjust-interval-secs", POLICIES),
    ("--eviction-interval-secs", FORGETS),
    ("--max-tree-size", FORGETS),
    ("--max-idle-secs", POLICIES),
    ("--assignment-mode", POLICIES),
    ("--enable-igw", "one router serves one model"),
    ("--mini-lb", "this router is what it stands in for; leave the flag out"),
    ("--log-dir", "the log goes to standard error; have the shell or the service manager keep it"),
    ("--prometheus-duration-buckets", "the buckets of histograms are fixed"),
    (
        "--shutdown-grace-period-secs",
        "what runs is finished, however long it takes; a second signal ends it at once",
    ),
    (
        "--cors-allowed-origins",
        "pages of other origins are not served; put a proxy before the port",
    ),
    ("--rate-limit-tokens-per-second", "use --max-concurrent-requests"),
    (
        "--disable-health-check",
        "who is not known to be well is not used; use --health-check-interval-secs",
    ),
    ("--tokenizer-cache-enable-l0", WORKERS_TOKENISE),
    ("--tokenizer-cache-l0-max-entries", WORKERS_TOKENISE),
    ("--tokenizer-cache-enable-l1", WORKERS_TOKENISE),
    ("--tokenizer-cache-l1-max-memory", WORKERS_TOKENISE),
    ("--reasoning-parser", NO_PARSERS),
    ("--tool-call-parser", NO_PARSERS),
    ("--mcp-config-path", NO_PARSERS),
    ("--backend", "workers speak SGLang's HTTP interface; leave the flag out"),
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
    ("--enable-trace", "there are no traces yet; traceparent is passed on to workers"),
    ("--otlp-traces-endpoint", "there are no traces yet; traceparent is passed on to workers"),
    ("--control-plane-api-keys", CHANGES),
    ("--control-plane-audit-enabled", CHANGES),
    ("--jwt-issuer", CHANGES),
    ("--jwt-audience", CHANGES),
    ("--jwt-jwks-uri", CHANGES),
    ("--jwt-role-mapping", CHANGES),
];

/// Those that `baton router` has, and nobody else.
const ROUTERS: &[(&str, &str)] = &[
    ("--pd-disaggregation", BY_COMMAND),
    ("--model-path", "MODEL is given without a flag"),
    ("--tokenizer-path", OWN_TEXTS),
    ("--prometheus-port", "metrics are at /metrics of the one HTTP port"),
    ("--prometheus-host", "metrics are at /metrics of the one HTTP port"),
];

/// (flag, value, why not).
const VALUES: &[(&str, &str, &str)] = &[("--transfer", "cuda_ipc", CPU_ONLY)];

/// Policies of others, which any flag for one may be given.
const LATER_POLICIES: &[&str] = &["manual", "bucket", "prefix_hash", "consistent_hashing"];

/// What to say instead of clap's error, if the name is known.
pub fn explain(error: &clap::Error) -> Option<ConfigError> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    match error.kind() {
        ErrorKind::UnknownArgument => by_name(text(ContextKind::InvalidArg)?),
        ErrorKind::InvalidSubcommand => by_name(text(ContextKind::InvalidSubcommand)?),
        ErrorKind::InvalidValue => {
            // The argument is given as its usage, `--transfer <TRANSFER>`.
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

/// What to say of a flag that the command of these words does not have and others do.
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
    use crate::config::{Surroundings, parse};

    #[test]
    fn a_flag_of_another_command_is_told_from_a_misspelling() {
        let here = Surroundings { cpus: vec![0], parallelism: 1, log_level: None };
        let said = |line: &[&str]| parse(line, &here).unwrap_err().to_string();
        assert_eq!(
            said(&["baton", "serve", "m", "--local-prefill"]),
            "--local-prefill is no flag of baton serve, but of baton sim, baton prefill and baton decode"
        );
        assert_eq!(
            said(&["baton", "prefill", "m", "--policy", "round_robin"]),
            "--policy is no flag of baton prefill, but of baton sim and baton router"
        );
        assert_eq!(
            said(&["baton", "sim", "place", "--workers", "2", "--flow", "dual"]),
            "--flow is no flag of baton sim place, but of baton sim and baton router"
        );
        assert_eq!(
            said(&["baton", "sim", "--gpus", "2"]),
            "--gpus is no flag of baton sim, but of baton sim place"
        );
        let misspelt = said(&["baton", "decode", "m", "--local-prefil"]);
        assert!(misspelt.contains("a similar argument exists: '--local-prefill'"), "{misspelt}");
    }

    #[test]
    fn every_name_is_explained_and_none_is_a_flag_of_ours() {
        let here = Surroundings { cpus: vec![0], parallelism: 1, log_level: None };
        let commands = [&["serve", "m"][..], &["prefill", "m"], &["decode", "m"], &["router"]];
        let all = NAMES.iter().map(|name| (name, &commands[..]));
        // A router has these.
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
        let here = Surroundings { cpus: vec![0], parallelism: 1, log_level: None };
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
