//! The configuration of a cluster's worker, for all roles.

use super::{ChunkConfig, DataThreadMode, HandoffConfig, RetractionConfig, WorkerConfig};
use crate::config::values::parse_host;
use crate::ids::{DecodeAllocation, Role};
use crate::obs::log::LogConfig;
use crate::stdx::cidr::Cidr;
use serde::Serialize;
use std::time::Duration;

/// A worker that transfers KV to or from peers. It has the settings of all roles, because its role
/// can change. The command gives the first role.
#[derive(Clone, Debug, Serialize)]
pub struct ClusterWorkerConfig {
    /// Settings of every worker.
    pub worker: WorkerConfig,
    /// Limits on the prompt tokens of a step.
    pub chunks: ChunkConfig,
    /// Rules for retraction, for a worker that generates.
    pub retraction: RetractionConfig,
    /// Settings for its peers.
    pub handoff: HandoffConfig,
    /// Port of a prefill worker's bootstrap registry, on the HTTP port's address; 0: a free port.
    pub bootstrap_port: u16,
    /// Port of a prefill worker's control links; 0: a free port.
    pub control_port: u16,
    /// Time that a request waits until a decode worker asks for its KV.
    pub bootstrap_timeout: Duration,
    /// Threads that post and poll RDMA writes.
    pub data_threads: DataThreadMode,
    /// When decode workers allocate pages for prompts computed here.
    pub decode_allocation: DecodeAllocation,
    /// Port of a decode worker that receives KV over tcp; 0: a free port.
    pub data_port: u16,
    /// Networks that may contain a `bootstrap_host`.
    pub bootstrap_allow: Vec<Cidr>,
    /// Whether a decode worker computes the prompts of requests that name no prefill worker.
    pub local_prefill: bool,
    /// Log settings.
    pub log: LogConfig,
}

impl ClusterWorkerConfig {
    /// Checks whether the command line allows this role.
    ///
    /// # Errors
    /// The reason why not, with the flag.
    pub fn check_role(&self, role: Role) -> Result<(), String> {
        let (host, handoff) = (self.worker.server.host, &self.handoff);
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
                "--host {host} lets other hosts reach the ports for peers: it needs \
                 --cluster-key-file or --insecure"
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

/// Why a decode worker's `--advertise-host` cannot be a name.
pub(crate) const NO_NAMES: &str = "a decode worker sends its peers an address, not a name";
