//! Headers of GGUF files. All data that a header names lies inside the file. A truncated file is
//! refused. If a header is read, written and read again, both results are equal. An accepted
//! configuration has sizes that fit.

use super::model_sizes;
use baton::model::gguf::config;
use baton::model::gguf::header::{Header, Value};
use baton::model::gguf::metadata::Metadata;
use baton::model::tensor::{TensorPlace, TensorType};
use std::path::Path;

/// The key of the alignment of tensors.
const ALIGNMENT: &str = "general.alignment";

pub fn run(data: &[u8]) {
    let Ok(header) = Header::parse(data) else { return };
    let alignment = match header.metadata.get(ALIGNMENT) {
        Some(Value::Unsigned(bytes)) => *bytes as usize,
        _ => 32,
    };
    for tensor in header.tensors.values() {
        check_tensor(tensor, &header, alignment, data.len());
    }
    let metadata = Metadata { file: Path::new("f"), bytes: data, header: &header };
    for (key, value) in &header.metadata {
        check_value(value, data);
        check_access(&metadata, key);
    }
    if let Ok(config) = config::read(&metadata) {
        model_sizes::check(&config);
    }
    if let Some(end) = header.tensors.values().map(|tensor| tensor.data.end).max() {
        assert!(Header::parse(&data[..end - 1]).is_err(), "cut before {end}");
        let rest = Header::parse(&data[..end]).map(|same| shown(&same, data));
        assert_eq!(rest, Ok(shown(&header, data)), "bytes after the last tensor are ignored");
    }
    let again = written(&header, data, alignment);
    let read = Header::parse(&again).expect("what was read can be written");
    assert_eq!(shown(&read, &again), shown(&header, data));
}

fn check_tensor(tensor: &TensorPlace, header: &Header, alignment: usize, length: usize) {
    let (elements, block) = tensor.dtype.block();
    assert!(tensor.rows > 0 && tensor.cols > 0 && tensor.cols.is_multiple_of(elements));
    assert_eq!(tensor.data.len(), tensor.rows * (tensor.cols / elements) * block);
    assert!(header.length <= tensor.data.start && tensor.data.end <= length);
    assert!(tensor.data.start.is_multiple_of(alignment) && header.length.is_multiple_of(alignment));
}

fn check_value(value: &Value, data: &[u8]) {
    match value {
        Value::String(range) => assert!(range.end <= data.len()),
        Value::Array(list) => {
            assert_eq!(list.values(data).count(), list.len());
            assert_eq!(list.is_empty(), list.len() == 0);
            list.values(data).for_each(|value| check_value(&value, data));
        }
        _ => {}
    }
}

/// A value can be read as one type only; every other type gives an error.
fn check_access(metadata: &Metadata<'_>, key: &str) {
    let kinds = [
        metadata.string(key).is_ok(),
        metadata.bool(key).is_ok(),
        metadata.f32(key).is_ok(),
        metadata.strings(key).is_ok() || metadata.u32s(key).is_ok(),
    ];
    assert!(kinds.into_iter().filter(|&is| is).count() <= 1, "{key} is several things");
    assert!(metadata.u32(key).is_err() || metadata.f32(key).is_ok());
}

/// Values with the bytes they stand for, so that two files can be compared.
fn shown(header: &Header, data: &[u8]) -> Vec<String> {
    let metadata =
        header.metadata.iter().map(|(key, value)| format!("{key:?} {}", show(value, data)));
    let place = |tensor: &TensorPlace| tensor.data.start - header.length;
    let tensors = header.tensors.iter().map(|(name, tensor)| {
        let TensorPlace { dtype, rows, cols, .. } = tensor;
        format!("{name:?} {dtype:?} {rows} {cols} {}", place(tensor))
    });
    metadata.chain(tensors).collect()
}

fn show(value: &Value, data: &[u8]) -> String {
    match value {
        Value::String(range) => format!("{:?}", data[range.clone()].escape_ascii().to_string()),
        Value::Array(list) => {
            let items: Vec<_> = list.values(data).map(|value| show(&value, data)).collect();
            format!("{items:?}")
        }
        Value::Float(number) => format!("{:x}", number.to_bits()),
        other => format!("{other:?}"),
    }
}

/// A file with the same content, in the widest types.
fn written(header: &Header, data: &[u8], alignment: usize) -> Vec<u8> {
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend((header.tensors.len() as u64).to_le_bytes());
    out.extend((header.metadata.len() as u64).to_le_bytes());
    for (key, value) in &header.metadata {
        text(&mut out, key.as_bytes());
        match value {
            Value::Array(list) => {
                out.extend(9u32.to_le_bytes());
                let values: Vec<Value> = list.values(data).collect();
                out.extend(values.first().map_or(0, kind).to_le_bytes());
                out.extend((values.len() as u64).to_le_bytes());
                values.iter().for_each(|value| scalar(&mut out, value, data));
            }
            value => {
                out.extend(kind(value).to_le_bytes());
                scalar(&mut out, value, data);
            }
        }
    }
    let mut end = 0;
    for (name, tensor) in &header.tensors {
        text(&mut out, name.as_bytes());
        out.extend(2u32.to_le_bytes());
        out.extend((tensor.cols as u64).to_le_bytes());
        out.extend((tensor.rows as u64).to_le_bytes());
        out.extend(number(tensor.dtype).to_le_bytes());
        out.extend(((tensor.data.start - header.length) as u64).to_le_bytes());
        end = end.max(tensor.data.end - header.length);
    }
    out.resize(out.len().next_multiple_of(alignment) + end, 0);
    out
}

fn text(out: &mut Vec<u8>, text: &[u8]) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text);
}

fn kind(value: &Value) -> u32 {
    match value {
        Value::Unsigned(_) => 10,
        Value::Signed(_) => 11,
        Value::Float(_) => 12,
        Value::Bool(_) => 7,
        Value::String(_) => 8,
        Value::Array(_) => unreachable!("no list of lists is read"),
    }
}

fn scalar(out: &mut Vec<u8>, value: &Value, data: &[u8]) {
    match value {
        Value::Unsigned(number) => out.extend(number.to_le_bytes()),
        Value::Signed(number) => out.extend(number.to_le_bytes()),
        Value::Float(number) => out.extend(number.to_le_bytes()),
        Value::Bool(is) => out.push((*is).into()),
        Value::String(range) => text(out, &data[range.clone()]),
        Value::Array(_) => unreachable!("no list of lists is read"),
    }
}

fn number(dtype: TensorType) -> u32 {
    match dtype {
        TensorType::F32 => 0,
        TensorType::F16 => 1,
        TensorType::Q4_0 => 2,
        TensorType::Q4_1 => 3,
        TensorType::Q5_0 => 6,
        TensorType::Q5_1 => 7,
        TensorType::Q8_0 => 8,
        TensorType::Q4_K => 12,
        TensorType::Q5_K => 13,
        TensorType::Q6_K => 14,
        TensorType::Bf16 => 30,
    }
}
