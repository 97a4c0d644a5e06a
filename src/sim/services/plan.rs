//! What a seed draws: the cluster, its command lines, its requests and its faults.

use super::network::address_of;
use crate::limits::KEPT_KV_LIFE;
use crate::sim::workload::{SimRequest, Workload};
use crate::stdx::event_queue::{MILLI, Nanos, SECOND};
use crate::stdx::rng::Rng;

/// The router knows all workers after this time.
const START: Nanos = 5 * SECOND;
/// After this time, a worker that has started again serves again.
const RETURNED: Nanos = 10 * SECOND;
/// After this time, a worker that was drained has ended and serves again. If a client leaves as the
/// drain begins, its kept KV can hold the drain for its life.
const DRAINED: Nanos = RETURNED + KEPT_KV_LIFE.as_nanos() as Nanos;
/// No fault happens in this time before the last requests, so that they must succeed.
const CALM: Nanos = 20 * SECOND;
/// How many these are.
const CALM_REQUESTS: usize = 5;
/// The longest time between the first and the last request, without the calm ones.
const SPAN_MAX: Nanos = 300 * SECOND;

/// The size of a run.
#[derive(Clone, Copy, Debug)]
pub struct ServiceScale {
    /// Most workers of each role.
    pub workers: usize,
    /// Requests of clients.
    pub requests: usize,
    /// Whether connections break, clients leave, and processes die.
    pub faults: bool,
}

/// What happens in a run.
#[derive(Debug)]
pub struct ServicePlan {
    /// By host: the command line of its process. Host 0 is the router.
    pub lines: Vec<Vec<String>>,
    /// The requests, in order of time.
    pub requests: Vec<ServiceRequest>,
    /// The faults, and their times.
    pub faults: Vec<(Nanos, ServiceFault)>,
    /// All faults are drains, one at a time, and each role has another worker: all requests must
    /// succeed.
    pub is_gentle: bool,
}

/// A request of a client.
#[derive(Clone, Debug)]
pub struct ServiceRequest {
    /// When it is sent.
    pub at: Nanos,
    /// Whether its answer is a stream.
    pub stream: bool,
    /// When its client leaves, if it has no answer by then.
    pub leaves: Option<Nanos>,
    /// What it asks for.
    pub order: SimRequest,
}

/// A fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ServiceFault {
    /// A random connection is reset.
    Reset,
    /// The process of a worker's host gets SIGTERM, ends after its requests, and starts again after
    /// this time.
    Drain {
        /// The host.
        host: usize,
        /// Time until the new process.
        pause: Nanos,
    },
    /// The process of a worker's host dies. A new one starts after this time.
    Death {
        /// The host.
        host: usize,
        /// Time until the new process.
        pause: Nanos,
    },
}

impl ServiceFault {
    /// Time from the fault until all processes run again.
    pub fn pause(self) -> Nanos {
        match self {
            ServiceFault::Reset => 0,
            ServiceFault::Death { pause, .. } | ServiceFault::Drain { pause, .. } => pause,
        }
    }
}

impl ServicePlan {
    /// Whether a fault, or the time after it, meets this time of a request.
    pub fn excuses(&self, begun: Nanos, ended: Nanos) -> bool {
        let meets = |&(at, fault): &(Nanos, ServiceFault)| {
            at <= ended && begun <= at + fault.pause() + RETURNED
        };
        !self.is_gentle && self.faults.iter().any(meets)
    }

    /// The plan of a seed.
    pub fn new(dice: &Rng, scale: ServiceScale) -> ServicePlan {
        let mut shape = dice.fork("shape");
        let is_gentle = scale.faults && dice.fork("weather").one_in(3);
        let least = if is_gentle { 2 } else { 1 };
        let mut count = || shape.range_u64(least, least.max(scale.workers as u64)) as usize;
        let (prefill, decode) = (count(), count());
        let flow = shape.pick(&["dual", "prefill-first", "decode-first"]);
        let policy = shape.pick(&["least_loaded", "round_robin", "random", "cache_aware", "slo"]);
        let first = shape.pick(&["decode", "prefill"]);
        // The router gets prefill's token only in the flow `dual`.
        let first = if flow == "dual" { first } else { "decode" };
        let allocation = shape.pick(&["early", "late"]);
        let url = |host, port| format!("http://{}:{port}", address_of(host));
        let mut router = format!(
            "baton router --host {} --port 30000 --insecure --flow {flow} --policy {policy} \
             --first-token {first}",
            address_of(0)
        );
        let mut lines = vec![String::new()];
        for host in 1..=prefill + decode {
            let (role, port, more) = match host <= prefill {
                true => ("prefill", 30001, ""),
                false => ("decode", 30002, " --bootstrap-allow 10.0.0.0/8"),
            };
            router += &format!(" --{role} {}", url(host, port));
            lines.push(format!(
                "baton {role} model --host {} --port {port} --insecure --transfer tcp \
                 --page-size 4 --kv-memory 1MiB --threads 1 --decode-allocation \
                 {allocation}{more}",
                address_of(host)
            ));
        }
        lines[0] = router;
        let lines = lines.into_iter().map(|line| line.split(' ').map(str::to_owned).collect());
        let (mut requests, mut at) = (requests(dice, scale, is_gentle), START);
        let mut faults = Vec::new();
        let (end, mut chaos) = (requests.last().map_or(0, |last| last.at), dice.fork("chaos"));
        let last = if scale.faults { end } else { 0 };
        while at < last {
            at += match is_gentle {
                true => chaos.range_u64(DRAINED, 2 * DRAINED),
                false => chaos.range_u64(10 * MILLI, 3 * SECOND),
            };
            let host = chaos.range_u64(1, (prefill + decode) as u64) as usize;
            let pause = chaos.range_u64(10 * MILLI, 3 * SECOND);
            let death = ServiceFault::Death { host, pause };
            let fault = match chaos.range_u64(0, 3) {
                0 => death,
                1 => ServiceFault::Drain { host, pause },
                _ => ServiceFault::Reset,
            };
            let drain = ServiceFault::Drain { host, pause };
            faults.push((at, if is_gentle { drain } else { fault }));
        }
        let calm = faults.iter().map(|(at, fault)| at + fault.pause()).fold(end, Nanos::max) + CALM;
        if scale.faults {
            // The last requests come after the faults.
            let last = requests.len().saturating_sub(CALM_REQUESTS);
            for (number, request) in requests[last..].iter_mut().enumerate() {
                (request.at, request.leaves) = (calm + number as u64 * MILLI, None);
            }
        }
        ServicePlan { lines: lines.collect(), requests, faults, is_gentle }
    }
}

fn requests(dice: &Rng, scale: ServiceScale, is_gentle: bool) -> Vec<ServiceRequest> {
    let mut workload = Workload::new(dice.fork("workload"), 60 * SECOND, 60 * SECOND);
    let (mut arrivals, mut at) = (dice.fork("arrivals"), START);
    let gap = arrivals.pick(&[2, 20, 500]) * MILLI;
    let gap = if is_gentle { 10 * SECOND } else { gap };
    let gap = gap.min(SPAN_MAX / scale.requests as u64);
    let draw = |_| {
        at += arrivals.range_u64(0, gap);
        let leaves = arrivals.range_u64(0, 200 * MILLI) + at;
        ServiceRequest {
            at,
            stream: arrivals.one_in(2),
            leaves: (scale.faults && arrivals.one_in(8)).then_some(leaves),
            order: workload.draw(),
        }
    };
    (0..scale.requests).map(draw).collect()
}
