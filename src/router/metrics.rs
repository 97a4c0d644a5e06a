//! Metrics of a router: its requests and its workers.
//!
//! Thread: `ctl`. Not here: the output format (`obs::exposition`).

use crate::cause::Cause;
use crate::ids::Leg;
use crate::obs::buckets::*;
use crate::obs::instruments::{Counter, Gauge, Histogram, Labels};
use crate::obs::registry::Registry;
use crate::server::key_limits::KeyRefusals;
use std::sync::Arc;
use std::time::Duration;

/// Counters and histograms of the router, with the names of SGLang's gateway.
#[derive(Debug)]
pub struct RouterMetrics {
    /// Accepted requests.
    pub requests: Arc<Counter>,
    failures: [Arc<Counter>; Cause::ALL.len()],
    retries: [Arc<Counter>; Cause::ALL.len()],
    /// Streams that continued on other workers.
    pub resumed: Arc<Counter>,
    ttft: Arc<Histogram>,
    duration: Arc<Histogram>,
    /// Requests that limits of API keys have refused.
    pub key_refusals: KeyRefusals,
}

impl RouterMetrics {
    /// Registers the metrics of a router. Metrics of its workers are separate ([`RoutedMetrics`]).
    pub fn register(registry: &mut Registry) -> RouterMetrics {
        let (r, l) = (registry, &Labels::none());
        RouterMetrics {
            requests: r.counter(&["smg_router_requests_total"], "Requests taken.", l),
            failures: std::array::from_fn(|index| {
                let labels = l.and("error_type", Cause::ALL[index].name());
                r.counter(
                    &["smg_router_request_errors_total"],
                    "Requests that failed, by cause.",
                    &labels,
                )
            }),
            retries: std::array::from_fn(|index| {
                let labels = l.and("error_type", Cause::ALL[index].name());
                let help = "Retries on another pair of workers, by cause of the failure.";
                r.counter(&["baton_router_retries_total"], help, &labels)
            }),
            resumed: r.counter(
                &["baton_router_resumed_total"],
                "Streams that continued on other workers after a failure.",
                l,
            ),
            ttft: r.histogram(
                &["smg_router_ttft_seconds", "smg_pd_ttft_seconds"],
                "Streams: from a request's arrival to the first byte of its answer.",
                l,
                TTFT_SECONDS,
            ),
            duration: r.histogram(
                &["smg_router_request_duration_seconds"],
                "From a request's arrival to the end of its answer.",
                l,
                E2E_SECONDS,
            ),
            key_refusals: KeyRefusals::register(r),
        }
    }

    /// Counts a request that has failed.
    pub fn failed(&self, cause: Cause) {
        self.failures[cause.index()].inc();
    }

    /// Counts a retry.
    pub fn retried(&self, cause: Cause) {
        self.retries[cause.index()].inc();
    }

    /// Records the time from a request's arrival to the first byte of its stream.
    pub fn first_byte(&self, since_arrival: Duration) {
        self.ttft.observe(since_arrival.as_secs_f64());
    }

    /// Records the time from a request's arrival to the end of its answer.
    pub fn ended(&self, since_arrival: Duration) {
        self.duration.observe(since_arrival.as_secs_f64());
    }
}

/// The metrics of one worker, while it is present.
#[derive(Debug)]
pub struct RoutedMetrics {
    labels: Labels,
    health: Arc<Gauge>,
    active: Arc<Gauge>,
}

impl RoutedMetrics {
    /// Registers the metrics of the worker at `url` for this leg.
    pub fn register(registry: &mut Registry, leg: Leg, url: &str) -> RoutedMetrics {
        let labels = Labels::none().and("worker_type", &leg.to_string()).and("worker", url);
        let health = "1 if the router can use the worker, else 0.";
        let active = "Requests at the worker.";
        RoutedMetrics {
            health: registry.gauge(&["smg_worker_health"], health, &labels),
            active: registry.gauge(&["smg_worker_requests_active"], active, &labels),
            labels,
        }
    }

    /// Removes them from the output.
    pub fn unlist(self, registry: &mut Registry) {
        registry.unlist(&self.labels);
    }

    /// Sets the worker's health and its number of requests.
    pub fn set(&self, is_healthy: bool, active: usize) {
        self.health.set(f64::from(u8::from(is_healthy)));
        self.active.set(active as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::obs::exposition::tests::{exposed, sum};

    #[test]
    fn the_router_tells_of_its_workers() {
        let mut registry = Registry::default();
        let workers = [(Leg::Prefill, "http://a:1"), (Leg::Decode, "http://b:2")];
        let [first, second] =
            workers.map(|(role, url)| RoutedMetrics::register(&mut registry, role, url));
        let router = RouterMetrics::register(&mut registry);
        router.requests.inc();
        router.failed(Cause::Overloaded);
        second.set(true, 3);
        let samples = exposed(&registry);
        assert_eq!(sum(&samples, "smg_worker_health", &[("worker", "http://a:1")]), 0.0);
        assert_eq!(sum(&samples, "smg_worker_requests_active", &[("worker_type", "decode")]), 3.0);
        assert_eq!(
            sum(&samples, "smg_router_request_errors_total", &[("error_type", "overloaded")]),
            1.0
        );
        first.unlist(&mut registry);
        let mut text = String::new();
        registry.expose(&mut text);
        assert!(!text.contains("http://a:1") && text.contains("http://b:2"), "{text}");
    }
}
