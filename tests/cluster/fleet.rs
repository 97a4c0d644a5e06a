//! Prefill workers, decode workers and a router, each a process.

use crate::process::{PATIENCE, Process};
use std::thread;
use std::time::{Duration, Instant};

pub struct Fleet {
    pub prefill: Vec<Process>,
    pub decode: Vec<Process>,
    pub router: Process,
}

impl Fleet {
    /// A router with these workers, once it has a pair.
    pub fn new(prefill: Vec<Process>, decode: Vec<Process>) -> Fleet {
        Fleet::with(prefill, decode, &[])
    }

    /// The same with these flags of the router.
    pub fn with(prefill: Vec<Process>, decode: Vec<Process>, flags: &[&str]) -> Fleet {
        let url = |worker: &Process| format!("http://{}", worker.address);
        let mut args: Vec<String> = ["router", "--port", "0"].map(String::from).into();
        for worker in &prefill {
            args.extend(["--prefill".into(), url(worker), worker.bootstrap_port.to_string()]);
        }
        for worker in &decode {
            args.extend(["--decode".into(), url(worker)]);
        }
        let args: Vec<&str> =
            args.iter().map(String::as_str).chain(flags.iter().copied()).collect();
        let fleet = Fleet { router: Process::start(&args), prefill, decode };
        let begun = Instant::now();
        while fleet.router.metric("smg_worker_health{", "") < fleet.workers().count() as f64 {
            assert!(begun.elapsed() < PATIENCE, "the router never sees all its workers");
            thread::sleep(Duration::from_millis(20));
        }
        fleet
    }

    pub fn workers(&self) -> impl Iterator<Item = &Process> {
        self.prefill.iter().chain(&self.decode)
    }

    /// Waits until nothing is left of any request, and checks that no thread has panicked.
    #[track_caller]
    pub fn check_idle(&mut self) {
        for worker in self.prefill.iter_mut().chain(&mut self.decode) {
            worker.await_idle();
            worker.check_alive();
        }
        self.router.check_alive();
    }
}
