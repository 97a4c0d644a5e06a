//! The threads `post-n` and `poll-n`: started, pinned, stopped. Not here: what they do ([`super::split`]).

use super::split::Split;
use crate::stdx::bell::Bell;
use crate::transfer::waiter::{Turns, Waiter};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

/// A thread that panics takes all sessions of its NIC with it, and leaves what they have under way to nobody.
struct EndsWithItsThread;

impl Drop for EndsWithItsThread {
    fn drop(&mut self) {
        if thread::panicking() {
            std::process::abort();
        }
    }
}

/// Threads of a worker's NICs, stopped and joined when dropped.
#[derive(Debug, Default)]
pub struct DataThreads {
    stop: Arc<AtomicBool>,
    bells: Vec<Arc<Bell>>,
    threads: Vec<JoinHandle<()>>,
}

impl DataThreads {
    /// Starts `post-n` and `poll-n`, with n counted on, on these CPUs where given.
    pub fn start(&mut self, split: Split, cpus: Option<[usize; 2]>) -> io::Result<()> {
        let number = self.threads.len() / 2;
        let Split { poster: (poster, posting), poller: (poller, polling), .. } = split;
        let [post, poll] = cpus.map_or([None; 2], |cpus| cpus.map(Some));
        self.spawn(format!("post-{number}"), poster, posting, post)?;
        self.spawn(format!("poll-{number}"), poller, polling, poll)
    }

    fn spawn(
        &mut self,
        name: String,
        mut turns: impl Turns + Send + 'static,
        waiter: Waiter,
        cpu: Option<usize>,
    ) -> io::Result<()> {
        let stop = self.stop.clone();
        self.bells.push(waiter.bell.clone());
        self.threads.push(thread::Builder::new().name(name).spawn(move || {
            if let Some(id) = cpu {
                core_affinity::set_for_current(core_affinity::CoreId { id });
            }
            let _ends = EndsWithItsThread;
            waiter.run(&mut turns, &stop);
        })?);
        Ok(())
    }
}

impl Drop for DataThreads {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.bells.iter().for_each(|bell| bell.ring());
        for thread in self.threads.drain(..) {
            // One that panicked has said so; sessions end without it.
            let _ = thread.join();
        }
    }
}
