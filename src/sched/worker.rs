//! The interface between an engine and its workers, and the resources that the engine lends a
//! worker for a turn.

use crate::ids::{Generation, SlotId, WorkerId};
use crate::kv::groups::KvGroups;
use crate::kv::layout::KvLayout;
use crate::kv::page_span::PageSpan;
use crate::kv::pool::PagePool;
use crate::kv::region::Region;
use crate::model::forward::batch::Batch;
use crate::model::forward::{Forward, KvPool, StepEnd};
use crate::model::logprobs::{Sampled, ScoredToken};
use crate::model::sampler::{Sampler, TokenHistory, TokenLimits};
use crate::sched::channel::EngineChannel;
use crate::sched::masks::{NextMask, RequestGrammar};
use crate::sched::messages::EngineCommand;
use crate::sched::request::EngineRequest;
use crate::stdx::failpoint::is_failpoint_active;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

/// When to step again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Activity {
    /// No request is left: step at the next command.
    Idle,
    /// Requests wait for a transfer or their deadline: step at the next event, but soon in any
    /// case.
    Waiting,
    /// Something was computed: step at once.
    Busy,
}

/// One model replica in one role, stepped by an engine.
pub trait Worker: Send {
    /// Its id in commands.
    fn id(&self) -> WorkerId;

    /// Slots of its status table: most requests at a time.
    fn slots(&self) -> usize;

    /// Its KV pages.
    fn pool(&self) -> &PagePool;

    /// Whether this use of a slot has a lease at the mover, for checks. A mixed worker has none.
    fn has_lease(&self, _slot: SlotId, _generation: Generation) -> bool {
        false
    }

    /// The pages into which transfers write, for checks. Only a decode worker has such pages.
    fn write_leases(&self) -> Vec<WriteLease<'_>> {
        Vec::new()
    }

    /// Handles one command addressed to it.
    fn handle_command(&mut self, command: EngineCommand, now: Instant, channel: &mut EngineChannel);

    /// One turn: checks transfers and deadlines, admits requests, and runs at most one prefill
    /// chunk and one decode step.
    fn step(&mut self, turn: &mut TurnContext<'_>) -> Activity;
}

/// The pages that a transfer writes, as the scheduler knows them.
#[derive(Clone, Debug)]
pub struct WriteLease<'a> {
    /// The slot of the request.
    pub slot: SlotId,
    /// Its generation.
    pub generation: Generation,
    /// The prompt. The transfer brings its KV.
    pub prompt: &'a [u32],
    /// The leased pages, by group of layers. They are the last ones of the prompt.
    pub pages: Vec<PageSpan<'a>>,
}

/// The memory of a worker's KV pool.
#[derive(Clone, Debug)]
pub struct KvMemory {
    /// The mapping.
    pub region: Arc<Region>,
    /// The layout of the memory.
    pub layout: KvLayout,
    /// The places of the layers.
    pub groups: KvGroups,
    /// Number of pages that fit.
    pub pages: u32,
}

impl KvMemory {
    /// A view for a forward step.
    pub fn pool(&self) -> KvPool<'_> {
        KvPool { region: &self.region, layout: &self.layout, groups: &self.groups }
    }
}

/// The engine's resources, lent to each worker in turn.
pub struct TurnContext<'a> {
    /// Start of the engine's turn.
    pub now: Instant,
    /// The model.
    pub forward: &'a mut dyn Forward,
    /// Room for one batch.
    pub batch: &'a mut Batch,
    /// Chooses tokens.
    pub sampler: &'a mut Sampler,
    /// Commands and events, from and to `ctl`.
    pub channel: &'a mut EngineChannel,
    /// The time inside the turn.
    pub clock: &'a dyn Fn() -> Instant,
    /// Counts turns and layers.
    pub progress: &'a AtomicU64,
}

impl TurnContext<'_> {
    /// Runs the batch. Before the pass, it wakes `ctl` for the events sent so far (first tokens of
    /// arrived prompts, leased pages). Between layers it pulls commands, and stops the step if
    /// `gone` returns true, because then no request needs the result. `gone` can also take commands
    /// early.
    pub fn forward(
        &mut self,
        kv: KvPool<'_>,
        mut gone: impl FnMut(&mut EngineChannel) -> bool,
    ) -> StepEnd {
        let TurnContext { forward, batch, channel, progress, .. } = self;
        channel.flush();
        forward.step(batch, kv, &mut |_layer| {
            progress.fetch_add(1, Ordering::Relaxed);
            channel.pull_commands();
            if gone(channel) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
    }

    /// The first token of `request` from the `index`-th logits of the batch.
    pub fn sample_first(&mut self, index: usize, request: &EngineRequest) -> Sampled {
        debug_assert!(request.output.is_empty(), "the request has its first token");
        self.sample(index, request, request.grammar.as_ref().map(RequestGrammar::first_mask))
    }

    /// A later token of `request` from the `index`-th logits of the batch.
    ///
    /// # Errors
    /// Its mask is not there.
    pub fn sample_next(
        &mut self,
        index: usize,
        request: &EngineRequest,
    ) -> Result<Sampled, NoToken> {
        debug_assert!(!request.output.is_empty(), "the first token has its own mask");
        let Some(grammar) = &request.grammar else {
            return Ok(self.sample(index, request, None));
        };
        match grammar.next_mask(request.output.len()) {
            NextMask::Ready(mask) => Ok(self.sample(index, request, Some(mask))),
            NextMask::Late => Err(NoToken::MaskIsLate),
            NextMask::Failed => Err(NoToken::GrammarFailed),
        }
    }

    /// The logprob of a prompt's token from the `index`-th logits of the batch.
    pub fn score(&mut self, index: usize, token: u32, top: usize) -> ScoredToken {
        self.sampler.score(self.forward.logits(index), token, top)
    }

    fn sample(
        &mut self,
        index: usize,
        request: &EngineRequest,
        mask: Option<&[AtomicU32]>,
    ) -> Sampled {
        let resumed =
            if is_failpoint_active("resumed tokens count as prompt") { 0 } else { request.resumed };
        let (prompt, resumed) = request.prompt.split_at(request.prompt.len() - resumed as usize);
        let context = TokenHistory { prompt, resumed, output: &request.output };
        let position = (request.prompt.len() + request.output.len()) as u32;
        let (logits, params, top) =
            (self.forward.logits(index), &request.sampling, request.top_logprobs);
        let limits = TokenLimits { mask, rules: request.rules.as_deref() };
        self.sampler.sample(logits, limits, params, context, position, top)
    }
}

/// Why a step has no token for a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoToken {
    /// The mask of its grammar is not computed yet.
    MaskIsLate,
    /// Its grammar needs more work or memory than allowed.
    GrammarFailed,
}
