//! The helpers of `ctl`: the tokeniser and the resolver of names. In production
//! they are threads. The simulator steps them.

use super::cpu_plan::CpuPlan;
use super::thread_cpus::start_on;
use crate::limits::TOKENISE_QUEUE_MAX;
use crate::net::resolver::Resolver;
use crate::stdx::event_count::EventCount;
use crate::worker::text::{TextProcessor, TextQueue};
use std::io;
use std::sync::Arc;

/// Starts the helpers of a process. Each answer notifies `ctl`.
pub trait Helpers {
    /// Starts a resolver of names.
    ///
    /// # Errors
    /// Its threads cannot be started.
    fn start_resolver(&self, ctl: Arc<EventCount>) -> io::Result<Resolver>;

    /// Starts the tokeniser.
    ///
    /// # Errors
    /// Its threads cannot be started.
    fn start_tokeniser(
        &self,
        text: Arc<TextProcessor>,
        ctl: Arc<EventCount>,
    ) -> io::Result<TextQueue>;
}

/// Helpers that are threads, on the CPUs of a plan.
pub struct HelperThreads(pub CpuPlan);

impl Helpers for HelperThreads {
    fn start_resolver(&self, ctl: Arc<EventCount>) -> io::Result<Resolver> {
        start_on(&self.0, &self.0.text, || Resolver::start(move || ctl.notify()))
    }

    fn start_tokeniser(
        &self,
        text: Arc<TextProcessor>,
        ctl: Arc<EventCount>,
    ) -> io::Result<TextQueue> {
        start_on(&self.0, &self.0.text, || TextQueue::start(text, TOKENISE_QUEUE_MAX, ctl))
    }
}
