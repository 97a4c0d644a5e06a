//! What a server tells about itself and its model, and what it is told to abort.
//!
//! Owns: the field names that clients, SGLang's router and ours look for. All answers are plain
//! structs; `serde_json` writes them.

use super::error::ApiError;
use super::fields::Fields;
use crate::cluster::roles;
use crate::ids::Room;
use serde::Serialize;

/// The answer of `/v1/models`.
#[derive(Clone, Debug, Serialize)]
pub struct ModelList<'a> {
    object: &'static str,
    data: Vec<ModelCard<'a>>,
}

impl<'a> ModelList<'a> {
    /// One model, under each of its names.
    pub fn of(cards: impl Iterator<Item = ModelCard<'a>>) -> Self {
        Self { object: "list", data: cards.collect() }
    }
}

/// The answer of `/v1/models/NAME`, and the entry of the list.
#[derive(Clone, Debug, Serialize)]
pub struct ModelCard<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    root: &'a str,
    parent: Option<()>,
    max_model_len: usize,
}

impl<'a> ModelCard<'a> {
    /// The model called `id`, from the file or directory `root`, served since `created` (seconds
    /// of Unix time) with a context of `max_model_len` tokens.
    pub fn new(id: &'a str, root: &'a str, created: u64, max_model_len: usize) -> Self {
        // SGLang's router tells engines apart by `owned_by`; we follow SGLang's contract.
        Self { id, object: "model", created, owned_by: "sglang", root, parent: None, max_model_len }
    }
}

/// The answer of `/version`.
#[derive(Clone, Debug, Serialize)]
pub struct Version<'a> {
    /// Of the software.
    pub version: &'a str,
}

/// What a process that drains says of its state: in the answers of `/drain` and `/server_info`, and, with status 200,
/// as that of `/health`.
pub const DRAINING: &str = "draining";

/// The answer of `/drain`.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Draining {
    status: &'static str,
    /// Requests that are finished first.
    running: usize,
}

impl Draining {
    /// It drains, with so many requests left.
    pub fn with(running: usize) -> Draining {
        Draining { status: DRAINING, running }
    }
}

/// The answer of `/server_info`.
#[derive(Clone, Debug, Serialize)]
pub struct ServerInfo<'a> {
    /// File or directory.
    pub model_path: &'a str,
    /// The name clients use.
    pub served_model_name: &'a str,
    /// `null`, `prefill` or `decode`.
    pub disaggregation_mode: &'a str,
    /// Port of a prefill worker's registry.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disaggregation_bootstrap_port: Option<u16>,
    /// Tensor-parallel ranks.
    pub tp_size: u32,
    /// Data-parallel ranks.
    pub dp_size: u32,
    /// Pipeline stages.
    pub pp_size: u32,
    /// How a router places requests on data-parallel ranks.
    pub load_balance_method: &'a str,
    /// Of the software.
    pub version: &'a str,
    /// Whether this model embeds instead of generating.
    pub is_embedding: bool,
    /// Tokens of one sequence.
    pub context_length: usize,
    /// Tokens of the KV pool.
    pub max_total_tokens: usize,
    /// Of the decode batch.
    pub max_running_requests: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// How often the worker was put together anew to change its role, since it was started, where that can change.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role_changes: Option<u64>,
    /// `ready` or `draining`; a worker that is about to have another role is draining, too.
    pub status: &'a str,
    /// Of workers that hand over to, or take over from, other processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub handoff: Option<&'a HandoffInfo>,
}

/// What both ends of a hand-off must have in common: a router pairs workers by that. Hashes are cut to what shows a
/// difference.
#[derive(Clone, Debug, Serialize)]
pub struct HandoffInfo {
    /// Major and minor version of the messages between workers; the major counts.
    pub wire: String,
    /// Of the model's configuration.
    pub config: String,
    /// Of the weights.
    pub weights: String,
    /// Of element types and kernel family.
    pub kernels: String,
    /// Of the tokenizer.
    pub tokenizer: String,
    /// Of the chat template.
    pub template: String,
    /// What of the KV layout must be the same, and the version of the record beside it.
    pub kv: String,
    /// Cluster keys by name, the one that is proven first.
    pub cluster_keys: Vec<String>,
    /// Whether a decode worker reads the prompts of requests that name no prefill worker.
    pub local_prefill: bool,
}

/// The answer of `/model_info`.
#[derive(Clone, Debug, Serialize)]
pub struct ModelInfo<'a> {
    /// File or directory.
    pub model_path: &'a str,
    /// Likewise.
    pub tokenizer_path: &'a str,
    /// Whether it generates text.
    pub is_generation: bool,
    /// Whether it takes images.
    pub has_image_understanding: bool,
    /// Whether it takes sound.
    pub has_audio_understanding: bool,
    /// As in `config.json`.
    pub model_type: &'a str,
    /// As in `config.json`.
    pub architectures: &'a [String],
}

/// The answer of `/v1/loads`: one entry, since a process is one data-parallel rank.
#[derive(Clone, Debug, Serialize)]
pub struct Loads<'a, L> {
    timestamp: String,
    version: &'a str,
    dp_rank_count: u32,
    loads: [L; 1],
}

impl<'a, L> Loads<'a, L> {
    /// The load at `unix` seconds.
    pub fn new(load: L, unix: f64, version: &'a str) -> Self {
        // A text, because SGLang's router reads it as one.
        Self { timestamp: unix.to_string(), version, dp_rank_count: 1, loads: [load] }
    }
}

/// The load of one data-parallel rank.
#[derive(Clone, Default, Debug, Serialize)]
pub struct Load<'a> {
    /// Always 0 here.
    pub dp_rank: u32,
    /// In the decode batch, or being prefilled.
    pub num_running_reqs: u32,
    /// In queues.
    pub num_waiting_reqs: u32,
    /// Tokens that those still need computed.
    pub num_waiting_uncached_tokens: u64,
    /// Both.
    pub num_total_reqs: u32,
    /// Tokens in use in the KV pool.
    pub num_used_tokens: u64,
    /// Tokens of the KV pool.
    pub max_total_num_tokens: u64,
    /// Their quotient.
    pub token_usage: f64,
    /// Tokens generated in a second.
    pub gen_throughput: f64,
    /// Share of prompt tokens not computed.
    pub cache_hit_rate: f64,
    /// Share of the decode batch in use.
    pub utilization: f64,
    /// Of the decode batch.
    pub max_running_requests: u32,
    /// `null`, `prefill` or `decode`.
    pub disagg_mode: &'a str,
    /// Requests that wait for prefill or its hand-off.
    pub prefill_queue_reqs: u32,
    /// Requests that wait for KV on decode.
    pub decode_queue_reqs: u32,
    /// Of the last hand-off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_transfer_latency_ms: Option<f64>,
    /// Likewise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_transfer_speed_gb_s: Option<f64>,
}

/// The load of a router, as far as it knows: what its workers hold and compute is theirs to tell.
#[derive(Clone, Debug, Serialize)]
pub struct RoutedLoad {
    dp_rank: u32,
    /// At workers.
    num_running_reqs: u32,
    /// That wait for others to end, before any worker has them.
    num_waiting_reqs: u32,
    num_total_reqs: u32,
    /// Of those who generate, added up, where all of them tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    num_used_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_total_num_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_usage: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_running_requests: Option<u32>,
    disagg_mode: &'static str,
}

impl RoutedLoad {
    /// Of so many requests, of which so many wait; its workers have room for that, and so many tokens in use.
    pub fn new(
        all: usize,
        waiting: usize,
        room: Option<roles::Room>,
        used: Option<u64>,
    ) -> RoutedLoad {
        RoutedLoad {
            dp_rank: 0,
            num_running_reqs: all.saturating_sub(waiting) as u32,
            num_waiting_reqs: waiting as u32,
            num_total_reqs: all as u32,
            num_used_tokens: used,
            max_total_num_tokens: room.map(|room| room.tokens),
            token_usage: room.zip(used).map(|(room, used)| used as f64 / room.tokens.max(1) as f64),
            max_running_requests: room.map(|room| room.sequences),
            disagg_mode: "null",
        }
    }
}

/// An entry of the answer of `/get_load`, the older form: a list with one of them for each data-parallel rank.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RankLoad {
    dp_rank: u32,
    num_reqs: u32,
    num_waiting_reqs: u32,
    num_tokens: u64,
}

impl RankLoad {
    /// What it says of a load: requests, and tokens that they hold or still need computed.
    pub fn of(load: &Load<'_>) -> RankLoad {
        RankLoad {
            dp_rank: load.dp_rank,
            num_reqs: load.num_total_reqs,
            num_waiting_reqs: load.num_waiting_reqs,
            num_tokens: load.num_used_tokens + load.num_waiting_uncached_tokens,
        }
    }
}

/// A request to `/abort_request`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Abort {
    /// All requests.
    All,
    /// Those whose name begins with this.
    Rid(String),
    /// The one whose KV is kept in this room, and those behind it, for a decode worker.
    Kept(Room),
}

impl Abort {
    /// Reads a body.
    ///
    /// # Errors
    /// Neither `rid`, `bootstrap_room` nor `abort_all`, or malformed.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        if fields.flag("abort_all", false)? {
            return Ok(Self::All);
        }
        if let Some(room) = fields.integer("bootstrap_room", 0..=i128::from(i64::MAX))? {
            return Ok(Self::Kept(Room(room)));
        }
        let rid = fields.name("rid")?;
        rid.map(Self::Rid).ok_or_else(|| fields.invalid("rid", "is missing"))
    }

    /// The body that gives up what is kept in this room.
    pub fn body_of(room: Room) -> Vec<u8> {
        format!(r#"{{"bootstrap_room":{room}}}"#).into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_what_routers_look_for() {
        assert_eq!(
            serde_json::to_string(&ModelList::of(
                [ModelCard::new("m", "/models/m", 7, 2048)].into_iter()
            ))
            .unwrap(),
            r#"{"object":"list","data":[{"id":"m","object":"model","created":7,"owned_by":"sglang","root":"/models/m","parent":null,"max_model_len":2048}]}"#
        );
        let load = Load { num_running_reqs: 3, disagg_mode: "decode", ..Load::default() };
        let json = serde_json::to_value(Loads::new(load.clone(), 1.5, "0.1")).unwrap();
        assert_eq!(json["timestamp"], "1.5");
        assert_eq!(json["dp_rank_count"], 1);
        assert_eq!(json["loads"][0]["num_running_reqs"], 3);
        assert_eq!(json["loads"][0].get("kv_transfer_latency_ms"), None);
        let load =
            Load { num_total_reqs: 5, num_used_tokens: 40, num_waiting_uncached_tokens: 2, ..load };
        let json = serde_json::to_value(RankLoad::of(&load)).unwrap();
        assert_eq!(
            json,
            serde_json::json!({"dp_rank":0,"num_reqs":5,"num_waiting_reqs":0,"num_tokens":42})
        );
    }

    #[test]
    fn reads_what_to_abort() {
        assert_eq!(Abort::parse(br#"{"rid":"a"}"#), Ok(Abort::Rid("a".into())));
        assert_eq!(Abort::parse(br#"{"rid":"","abort_all":true}"#), Ok(Abort::All));
        assert_eq!(Abort::parse(&Abort::body_of(Room(7))), Ok(Abort::Kept(Room(7))));
        for body in ["{}", r#"{"rid":""}"#, r#"{"rid":3}"#] {
            assert_eq!(
                Abort::parse(body.as_bytes()).unwrap_err().param.as_deref(),
                Some("rid"),
                "{body}"
            );
        }
    }
}
