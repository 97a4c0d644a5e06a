//! vLLM's field `kv_transfer_params`, and Baton's field [`PREFILL`].
//!
//! With the first field, a router calls prefill first. Prefill's answer says where the KV is, and
//! the router sends that to decode. With the second field, the router names a prefill worker, and
//! decode calls that worker.
//!
//! Owns: the meaning of both fields in a request, and the object in an answer. Invariant: for each
//! choice, decode reads from prefill's answer the room in which prefill keeps the KV.

use super::bootstrap::{self, BootstrapParams};
use super::error::ApiError;
use super::fields::Fields;
use crate::ids::Room;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::value::RawValue;

/// Name of vLLM's field.
pub const FIELD: &str = "kv_transfer_params";

/// The field in which a router names the prefill worker that decode must call.
pub const PREFILL: &str = "baton_prefill";

/// The request in `kv_transfer_params`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum KvTransfer {
    /// For prefill: keep the KV, and report its place in the answer.
    Keep(Keep),
    /// For decode: the place of the KV of each choice.
    Take(Vec<BootstrapParams>),
}

/// A request to keep KV, with the address at which the caller reaches the prefill worker. The
/// prefill worker uses its own values for absent fields.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize)]
pub struct Keep {
    /// Host of its bootstrap registry.
    #[serde(rename = "remote_host", skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Port of its bootstrap registry.
    #[serde(rename = "remote_port", skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// The room of the first choice, so that the caller can release the KV without the answer.
    #[serde(
        rename = "bootstrap_room",
        skip_serializing_if = "Option::is_none",
        serialize_with = "write_room"
    )]
    pub room: Option<Room>,
    /// The caller claims the KV as soon as it has pages, and reads the first event at once. Prefill
    /// does not compute before the claim.
    #[serde(rename = "baton_claimed", skip_serializing_if = "std::ops::Not::not")]
    pub claimed: bool,
}

/// The JSON form of this request.
#[derive(Serialize)]
pub(super) struct KeepRequest<'a> {
    do_remote_decode: bool,
    do_remote_prefill: bool,
    #[serde(flatten)]
    keep: &'a Keep,
}

fn write_room<S: Serializer>(room: &Option<Room>, serializer: S) -> Result<S::Ok, S::Error> {
    room.map(|room| room.0).serialize(serializer)
}

impl Keep {
    /// The object for the request body.
    pub(super) fn asking(&self) -> KeepRequest<'_> {
        KeepRequest { do_remote_decode: true, do_remote_prefill: false, keep: self }
    }
}

/// A prefill worker that decode must call.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrefillAddress {
    /// Its host.
    pub host: String,
    /// Its HTTP port.
    pub port: u16,
    /// Whether that port speaks TLS.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tls: bool,
    /// Port of its bootstrap registry. `None`: the one that it reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bootstrap_port: Option<u16>,
}

impl PrefillAddress {
    /// Host and port in the form of the `Host` header.
    pub fn authority(&self) -> String {
        // An IPv6 address may already have brackets.
        match self.host.contains(':') && !self.host.starts_with('[') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }

    /// Its host; an IPv6 address without brackets.
    pub fn bare_host(&self) -> &str {
        let bare = self.host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        bare.unwrap_or(&self.host)
    }

    /// The request that asks it to keep KV.
    pub fn keep(&self) -> Keep {
        Keep { host: Some(self.host.clone()), port: self.bootstrap_port, ..Keep::default() }
    }
}

/// Reads the prefill worker that decode must call.
pub(super) fn read_prefill(fields: &mut Fields<'_>) -> Result<Option<PrefillAddress>, ApiError> {
    let must = "must be a prefill worker: an object with `host`, `port` and optionally `tls` and \
                `bootstrap_port`";
    let address: Option<PrefillAddress> = fields.get(PREFILL, must)?;
    let is_one = |address: &PrefillAddress| {
        bootstrap::is_host(&address.host) && address.port > 0 && address.bootstrap_port != Some(0)
    };
    match address {
        Some(address) if !is_one(&address) => Err(fields.invalid(PREFILL, must)),
        address => Ok(address),
    }
}

/// A prefill worker's answer about KV that it keeps.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KvTransferParams {
    /// The JSON object for decode.
    pub params: String,
    /// The first choice's room, if the object has one.
    pub room: Option<Room>,
}

impl KvTransferParams {
    /// Finds the object in a whole answer, or in one event of a stream.
    pub fn of(answer: &[u8]) -> Option<KvTransferParams> {
        #[derive(Deserialize)]
        struct Told<'a> {
            #[serde(borrow)]
            kv_transfer_params: Option<&'a RawValue>,
            #[serde(borrow)]
            meta_info: Option<Meta<'a>>,
        }
        #[derive(Deserialize)]
        struct Meta<'a> {
            #[serde(borrow)]
            kv_transfer_params: Option<&'a RawValue>,
        }
        #[derive(Deserialize)]
        struct Params {
            bootstrap_room: Option<u64>,
        }
        let entry = match answer.first()? {
            // The answer to a batch is a list. The rooms of later entries follow from the first
            // one.
            b'[' => serde_json::from_slice::<Vec<Told<'_>>>(answer).ok()?.into_iter().next()?,
            _ => serde_json::from_slice(answer).ok()?,
        };
        let params =
            entry.kv_transfer_params.or_else(|| entry.meta_info?.kv_transfer_params)?.get();
        // An object is required, because serde would also read a list as the fields in order.
        let Params { bootstrap_room } =
            serde_json::from_str(params).ok().filter(|_| params.starts_with('{'))?;
        Some(KvTransferParams { params: params.to_owned(), room: bootstrap_room.map(Room) })
    }

    /// The place of the KV of `choices` choices, for decode.
    ///
    /// # Errors
    /// The object does not name kept KV, or a value is invalid.
    pub fn met(&self, choices: usize) -> Result<Vec<BootstrapParams>, ApiError> {
        let body = format!("{{\"{FIELD}\":{}}}", self.params);
        match read(&mut Fields::parse(body.as_bytes())?, choices)? {
            Some(KvTransfer::Take(met)) => Ok(met),
            _ => Err(ApiError::invalid(FIELD, "names no KV that is kept")),
        }
    }
}

/// The place where the KV of a request is kept: the object for decode.
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
    /// KV kept by the prefill worker with the registry at `host` and `port`. Choice `i` has the
    /// room `first + i`.
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

/// Reads the object of a request with `choices` choices. vLLM's own fields in it (ids of its engine
/// and blocks) have no meaning here.
pub(super) fn read(
    fields: &mut Fields<'_>,
    choices: usize,
) -> Result<Option<KvTransfer>, ApiError> {
    let Some(mut object) = fields.object(FIELD)? else { return Ok(None) };
    let keep = object.flag("do_remote_decode", false)?;
    match (keep, object.flag("do_remote_prefill", false)?) {
        (false, false) => Ok(None),
        (true, false) => {
            let host = object.name("remote_host")?;
            if host.as_ref().is_some_and(|host| !bootstrap::is_host(host)) {
                return Err(object.invalid("remote_host", "must name a host"));
            }
            let port = object.integer("remote_port", 1..=i128::from(u16::MAX))?;
            let room: Option<u64> = object.integer("bootstrap_room", 0..=i128::from(i64::MAX))?;
            let claimed = object.flag("baton_claimed", false)?;
            Ok(Some(KvTransfer::Keep(Keep { host, port, room: room.map(Room), claimed })))
        }
        (true, true) => {
            Err(object.invalid("do_remote_decode", "and `do_remote_prefill` exclude each other"))
        }
        (false, true) => {
            let host = object.name("remote_host")?;
            let host =
                host.ok_or_else(|| object.invalid("remote_host", "is required: prefill's host"))?;
            let port = object.integer("remote_port", 1..=i128::from(u16::MAX))?;
            let room: Option<u64> = object.integer("bootstrap_room", 0..=i128::from(i64::MAX))?;
            let room = room.ok_or_else(|| {
                let why =
                    "is required: KV is only taken from workers that return it (`baton prefill`)";
                object.invalid("bootstrap_room", why)
            })?;
            if !bootstrap::is_host(&host) {
                return Err(object.invalid("remote_host", "must name a host"));
            }
            let met = |choice| BootstrapParams {
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
    fn decode_reads_the_same_rooms_that_prefill_has_answered() {
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
            "remote_engine_id":null,"remote_block_ids":null,"remote_host":null,
            "remote_port":null}}"#;
        assert_eq!(read_json(body), Ok(Some(KvTransfer::Keep(Keep::default()))));
        for claimed in [false, true] {
            let keep = Keep {
                host: Some("10.0.0.1".into()),
                port: Some(8998),
                room: Some(Room(7)),
                claimed,
            };
            let body = serde_json::json!({ "kv_transfer_params": keep.asking() }).to_string();
            assert_eq!(
                read_json(&body),
                Ok(Some(KvTransfer::Keep(keep))),
                "Baton's router adds the address of prefill"
            );
        }
        for nothing in ["{}", r#"{"kv_transfer_params":null}"#, r#"{"kv_transfer_params":{}}"#] {
            assert_eq!(read_json(nothing), Ok(None));
        }
    }

    #[test]
    fn kv_transfer_params_are_found_in_every_form_of_answer() {
        let kept = KeptKv::new("10.0.0.1", 8998, Room(7));
        let one = serde_json::json!({ "kv_transfer_params": kept });
        let info = serde_json::json!({ "text": "", "meta_info": one });
        for answer in [one.to_string(), info.to_string(), serde_json::json!([info, {}]).to_string()]
        {
            let entry = KvTransferParams::of(answer.as_bytes()).expect(&answer);
            assert_eq!(entry.room, Some(Room(7)));
            let met = entry.met(2).unwrap();
            assert_eq!(
                (met[1].host.as_deref(), met[1].port, met[1].room),
                (Some("10.0.0.1"), Some(8998), Room(8))
            );
        }
        for nothing in
            ["", "[]", "{}", "7", r#"{"kv_transfer_params":null}"#, r#"{"kv_transfer_params":[7]}"#]
        {
            assert_eq!(KvTransferParams::of(nothing.as_bytes()), None, "{nothing}");
        }
        let of_vllm =
            KvTransferParams::of(br#"{"kv_transfer_params":{"remote_engine_id":"x"}}"#).unwrap();
        assert!(of_vllm.room.is_none() && of_vllm.met(1).is_err());
    }

    #[test]
    fn a_prefill_worker_to_ask_is_one_that_can_be() {
        let read = |json: &str| {
            let body = format!(r#"{{"baton_prefill":{json}}}"#);
            read_prefill(&mut Fields::parse(body.as_bytes()).unwrap())
        };
        let address = PrefillAddress {
            host: "10.0.0.1".into(),
            port: 9,
            tls: false,
            bootstrap_port: Some(8998),
        };
        assert_eq!(read(&serde_json::to_string(&address).unwrap()), Ok(Some(address.clone())));
        for (host, authority) in
            [("10.0.0.1", "10.0.0.1:9"), ("::1", "[::1]:9"), ("[::1]", "[::1]:9")]
        {
            let address = PrefillAddress { host: host.into(), ..address.clone() };
            assert_eq!(address.authority(), authority);
        }
        assert_eq!(read("null"), Ok(None));
        for odd in [
            "7",
            "{}",
            r#"{"host":"a"}"#,
            r#"{"host":"a b","port":1}"#,
            r#"{"host":"a","port":0}"#,
            r#"{"host":"a","port":1,"bootstrap_port":0}"#,
            r#"{"host":"a","port":1,"x":1}"#,
        ] {
            assert_eq!(read(odd).unwrap_err().param.as_deref(), Some("baton_prefill"), "{odd}");
        }
    }

    #[test]
    fn impossible_kv_transfer_params_are_refused_by_name() {
        let take =
            |rest: &str| format!(r#"{{"kv_transfer_params":{{"do_remote_prefill":true,{rest}}}}}"#);
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
