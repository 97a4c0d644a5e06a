//! Masks of requests with a grammar: which tokens each can generate next.
//!
//! Owns: the table of masks, the ring of commands to the thread `masks`, the states of grammars
//! there.
//! Threads: `ctl` begins and ends requests; `engine` reads a mask, then reports the token that it
//! has chosen; `masks` computes the next mask while the model runs.
//! Invariants: a mask is written between the report of a token and its publication, and read
//! between its publication and the next report. So no mask is read and written at the same time.
//! The ring always has room for the report and the end of each request. The engine neither waits
//! nor allocates: a request with a late mask stays out of a step.
//! Not here: grammars (`model::grammar`), the choice of a token (`model::sampler`).

use crate::ids::{RequestId, SlotId, WorkerId};
use crate::model::grammar::GrammarState;
use crate::obs::buckets::MASK_SECONDS;
use crate::obs::instruments::{Counter, Histogram, Labels};
use crate::obs::registry::Registry;
use crate::stdx::event_count::EventCount;
use crate::stdx::failpoint::is_failpoint_active;
use crate::sys::clock::Clock;
use crossbeam_channel::{Receiver, Sender, TrySendError};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread;

/// The grammar of a request at the engine. `ctl` makes it and drops it.
#[derive(Debug)]
pub struct RequestGrammar {
    first: Box<[AtomicU32]>,
    /// `None`: the request gets one token only.
    rest: Option<MaskPlace>,
    /// Whether the mask of its next token was not there when a step ended.
    is_late: bool,
}

/// The place of a request in the table.
#[derive(Debug)]
struct MaskPlace {
    client: MaskClient,
    index: u32,
    request: RequestId,
}

impl Drop for MaskPlace {
    fn drop(&mut self) {
        self.client.send(MaskCommand::End(self.index));
    }
}

impl RequestGrammar {
    /// The grammar of a request that gets one token only.
    pub fn of_one_token(first: &[u32]) -> RequestGrammar {
        let first = first.iter().map(|&word| AtomicU32::new(word)).collect();
        RequestGrammar { first, rest: None, is_late: false }
    }

    /// The mask of the first token. It comes with the request, so it is never late.
    pub fn first_mask(&self) -> &[AtomicU32] {
        &self.first
    }

    /// The mask of the token behind `tokens` others, at least one.
    pub fn next_mask(&self, tokens: usize) -> NextMask<'_> {
        let Some(MaskPlace { client, index, request }) = &self.rest else {
            debug_assert!(false, "a request of one token gets another");
            return NextMask::Failed;
        };
        let table = &client.table;
        let published = table.published[*index as usize].load(Ordering::Acquire);
        let is_for = |mark| published == request.0 << 32 | mark;
        if is_for(mark_of(tokens, false)) {
            NextMask::Ready(table.mask(*index))
        } else if is_for(mark_of(tokens, true)) {
            NextMask::Failed
        } else if is_failpoint_active("late mask is used") {
            NextMask::Ready(table.mask(*index))
        } else {
            NextMask::Late
        }
    }

    /// A step has ended without the mask of the next token.
    pub fn note_late(&mut self) {
        self.is_late = true;
        if let Some(MaskPlace { client, .. }) = &self.rest {
            client.table.metrics.late.inc();
        }
    }

    /// Whether the mask of the token behind `tokens` others was late in a step before, and still
    /// is.
    pub fn is_still_late(&self, tokens: usize) -> bool {
        self.is_late && matches!(self.next_mask(tokens), NextMask::Late)
    }

    /// Reports the next token, so that the mask behind it is computed.
    pub fn report(&mut self, token: u32) {
        self.is_late = false;
        if let Some(MaskPlace { client, index, .. }) = &self.rest {
            client.send(MaskCommand::Token(*index, token));
        }
    }
}

/// A mask for a token behind the first one.
#[derive(Debug)]
pub enum NextMask<'a> {
    /// It is there: bit `id % 32` of word `id / 32`.
    Ready(&'a [AtomicU32]),
    /// It is not computed yet.
    Late,
    /// The grammar needs more work or memory than allowed.
    Failed,
}

/// How long masks take, and how often a step did not wait for one.
#[derive(Debug)]
pub struct MaskMetrics {
    seconds: Arc<Histogram>,
    late: Arc<Counter>,
}

impl MaskMetrics {
    /// Registers them. All workers of a process share them, so they have no labels.
    pub fn register(r: &mut Registry) -> MaskMetrics {
        let l = &Labels::none();
        let late = "Rows of the batch without a token, because the mask was not computed yet.";
        MaskMetrics {
            seconds: r.histogram(
                &["baton_grammar_mask_seconds"],
                "Time to compute the mask of one token.",
                l,
                MASK_SECONDS,
            ),
            late: r.counter(&["baton_grammar_late_masks_total"], late, l),
        }
    }
}

/// The masks of all requests of a process, one place for each slot of each worker.
struct MaskTable {
    /// Slots of one worker.
    slots: usize,
    /// Words of one mask.
    words: usize,
    /// What each place holds: the low half of the request's id, and behind it [`mark_of`].
    published: Box<[AtomicU64]>,
    masks: Box<[AtomicU32]>,
    metrics: MaskMetrics,
}

/// The mark of a place after this number of tokens.
fn mark_of(tokens: usize, has_failed: bool) -> u64 {
    (tokens as u64) << 1 & 0xffff_ffff | u64::from(has_failed)
}

impl MaskTable {
    fn mask(&self, place: u32) -> &[AtomicU32] {
        let begin = place as usize * self.words;
        &self.masks[begin..begin + self.words]
    }

    fn publish(&self, place: u32, request: RequestId, mark: u64) {
        self.published[place as usize].store(request.0 << 32 | mark, Ordering::Release);
    }
}

/// To `masks`.
enum MaskCommand {
    /// A request begins.
    Begin(u32, RequestId, Box<GrammarState>),
    /// A request has got a token.
    Token(u32, u32),
    /// A request has ended.
    End(u32),
}

/// The end of `ctl` and, with each request, of the engine.
#[derive(Clone)]
pub struct MaskClient {
    table: Arc<MaskTable>,
    commands: Sender<MaskCommand>,
    /// Wakes `masks`.
    bell: Arc<EventCount>,
}

impl std::fmt::Debug for MaskClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MaskClient").field("waiting", &self.commands.len()).finish_non_exhaustive()
    }
}

/// Makes the table and the ring for `workers` workers with `slots` slots each, and a vocabulary of
/// `vocab` ids. `engine` is notified of each mask; `bell` wakes `masks`. `clock` measures how long
/// a mask takes.
pub fn masks(
    (workers, slots): (usize, usize),
    vocab: usize,
    (engine, bell): (Arc<EventCount>, Arc<EventCount>),
    (metrics, clock): (MaskMetrics, Clock),
) -> (MaskClient, MaskWorker) {
    let (places, words) = (workers * slots, vocab.div_ceil(32));
    let table = Arc::new(MaskTable {
        slots,
        words,
        published: (0..places).map(|_| AtomicU64::new(0)).collect(),
        masks: bytemuck::zeroed_slice_box(places * words),
        metrics,
    });
    // See `begin`.
    let (commands, queue) = crossbeam_channel::bounded(3 * places + 1);
    let states = (0..places).map(|_| None).collect();
    let client = MaskClient { table: table.clone(), commands, bell };
    (client, MaskWorker { table, queue, states, engine, clock })
}

impl MaskClient {
    /// Begins a request with this grammar. `first` is the mask for its first token. Returns `None`
    /// if too much work waits.
    pub fn begin(
        &self,
        (worker, slot): (WorkerId, SlotId),
        request: RequestId,
        state: Box<GrammarState>,
        first: &[u32],
    ) -> Option<RequestGrammar> {
        assert_eq!(first.len(), self.table.words, "the mask is for another vocabulary");
        let places = self.table.published.len();
        // Each request that runs can still send a token and its end.
        if self.commands.len() + 2 * places >= self.commands.capacity().unwrap_or(usize::MAX) {
            return None;
        }
        let index = (worker.index() * self.table.slots + slot.index()) as u32;
        self.send(MaskCommand::Begin(index, request, state));
        let rest = Some(MaskPlace { client: self.clone(), index, request });
        Some(RequestGrammar { rest, ..RequestGrammar::of_one_token(first) })
    }

    fn send(&self, command: MaskCommand) {
        let sent = self.commands.try_send(command);
        // At the end of a process, `masks` can end first.
        let is_full = matches!(sent, Err(TrySendError::Full(_)));
        debug_assert!(!is_full, "commands outgrew their ring");
        self.bell.notify();
    }
}

/// Computes masks.
pub struct MaskWorker {
    table: Arc<MaskTable>,
    queue: Receiver<MaskCommand>,
    /// The requests by place.
    states: Box<[Option<MaskedRequest>]>,
    engine: Arc<EventCount>,
    clock: Clock,
}

struct MaskedRequest {
    id: RequestId,
    /// `None` after an error.
    state: Option<Box<GrammarState>>,
    tokens: usize,
}

impl MaskWorker {
    /// Handles the next command. Returns whether there was one.
    pub fn step(&mut self) -> bool {
        let Ok(command) = self.queue.try_recv() else { return false };
        match command {
            MaskCommand::Begin(place, id, state) => {
                let state = Some(state);
                self.states[place as usize] = Some(MaskedRequest { id, state, tokens: 0 });
            }
            MaskCommand::Token(place, token) => self.advance(place, token),
            MaskCommand::End(place) => self.states[place as usize] = None,
        }
        true
    }

    /// Takes a token, and publishes the next mask.
    fn advance(&mut self, place: u32, token: u32) {
        let held = self.states[place as usize].as_mut();
        debug_assert!(held.is_some(), "a token of place {place}, which has no request");
        let Some(held) = held else { return };
        held.tokens += 1;
        let begun = self.clock.now();
        let next = held.state.as_mut().and_then(|state| {
            state.advance(token).ok()?;
            state.compute_mask().ok()
        });
        match &next {
            Some(mask) => {
                for (to, &from) in self.table.mask(place).iter().zip(mask) {
                    to.store(from, Ordering::Relaxed);
                }
            }
            None => held.state = None,
        }
        self.table.publish(place, held.id, mark_of(held.tokens, next.is_none()));
        let took = self.clock.now().saturating_duration_since(begun);
        self.table.metrics.seconds.observe(took.as_secs_f64());
        self.engine.notify();
    }

    /// Whether no request is held, for checks.
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.states.iter().all(Option::is_none)
    }
}

/// Runs the thread `masks` until `stop`. `bell` must unpark this thread.
pub fn run(worker: &mut MaskWorker, bell: &EventCount, stop: &AtomicBool) {
    while !stop.load(Ordering::Acquire) {
        if worker.step() {
            continue;
        }
        bell.prepare_wait();
        // After the announcement it must look for work once more.
        if !worker.step() && !stop.load(Ordering::Acquire) {
            thread::park();
        }
        bell.cancel_wait();
    }
}
