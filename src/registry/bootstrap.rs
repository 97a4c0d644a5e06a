//! The directory of prefill workers and their ranks. Routes, fields and codes are those of SGLang's
//! bootstrap server.
//!
//! Owns: the registered ranks, and the data-parallel rank of each placed room.
//! Thread: any; it does no I/O and reads no clock.
//! Invariants: each rank has one entry, even if it registers several times. A rank with sizes that
//! contradict the registered ranks is refused. Rooms are bounded in number and time.

use crate::limits::{REGISTRY_RANKS_MAX, REGISTRY_ROOM_LIFE, REGISTRY_ROOMS_MAX};
use crate::stdx::hash_map::HashMap;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

/// A rank as it registers itself (`PUT /route`).
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
pub struct RankRegistration {
    /// Tensor-parallel size.
    pub attn_tp_size: u32,
    /// Tensor-parallel rank.
    pub attn_tp_rank: u32,
    /// Context-parallel size.
    pub attn_cp_size: u32,
    /// Context-parallel rank.
    pub attn_cp_rank: u32,
    /// Data-parallel size inside attention.
    pub attn_dp_size: u32,
    /// Data-parallel rank inside attention.
    pub attn_dp_rank: u32,
    /// Pipeline size.
    pub pp_size: u32,
    /// Pipeline rank.
    pub pp_rank: u32,
    /// Data-parallel size of the whole worker.
    pub system_dp_size: u32,
    /// Data-parallel rank in the whole worker.
    pub system_dp_rank: u32,
    /// IP address of the rank.
    pub rank_ip: String,
    /// Port of the rank.
    pub rank_port: u16,
    /// Tokens per page.
    pub page_size: u32,
    /// Element type of the KV cache.
    pub kv_cache_dtype: String,
    /// Rule that assigns requests to data-parallel ranks.
    #[serde(default = "follow_bootstrap_room")]
    pub load_balance_method: String,
    /// Time at which decode allocates pages.
    #[serde(default = "early")]
    pub decode_allocation_policy: String,
    /// Port of the worker's HTTP server.
    #[serde(default)]
    pub prefill_http_port: Option<u16>,
    /// Host of the control port, for decode workers of Baton. `None`: the registry's own address.
    #[serde(default)]
    pub control_host: Option<String>,
    /// Control port. `None`: the worker speaks another protocol.
    #[serde(default)]
    pub control_port: Option<u16>,
}

fn follow_bootstrap_room() -> String {
    "follow_bootstrap_room".into()
}

fn early() -> String {
    "early".into()
}

/// Sizes and settings that all ranks share (`GET /route`, all parameters −1).
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
pub struct Topology {
    /// Tensor-parallel size.
    pub attn_tp_size: u32,
    /// Context-parallel size.
    pub attn_cp_size: u32,
    /// Data-parallel size.
    pub dp_size: u32,
    /// Pipeline size.
    pub pp_size: u32,
    /// Tokens per page.
    pub page_size: u32,
    /// Element type of the KV cache.
    pub kv_cache_dtype: String,
    /// Whether the data-parallel rank of a room is the room modulo the size.
    pub follow_bootstrap_room: bool,
    /// Time at which decode allocates pages.
    pub decode_allocation_policy: String,
    /// Port of the worker's HTTP server.
    pub prefill_http_port: Option<u16>,
    /// Host of the control port, for decode workers of Baton.
    #[serde(default)]
    pub control_host: Option<String>,
    /// Control port, for decode workers of Baton.
    #[serde(default)]
    pub control_port: Option<u16>,
}

/// Coordinates of one rank.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RankId {
    /// Data-parallel rank.
    pub dp: u32,
    /// Context-parallel rank.
    pub cp: u32,
    /// Tensor-parallel rank.
    pub tp: u32,
    /// Pipeline rank.
    pub pp: u32,
}

/// Why a request to the registry fails.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum BootstrapError {
    /// 400: the field or limit that the rank contradicts.
    Contradiction(String),
    /// 503: ranks are missing. The number of registered ranks.
    NotReady(usize),
    /// 404: there is no such rank.
    UnknownRank,
}

/// The ranks of one prefill worker.
#[derive(Debug, Default)]
pub struct BootstrapRegistry {
    ranks: BTreeMap<RankId, RankRegistration>,
    rooms: HashMap<u64, u32>,
    order: VecDeque<(Instant, u64)>,
}

impl BootstrapRegistry {
    /// Registers a rank, or replaces its earlier registration.
    ///
    /// # Errors
    /// [`BootstrapError::Contradiction`] if a shared field differs from that of another rank, or if
    /// there are too many ranks.
    pub fn register(&mut self, rank: RankRegistration) -> Result<(), BootstrapError> {
        let id = rank.id();
        let others = self.ranks.iter().filter(|(other, _)| **other != id).map(|(_, other)| other);
        for other in others {
            if let Some(field) = rank.contradicts(other) {
                return Err(BootstrapError::Contradiction(format!(
                    "{field} differs from that of the registered ranks"
                )));
            }
        }
        if !self.ranks.contains_key(&id) && self.ranks.len() >= REGISTRY_RANKS_MAX {
            return Err(BootstrapError::Contradiction(format!(
                "this worker has more than {REGISTRY_RANKS_MAX} ranks"
            )));
        }
        self.ranks.insert(id, rank);
        Ok(())
    }

    /// The shared values of all ranks.
    ///
    /// # Errors
    /// [`BootstrapError::NotReady`] while ranks are missing.
    pub fn topology(&self) -> Result<Topology, BootstrapError> {
        let first = self.ready()?;
        Ok(Topology {
            attn_tp_size: first.attn_tp_size,
            attn_cp_size: first.attn_cp_size,
            dp_size: first.dp_size(),
            pp_size: first.pp_size,
            page_size: first.page_size,
            kv_cache_dtype: first.kv_cache_dtype.clone(),
            follow_bootstrap_room: first.load_balance_method == "follow_bootstrap_room",
            decode_allocation_policy: first.decode_allocation_policy.clone(),
            prefill_http_port: first.prefill_http_port,
            control_host: first.control_host.clone(),
            control_port: first.control_port,
        })
    }

    /// One rank.
    ///
    /// # Errors
    /// [`BootstrapError::NotReady`] while ranks are missing; [`BootstrapError::UnknownRank`].
    pub fn rank(&self, id: RankId) -> Result<&RankRegistration, BootstrapError> {
        self.ready()?;
        self.ranks.get(&id).ok_or(BootstrapError::UnknownRank)
    }

    /// Stores the data-parallel rank of a room.
    pub fn place(&mut self, room: u64, dp_rank: u32, now: Instant) {
        self.expire(now);
        if self.rooms.insert(room, dp_rank).is_none() {
            self.order.push_back((now + REGISTRY_ROOM_LIFE, room));
        }
    }

    /// The data-parallel ranks of these rooms. Unknown rooms are left out.
    pub fn placed(&mut self, rooms: &[u64], now: Instant) -> Vec<(u64, u32)> {
        self.expire(now);
        rooms.iter().filter_map(|room| Some((*room, *self.rooms.get(room)?))).collect()
    }

    fn ready(&self) -> Result<&RankRegistration, BootstrapError> {
        let first = self.ranks.values().next().ok_or(BootstrapError::NotReady(0))?;
        let all = [first.dp_size(), first.attn_cp_size, first.attn_tp_size, first.pp_size];
        let needed = all.iter().fold(1u64, |product, &size| product.saturating_mul(size.into()));
        if (self.ranks.len() as u64) < needed {
            return Err(BootstrapError::NotReady(self.ranks.len()));
        }
        Ok(first)
    }

    fn expire(&mut self, now: Instant) {
        while let Some(&(until, room)) = self.order.front() {
            if until > now && self.order.len() <= REGISTRY_ROOMS_MAX {
                break;
            }
            self.order.pop_front();
            self.rooms.remove(&room);
        }
    }
}

impl RankRegistration {
    fn id(&self) -> RankId {
        let dp = if self.system_dp_size == 1 { self.attn_dp_rank } else { self.system_dp_rank };
        RankId { dp, cp: self.attn_cp_rank, tp: self.attn_tp_rank, pp: self.pp_rank }
    }

    fn dp_size(&self) -> u32 {
        if self.system_dp_size == 1 { self.attn_dp_size } else { self.system_dp_size }
    }

    /// The first field that differs from `other` although it must be equal in all ranks of a
    /// worker.
    fn contradicts(&self, other: &RankRegistration) -> Option<&'static str> {
        let sizes = [
            ("attn_tp_size", self.attn_tp_size, other.attn_tp_size),
            ("attn_cp_size", self.attn_cp_size, other.attn_cp_size),
            ("dp_size", self.dp_size(), other.dp_size()),
            ("pp_size", self.pp_size, other.pp_size),
            ("page_size", self.page_size, other.page_size),
        ];
        let texts = [
            ("kv_cache_dtype", &self.kv_cache_dtype, &other.kv_cache_dtype),
            (
                "decode_allocation_policy",
                &self.decode_allocation_policy,
                &other.decode_allocation_policy,
            ),
        ];
        let size =
            sizes.into_iter().find(|(_, ours, theirs)| ours != theirs).map(|(field, ..)| field);
        size.or_else(|| {
            texts.into_iter().find(|(_, ours, theirs)| ours != theirs).map(|(field, ..)| field)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(tp_size: u32, tp_rank: u32) -> RankRegistration {
        let json = serde_json::json!({
            "attn_tp_size": tp_size, "attn_tp_rank": tp_rank, "attn_cp_size": 1, "attn_cp_rank": 0,
            "attn_dp_size": 1, "attn_dp_rank": 0, "pp_size": 1, "pp_rank": 0, "system_dp_size": 1,
            "system_dp_rank": 0, "rank_ip": "10.0.0.1", "rank_port": 7000 + tp_rank,
            "page_size": 16, "kv_cache_dtype": "f16",
        });
        serde_json::from_value(json).unwrap()
    }

    const FIRST: RankId = RankId { dp: 0, cp: 0, tp: 0, pp: 0 };

    #[test]
    fn is_ready_once_every_rank_is_there_and_counts_each_once() {
        let mut registry = BootstrapRegistry::default();
        assert_eq!(registry.topology(), Err(BootstrapError::NotReady(0)));
        registry.register(rank(2, 0)).unwrap();
        registry.register(rank(2, 0)).unwrap();
        assert_eq!(registry.topology(), Err(BootstrapError::NotReady(1)));
        registry.register(rank(2, 1)).unwrap();
        let topology = registry.topology().unwrap();
        assert_eq!(
            (topology.attn_tp_size, topology.dp_size, topology.follow_bootstrap_room),
            (2, 1, true)
        );
        assert_eq!(registry.rank(RankId { tp: 1, ..FIRST }).unwrap().rank_port, 7001);
        assert_eq!(registry.rank(RankId { tp: 2, ..FIRST }), Err(BootstrapError::UnknownRank));
    }

    #[test]
    fn a_restarted_rank_replaces_itself_and_others_must_agree() {
        let mut registry = BootstrapRegistry::default();
        registry.register(rank(1, 0)).unwrap();
        registry.register(RankRegistration { rank_port: 9, ..rank(1, 0) }).unwrap();
        assert_eq!(registry.rank(FIRST).unwrap().rank_port, 9);
        let other = RankRegistration { page_size: 32, ..rank(1, 1) };
        assert!(matches!(registry.register(other), Err(BootstrapError::Contradiction(_))));
    }

    #[test]
    fn rooms_are_forgotten_after_their_time() {
        let (mut registry, now) = (BootstrapRegistry::default(), Instant::now());
        registry.place(0, 3, now);
        assert_eq!(registry.placed(&[0, 1], now), [(0, 3)]);
        assert_eq!(registry.placed(&[0], now + REGISTRY_ROOM_LIFE), []);
    }
}
