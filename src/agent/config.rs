//! The settings of an agent, and their defaults.

use crate::kv::layout::KvLayout;
use crate::kv::region::Region;
use crate::link::control::LinkTimeouts;
use crate::stdx::cidr::Cidr;
use crate::transfer::manager::identity::host_id;
use crate::transfer::transport::rdma::{Nic, Settings};
use crate::wire::auth::Keyring;
use crate::wire::message::{BitClass, Fingerprint, HostId, Transport};
use std::net::IpAddr;
use std::sync::Arc;

/// What an agent serves, and how it reaches its peers.
#[derive(Debug)]
pub struct AgentConfig {
    /// KV memory: all ranks of the layout, one after the other.
    pub region: Arc<Region>,
    /// Its layout.
    pub layout: KvLayout,
    /// Its pages.
    pub pages: u32,
    /// What must be equal at both ends.
    pub fingerprint: Fingerprint,
    /// The kernels that compute the KV.
    pub bit_class: BitClass,
    /// Requests at a time.
    pub slots: usize,
    /// Pages of the longest prompt.
    pub prompt_pages: usize,
    /// Peers at a time.
    pub sessions: usize,
    /// Transports, in order of preference.
    pub transports: Vec<Transport>,
    /// Lanes of a session, and queue pairs between two NICs. The destination decides.
    pub lanes: u16,
    /// Threads that copy over shm, the mover included. Only a destination copies.
    pub copy_threads: usize,
    /// NICs for rdma; empty without it.
    pub nics: Vec<Nic>,
    /// Local pieces of an rdma work request.
    pub pieces: u32,
    /// Whether each NIC of a source has threads to post and to poll.
    pub has_data_threads: bool,
    /// The machine. Processes of one machine can share memory.
    pub machine: HostId,
    /// Where peers connect.
    pub host: IpAddr,
    /// Networks of the sources that a destination connects to.
    pub allowed: Vec<Cidr>,
    /// Cluster keys.
    pub keys: Keyring,
    /// Deadlines of links.
    pub timeouts: LinkTimeouts,
    /// Whether no thread parks, and the owner runs the mover.
    pub busy_poll: bool,
    /// CPUs of the threads that [`AgentThread`](super::thread::AgentThread) starts; empty: those of
    /// the caller.
    pub cpus: Vec<usize>,
}

impl AgentConfig {
    /// The settings of an agent with this memory at `host`. Both ends of a hand-off have the same
    /// `kind`, 32 bytes that name everything that decides what the KV means. The other settings:
    /// 64 requests and 16 peers at a time, prompts of at most the whole pool, shm before tcp, two
    /// lanes, no key, and sources on this host only.
    pub fn new(
        region: Arc<Region>,
        layout: KvLayout,
        pages: u32,
        kind: [u8; 32],
        host: IpAddr,
    ) -> AgentConfig {
        let fingerprint = Fingerprint {
            config: kind,
            weights: [0; 32],
            kernels: [0; 32],
            tokenizer: [0; 32],
            template: [0; 32],
        };
        AgentConfig {
            region,
            layout,
            pages,
            fingerprint,
            bit_class: BitClass::UNKNOWN,
            slots: 64,
            prompt_pages: pages as usize,
            sessions: 16,
            transports: vec![Transport::Shm, Transport::Tcp],
            lanes: 2,
            copy_threads: 1,
            nics: Vec::new(),
            pieces: Settings::default().pieces,
            has_data_threads: false,
            machine: host_id(),
            host,
            allowed: Cidr::LOOPBACK.to_vec(),
            keys: Keyring::default(),
            timeouts: LinkTimeouts::default(),
            busy_poll: false,
            cpus: Vec::new(),
        }
    }
}
