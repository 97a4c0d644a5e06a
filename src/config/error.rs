//! Why a command line was refused.

use std::fmt;
use std::path::PathBuf;

/// A refused command line. All of them end the process with status 2.
#[derive(Debug)]
pub enum ConfigError {
    /// Not a command line of ours, or a call for help or the version, which is no error at all.
    Usage(clap::Error),
    /// A known name that this version does not have.
    Later {
        /// The flag, with its value where that is the matter, or the command.
        what: String,
        /// Why, or what to use instead.
        why: &'static str,
    },
    /// A flag that this command does not have.
    Elsewhere {
        /// The flag.
        flag: String,
        /// The command.
        command: String,
        /// Those that have it.
        others: String,
    },
    /// A value out of its range.
    Value {
        /// The flag.
        flag: &'static str,
        /// What was given.
        value: String,
        /// What it may be.
        limit: String,
    },
    /// Two flags that contradict each other.
    Conflict {
        /// The flag.
        flag: &'static str,
        /// The other.
        other: &'static str,
        /// Why not both.
        why: &'static str,
    },
    /// Something must be given that was not.
    Missing {
        /// The flag, or flags, to give.
        flag: &'static str,
        /// Why it is needed here.
        why: String,
    },
    /// A file named by a flag cannot be used.
    File {
        /// The flag.
        flag: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

impl ConfigError {
    /// Prints what clap or we have to say, and gives the exit status: 0 for help and version, else 2.
    pub fn report(&self) -> u8 {
        match self {
            ConfigError::Usage(error) => {
                // Nothing can be done about a closed standard output or error.
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
                write!(f, "{flag} is no flag of baton {command}, but of baton {others}")
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
