//! Workers' entries in etcd, over its JSON gateway (`/v3/…`, etcd 3.4 and later). `lease` is the
//! worker's side and `view` the router's side. This file has the formats that both use.
//!
//! The key is `/baton/workers/ID`, under a lease of
//! [`REGISTRY_ENTRY_LIFE`](crate::limits::REGISTRY_ENTRY_LIFE).
//! The value is `{"entry": "…", "proof": "…"}`; the entry is JSON inside a string.
//! The proof (`registry::proof`) uses the cluster key: method `etcd`, the key of etcd as path, the
//! incarnation as nonce, the entry as body. No registry issues this nonce. A client that can write
//! to etcd can therefore restore an old value of the same incarnation.

pub mod lease;
pub mod view;

use crate::config::secret::Secret;
use crate::registry::entry::Entry;
use crate::registry::proof::{SignedRequest, prove, proves};
use crate::stdx::hex::to_hex;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Serialize};

/// The URL scheme of etcd's hosts in `--registry`. The protocol is HTTP.
const SCHEME: &str = "etcd";
/// Prefix of all keys of workers.
const PREFIX: &str = "/baton/workers/";
/// Replaces the HTTP method in proofs.
const METHOD: &str = "etcd";
/// The first key after all keys with the prefix.
const PREFIX_END: &str = "/baton/workers0";

fn key_of(entry: &Entry) -> String {
    format!("{PREFIX}{}", to_hex(&entry.peer.id))
}

fn encode(bytes: impl AsRef<[u8]>) -> String {
    BASE64_STANDARD.encode(bytes)
}

fn decode(text: &str) -> Result<Vec<u8>, String> {
    BASE64_STANDARD.decode(text).map_err(|error| error.to_string())
}

#[derive(Serialize, Deserialize)]
struct EtcdValue {
    entry: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    proof: Option<String>,
}

/// The value of a worker's key.
fn write(entry: &Entry, cluster_key: Option<&Secret>) -> Vec<u8> {
    let json = String::from_utf8(entry.to_json()).expect("JSON is text");
    let key = key_of(entry);
    let asked = SignedRequest { method: METHOD, path: &key, body: json.as_bytes() };
    let proof = cluster_key.map(|secret| prove(secret, asked, &to_hex(&entry.peer.incarnation)));
    serde_json::to_vec(&EtcdValue { entry: json, proof }).expect("plain structs are JSON")
}

/// The entry under a key.
fn read(key: &str, value: &[u8], cluster_keys: &[Secret]) -> Result<Entry, String> {
    let value: EtcdValue = serde_json::from_slice(value).map_err(|error| error.to_string())?;
    let entry = Entry::parse(value.entry.as_bytes())?;
    if key != key_of(&entry) {
        return Err("it is another worker's entry".into());
    }
    let asked = SignedRequest { method: METHOD, path: key, body: value.entry.as_bytes() };
    let shown = value.proof.as_deref().unwrap_or_default();
    let nonce = to_hex(&entry.peer.incarnation);
    match cluster_keys.is_empty()
        || cluster_keys.iter().any(|secret| proves(secret, asked, &nonce, shown))
    {
        true => Ok(entry),
        false => Err("it does not prove the cluster key".into()),
    }
}

/// The error for an answer's status, with etcd's text.
fn refused(status: u16, body: &[u8]) -> String {
    let text = String::from_utf8_lossy(&body[..body.len().min(300)]);
    format!("it answers with status {status}: {}", text.trim())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Leg, Peer};
    use crate::registry::entry::WorkerAddress;
    use crate::routing::compatibility::CompatDigest;

    pub fn entry(id: u8, incarnation: u8) -> Entry {
        let address = WorkerAddress {
            role: Leg::Decode,
            url: format!("http://10.0.0.{id}:1").parse().unwrap(),
        };
        let peer = Peer { id: [id; 16], incarnation: [incarnation; 16] };
        Entry {
            peer,
            address,
            bootstrap_port: None,
            kind: CompatDigest { by_family: [3; 32], by_class: None },
        }
    }

    #[test]
    fn with_a_key_only_an_entry_proven_under_its_own_name_is_accepted() {
        let (ours, theirs) = ([Secret::of_bytes(&[7; 32])], [Secret::of_bytes(&[8; 32])]);
        let entry = entry(1, 2);
        let key = key_of(&entry);
        let value = write(&entry, ours.first());
        assert_eq!(read(&key, &value, &ours), Ok(entry.clone()));
        assert_eq!(read(&key, &value, &[]), Ok(entry.clone()));
        assert!(read(&key, &value, &theirs).is_err());
        let both = [theirs[0].clone(), ours[0].clone()];
        assert_eq!(read(&key, &value, &both), Ok(entry.clone()), "while keys are changed");
        assert!(read(&key, &write(&entry, None), &ours).unwrap_err().contains("cluster key"));
        assert!(read("/baton/workers/02", &value, &ours).unwrap_err().contains("another"));
        let moved = String::from_utf8(value).unwrap().replace("10.0.0.1", "10.0.0.9");
        assert!(moved.contains("10.0.0.9") && read(&key, moved.as_bytes(), &ours).is_err());
        assert!(read(&key, b"x", &[]).is_err());
    }
}
