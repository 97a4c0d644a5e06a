//! The plan of a seed: its processes (`fleet`), requests (`requests`) and faults (`faults`), and
//! which failures of requests the faults excuse.

use super::faults::{Fault, FaultScope, START, Weather, draw_faults};
use super::fleet::SimFleet;
use super::key_exchange::KeyExchange;
use super::requests::{PlannedRequest, aim, aim_at_exchange, delay_all, delay_last, draw_requests};
use super::scale::RunScale;
use crate::ids::Role;
use crate::limits::{DRAIN_DONE_TIME, RETRY_TIME_MAX};
use crate::stdx::event_queue::Nanos;
use crate::stdx::rng::Rng;

/// A NIC sends a request again six times, each after 67 ms (`Route`). Some multiply that.
pub const NIC_PATIENCE: Nanos = (7 << 14) * 4096;
/// The caches are flushed so often in a run, at most.
const FLUSHES_MAX: u64 = 3;

/// What happens in a run.
#[derive(Debug)]
pub struct RunPlan {
    /// The processes.
    pub fleet: SimFleet,
    /// The requests, in order of time.
    pub requests: Vec<PlannedRequest>,
    /// The faults, and their times.
    pub faults: Vec<(Nanos, Fault)>,
    /// No drawn fault happens after this time.
    pub faults_end: Nanos,
    /// The hosts that faults can meet, except in gentle weather.
    pub victims: Vec<usize>,
    /// Which faults happen.
    pub weather: Weather,
    /// One in so many clients leaves while its KV is in transfer.
    pub leaves_in_transfer: u64,
    /// Time for which NICs send a request again.
    pub nic_patience: Nanos,
    /// When the operator flushes the caches of all workers.
    pub flushes: Vec<Nanos>,
    /// The exchange of keys.
    pub exchange: Option<KeyExchange>,
}

impl RunPlan {
    /// Whether a fault excuses the failure of a request in this time: it meets the router or a
    /// connection, or no pair of workers was well for all of the time. A request that has met one
    /// fault after the other is not sent again after [`RETRY_TIME_MAX`].
    pub fn excuses(&self, begun: Nanos, ended: Nanos) -> bool {
        if self.weather == Weather::Gentle {
            return false;
        }
        if ended - begun > RETRY_TIME_MAX.as_nanos() as Nanos && self.is_near_fault(begun, ended) {
            return true;
        }
        let is_excuse =
            |fault: &Fault| self.weather == Weather::Storm || !matches!(fault, Fault::Names { .. });
        let faults: Vec<Fault> = self.faults_near(begun, ended).filter(is_excuse).collect();
        let is_well = |host: usize| !faults.iter().any(|fault| fault.meets(host));
        let has_well = |role: Role| {
            let mut hosts = (1..).zip(&self.fleet.roles);
            hosts.any(|(host, &(first, _))| first == role && is_well(host))
        };
        !is_well(0)
            || (!has_well(Role::Prefill) && !self.fleet.local_prefill)
            || !has_well(Role::Decode)
    }

    /// Whether entries of workers can have expired: faults meet all members of etcd.
    pub fn excuses_empty_registry(&self, begun: Nanos, ended: Nanos) -> bool {
        let faults: Vec<Fault> = self.faults_near(begun, ended).collect();
        let mut members = self.fleet.etcd_hosts();
        !members.is_empty() && members.all(|host| faults.iter().any(|fault| fault.meets(host)))
    }

    /// Whether another worker hangs now, or hung while this one waited for its destinations.
    pub fn has_hung_peer(&self, host: usize, now: Nanos) -> bool {
        let waited = DRAIN_DONE_TIME.as_nanos() as Nanos;
        self.faults.iter().any(|&(at, fault)| match fault {
            Fault::Hang { host: hung, pause } if hung != host => {
                at <= now && now <= at + pause + waited
            }
            _ => false,
        })
    }

    /// Whether prefill workers keep KV for decode workers.
    pub fn keeps_kv(&self) -> bool {
        self.fleet.lines[0].iter().any(|word| word == "prefill-first")
    }

    /// Whether a fault, or the time after it, meets this time of a request.
    pub fn is_near_fault(&self, begun: Nanos, ended: Nanos) -> bool {
        self.faults_near(begun, ended).next().is_some()
    }

    /// For how much of this time the router stands still or is cut off.
    pub fn time_without_router(&self, begun: Nanos, ended: Nanos) -> Nanos {
        let mut pauses: Vec<(Nanos, Nanos)> = self
            .faults
            .iter()
            .filter_map(|&(at, fault)| match fault {
                Fault::Stall { host: 0, pause } | Fault::Cut { host: 0, pause } => {
                    Some((at.max(begun), (at + pause).min(ended)))
                }
                _ => None,
            })
            .collect();
        pauses.sort_unstable();
        let (mut total, mut counted) = (0, begun);
        for (from, to) in pauses {
            total += to.saturating_sub(from.max(counted));
            counted = counted.max(to);
        }
        total
    }

    fn faults_near(&self, begun: Nanos, ended: Nanos) -> impl Iterator<Item = Fault> {
        let meets =
            move |&&(at, fault): &&(Nanos, Fault)| at <= ended && begun <= at + fault.effect();
        self.faults.iter().filter(meets).map(|&(_, fault)| fault)
    }

    /// The plan of a seed.
    pub fn new(dice: &Rng, scale: RunScale) -> RunPlan {
        let weather = Weather::draw(dice.fork("weather"), scale.workers);
        let fleet = SimFleet::draw(dice, scale, weather);
        let mut requests = draw_requests(dice, scale, weather, &fleet);
        let end = requests.last().map_or(0, |last| last.at);
        let victims = victims_of(&fleet, scale, weather);
        let scope = FaultScope {
            prefill: fleet.prefill,
            workers: fleet.roles.len(),
            etcd: fleet.etcd_hosts(),
            has_nics: fleet.sites.iter().any(|site| site.has_nic),
            has_names: fleet.has_names,
            victims: &victims,
        };
        let mut exchange = fleet.keys.exchanged.map(|keys| {
            KeyExchange::draw(keys, dice.fork("exchange").fork("time"), fleet.sites.len())
        });
        let exchanged = exchange.as_ref().map_or(0, KeyExchange::time);
        let until = if weather == Weather::Flaky { end + exchanged } else { end };
        let mut faults = match scale.faults {
            true => draw_faults(dice.fork("chaos"), until, &scope, weather),
            false => Vec::new(),
        };
        let mut times = dice.fork("flushes");
        let flushes = (0..times.range_u64(0, FLUSHES_MAX)).map(|_| times.range_u64(START, end));
        let flushes = flushes.collect();
        if let Some(exchange) = &mut exchange {
            let meets: Vec<Nanos> = faults.iter().map(|&(at, _)| at).chain([end]).collect();
            let later = exchange.meet(&meets);
            faults.iter_mut().for_each(|(at, _)| *at += later);
            delay_all(&mut requests, later);
        }
        if scale.faults {
            aim(&mut requests, &faults, dice.fork("aim"));
        }
        if let Some(exchange) = &exchange {
            let dice = dice.fork("exchange").fork("requests");
            aim_at_exchange(&mut requests, exchange, dice);
        }
        if scale.faults {
            let over = faults.iter().map(|(at, fault)| at + fault.effect());
            let exchanged = exchange.iter().map(|exchange| exchange.begin + exchange.time());
            delay_last(&mut requests, over.chain(exchanged).fold(end, Nanos::max));
        }
        RunPlan {
            faults_end: faults.iter().map(|&(at, _)| at).max().unwrap_or(0),
            leaves_in_transfer: if fleet.is_crowded { 2 } else { 6 },
            nic_patience: NIC_PATIENCE * dice.fork("nics").pick(&[1, 4]),
            fleet,
            requests,
            faults,
            victims,
            weather,
            flushes,
            exchange,
        }
    }
}

/// The hosts that faults can meet.
fn victims_of(fleet: &SimFleet, scale: RunScale, weather: Weather) -> Vec<usize> {
    match weather {
        _ if !scale.faults => Vec::new(),
        Weather::Gentle => Vec::new(),
        // Decode workers that are well need no prefill worker.
        Weather::Narrow if fleet.local_prefill => (1..=fleet.prefill + 1).collect(),
        Weather::Narrow => vec![1, fleet.prefill + 1],
        Weather::Flaky | Weather::Storm => (0..fleet.sites.len()).collect(),
    }
}
