//! A worker of a cluster, whatever its role.

use super::{
    ChunkConfig, DataThreads, DecodeAllocation, HandoffConfig, LogConfig, RetractionConfig,
    WorkerConfig,
};
use crate::config::values::{Cidr, parse_host};
use crate::wire::message::Role;
use serde::Serialize;
use std::time::Duration;

/// A worker of a cluster, which hands KV over or takes it over. Both halves are here, since its role may change while it
/// runs; the command says with which it begins.
#[derive(Clone, Debug, Serialize)]
pub struct PartConfig {
    /// What every worker has.
    pub worker: WorkerConfig,
    /// Bounds on prompt tokens of a turn; of a decode worker on those that are computed again.
    pub chunks: ChunkConfig,
    /// When pages of a worker that generates run out.
    pub retraction: RetractionConfig,
    /// How it deals with its peers.
    pub handoff: HandoffConfig,
    /// The port of a prefill worker's registry, on the HTTP front's address; 0: a free one.
    pub bootstrap_port: u16,
    /// The port of a prefill worker that decode workers dial; 0: a free one.
    pub control_port: u16,
    /// How long a request waits for a decode worker to ask for it.
    pub bootstrap_timeout: Duration,
    /// Who posts and reaps over rdma.
    pub data_threads: DataThreads,
    /// When decode workers take pages for what is read here.
    pub decode_allocation: DecodeAllocation,
    /// The port of a decode worker where KV arrives over tcp; 0: a free one.
    pub data_port: u16,
    /// Networks in which a `bootstrap_host` may lie.
    pub bootstrap_allow: Vec<Cidr>,
    /// Whether a decode worker reads prompts where a request names no prefill worker.
    pub local_prefill: bool,
    /// The log.
    pub log: LogConfig,
}

impl PartConfig {
    /// Whether it can have this role, as far as the command line says.
    ///
    /// # Errors
    /// What keeps it from that, with the flag.
    pub fn may_be(&self, role: Role) -> Result<(), String> {
        let (host, handoff) = (self.worker.front.host, &self.handoff);
        let listens_for_peers = match role {
            Role::Prefill => true,
            Role::Decode => handoff.transfer.takes_tcp(),
            Role::Mixed => false,
        };
        if listens_for_peers
            && !host.is_loopback()
            && handoff.cluster_keys.is_empty()
            && !handoff.insecure
        {
            return Err(format!(
                "--host {host} lets others than this host reach the ports for peers: it needs --cluster-key-file or \
                 --insecure"
            ));
        }
        match &handoff.advertise_host {
            Some(name) if role == Role::Decode && parse_host(name).is_err() => {
                Err(format!("--advertise-host {name} must be an IP address: {NO_NAMES}"))
            }
            _ => Ok(()),
        }
    }
}

/// Why `--advertise-host` of a decode worker is no name.
pub(in crate::config) const NO_NAMES: &str = "a decode worker tells its peers no names";
