//! The answers with which a server describes itself and its model, and the body of
//! `/abort_request`.
//!
//! Owns: the field names that clients, SGLang's router and Baton's router read. All answers are
//! plain structs, which `serde_json` writes.

use super::error::ApiError;
use super::fields::Fields;
use crate::ids::Room;
use crate::routing::role_balancer;
use serde::Serialize;

/// The response of `/v1/models`.
#[derive(Clone, Debug, Serialize)]
pub struct ModelList<'a> {
    object: &'static str,
    data: Vec<ModelCard<'a>>,
}

impl<'a> ModelList<'a> {
    /// One model, under each of its served names.
    pub fn of(cards: impl Iterator<Item = ModelCard<'a>>) -> Self {
        Self { object: "list", data: cards.collect() }
    }
}

/// Header field of a router's own queries. A process that receives an identity query with it must
/// answer itself. Otherwise, another router would forward the query to a worker, and the sender
/// would mistake that router for the worker. A model list with it is for a client of that router.
pub const ASKED_BY_ROUTER: &str = "x-baton-router";

/// The response of `/v1/models/NAME`, and an entry of the list.
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
    /// The model called `id`, another name of `root`, served since `created` (seconds of Unix time)
    /// with a context of `max_model_len` tokens. The router of another project can read it.
    pub fn new(
        (id, root): (&'a str, &'a str),
        for_foreign_router: bool,
        created: u64,
        max_model_len: usize,
    ) -> Self {
        // SGLang's router recognises its engines by `owned_by`.
        let owned_by = if for_foreign_router { "sglang" } else { "baton" };
        Self { id, object: "model", created, owned_by, root, parent: None, max_model_len }
    }
}

/// The response of `/tokenizer_info`, in vLLM's form.
#[derive(Clone, Debug, Serialize)]
pub struct TokenizerInfo<'a> {
    /// The token that begins a text, if the model's template has one.
    pub bos_token: Option<&'a str>,
    /// The token that ends an answer.
    pub eos_token: Option<String>,
    /// The chat template, if the model has one.
    pub chat_template: Option<&'a str>,
}

/// The response of `/version`.
#[derive(Clone, Debug, Serialize)]
pub struct VersionInfo<'a> {
    /// Version of the software.
    pub version: &'a str,
}

/// Header of a request: the role that the sender expects of the worker. If the worker reports its
/// number of role changes, a slash and that number follow. A worker with another role answers like
/// a draining worker, and the router identifies it again.
pub const TAKEN_FOR: &str = "x-baton-role";

/// The `status` of a draining process in the answers of `/drain` and `/server_info`. It is also the
/// body of `/health`, with HTTP status 200.
pub const DRAINING: &str = "draining";

/// The response of `/drain`.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Draining {
    status: &'static str,
    /// Requests that must finish before the process exits.
    running: usize,
}

impl Draining {
    /// The answer of a draining process with `running` requests left.
    pub fn with(running: usize) -> Draining {
        Draining { status: DRAINING, running }
    }
}

/// The response of `/server_info`.
#[derive(Clone, Debug, Serialize)]
pub struct ServerInfo<'a> {
    /// Path of the model's file or directory.
    pub model_path: &'a str,
    /// The name clients use.
    pub served_model_name: &'a str,
    /// `null`, `prefill` or `decode`.
    pub disaggregation_mode: &'a str,
    /// Port of a prefill worker's bootstrap registry.
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
    /// Version of the software.
    pub version: &'a str,
    /// Whether this model embeds instead of generating.
    pub is_embedding: bool,
    /// Maximum tokens of one sequence.
    pub context_length: usize,
    /// Capacity of the KV pool in tokens.
    pub max_total_tokens: usize,
    /// Maximum sequences in the decode batch.
    pub max_running_requests: usize,
    /// Tokens per page.
    pub page_size: usize,
    /// Number of role changes since the process started. `None` if the role cannot change.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role_changes: Option<u64>,
    /// `ready` or `draining`. A worker that is changing its role is draining, too.
    pub status: &'a str,
    /// Only for prefill and decode workers, which hand over KV between processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub handoff: Option<&'a HandoffInfo>,
}

/// The values that must be equal at both ends of a hand-off. A router uses them to pair workers.
/// Hashes are shortened, because they only need to show a difference.
#[derive(Clone, Debug, Serialize)]
pub struct HandoffInfo {
    /// Version `major.minor` of the messages between workers. Only the major version must match.
    pub wire: String,
    /// Hash of the model's configuration.
    pub config: String,
    /// Hash of the weights.
    pub weights: String,
    /// Hash of the kernel family.
    pub kernels: String,
    /// The class of kernel families that give equal bits. If both ends report it, it decides in
    /// place of `kernels`.
    pub bit_class: String,
    /// Hash of the tokenizer.
    pub tokenizer: String,
    /// Hash of the chat template.
    pub template: String,
    /// The parts of the KV layout that must match, and the version of the aux record.
    pub kv: String,
    /// Names of the cluster keys; the first is the one that the worker proves.
    pub cluster_keys: Vec<String>,
    /// Whether a decode worker prefills requests itself if they name no prefill worker.
    pub local_prefill: bool,
}

/// The response of `/model_info`.
#[derive(Clone, Debug, Serialize)]
pub struct ModelInfo<'a> {
    /// Path of the model's file or directory.
    pub model_path: &'a str,
    /// Path of the tokenizer, which is the same.
    pub tokenizer_path: &'a str,
    /// Whether it generates text.
    pub is_generation: bool,
    /// Whether it accepts images.
    pub has_image_understanding: bool,
    /// Whether it accepts audio.
    pub has_audio_understanding: bool,
    /// As in `config.json`.
    pub model_type: &'a str,
    /// As in `config.json`.
    pub architectures: &'a [String],
}

/// The response of `/v1/loads`. It has one entry because a process is one data-parallel rank.
#[derive(Clone, Debug, Serialize)]
pub struct Loads<'a, L> {
    timestamp: String,
    version: &'a str,
    dp_rank_count: u32,
    loads: [L; 1],
}

impl<'a, L> Loads<'a, L> {
    /// The load at `unix` seconds of Unix time.
    pub fn new(load: L, unix: f64, version: &'a str) -> Self {
        // A string, because SGLang's router parses it as one.
        Self { timestamp: unix.to_string(), version, dp_rank_count: 1, loads: [load] }
    }
}

/// The load of one data-parallel rank.
#[derive(Clone, Default, Debug, Serialize)]
pub struct Load<'a> {
    /// Always 0 here.
    pub dp_rank: u32,
    /// Requests in the decode batch or in prefill.
    pub num_running_reqs: u32,
    /// Requests in queues.
    pub num_waiting_reqs: u32,
    /// Tokens of queued requests that must still be computed.
    pub num_waiting_uncached_tokens: u64,
    /// Running and waiting requests together.
    pub num_total_reqs: u32,
    /// Tokens in use in the KV pool.
    pub num_used_tokens: u64,
    /// Tokens of the KV pool.
    pub max_total_num_tokens: u64,
    /// `num_used_tokens` divided by `max_total_num_tokens`.
    pub token_usage: f64,
    /// Generated tokens per second.
    pub gen_throughput: f64,
    /// Share of prompt tokens taken from the prefix cache.
    pub cache_hit_rate: f64,
    /// Used share of the decode batch.
    pub utilization: f64,
    /// Maximum sequences in the decode batch.
    pub max_running_requests: u32,
    /// `null`, `prefill` or `decode`.
    pub disagg_mode: &'a str,
    /// Requests that wait for prefill or for their hand-off.
    pub prefill_queue_reqs: u32,
    /// Requests that wait for KV on a decode worker.
    pub decode_queue_reqs: u32,
    /// Duration of the last hand-off, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_transfer_latency_ms: Option<f64>,
    /// Throughput of the last hand-off, in GB/s.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_transfer_speed_gb_s: Option<f64>,
}

/// The load of a router. It knows its own requests; its workers report their tokens and capacities.
#[derive(Clone, Debug, Serialize)]
pub struct RouterLoad {
    dp_rank: u32,
    /// Requests at workers.
    num_running_reqs: u32,
    /// Requests that wait in the router, before any worker has them.
    num_waiting_reqs: u32,
    num_total_reqs: u32,
    /// Sum over the workers that generate; absent unless all of them report it.
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

impl RouterLoad {
    /// The load with `all` requests, `waiting` of them in the router. `room` is the capacity of its
    /// workers, and `used` the tokens that they hold.
    pub fn new(
        all: usize,
        waiting: usize,
        room: Option<role_balancer::DecodeCapacity>,
        used: Option<u64>,
    ) -> RouterLoad {
        RouterLoad {
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

/// An entry of the response of `/get_load`, the older form. The response is a list with one entry
/// per data-parallel rank.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RankLoad {
    dp_rank: u32,
    num_reqs: u32,
    num_waiting_reqs: u32,
    num_tokens: u64,
}

impl RankLoad {
    /// Converts a load: its requests, and the tokens that they hold or that must still be computed.
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
pub enum AbortRequest {
    /// All requests.
    All,
    /// Requests with an id that starts with this.
    Rid(String),
    /// The request with its KV kept in this room and the following ones, for a decode worker.
    Kept(Room),
}

impl AbortRequest {
    /// Reads a body.
    ///
    /// # Errors
    /// The body is malformed, or has none of `rid`, `bootstrap_room` and `abort_all`.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        if fields.flag("abort_all", false)? {
            return Ok(Self::All);
        }
        if let Some(room) = fields.integer("bootstrap_room", 0..=i128::from(i64::MAX))? {
            return Ok(Self::Kept(Room(room)));
        }
        let rid = fields.name("rid")?;
        let missing = "is missing; `bootstrap_room` or `abort_all` can replace it";
        rid.map(Self::Rid).ok_or_else(|| fields.invalid("rid", missing))
    }

    /// The body that gives up the KV kept in `room`.
    pub fn body_of(room: Room) -> Vec<u8> {
        format!(r#"{{"bootstrap_room":{room}}}"#).into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_lists_and_loads_have_the_fields_that_routers_read() {
        assert_eq!(
            serde_json::to_string(&ModelList::of(
                [ModelCard::new(("m", "n"), true, 7, 2048)].into_iter()
            ))
            .unwrap(),
            r#"{"object":"list","data":[{"id":"m","object":"model","created":7,"owned_by":"sglang","root":"n","parent":null,"max_model_len":2048}]}"#
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
        assert_eq!(AbortRequest::parse(br#"{"rid":"a"}"#), Ok(AbortRequest::Rid("a".into())));
        assert_eq!(AbortRequest::parse(br#"{"rid":"","abort_all":true}"#), Ok(AbortRequest::All));
        assert_eq!(
            AbortRequest::parse(&AbortRequest::body_of(Room(7))),
            Ok(AbortRequest::Kept(Room(7)))
        );
        for body in ["{}", r#"{"rid":""}"#, r#"{"rid":3}"#] {
            assert_eq!(
                AbortRequest::parse(body.as_bytes()).unwrap_err().param.as_deref(),
                Some("rid"),
                "{body}"
            );
        }
    }
}
