//! Headers of safetensors files. The tensors fill the file without gap or overlap, and each has the
//! size of its shape. A truncated or extended file is refused. If a header is read, written and
//! read again, both results are equal.

use baton::model::hf::header::parse;
use baton::model::tensor::{TensorPlace, TensorType};
use std::collections::BTreeMap;

/// Checks the input as it is. Then checks it with repaired lengths, and then with repaired tensor
/// places, because most mutations break one of them.
pub fn run(data: &[u8]) {
    check(data);
    let Some(mut head) = head(data) else { return };
    check(&with_data(&head));
    put_in_place(&mut head);
    check(&with_data(&head));
}

type Head = serde_json::Map<String, serde_json::Value>;

fn head(data: &[u8]) -> Option<Head> {
    let end = data.iter().rposition(|&byte| byte == b'}')? + 1;
    serde_json::from_slice(data.get(8..end)?).ok()
}

/// A file with this header, its length before it, and as much data as it describes.
fn with_data(head: &Head) -> Vec<u8> {
    const DATA_MAX: u64 = 4096;
    let ends = head.values().filter_map(|tensor| tensor["data_offsets"][1].as_u64());
    let length = ends.max().unwrap_or(0).min(DATA_MAX) as usize;
    let head = serde_json::to_vec(head).expect("it was read from JSON");
    [&(head.len() as u64).to_le_bytes()[..], &head, &vec![0; length]].concat()
}

/// Gives each tensor the place that its type and shape need, one after the other.
fn put_in_place(head: &mut Head) {
    let mut end = 0u64;
    for tensor in head.values_mut().filter(|tensor| tensor["shape"].is_array()) {
        let width = match tensor["dtype"].as_str() {
            Some("F64" | "I64" | "U64") => 8,
            Some("F32" | "I32" | "U32") => 4,
            Some("F16" | "BF16" | "I16" | "U16") => 2,
            _ => 1,
        };
        let sides = tensor["shape"].as_array().into_iter().flatten();
        let size =
            sides.fold(width, |size: u64, side| size.saturating_mul(side.as_u64().unwrap_or(1)));
        let start = end;
        end = start.saturating_add(size);
        tensor["data_offsets"] = serde_json::json!([start, end]);
    }
}

fn check(data: &[u8]) {
    let Ok(tensors) = parse(data) else { return };
    let head = 8 + u64::from_le_bytes(*data.first_chunk().expect("a length")) as usize;
    check_places(&tensors, head, data.len());
    let count = tensors.len();
    let tensors: BTreeMap<String, TensorPlace> = tensors.into_iter().collect();
    assert_eq!(tensors.len(), count, "a name occurs twice");
    assert!(parse(&data[..data.len() - 1]).is_err(), "cut");
    assert!(parse(&[data, &[0]].concat()).is_err(), "made longer");
    let (again, shift) = written(&tensors, &data[head..]);
    let read = parse(&again).expect("what was read can be written");
    for (name, place) in &read {
        let data = place.data.start - shift + head..place.data.end - shift + head;
        assert_eq!(tensors.get(name), Some(&TensorPlace { data, ..place.clone() }));
    }
    assert_eq!(read.len(), count);
}

fn check_places(tensors: &[(String, TensorPlace)], head: usize, length: usize) {
    let mut places: Vec<_> = tensors.iter().map(|(_, place)| place).collect();
    places.sort_by_key(|place| (place.data.start, place.data.end));
    let mut end = head;
    for place in places {
        assert_eq!(place.data.start, end, "a gap or an overlap");
        let size =
            place.rows.checked_mul(place.cols).and_then(|count| count.checked_mul(width(place)));
        assert_eq!(Some(place.data.len()), size);
        end = place.data.end;
    }
    assert_eq!(end, length);
}

fn width(place: &TensorPlace) -> usize {
    match place.dtype {
        TensorType::F32 => 4,
        TensorType::F16 | TensorType::Bf16 => 2,
        other => panic!("{other:?} is no type of safetensors"),
    }
}

/// A file with the same header and data, and the offset of its data.
fn written(tensors: &BTreeMap<String, TensorPlace>, data: &[u8]) -> (Vec<u8>, usize) {
    let start = tensors.values().map(|place| place.data.start).min().unwrap_or_default();
    let header: serde_json::Map<_, _> = tensors
        .iter()
        .map(|(name, place)| {
            let dtype = match place.dtype {
                TensorType::F32 => "F32",
                TensorType::F16 => "F16",
                _ => "BF16",
            };
            let about = serde_json::json!({
                "dtype": dtype,
                "shape": [place.rows, place.cols],
                "data_offsets": [place.data.start - start, place.data.end - start],
            });
            (name.clone(), about)
        })
        .collect();
    let header = serde_json::to_vec(&header).expect("names and numbers are JSON");
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, data].concat();
    (file, 8 + header.len())
}
