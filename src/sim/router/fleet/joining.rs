//! Who the workers are: named at the start, asked who they are where that may have changed, and
//! known under another number once they have told another role. By the rules of
//! `router::pool::probes` and `router::workers`, over production's seats
//! (`registry::membership`) and its judgement of what a worker tells.
//!
//! Not here: workers that enter themselves.

use super::{Call, CallName, Fleet, Kept};
use crate::config::values::WorkerUrl;
use crate::ids::Leg;
use crate::registry::entry::WorkerAddress;
use crate::registry::membership::{Membership, MembershipAction};
use crate::router::identity::{Identification, WorkerInfo, identify_worker};
use crate::routing::balancer::LoadBalancer;
use crate::routing::compatibility::Compatibility;
use crate::routing::load::WorkerNumber;
use crate::sim::edge::name_of;
use crate::sim::plan::Plan;
use crate::stdx::event_queue::Nanos;
use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

/// A worker as it is reached.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) host: usize,
    seat: WorkerAddress,
    /// It was named for another role, and has this one by its own word.
    has_changed_role: bool,
    /// How often its role has changed, as it says.
    changes: Option<u64>,
    /// It has been asked who it is since somebody else may have taken its place.
    pub(super) introduced: bool,
    /// It has said that it takes nothing new, and not yet that it does, and is there.
    pub(super) drains: bool,
    /// The one used last is the last.
    pub(super) kept: Vec<Kept>,
}

/// Where a host's worker is reached.
fn url_of(host: usize) -> WorkerUrl {
    format!("http://10.0.0.{host}:30000").parse().expect("a host and a port")
}

impl Fleet {
    /// The workers of this plan, numbered as the cluster numbers its processes: they are up, and
    /// who they are is known. `base` is the beginning of time.
    pub fn new(plan: &Plan, base: Instant) -> Fleet {
        let hosts = (plan.scale.prefill + plan.scale.decode) as usize;
        let mut fleet = Fleet {
            router: LoadBalancer::new(plan.policy),
            base,
            calls: BTreeMap::new(),
            members: Membership::default(),
            targets: BTreeMap::new(),
            turned: VecDeque::new(),
            introduces: plan.turns(),
            read_alone: (0..hosts).map(|host| plan.local_prefill(host)).collect(),
            asked: 0,
            news: VecDeque::new(),
            wishes: Vec::new(),
        };
        for host in 0..hosts {
            let seat = WorkerAddress { role: plan.role(host), url: url_of(host) };
            fleet.members.name(seat, None).expect("there is room for a few");
        }
        fleet.act(0);
        let numbers: Vec<WorkerNumber> = fleet.targets.keys().copied().collect();
        for worker in numbers {
            fleet.router.probed(worker, true, base);
            fleet.router.set_compatibility(worker, Compatibility::default());
            let target = fleet.target(worker);
            (target.introduced, target.changes) = (true, Some(0));
            let local_prefill =
                target.seat.role == Leg::Decode && fleet.read_alone[fleet.host(worker)];
            fleet.router.set_local_prefill(worker, local_prefill);
        }
        fleet
    }

    /// Where a worker is.
    pub fn host(&self, worker: WorkerNumber) -> usize {
        self.targets[&worker].host
    }

    pub(super) fn target(&mut self, worker: WorkerNumber) -> &mut Target {
        self.targets.get_mut(&worker).expect("a worker has a number once it has joined")
    }

    /// All workers but those of these hosts.
    pub fn others(&self, pair: [usize; 2]) -> Vec<WorkerNumber> {
        let here = self.router.workers().map(|(worker, ..)| worker);
        here.filter(|&worker| !pair.contains(&self.host(worker))).collect()
    }

    /// What the worker of a call is taken for; nothing where it is asked who it is.
    pub fn taken_for(&self, name: CallName) -> Option<String> {
        let Call { booking, .. } = self.calls.get(&name)?;
        let role = self.router.role(booking.worker())?;
        let changes = self.targets[&booking.worker()].changes;
        let is_asked = !matches!(name, CallName::IdentityQuery(_));
        is_asked.then(|| changes.map_or(role.to_string(), |changes| format!("{role}/{changes}")))
    }

    /// Whether a worker that cannot be used drains, or has left, and is not merely down.
    pub fn is_going(&self, worker: WorkerNumber) -> bool {
        self.targets[&worker].drains || !self.router.has(worker)
    }

    /// Whether a worker need not be asked who it is.
    pub(super) fn is_known(&self, worker: WorkerNumber) -> bool {
        !self.introduces || self.targets[&worker].introduced || !self.router.has(worker)
    }

    /// An introduction has ended: the worker has told its role, and how often that has changed, or
    /// nothing.
    pub(super) fn introduced(
        &mut self,
        worker: WorkerNumber,
        told: Option<(Leg, u64)>,
        now: Nanos,
    ) {
        let alone = self.read_alone[self.host(worker)];
        let words = told.map(|(role, changes)| WorkerInfo {
            role: Some(name_of(role)),
            role_changes: Some(changes),
            local_prefill: role == Leg::Decode && alone,
            ..WorkerInfo::default()
        });
        if let Some(words) = &words {
            self.router.set_local_prefill(worker, words.local_prefill);
            self.router.set_compatibility(worker, words.kind.clone());
        }
        // It may have left while it was asked; what it runs goes on as long as it does.
        if !self.router.has(worker) && self.router.knows(worker) {
            return self.probe(worker, now);
        }
        let Some(role) = self.router.role(worker).filter(|_| self.router.has(worker)) else {
            return;
        };
        let target = self.target(worker);
        let verdict = words.map(|words| {
            target.changes = words.role_changes;
            identify_worker(role, None, target.has_changed_role, &words)
        });
        target.introduced = verdict.is_some();
        match verdict {
            Some(Identification::RoleChanged(to)) => {
                target.introduced = false;
                self.turned.push_back((worker, to));
            }
            Some(Identification::Unfit(_)) => target.introduced = false,
            Some(Identification::Fits | Identification::Doubtful(_)) | None => {
                return self.probe(worker, now);
            }
        }
        self.router.refused(worker);
        self.probed(worker, false, now);
    }

    /// A probe has ended.
    pub(super) fn probed(&mut self, worker: WorkerNumber, is_well: bool, now: Nanos) {
        let instant = self.instant(now);
        self.router.probed(worker, is_well, instant);
        let is_usable = self.router.load(worker).is_some_and(|load| load.usable);
        let target = self.target(worker);
        // Who answers there next may be somebody else, unless it is only late.
        target.introduced &= is_well || is_usable;
        target.drains &= !is_well;
    }

    /// Takes in which workers have another role by now.
    pub(super) fn follow_roles(&mut self, now: Nanos) {
        while let Some((worker, role)) = self.turned.pop_front() {
            let seat = self.targets[&worker].seat.clone();
            self.members.change_role(&seat, role).expect("there is room for a few");
        }
        self.act(now);
    }

    /// Does what the membership wants done.
    fn act(&mut self, now: Nanos) {
        let instant = self.instant(now);
        while let Some(action) = self.members.poll() {
            match action {
                MembershipAction::Join { address: seat, has_changed_role, .. } => {
                    let worker = self.router.join(seat.role, instant);
                    let host = (0..self.read_alone.len()).find(|&host| url_of(host) == seat.url);
                    let host = host.expect("nobody else is named");
                    let (changes, introduced, drains, kept) = (None, false, false, Vec::new());
                    let target =
                        Target { host, seat, has_changed_role, changes, introduced, drains, kept };
                    self.targets.insert(worker, target);
                }
                MembershipAction::Leave { address: seat, .. } => {
                    let is_left = |worker: &WorkerNumber| self.targets[worker].seat == seat;
                    let here = self.router.workers().map(|(worker, ..)| worker).find(is_left);
                    if let Some(worker) = here {
                        self.target(worker).kept.clear();
                        self.router.leave(worker);
                    }
                }
            }
        }
    }
}
