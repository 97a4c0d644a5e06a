//! The plan of a seed: the cluster, its command lines, its requests and its faults.

use super::keys::{ADMIN_KEY, API_KEY, KeyFiles, WRONG_KEY};
use super::network::address_of;
use super::operator::PATIENCE;
use crate::ids::Role;
use crate::limits::KEPT_KV_LIFE;
use crate::sim::plan::{ANSWER_MAX, PROMPT_MAX};
use crate::sim::workload::{SimRequest, Workload};
use crate::stdx::event_queue::{MICRO, MILLI, Nanos, SECOND};
use crate::stdx::rng::Rng;
use crate::transfer::transport::rdma::Settings;
use std::net::SocketAddr;
use std::ops::RangeInclusive;

/// The router knows all workers after this time.
const START: Nanos = 5 * SECOND;
/// After this time, a worker that has started again serves again.
const RETURNED: Nanos = 10 * SECOND;
/// After this time, a lost connection or session is replaced.
const RECONNECTED: Nanos = 4 * SECOND;
/// After this time, a worker that was drained has ended and serves again. If a client leaves as the
/// drain begins, its kept KV can hold the drain for its life.
const DRAINED: Nanos = RETURNED + KEPT_KV_LIFE.as_nanos() as Nanos;
/// After this time, an ordered role change has ended: the worker finishes its requests, and KV that
/// it keeps for decode.
const CHANGED: Nanos = PATIENCE.as_nanos() as Nanos + DRAINED;
/// Some role changes of gentle weather last so long, so that the router must use the new role.
const ROLE_TIME: Nanos = 25 * SECOND;
/// All prefill workers of some runs are dead for this time.
const OUTAGE: Nanos = 30 * SECOND;
/// No fault happens in this time before the last requests, so that they must succeed.
const CALM: Nanos = 20 * SECOND;
/// Requests that meet a fault are sent at most this long before or after it.
const WINDOW: Nanos = 30 * MILLI;
/// Time of one token of a batch. A worker has one of them.
const TOKENS: [Nanos; 3] = [100 * MICRO, 100 * MICRO, 2 * MILLI];
/// Tokens of a page.
const PAGE_SIZE: u32 = 4;
/// Pages of the longest request.
const LONGEST: u32 = (PROMPT_MAX + ANSWER_MAX).div_ceil(PAGE_SIZE) + 1;
/// The HTTP ports of workers that start as prefill, and as decode.
const PREFILL_PORT: u16 = 30_001;
const DECODE_PORT: u16 = 30_002;
/// Time until the next process after a death that was aimed.
pub const AIMED_DEATH: Nanos = 200 * MILLI;
/// How long a fault that was aimed silences a process: longer than any wait that is allowed.
pub const AIMED_SILENCE: Nanos = 60 * SECOND;
/// Fewest faults of a run with faults.
const FAULTS_MIN: usize = 3;
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

/// Which faults happen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Weather {
    /// Drains and role changes, one at a time. Each role has another worker, so all requests must
    /// succeed.
    Gentle,
    /// Faults of one prefill worker and of one decode worker. A pair of others is always well, so
    /// all requests must succeed.
    Narrow,
    /// Faults of all processes and connections.
    Storm,
}

impl Weather {
    fn draw(mut dice: Rng) -> Weather {
        dice.pick(&[Weather::Gentle, Weather::Narrow, Weather::Storm])
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

/// A fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ServiceFault {
    /// A random connection is reset.
    Reset,
    /// The NIC breaks a queue pair that waits for an answer.
    NicError,
    /// Writes of NICs to a host land only after this time.
    Hold {
        /// The host.
        host: usize,
        /// The time.
        pause: Nanos,
    },
    /// The process of a host gets SIGTERM, ends after its requests, and starts again after
    /// this time.
    Drain {
        /// The host.
        host: usize,
        /// Time until the new process.
        pause: Nanos,
    },
    /// The process of a host takes no turn for this time, as after SIGSTOP.
    Stall {
        /// The host.
        host: usize,
        /// The time.
        pause: Nanos,
    },
    /// The engine of a worker takes no step for this time. Its other threads work.
    Hang {
        /// The host.
        host: usize,
        /// The time.
        pause: Nanos,
    },
    /// Nothing passes between a host and all others for this time. The kernels send the data again
    /// after the cut.
    Cut {
        /// The host.
        host: usize,
        /// The time.
        pause: Nanos,
    },
    /// Nothing passes between a prefill and a decode host for this time.
    Part {
        /// The hosts.
        hosts: (usize, usize),
        /// The time.
        pause: Nanos,
    },
    /// The operator orders this role for a worker, and its first role again after this time.
    Role {
        /// The host.
        host: usize,
        /// The role.
        role: Role,
        /// Time until the order of the first role.
        pause: Nanos,
    },
    /// The process of a host dies. A new one starts after this time.
    Death {
        /// The host.
        host: usize,
        /// Time until the new process.
        pause: Nanos,
    },
}

impl ServiceFault {
    /// Whether it meets this host.
    fn meets(self, other: usize) -> bool {
        match self {
            ServiceFault::Reset | ServiceFault::NicError => true,
            ServiceFault::Part { hosts: (one, two), .. } => one == other || two == other,
            ServiceFault::Hold { host, .. }
            | ServiceFault::Drain { host, .. }
            | ServiceFault::Stall { host, .. }
            | ServiceFault::Cut { host, .. }
            | ServiceFault::Hang { host, .. }
            | ServiceFault::Role { host, .. }
            | ServiceFault::Death { host, .. } => host == other,
        }
    }

    /// Time from the fault until its effects are over.
    pub fn effect(self) -> Nanos {
        match self {
            ServiceFault::Reset | ServiceFault::NicError => RECONNECTED,
            ServiceFault::Role { pause, .. } => pause + CHANGED + RETURNED,
            ServiceFault::Drain { pause, .. } => pause + DRAINED + RETURNED,
            ServiceFault::Hold { pause, .. } | ServiceFault::Part { pause, .. } => {
                pause + RECONNECTED
            }
            ServiceFault::Death { pause, .. }
            | ServiceFault::Stall { pause, .. }
            | ServiceFault::Hang { pause, .. }
            | ServiceFault::Cut { pause, .. } => pause + RETURNED,
        }
    }
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
        let least = if scale.faults && weather != Weather::Storm { 2 } else { 1 };
        let mut count = || shape.range_u64(least, least.max(scale.workers as u64)) as usize;
        let (prefill, decode) = (count(), count());
        let roles: Vec<(Role, SocketAddr)> = (1..=prefill + decode)
            .map(|host| match host <= prefill {
                true => (Role::Prefill, SocketAddr::new(address_of(host), PREFILL_PORT)),
                false => (Role::Decode, SocketAddr::new(address_of(host), DECODE_PORT)),
            })
            .collect();
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
            Weather::Storm => (0..sites.len()).collect(),
        };
        let nic_patience = NIC_PATIENCE * dice.fork("nics").pick(&[1, 4]);
        let mut requests = draw_requests(dice, scale, (weather, is_crowded));
        give_keys(&mut requests, keys, dice.fork("key of client"));
        let end = requests.last().map_or(0, |last| last.at);
        let faults = match scale.faults {
            true => draw_faults(dice.fork("chaos"), end, (&sites, &victims, prefill), weather),
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
            keys,
            nic_patience,
        }
    }
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
    let data_threads = match transfer {
        "rdma" => place.pick(&["", " --data-threads split"]),
        _ => "",
    };
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
    let local_prefill = if local_prefill { " --local-prefill" } else { "" };
    let worker = |((role, address), is_registered): (&(Role, SocketAddr), bool)| {
        let (host, port) = (address.ip(), address.port());
        let registry = match is_registered {
            true => format!(" --registry http://{router_host}:30000"),
            false => String::new(),
        };
        let local_prefill = if *role == Role::Decode { local_prefill } else { "" };
        format!(
            "baton {role} model --host {host} --port {port} --transfer {transfer} \
             --page-size {PAGE_SIZE} --kv-memory 1MiB --threads 1 --bootstrap-allow 10.0.0.0/8 \
             --decode-allocation {allocation} --chunked-prefill-size {chunk}\
             {data_threads}{local_prefill}{registry}{key_flags} \
             --num-reserved-decode-tokens {reserved}"
        )
    };
    let workers = roles.iter().zip(is_registered).map(worker);
    let lines = std::iter::once(router).chain(workers);
    let split = |line: String| line.split(' ').map(str::to_owned).collect();
    (lines.map(split).collect(), sites)
}

/// The faults until `end` on these hosts: the router, this number of prefill workers, and decode
/// workers. In narrow weather, only victims have faults.
fn draw_faults(
    mut chaos: Rng,
    end: Nanos,
    (sites, victims, prefill): (&[HostSite], &[usize], usize),
    weather: Weather,
) -> Vec<(Nanos, ServiceFault)> {
    let (mut at, mut faults) = (START, Vec::new());
    let is_gentle = weather == Weather::Gentle;
    let lull = chaos.pick(&[50 * MILLI, 500 * MILLI, 3 * SECOND]);
    let changes_roles = chaos.one_in(2);
    let workers = sites.len() as u64 - 1;
    let victims_of = |hosts: RangeInclusive<usize>| {
        let victims = victims.iter().copied();
        victims.filter(|victim| hosts.contains(victim)).collect::<Vec<usize>>()
    };
    let (sources, destinations) = (victims_of(1..=prefill), victims_of(prefill + 1..=sites.len()));
    let most = if sites.iter().any(|site| site.has_nic) { 10 } else { 8 };
    while at < end || faults.len() < FAULTS_MIN {
        at += match is_gentle {
            true => chaos.range_u64(ROLE_TIME + CHANGED, 2 * (ROLE_TIME + CHANGED)),
            false => chaos.range_u64(MILLI, lull),
        };
        let (worker, any) = match weather {
            Weather::Narrow => {
                let victim = chaos.pick(victims);
                (victim, victim)
            }
            _ => (chaos.range_u64(1, workers) as usize, chaos.range_u64(0, workers) as usize),
        };
        let pause = chaos.range_u64(10 * MILLI, 3 * SECOND);
        let silence_max = chaos.pick(&[SECOND, 10 * SECOND, 40 * SECOND]);
        let silence = chaos.range_u64(MILLI, silence_max);
        let role = chaos.pick(&Role::ALL);
        let fault = match chaos.range_u64(0, most) {
            0..=3 if is_gentle && changes_roles => {
                let pause = chaos.pick(&[pause, ROLE_TIME]);
                ServiceFault::Role { host: worker, role, pause }
            }
            0 | 1 if !is_gentle => ServiceFault::Death { host: any, pause },
            2 if !is_gentle => ServiceFault::Drain { host: any, pause },
            3 if changes_roles => ServiceFault::Role { host: worker, role, pause },
            4 if !is_gentle => ServiceFault::Stall { host: any, pause: silence },
            5 if !is_gentle => ServiceFault::Cut { host: any, pause: silence },
            6 | 7 if weather == Weather::Storm => ServiceFault::Reset,
            8 if !is_gentle => {
                let hosts = (chaos.pick(&sources), chaos.pick(&destinations));
                ServiceFault::Part { hosts, pause: silence }
            }
            9 if weather == Weather::Storm => ServiceFault::NicError,
            // No probe sees a NIC that is slow, so in narrow weather it is slow for a short time.
            10 if weather == Weather::Narrow => ServiceFault::Hold { host: worker, pause },
            10 if weather == Weather::Storm => ServiceFault::Hold { host: worker, pause: silence },
            _ => ServiceFault::Drain { host: worker, pause },
        };
        faults.push((at, fault));
    }
    // Decode workers compute prompts while all prefill workers are dead.
    if weather == Weather::Narrow && sources.len() == prefill && chaos.one_in(2) {
        let deaths = sources.into_iter().map(|host| {
            (at + chaos.range_u64(0, 2 * WINDOW), ServiceFault::Death { host, pause: OUTAGE })
        });
        faults.extend(deaths);
    }
    faults
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
    let gap = if scale.faults && weather == Weather::Gentle { 10 * SECOND } else { gap };
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
