//! The thread that calls an engine's log callback, so that no thread of an agent waits for it.
//!
//! Owns: the lines that wait for the callback. Thread: `baton-log`, while there is a callback.
//! Invariants: at most [`LOG_LINES_MAX`] lines wait, and the log says how many were left out. The
//! level of a callback is set before its first line. When `set` returns, the former callback is not
//! called any more. Not here: levels and the text of a line (`obs::log`).

use super::guard::Failure;
use super::types::BatonError;
use crate::limits::{LOG_END_TIME, LOG_LINES_MAX};
use crate::obs::log::{self, LogConfig, LogFormat, LogLevel, LogSink, event};
use crate::sys::signal_mask;
use crossbeam_channel::{Receiver, bounded};
use std::ffi::{CStr, CString};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{self, Builder, JoinHandle};
use std::time::Instant;

/// A callback. It gets a line without its end.
pub(super) type Callback = Box<dyn Fn(LogLevel, &CStr) + Send>;

type LogLine = (LogLevel, CString);

/// A thread and its callback.
struct LogThread {
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

#[derive(Default)]
struct Shared {
    /// Lines that were left out since the log has said so.
    left_out: AtomicU64,
    /// From then on, lines that wait are left out. It is set when another callback follows.
    until: OnceLock<Instant>,
}

static THREAD: Mutex<Option<LogThread>> = Mutex::new(None);

/// Sends log lines of `level` and more severe ones to `callback`, or to standard error again. It
/// waits for the former callback: [`LOG_END_TIME`] for lines that wait, and for the call that runs.
///
/// # Errors
/// The former callback itself calls this, or there can be no thread.
pub(super) fn set(callback: Option<Callback>, level: LogLevel) -> Result<(), Failure> {
    let is_callback = thread::current().name() == Some(NAME);
    if is_callback {
        return Err(Failure::argument("a log callback cannot replace itself"));
    }
    let mut current = THREAD.lock().unwrap_or_else(PoisonError::into_inner);
    let (sink, next) = callback.map(start).transpose()?.unzip();
    let former = std::mem::replace(&mut *current, next);
    if let Some(former) = &former {
        let _ = former.shared.until.set(Instant::now() + LOG_END_TIME);
    }
    log::configure(LogConfig { level, format: LogFormat::Text });
    // The former thread ends when its lines have no sender any more.
    log::set_sink(sink);
    if let Some(LogThread { shared, thread }) = former {
        // A callback that has panicked has ended its own thread alone.
        let _ = thread.join();
        report_left_out(&shared);
    }
    Ok(())
}

const NAME: &str = "baton-log";

fn start(callback: Callback) -> Result<(LogSink, LogThread), Failure> {
    let (sender, lines) = bounded(LOG_LINES_MAX);
    let shared = Arc::<Shared>::default();
    let of_thread = Arc::clone(&shared);
    let run = move || pass_on(&lines, &of_thread, &callback);
    let thread = signal_mask::with_blocked(|| Builder::new().name(NAME.into()).spawn(run));
    let thread = thread.map_err(|error| Failure::new(BatonError::System, error.to_string()))?;
    let of_sink = Arc::clone(&shared);
    let sink = move |level, line: &str| {
        // A line has no zero byte: the log escapes it.
        let Ok(line) = CString::new(line) else { return };
        if sender.try_send((level, line)).is_err() {
            of_sink.left_out.fetch_add(1, Ordering::Relaxed);
        }
    };
    Ok((Box::new(sink), LogThread { shared, thread }))
}

fn pass_on(lines: &Receiver<LogLine>, shared: &Shared, callback: &Callback) {
    for (level, line) in lines {
        if shared.until.get().is_some_and(|until| Instant::now() > *until) {
            shared.left_out.fetch_add(1, Ordering::Relaxed);
            continue;
        }
        callback(level, &line);
        // There is room for the line that says so.
        if lines.len() < LOG_LINES_MAX / 2 {
            report_left_out(shared);
        }
    }
}

fn report_left_out(shared: &Shared) {
    let count = shared.left_out.swap(0, Ordering::Relaxed);
    if count > 0 {
        event!(Warn, "log", "lines were left out", count = count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{MutexGuard, mpsc};
    use std::time::Duration;

    const PATIENCE: Duration = Duration::from_secs(30);

    /// The log belongs to the process, so one test at a time uses it.
    fn take_log() -> MutexGuard<'static, ()> {
        static LOG: Mutex<()> = Mutex::new(());
        LOG.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A callback that passes the lines of these tests on, and the lines.
    fn collect() -> (Callback, mpsc::Receiver<String>) {
        let (seen, lines) = mpsc::channel();
        let callback = move |_, line: &CStr| {
            let line = line.to_str().unwrap().to_owned();
            if line.contains(" test ") || line.contains(" log ") {
                let _ = seen.send(line);
            }
        };
        (Box::new(callback), lines)
    }

    /// Waits for the end of a callback, and returns its lines.
    fn all(lines: mpsc::Receiver<String>) -> Vec<String> {
        lines.iter().collect()
    }

    fn next(lines: &mpsc::Receiver<String>) -> String {
        lines.recv_timeout(PATIENCE).expect("a line comes")
    }

    /// A callback that waits until the sender is dropped, then passes its lines on.
    fn collect_later() -> (Callback, mpsc::Sender<()>, mpsc::Receiver<String>) {
        let (go, gate) = mpsc::channel::<()>();
        let (pass, lines) = collect();
        let callback = move |level, line: &CStr| {
            let _ = gate.recv();
            pass(level, line);
        };
        (Box::new(callback), go, lines)
    }

    #[test]
    fn a_callback_that_waits_holds_no_caller_and_loses_lines_that_are_too_many() {
        let _log = take_log();
        let (callback, go, lines) = collect_later();
        set(Some(callback), LogLevel::Info).unwrap();
        for number in 0..LOG_LINES_MAX + 3 {
            event!(Info, "test", "a line", number = number);
        }
        drop(go);
        let mut shown = 0;
        let report = loop {
            match next(&lines) {
                line if line.contains("test a line") => shown += 1,
                report => break report,
            }
        };
        // The thread has taken one line, or none, when the others come.
        let left_out = LOG_LINES_MAX + 3 - shown;
        assert!(matches!(left_out, 2 | 3), "{left_out}");
        let text = format!("Z WARN  log lines were left out count={left_out}");
        assert!(report.ends_with(&text), "{report}");
        set(None, LogLevel::Info).unwrap();
        assert_eq!(all(lines), [""; 0]);
    }

    #[test]
    fn each_callback_gets_the_lines_of_its_level_until_another_one_follows() {
        let _log = take_log();
        let (callback, first) = collect();
        set(Some(callback), LogLevel::Debug).unwrap();
        event!(Debug, "test", "one");
        let (callback, second) = collect();
        set(Some(callback), LogLevel::Warn).unwrap();
        event!(Info, "test", "two");
        event!(Warn, "test", "three");
        set(None, LogLevel::Error).unwrap();
        event!(Error, "test", "four");
        let is_one = |lines: Vec<String>, end: &str| lines.len() == 1 && lines[0].ends_with(end);
        assert!(is_one(all(first), "DEBUG test one"));
        assert!(is_one(all(second), "WARN  test three"));
    }

    #[test]
    fn a_callback_has_its_level_while_the_former_one_still_runs() {
        let _log = take_log();
        let (callback, go, _held) = collect_later();
        set(Some(callback), LogLevel::Debug).unwrap();
        event!(Debug, "test", "held");
        let (callback, lines) = collect();
        let following = thread::spawn(move || set(Some(callback), LogLevel::Error).unwrap());
        // It waits for the call of the former callback.
        let until = Instant::now() + PATIENCE;
        while lines.try_recv().is_err() {
            assert!(Instant::now() < until, "no line");
            event!(Error, "test", "first");
            thread::sleep(Duration::from_millis(1));
        }
        event!(Debug, "test", "of the former level");
        drop(go);
        following.join().unwrap();
        set(None, LogLevel::Error).unwrap();
        assert!(all(lines).iter().all(|line| line.ends_with("ERROR test first")));
    }

    #[test]
    fn a_slow_callback_holds_up_its_successor_for_a_short_time_only() {
        const CALL: Duration = Duration::from_millis(20);
        let _log = take_log();
        let (pass, former) = collect();
        let slow = move |level, line: &CStr| {
            thread::sleep(CALL);
            pass(level, line);
        };
        set(Some(Box::new(slow)), LogLevel::Info).unwrap();
        for _ in 0..LOG_LINES_MAX {
            event!(Info, "test", "a line");
        }
        let (callback, lines) = collect();
        set(Some(callback), LogLevel::Info).unwrap();
        let left_out = LOG_LINES_MAX - all(former).len();
        let text = format!("WARN  log lines were left out count={left_out}");
        let report = next(&lines);
        assert!(left_out > 0 && report.ends_with(&text), "{left_out}: {report}");
        set(None, LogLevel::Info).unwrap();
    }

    #[test]
    fn a_callback_cannot_replace_itself() {
        let _log = take_log();
        let (told, results) = mpsc::channel();
        let callback = move |_, _: &CStr| {
            let result = set(None, LogLevel::Info).map_err(|failure| failure.text);
            told.send(result).unwrap();
        };
        set(Some(Box::new(callback)), LogLevel::Info).unwrap();
        event!(Info, "test", "a line");
        let result = results.recv_timeout(PATIENCE).unwrap();
        assert_eq!(result, Err("a log callback cannot replace itself".to_owned()));
        set(None, LogLevel::Info).unwrap();
    }
}
