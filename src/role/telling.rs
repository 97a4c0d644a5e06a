//! What a worker of a cluster tells of itself: to its peers, to those who look it up, to routers.
//!
//! Thread: the one that starts the process, which becomes `ctl`. Pure but for the log. Not here: to whom it is told (`part`).

use super::RoleError;
use super::loaded::{Loaded, host_id};
use crate::cluster::registry::Registration;
use crate::config::resolved::{HandoffConfig, PartConfig};
use crate::config::secret::Secret;
use crate::front::handoff::random;
use crate::front::openai::info::HandoffInfo;
use crate::front::peers;
use crate::front::reload;
use crate::ids::Peer;
use crate::kv::layout::KvLayout;
use crate::obs::log::event;
use crate::transfer::aux::AUX_VERSION;
use crate::wire::auth::{KeyId, Keyring};
use crate::wire::message as wire;
use sha2::{Digest, Sha256};
use std::net::SocketAddr;

/// What the registry tells of this worker.
pub fn registration(
    config: &PartConfig,
    layout: &KvLayout,
    http_port: Option<u16>,
    control_port: u16,
) -> Registration {
    let front = &config.worker.front;
    let rank_ip = config.handoff.advertise_host.clone().unwrap_or_else(|| front.host.to_string());
    Registration {
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

/// Who this process is to its peers: named by its host and address, with a fresh incarnation. The host counts since all
/// workers may listen on 0.0.0.0; the role does not, so that a worker whose role has changed takes its own place.
pub fn peer_identity(
    role: wire::Role,
    address: Option<SocketAddr>,
    handoff: &HandoffConfig,
    keys: Keyring,
) -> peers::Identity {
    let name = format!("{address:?} {:?} {:?}", handoff.advertise_host, host_id());
    let digest = Sha256::digest(name.as_bytes());
    let mut id = [0; 16];
    id.copy_from_slice(&digest[..16]);
    peers::Identity { peer: Peer { id, incarnation: random() }, role, keys }
}

/// The cluster's keys; their names are in the log, so that a rotation can be followed.
pub fn keyring(secrets: &[Secret]) -> Result<Keyring, RoleError> {
    let keys = reload::keyring(secrets);
    let keys = keys.map_err(|error| RoleError::Config("--cluster-key-file", error))?;
    for id in keys.ids().into_iter().filter(|&id| id != KeyId::NONE) {
        event!(Info, "ctl", "a cluster key is accepted", key = id, proven = id == keys.ids()[0]);
    }
    Ok(keys)
}

/// What peers must have in common with this worker, for routers.
pub fn handoff_info(loaded: &Loaded, keys: &Keyring, local_prefill: bool) -> HandoffInfo {
    let short = |hash: &[u8; 32]| hash[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    let (own, layout) = (&loaded.fingerprint, &loaded.layout);
    let KvLayout { layers, model_kv_heads: heads, head_dim, .. } = layout;
    HandoffInfo {
        wire: format!("{}.{}", wire::VERSION, wire::MINOR),
        config: short(&own.config),
        weights: short(&own.weights),
        kernels: short(&own.kernels),
        tokenizer: short(&own.tokenizer),
        template: short(&own.template),
        kv: format!(
            "{} layers={layers} heads={heads} dim={head_dim} aux={AUX_VERSION}",
            layout.dtype.name()
        ),
        cluster_keys: keys.names(),
        local_prefill,
    }
}
