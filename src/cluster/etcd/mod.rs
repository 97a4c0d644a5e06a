//! Entries in etcd, over its JSON gateway (`/v3/…`, etcd 3.4 and later): the forms that both sides share.
//!
//! A worker's key is `/baton/workers/ID`, under a lease of [`REGISTRY_ENTRY_LIFE`](crate::limits::REGISTRY_ENTRY_LIFE);
//! its value is `{"entry": "…", "proof": "…"}`, the entry as JSON in a text, the proof (`cluster::proof`) by the cluster
//! key over method `etcd`, the key as path, the incarnation as nonce and the entry as body. There is no nonce of a
//! registry's: who can write to etcd can put back what a worker has put there, of that same incarnation.
//! `enrolment`: a worker's side. `view`: a router's.

pub mod enrolment;
pub mod view;

use super::entry::Entry;
use super::proof::{Asked, prove, proves, to_hex};
use crate::config::secret::Secret;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Serialize};

/// How its hosts are named, though HTTP is spoken to them.
const SCHEME: &str = "etcd";
/// All keys of workers begin so.
const PREFIX: &str = "/baton/workers/";
/// In the place of a request's method in proofs.
const METHOD: &str = "etcd";
/// The first key behind them.
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
struct Value {
    entry: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    proof: Option<String>,
}

/// The value of a worker's key.
fn write(entry: &Entry, cluster_key: Option<&Secret>) -> Vec<u8> {
    let json = String::from_utf8(entry.to_json()).expect("JSON is text");
    let key = key_of(entry);
    let asked = Asked { method: METHOD, path: &key, body: json.as_bytes() };
    let proof = cluster_key.map(|secret| prove(secret, asked, &to_hex(&entry.peer.incarnation)));
    serde_json::to_vec(&Value { entry: json, proof }).expect("plain structs are JSON")
}

/// The entry under a key.
fn read(key: &str, value: &[u8], cluster_keys: &[Secret]) -> Result<Entry, String> {
    let value: Value = serde_json::from_slice(value).map_err(|error| error.to_string())?;
    let entry = Entry::parse(value.entry.as_bytes())?;
    if key != key_of(&entry) {
        return Err("it is another worker's entry".into());
    }
    let asked = Asked { method: METHOD, path: key, body: value.entry.as_bytes() };
    let shown = value.proof.as_deref().unwrap_or_default();
    let nonce = to_hex(&entry.peer.incarnation);
    match cluster_keys.is_empty()
        || cluster_keys.iter().any(|secret| proves(secret, asked, &nonce, shown))
    {
        true => Ok(entry),
        false => Err("it does not prove the cluster key".into()),
    }
}

/// An answer's status as an error, with the text that etcd gives.
fn refused(status: u16, body: &[u8]) -> String {
    let text = String::from_utf8_lossy(&body[..body.len().min(300)]);
    format!("it answers with status {status}: {}", text.trim())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::entry::Seat;
    use crate::cluster::kinds::KindDigest;
    use crate::cluster::router::Role;
    use crate::ids::Peer;

    pub fn entry(id: u8, incarnation: u8) -> Entry {
        let seat =
            Seat { role: Role::Decode, url: format!("http://10.0.0.{id}:1").parse().unwrap() };
        let peer = Peer { id: [id; 16], incarnation: [incarnation; 16] };
        Entry { peer, seat, bootstrap_port: None, kind: KindDigest([3; 32]) }
    }

    #[test]
    fn with_a_key_only_what_its_holder_wrote_under_its_own_name_is_taken() {
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
