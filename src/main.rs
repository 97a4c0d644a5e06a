//! The `baton` binary: reads the command line and starts the command.
//!
//! Exit status: 0 after a drain; 2 if the command line or a file that it names cannot be used; 1
//! for all other failures.

use baton::cli::flags::{DoctorFlags, SimCommand, SimFlags};
use baton::cli::{self, HostInfo, Invocation};
use baton::cmd::bench::transfer::{BenchPlan, Survey};
use baton::cmd::doctor::{self, Verdict, transfer};
use baton::cmd::{bench, drain};
use baton::config::{CoreConfig, DrainConfig, RoleConfig};
use baton::ids::Role;
use baton::model::forward::cpu::available_kernels;
use baton::obs::log;
use baton::obs::log::{LogConfig, LogLevel};
use baton::server::drain::DrainOutcome;
use baton::sim;
use baton::sys::{files, names};
use baton::{planner, process, say};
use std::process::ExitCode;

/// A debug build counts allocations, for `bench transfer --through-library`.
#[cfg(debug_assertions)]
#[global_allocator]
static ALLOCATOR: baton::stdx::seal::SealingAllocator = baton::stdx::seal::SealingAllocator;

fn main() -> ExitCode {
    names::use_built_in_services();
    let surroundings = HostInfo::of_this_process();
    match cli::parse(std::env::args_os(), &surroundings) {
        Err(error) => ExitCode::from(error.report()),
        Ok(Invocation::Print(json)) => {
            say!("{json}");
            ExitCode::SUCCESS
        }
        Ok(Invocation::Drain { config, warnings }) => {
            warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
            run_drain(&config)
        }
        Ok(Invocation::Doctor(flags, cores)) => run_doctor(&flags, &cores, &surroundings),
        Ok(Invocation::BenchTransfer(flags)) => match BenchPlan::new(&flags) {
            Err(error) => ExitCode::from(error.report()),
            Ok(plan) => run_bench(&plan),
        },
        Ok(Invocation::Sim(flags)) => run_sim(&flags),
        Ok(Invocation::Run { command, warnings }) => {
            log::configure(command.log());
            for warning in warnings {
                log::event!(Warn, "config", "setting needs attention", what = warning);
            }
            run(&command)
        }
    }
}

fn run(command: &RoleConfig) -> ExitCode {
    if let Err(error) = files::raise_open_files() {
        log::event!(Warn, "main", "cannot raise the limit of open files", why = error);
    }
    let ended = match command {
        RoleConfig::Serve(config) => process::serve(config),
        RoleConfig::Prefill(config) => process::worker::run(config, Role::Prefill),
        RoleConfig::Decode(config) => process::worker::run(config, Role::Decode),
        RoleConfig::Router(config) => process::router::router(config),
    };
    match ended {
        Ok(DrainOutcome::Drained) => {
            log::event!(Info, "main", "ended, no request was left running");
            ExitCode::SUCCESS
        }
        Ok(DrainOutcome::CutOff) => {
            log::event!(Warn, "main", "ended, running requests were cut off");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error}");
            failed(error.is_usage_error())
        }
    }
}

/// The exit status of a failure: 2 for an unusable command line, else 1.
fn failed(is_usage_error: bool) -> ExitCode {
    if is_usage_error { ExitCode::from(2) } else { ExitCode::FAILURE }
}

fn run_drain(config: &DrainConfig) -> ExitCode {
    match drain::run(config, &mut std::io::stdout()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}: {error}", config.url);
            failed(error.is_usage_error())
        }
    }
}

fn run_bench(plan: &BenchPlan) -> ExitCode {
    match bench::transfer::run(plan) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run_sim(flags: &SimFlags) -> ExitCode {
    // Simulated faults cause warnings on purpose.
    let level = if flags.trace { LogLevel::Debug } else { LogLevel::Error };
    log::configure(LogConfig { level, ..LogConfig::default() });
    let is_well = match &flags.command {
        Some(SimCommand::Place(place)) => {
            planner::place::Search::new(place).and_then(|search| planner::place::run(&search))
        }
        None if flags.load.is_load_mode => {
            planner::plan::LoadPlan::new(flags).and_then(|plan| planner::run(&plan))
        }
        None => sim::run_seeds(flags),
    };
    match is_well {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => ExitCode::from(error.report()),
    }
}

fn run_doctor(flags: &DoctorFlags, cores: &CoreConfig, surroundings: &HostInfo) -> ExitCode {
    let here = Survey::here();
    let mut findings = doctor::examine(surroundings, cores, available_kernels(), &here.nics);
    if let Some(peer) = &flags.peer {
        findings.push(transfer::between(&here, peer, Survey::ask(peer).map(|(theirs, _)| theirs)));
    }
    for finding in &findings {
        say!("{finding}");
    }
    let worst = findings.iter().map(|finding| finding.verdict).max();
    if worst == Some(Verdict::Bad) { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
