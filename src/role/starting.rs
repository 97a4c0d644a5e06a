//! A process that does not serve yet: SIGTERM and SIGINT end it at once with status 0, since nothing runs that
//! could be finished. A handler is needed for that where it is process 1 of a container. SIGHUP does not end one that will
//! read files of certificates and keys again; those that change meanwhile are found once it serves.

use super::RoleError;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// From the first step of a start to the last.
#[derive(Debug)]
pub struct Starting {
    ends: Arc<AtomicBool>,
}

impl Starting {
    /// From now on; `reloads` where SIGHUP will have files read again.
    ///
    /// # Errors
    /// The system takes no handler.
    pub fn begin(reloads: bool) -> Result<Starting, RoleError> {
        let io = |error| RoleError::Io("cannot handle signals", error);
        let ends = Arc::new(AtomicBool::new(true));
        for signal in [SIGTERM, SIGINT] {
            flag::register_conditional_shutdown(signal, 0, ends.clone()).map_err(io)?;
        }
        if reloads {
            flag::register(SIGHUP, Arc::new(AtomicBool::new(false))).map_err(io)?;
        }
        Ok(Starting { ends })
    }

    /// Whoever serves now hears of signals.
    pub fn over(self) {
        self.ends.store(false, Ordering::SeqCst);
    }
}
