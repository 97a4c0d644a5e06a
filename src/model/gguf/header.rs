//! Parses the head of a GGUF file from a byte slice: metadata and tensor table, without I/O.
//!
//! Invariants: nothing is read past the slice. Every count is checked against the remaining bytes
//! before memory is allocated. Each tensor's data lies inside the slice. Never panics.
//! Not here: the meaning of the metadata (`config`, `tokenizer`).

use crate::limits::{GGUF_METADATA_MAX, GGUF_NAME_MAX, GGUF_TENSORS_MAX};
use crate::model::tensor::{TensorPlace, TensorType};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

/// The reason why the bytes are not a supported GGUF file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum GgufError {
    /// The first four bytes are not `GGUF`.
    Magic,
    /// A version other than 2 and 3.
    Version(u32),
    /// The file ends inside the named part.
    Truncated {
        /// The part being read.
        what: &'static str,
        /// Position in bytes.
        at: usize,
    },
    /// A count or length above its bound.
    TooMany {
        /// The counted items.
        what: &'static str,
        /// The number in the file.
        count: u64,
        /// The limit.
        limit: u64,
    },
    /// A key or a tensor name is not UTF-8.
    Name {
        /// Position in bytes.
        at: usize,
    },
    /// A key or tensor occurs twice.
    Twice(String),
    /// A metadata value of an unknown type, or an array of arrays.
    ValueType {
        /// Its key.
        key: String,
        /// The type's number.
        kind: u32,
    },
    /// `general.alignment` is not a power of two from 8 to 64 KiB.
    Alignment(u64),
    /// A tensor of an unsupported type.
    TensorType {
        /// Its name.
        tensor: String,
        /// The type's number.
        kind: u32,
    },
    /// A tensor without elements, with too many, or with rows that are not whole blocks.
    Shape {
        /// Its name.
        tensor: String,
        /// Dimensions, fastest first.
        shape: Vec<u64>,
    },
    /// A tensor's data reaches past the end of the file, or starts unaligned.
    Data {
        /// Its name.
        tensor: String,
        /// First byte after its data, from the start of the file.
        end: u64,
        /// Length of the file.
        length: u64,
    },
}

impl fmt::Display for GgufError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GgufError::Magic => write!(f, "not a GGUF file: it does not begin with \"GGUF\""),
            GgufError::Version(v) => write!(f, "GGUF version: expected 2 or 3, found {v}"),
            GgufError::Truncated { what, at } => {
                write!(f, "the file ends inside {what} at byte {at}")
            }
            GgufError::TooMany { what, count, limit } => {
                write!(f, "{what}: expected at most {limit}, found {count}")
            }
            GgufError::Name { at } => write!(f, "a name at byte {at} is not UTF-8"),
            GgufError::Twice(name) => write!(f, "{name} occurs twice"),
            GgufError::ValueType { key, kind } => {
                write!(f, "{key}: expected a plain value or a list of them, found type {kind}")
            }
            GgufError::Alignment(n) => {
                write!(f, "general.alignment: expected a power of two from 8 to 65536, found {n}")
            }
            GgufError::TensorType { tensor, kind } => write!(
                f,
                "tensor {tensor}: expected F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, \
                 Q5_K or Q6_K, found {}",
                type_name(*kind)
            ),
            GgufError::Shape { tensor, shape } => {
                write!(f, "tensor {tensor}: expected rows of whole blocks, found shape {shape:?}")
            }
            GgufError::Data { tensor, end, length } => write!(
                f,
                "tensor {tensor}: expected aligned data within the file's {length} bytes, found an \
                 end at {end}"
            ),
        }
    }
}

impl std::error::Error for GgufError {}

/// A metadata value. Integers of all widths become one signed and one unsigned kind.
#[derive(Clone, PartialEq, Debug)]
pub enum Value {
    /// u8 to u64.
    Unsigned(u64),
    /// i8 to i64.
    Signed(i64),
    /// f32 or f64.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// The byte range of a string, which need not be UTF-8.
    String(Range<usize>),
    /// A list, read on demand.
    Array(Array),
}

/// A list of metadata values, checked to lie inside the file.
#[derive(Clone, PartialEq, Debug)]
pub struct Array {
    kind: Kind,
    count: usize,
    start: usize,
}

impl Array {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The elements, read from the bytes that the header was parsed from.
    pub fn values<'a>(&self, bytes: &'a [u8]) -> impl Iterator<Item = Value> + use<'a> {
        let kind = self.kind;
        let mut cursor = Cursor { bytes, at: self.start };
        (0..self.count).map_while(move |_| cursor.scalar(kind).ok())
    }
}

/// Metadata and tensor table of a GGUF file.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Header {
    /// Values by key.
    pub metadata: BTreeMap<String, Value>,
    /// Tensors by the names in the file.
    pub tensors: BTreeMap<String, TensorPlace>,
    /// Bytes before the tensors' data.
    pub length: usize,
}

impl Header {
    /// Reads the head of `bytes`, which must be the whole file.
    pub fn parse(bytes: &[u8]) -> Result<Header, GgufError> {
        let mut cursor = Cursor { bytes, at: 0 };
        if cursor.take(4, "the magic")? != b"GGUF" {
            return Err(GgufError::Magic);
        }
        let version = cursor.u32("the version")?;
        if version != 2 && version != 3 {
            return Err(GgufError::Version(version));
        }
        let tensors = cursor.count("tensors", GGUF_TENSORS_MAX as u64)?;
        let entries = cursor.count("metadata entries", GGUF_METADATA_MAX as u64)?;
        let mut header = Header::default();
        for _ in 0..entries {
            let key = cursor.name()?;
            let value = cursor.value(&key)?;
            if header.metadata.contains_key(&key) {
                return Err(GgufError::Twice(key));
            }
            header.metadata.insert(key, value);
        }
        let mut table = Vec::with_capacity(tensors.min(bytes.len() / 32));
        for _ in 0..tensors {
            table.push(cursor.tensor()?);
        }
        let alignment = header.alignment()?;
        header.length = cursor.at.checked_next_multiple_of(alignment).unwrap_or(usize::MAX);
        for entry in table {
            let (name, info) = entry.place(header.length, alignment, bytes.len())?;
            if header.tensors.contains_key(&name) {
                return Err(GgufError::Twice(name));
            }
            header.tensors.insert(name, info);
        }
        Ok(header)
    }

    fn alignment(&self) -> Result<usize, GgufError> {
        match self.metadata.get("general.alignment") {
            None => Ok(32),
            Some(&Value::Unsigned(n)) if n.is_power_of_two() && (8..=65536).contains(&n) => {
                Ok(n as usize)
            }
            Some(&Value::Unsigned(n)) => Err(GgufError::Alignment(n)),
            Some(_) => Err(GgufError::Alignment(0)),
        }
    }
}

/// A row of the tensor table as stored in the file.
struct TableEntry {
    name: String,
    shape: Vec<u64>,
    kind: u32,
    offset: u64,
}

impl TableEntry {
    /// Checks type, shape and place against a file of `length` bytes with data from `start` on.
    fn place(
        self,
        start: usize,
        alignment: usize,
        length: usize,
    ) -> Result<(String, TensorPlace), GgufError> {
        let Some(dtype) = tensor_type(self.kind) else {
            return Err(GgufError::TensorType { tensor: self.name, kind: self.kind });
        };
        let (elements, block) = dtype.block();
        let cols = self.shape.first().copied().unwrap_or(1);
        let rows = self.shape.iter().skip(1).try_fold(1u64, |product, &n| product.checked_mul(n));
        let size = rows
            .filter(|&rows| rows > 0 && cols > 0 && cols.is_multiple_of(elements as u64))
            .and_then(|rows| rows.checked_mul(cols / elements as u64))
            .and_then(|blocks| blocks.checked_mul(block as u64));
        let (Some(rows), Some(size)) = (rows, size) else {
            return Err(GgufError::Shape { tensor: self.name, shape: self.shape });
        };
        let first = (start as u64).checked_add(self.offset);
        let end = first.and_then(|first| first.checked_add(size)).unwrap_or(u64::MAX);
        if end > length as u64 || !self.offset.is_multiple_of(alignment as u64) {
            return Err(GgufError::Data { tensor: self.name, end, length: length as u64 });
        }
        let info = TensorPlace {
            dtype,
            rows: rows as usize,
            cols: cols as usize,
            data: (end - size) as usize..end as usize,
        };
        Ok((self.name, info))
    }
}

/// Value types by their numbers in the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Unsigned(u8),
    Signed(u8),
    Float(u8),
    Bool,
    String,
}

impl Kind {
    fn from_number(kind: u32) -> Option<Kind> {
        Some(match kind {
            0 => Kind::Unsigned(1),
            2 => Kind::Unsigned(2),
            4 => Kind::Unsigned(4),
            10 => Kind::Unsigned(8),
            1 => Kind::Signed(1),
            3 => Kind::Signed(2),
            5 => Kind::Signed(4),
            11 => Kind::Signed(8),
            6 => Kind::Float(4),
            12 => Kind::Float(8),
            7 => Kind::Bool,
            8 => Kind::String,
            _ => return None,
        })
    }
}

const ARRAY: u32 = 9;

/// A reading position in the file.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, length: usize, what: &'static str) -> Result<&'a [u8], GgufError> {
        let end = self.at.checked_add(length).filter(|&end| end <= self.bytes.len());
        let Some(end) = end else {
            return Err(GgufError::Truncated { what, at: self.at });
        };
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    /// An integer of 1 to 8 bytes.
    fn unsigned(&mut self, width: u8, what: &'static str) -> Result<u64, GgufError> {
        let mut padded = [0; 8];
        padded[..width as usize].copy_from_slice(self.take(width as usize, what)?);
        Ok(u64::from_le_bytes(padded))
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, GgufError> {
        Ok(self.unsigned(4, what)? as u32)
    }

    fn count(&mut self, what: &'static str, limit: u64) -> Result<usize, GgufError> {
        let count = self.unsigned(8, what)?;
        if count > limit {
            Err(GgufError::TooMany { what, count, limit })
        } else {
            Ok(count as usize)
        }
    }

    fn name(&mut self) -> Result<String, GgufError> {
        let length = self.count("bytes of a name", GGUF_NAME_MAX as u64)?;
        let at = self.at;
        let bytes = self.take(length, "a name")?;
        std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| GgufError::Name { at })
    }

    fn scalar(&mut self, kind: Kind) -> Result<Value, GgufError> {
        Ok(match kind {
            Kind::Unsigned(width) => Value::Unsigned(self.unsigned(width, "a number")?),
            Kind::Signed(width) => {
                let unused = 64 - 8 * u32::from(width);
                Value::Signed(((self.unsigned(width, "a number")? << unused) as i64) >> unused)
            }
            Kind::Float(4) => Value::Float(f32::from_bits(self.u32("a number")?).into()),
            Kind::Float(_) => Value::Float(f64::from_bits(self.unsigned(8, "a number")?)),
            Kind::Bool => Value::Bool(self.unsigned(1, "a boolean")? != 0),
            Kind::String => {
                let length = self.count("bytes of a string", self.bytes.len() as u64)?;
                self.take(length, "a string")?;
                Value::String(self.at - length..self.at)
            }
        })
    }

    fn value(&mut self, key: &str) -> Result<Value, GgufError> {
        let number = self.u32("a value's type")?;
        let unknown = |kind| GgufError::ValueType { key: key.to_owned(), kind };
        if number != ARRAY {
            return self.scalar(Kind::from_number(number).ok_or(unknown(number))?);
        }
        let number = self.u32("a list's type")?;
        let kind = Kind::from_number(number).ok_or(unknown(number))?;
        let count = self.count("elements of a list", self.bytes.len() as u64)?;
        let start = self.at;
        match kind {
            Kind::String => {
                for _ in 0..count {
                    self.scalar(kind)?;
                }
            }
            Kind::Bool => drop(self.take(count, "a list")?),
            Kind::Unsigned(width) | Kind::Signed(width) | Kind::Float(width) => {
                self.take(count.saturating_mul(width as usize), "a list")?;
            }
        }
        Ok(Value::Array(Array { kind, count, start }))
    }

    fn tensor(&mut self) -> Result<TableEntry, GgufError> {
        let name = self.name()?;
        let dimensions = self.u32("a tensor's shape")?;
        if dimensions > 4 {
            return Err(GgufError::TooMany {
                what: "dimensions",
                count: dimensions.into(),
                limit: 4,
            });
        }
        let mut shape = Vec::with_capacity(4);
        for _ in 0..dimensions {
            shape.push(self.unsigned(8, "a tensor's shape")?);
        }
        Ok(TableEntry {
            name,
            shape,
            kind: self.u32("a tensor's type")?,
            offset: self.unsigned(8, "a tensor's offset")?,
        })
    }
}

fn tensor_type(kind: u32) -> Option<TensorType> {
    Some(match kind {
        0 => TensorType::F32,
        1 => TensorType::F16,
        2 => TensorType::Q4_0,
        3 => TensorType::Q4_1,
        6 => TensorType::Q5_0,
        7 => TensorType::Q5_1,
        8 => TensorType::Q8_0,
        12 => TensorType::Q4_K,
        13 => TensorType::Q5_K,
        14 => TensorType::Q6_K,
        30 => TensorType::Bf16,
        _ => return None,
    })
}

/// ggml's name of an unsupported type.
fn type_name(kind: u32) -> String {
    let name = match kind {
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        40 => "NVFP4",
        _ => return format!("type {kind}"),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::gguf::writer::GgufWriter;
    use proptest::prelude::*;

    fn sample() -> Vec<u8> {
        GgufWriter::default()
            .string("general.architecture", "llama")
            .u32("answer", 42)
            .i32("below", -7)
            .f32("half", 0.5)
            .bool("yes", true)
            .strings("words", &["a", "bc", ""])
            .i32s("types", &[1, -1])
            .tensor("vector", &[4], 0, &[0; 16])
            .tensor("matrix", &[32, 3], 8, &[1; 102])
            .finish()
    }

    #[test]
    fn reads_values_lists_and_tensors() {
        let bytes = sample();
        let header = Header::parse(&bytes).unwrap();
        assert_eq!(header.metadata["answer"], Value::Unsigned(42));
        assert_eq!(header.metadata["below"], Value::Signed(-7));
        assert_eq!(header.metadata["half"], Value::Float(0.5));
        assert_eq!(header.metadata["yes"], Value::Bool(true));
        let Value::Array(words) = &header.metadata["words"] else { panic!("a list") };
        let words: Vec<_> = words
            .values(&bytes)
            .map(|value| match value {
                Value::String(range) => bytes[range].to_vec(),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(words, [b"a".to_vec(), b"bc".to_vec(), vec![]]);
        let Value::Array(types) = &header.metadata["types"] else { panic!("a list") };
        assert_eq!(types.values(&bytes).collect::<Vec<_>>(), [Value::Signed(1), Value::Signed(-1)]);
        let matrix = &header.tensors["matrix"];
        assert_eq!((matrix.dtype, matrix.rows, matrix.cols), (TensorType::Q8_0, 3, 32));
        assert!(bytes[matrix.data.clone()].iter().all(|&b| b == 1));
        assert_eq!(matrix.data.len(), 102);
        assert_eq!((header.tensors["vector"].rows, header.tensors["vector"].cols), (1, 4));
    }

    #[test]
    fn every_cut_is_an_error() {
        let bytes = sample();
        for length in 0..bytes.len() {
            assert!(Header::parse(&bytes[..length]).is_err(), "cut at {length}");
        }
    }

    #[test]
    fn refuses_by_name() {
        let refusal = |bytes: Vec<u8>| Header::parse(&bytes).unwrap_err().to_string();
        assert!(refusal(b"GGML....".to_vec()).contains("GGUF"));
        let iq = GgufWriter::default().tensor("blk.0.ffn_up.weight", &[32], 20, &[]).finish();
        let message = refusal(iq);
        assert!(message.contains("blk.0.ffn_up.weight") && message.contains("IQ4_NL"), "{message}");
        let partial = GgufWriter::default().tensor("t", &[33], 8, &[0; 64]).finish();
        assert!(refusal(partial).contains("[33]"));
        let huge = GgufWriter::default().tensor("t", &[32, u64::MAX], 8, &[0; 64]).finish();
        assert!(refusal(huge).contains("tensor t"));
        let wrapped = GgufWriter::default().tensor("t", &[1 << 62], 0, &[0; 64]).finish();
        assert!(refusal(wrapped).contains("tensor t"));
        let twice = GgufWriter::default().u32("a", 1).u32("a", 2).finish();
        assert!(refusal(twice).contains("a occurs twice"));
        let alignment = GgufWriter::default().u32("general.alignment", 48).finish();
        assert!(refusal(alignment).contains("found 48"));
    }

    #[test]
    fn a_count_takes_no_memory_before_it_is_checked() {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(u64::MAX.to_le_bytes());
        bytes.extend(0u64.to_le_bytes());
        assert!(matches!(Header::parse(&bytes), Err(GgufError::TooMany { what: "tensors", .. })));
    }

    proptest! {
        #[test]
        fn damage_never_panics(at in 0usize..400, with in any::<[u8; 4]>()) {
            let mut bytes = sample();
            let at = at % (bytes.len() - 4);
            bytes[at..at + 4].copy_from_slice(&with);
            if let Ok(header) = Header::parse(&bytes) {
                for tensor in header.tensors.values() {
                    prop_assert!(tensor.data.end <= bytes.len());
                }
            }
        }
    }
}
