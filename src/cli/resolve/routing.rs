//! Resolves the flags of `baton router`: its workers, policies, and rules for requests.

use super::{CLIENT_PORT, Resolver, value, vouched};
use crate::cli::flags::{
    BalanceFlags, BreakerFlags, ForecastFlags, HealthFlags, RequestFlags, RetryFlags, RouterFlags,
    RoutingFlags, ScrapeFlags,
};
use crate::cli::quantities::{coefficients, positive};
use crate::config::error::ConfigError;
use crate::config::registry::RegistryAddress;
use crate::config::values::WorkerUrl;
use crate::config::{
    BalanceConfig, BreakerConfig, CacheAwareConfig, Cost, FirstToken, Flow, Forecast, HealthConfig,
    Policies, Policy, PrefillEndpoint, RequestConfig, RetryConfig, RouterConfig,
};
use crate::limits::{CONTEXT_MAX, REQUEST_TIME_MAX, ROUTER_PROBE_TIME, ROUTER_WORKERS_MAX};
use crate::routing::policy::PolicyNeeds;
use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

impl Resolver<'_> {
    pub(super) fn router(&mut self, flags: RouterFlags) -> Result<RouterConfig, ConfigError> {
        let RoutingFlags {
            // This router always works so.
            pd_disaggregation: _,
            prefill,
            decode,
            tls_ca_file,
            policy,
            prefill_policy,
            decode_policy,
            cache_threshold,
            balance_abs_threshold,
            balance_rel_threshold,
            registry,
            cluster_key_file,
            insecure,
            model_path,
            tokenizer_path,
        } = flags.workers;
        self.warnings.extend(warn_of_tokenizers(model_path, tokenizer_path));
        let prefill = prefill_endpoints(&prefill)?;
        check_workers(&prefill, &decode, tls_ca_file.as_deref())?;
        let cluster_keys = self.cluster_keys(&cluster_key_file, insecure)?;
        let etcd = etcd(registry)?;
        check_etcd(&etcd, insecure || !cluster_keys.is_empty())?;
        let takes_anybody = insecure || flags.server.host.is_loopback();
        let server = self.server(flags.server, CLIENT_PORT)?;
        let metrics = metrics(&flags.scrape, server.address())?;
        let is_tuned = cache_threshold.is_some()
            || balance_abs_threshold.is_some()
            || balance_rel_threshold.is_some();
        let policy = policy.unwrap_or_else(|| usual_policy(is_tuned));
        let policies = Policies {
            prefill: prefill_policy.unwrap_or(policy),
            decode: decode_policy.unwrap_or(policy),
        };
        self.warn_of_borrowed_times(policies, &flags.forecast, flags.balance.rebalance);
        let cache = cache(policies, cache_threshold, balance_abs_threshold, balance_rel_threshold)?;
        let forecast = forecast(&flags.forecast, policies, flags.balance.rebalance)?;
        self.warnings.extend(hopeless(&forecast));
        Ok(RouterConfig {
            etcd,
            cluster_keys,
            takes_anybody,
            // Keys show that clients on other hosts reach this port, directly or over a proxy.
            takes_strangers: insecure || (takes_anybody && !server.has_keys()),
            server,
            metrics,
            prefill,
            decode,
            tls_ca: tls_ca_file,
            balance: balance(&flags.balance)?,
            policies,
            cache,
            forecast,
            requests: requests(flags.requests)?,
            retries: retries(&flags.retries)?,
            breaker: breaker(&flags.breaker),
            health: health(&flags.health),
            health_path: flags.health.health_check_endpoint,
            log: self.log(&flags.process)?,
        })
    }

    /// Warns of forecasts that use step times of other hardware, because none were given.
    fn warn_of_borrowed_times(
        &mut self,
        policies: Policies,
        times: &ForecastFlags,
        rebalances: bool,
    ) {
        let no_prefill = times.prefill_ms.is_empty();
        if policies.all().into_iter().any(|policy| PolicyNeeds::of(policy).forecast)
            && (no_prefill || times.decode_ms.is_empty())
        {
            let why = "the forecast uses the step times of Qwen3-32B-FP8 on two H200";
            self.warnings.push(format!("--policy: without --prefill-ms and --decode-ms {why}"));
        }
        if rebalances && no_prefill {
            let why = "the prefill backlog uses the step times of Qwen3-32B-FP8 on two H200";
            self.warnings.push(format!("--rebalance: without --prefill-ms {why}"));
        }
    }
}

/// The policy if none is given. sglang-router's default applies if the command line sets one of its
/// thresholds.
fn usual_policy(is_tuned: bool) -> Policy {
    if is_tuned { Policy::CacheAware } else { Policy::default() }
}

fn warn_of_tokenizers(model: Option<PathBuf>, tokenizer: Option<PathBuf>) -> Vec<String> {
    let given = [("--model-path", model), ("--tokenizer-path", tokenizer)];
    let given = given.into_iter().filter(|(_, path)| path.is_some());
    given.map(|(flag, _)| format!("{flag}: has no effect, because the workers tokenise")).collect()
}

/// Checks that only trusted clients can add workers through etcd.
fn check_etcd(etcd: &[WorkerUrl], is_trusted: bool) -> Result<(), ConfigError> {
    if is_trusted || etcd.is_empty() || all_loopback(etcd) {
        return Ok(());
    }
    Err(ConfigError::Missing {
        flag: "--cluster-key-file or --insecure",
        why: "--registry: every client that can write to an etcd beyond loopback can add workers, \
              and workers receive prompts"
            .into(),
    })
}

/// Whether all hosts are loopback addresses or `localhost`. Other names may lead to any host.
fn all_loopback(hosts: &[WorkerUrl]) -> bool {
    let is_loopback = |host: &str| host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    hosts.iter().all(|url| url.host == "localhost" || is_loopback(&url.host))
}

const BOOTSTRAP_PORTS: &str =
    "a bootstrap port is 1 to 65535, or none; a second worker's URL must contain its port";

/// Groups clap's flat list of words into `URL [PORT]`. A bare number and `none` are ports, because
/// no URL has that form.
fn prefill_endpoints(words: &[String]) -> Result<Vec<PrefillEndpoint>, ConfigError> {
    let mut endpoints: Vec<PrefillEndpoint> = Vec::new();
    let mut takes_port = false;
    for word in words {
        let is_none = word.eq_ignore_ascii_case("none");
        let is_port = is_none || word.bytes().all(|byte| byte.is_ascii_digit());
        if is_port && takes_port {
            let port = word.parse().ok().filter(|&port: &u16| port > 0);
            if port.is_none() && !is_none {
                return Err(value("--prefill", word, BOOTSTRAP_PORTS));
            }
            endpoints.last_mut().expect("takes_port is set after a push").bootstrap_port = port;
            takes_port = false;
        } else if takes_port && !word.contains([':', '.']) && word != "localhost" {
            return Err(value("--prefill", word, BOOTSTRAP_PORTS));
        } else if is_port {
            return Err(value(
                "--prefill",
                word,
                "a worker's address comes before its bootstrap port",
            ));
        } else {
            let url = word.parse().map_err(|limit: String| value("--prefill", word, limit))?;
            endpoints.push(PrefillEndpoint { url, bootstrap_port: None });
            takes_port = true;
        }
    }
    Ok(endpoints)
}

/// Checks that each worker is given once and with one role, and that CA certificates are given if
/// the URL of a worker is `https://`.
fn check_workers(
    prefill: &[PrefillEndpoint],
    decode: &[WorkerUrl],
    tls_ca: Option<&Path>,
) -> Result<(), ConfigError> {
    distinct_workers("--prefill", prefill.iter().map(|endpoint| &endpoint.url))?;
    distinct_workers("--decode", decode.iter())?;
    let is_both = |url: &&WorkerUrl| prefill.iter().any(|endpoint| endpoint.url.is_place_of(url));
    if let Some(url) = decode.iter().find(is_both) {
        let limit = "is also given to --prefill; a worker has one role at a time";
        return Err(value("--decode", url, limit));
    }
    vouched("--prefill", prefill.iter().map(|endpoint| &endpoint.url), tls_ca)?;
    vouched("--decode", decode, tls_ca)
}

/// Members of the etcd from which workers are taken.
fn etcd(registry: Option<RegistryAddress>) -> Result<Vec<WorkerUrl>, ConfigError> {
    match registry {
        None => Ok(Vec::new()),
        Some(RegistryAddress::Etcd(hosts)) => Ok(hosts),
        Some(other) => {
            let limit = "a router has its own registry; another one must be etcd://HOST:PORT";
            Err(value("--registry", other, limit))
        }
    }
}

fn distinct_workers<'a>(
    flag: &'static str,
    urls: impl ExactSizeIterator<Item = &'a WorkerUrl>,
) -> Result<(), ConfigError> {
    if urls.len() > ROUTER_WORKERS_MAX {
        return Err(value(
            flag,
            format!("({} times)", urls.len()),
            format!("at most {ROUTER_WORKERS_MAX} workers"),
        ));
    }
    let mut seen = HashSet::new();
    for url in urls {
        // One port serves either HTTP or HTTPS, so the scheme is not compared.
        if !seen.insert((&url.host, url.port)) {
            return Err(value(flag, url, "is given twice"));
        }
    }
    Ok(())
}

/// Checks and resolves the thresholds of `cache_aware`.
fn cache(
    policies: Policies,
    threshold: Option<f64>,
    ahead: Option<u32>,
    ratio: Option<f64>,
) -> Result<CacheAwareConfig, ConfigError> {
    let typed = [
        ("--cache-threshold", threshold.is_some()),
        ("--balance-abs-threshold", ahead.is_some()),
        ("--balance-rel-threshold", ratio.is_some()),
    ];
    if let Some((flag, _)) = typed.into_iter().find(|(_, typed)| *typed)
        && !policies.all().contains(&Policy::CacheAware)
    {
        let why = format!("{flag} has no effect with other policies");
        return Err(ConfigError::Missing { flag: "--policy cache_aware", why });
    }
    let default = CacheAwareConfig::default();
    let terms = CacheAwareConfig {
        threshold: threshold.unwrap_or(default.threshold),
        ahead: ahead.unwrap_or(default.ahead),
        ratio: ratio.unwrap_or(default.ratio),
    };
    if !(0.0..=1.0).contains(&terms.threshold) {
        return Err(value("--cache-threshold", terms.threshold, "must be 0 to 1"));
    }
    if !(terms.ratio >= 1.0 && terms.ratio.is_finite()) {
        return Err(value("--balance-rel-threshold", terms.ratio, "must be at least 1"));
    }
    Ok(terms)
}

/// Resolves the forecast. Policies use all of it; `--rebalance` uses only the prefill times.
fn forecast(
    flags: &ForecastFlags,
    policies: Policies,
    rebalance: bool,
) -> Result<Forecast, ConfigError> {
    let typed = [
        ("--slo-ttft-ms", flags.slo_ttft_ms.is_some()),
        ("--slo-tpot-ms", flags.slo_tpot_ms.is_some()),
        ("--prefill-ms", !flags.prefill_ms.is_empty() && !rebalance),
        ("--decode-ms", !flags.decode_ms.is_empty()),
        ("--kv-bytes-per-token", flags.kv_bytes_per_token.is_some()),
        ("--nic-gigabytes", flags.nic_gigabytes.is_some()),
    ];
    if let Some((flag, _)) = typed.into_iter().find(|(_, typed)| *typed)
        && !policies.all().into_iter().any(|policy| PolicyNeeds::of(policy).forecast)
    {
        let why = format!("{flag} has no effect with a policy without forecast");
        return Err(ConfigError::Missing { flag: "--policy slo or conditional", why });
    }
    let time = |flag, ms: Option<f64>| match ms {
        None => Ok(None),
        // No request lasts longer than a day.
        Some(ms) if ms > 0.0 && ms <= 86_400e3 => Ok(Some(Duration::from_secs_f64(ms / 1e3))),
        Some(ms) => Err(value(flag, ms, "must be above 0, and at most a day")),
    };
    let default = Forecast::default();
    Ok(Forecast {
        cost: Cost {
            prefill: coefficients(
                "--prefill-ms",
                &flags.prefill_ms,
                default.cost.prefill,
                default.chunk,
            )?,
            decode: coefficients(
                "--decode-ms",
                &flags.decode_ms,
                default.cost.decode,
                CONTEXT_MAX,
            )?,
        },
        bytes_per_token: flags.kv_bytes_per_token.unwrap_or(default.bytes_per_token),
        bytes_per_second: match flags.nic_gigabytes {
            Some(gigabytes) => positive("--nic-gigabytes", gigabytes)? * 1e9,
            None => default.bytes_per_second,
        },
        ttft: time("--slo-ttft-ms", flags.slo_ttft_ms)?,
        tpot: time("--slo-tpot-ms", flags.slo_tpot_ms)?,
        ..default
    })
}

/// The warning about a latency limit that no step can meet.
fn hopeless(forecast: &Forecast) -> Option<String> {
    let least_ms = forecast.cost.decode[0];
    let tpot = forecast.tpot.filter(|tpot| tpot.as_secs_f64() * 1e3 <= least_ms)?;
    let ms = tpot.as_secs_f64() * 1e3;
    Some(format!(
        "--slo-tpot-ms {ms}: a step takes {least_ms} ms (--decode-ms) even when it is empty, so \
         every request is refused"
    ))
}

/// Resolves the limits for automatic role changes; `None` without `--rebalance`.
fn balance(flags: &BalanceFlags) -> Result<Option<BalanceConfig>, ConfigError> {
    let fill = flags.rebalance_fill;
    if !(fill > 0.0 && fill <= 1.0) {
        return Err(value("--rebalance-fill", fill, "must be above 0 and up to 1"));
    }
    Ok(flags.rebalance.then(|| BalanceConfig {
        queue: Duration::from_millis(flags.rebalance_queue_ms.into()),
        fill,
        window: Duration::from_secs(flags.rebalance_window_secs.into()),
        dwell: Duration::from_secs(flags.rebalance_dwell_secs.into()),
        min_prefill: flags.min_prefill,
        min_decode: flags.min_decode,
    }))
}

fn metrics(flags: &ScrapeFlags, server: SocketAddr) -> Result<Option<SocketAddr>, ConfigError> {
    let Some(port) = flags.prometheus_port else { return Ok(None) };
    let address = SocketAddr::new(flags.prometheus_host.unwrap_or(server.ip()), port);
    if port != 0 && address == server {
        return Err(value("--prometheus-port", port, "is also --port"));
    }
    Ok(Some(address))
}

fn requests(flags: RequestFlags) -> Result<RequestConfig, ConfigError> {
    let defaults = RequestConfig::default();
    let concurrent = match u32::try_from(flags.max_concurrent_requests) {
        Ok(0) => {
            return Err(value(
                "--max-concurrent-requests",
                0,
                "must be at least 1, or -1 for no limit",
            ));
        }
        limit => limit.ok(),
    };
    if flags.flow != Flow::Dual && flags.first_token == FirstToken::Prefill {
        return Err(ConfigError::Conflict {
            flag: "--flow",
            other: "--first-token prefill",
            why: "the router receives prefill's token only in the flow dual",
        });
    }
    let timeout = Duration::from_secs(flags.request_timeout_secs.into());
    Ok(RequestConfig {
        timeout: (timeout < REQUEST_TIME_MAX).then_some(timeout),
        concurrent,
        queue: flags.queue_size,
        queue_time: Duration::from_secs(flags.queue_timeout_secs.into()),
        scheduling: flags.scheduling_policy,
        flow: flags.flow,
        first_token: flags.first_token,
        id_headers: match flags.request_id_headers {
            names if names.is_empty() => defaults.id_headers,
            names => names,
        },
    })
}

fn retries(flags: &RetryFlags) -> Result<RetryConfig, ConfigError> {
    let (growth, jitter) = (flags.retry_backoff_multiplier, flags.retry_jitter_factor);
    if !(1.0..=100.0).contains(&growth) {
        return Err(value("--retry-backoff-multiplier", growth, "must be 1 to 100"));
    }
    if !(0.0..=1.0).contains(&jitter) {
        return Err(value("--retry-jitter-factor", jitter, "must be 0 to 1"));
    }
    Ok(RetryConfig {
        // The flag also counts the first attempt, as in sglang-router.
        most: if flags.disable_retries { 0 } else { flags.retry_max_retries - 1 },
        first: Duration::from_millis(flags.retry_initial_backoff_ms.into()),
        longest: Duration::from_millis(flags.retry_max_backoff_ms.into()),
        growth,
        jitter,
    })
}

fn breaker(flags: &BreakerFlags) -> BreakerConfig {
    BreakerConfig {
        failures: (!flags.disable_circuit_breaker).then_some(flags.cb_failure_threshold),
        window: Duration::from_secs(flags.cb_window_duration_secs.into()),
        open: Duration::from_secs(flags.cb_timeout_duration_secs.into()),
        successes: flags.cb_success_threshold,
    }
}

fn health(flags: &HealthFlags) -> HealthConfig {
    let seconds = |seconds: u32| Duration::from_secs(seconds.into());
    let interval = seconds(flags.health_check_interval_secs);
    HealthConfig {
        interval,
        time: flags.health_check_timeout_secs.map_or(ROUTER_PROBE_TIME, seconds),
        failures: flags.health_failure_threshold,
        successes: flags.health_success_threshold,
        first_interval: flags.worker_startup_check_interval.map_or(interval, seconds),
        first_time: flags.worker_startup_timeout_secs.map(seconds),
    }
}

#[cfg(test)]
#[path = "routing_tests.rs"]
mod tests;
