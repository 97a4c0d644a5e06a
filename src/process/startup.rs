//! Signals during the start, before the process serves.
//!
//! SIGTERM and SIGINT end the process at once with status 0, because no request runs. The kernel
//! ignores these signals for process 1 of a container without handlers. If SIGHUP reloads files of
//! certificates and keys later, it is ignored until then; the process notices changed files when it
//! serves.

use super::ProcessError;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The signal handlers during the start.
#[derive(Debug)]
pub struct StartupSignals {
    ends: Arc<AtomicBool>,
}

impl StartupSignals {
    /// Installs the handlers; `reloads` says whether SIGHUP will reload files.
    ///
    /// # Errors
    /// The system refuses a handler.
    pub fn install(reloads: bool) -> Result<StartupSignals, ProcessError> {
        let io = |error| ProcessError::Io("cannot handle signals", error);
        let ends = Arc::new(AtomicBool::new(true));
        for signal in [SIGTERM, SIGINT] {
            flag::register_conditional_shutdown(signal, 0, ends.clone()).map_err(io)?;
        }
        if reloads {
            flag::register(SIGHUP, Arc::new(AtomicBool::new(false))).map_err(io)?;
        }
        Ok(StartupSignals { ends })
    }

    /// Ends these handlers: from now on, the service handles the signals.
    pub fn finish(self) {
        self.ends.store(false, Ordering::SeqCst);
    }
}
