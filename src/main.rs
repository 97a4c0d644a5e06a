//! The `baton` binary: reads the command line and starts what it asks for.
//!
//! Exit status: 0 after a drain, 2 where what was typed, or a file that it names, cannot be used, 1 for the rest.

use baton::bench::{self, transfer::Plan, transfer::Survey};
use baton::config::flags::{DoctorFlags, SimCommand, SimFlags};
use baton::config::resolved::{Command, DrainConfig, LogConfig, LogLevel};
use baton::config::{self, Invocation, Surroundings};
use baton::doctor::{self, Verdict, transfer};
use baton::drain;
use baton::front::drain::End;
use baton::model::forward::cpu::available_kernels;
use baton::obs::log;
use baton::role;
use baton::say;
use baton::sim::campaign::Campaign;
use baton::sim::load;
use baton::sys::files;
use baton::wire::message::Role;
use std::process::ExitCode;

fn main() -> ExitCode {
    let surroundings = Surroundings::of_this_process();
    match config::parse(std::env::args_os(), &surroundings) {
        Err(error) => ExitCode::from(error.report()),
        Ok(Invocation::Print(json)) => {
            say!("{json}");
            ExitCode::SUCCESS
        }
        Ok(Invocation::Drain { config, warnings }) => {
            warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
            run_drain(&config)
        }
        Ok(Invocation::Doctor(flags)) => run_doctor(&flags, &surroundings),
        Ok(Invocation::BenchTransfer(flags)) => match Plan::new(&flags) {
            Err(error) => ExitCode::from(error.report()),
            Ok(plan) => run_bench(&plan),
        },
        Ok(Invocation::Sim(flags)) => run_sim(&flags),
        Ok(Invocation::Run { command, warnings }) => {
            log::configure(command.log());
            for warning in warnings {
                log::event!(Warn, "config", "allowed, but take note", what = warning);
            }
            run(&command)
        }
    }
}

fn run(command: &Command) -> ExitCode {
    if let Err(error) = files::raise_open_files() {
        log::event!(Warn, "main", "no more files can be open than now", why = error);
    }
    let ended = match command {
        Command::Serve(config) => role::serve(config),
        Command::Prefill(config) => role::part::run(config, Role::Prefill),
        Command::Decode(config) => role::part::run(config, Role::Decode),
        Command::Router(config) => role::router::router(config),
    };
    match ended {
        Ok(End::Drained) => {
            log::event!(Info, "main", "ended, nothing was left running");
            ExitCode::SUCCESS
        }
        Ok(End::CutOff) => {
            log::event!(Warn, "main", "ended, requests that still ran were cut off");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error}");
            failed(error.is_of_usage())
        }
    }
}

/// The status of what could not be done, as it was typed or at all.
fn failed(is_of_usage: bool) -> ExitCode {
    if is_of_usage { ExitCode::from(2) } else { ExitCode::FAILURE }
}

fn run_drain(config: &DrainConfig) -> ExitCode {
    match drain::run(config, &mut std::io::stdout()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}: {error}", config.url);
            failed(error.is_of_usage())
        }
    }
}

fn run_bench(plan: &Plan) -> ExitCode {
    match bench::transfer::run(plan) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run_sim(flags: &SimFlags) -> ExitCode {
    // What workers warn of is what is simulated.
    log::configure(LogConfig { level: LogLevel::Error, ..LogConfig::default() });
    let is_well = match &flags.command {
        Some(SimCommand::Place(place)) => {
            load::place::Search::new(place).and_then(|search| load::place::run(&search))
        }
        None if flags.load.is_asked_for => {
            load::plan::Plan::new(flags).and_then(|plan| load::run(&plan))
        }
        None => Campaign::new(flags).map(|campaign| campaign.run()),
    };
    match is_well {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => ExitCode::from(error.report()),
    }
}

fn run_doctor(flags: &DoctorFlags, surroundings: &Surroundings) -> ExitCode {
    let kernels: Vec<&str> = available_kernels().iter().map(|family| family.name()).collect();
    let here = Survey::here();
    let mut findings = doctor::examine(surroundings, &kernels, &here.nics);
    if let Some(peer) = &flags.peer {
        findings.push(transfer::between(&here, peer, Survey::ask(peer).map(|(theirs, _)| theirs)));
    }
    for finding in &findings {
        say!("{finding}");
    }
    let worst = findings.iter().map(|finding| finding.verdict).max();
    if worst == Some(Verdict::Bad) { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
