//! Parses the head of a safetensors file from a byte slice, without I/O.
//!
//! Invariants: each tensor's data lies inside the slice and has the size of its shape. Never
//! panics.

use crate::limits::SAFETENSORS_HEADER_MAX;
use crate::model::expert_stack::is_stack;
use crate::model::tensor::{TensorPlace, TensorType};
use crate::model::weights::LoadError;
use safetensors::{Dtype, SafeTensors};
use std::fmt;
use std::path::Path;

/// The reason why the bytes are not a supported safetensors file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SafetensorsError {
    /// The head is longer than its limit.
    HeaderLength(u64),
    /// The format is wrong; the message of the reader.
    Malformed(String),
    /// An unsupported element type or number of dimensions.
    Tensor {
        /// Its name.
        tensor: String,
        /// Supported values.
        expected: &'static str,
        /// The value in the file.
        found: String,
    },
}

impl SafetensorsError {
    /// Converts to an error that names the file.
    pub fn in_file(self, file: &Path) -> LoadError {
        match self {
            SafetensorsError::Tensor { tensor, expected, found } => {
                LoadError::tensor(file, tensor, expected, found)
            }
            other => LoadError::malformed(file, other),
        }
    }
}

impl fmt::Display for SafetensorsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SafetensorsError::HeaderLength(length) => write!(
                f,
                "safetensors header: expected at most {SAFETENSORS_HEADER_MAX} bytes, \
                 found {length}"
            ),
            SafetensorsError::Malformed(why) => write!(f, "not whole safetensors: {why}"),
            SafetensorsError::Tensor { tensor, expected, found } => {
                write!(f, "tensor {tensor}: expected {expected}, found {found}")
            }
        }
    }
}

impl std::error::Error for SafetensorsError {}

/// Reads the head of `bytes`, which must be the whole file.
pub fn parse(bytes: &[u8]) -> Result<Vec<(String, TensorPlace)>, SafetensorsError> {
    if let Some((length, _)) = bytes.split_first_chunk() {
        let length = u64::from_le_bytes(*length);
        if length > SAFETENSORS_HEADER_MAX as u64 {
            return Err(SafetensorsError::HeaderLength(length));
        }
    }
    let file = SafeTensors::deserialize(bytes)
        .map_err(|error| SafetensorsError::Malformed(error.to_string()))?;
    let start = bytes.as_ptr() as usize;
    file.tensors()
        .into_iter()
        .map(|(tensor, view)| {
            let refuse = |expected, found| SafetensorsError::Tensor {
                tensor: tensor.clone(),
                expected,
                found,
            };
            let dtype = match view.dtype() {
                Dtype::F32 => TensorType::F32,
                Dtype::F16 => TensorType::F16,
                Dtype::BF16 => TensorType::Bf16,
                other => return Err(refuse("F32, F16 or BF16", format!("{other:?}"))),
            };
            let (rows, cols) = match *view.shape() {
                [cols] => (1, cols),
                [rows, cols] => (rows, cols),
                [experts, rows, cols] if is_stack(&tensor) => (experts * rows, cols),
                // A convolution of each channel by itself.
                [rows, 1, cols] if tensor.ends_with(".conv1d.weight") => (rows, cols),
                ref shape => {
                    return Err(refuse("one or two dimensions", format!("shape {shape:?}")));
                }
            };
            let at = view.data().as_ptr() as usize - start;
            Ok((tensor, TensorPlace { dtype, rows, cols, data: at..at + view.data().len() }))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
    }

    const HEADER: &str = r#"{"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},"b":{"dtype":"F32","shape":[1],"data_offsets":[12,16]}}"#;

    #[test]
    fn places_tensors() {
        let bytes = file(HEADER, &[7; 16]);
        let mut tensors = parse(&bytes).unwrap();
        tensors.sort_by(|a, b| a.0.cmp(&b.0));
        let start = 8 + HEADER.len();
        let matrix =
            TensorPlace { dtype: TensorType::Bf16, rows: 2, cols: 3, data: start..start + 12 };
        assert_eq!(tensors[0], ("a".to_owned(), matrix));
        assert_eq!((tensors[1].1.rows, tensors[1].1.cols), (1, 1));
        for length in 0..bytes.len() {
            assert!(parse(&bytes[..length]).is_err(), "cut at {length}");
        }
    }

    #[test]
    fn refuses_by_name() {
        let refusal =
            |header: &str, data: &[u8]| parse(&file(header, data)).unwrap_err().to_string();
        let integers = r#"{"x.y":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}"#;
        let message = refusal(integers, &[0; 8]);
        assert!(message.contains("x.y") && message.contains("I64"), "{message}");
        let cube = r#"{"x":{"dtype":"F16","shape":[1,1,1],"data_offsets":[0,2]}}"#;
        assert!(refusal(cube, &[0; 2]).contains("[1, 1, 1]"));
        let long = [&u64::MAX.to_le_bytes()[..], &[0; 50]].concat();
        assert_eq!(parse(&long), Err(SafetensorsError::HeaderLength(u64::MAX)));
    }

    proptest! {
        #[test]
        fn damage_never_panics(at in 0usize..200, with in any::<[u8; 3]>()) {
            let mut bytes = file(HEADER, &[7; 16]);
            let at = at % (bytes.len() - 3);
            bytes[at..at + 3].copy_from_slice(&with);
            for (_, place) in parse(&bytes).unwrap_or_default() {
                prop_assert!(place.data.end <= bytes.len());
            }
        }
    }
}
