//! The command line, in two steps: [`flags`] holds the typed flags, and [`config`](crate::config)
//! the resolved settings.
//!
//! Thread: main, once. Invariants: a resolved configuration is complete, consistent and never
//! changes; each inconsistency is an error that names the flag, its value and the limit. Only
//! values that need the model file (context length, KV element type) are resolved later.
//! Not here: opening the model, binding ports, selecting kernels.

pub mod flags;
pub mod quantities;
mod resolve;
mod unsupported_flags;

use crate::config::error::ConfigError;
use crate::config::hub::HubVariables;
use crate::config::{CoreConfig, DrainConfig, RoleConfig};
use crate::sys::affinity;
use crate::sys::file_access::FileAccess;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, FromArgMatches};
use flags::{Cli, DoctorFlags, SimFlags, TransferBenchFlags};
use resolve::{CLIENT_PORT, DECODE_PORT, PREFILL_PORT};
use std::ffi::OsString;
use std::net::SocketAddr;

/// The task of this process.
#[derive(Debug)]
pub enum Invocation {
    /// Run `baton serve`, `prefill`, `decode` or `router`.
    Run {
        /// The resolved configuration.
        command: Box<RoleConfig>,
        /// Allowed settings that need attention; logged after logging is configured.
        warnings: Vec<String>,
    },
    /// `--print-config`: the resolved configuration as JSON.
    Print(String),
    /// `baton drain`.
    Drain {
        /// The server to drain.
        config: DrainConfig,
        /// As in `Run`.
        warnings: Vec<String>,
    },
    /// `baton doctor`: the flags, and the CPUs and threads that they choose.
    Doctor(DoctorFlags, CoreConfig),
    /// `baton bench transfer`, as typed. The bench checks the names of cases and transports.
    BenchTransfer(Box<TransferBenchFlags>),
    /// `baton sim`.
    Sim(Box<SimFlags>),
}

/// Properties of the host and the environment; the resolution of flags needs them.
#[derive(Clone, Debug)]
pub struct HostInfo {
    /// Logical CPUs on which this process may run, in ascending order.
    pub cpus: Vec<usize>,
    /// Number of threads that can run at once: the CPUs above, limited by a CPU quota.
    pub parallelism: usize,
    /// Value of `BATON_LOG`, if set.
    pub log_level: Option<String>,
    /// The files of keys.
    pub files: FileAccess,
    /// Environment variables for a model hub.
    pub hub: HubVariables,
}

impl HostInfo {
    /// A host with one CPU and without variables, for tests.
    #[cfg(test)]
    pub(crate) fn of_one_cpu() -> HostInfo {
        HostInfo {
            cpus: vec![0],
            parallelism: 1,
            log_level: None,
            files: FileAccess::Host,
            hub: HubVariables::default(),
        }
    }

    /// The host of this process.
    pub fn of_this_process() -> HostInfo {
        let parallelism = std::thread::available_parallelism().map_or(1, |count| count.get());
        let cpus = affinity::allowed().unwrap_or_else(|_| (0..parallelism).collect());
        let log_level = std::env::var("BATON_LOG").ok();
        let hub = HubVariables::of_this_process();
        HostInfo { cpus, parallelism, log_level, files: FileAccess::Host, hub }
    }
}

/// Default HTTP port of each command.
const PORTS: [(&str, u16); 4] = [
    ("serve", CLIENT_PORT),
    ("prefill", PREFILL_PORT),
    ("decode", DECODE_PORT),
    ("router", CLIENT_PORT),
];

/// The command definition for clap, with the help texts that differ between commands.
pub fn command_line() -> clap::Command {
    let cli =
        PORTS.into_iter().fold(<Cli as clap::CommandFactory>::command(), |cli, (command, port)| {
            let help = format!("Port of the HTTP interface; 0 takes a free port [default: {port}]");
            cli.mut_subcommand(command, |command| command.mut_arg("port", |arg| arg.help(help)))
        });
    takes_negatives(cli)
}

/// Makes clap read `-1` as the value of the flag before it. The error then says that the value is
/// out of range, not that `-1` is an unknown flag.
fn takes_negatives(command: clap::Command) -> clap::Command {
    let takes = |arg: clap::Arg| match arg.get_action().takes_values() && !arg.is_positional() {
        true => arg.allow_negative_numbers(true),
        false => arg,
    };
    command.mut_args(takes).mut_subcommands(takes_negatives)
}

/// Parses and resolves a command line. The program name comes first.
///
/// # Errors
/// The command line is invalid, or help or the version was requested.
pub fn parse(
    arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    surroundings: &HostInfo,
) -> Result<Invocation, ConfigError> {
    let arguments: Vec<OsString> = arguments.into_iter().map(Into::into).collect();
    let words = [1, 2]
        .map(|at| arguments.get(at).and_then(|word: &OsString| word.to_str()).unwrap_or_default());
    let explain = |error| {
        let known = unsupported_flags::explain(&error)
            .or_else(|| unsupported_flags::elsewhere(&error, &command_line(), words));
        known.unwrap_or(ConfigError::Usage(error))
    };
    let matches = command_line().try_get_matches_from(&arguments).map_err(explain)?;
    let cli = Cli::from_arg_matches(&matches).map_err(ConfigError::Usage)?;
    listens_alone(&matches)?;
    resolve::resolve(cli, surroundings)
}

/// Refuses other flags together with `bench transfer --listen`, because they would have no effect.
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
            let limit = format!(
                "cannot be used with --{other}; the --connect process selects what is measured"
            );
            Err(ConfigError::Value { flag: "--listen", value: address.to_string(), limit })
        }
    }
}
