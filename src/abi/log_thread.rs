//! The thread that calls an engine's log callback, so that no thread of an agent waits for it.
//!
//! Owns: the lines that wait for the callback. Thread: `baton-log`, while there is a callback.
//! Invariants: at most [`LOG_LINES_MAX`] lines wait, and the log says how many were left out. When
//! `set` returns, the former callback is not called any more. Not here: levels and the text of a
//! line (`obs::log`).

use super::guard::Failure;
use super::types::BatonError;
use crate::limits::LOG_LINES_MAX;
use crate::obs::log::{self, LogLevel, LogSink};
use crate::sys::signal_mask;
use crossbeam_channel::{Receiver, Sender, bounded};
use std::ffi::{CStr, CString};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, Builder, JoinHandle};

/// A callback. It gets a line without its end.
pub(super) type Callback = Box<dyn Fn(LogLevel, &CStr) + Send>;

static THREAD: Mutex<Option<JoinHandle<()>>> = Mutex::new(None);

/// Sends log lines to `callback`, or to standard error again. It waits for calls of the former one.
///
/// # Errors
/// The former callback itself calls this, or there can be no thread.
pub(super) fn set(callback: Option<Callback>) -> Result<(), Failure> {
    let is_callback = thread::current().name() == Some(NAME);
    if is_callback {
        return Err(Failure::argument("a log callback cannot replace itself"));
    }
    let mut current = THREAD.lock().unwrap_or_else(PoisonError::into_inner);
    let (sink, next) = match callback {
        Some(callback) => {
            let (sink, thread) = start(callback)?;
            (Some(sink), Some(thread))
        }
        None => (None, None),
    };
    // The former thread ends when its lines have no sender any more.
    log::set_sink(sink);
    if let Some(former) = std::mem::replace(&mut *current, next) {
        // A callback that has panicked has ended its own thread alone.
        let _ = former.join();
    }
    Ok(())
}

const NAME: &str = "baton-log";

fn start(callback: Callback) -> Result<(LogSink, JoinHandle<()>), Failure> {
    let (sender, lines) = bounded(LOG_LINES_MAX);
    let left_out = Arc::new(AtomicU64::new(0));
    let counted = left_out.clone();
    let run = move || pass_on(&lines, &counted, &callback);
    let thread = signal_mask::with_blocked(|| Builder::new().name(NAME.into()).spawn(run));
    let thread = thread.map_err(|error| Failure::new(BatonError::System, error.to_string()))?;
    let sink = move |level, line: &str| send(&sender, &left_out, level, line);
    Ok((Box::new(sink), thread))
}

fn send(sender: &Sender<(LogLevel, CString)>, left_out: &AtomicU64, level: LogLevel, line: &str) {
    // A line has no zero byte: the log escapes it.
    let Ok(line) = CString::new(line) else { return };
    if sender.try_send((level, line)).is_err() {
        left_out.fetch_add(1, Ordering::Relaxed);
    }
}

fn pass_on(lines: &Receiver<(LogLevel, CString)>, left_out: &AtomicU64, callback: &Callback) {
    for (level, line) in lines {
        callback(level, &line);
        let count = left_out.swap(0, Ordering::Relaxed);
        if count > 0
            && let Ok(text) = CString::new(format!("the log callback is slow: {count} lines less"))
        {
            callback(LogLevel::Warn, &text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn a_callback_that_waits_holds_no_caller_and_loses_lines_that_are_too_many() {
        let (go, gate) = channel::<()>();
        let (seen, lines) = channel();
        let callback: Callback = Box::new(move |_, line| {
            let _ = gate.recv();
            seen.send(line.to_str().unwrap().to_owned()).unwrap();
        });
        let (sink, thread) = start(callback).unwrap();
        for number in 0..LOG_LINES_MAX + 3 {
            sink(LogLevel::Info, &number.to_string());
        }
        drop((sink, go));
        thread.join().unwrap();
        let lines: Vec<String> = lines.iter().collect();
        // The thread has taken one line, or none, when the others come.
        let left_out = LOG_LINES_MAX + 4 - lines.len();
        assert!(matches!(left_out, 2 | 3), "{left_out}");
        assert_eq!(lines[0], "0");
        assert_eq!(lines[1], format!("the log callback is slow: {left_out} lines less"));
    }
}
