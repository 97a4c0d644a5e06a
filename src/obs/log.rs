//! One line per event on standard error: UTC time, level, component, message, then fields.
//!
//! Thread: any unsealed one. Each thread formats in its own buffer and writes one line at a time.
//! Invariants: the message is a literal; variable parts stand in fields. Values come from outside,
//! so they are escaped and cannot end a line. The fields `request` and `room` name a request. The
//! simulator runs many processes in one thread, so it says which one logs, and at which time.

use crate::stdx::date::civil_date;
use crate::sys::clock;
use std::cell::{Cell, RefCell};
use std::fmt::{Display, Write as _};
use std::io::Write as _;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

/// Log settings of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serve", derive(serde::Serialize))]
pub struct LogConfig {
    /// Minimum level of logged events.
    pub level: LogLevel,
    /// Format of a log line.
    pub format: LogFormat,
}

/// Level of a log event, most severe first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
#[cfg_attr(feature = "serve", derive(serde::Serialize, clap::ValueEnum))]
#[cfg_attr(feature = "serve", serde(rename_all = "lowercase"))]
#[repr(u8)]
pub enum LogLevel {
    /// A failure that should not happen.
    Error,
    /// A problem that the process can tolerate.
    Warn,
    /// Normal events of interest to an operator.
    #[default]
    Info,
    /// More detail, such as the steps of each request in the router.
    Debug,
    /// Same as debug; no event has this level.
    Trace,
}

#[cfg(feature = "serve")]
impl std::str::FromStr for LogLevel {
    type Err = String;

    fn from_str(name: &str) -> Result<LogLevel, String> {
        <LogLevel as clap::ValueEnum>::from_str(name, true)
    }
}

/// Format of a log line.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serve", derive(serde::Serialize, clap::ValueEnum))]
#[cfg_attr(feature = "serve", serde(rename_all = "lowercase"))]
#[repr(u8)]
pub enum LogFormat {
    /// Text for people: `TIME LEVEL component message key=value`.
    #[default]
    Text,
    /// One JSON object on each line.
    Json,
}

static LEVEL: AtomicU8 = AtomicU8::new(LogLevel::Info as u8);
static FORMAT: AtomicU8 = AtomicU8::new(LogFormat::Text as u8);

/// A field of an event: its key (a literal of letters and underscores) and its value.
pub type Field<'a> = (&'static str, &'a dyn Display);

/// Logs an event: `event!(Level, "component", "message", key = value, ...)`. Values are formatted
/// with `Display`, and evaluated only if the level is logged.
#[macro_export]
macro_rules! event {
    ($level:ident, $component:expr, $message:literal $(, $key:ident = $value:expr)* $(,)?) => {
        if $crate::obs::log::is_logged($crate::obs::log::LogLevel::$level) {
            $crate::obs::log::write(
                $crate::obs::log::LogLevel::$level,
                $component,
                $message,
                &[$((stringify!($key), &$value)),*],
            );
        }
    };
}
pub use crate::event;

/// Sets level and format of the log for the whole process. Called at start.
pub fn configure(config: LogConfig) {
    LEVEL.store(config.level as u8, Ordering::Relaxed);
    FORMAT.store(config.format as u8, Ordering::Relaxed);
}

/// Takes log lines in place of standard error.
pub type LogSink = Box<dyn Fn(LogLevel, &str) + Send + Sync>;

static SINK: RwLock<Option<LogSink>> = RwLock::new(None);

/// Sends log lines, without their line ends, to `sink`, or to standard error again.
pub fn set_sink(sink: Option<LogSink>) {
    *SINK.write().unwrap_or_else(PoisonError::into_inner) = sink;
}

/// A simulated process that logs.
#[derive(Clone, Copy, Debug)]
pub struct SimulatedSource {
    /// Time since the start of the run. The log shows it as a time of 1970.
    pub since_epoch: Duration,
    /// The number of its host.
    pub host: usize,
}

thread_local! {
    static SOURCE: Cell<Option<SimulatedSource>> = const { Cell::new(None) };
}

/// Events of this thread come from a simulated process from now on, or no longer.
pub fn set_source(source: Option<SimulatedSource>) {
    SOURCE.set(source);
}

/// Whether events of this level are logged.
#[inline]
pub fn is_logged(level: LogLevel) -> bool {
    level as u8 <= LEVEL.load(Ordering::Relaxed)
}

/// Writes an event of any level. [`event!`] checks the level first.
pub fn write(level: LogLevel, component: &str, message: &str, fields: &[Field]) {
    thread_local! {
        static LINE: RefCell<String> = const { RefCell::new(String::new()) };
    }
    let is_json = FORMAT.load(Ordering::Relaxed) == LogFormat::Json as u8;
    let format = if is_json { LogFormat::Json } else { LogFormat::Text };
    let source = SOURCE.get();
    let since_epoch = source.map_or_else(clock::since_epoch, |source| source.since_epoch);
    let put = |line: &mut String| {
        line.clear();
        if let Some(SimulatedSource { host, .. }) = source {
            let _ = write!(line, "host {host}: ");
        }
        format_line(line, format, since_epoch, level, component, message, fields);
        match &*SINK.read().unwrap_or_else(PoisonError::into_inner) {
            Some(sink) => sink(level, line.trim_end_matches('\n')),
            // If standard error is gone, the error cannot be reported anywhere.
            None => _ = std::io::stderr().lock().write_all(line.as_bytes()),
        }
    };
    // If the Display of a field logs, the buffer is already borrowed; that inner event is dropped.
    let written = LINE.try_with(|line| line.try_borrow_mut().map(|mut line| put(&mut line)));
    // A thread that ends has no buffer any more when its last destructors run.
    if written.is_err() {
        put(&mut String::new());
    }
}

fn format_line(
    line: &mut String,
    format: LogFormat,
    since_epoch: Duration,
    level: LogLevel,
    component: &str,
    message: &str,
    fields: &[Field],
) {
    match format {
        LogFormat::Text => {
            format_time(line, since_epoch);
            let _ = write!(line, " {:5} {component} {message}", upper(level));
            for (key, value) in fields {
                let _ = write!(line, " {key}=");
                push_text(line, value);
            }
        }
        LogFormat::Json => {
            line.push_str("{\"time\":\"");
            format_time(line, since_epoch);
            let _ = write!(line, "\",\"level\":\"{}\"", upper(level).to_ascii_lowercase());
            let head: [Field; 2] = [("component", &component), ("message", &message)];
            for (key, value) in head.iter().chain(fields) {
                let _ = write!(line, ",\"{key}\":");
                push_json(line, value);
            }
            line.push('}');
        }
    }
    line.push('\n');
}

const fn upper(level: LogLevel) -> &'static str {
    match level {
        LogLevel::Error => "ERROR",
        LogLevel::Warn => "WARN",
        LogLevel::Info => "INFO",
        LogLevel::Debug => "DEBUG",
        LogLevel::Trace => "TRACE",
    }
}

/// A value of one plain word stays bare. Any other value is quoted and escaped.
fn push_text(line: &mut String, value: &dyn Display) {
    let start = line.len();
    let _ = write!(line, "{value}");
    let is_bare = |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'=' | b'\\');
    let shown = &line[start..];
    if shown.is_empty() || !shown.bytes().all(is_bare) {
        let quoted = format!("{shown:?}");
        line.truncate(start);
        line.push_str(&quoted);
    }
}

/// Always writes a string: a room has 63 bits, but JSON numbers carry 53 in practice.
fn push_json(line: &mut String, value: &dyn Display) {
    let shown = value.to_string();
    line.push_str(&serde_json::to_string(&shown).expect("a string is valid JSON"));
}

/// `2026-11-21T11:38:02.123456Z`.
fn format_time(line: &mut String, since_epoch: Duration) {
    let seconds = since_epoch.as_secs();
    let (year, month, day) = civil_date(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let micros = since_epoch.subsec_micros();
    let _ = write!(
        line,
        "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(format: LogFormat, fields: &[Field]) -> String {
        let mut line = String::new();
        let time = Duration::new(1_795_261_082, 123_456_789);
        format_line(&mut line, format, time, LogLevel::Warn, "control", "peer lost", fields);
        line
    }

    #[test]
    fn a_line_for_people() {
        assert_eq!(
            line(
                LogFormat::Text,
                &[("room", &u64::MAX), ("cause", &"reset by peer"), ("peer", &"10.0.0.1:9")]
            ),
            "2026-11-21T11:38:02.123456Z WARN  control peer lost room=18446744073709551615 \
             cause=\"reset by peer\" peer=10.0.0.1:9\n"
        );
    }

    #[test]
    fn a_line_for_machines() {
        let line = line(LogFormat::Json, &[("room", &7), ("cause", &"a \"b\"\n")]);
        assert!(line.ends_with("}\n") && line.matches('\n').count() == 1, "{line}");
        let value: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(
            value,
            serde_json::json!({
                "time": "2026-11-21T11:38:02.123456Z", "level": "warn", "component": "control",
                "message": "peer lost", "room": "7", "cause": "a \"b\"\n",
            })
        );
    }

    #[test]
    fn no_value_ends_a_line_or_forges_a_field() {
        let forged = "x\n2026 INFO fake level=ERROR";
        let shown =
            line(LogFormat::Text, &[("id", &forged), ("empty", &""), ("bell", &"\u{7}\u{1b}[2J")]);
        assert_eq!(shown.matches('\n').count(), 1, "{shown}");
        assert!(
            shown.contains(r#"id="x\n2026 INFO fake level=ERROR" empty="" bell="\u{7}\u{1b}[2J""#),
            "{shown}"
        );
    }

    #[test]
    fn levels_are_a_threshold_and_values_of_silent_events_are_not_computed() {
        configure(LogConfig { level: LogLevel::Warn, format: LogFormat::Text });
        assert!(is_logged(LogLevel::Error) && is_logged(LogLevel::Warn));
        assert!(!is_logged(LogLevel::Info));
        fn computed() -> u32 {
            panic!("computed")
        }
        event!(Debug, "test", "never shown", value = computed());
    }
}
