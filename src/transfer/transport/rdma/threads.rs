//! Starts, pins and stops the threads `post-n` and `poll-n`. Not here: their work
//! ([`super::split`]).

use super::split::Split;
use crate::stdx::event_count::EventCount;
use crate::sys::{affinity, last_resort};
use crate::transfer::event_loop::{LoopTask, Waiter};
use crate::transfer::thread_names::{POLL, POST};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// A thread ends after its turn, which takes microseconds. Threads that are left after this many
/// milliseconds hang. They are counted one by one, so that a stopped process does not look like a
/// hanging thread.
const END_MAX_MS: u32 = 1000;

/// Without one of its threads, all sessions of a NIC are lost, and no thread owns their work in
/// flight.
struct EndsWithItsThread;

impl Drop for EndsWithItsThread {
    fn drop(&mut self) {
        if thread::panicking() {
            last_resort::end(format_args!("a thread that posts or polls has panicked"));
        }
    }
}

/// The threads of a worker's NICs, stopped and joined when dropped.
#[derive(Debug, Default)]
pub struct DataThreads {
    stop: Arc<AtomicBool>,
    is_guest: bool,
    bells: Vec<Arc<EventCount>>,
    threads: Vec<JoinHandle<()>>,
}

impl DataThreads {
    /// No threads yet, in the process of another program.
    pub fn of_guest() -> DataThreads {
        let mut threads = DataThreads::default();
        threads.is_guest = true;
        threads
    }

    /// Whether a thread has ended without being stopped.
    pub fn has_ended(&self) -> bool {
        self.threads.iter().any(JoinHandle::is_finished)
    }

    /// Starts the next `post-n` and `poll-n`, on these CPUs if given.
    pub fn start(&mut self, split: Split, cpus: Option<[usize; 2]>) -> io::Result<()> {
        let number = self.threads.len() / 2;
        let Split { poster: (poster, posting), poller: (poller, polling), .. } = split;
        let [post, poll] = cpus.map_or([None; 2], |cpus| cpus.map(Some));
        self.spawn(format!("{POST}-{number}"), poster, posting, post)?;
        self.spawn(format!("{POLL}-{number}"), poller, polling, poll)
    }

    fn spawn(
        &mut self,
        name: String,
        mut turns: impl LoopTask + Send + 'static,
        waiter: Waiter,
        cpu: Option<usize>,
    ) -> io::Result<()> {
        let (stop, is_guest) = (self.stop.clone(), self.is_guest);
        self.bells.push(waiter.bell.clone());
        self.threads.push(thread::Builder::new().name(name).spawn(move || {
            if let Some(cpu) = cpu {
                // Without the CPU, the thread runs on those of its starter.
                let _ = affinity::restrict(&[cpu]);
            }
            let mut run = || {
                let _ends = EndsWithItsThread;
                waiter.run(&mut turns, &stop);
            };
            if is_guest { last_resort::as_guest(run) } else { run() }
        })?);
        Ok(())
    }
}

impl Drop for DataThreads {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.bells.iter().for_each(|bell| bell.notify());
        let mut left_ms = END_MAX_MS;
        for thread in self.threads.drain(..) {
            // In a guest, a thread that hangs goes on alone. It keeps its sessions, so their memory
            // stays mapped.
            if self.is_guest && !ends_in_time(&thread, &mut left_ms) {
                continue;
            }
            // A thread that panicked has reported it; sessions end without it.
            let _ = thread.join();
        }
    }
}

/// Waits for the end of a stopped thread, within the time that is left. False: it hangs.
fn ends_in_time(thread: &JoinHandle<()>, left_ms: &mut u32) -> bool {
    while *left_ms > 0 && !thread.is_finished() {
        thread::sleep(Duration::from_millis(1));
        *left_ms -= 1;
    }
    thread.is_finished()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hang() {
        loop {
            thread::park();
        }
    }

    #[test]
    fn threads_that_hang_share_one_time() {
        let mut left_ms = 2;
        for _ in 0..3 {
            assert!(!ends_in_time(&thread::spawn(hang), &mut left_ms));
            assert_eq!(left_ms, 0);
        }
    }
}
