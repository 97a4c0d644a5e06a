//! The source of tensors for the forward pass in any file format, and the errors of model files.
//! Names are Hugging Face's: `model.layers.0.self_attn.q_proj.weight`.

use super::tensor::TensorView;
use std::fmt;
use std::path::PathBuf;

/// The tensors of an opened model.
pub trait WeightSource {
    /// The tensor with this name; `None` if the model has none.
    fn tensor(&self, name: &str) -> Result<Option<TensorView<'_>>, LoadError>;

    /// The file or directory, for errors and logs.
    fn describe(&self) -> String;
}

/// The reason why a model cannot be loaded. Each variant prints one line: the file, the place, the
/// expected value and the value found.
#[derive(Debug)]
pub enum LoadError {
    /// The operating system returned an error.
    Io {
        /// File or directory.
        file: PathBuf,
        /// The reason.
        error: std::io::Error,
    },
    /// The bytes do not match the format of the file.
    Malformed {
        /// File.
        file: PathBuf,
        /// The problem and its place.
        what: String,
    },
    /// A field of configuration or metadata is missing, out of range, or unsupported.
    Field {
        /// File.
        file: PathBuf,
        /// Name of the field.
        field: String,
        /// Supported values.
        expected: String,
        /// The value in the file.
        found: String,
    },
    /// A tensor is missing, or has another shape or type.
    Tensor {
        /// File or directory.
        file: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Supported values.
        expected: String,
        /// The value in the file.
        found: String,
    },
}

impl LoadError {
    /// [`LoadError::Io`].
    pub fn io(file: impl Into<PathBuf>, error: std::io::Error) -> LoadError {
        LoadError::Io { file: file.into(), error }
    }

    /// [`LoadError::Malformed`].
    pub fn malformed(file: impl Into<PathBuf>, what: impl fmt::Display) -> LoadError {
        LoadError::Malformed { file: file.into(), what: what.to_string() }
    }

    /// [`LoadError::Field`].
    pub fn field(
        file: impl Into<PathBuf>,
        field: impl Into<String>,
        expected: impl fmt::Display,
        found: impl fmt::Display,
    ) -> LoadError {
        LoadError::Field {
            file: file.into(),
            field: field.into(),
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }

    /// [`LoadError::Tensor`].
    pub fn tensor(
        file: impl Into<PathBuf>,
        tensor: impl Into<String>,
        expected: impl fmt::Display,
        found: impl fmt::Display,
    ) -> LoadError {
        LoadError::Tensor {
            file: file.into(),
            tensor: tensor.into(),
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LoadError::Io { file, error } => write!(f, "{}: {error}", file.display()),
            LoadError::Malformed { file, what } => write!(f, "{}: {what}", file.display()),
            LoadError::Field { file, field, expected, found } => {
                write!(f, "{}: {field}: expected {expected}, found {found}", file.display())
            }
            LoadError::Tensor { file, tensor, expected, found } => {
                write!(f, "{}: tensor {tensor}: expected {expected}, found {found}", file.display())
            }
        }
    }
}

impl std::error::Error for LoadError {}
