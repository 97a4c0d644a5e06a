//! `baton bench transfer`: measures a hand-off between two processes. The same run also measures
//! the bare limit of the transport.
//!
//! The hand-off uses production code from the control link to the mover. The bench replaces the
//! schedulers. With `--through-library`, it compares two ways to a hand-off (`comparison`). Source
//! and destination are two processes, on one host or on two. The source controls the run and
//! measures. The time runs from the source's call to the completion seen at the destination.

mod bytes;
mod case;
mod comparison;
mod count;
mod destination;
mod library;
mod limit;
mod page;
mod plan;
mod report;
mod side;
mod source;
mod survey;
mod talk;
mod way;

pub use plan::{BenchPlan, PeerMode};
pub use talk::Survey;

use crate::obs::log;
use crate::obs::log::{LogConfig, LogLevel};
use crate::say;
use comparison::Comparison;
use report::Figures;
use source::Leading;
use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, BufRead, BufReader, IsTerminal, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use talk::BenchRow;

/// Why rows have no figures.
#[derive(Debug)]
pub struct BenchError(pub String);

impl fmt::Display for BenchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BenchError {}

/// Measures the rows of the plan, or serves another process with `--listen`.
///
/// # Errors
/// A row has no figures, or the other process or the report's file cannot be used.
pub fn run(plan: &BenchPlan) -> Result<(), BenchError> {
    // Links start and end with every row, and the log does not need that.
    log::configure(LogConfig { level: LogLevel::Error, ..LogConfig::default() });
    match &plan.place {
        PeerMode::Listen { address, until_eof } => listen(*address, *until_eof),
        PeerMode::Connect(peer) => {
            let (survey, address) = meet(peer)?;
            lead(plan, &measurable(plan, &survey.nics)?, address)
        }
        PeerMode::Local => {
            let rows = measurable(plan, &Ok(String::new()))?;
            let follower = Follower::start()?;
            lead(plan, &rows, follower.address)
        }
    }
}

fn listen(address: SocketAddr, until_eof: bool) -> Result<(), BenchError> {
    let failed = |error: io::Error| BenchError(format!("--listen {address}: {error}"));
    let listener = TcpListener::bind(address).map_err(failed)?;
    say!("listening on {}", listener.local_addr().map_err(failed)?);
    if until_eof {
        // End of input means that the parent process has ended.
        std::thread::spawn(|| {
            let _ = io::stdin().read_to_end(&mut Vec::new());
            std::process::exit(0);
        });
    }
    destination::serve(&listener, |why| eprintln!("{why}")).map_err(failed)
}

/// The second process, on this host.
struct Follower {
    child: Child,
    /// The process ends when this is closed.
    _stdin: ChildStdin,
    address: SocketAddr,
}

impl Follower {
    fn start() -> Result<Follower, BenchError> {
        let failed =
            |error: io::Error| BenchError(format!("cannot start the second process: {error}"));
        let mut child = Command::new(std::env::current_exe().map_err(failed)?)
            .args(["bench", "transfer", "--listen", "127.0.0.1:0", "--until-eof"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let (Some(stdin), Some(stdout)) = (stdin, stdout) else { unreachable!("both are piped") };
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).map_err(failed)?;
        let address =
            line.trim().strip_prefix("listening on ").and_then(|address| address.parse().ok());
        let address = address.ok_or_else(|| {
            BenchError(format!("the second process did not report its address: {line:?}"))
        })?;
        Ok(Follower { child, _stdin: stdin, address })
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        // It can have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The survey of the process at `peer` and its address, if it is a `--listen` process.
fn meet(peer: &str) -> Result<(Survey, SocketAddr), BenchError> {
    let (survey, address) = Survey::ask(peer).map_err(|why| {
        BenchError(format!("no `baton bench transfer --listen` at {peer}: {why}"))
    })?;
    let (ours, theirs) = (env!("CARGO_PKG_VERSION"), &survey.version);
    if theirs != ours {
        return Err(BenchError(format!("{peer} runs baton {theirs:?}, this process is {ours}")));
    }
    Ok((survey, address))
}

/// The rows that both hosts can measure. A missing transport is reported once, not in every row.
fn measurable(
    plan: &BenchPlan,
    theirs: &Result<String, String>,
) -> Result<Vec<BenchRow>, BenchError> {
    const RDMA: &str = "rdma";
    let is_rdma = |row: &&BenchRow| row.transport == RDMA;
    if !plan.rows.iter().any(|row| is_rdma(&row)) {
        return Ok(plan.rows.clone());
    }
    let lack = match (Survey::here().nics, theirs) {
        (Err(why), _) => format!("no rdma here: {why}"),
        (Ok(_), Err(why)) => format!("no rdma there: {why}"),
        (Ok(_), Ok(_)) => return Ok(plan.rows.clone()),
    };
    let others: Vec<BenchRow> = plan.rows.iter().filter(|row| !is_rdma(row)).cloned().collect();
    if others.is_empty() {
        return Err(BenchError(lack));
    }
    eprintln!("rdma is left out: {lack}");
    Ok(others)
}

fn lead(plan: &BenchPlan, rows: &[BenchRow], peer: SocketAddr) -> Result<(), BenchError> {
    let unwritten =
        |path: &Path, error| BenchError(format!("--report {}: {error}", path.display()));
    if let Some(path) = &plan.report {
        // The check comes first, because the rows take minutes. An old report stays until the new
        // one is written.
        let opened = OpenOptions::new().append(true).create(true).open(path);
        opened.map_err(|error| unwritten(path, error))?;
    }
    for left_out in &plan.left_out {
        eprintln!("{left_out}");
    }
    let mut shown = Progress::new(rows.len());
    let (mut done, mut failures, mut uncounted) = (Vec::new(), 0, None);
    if !plan.json {
        let is_compared = rows.iter().any(|row| row.through_library);
        let heading = if is_compared { comparison::heading() } else { report::heading() };
        say!("{heading}");
    }
    for row in rows {
        shown.begin(row);
        let measured = Measured::new(peer, row, plan);
        shown.end();
        match measured {
            Ok(measured) => {
                measured.print(plan.json);
                match measured {
                    Measured::Limit(figures) => done.push(*figures),
                    Measured::Library(row) => {
                        uncounted = uncounted.or(row.uncounted().map(str::to_owned));
                    }
                }
            }
            Err(why) => {
                failures += 1;
                eprintln!("{} {} {}: {why}", row.case.name, row.layouts.name(), row.transport);
            }
        }
    }
    if let Some(why) = uncounted {
        eprintln!("system calls are not counted: {why}");
    }
    if !plan.json && done.iter().any(Figures::tells_wake_ups) {
        say!("{}", report::OF_WAKE_UPS);
    }
    if let Some(path) = plan.report.as_deref().filter(|_| !done.is_empty()) {
        std::fs::write(path, page::page(&done)).map_err(|error| unwritten(path, error))?;
    }
    if failures > 0 {
        return Err(BenchError(format!("{failures} of {} rows have no figures", rows.len())));
    }
    Ok(())
}

/// The figures of a row.
enum Measured {
    /// A hand-off and the bare limit.
    Limit(Box<Figures>),
    /// Both ways to a hand-off.
    Library(Box<Comparison>),
}

impl Measured {
    fn new(peer: SocketAddr, row: &BenchRow, plan: &BenchPlan) -> Result<Measured, String> {
        if row.through_library {
            let compared = comparison::compare(peer, row, plan.duration)?;
            return Ok(Measured::Library(Box::new(compared)));
        }
        let figures = Leading::new(peer, row)?.measure(plan.duration)?;
        Ok(Measured::Limit(Box::new(figures)))
    }

    fn print(&self, json: bool) {
        let (line, clock_error) = match self {
            Measured::Limit(figures) if json => (figures.json(), 0),
            Measured::Library(row) if json => (row.json(), 0),
            Measured::Limit(figures) => (figures.to_string(), figures.clock_error),
            Measured::Library(row) => (row.to_string(), row.clock_error),
        };
        say!("{line}");
        if clock_error > 0 {
            say!("{:<20} clock error at most {:.1} us", "", clock_error as f64 / 1e3);
        }
    }
}

/// The progress bar, shown on a terminal.
struct Progress {
    rows: usize,
    row: usize,
    is_terminal: bool,
}

impl Progress {
    fn new(rows: usize) -> Progress {
        Progress { rows, row: 0, is_terminal: io::stderr().is_terminal() }
    }

    fn begin(&mut self, row: &BenchRow) {
        const WIDTH: usize = 24;
        if self.is_terminal {
            let done = WIDTH * self.row / self.rows;
            let (bar, rest) = ("#".repeat(done), "-".repeat(WIDTH - done));
            let (case, layout) = (&row.case.name, row.layouts.name());
            eprint!(
                "\r[{bar}{rest}] {}/{} {case} {layout} {}\x1b[K",
                self.row + 1,
                self.rows,
                row.transport
            );
            // The result does not depend on the progress bar.
            let _ = io::stderr().flush();
        }
        self.row += 1;
    }

    fn end(&self) {
        if self.is_terminal {
            eprint!("\r\x1b[K");
        }
    }
}
