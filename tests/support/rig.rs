//! Engine, movers and a substitute for `ctl`, in one thread.

use super::mover::{Side, TestMover};
use baton::cause::Cause;
use baton::ids::{Generation, RequestId, Room, SlotId, WorkerId};
use baton::kv::groups::{GroupCounts, KvGroups};
use baton::kv::layout::KvLayout;
use baton::kv::page_key::Salt;
use baton::kv::region::Region;
use baton::kv::request_pages::RequestPages;
use baton::kv::tier::Tier;
use baton::model::grammar::{GrammarCompiler, GrammarContext, GrammarSource, GrammarState};
use baton::model::logprobs::{PromptLogprobs, Sampled};
use baton::model::sampler::SamplingParams;
use baton::model::tokenizer::Tokenizer;
use baton::obs::registry::Registry;
use baton::sched::channel::{EngineChannel, events_per_turn};
use baton::sched::config::SchedConfig;
use baton::sched::decode::DecodeWorker;
use baton::sched::engine::Engine;
use baton::sched::masks::{self, MaskClient, MaskMetrics, MaskWorker, RequestGrammar};
use baton::sched::messages::{
    EngineCommand, EngineEvent, FinishReason, RequestEvent, TransferEvent,
};
use baton::sched::mixed::MixedWorker;
use baton::sched::prefill::PrefillWorker;
use baton::sched::request::{EngineRequest, Stamps};
use baton::sched::stats::WorkerStats;
use baton::sched::worker::{Activity, KvMemory, Worker};
use baton::sim::model::{PseudoModel, SimLayers, VOCAB, Watch, Windows, layout};
use baton::stdx::event_count::EventCount;
use baton::stdx::seal::seal_thread;
use baton::sys::clock::Clock;
use baton::transfer::answer::TransferAnswer;
use baton::transfer::command::{DestinationCommand, SourceCommand};
use baton::transfer::handle::{DestinationHandle, SourceHandle};
use baton::transfer::pages::PageLists;
use baton::transfer::status::{Move, State, StatusTable};
use baton::transfer::target::{SessionId, Target};
use crossbeam_channel as channel;
use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

/// The prefill or mixed worker.
pub const FIRST: WorkerId = WorkerId(0);
pub const DECODE: WorkerId = WorkerId(1);

#[derive(Clone, Debug)]
pub struct Setup {
    pub config: SchedConfig,
    /// The windows of the model's layers. The scheduler can know of none.
    pub windows: Windows,
    /// Whether the model has recurrent state.
    pub has_state: bool,
    /// The decode worker knows of no window.
    pub decode_sees_all: bool,
    pub slots: usize,
    pub prefill_pages: u32,
    pub decode_pages: u32,
    pub tier_pages: u32,
}

impl Setup {
    pub fn new() -> Setup {
        Setup {
            config: SchedConfig {
                max_running: 4,
                max_queued: usize::MAX,
                max_prefill_tokens: 64,
                chunked_prefill_size: 16,
                chunk_ms: 0,
                page_size: 4,
                largest_page: 4,
                context: 128,
                groups: GroupCounts::FULL,
                vocab: VOCAB,
                reserve: 512,
                prefix_cache: true,
                checkpoint_gap: 4,
                checkpoint_pages: 0,
                checkpoint_tokens: 4,
            },
            windows: [None; 3],
            has_state: false,
            decode_sees_all: false,
            slots: 16,
            prefill_pages: 64,
            decode_pages: 64,
            tier_pages: 0,
        }
    }
}

impl Setup {
    /// The places of the layers. Without windows at the scheduler, all are in one group.
    fn groups(&self) -> KvGroups {
        let groups = self.layers().groups(self.config.page_size);
        match groups.counts() == self.config.groups {
            true => groups,
            false => KvGroups::single(self.windows.len(), None),
        }
    }

    fn layers(&self) -> SimLayers {
        SimLayers { windows: self.windows, has_state: self.has_state }
    }

    /// A model with these windows, and a scheduler that knows them.
    pub fn with_windows(mut self, windows: Windows) -> Setup {
        (self.windows, self.config.groups) = (windows, KvGroups::of(&windows).counts());
        self
    }

    /// A model that also has recurrent state, which the scheduler knows.
    pub fn with_state(mut self) -> Setup {
        self.has_state = true;
        self.config.groups = self.layers().groups(self.config.page_size).counts();
        self
    }
}

/// A client's request.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub prompt: Vec<u32>,
    pub max_new: u32,
    pub sampling: SamplingParams,
    pub stop_tokens: Vec<u32>,
    pub top_logprobs: usize,
    /// Logprobs of the prompt from this position on, with so many alternatives.
    pub prompt_logprobs: Option<(u32, usize)>,
    /// Order in the queues: the lowest number is the first.
    pub priority: i32,
    /// The salt of its prefix cache; `None`: it shares no cache.
    pub salt: Option<Salt>,
    pub patience: Duration,
    /// The grammar of its output. Its tokens are bytes, and [`END`] ends it.
    pub grammar: Option<GrammarSource>,
}

/// The id that ends an output with a grammar.
pub const END: u32 = 0;

impl Wanted {
    pub fn new(prompt_tokens: u32, max_new: u32) -> Wanted {
        Wanted {
            prompt: (0..prompt_tokens).map(|i| (i * 7 + prompt_tokens) % VOCAB).collect(),
            max_new,
            sampling: SamplingParams::GREEDY,
            stop_tokens: Vec::new(),
            top_logprobs: 0,
            prompt_logprobs: None,
            priority: 0,
            salt: Some(Salt(0)),
            patience: Duration::from_secs(1000),
            grammar: None,
        }
    }
}

/// The state of a grammar before its first token.
fn compile(source: &GrammarSource) -> GrammarState {
    static PARTS: LazyLock<(Tokenizer, GrammarCompiler)> = LazyLock::new(|| {
        let tokenizer = Tokenizer::of_bytes(VOCAB as usize, Path::new("none")).unwrap();
        (tokenizer, GrammarCompiler::new(VOCAB as usize, &[END]))
    });
    PARTS.1.compile(&PARTS.0, source, GrammarContext::default()).unwrap()
}

/// The events of one leg.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Told {
    pub tokens: Vec<Sampled>,
    /// The logprobs of its prompt, from the leg that computed it.
    pub prompt: Option<PromptLogprobs>,
    pub outcome: Option<FinishReason>,
    pub released: bool,
}

/// The ids of one request's legs. A mixed worker has a single leg.
#[derive(Clone, Copy, Debug)]
pub struct Legs {
    pub prefill: Option<RequestId>,
    pub decode: RequestId,
}

/// A slot in use.
#[derive(Clone, Copy)]
pub struct Use {
    pub worker: WorkerId,
    pub slot: SlotId,
    pub generation: Generation,
    pub room: Room,
}

pub fn request(
    wanted: &Wanted,
    id: RequestId,
    place: Use,
    now: Instant,
    groups: GroupCounts,
) -> Box<EngineRequest> {
    let tokens = wanted.prompt.len() + wanted.max_new as usize;
    Box::new(EngineRequest {
        id,
        worker: place.worker,
        room: place.room,
        slot: place.slot,
        generation: place.generation,
        prompt: wanted.prompt.clone(),
        alone: false,
        keep: false,
        resumed: 0,
        output: Vec::with_capacity(wanted.max_new as usize),
        pages: RequestPages::with_capacity(tokens, groups),
        keys: Vec::with_capacity(tokens),
        salt: wanted.salt,
        sampling: wanted.sampling,
        grammar: None,
        rules: None,
        top_logprobs: wanted.top_logprobs,
        prompt_logprobs: None,
        priority: wanted.priority,
        max_new: wanted.max_new,
        stop_tokens: wanted.stop_tokens.clone(),
        ignore_eos: false,
        deadline: now + wanted.patience,
        stamps: Stamps::new(now),
    })
}

/// The part of `ctl` for one worker.
struct Front {
    status: Arc<StatusTable>,
    free: Vec<SlotId>,
    pub stats: Arc<WorkerStats>,
    pages: u32,
}

pub struct Rig {
    pub engine: Engine,
    pub watch: Arc<Watch>,
    pub mover: Option<TestMover>,
    pub commands: channel::Sender<EngineCommand>,
    pub events: channel::Receiver<EngineEvent>,
    fronts: Vec<Front>,
    to_destination: Option<channel::Sender<DestinationCommand>>,
    uses: HashMap<RequestId, Use>,
    pub told: HashMap<RequestId, Told>,
    /// Prompt tokens that were not computed, by request.
    pub cached: HashMap<RequestId, u32>,
    /// Requests in the order of their ends.
    pub ended: Vec<RequestId>,
    /// Number of emptied caches.
    pub flushed: usize,
    base: Instant,
    groups: GroupCounts,
    next: u64,
    /// While set, `ctl` holds back the commands of this kind.
    pub hold_sessions: bool,
    pub hold_grants: bool,
    held: Vec<EngineCommand>,
    /// Whether the failure of one leg ends the other.
    pub join_legs: bool,
    /// Whether decode takes pages only after prefill has computed.
    pub late: bool,
    keep: bool,
    masks: (MaskClient, MaskWorker),
    /// While set, no mask is computed.
    pub hold_masks: bool,
}

/// The other ends of a worker's rings.
struct Far<C> {
    side: Side<C>,
    commands: channel::Sender<C>,
    bell: Arc<EventCount>,
    ends: channel::Receiver<baton::transfer::command::LeaseEnd>,
}

fn quiet_bell() -> Arc<EventCount> {
    Arc::new(EventCount::new(|| ()))
}

fn kv(setup: &Setup, pages: u32) -> KvMemory {
    let groups = setup.groups();
    let layout = KvLayout { layers: groups.layers(), ..layout(setup.config.page_size) };
    let layout = KvLayout { page_stride: layout.layer_stride * u64::from(layout.layers), ..layout };
    let bytes = u64::from(pages) * layout.page_stride;
    let region = Arc::new(Region::new(c"kv", bytes as usize).unwrap());
    KvMemory { region, layout, groups, pages }
}

fn tier(setup: &Setup) -> Tier {
    Tier::new(setup.tier_pages, &kv(setup, 1).layout).unwrap()
}

fn far<C>(setup: &Setup, pages: u32) -> Far<C> {
    let (commands, taken) = channel::bounded(2 * setup.slots + 6);
    let (ends_in, ends) = channel::bounded(setup.slots);
    let list = setup.config.context.div_ceil(setup.config.page_size) as usize;
    let list = setup.config.groups.pages(list as u32, list as u32) as usize;
    let side = Side {
        commands: taken,
        ends: ends_in,
        status: Arc::new(StatusTable::new(setup.slots)),
        lists: Arc::new(PageLists::new(setup.slots, list).unwrap()),
        kv: kv(setup, pages),
    };
    Far { side, commands, bell: quiet_bell(), ends }
}

impl Rig {
    pub fn split(setup: &Setup) -> Rig {
        let source: Far<SourceCommand> = far(setup, setup.prefill_pages);
        let destination: Far<DestinationCommand> = far(setup, setup.decode_pages);
        let source_handle = SourceHandle {
            status: source.side.status.clone(),
            pages: source.side.lists.clone(),
            commands: source.commands,
            ends: source.ends,
            bell: source.bell,
        };
        let destination_handle = DestinationHandle {
            status: destination.side.status.clone(),
            pages: destination.side.lists.clone(),
            commands: destination.commands.clone(),
            ends: destination.ends,
            bell: destination.bell,
        };
        let prefill =
            PrefillWorker::new(FIRST, setup.config, source.side.kv.clone(), source_handle);
        let groups = if setup.decode_sees_all { GroupCounts::FULL } else { setup.config.groups };
        let decode = DecodeWorker::new(
            DECODE,
            SchedConfig { groups, ..setup.config },
            destination.side.kv.clone(),
            tier(setup),
            destination_handle,
        );
        let stats = vec![
            (prefill.stats().clone(), source.side.status.clone(), setup.prefill_pages),
            (decode.stats().clone(), destination.side.status.clone(), setup.decode_pages),
        ];
        let mover = TestMover::new(source.side, destination.side);
        let mut rig = Rig::over(setup, vec![Box::new(prefill), Box::new(decode)], stats);
        rig.mover = Some(mover);
        rig.to_destination = Some(destination.commands);
        rig
    }

    pub fn mixed(setup: &Setup) -> Rig {
        let memory = kv(setup, setup.decode_pages);
        let worker = MixedWorker::new(FIRST, setup.config, memory, tier(setup), setup.slots);
        let status = Arc::new(StatusTable::new(setup.slots));
        let stats = vec![(worker.stats().clone(), status, setup.decode_pages)];
        Rig::over(setup, vec![Box::new(worker)], stats)
    }

    fn over(
        setup: &Setup,
        workers: Vec<Box<dyn Worker>>,
        stats: Vec<(Arc<WorkerStats>, Arc<StatusTable>, u32)>,
    ) -> Rig {
        let (commands, inbox) = channel::bounded(4 * setup.slots);
        let (outbox, events) = channel::bounded(events_per_turn(setup.slots * workers.len()));
        let watch = Arc::new(Watch::default());
        let base = Instant::now();
        let ticks = watch.clone();
        let clock = move || base + Duration::from_nanos(ticks.now_ns.load(Relaxed));
        let model =
            PseudoModel::new(watch.clone(), setup.config.batch_limits().logits, setup.layers());
        let channel = EngineChannel::new(inbox, outbox, quiet_bell());
        let places = (workers.len(), setup.slots);
        let metrics = MaskMetrics::register(&mut Registry::default());
        let bells = (quiet_bell(), quiet_bell());
        let masks = masks::masks(places, VOCAB as usize, bells, (metrics, Clock::default()));
        let fronts = stats.into_iter().map(|(stats, status, pages)| Front {
            status,
            free: (0..setup.slots as u32).map(SlotId).collect(),
            stats,
            pages,
        });
        Rig {
            engine: Engine::new(&setup.config, workers, Box::new(model), channel, Box::new(clock)),
            fronts: fronts.collect(),
            watch,
            mover: None,
            commands,
            events,
            to_destination: None,
            uses: HashMap::new(),
            told: HashMap::new(),
            cached: HashMap::new(),
            ended: Vec::new(),
            flushed: 0,
            base,
            groups: setup.config.groups,
            next: 0,
            hold_sessions: false,
            hold_grants: false,
            held: Vec::new(),
            join_legs: true,
            late: false,
            keep: false,
            masks,
            hold_masks: false,
        }
    }

    /// Number of transferred tokens.
    pub fn copied(&self) -> u32 {
        self.mover.as_ref().map_or(0, |mover| mover.copied)
    }

    pub fn now(&self) -> Instant {
        self.base + Duration::from_nanos(self.watch.now_ns.load(Relaxed))
    }

    pub fn wait(&self, time: Duration) {
        self.watch.now_ns.fetch_add(time.as_nanos() as u64, Relaxed);
    }

    pub fn stats(&self, worker: WorkerId) -> &WorkerStats {
        &self.fronts[worker.index()].stats
    }

    pub fn has_slots(&self) -> bool {
        self.fronts.iter().all(|front| !front.free.is_empty())
    }

    /// The state of the request's slot.
    pub fn state(&self, id: RequestId) -> State {
        let Use { worker, slot, .. } = self.uses[&id];
        self.fronts[worker.index()].status.load(slot).state
    }

    /// Takes the commands that are held back.
    pub fn take_held(&mut self) -> Vec<EngineCommand> {
        std::mem::take(&mut self.held)
    }

    pub fn free_slots(&self, worker: WorkerId) -> usize {
        self.fronts[worker.index()].free.len()
    }

    /// Sends both legs at once, as a router does.
    pub fn submit(&mut self, wanted: &Wanted) -> Legs {
        let room = Room(self.next);
        let first = self.submit_leg(FIRST, room, wanted);
        if self.fronts.len() == 1 {
            return Legs { prefill: None, decode: first };
        }
        let decode = self.submit_leg(DECODE, room, wanted);
        let (awaited, at) = if self.late { (FIRST, first) } else { (DECODE, decode) };
        let Use { slot, generation, .. } = self.uses[&at];
        self.pass_on(match self.late {
            true => {
                EngineCommand::Answer(TransferAnswer::Awaited { worker: awaited, slot, generation })
            }
            false => EngineCommand::Answer(TransferAnswer::SessionReady {
                worker: awaited,
                slot,
                generation,
                session: SessionId(0),
            }),
        });
        Legs { prefill: Some(first), decode }
    }

    /// Sends a request to decode, which also does its prefill.
    pub fn submit_alone(&mut self, wanted: &Wanted) -> RequestId {
        self.submit_to(DECODE, Room(self.next), true, wanted)
    }

    pub fn submit_leg(&mut self, worker: WorkerId, room: Room, wanted: &Wanted) -> RequestId {
        self.submit_to(worker, room, false, wanted)
    }

    /// Sends a request only to prefill, which keeps the KV. Returns the room in which to claim it.
    pub fn submit_kept(&mut self, wanted: &Wanted) -> (RequestId, Room) {
        let room = Room(self.next);
        self.keep = true;
        let id = self.submit_leg(FIRST, room, wanted);
        self.keep = false;
        (id, room)
    }

    /// A decode worker asks for KV that prefill keeps.
    pub fn await_kept(&mut self, kept: RequestId) {
        let Use { slot, generation, .. } = self.uses[&kept];
        self.pass_on(EngineCommand::Answer(TransferAnswer::Awaited {
            worker: FIRST,
            slot,
            generation,
        }));
    }

    /// Sends a decode request for the KV that prefill kept in this room.
    pub fn claim(&mut self, room: Room, wanted: &Wanted) -> RequestId {
        let id = self.submit_leg(DECODE, room, wanted);
        let Use { slot, generation, .. } = self.uses[&id];
        let session = SessionId(0);
        self.pass_on(EngineCommand::Answer(TransferAnswer::SessionReady {
            worker: DECODE,
            slot,
            generation,
            session,
        }));
        id
    }

    fn submit_to(
        &mut self,
        worker: WorkerId,
        room: Room,
        alone: bool,
        wanted: &Wanted,
    ) -> RequestId {
        let front = &mut self.fronts[worker.index()];
        let slot = front.free.pop().expect("a free slot");
        let generation = front.status.open(slot);
        let id = RequestId(self.next);
        self.next += 1;
        let place = Use { worker, slot, generation, room };
        let mut request = request(wanted, id, place, self.now(), self.groups);
        (request.alone, request.keep) = (alone, self.keep);
        let computes = worker == FIRST || alone;
        if let Some((start, top)) = wanted.prompt_logprobs.filter(|_| computes) {
            let positions = start..wanted.prompt.len() as u32;
            request.prompt_logprobs = Some(Box::new(PromptLogprobs::new(positions, top)));
            request.salt = None;
        }
        if let Some(source) = &wanted.grammar {
            let mut state = Box::new(compile(source));
            let first = state.compute_mask().unwrap();
            let is_prefill = self.mover.is_some() && worker == FIRST;
            request.grammar = Some(match is_prefill || wanted.max_new == 1 {
                true => RequestGrammar::of_one_token(&first),
                false => self.masks.0.begin((worker, slot), id, state, &first).unwrap(),
            });
        }
        self.uses.insert(id, Use { worker, slot, generation, room });
        self.told.insert(id, Told::default());
        self.commands.send(EngineCommand::Submit(request)).unwrap();
        id
    }

    pub fn abort_command(&self, id: RequestId) -> Option<EngineCommand> {
        let Use { worker, slot, generation, .. } = *self.uses.get(&id)?;
        Some(EngineCommand::Answer(TransferAnswer::Abort {
            worker,
            slot,
            generation,
            cause: Cause::ClientGone,
        }))
    }

    pub fn abort(&mut self, id: RequestId) {
        if let Some(command) = self.abort_command(id) {
            self.commands.send(command).unwrap();
        }
    }

    /// One step of engine, mover and `ctl`.
    pub fn turn(&mut self) -> Activity {
        let activity = self.step_engine();
        if let Some(mover) = &mut self.mover {
            mover.step();
        }
        self.step_ctl();
        while !self.hold_masks && self.masks.1.step() {}
        activity
    }

    pub fn step_engine(&mut self) -> Activity {
        let now = self.now();
        let _seal = seal_thread();
        self.engine.step(now)
    }

    /// Handles the engine's events.
    pub fn step_ctl(&mut self) {
        for command in std::mem::take(&mut self.held) {
            self.pass_on(command);
        }
        while let Ok(event) = self.events.try_recv() {
            self.take(event);
        }
    }

    fn take(&mut self, event: EngineEvent) {
        match event {
            EngineEvent::Request(RequestEvent::Token { request, sampled, prompt, .. }) => {
                let room = self.uses[&request].room;
                let legs = self.uses.iter().filter(|(_, leg)| prompt.is_some() && leg.room == room);
                for (id, _) in legs {
                    self.told.get_mut(id).unwrap().prompt = prompt.as_deref().cloned();
                }
                let told = self.told.get_mut(&request).unwrap();
                assert!(told.outcome.is_none(), "a token after the end");
                told.tokens.push(sampled);
            }
            EngineEvent::Transfer(TransferEvent::Expecting {
                slot,
                generation,
                session,
                room,
                tokens,
                ..
            }) => {
                let target = Target { session, slot, generation, room, prefix: tokens.start };
                self.pass_on_destination(target);
            }
            EngineEvent::Transfer(TransferEvent::Computed { request, .. }) => {
                let room = self.uses[&request].room;
                // Its other leg may already be aborted and released.
                if let Some(Use { worker, slot, generation, .. }) = self.leg(DECODE, room) {
                    let session = SessionId(0);
                    self.pass_on(EngineCommand::Answer(TransferAnswer::SessionReady {
                        worker,
                        slot,
                        generation,
                        session,
                    }));
                }
            }
            EngineEvent::Request(RequestEvent::Flushed { .. }) => self.flushed += 1,
            EngineEvent::Request(RequestEvent::Finished {
                request,
                outcome,
                cached_tokens,
                ..
            }) => {
                self.cached.insert(request, cached_tokens);
                self.ended.push(request);
                let told = self.told.get_mut(&request).unwrap();
                assert!(told.outcome.replace(outcome).is_none(), "Finished twice");
                if let (FinishReason::Failed(_), true) = (outcome, self.join_legs) {
                    self.end_other_leg(request);
                }
            }
            EngineEvent::Request(RequestEvent::Released(request)) => {
                let told = self.told.get_mut(&request.id).unwrap();
                assert!(told.outcome.is_some(), "Released before Finished");
                assert!(!std::mem::replace(&mut told.released, true), "Released twice");
                assert!(request.pages.is_empty());
                let told: Vec<_> = told.tokens.iter().map(|sampled| sampled.token).collect();
                assert_eq!(request.output, told);
                self.uses.remove(&request.id);
                self.fronts[request.worker.index()].free.push(request.slot);
            }
        }
    }

    fn leg(&self, worker: WorkerId, room: Room) -> Option<Use> {
        self.uses.values().find(|leg| leg.worker == worker && leg.room == room).copied()
    }

    /// The manager's handling of a `Destination` message: it grants the source's slot, or reports
    /// that the room is over.
    fn pass_on_destination(&mut self, target: Target) {
        let source = self.leg(FIRST, target.room).filter(|source| {
            self.fronts[0].status.advance(source.slot, source.generation, Move::Grant).is_ok()
        });
        match source {
            Some(Use { slot, generation, .. }) => {
                self.pass_on(EngineCommand::Answer(TransferAnswer::Granted {
                    worker: FIRST,
                    slot,
                    generation,
                    target,
                }));
            }
            None => {
                let Target { slot, generation, .. } = target;
                let fail = Move::Fail(Cause::OtherLeg);
                if self.fronts[1].status.advance(slot, generation, fail).is_ok() {
                    let ring = self.to_destination.as_ref().unwrap();
                    ring.send(DestinationCommand::Cancel { slot, generation }).unwrap();
                }
            }
        }
    }

    fn pass_on(&mut self, command: EngineCommand) {
        let hold = match command {
            EngineCommand::Answer(TransferAnswer::SessionReady { .. }) => self.hold_sessions,
            EngineCommand::Answer(TransferAnswer::Granted { .. }) => self.hold_grants,
            _ => false,
        };
        if hold {
            self.held.push(command);
        } else {
            self.commands.send(command).unwrap();
        }
    }

    fn end_other_leg(&mut self, id: RequestId) {
        let Use { worker, room, .. } = self.uses[&id];
        let other = if worker == FIRST { DECODE } else { FIRST };
        if let Some(Use { worker, slot, generation, .. }) = self.leg(other, room) {
            let cause = Cause::OtherLeg;
            self.commands
                .send(EngineCommand::Answer(TransferAnswer::Abort {
                    worker,
                    slot,
                    generation,
                    cause,
                }))
                .unwrap();
        }
    }

    /// Takes turns until every request is released.
    pub fn finish(&mut self) {
        for _ in 0..20_000 {
            if self.uses.is_empty() {
                return self.check_empty();
            }
            self.turn();
        }
        panic!("stuck: {:?}", self.fronts.iter().map(|front| &front.stats).collect::<Vec<_>>());
    }

    /// No request runs, so no resource may be held.
    pub fn check_empty(&mut self) {
        while self.turn() == Activity::Busy || !self.commands.is_empty() {}
        assert!(self.masks.1.is_idle(), "a grammar outlives its request");
        assert_eq!(self.turn(), Activity::Idle);
        for front in &self.fronts {
            let stats = &front.stats;
            let pages = stats.pages();
            assert_eq!(pages.free + pages.cached, front.pages, "{stats:?}");
            for queue in [
                &stats.bootstrapping,
                &stats.waiting,
                &stats.transferring,
                &stats.arrived,
                &stats.running,
                &stats.retracted,
                &stats.swapped,
                &stats.ending,
            ] {
                assert_eq!(queue.load(Relaxed), 0, "{stats:?}");
            }
        }
        assert!(self.mover.as_ref().is_none_or(TestMover::is_empty));
    }

    pub fn outcome(&self, id: RequestId) -> Option<FinishReason> {
        self.told[&id].outcome
    }

    pub fn tokens(&self, id: RequestId) -> Vec<u32> {
        self.told[&id].tokens.iter().map(|sampled| sampled.token).collect()
    }
}

/// The result of a request that has a mixed worker to itself.
pub fn alone(wanted: &Wanted) -> Told {
    alone_in(Setup::new(), wanted)
}

/// The same with a model of these windows, whose pages stay until a request ends.
pub fn alone_with_windows(windows: Windows, wanted: &Wanted) -> Told {
    alone_in(Setup { windows, ..Setup::new() }, wanted)
}

/// The same with recurrent state beside such windows.
pub fn alone_with_state(windows: Windows, wanted: &Wanted) -> Told {
    let mut setup = Setup::new().with_windows(windows).with_state();
    setup.decode_pages *= setup.config.groups.pages(1, 1);
    alone_in(setup, wanted)
}

fn alone_in(mut setup: Setup, wanted: &Wanted) -> Told {
    setup.config.chunked_prefill_size = 128;
    setup.config.max_prefill_tokens = 128;
    let mut rig = Rig::mixed(&setup);
    let legs = rig.submit(wanted);
    rig.finish();
    rig.told.remove(&legs.decode).unwrap()
}
