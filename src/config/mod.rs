//! The command line, in two steps: [`flags`] is what was typed, [`resolved`] what it means.
//!
//! Thread: main, once. Invariants: what is resolved is complete, consistent and never changes; every
//! inconsistency is an error that names the flag, its value and the limit. Values that only the model
//! file can tell (context length, KV element type) stay open here and nowhere else.
//! Leaves to others: opening the model, binding ports, choosing kernels.

pub mod error;
pub mod flags;
mod later;
pub mod quantities;
pub mod registry;
mod resolve;
pub mod resolved;
pub mod secret;
pub mod values;

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, FromArgMatches};
use error::ConfigError;
use flags::{Cli, DoctorFlags, SimFlags, TransferBenchFlags};
use resolve::{DECODE_PORT, FRONT_PORT, PREFILL_PORT};
use resolved::{Command, DrainConfig};
use std::ffi::OsString;
use std::net::SocketAddr;

/// What the process was asked to do.
#[derive(Debug)]
pub enum Invocation {
    /// Run a role.
    Run {
        /// Which, and how.
        command: Box<Command>,
        /// What is allowed but should be known; to be logged once logging stands.
        warnings: Vec<String>,
    },
    /// `--print-config`: the resolved configuration as JSON, to be printed.
    Print(String),
    /// `baton drain`.
    Drain {
        /// Of whom.
        config: DrainConfig,
        /// As of a role.
        warnings: Vec<String>,
    },
    /// `baton doctor`.
    Doctor(DoctorFlags),
    /// `baton bench transfer`, as typed: what its names stand for, the bench knows.
    BenchTransfer(Box<TransferBenchFlags>),
    /// `baton sim`.
    Sim(Box<SimFlags>),
}

/// What resolution needs to know of the machine and the environment.
#[derive(Clone, Debug)]
pub struct Surroundings {
    /// Logical CPUs this process may run on, ascending.
    pub cpus: Vec<usize>,
    /// How many threads run at once here: the CPUs above, less what a quota takes.
    pub parallelism: usize,
    /// `BATON_LOG`, where set.
    pub log_level: Option<String>,
}

impl Surroundings {
    /// Those of this process.
    pub fn of_this_process() -> Surroundings {
        let parallelism = std::thread::available_parallelism().map_or(1, |count| count.get());
        let mut cpus: Vec<usize> =
            core_affinity::get_core_ids().unwrap_or_default().iter().map(|core| core.id).collect();
        cpus.sort_unstable();
        if cpus.is_empty() {
            cpus = (0..parallelism).collect();
        }
        Surroundings { cpus, parallelism, log_level: std::env::var("BATON_LOG").ok() }
    }
}

/// Where the commands listen unless told otherwise.
const PORTS: [(&str, u16); 4] = [
    ("serve", FRONT_PORT),
    ("prefill", PREFILL_PORT),
    ("decode", DECODE_PORT),
    ("router", FRONT_PORT),
];

/// What clap is to take: the flags, and what of their help differs between commands that share them.
fn command_line() -> clap::Command {
    let cli =
        PORTS.into_iter().fold(<Cli as clap::CommandFactory>::command(), |cli, (command, port)| {
            let help = format!("Port of the HTTP interface; 0 takes a free one [default: {port}]");
            cli.mut_subcommand(command, |command| command.mut_arg("port", |arg| arg.help(help)))
        });
    takes_negatives(cli)
}

/// Has `-1` be the value of the flag before it, for which it is out of range as a rule, and not a flag nobody knows.
fn takes_negatives(command: clap::Command) -> clap::Command {
    let takes = |arg: clap::Arg| match arg.get_action().takes_values() && !arg.is_positional() {
        true => arg.allow_negative_numbers(true),
        false => arg,
    };
    command.mut_args(takes).mut_subcommands(takes_negatives)
}

/// Parses and resolves a command line, program name first.
pub fn parse(
    arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    surroundings: &Surroundings,
) -> Result<Invocation, ConfigError> {
    let arguments: Vec<OsString> = arguments.into_iter().map(Into::into).collect();
    let words = [1, 2]
        .map(|at| arguments.get(at).and_then(|word: &OsString| word.to_str()).unwrap_or_default());
    let explain = |error| {
        let known =
            later::explain(&error).or_else(|| later::elsewhere(&error, &command_line(), words));
        known.unwrap_or(ConfigError::Usage(error))
    };
    let matches = command_line().try_get_matches_from(&arguments).map_err(explain)?;
    let cli = Cli::from_arg_matches(&matches).map_err(ConfigError::Usage)?;
    listens_alone(&matches)?;
    resolve::resolve(cli, surroundings)
}

/// What is typed beside `bench transfer --listen`, not what is a default, would have no effect.
fn listens_alone(matches: &ArgMatches) -> Result<(), ConfigError> {
    let bench =
        matches.subcommand_matches("bench").and_then(|bench| bench.subcommand_matches("transfer"));
    let Some((bench, address)) =
        bench.and_then(|bench| Some((bench, bench.get_one::<SocketAddr>("listen")?)))
    else {
        return Ok(());
    };
    let all = TransferBenchFlags::augment_args(clap::Command::new("transfer"));
    let is_typed = |name: &str| bench.value_source(name) == Some(ValueSource::CommandLine);
    let mut names = all.get_arguments().map(|flag| flag.get_id().as_str());
    match names.find(|&name| is_typed(name) && !["listen", "until_eof"].contains(&name)) {
        None => Ok(()),
        Some(other) => {
            let other = other.replace('_', "-");
            let limit =
                format!("not with --{other}, as who connects says what is measured and how");
            Err(ConfigError::Value { flag: "--listen", value: address.to_string(), limit })
        }
    }
}
