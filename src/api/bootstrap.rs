//! The three bootstrap fields that a router adds to a body, so that the two legs of a request meet.
//!
//! Owns: their scalar, list and null forms, and the room of each choice. Invariants: both legs
//! compute the same room for each choice from the same body; no two choices share a room.

use super::error::ApiError;
use super::fields::{Fields, OneOrMany};
use crate::ids::Room;
use crate::limits::{CHOICES_MAX, NAME_BYTES_MAX};
use crate::stdx::rng::{INCREMENT, finalize};

/// The request field that names the prefill worker. If an error has this `param`, the prefill
/// worker failed, and not the worker that reports the error.
pub const SOURCE_PARAM: &str = "bootstrap_host";

/// The registry and the room of the hand-off of one choice.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BootstrapParams {
    /// Host of the prefill worker's bootstrap registry. Prefill itself does not need it.
    pub host: Option<String>,
    /// Port of that registry. `None`: the port from the decode worker's configuration.
    pub port: Option<u16>,
    /// This choice's room.
    pub room: Room,
}

/// Rooms have 63 bits.
const ROOM_MAX: u64 = i64::MAX as u64;

/// Reads the fields for `prompts` prompts with `samples` choices each. Returns one entry per
/// choice, prompt by prompt, or `None` if the body has none of the fields.
pub(super) fn read(
    fields: &mut Fields<'_>,
    prompts: usize,
    samples: usize,
) -> Result<Option<Vec<BootstrapParams>>, ApiError> {
    let hosts = fields.one_or_many::<Option<String>, CHOICES_MAX>(
        "bootstrap_host",
        "must be a string or a list of strings",
    )?;
    let ports = fields.one_or_many::<Option<u16>, CHOICES_MAX>(
        "bootstrap_port",
        "must be a port or a list of ports",
    )?;
    let must = "must be a whole number from 0 to 2^63 - 1 or a list of them";
    let rooms = fields.one_or_many::<u64, CHOICES_MAX>("bootstrap_room", must)?;
    let Some(rooms) = rooms else {
        return match hosts {
            Some(_) => {
                Err(fields.invalid("bootstrap_room", "is required if `bootstrap_host` is given"))
            }
            None => Ok(None),
        };
    };
    let count = prompts * samples;
    let hosts = spread(fields, "bootstrap_host", hosts, prompts, count)?;
    let ports = spread(fields, "bootstrap_port", ports, prompts, count)?;
    let rooms = spread_rooms(fields, rooms, prompts, count)?;
    if hosts.iter().flatten().any(|host| !is_host(host)) {
        return Err(fields.invalid("bootstrap_host", "must name a host"));
    }
    let all = hosts.into_iter().zip(ports).zip(rooms);
    Ok(Some(
        all.map(|((host, port), room)| BootstrapParams { host, port, room: Room(room) }).collect(),
    ))
}

/// One value per choice. A scalar applies to all; a list has one item per choice or per prompt.
fn spread<T: Clone>(
    fields: &Fields<'_>,
    name: &str,
    value: Option<OneOrMany<Option<T>>>,
    prompts: usize,
    count: usize,
) -> Result<Vec<Option<T>>, ApiError> {
    match value {
        None => Ok(vec![None; count]),
        Some(OneOrMany::One(value)) => Ok(vec![value; count]),
        Some(OneOrMany::Many(items)) if items.len() == count => Ok(items),
        Some(OneOrMany::Many(items)) if items.len() == prompts => {
            let samples = count / prompts;
            Ok(items.into_iter().flat_map(|item| std::iter::repeat_n(item, samples)).collect())
        }
        Some(OneOrMany::Many(_)) => Err(wrong_length(fields, name, prompts, count)),
    }
}

/// One room per choice. A scalar counts up from choice to choice; a list has one room per choice or
/// per prompt. With one room per prompt, sample `s` gets a room derived from that room and `s`.
fn spread_rooms(
    fields: &Fields<'_>,
    rooms: OneOrMany<u64>,
    prompts: usize,
    count: usize,
) -> Result<Vec<u64>, ApiError> {
    let given = match &rooms {
        OneOrMany::One(room) => std::slice::from_ref(room),
        OneOrMany::Many(rooms) => rooms,
    };
    if given.iter().any(|&room| room > ROOM_MAX) {
        return Err(fields.invalid("bootstrap_room", "must be a whole number from 0 to 2^63 - 1"));
    }
    match rooms {
        OneOrMany::One(room) => Ok((0..count).map(|choice| room_behind(room, choice).0).collect()),
        OneOrMany::Many(rooms) if rooms.len() == count => Ok(rooms),
        OneOrMany::Many(rooms) if rooms.len() == prompts => {
            let samples = (count / prompts) as u64;
            Ok(rooms
                .iter()
                .flat_map(|&room| (0..samples).map(move |s| room_of_sample(room, s)))
                .collect())
        }
        OneOrMany::Many(_) => Err(wrong_length(fields, "bootstrap_room", prompts, count)),
    }
}

/// The room of choice number `choice` if the first choice has room `first`.
pub(super) fn room_behind(first: u64, choice: usize) -> Room {
    Room(first.wrapping_add(choice as u64) & ROOM_MAX)
}

/// The room of sample `s` if `room` is given for all samples. Sample 0 gets `room` itself. The
/// others get a hash of both, which collides with other rooms as rarely as a random room.
fn room_of_sample(room: u64, s: u64) -> u64 {
    if s == 0 {
        return room;
    }
    finalize(room ^ s.wrapping_mul(INCREMENT)) & ROOM_MAX
}

fn wrong_length(fields: &Fields<'_>, name: &str, prompts: usize, count: usize) -> ApiError {
    fields.invalid(
        name,
        format!("must have {prompts} or {count} items here, one per prompt or per choice"),
    )
}

/// Whether `host` can be a host name or an address.
pub(super) fn is_host(host: &str) -> bool {
    let fits = (1..=NAME_BYTES_MAX).contains(&host.len());
    fits && host.bytes().all(|b| b.is_ascii_alphanumeric() || b".-_:[]%".contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_json(
        json: &str,
        prompts: usize,
        samples: usize,
    ) -> Result<Option<Vec<BootstrapParams>>, ApiError> {
        read(&mut Fields::parse(json.as_bytes()).unwrap(), prompts, samples)
    }

    fn rooms(json: &str, prompts: usize, samples: usize) -> Vec<u64> {
        read_json(json, prompts, samples).unwrap().unwrap().iter().map(|b| b.room.0).collect()
    }

    #[test]
    fn reads_scalars_lists_and_nulls() {
        assert_eq!(read_json("{}", 2, 1), Ok(None));
        assert_eq!(
            read_json(
                r#"{"bootstrap_host":null,"bootstrap_port":null,"bootstrap_room":null}"#,
                2,
                1
            ),
            Ok(None)
        );
        let at = |host: &str, port, room| BootstrapParams {
            host: Some(host.into()),
            port,
            room: Room(room),
        };
        assert_eq!(
            read_json(
                r#"{"bootstrap_host":"10.0.0.1","bootstrap_port":null,"bootstrap_room":0}"#,
                2,
                1
            ),
            Ok(Some(vec![at("10.0.0.1", None, 0), at("10.0.0.1", None, 1)]))
        );
        assert_eq!(
            read_json(
                r#"{"bootstrap_host":["a","b"],"bootstrap_port":[null,9],
                "bootstrap_room":[7,9223372036854775807]}"#,
                2,
                1
            ),
            Ok(Some(vec![at("a", None, 7), at("b", Some(9), ROOM_MAX)]))
        );
    }

    #[test]
    fn every_choice_gets_a_room_of_its_own() {
        assert_eq!(rooms(r#"{"bootstrap_room":5}"#, 2, 2), [5, 6, 7, 8]);
        assert_eq!(rooms(r#"{"bootstrap_room":9223372036854775807}"#, 1, 2), [ROOM_MAX, 0]);
        assert_eq!(rooms(r#"{"bootstrap_room":[1,2,3]}"#, 1, 3), [1, 2, 3]);
        let mut shared = rooms(r#"{"bootstrap_room":[1,2]}"#, 2, 3);
        assert_eq!((shared[0], shared[3]), (1, 2));
        assert_eq!(shared, rooms(r#"{"bootstrap_room":[1,2]}"#, 2, 3), "both legs agree");
        assert!(shared.iter().all(|&room| room <= ROOM_MAX));
        shared.sort_unstable();
        shared.dedup();
        assert_eq!(shared.len(), 6);
    }

    #[test]
    fn invalid_bootstrap_fields_are_refused_by_name() {
        for (json, param) in [
            (r#"{"bootstrap_host":"a"}"#, "bootstrap_room"),
            (r#"{"bootstrap_room":-1}"#, "bootstrap_room"),
            (r#"{"bootstrap_room":9223372036854775808}"#, "bootstrap_room"),
            (r#"{"bootstrap_room":"1"}"#, "bootstrap_room"),
            (r#"{"bootstrap_room":[1,2,3]}"#, "bootstrap_room"),
            (r#"{"bootstrap_room":[1,null]}"#, "bootstrap_room"),
            (r#"{"bootstrap_room":1,"bootstrap_port":65536}"#, "bootstrap_port"),
            (r#"{"bootstrap_room":1,"bootstrap_port":[1]}"#, "bootstrap_port"),
            (r#"{"bootstrap_room":1,"bootstrap_host":"a b"}"#, "bootstrap_host"),
            (r#"{"bootstrap_room":1,"bootstrap_host":"x/../y"}"#, "bootstrap_host"),
            (r#"{"bootstrap_room":1,"bootstrap_host":7}"#, "bootstrap_host"),
        ] {
            let error = read_json(json, 2, 1).unwrap_err();
            assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{json}");
        }
    }
}
