//! Errors of the command line.

use std::fmt;
use std::path::PathBuf;

/// A refused command line. Each error ends the process with status 2.
#[derive(Debug)]
pub enum ConfigError {
    /// An error of clap. `--help` and `--version` also come in this form, but are not errors.
    Usage(clap::Error),
    /// A flag or command of other servers that this version knows but does not support.
    Later {
        /// The flag, with its value if the value is refused, or the command.
        what: String,
        /// The reason, or the alternative.
        why: &'static str,
    },
    /// A flag that this command does not have.
    Elsewhere {
        /// The flag.
        flag: String,
        /// The command.
        command: String,
        /// The commands that have it.
        others: String,
    },
    /// A value out of its range.
    Value {
        /// The flag.
        flag: &'static str,
        /// The value as given.
        value: String,
        /// The allowed values.
        limit: String,
    },
    /// Two flags that exclude each other.
    Conflict {
        /// The flag.
        flag: &'static str,
        /// The other.
        other: &'static str,
        /// The reason.
        why: &'static str,
    },
    /// A required flag is missing.
    Missing {
        /// The flag, or flags, to add.
        flag: &'static str,
        /// The reason.
        why: String,
    },
    /// A file named by a flag cannot be used.
    File {
        /// The flag.
        flag: &'static str,
        /// The file.
        path: PathBuf,
        /// The problem with it.
        reason: String,
    },
}

impl ConfigError {
    /// Prints the error to standard error, or help and version to standard output. Returns the
    /// exit status: 0 for help and version, 2 for the rest.
    pub fn report(&self) -> u8 {
        match self {
            ConfigError::Usage(error) => {
                // A closed output cannot be reported anywhere.
                let _ = error.print();
                u8::try_from(error.exit_code()).unwrap_or(2)
            }
            error => {
                eprintln!("error: {error}\n\nFor more information, try '--help'.");
                2
            }
        }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConfigError::Usage(error) => error.fmt(f),
            ConfigError::Later { what, why } => {
                write!(f, "{what} is not supported by this version: {why}")
            }
            ConfigError::Elsewhere { flag, command, others } => {
                write!(f, "{flag} is not a flag of baton {command}, but of baton {others}")
            }
            ConfigError::Value { flag, value, limit } => write!(f, "{flag} {value}: {limit}"),
            ConfigError::Conflict { flag, other, why } => write!(f, "{flag} and {other}: {why}"),
            ConfigError::Missing { flag, why } => write!(f, "{flag} is needed: {why}"),
            ConfigError::File { flag, path, reason } => {
                write!(f, "{flag} {}: {reason}", path.display())
            }
        }
    }
}

impl std::error::Error for ConfigError {}
