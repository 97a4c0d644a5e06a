//! What an engine asks of a worker, and what it lends to it for a turn.

use crate::ids::WorkerId;
use crate::kv::layout::KvLayout;
use crate::kv::region::Region;
use crate::model::forward::batch::Batch;
use crate::model::forward::{Forward, KvPool, StepEnd};
use crate::model::logprobs::Sampled;
use crate::model::sampler::{Context, Sampler};
use crate::sched::mail::Mail;
use crate::sched::mailbox::Command;
use crate::sched::request::Request;
use crate::stdx::planted::is_planted;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// When to step again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Activity {
    /// No request is left: at the next command.
    Idle,
    /// Requests wait for a transfer or their deadline: at its news or soon, whatever comes first.
    Waiting,
    /// Something was computed: at once.
    Busy,
}

/// One model replica in one role, stepped by an engine.
pub trait Worker: Send {
    /// Its name in commands.
    fn id(&self) -> WorkerId;

    /// Slots of its status table: most requests at a time.
    fn slots(&self) -> usize;

    /// Takes one command addressed to it.
    fn take(&mut self, command: Command, now: Instant, mail: &mut Mail);

    /// One turn: news of transfers, deadlines, admission, at most one prefill chunk and one decode step.
    fn step(&mut self, turn: &mut Turn<'_>) -> Activity;
}

/// A worker's KV pool in memory.
#[derive(Clone, Debug)]
pub struct KvMemory {
    /// The mapping.
    pub region: Arc<Region>,
    /// Where things lie in it.
    pub layout: KvLayout,
    /// Pages that fit.
    pub pages: u32,
}

impl KvMemory {
    /// For a forward step.
    pub fn pool(&self) -> KvPool<'_> {
        KvPool { region: &self.region, layout: &self.layout }
    }
}

/// The engine's parts, lent to each worker in turn.
pub struct Turn<'a> {
    /// When the engine's turn began.
    pub now: Instant,
    /// The model.
    pub forward: &'a mut dyn Forward,
    /// Room for one batch.
    pub batch: &'a mut Batch,
    /// Chooses tokens.
    pub sampler: &'a mut Sampler,
    /// To and from `ctl`.
    pub mail: &'a mut Mail,
    /// Time inside the turn.
    pub clock: &'a dyn Fn() -> Instant,
    /// Counts turns and layers.
    pub progress: &'a AtomicU64,
}

impl Turn<'_> {
    /// Runs the batch. What was told so far is heard before, and not when the pass is over: first tokens of prompts that
    /// have arrived, pages that wait for KV. Between layers commands are pulled, and the step stops when `gone`, which may
    /// take what need not wait, says that nobody wants its outcome any more.
    pub fn forward(&mut self, kv: KvPool<'_>, mut gone: impl FnMut(&mut Mail) -> bool) -> StepEnd {
        let Turn { forward, batch, mail, progress, .. } = self;
        mail.flush();
        forward.step(batch, kv, &mut |_layer| {
            progress.fetch_add(1, Ordering::Relaxed);
            mail.pull();
            if gone(mail) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
    }

    /// The next token of `request` from the `index`-th logits of the batch.
    pub fn sample(&mut self, index: usize, request: &Request) -> Sampled {
        let resumed =
            if is_planted("what was told counts as prompt") { 0 } else { request.resumed };
        let (prompt, resumed) = request.prompt.split_at(request.prompt.len() - resumed as usize);
        let context = Context { prompt, resumed, output: &request.output };
        let position = (request.prompt.len() + request.output.len()) as u32;
        let logits = self.forward.logits(index);
        self.sampler.sample(logits, &request.sampling, context, position, request.top_logprobs)
    }
}
