//! The processes of a seed: their command lines, roles and sites.

use super::etcd::PORT;
use super::faults::Weather;
use super::keys::ClusterKeys;
use super::model::SimLayers;
use super::names::name_of;
use super::network::address_of;
use super::scale::RunScale;
use super::workload::{ANSWER_MAX, PROMPT_MAX};
use super::{OTHERS, ROUTER_PORT};
use crate::cli::flags::{SimFlow, SimTransfer};
use crate::ids::Role;
use crate::stdx::event_queue::{MICRO, MILLI, Nanos};
use crate::stdx::rng::Rng;
use crate::transfer::transport::rdma::Settings;
use std::net::SocketAddr;
use std::ops::Range;

/// Most workers of each role, if a seed draws them.
const WORKERS_MAX: u64 = 3;
/// Time of one token of a batch. A worker has one of them.
const TOKENS: [Nanos; 3] = [100 * MICRO, 100 * MICRO, 2 * MILLI];
/// Tokens of a page.
const PAGE_SIZE: u32 = 4;
/// Requests that run on a worker at most. Each slot costs time, because a tick checks all of them.
const RUNNING_MAX: usize = 32;
/// Pages of the longest request.
const LONGEST: u32 = (PROMPT_MAX + ANSWER_MAX).div_ceil(PAGE_SIZE) + 1;
/// The HTTP ports of workers that start as prefill, and as decode.
const PREFILL_PORT: u16 = 30_001;
const DECODE_PORT: u16 = 30_002;
/// In one of so many runs, many requests need few pages of decode workers at once.
const CROWDED: u64 = 4;
/// Time of one token of a batch of a decode worker of such a run.
const CROWDED_TOKEN: Nanos = 5 * MILLI;
/// One in so many models has layers with a window.
const WINDOWED: u64 = 4;
/// One in so many models has recurrent state.
const STATEFUL: u64 = 5;
/// One in so many runs of a storm has a router that sends few requests to workers at once.
const LIMITED: u64 = 4;

/// The processes of a run, by host. Host 0 has the router, and the first worker is on host 1.
#[derive(Debug)]
pub struct SimFleet {
    /// By host: the command line of its process.
    pub lines: Vec<Vec<String>>,
    /// By host: where its process runs.
    pub sites: Vec<HostSite>,
    /// The first role and the address of each worker.
    pub roles: Vec<(Role, SocketAddr)>,
    /// Workers that start as prefill workers.
    pub prefill: usize,
    /// Whether decode workers compute prompts themselves if no prefill worker is left.
    pub local_prefill: bool,
    /// The keys of the processes.
    pub keys: ClusterKeys,
    /// Members of the etcd that lists workers; 0: the router does.
    pub etcd_members: usize,
    /// Whether processes know hosts by their names.
    pub has_names: bool,
    /// Whether decode workers have few pages and slow steps.
    pub is_crowded: bool,
    /// The model's layers.
    pub layers: SimLayers,
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
    /// The model's layers, the same at all sites.
    pub layers: SimLayers,
    /// Checkpoints of recurrent state in the pool at most, if the model has such state.
    pub checkpoints: u32,
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

impl SimFleet {
    /// Draws the processes of a seed.
    pub fn draw(dice: &Rng, scale: RunScale, weather: Weather) -> SimFleet {
        let mut shape = dice.fork("shape");
        let (roles, prefill) = draw_roles(&mut shape, scale, weather);
        let mut place = dice.fork("machines");
        let words = FleetWords::draw(&mut shape, &mut place, scale);
        let mut fleet = SimFleet {
            lines: Vec::new(),
            sites: draw_sites(&mut place, &words, roles.len() + 1),
            roles,
            prefill,
            local_prefill: dice.fork("alone").one_in(3),
            keys: ClusterKeys::draw(dice.fork("keys"), dice.fork("exchange")),
            etcd_members: dice.fork("etcd").pick(&[0, 0, 1, 2]),
            has_names: dice.fork("names").one_in(3),
            is_crowded: dice.fork("crowd").one_in(CROWDED),
            layers: draw_layers(dice.fork("window"), dice.fork("state")),
        };
        fleet.write_lines(&mut place, &words, scale);
        let mut limited = dice.fork("limit");
        // Requests that wait in the router can wait longer than a checker allows near no fault.
        if (!scale.faults || weather == Weather::Storm) && limited.one_in(LIMITED) {
            let most = limited.range_u64(2, 4);
            let words = ["--max-concurrent-requests".to_owned(), most.to_string()];
            fleet.lines[0].extend(words);
        }
        let checkpoints = dice.fork("checkpoints").pick(&[0, 1, 8]);
        let layers = fleet.layers;
        let sites = fleet.sites.iter_mut();
        sites.for_each(|site| (site.layers, site.checkpoints) = (layers, checkpoints));
        if fleet.is_crowded {
            fleet.sites[..=prefill].iter_mut().for_each(|site| site.token = TOKENS[0]);
            fleet.sites[prefill + 1..].iter_mut().for_each(HostSite::crowd);
        }
        fleet
    }

    /// The hosts of the members of etcd: the last ones.
    pub fn etcd_hosts(&self) -> Range<usize> {
        let first = self.sites.len() + OTHERS;
        first..first + self.etcd_members
    }

    /// How processes know a host.
    fn host(&self, host: usize) -> String {
        if self.has_names { name_of(host) } else { address_of(host).to_string() }
    }

    /// The registry in which workers enter themselves.
    fn registry(&self) -> String {
        match self.etcd_members {
            0 => format!("http://{}:{ROUTER_PORT}", self.host(0)),
            _ => {
                let hosts = self.etcd_hosts();
                let hosts: Vec<_> = hosts.map(|at| format!("{}:{PORT}", self.host(at))).collect();
                format!("etcd://{}", hosts.join(","))
            }
        }
    }

    /// Writes the command lines of the router and of the workers.
    fn write_lines(&mut self, place: &mut Rng, words: &FleetWords, scale: RunScale) {
        let FleetWords { flow, policy, first, allocation, transfer, data_threads, chunk, .. } =
            words;
        let (key_flags, router_host) = (self.keys.flags(), address_of(0));
        let mut router = format!(
            "baton router --host {router_host} --port {ROUTER_PORT} --flow {flow} \
             --policy {policy} --first-token {first}{key_flags}"
        );
        if self.etcd_members > 0 {
            router += &format!(" --registry {}", self.registry());
        }
        // A worker is named by a flag of the router, or enters itself in its registry.
        let is_registered: Vec<bool> = self.roles.iter().map(|_| place.one_in(2)).collect();
        for (host, (role, address)) in
            (1..).zip(&self.roles).filter(|(at, _)| !is_registered[at - 1])
        {
            router += &format!(" --{role} http://{}:{}", self.host(host), address.port());
        }
        let queued = scale.requests.max(RUNNING_MAX);
        let reserved = place.pick(&[1, 4, 512]);
        let reserved = if self.is_crowded { 1 } else { reserved };
        let worker = |((number, (role, address)), is_registered): (Host<'_>, bool)| {
            let (host, port) = (address.ip(), address.port());
            // A decode worker sends its peers an address.
            let name = match self.has_names && *role == Role::Prefill {
                true => format!(" --advertise-host {}", name_of(number)),
                false => String::new(),
            };
            let registry = match is_registered {
                true => format!(" --registry {}", self.registry()),
                false => String::new(),
            };
            let is_alone = self.local_prefill && *role == Role::Decode;
            let alone = if is_alone { " --local-prefill" } else { "" };
            format!(
                "baton {role} model --host {host} --port {port} --transfer {transfer} \
                 --page-size {PAGE_SIZE} --kv-memory 1MiB --threads 1 \
                 --bootstrap-allow 10.0.0.0/8 --decode-allocation {allocation} \
                 --chunked-prefill-size {chunk} --max-running-requests {RUNNING_MAX} \
                 --max-queued-requests {queued} --num-reserved-decode-tokens {reserved}\
                 {data_threads}{alone}{registry}{name}{key_flags}"
            )
        };
        let workers = (1..).zip(&self.roles).zip(is_registered).map(worker);
        let lines = std::iter::once(router).chain(workers);
        let split = |line: String| line.split(' ').map(str::to_owned).collect();
        self.lines = lines.map(split).collect();
    }
}

/// The number of a host, and its worker.
type Host<'a> = (usize, &'a (Role, SocketAddr));

/// The drawn values of the flags that all processes have.
struct FleetWords {
    flow: SimFlow,
    policy: &'static str,
    first: &'static str,
    allocation: &'static str,
    transfer: SimTransfer,
    data_threads: &'static str,
    chunk: usize,
    /// Machines of the fleet.
    spread: u64,
    /// One host in so many has a NIC.
    nics: u64,
}

impl FleetWords {
    fn draw(shape: &mut Rng, place: &mut Rng, scale: RunScale) -> FleetWords {
        let flow = shape.pick(&[SimFlow::Dual, SimFlow::PrefillFirst, SimFlow::DecodeFirst]);
        let flow = if scale.flow == SimFlow::Auto { flow } else { scale.flow };
        let policy = shape.pick(&["least_loaded", "round_robin", "random", "cache_aware", "slo"]);
        let first = shape.pick(&["decode", "prefill"]);
        // The router gets prefill's token only in the flow `dual`.
        let first = if flow == SimFlow::Dual { first } else { "decode" };
        let allocation = shape.pick(&["early", "late"]);
        use SimTransfer::{Auto, Rdma, Shm, Tcp};
        let transfer = place.pick(&[Tcp, Shm, Auto, Auto, Rdma, Rdma]);
        let transfer = if scale.transfer == Auto { transfer } else { scale.transfer };
        let spread = if transfer == Shm { 1 } else { place.pick(&[1, 2, 2, 8]) };
        let nics = match transfer {
            Rdma => 1,
            Auto => place.pick(&[1, 2, 1000]),
            Shm | Tcp => 1000,
        };
        let is_split = transfer == Rdma && place.one_in(2);
        let data_threads = if is_split { " --data-threads split" } else { "" };
        let chunk = place.pick(&[8, 40, 160]);
        FleetWords { flow, policy, first, allocation, transfer, data_threads, chunk, spread, nics }
    }
}

/// The layers of a model: windows in no layer, in all, or in some, and perhaps state.
fn draw_layers(mut dice: Rng, mut state_dice: Rng) -> SimLayers {
    let mut layers = SimLayers { has_state: state_dice.one_in(STATEFUL), ..SimLayers::default() };
    if dice.one_in(WINDOWED) {
        let window = Some(dice.pick(&[1, 9, 30]));
        layers.windows = dice.pick(&[[window; 3], [window, None, window], [None, window, None]]);
    }
    layers
}

/// The sites of so many hosts.
fn draw_sites(place: &mut Rng, words: &FleetWords, hosts: usize) -> Vec<HostSite> {
    let site = |_| HostSite {
        machine: place.range_u64(1, words.spread) as u8,
        pages: place.pick(&[LONGEST + 1, 2 * LONGEST, 4 * LONGEST, 100 * LONGEST]),
        tier_pages: place.pick(&[0, LONGEST, 8 * LONGEST]),
        layers: SimLayers::default(),
        checkpoints: 0,
        token: place.pick(&TOKENS),
        has_nic: place.one_in(words.nics),
        rdma: Settings {
            lanes: place.pick(&[1, 2, 3]),
            requests: place.pick(&[8, 20, 64]),
            pieces: place.pick(&[1, 4]),
        },
        tcp_lanes: place.pick(&[1, 2, 4]),
    };
    (0..hosts).map(site).collect()
}

/// The first roles and the addresses of the workers, and how many of them are prefill workers.
fn draw_roles(
    shape: &mut Rng,
    scale: RunScale,
    weather: Weather,
) -> (Vec<(Role, SocketAddr)>, usize) {
    let (least, most) = match weather {
        Weather::Gentle | Weather::Narrow if scale.faults => (2, WORKERS_MAX),
        Weather::Flaky if scale.faults => (1, 1),
        _ => (1, WORKERS_MAX),
    };
    let [prefill, decode] = scale.workers.map(|count| {
        let drawn = shape.range_u64(least, most) as usize;
        count.unwrap_or(drawn)
    });
    let roles = (1..=prefill + decode).map(|host| match host <= prefill {
        true => (Role::Prefill, SocketAddr::new(address_of(host), PREFILL_PORT)),
        false => (Role::Decode, SocketAddr::new(address_of(host), DECODE_PORT)),
    });
    (roles.collect(), prefill)
}
