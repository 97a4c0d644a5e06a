//! The plan of a seed: the cluster, its command lines and its requests. `faults` draws the faults.

use super::faults::{
    AIMED_SILENCE, CHANGED, FaultScope, START, ServiceFault, WINDOW, Weather, draw_faults,
};
use super::keys::{ADMIN_KEY, API_KEY, KeyFiles, WRONG_KEY};
use super::network::address_of;
use crate::ids::Role;
use crate::sim::plan::{ANSWER_MAX, PROMPT_MAX};
use crate::sim::workload::{SimRequest, Workload};
use crate::stdx::event_queue::{MICRO, MILLI, Nanos, SECOND};
use crate::stdx::rng::Rng;
use crate::transfer::transport::rdma::Settings;
use std::net::SocketAddr;

/// No fault happens in this time before the last requests, so that they must succeed.
const CALM: Nanos = 20 * SECOND;
/// Time of one token of a batch. A worker has one of them.
const TOKENS: [Nanos; 3] = [100 * MICRO, 100 * MICRO, 2 * MILLI];
/// Tokens of a page.
const PAGE_SIZE: u32 = 4;
/// Pages of the longest request.
const LONGEST: u32 = (PROMPT_MAX + ANSWER_MAX).div_ceil(PAGE_SIZE) + 1;
/// The HTTP ports of workers that start as prefill, and as decode.
const PREFILL_PORT: u16 = 30_001;
const DECODE_PORT: u16 = 30_002;
/// Requests that are sent after the last fault.
const CALM_REQUESTS: usize = 5;
/// A NIC sends a request again six times, each after 67 ms (`Route`). Some multiply that.
const NIC_PATIENCE: Nanos = (7 << 14) * 4096;
/// In one of so many runs, many requests need few pages of decode workers at once.
const CROWDED: u64 = 4;
/// The longest time between two requests of such a run.
const CROWDED_GAP: Nanos = 2 * MILLI;
/// Time of one token of a batch of a decode worker of such a run.
const CROWDED_TOKEN: Nanos = 5 * MILLI;
/// The longest time between the first and the last request, without the calm ones.
const SPAN_MAX: Nanos = 300 * SECOND;

/// The size of a run.
#[derive(Clone, Copy, Debug)]
pub struct ServiceScale {
    /// Most workers of each role.
    pub workers: usize,
    /// Requests of clients.
    pub requests: usize,
    /// Whether faults happen and clients leave.
    pub faults: bool,
}

/// What happens in a run.
#[derive(Debug)]
pub struct ServicePlan {
    /// By host: the command line of its process. Host 0 is the router.
    pub lines: Vec<Vec<String>>,
    /// By host: where its process runs.
    pub sites: Vec<HostSite>,
    /// The first role and the address of each worker. The first worker is on host 1.
    pub roles: Vec<(Role, SocketAddr)>,
    /// The requests, in order of time.
    pub requests: Vec<ServiceRequest>,
    /// The faults, and their times.
    pub faults: Vec<(Nanos, ServiceFault)>,
    /// Whether decode workers compute prompts themselves if no prefill worker is left.
    pub local_prefill: bool,
    /// No fault happens after this time.
    pub faults_end: Nanos,
    /// The hosts that faults can meet.
    pub victims: Vec<usize>,
    /// Which faults happen.
    pub weather: Weather,
    /// The keys of the processes.
    pub keys: ClusterKeys,
    /// One in so many clients leaves while its KV is in transfer.
    pub leaves_in_transfer: u64,
    /// Time for which NICs send a request again.
    pub nic_patience: Nanos,
}

/// The keys of the processes of a run.
#[derive(Clone, Copy, Debug)]
pub struct ClusterKeys {
    /// Whether the processes have a cluster key.
    pub has_cluster_key: bool,
    /// Whether clients need an API key.
    pub has_api_keys: bool,
    /// Whether the operator needs an admin key.
    pub has_admin_keys: bool,
}

impl ClusterKeys {
    fn draw(mut dice: Rng) -> ClusterKeys {
        let mut draw = || dice.one_in(2);
        let (has_cluster_key, has_api_keys, has_admin_keys) = (draw(), draw(), draw());
        ClusterKeys { has_cluster_key, has_api_keys, has_admin_keys }
    }

    /// The flags of each process.
    fn flags(self) -> String {
        let files = KeyFiles::get();
        let mut flags = match self.has_cluster_key {
            true => files.cluster_flag(),
            false => " --insecure".to_owned(),
        };
        if self.has_api_keys {
            flags += &files.api_flag();
        }
        if self.has_admin_keys {
            flags += &files.admin_flag();
        }
        flags
    }

    /// The key that the operator sends.
    pub fn operator_key(self) -> Option<&'static str> {
        match (self.has_admin_keys, self.has_api_keys) {
            (true, _) => Some(ADMIN_KEY),
            (false, true) => Some(API_KEY),
            (false, false) => None,
        }
    }
}

/// Where a process runs, and the memory that a worker has there.
#[derive(Clone, Copy, Debug)]
pub struct HostSite {
    /// Processes of one machine can share memory.
    pub machine: u8,
    /// Pages of the KV pool. Flags cannot set so few.
    pub pages: u32,
    /// Pages for the KV of retracted requests.
    pub tier_pages: u32,
    /// Time of one token of a batch.
    pub token: Nanos,
    /// Whether the host has a NIC.
    pub has_nic: bool,
    /// Queue pairs of an RDMA session.
    pub rdma: Settings,
    /// Lanes of a tcp session.
    pub tcp_lanes: u16,
}

impl HostSite {
    /// Few pages, and slow steps, so that many requests need them at once.
    fn crowd(&mut self) {
        self.pages = self.pages.min(2 * LONGEST);
        self.token = CROWDED_TOKEN;
    }
}

/// A request of a client.
#[derive(Clone, Debug)]
pub struct ServiceRequest {
    /// When it is sent.
    pub at: Nanos,
    /// The key that its client sends.
    pub key: Option<&'static str>,
    /// Whether its answer is a stream.
    pub stream: bool,
    /// Whether its client may leave.
    pub may_leave: bool,
    /// When its client leaves, if it has no answer by then.
    pub leaves: Option<Nanos>,
    /// What it asks for.
    pub order: SimRequest,
}

impl ServicePlan {
    /// Whether a fault excuses the failure of a request in this time: it meets the router or a
    /// connection, or no pair of workers was well for all of the time.
    pub fn excuses(&self, begun: Nanos, ended: Nanos) -> bool {
        if self.weather == Weather::Gentle {
            return false;
        }
        let faults: Vec<ServiceFault> = self.faults_near(begun, ended).collect();
        let is_well = |host: usize| !faults.iter().any(|fault| fault.meets(host));
        let has_well = |role: Role| {
            let mut hosts = (1..).zip(&self.roles);
            hosts.any(|(host, &(first, _))| first == role && is_well(host))
        };
        !is_well(0) || (!has_well(Role::Prefill) && !self.local_prefill) || !has_well(Role::Decode)
    }

    /// Whether prefill workers keep KV for decode workers.
    pub fn keeps_kv(&self) -> bool {
        self.lines[0].iter().any(|word| word == "prefill-first")
    }

    /// Whether a fault, or the time after it, meets this time of a request.
    pub fn is_near_fault(&self, begun: Nanos, ended: Nanos) -> bool {
        self.faults_near(begun, ended).next().is_some()
    }

    fn faults_near(&self, begun: Nanos, ended: Nanos) -> impl Iterator<Item = ServiceFault> {
        let meets = move |&&(at, fault): &&(Nanos, ServiceFault)| {
            at <= ended && begun <= at + fault.effect()
        };
        self.faults.iter().filter(meets).map(|&(_, fault)| fault)
    }

    /// The plan of a seed.
    pub fn new(dice: &Rng, scale: ServiceScale) -> ServicePlan {
        let weather = Weather::draw(dice.fork("weather"));
        let mut shape = dice.fork("shape");
        let (roles, prefill) = draw_roles(&mut shape, scale, weather);
        let keys = ClusterKeys::draw(dice.fork("keys"));
        let local_prefill = dice.fork("alone").one_in(3);
        let place = dice.fork("machines");
        let is_crowded = dice.fork("crowd").one_in(CROWDED);
        let (lines, mut sites) =
            draw_fleet(shape, place, &roles, (keys, local_prefill, is_crowded));
        if is_crowded {
            sites[..=prefill].iter_mut().for_each(|site| site.token = TOKENS[0]);
            sites[prefill + 1..].iter_mut().for_each(HostSite::crowd);
        }
        let victims = match weather {
            _ if !scale.faults => Vec::new(),
            Weather::Gentle => Vec::new(),
            // Decode workers that are well need no prefill worker.
            Weather::Narrow if local_prefill => (1..=prefill + 1).collect(),
            Weather::Narrow => vec![1, prefill + 1],
            Weather::Flaky | Weather::Storm => (0..sites.len()).collect(),
        };
        let nic_patience = NIC_PATIENCE * dice.fork("nics").pick(&[1, 4]);
        let mut requests = draw_requests(dice, scale, (weather, is_crowded));
        give_keys(&mut requests, keys, dice.fork("key of client"));
        let end = requests.last().map_or(0, |last| last.at);
        let scope = FaultScope {
            prefill,
            workers: roles.len(),
            has_nics: sites.iter().any(|site| site.has_nic),
            victims: &victims,
        };
        let faults = match scale.faults {
            true => draw_faults(dice.fork("chaos"), end, &scope, weather),
            false => Vec::new(),
        };
        let faults_end = faults.iter().map(|&(at, _)| at).max().unwrap_or(0);
        if scale.faults {
            aim(&mut requests, &faults, dice.fork("aim"));
            // The last requests come after the faults.
            let over = faults.iter().map(|(at, fault)| at + fault.effect());
            let calm = over.fold(end, Nanos::max) + AIMED_SILENCE + CHANGED + CALM;
            let last = requests.len().saturating_sub(CALM_REQUESTS);
            for (number, request) in requests[last..].iter_mut().enumerate() {
                (request.at, request.leaves) = (calm + number as u64 * MILLI, None);
                request.may_leave = false;
            }
        }
        ServicePlan {
            lines,
            sites,
            roles,
            requests,
            faults,
            local_prefill,
            faults_end,
            victims,
            weather,
            leaves_in_transfer: if is_crowded { 2 } else { 6 },
            keys,
            nic_patience,
        }
    }
}

/// The first roles and the addresses of the workers, and how many of them are prefill workers.
fn draw_roles(
    shape: &mut Rng,
    scale: ServiceScale,
    weather: Weather,
) -> (Vec<(Role, SocketAddr)>, usize) {
    let (least, most) = match weather {
        Weather::Gentle | Weather::Narrow if scale.faults => (2, scale.workers.max(2) as u64),
        Weather::Flaky if scale.faults => (1, 1),
        _ => (1, scale.workers as u64),
    };
    let mut count = || shape.range_u64(least, most) as usize;
    let (prefill, decode) = (count(), count());
    let roles = (1..=prefill + decode).map(|host| match host <= prefill {
        true => (Role::Prefill, SocketAddr::new(address_of(host), PREFILL_PORT)),
        false => (Role::Decode, SocketAddr::new(address_of(host), DECODE_PORT)),
    });
    (roles.collect(), prefill)
}

/// The command lines of the router and of workers with these roles, and their sites.
fn draw_fleet(
    mut shape: Rng,
    mut place: Rng,
    roles: &[(Role, SocketAddr)],
    (keys, local_prefill, is_crowded): (ClusterKeys, bool, bool),
) -> (Vec<Vec<String>>, Vec<HostSite>) {
    let flow = shape.pick(&["dual", "prefill-first", "decode-first"]);
    let policy = shape.pick(&["least_loaded", "round_robin", "random", "cache_aware", "slo"]);
    let first = shape.pick(&["decode", "prefill"]);
    // The router gets prefill's token only in the flow `dual`.
    let first = if flow == "dual" { first } else { "decode" };
    let allocation = shape.pick(&["early", "late"]);
    let transfer = place.pick(&["tcp", "shm", "auto", "auto", "rdma", "rdma"]);
    let spread = if transfer == "shm" { 1 } else { place.pick(&[1, 2, 2, 8]) };
    let nics = match transfer {
        "rdma" => 1,
        "auto" => place.pick(&[1, 2, 1000]),
        _ => 1000,
    };
    let is_split = transfer == "rdma" && place.one_in(2);
    let data_threads = if is_split { " --data-threads split" } else { "" };
    let chunk = place.pick(&[8, 40, 160]);
    let sites = (0..=roles.len()).map(|_| HostSite {
        machine: place.range_u64(1, spread) as u8,
        pages: place.pick(&[LONGEST + 1, 2 * LONGEST, 4 * LONGEST, 100 * LONGEST]),
        tier_pages: place.pick(&[0, LONGEST, 8 * LONGEST]),
        token: place.pick(&TOKENS),
        has_nic: place.one_in(nics),
        rdma: Settings {
            lanes: place.pick(&[1, 2, 3]),
            requests: place.pick(&[8, 20, 64]),
            pieces: place.pick(&[1, 4]),
        },
        tcp_lanes: place.pick(&[1, 2, 4]),
    });
    let sites = sites.collect();
    let (key_flags, router_host) = (keys.flags(), address_of(0));
    let mut router = format!(
        "baton router --host {router_host} --port 30000 --flow {flow} --policy {policy} \
         --first-token {first}{key_flags}"
    );
    // A worker is named by a flag of the router, or enters itself in its registry.
    let is_registered: Vec<bool> = roles.iter().map(|_| place.one_in(2)).collect();
    for ((role, address), _) in roles.iter().zip(&is_registered).filter(|(_, is)| !**is) {
        router += &format!(" --{role} http://{address}");
    }
    let reserved = place.pick(&[1, 4, 512]);
    let reserved = if is_crowded { 1 } else { reserved };
    let alone = if local_prefill { " --local-prefill" } else { "" };
    let worker = |((role, address), is_registered): (&(Role, SocketAddr), bool)| {
        let (host, port) = (address.ip(), address.port());
        let registry = match is_registered {
            true => format!(" --registry http://{router_host}:30000"),
            false => String::new(),
        };
        let alone = if *role == Role::Decode { alone } else { "" };
        format!(
            "baton {role} model --host {host} --port {port} --transfer {transfer} \
             --page-size {PAGE_SIZE} --kv-memory 1MiB --threads 1 --bootstrap-allow 10.0.0.0/8 \
             --decode-allocation {allocation} --chunked-prefill-size {chunk}\
             {data_threads}{alone}{registry}{key_flags} \
             --num-reserved-decode-tokens {reserved}"
        )
    };
    let workers = roles.iter().zip(is_registered).map(worker);
    let lines = std::iter::once(router).chain(workers);
    let split = |line: String| line.split(' ').map(str::to_owned).collect();
    (lines.map(split).collect(), sites)
}

/// Moves half of the requests to times near the faults, so that faults meet requests that run.
fn aim(requests: &mut [ServiceRequest], faults: &[(Nanos, ServiceFault)], mut dice: Rng) {
    let windows = faults.iter().flat_map(|&(at, fault)| match fault {
        ServiceFault::Role { pause, .. } => vec![at, at + pause],
        _ => vec![at],
    });
    let windows: Vec<Nanos> = windows.collect();
    if windows.is_empty() {
        return;
    }
    for request in &mut *requests {
        if dice.one_in(2) {
            let until = request.leaves.map(|leaves| leaves - request.at);
            request.at = dice.pick(&windows) - WINDOW + dice.range_u64(0, 2 * WINDOW);
            request.leaves = until.map(|until| request.at + until);
        }
    }
    requests.sort_by_key(|request| request.at);
}

/// Gives clients their keys; some have a wrong one.
fn give_keys(requests: &mut [ServiceRequest], keys: ClusterKeys, mut dice: Rng) {
    for request in requests.iter_mut().filter(|_| keys.has_api_keys) {
        request.key = Some(if dice.one_in(20) { WRONG_KEY } else { API_KEY });
    }
}

fn draw_requests(
    dice: &Rng,
    scale: ServiceScale,
    (weather, is_crowded): (Weather, bool),
) -> Vec<ServiceRequest> {
    let mut workload = Workload::new(dice.fork("workload"), 60 * SECOND, 60 * SECOND);
    let (mut arrivals, mut at) = (dice.fork("arrivals"), START);
    let gap = arrivals.pick(&[2, 20, 500]) * MILLI;
    let gap = if is_crowded { CROWDED_GAP } else { gap };
    let gap = match weather {
        Weather::Gentle if scale.faults => 10 * SECOND,
        Weather::Flaky if scale.faults => 4 * SECOND,
        _ => gap,
    };
    let gap = gap.min(SPAN_MAX / scale.requests as u64);
    let (leavers, stay) = (arrivals.pick(&[4, 16]), arrivals.pick(&[10, 30, 60, 200]) * MILLI);
    let draw = |_| {
        at += arrivals.range_u64(0, gap);
        let leaves = arrivals.range_u64(0, stay) + at;
        ServiceRequest {
            at,
            stream: arrivals.one_in(2),
            key: None,
            may_leave: scale.faults,
            leaves: (scale.faults && arrivals.one_in(leavers)).then_some(leaves),
            order: workload.draw(),
        }
    };
    (0..scale.requests).map(draw).collect()
}
