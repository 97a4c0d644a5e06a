//! vLLM's `kv_transfer_params`: a router asks prefill first, whose answer says where the KV is, and passes that on to
//! decode.
//!
//! Owns: what the object means in a request, and the one in an answer. Invariant: what prefill answers is read by decode
//! as the same room for each choice as prefill keeps its KV in.

use super::bootstrap::{self, Bootstrap};
use super::error::ApiError;
use super::fields::Fields;
use crate::ids::Room;
use serde::Serialize;

/// The field.
pub(super) const FIELD: &str = "kv_transfer_params";

/// What it asks for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum KvTransfer {
    /// Prefill: to keep the KV and say where.
    Keep,
    /// Decode: to take it from there, for each choice.
    Take(Vec<Bootstrap>),
}

/// Where the KV of a request is kept, as decode is to be told.
#[derive(Clone, PartialEq, Eq, Serialize, Debug)]
pub struct KeptKv {
    do_remote_prefill: bool,
    do_remote_decode: bool,
    remote_host: String,
    remote_port: u16,
    tp_size: u32,
    bootstrap_room: u64,
}

impl KeptKv {
    /// By the prefill worker whose registry is there; choice `i` is in the room that is `i` behind the first.
    pub fn new(host: &str, port: u16, first: Room) -> KeptKv {
        KeptKv {
            do_remote_prefill: true,
            do_remote_decode: false,
            remote_host: host.to_owned(),
            remote_port: port,
            tp_size: 1,
            bootstrap_room: first.0,
        }
    }

    /// The room of a choice.
    pub fn room(&self, choice: usize) -> Room {
        bootstrap::room_behind(self.bootstrap_room, choice)
    }
}

/// Reads the object of a request with so many choices. What is vLLM's own in it (ids of its engine and blocks) says
/// nothing here.
pub(super) fn read(fields: &mut Fields<'_>, choices: usize) -> Result<Option<KvTransfer>, ApiError> {
    let Some(mut object) = fields.object(FIELD)? else { return Ok(None) };
    let keep = object.flag("do_remote_decode", false)?;
    match (keep, object.flag("do_remote_prefill", false)?) {
        (false, false) => Ok(None),
        (true, false) => Ok(Some(KvTransfer::Keep)),
        (true, true) => Err(object.invalid("do_remote_decode", "and do_remote_prefill exclude each other")),
        (false, true) => {
            let host = object.name("remote_host")?;
            let host =
                host.ok_or_else(|| object.invalid("remote_host", "is needed: the prefill worker's"))?;
            let port = object.integer("remote_port", 1..=i128::from(u16::MAX))?;
            let room: Option<u64> = object.integer("bootstrap_room", 0..=i128::from(i64::MAX))?;
            let room = room.ok_or_else(|| {
                let why =
                    "is needed: KV is taken from workers alone that answer with it, as baton prefill does";
                object.invalid("bootstrap_room", why)
            })?;
            if !bootstrap::is_host(&host) {
                return Err(object.invalid("remote_host", "must name a host"));
            }
            let met = |choice| Bootstrap {
                host: Some(host.clone()),
                port,
                room: bootstrap::room_behind(room, choice),
            };
            Ok(Some(KvTransfer::Take((0..choices).map(met).collect())))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_json(json: &str) -> Result<Option<KvTransfer>, ApiError> {
        read(&mut Fields::parse(json.as_bytes()).unwrap(), 2)
    }

    #[test]
    fn what_prefill_answers_decode_reads_as_the_same_rooms() {
        for first in [0, 7, i64::MAX as u64] {
            let kept = KeptKv::new("10.0.0.1", 8998, Room(first));
            let body = serde_json::json!({ "kv_transfer_params": kept }).to_string();
            let Ok(Some(KvTransfer::Take(met))) = read_json(&body) else { panic!("{body}") };
            for (choice, met) in met.iter().enumerate() {
                assert_eq!((met.host.as_deref(), met.port), (Some("10.0.0.1"), Some(8998)));
                assert_eq!(met.room, kept.room(choice));
            }
        }
    }

    /// As vllm-router 0.1.17 sends it to prefill.
    #[test]
    fn a_router_asks_prefill_to_keep_it() {
        let body = r#"{"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,
            "remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}"#;
        assert_eq!(read_json(body), Ok(Some(KvTransfer::Keep)));
        for nothing in ["{}", r#"{"kv_transfer_params":null}"#, r#"{"kv_transfer_params":{}}"#] {
            assert_eq!(read_json(nothing), Ok(None));
        }
    }

    #[test]
    fn what_cannot_be_meant_is_refused_by_name() {
        let take = |rest: &str| format!(r#"{{"kv_transfer_params":{{"do_remote_prefill":true,{rest}}}}}"#);
        for (body, field) in [
            (r#"{"kv_transfer_params":7}"#.into(), "kv_transfer_params"),
            (take(r#""do_remote_decode":true"#), "kv_transfer_params.do_remote_decode"),
            (take(r#""bootstrap_room":1"#), "kv_transfer_params.remote_host"),
            (take(r#""remote_host":"a b","bootstrap_room":1"#), "kv_transfer_params.remote_host"),
            (take(r#""remote_host":"a""#), "kv_transfer_params.bootstrap_room"),
            (take(r#""remote_host":"a","bootstrap_room":-1"#), "kv_transfer_params.bootstrap_room"),
            (
                take(r#""remote_host":"a","remote_port":0,"bootstrap_room":1"#),
                "kv_transfer_params.remote_port",
            ),
        ] {
            let error = read_json(&body).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(field), "{body}");
        }
    }
}
