//! The identity and the description that a cluster's worker shows to peers, registries and routers.
//!
//! Thread: the thread that starts the process and becomes `ctl`. Not here: the sending
//! (`process::worker`).

use super::ProcessError;
use super::model::LoadedModel;
use crate::api::info::HandoffInfo;
use crate::config::secret::Secret;
use crate::config::{ClusterWorkerConfig, HandoffConfig};
use crate::ids::{Peer, Role};
use crate::kv::layout::KvLayout;
use crate::link::control;
use crate::net::Entropy;
use crate::obs::log::event;
use crate::registry::bootstrap::RankRegistration;
use crate::server::reload;
use crate::transfer::aux::AUX_VERSION;
use crate::wire::auth::{KeyId, Keyring};
use crate::wire::message::{self as wire, HostId};
use sha2::{Digest, Sha256};
use std::net::SocketAddr;

/// A prefill worker's entry in its bootstrap registry.
pub fn rank_registration(
    config: &ClusterWorkerConfig,
    layout: &KvLayout,
    http_port: Option<u16>,
    control_port: u16,
) -> RankRegistration {
    let server = &config.worker.server;
    let rank_ip = config.handoff.advertise_host.clone().unwrap_or_else(|| server.host.to_string());
    RankRegistration {
        attn_tp_size: 1,
        attn_tp_rank: 0,
        attn_cp_size: 1,
        attn_cp_rank: 0,
        attn_dp_size: 1,
        attn_dp_rank: 0,
        pp_size: 1,
        pp_rank: 0,
        system_dp_size: 1,
        system_dp_rank: 0,
        rank_ip,
        rank_port: control_port,
        page_size: layout.page_size,
        kv_cache_dtype: layout.dtype.name().into(),
        load_balance_method: "follow_bootstrap_room".into(),
        decode_allocation_policy: config.decode_allocation.registered().into(),
        prefill_http_port: http_port,
        control_host: config.handoff.advertise_host.clone(),
        control_port: Some(control_port),
    }
}

/// The identity of this process for its peers: an ID from its address and host, and a new
/// incarnation. The host is part of the ID because all workers can listen on 0.0.0.0. The role is
/// not part of it, so a worker replaces its own former identity after a role change.
pub fn peer_identity(
    role: Role,
    (address, host): (Option<SocketAddr>, HostId),
    handoff: &HandoffConfig,
    keys: Keyring,
    entropy: &mut Entropy,
) -> control::PeerIdentity {
    let name = format!("{address:?} {:?} {:?}", handoff.advertise_host, host);
    let digest = Sha256::digest(name.as_bytes());
    let mut id = [0; 16];
    id.copy_from_slice(&digest[..16]);
    control::PeerIdentity { peer: Peer { id, incarnation: entropy.bytes() }, role, keys }
}

/// The cluster's keys. Logs their ids, so that an operator can follow a key rotation.
///
/// # Errors
/// A key cannot be used.
pub fn keyring(secrets: &[Secret]) -> Result<Keyring, ProcessError> {
    let keys = reload::keyring(secrets);
    let keys = keys.map_err(|error| ProcessError::Config("--cluster-key-file", error))?;
    for id in keys.ids().into_iter().filter(|&id| id != KeyId::NONE) {
        event!(Info, "ctl", "a cluster key is accepted", key = id, proven = id == keys.ids()[0]);
    }
    Ok(keys)
}

/// The properties that must be equal in this worker and its peers. Routers compare them.
pub fn handoff_info(loaded: &LoadedModel, keys: &Keyring, local_prefill: bool) -> HandoffInfo {
    let short = |hash: &[u8; 32]| hash[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    let (own, layout) = (&loaded.fingerprint, &loaded.layout);
    let KvLayout { layers, model_kv_heads: heads, head_dim, page_size, .. } = layout;
    // The pages of several groups, and of state, are counted alike by both workers.
    let page = match loaded.groups.counts().is_single() {
        true => String::new(),
        false => format!(" page_size={page_size}"),
    };
    HandoffInfo {
        wire: format!("{}.{}", wire::VERSION, wire::MINOR),
        config: short(&own.config),
        weights: short(&own.weights),
        kernels: short(&own.kernels),
        bit_class: loaded.bit_class.to_string(),
        tokenizer: short(&own.tokenizer),
        template: short(&own.template),
        kv: format!(
            "{} layers={layers} heads={heads} dim={head_dim} aux={AUX_VERSION}{page}",
            layout.dtype.name()
        ),
        cluster_keys: keys.names(),
        local_prefill,
    }
}
