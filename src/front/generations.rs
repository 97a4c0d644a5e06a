//! Requests for text: from a parsed body over ids and legs to the last byte of the answer.
//!
//! Thread: `ctl`. Owns: live exchanges, and the *legs* that work for them (one request of one worker each; a
//! choice has a prefill and a decode leg where both roles are in this process). The first terminal failure of
//! either leg cancels the other; after decode's first token prefill's outcome is ignored.
//! Not here: HTTP framing (`connections`), the hand-off's protocol (`handoff`).

mod asked;
mod figures;
mod flushes;
mod kept;
mod placing;

pub use placing::Placement;

use crate::cause::Cause;
use crate::config::resolved::FirstToken;
use crate::front::asking::Ask;
use crate::front::connections::{Answer, Connections, JSON};
use crate::front::exchange::{Exchange, Prompted, Step, echoes};
use crate::front::handoff::{Handoff, Source};
use crate::front::openai::bootstrap::SOURCE_PARAM;
use crate::front::openai::render::Renderer;
use crate::front::openai::{ApiError, GenerateRequest, KeptKv, Prompts, kv_transfer, resume};
use crate::front::stages::ChoiceTimes;
use crate::front::text::{self, Job, Made, Task, Text, TextQueue, Ticket, prompt_param};
use crate::ids::{RequestId, Room, WorkerId};
use crate::model::logprobs::Sampled;
use crate::net::{ConnId, Reactor};
use crate::obs::metrics::WorkerMetrics;
use crate::sched::mailbox::{Command, Event, Outcome};
use crate::sched::request::{Request, Stamps};
use crate::transfer::manager::rooms::Slot;
use asked::Asked;
use flushes::Flushes;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// What is true of the model and the process for every request.
#[derive(Clone, Debug)]
pub struct Terms {
    /// Names the model answers to; the first is told.
    pub names: Vec<String>,
    /// Requests that a worker runs and lets wait at most: choices of one request.
    pub choices: usize,
    /// Ends of sequence.
    pub eos: Vec<u32>,
    /// How choices are placed.
    pub placement: Placement,
}

/// An exchange before and while its legs run.
#[derive(Debug)]
struct Live {
    conn: ConnId,
    request: Box<GenerateRequest>,
    id: String,
    _ticket: Ticket,
    arrived: Instant,
    exchange: Option<Exchange>,
    begun: bool,
    /// A request of our own: a worker that takes part in a hand-off serves it alone.
    trial: bool,
    /// Where its KV is kept for decode.
    kept: Option<KeptKv>,
    /// What prefill is asked for it.
    asked: Option<Box<Asked>>,
    legs: Vec<RequestId>,
    timings: Vec<ChoiceTimes>,
    /// Of each choice its first token, and who has told it.
    first: Vec<First>,
}

/// The first token of a choice.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
enum First {
    /// Nobody has told it.
    #[default]
    Due,
    /// Prefill has; decode is to sample it, too.
    Ahead(u32),
    /// Decode has.
    Told,
}

impl Live {
    /// Whether each of its choices has told something, or its client had all of it.
    fn have_all_begun(&self) -> bool {
        let Some(exchange) = &self.exchange else { return false };
        let mut choices = self.first.iter().enumerate();
        choices.all(|(choice, first)| *first != First::Due || exchange.has_ended(choice))
    }

    /// Sends what there is of an answer that is a stream, which begins with the first of it.
    fn stream(&mut self, out: &[u8], way: &mut Way<'_>) {
        let is_first = !std::mem::replace(&mut self.begun, true);
        let Some(exchange) = self.exchange.as_ref().filter(|exchange| exchange.is_stream()) else {
            if is_first && self.asked.is_some() {
                // Nobody else can tell the router that prefill has done its part.
                way.connections.processing(way.reactor, self.conn);
            }
            return;
        };
        let mut events = Vec::new();
        if is_first {
            way.connections.open_stream(way.reactor, self.conn);
            exchange.open(&mut events);
        }
        events.extend_from_slice(out);
        if !events.is_empty() {
            way.connections.stream(way.reactor, self.conn, &events);
        }
    }
}

/// What a choice is computed from.
#[derive(Clone, Debug)]
struct Given {
    /// Ids of its prompt, and of what its client has of the answer.
    ids: Arc<[u32]>,
    /// How many of the last of them are of the answer.
    resumed: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    /// Its tokens are not shown.
    Prefill,
    /// Its tokens are the answer.
    Visible,
    /// Its token is the answer once its KV is with the destination.
    Held,
    /// Its token is the answer at once, which ends when its KV is with the destination.
    Ahead,
    /// Its token is the answer once it is computed, and its KV outlives that.
    Kept,
}

#[derive(Clone, Copy, Debug)]
struct Leg {
    exchange: u64,
    choice: usize,
    part: Part,
    worker: WorkerId,
    slot: Slot,
    room: Room,
    partner: Option<RequestId>,
    finished: bool,
    /// It has been told to end, since nobody asks for it.
    given_up: bool,
    /// When its last token came.
    last_token: Option<Instant>,
    /// The token of a `Held` or `Kept` leg until it is shown.
    held: Option<Sampled>,
}

/// All requests for text of this process.
#[derive(Debug)]
pub struct Generations {
    terms: Terms,
    text: Arc<Text>,
    queue: TextQueue,
    handoff: Handoff,
    live: HashMap<u64, Live>,
    /// Who waits for the tokeniser's answer itself.
    converting: HashMap<u64, (ConnId, Ticket)>,
    /// Of both.
    by_conn: HashMap<ConnId, u64>,
    legs: HashMap<RequestId, Leg>,
    /// Requests that have failed, until when prefill's word on that is waited for.
    unheard: VecDeque<(Instant, u64)>,
    /// Requests that have lost the prefill worker that was asked, until when they may begin.
    hurried: VecDeque<(Instant, u64)>,
    flushes: Flushes<ConnId>,
    metrics: Vec<Arc<WorkerMetrics>>,
    next_exchange: u64,
    next_request: u64,
    turn: usize,
}

/// Where answers go.
#[derive(Debug)]
pub struct Way<'a> {
    /// Sockets.
    pub reactor: &'a mut Reactor,
    /// HTTP.
    pub connections: &'a mut Connections,
    /// The clock of this turn.
    pub now: Instant,
}

impl Generations {
    /// No requests yet. `metrics` are the workers', in order of their ids.
    pub fn new(
        terms: Terms,
        text: Arc<Text>,
        queue: TextQueue,
        handoff: Handoff,
        metrics: Vec<Arc<WorkerMetrics>>,
    ) -> Generations {
        Generations {
            terms,
            text,
            queue,
            handoff,
            live: HashMap::new(),
            converting: HashMap::new(),
            by_conn: HashMap::new(),
            legs: HashMap::new(),
            unheard: VecDeque::new(),
            hurried: VecDeque::new(),
            flushes: Flushes::default(),
            metrics,
            next_exchange: 0,
            next_request: 0,
            turn: 0,
        }
    }

    /// Requests that are not answered or still hold a slot.
    pub fn is_idle(&self) -> bool {
        self.live.is_empty() && self.legs.is_empty() && self.converting.is_empty()
    }

    /// Whether the workers are done with all that they were told, so that others may take their place.
    pub fn is_free(&self) -> bool {
        self.live.is_empty() && self.legs.is_empty() && self.flushes.is_idle()
    }

    /// The workers are gone, and their memory with the last that holds it. Nothing may be asked before
    /// [`Generations::take_on`].
    pub fn dismiss(&mut self) {
        debug_assert!(self.is_free(), "a worker goes while it works");
        self.handoff = Handoff::new(Vec::new(), self.handoff.offer().clone());
        self.metrics.clear();
    }

    /// Others have come in their place.
    pub fn take_on(&mut self, placement: Placement, handoff: Handoff, metrics: Vec<Arc<WorkerMetrics>>) {
        self.terms.placement = placement;
        (self.handoff, self.metrics) = (handoff, metrics);
    }

    /// Whether a client waits for an answer.
    pub fn is_asked(&self) -> bool {
        !self.live.is_empty() || !self.converting.is_empty()
    }

    /// Requests for text that are not answered.
    pub fn running(&self) -> usize {
        self.live.len()
    }

    /// Whether all of them are with their workers.
    pub fn is_placed(&self) -> bool {
        self.live.values().all(|live| live.exchange.is_some())
    }

    /// The workers and their protocol, to be told of other processes.
    pub fn handoff_mut(&mut self) -> &mut Handoff {
        &mut self.handoff
    }

    /// The workers and their protocol.
    pub fn handoff(&self) -> &Handoff {
        &self.handoff
    }

    /// What is true for every request.
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// Tokens of one sequence at most.
    pub fn context(&self) -> usize {
        self.text.context
    }

    /// A client asks for text.
    pub fn begin(&mut self, conn: ConnId, request: GenerateRequest, id: String, way: &mut Way<'_>) {
        self.take(conn, request, None, id, false, way);
    }

    /// A client asks for text whose KV this worker is to ask prefill for.
    pub fn begin_asking(
        &mut self,
        conn: ConnId,
        request: GenerateRequest,
        ask: Ask,
        id: String,
        way: &mut Way<'_>,
    ) {
        match self.terms.placement {
            Placement::Decode { .. } => self.take(conn, request, Some(ask), id, false, way),
            _ => {
                let why = "names a prefill worker to be asked for the KV; this is no decode worker";
                way.refuse(conn, &ApiError::invalid(kv_transfer::PREFILL, why));
            }
        }
    }

    /// A client asks whether tokens come. A worker whose other leg is elsewhere shows its own part: prefill
    /// hands over to nobody, decode goes on from nothing.
    pub fn begin_trial(&mut self, conn: ConnId, request: GenerateRequest, id: String, way: &mut Way<'_>) {
        self.take(conn, request, None, id, true, way);
    }

    fn take(
        &mut self,
        conn: ConnId,
        request: GenerateRequest,
        ask: Option<Ask>,
        id: String,
        trial: bool,
        way: &mut Way<'_>,
    ) {
        if let Err(error) = self.check(&request) {
            return way.refuse(conn, &error);
        }
        let exchange = self.next_exchange;
        self.next_exchange += 1;
        let kept = match self.keeps(&request) {
            Ok(kept) => kept,
            Err(error) => return way.refuse(conn, &error),
        };
        let mut request = Box::new(request);
        let prompts = std::mem::replace(&mut request.prompts, Prompts::Ids(Vec::new()));
        let task = Task::Prompts(prompts, request.endpoint);
        let ticket = match self.queue.submit(Job { id: exchange, task }) {
            Ok(ticket) => ticket,
            Err(error) => return way.refuse(conn, &error),
        };
        let live = Live {
            conn,
            request,
            id,
            _ticket: ticket,
            arrived: way.now,
            exchange: None,
            begun: false,
            trial,
            kept,
            asked: ask.map(|ask| Box::new(Asked::new(ask))),
            legs: Vec::new(),
            timings: Vec::new(),
            first: Vec::new(),
        };
        self.live.insert(exchange, live);
        self.by_conn.insert(conn, exchange);
    }

    /// A client asks for ids of a text, or for the text of ids.
    ///
    /// # Errors
    /// Too many wait for the tokeniser.
    pub fn convert(&mut self, conn: ConnId, task: Task) -> Result<(), ApiError> {
        let id = self.next_exchange;
        self.next_exchange += 1;
        let ticket = self.queue.submit(Job { id, task })?;
        self.converting.insert(id, (conn, ticket));
        self.by_conn.insert(conn, id);
        Ok(())
    }

    /// A client wants the workers' prefix caches emptied; it is told when they are.
    ///
    /// # Errors
    /// Too many wait for that.
    pub fn flush(&mut self, conn: ConnId, now: Instant) -> Result<(), ApiError> {
        let workers = self.handoff.members().iter().map(|member| member.worker.id).collect::<Vec<_>>();
        self.flushes.begin(conn, &workers, now)?;
        for worker in workers {
            self.handoff.worker_mut(worker).engine.send(Command::Flush { worker });
        }
        Ok(())
    }

    /// The client of a connection has gone: everything done for it ends.
    pub fn gone(&mut self, conn: ConnId, now: Instant) {
        self.flushes.gone(conn);
        if let Some(exchange) = self.by_conn.get(&conn).copied()
            && self.converted(exchange).is_none()
        {
            self.drop_exchange(exchange, Cause::ClientGone, now);
        }
    }

    /// Ends the requests whose name begins with `rid`, or all; their clients are told.
    pub fn abort(&mut self, rid: Option<&str>, way: &mut Way<'_>) -> usize {
        let named = |live: &Live| {
            rid.is_none_or(|rid| live.id == rid || live.request.rids.iter().any(|own| own.starts_with(rid)))
        };
        let hit: Vec<u64> = self.live.iter().filter(|(_, live)| named(live)).map(|(&id, _)| id).collect();
        for &exchange in &hit {
            self.fail(exchange, &error_of(Cause::Aborted), Cause::Aborted, way);
        }
        hit.len() + if rid.is_none() { self.drop_kept() } else { 0 }
    }

    /// Whether the tokeniser or a mover has something.
    pub fn has_news(&self) -> bool {
        self.queue.has_news() || self.handoff.has_news()
    }

    /// Takes in what the tokeniser has done and what movers say. True when there was something.
    pub fn turn(&mut self, way: &mut Way<'_>) -> bool {
        let mut busy = self.handoff.turn(way.now);
        while let Some(conn) = self.flushes.overdue(way.now) {
            way.refuse(conn, &ApiError::new(503, "unavailable", "a worker does not empty its cache"));
        }
        while let Some(answer) = self.queue.poll() {
            self.answered(answer, way);
            busy = true;
        }
        while let Some((exchange, word)) = self.handoff.poll_word() {
            self.hear(exchange, word, way);
            busy = true;
        }
        self.end_unheard(way);
        busy
    }

    /// Takes an engine's event.
    pub fn event(&mut self, event: Event, way: &mut Way<'_>) {
        match event {
            Event::Token { request, sampled, first } => {
                let Some(leg) = self.legs.get_mut(&request) else { return };
                if let Some(last) = leg.last_token.replace(way.now) {
                    self.metrics[leg.worker.index()].next_token(way.now.saturating_duration_since(last));
                }
                if matches!(leg.part, Part::Held | Part::Kept) {
                    leg.held = Some(sampled);
                }
                let leg = *leg;
                match leg.part {
                    Part::Visible => self.visible(&leg, &sampled, way),
                    Part::Prefill => {
                        if let Some(live) = self.live.get_mut(&leg.exchange) {
                            live.timings[leg.choice].prefill = first;
                        }
                        self.ahead(&leg, &sampled, way);
                    }
                    Part::Ahead => self.token(&leg, &sampled, way),
                    Part::Held => {}
                    Part::Kept => {
                        if let Some(live) = self.live.get_mut(&leg.exchange) {
                            live.timings[leg.choice].decode = first;
                        }
                    }
                }
            }
            Event::Expecting { worker, slot, generation, tokens, .. } => {
                self.handoff.expecting(worker, Slot { id: slot, generation }, tokens, way.now);
            }
            Event::Computed { worker, slot, generation, request, cached_tokens } => {
                self.handoff.computed(worker, Slot { id: slot, generation }, way.now);
                self.kept(request, cached_tokens, way);
            }
            Event::Finished { request, outcome, stamps, cached_tokens } => {
                self.finished(request, outcome, &stamps, cached_tokens, way);
            }
            Event::Flushed { worker, pages } => {
                if let Some((conn, pages)) = self.flushes.done(worker, pages) {
                    let body = serde_json::json!({ "success": true, "flushed_pages": pages }).to_string();
                    let body = body.as_bytes();
                    way.answer(conn, &Answer { status: 200, media: JSON, body, retry_after: None });
                }
            }
            Event::Released(request) => {
                let slot = Slot { id: request.slot, generation: request.generation };
                self.handoff.released(request.worker, slot);
                self.legs.remove(&request.id);
            }
        }
    }

    /// Ends what is overdue.
    pub fn expire(&mut self, now: Instant) {
        self.handoff.expire(now);
        if let Placement::Prefill { bootstrap_timeout, .. } = self.terms.placement {
            self.give_up(bootstrap_timeout, now);
        }
    }

    /// Ends legs that no decode worker has asked for in so long: it is dead, or never got its own leg.
    fn give_up(&mut self, patience: Duration, now: Instant) {
        let late = self.live.values().filter(|live| live.arrived + patience <= now);
        for request in late.flat_map(|live| &live.legs) {
            let Some(leg) = self.legs.get_mut(request) else { continue };
            let is_held = matches!(leg.part, Part::Held | Part::Ahead) && !leg.finished && !leg.given_up;
            if is_held && !self.handoff.is_asked_for(leg.worker, leg.slot) {
                leg.given_up = true;
                self.handoff.worker_mut(leg.worker).abort(leg.slot, Cause::PeerLost);
            }
        }
    }

    /// Refuses a model that is not served here.
    pub fn check_model(&self, name: Option<&str>) -> Result<(), ApiError> {
        match name {
            Some(name) if !self.terms.names.iter().any(|own| own == name) => {
                Err(ApiError::model_not_found(name, &self.terms.names))
            }
            _ => Ok(()),
        }
    }

    fn check(&self, request: &GenerateRequest) -> Result<(), ApiError> {
        self.check_model(request.model.as_deref())?;
        // One token there always is.
        if request.min_tokens > u32::from(request.keeps_kv.is_some()) {
            return Err(ApiError::unsupported("min_tokens"));
        }
        let choices = request.prompts.len() * request.samples;
        let most = self.terms.choices;
        if choices > most {
            let message = format!("asks for {choices} choices; this server has places for {most} requests");
            return Err(ApiError::new(400, "too_many_choices", message));
        }
        Ok(())
    }

    /// The tokeniser is done with a job, whose client may have gone.
    fn answered(&mut self, answer: text::Answer, way: &mut Way<'_>) {
        let text::Answer { id, made } = answer;
        match (made, self.converted(id)) {
            (Ok(Made::Body(body)), Some(conn)) => {
                way.answer(conn, &Answer { status: 200, media: JSON, body: &body, retry_after: None });
            }
            (Err(error), Some(conn)) => way.refuse(conn, &error),
            (Ok(Made::Ids(prompts, ids)), _) => self.tokenised(id, &prompts, ids, way),
            (Err(error), None) => self.fail(id, &error, Cause::Refused, way),
            (Ok(Made::Body(_)), None) => {}
        }
    }

    /// Takes the client of a conversion, if that is one and the client waits.
    fn converted(&mut self, id: u64) -> Option<ConnId> {
        let (conn, _) = self.converting.remove(&id)?;
        self.by_conn.remove(&conn);
        Some(conn)
    }

    fn tokenised(&mut self, id: u64, prompts: &Prompts, ids: Vec<Vec<u32>>, way: &mut Way<'_>) {
        let Some(live) = self.live.get(&id) else { return };
        let param = prompt_param(live.request.endpoint, prompts);
        let fit = ids.iter().try_for_each(|ids| self.fits(&live.request, param, ids.len()));
        if let Err(error) = fit {
            return self.fail(id, &error, Cause::Refused, way);
        }
        let Some(live) = self.live.get_mut(&id) else { return };
        let request = &live.request;
        let echoed = if request.echo { echoes(prompts, &ids, &self.text.tokenizer) } else { Vec::new() };
        let prompted: Vec<Prompted> = ids
            .into_iter()
            .enumerate()
            .map(|(index, ids)| Prompted {
                ids: ids.into(),
                echo: echoed.get(index).cloned(),
                rid: request.rids.get(index).cloned().unwrap_or_else(|| live.id.clone()),
            })
            .collect();
        let begun = request.resume.as_ref().and_then(|resume| resume.created);
        let created = begun.unwrap_or_else(|| {
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
        });
        let kept = live.kept.clone();
        let renderer = Renderer::new(request, &live.id, created, &self.terms.names[0]).with_kept(kept);
        let exchange = Exchange::new(request, renderer, &prompted, &self.terms.eos, live.id.clone());
        live.exchange = Some(exchange);
        live.timings = vec![ChoiceTimes::default(); prompted.len() * request.samples];
        live.first = vec![First::default(); live.timings.len()];
        let samples = request.samples;
        let mut out = Vec::new();
        let mut open = Vec::new();
        // All of them before anything leaves: what opens a choice is told of those alone that nothing was told of.
        for choice in 0..prompted.len() * samples {
            match self.resume(id, choice, &prompted[choice / samples].ids, &mut out) {
                Ok(given) => open.extend(given.map(|given| (choice, given))),
                Err(error) => return self.fail(id, &error, Cause::Refused, way),
            }
        }
        if let Some(live) = self.live.get_mut(&id).filter(|_| !out.is_empty()) {
            live.stream(&out, way);
        }
        if self.live.get(&id).is_some_and(|live| live.asked.is_some()) {
            return self.ask(id, open, samples, way);
        }
        for (choice, given) in open {
            if let Err(error) = self.place(id, choice, choice % samples, &given, way.now) {
                let cause = if error.status == 429 { Cause::Overloaded } else { Cause::Refused };
                return self.fail(id, &error, cause, way);
            }
        }
        // Who keeps KV says at once where, so that decode asks for it while it is computed.
        if let Some(live) = self.live.get_mut(&id).filter(|live| live.kept.is_some()) {
            live.stream(&[], way);
        }
        self.close_if_over(id, way);
    }

    /// What a choice is computed from: its prompt, and behind it what its client has of the answer. `None`: its client
    /// has all of it. Appends to `out` the end of one of which only that is missing.
    fn resume(
        &mut self,
        id: u64,
        choice: usize,
        prompt: &Arc<[u32]>,
        out: &mut Vec<u8>,
    ) -> Result<Option<Given>, ApiError> {
        let given = Given { ids: prompt.clone(), resumed: 0 };
        let Some(live) = self.live.get_mut(&id) else { return Ok(None) };
        let Some(exchange) = live.exchange.as_mut() else { return Ok(None) };
        let Some(told) = live.request.resume.as_ref().and_then(|resume| resume.told(choice)) else {
            return Ok(Some(given));
        };
        let vocab = self.text.tokenizer.vocab_size();
        if told.ids.iter().any(|&id| id as usize >= vocab) {
            return Err(ApiError::invalid(
                resume::FIELD,
                format!("has an id beyond the {vocab} of the vocabulary"),
            ));
        }
        let room = self.text.context - prompt.len();
        let most = live.request.max_tokens.map_or(room, |most| most as usize);
        if told.ids.len() > most {
            return Err(ApiError::invalid(
                resume::FIELD,
                format!("has more than the {most} ids that there may be"),
            ));
        }
        exchange.resume(choice, told, most, &self.text.tokenizer, out);
        Ok((!exchange.has_ended(choice)).then(|| Given {
            ids: prompt.iter().chain(&told.ids).copied().collect(),
            resumed: told.ids.len() as u32,
        }))
    }

    fn fits(&self, request: &GenerateRequest, param: &str, prompt: usize) -> Result<(), ApiError> {
        let answer = request.max_tokens.map_or(1, |max| max as usize);
        if prompt + answer > self.text.context {
            return Err(ApiError::context_length_exceeded(param, prompt, answer, self.text.context));
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    fn start(
        &mut self,
        exchange: u64,
        choice: usize,
        part: Part,
        request: Box<Request>,
        source: Option<&Source>,
        partner: Option<RequestId>,
        now: Instant,
    ) {
        let slot = Slot { id: request.slot, generation: request.generation };
        let (id, worker, room) = (request.id, request.worker, request.room);
        self.legs.insert(
            id,
            Leg {
                exchange,
                choice,
                part,
                worker,
                slot,
                room,
                partner,
                finished: false,
                given_up: false,
                last_token: None,
                held: None,
            },
        );
        if let Some(live) = self.live.get_mut(&exchange) {
            live.legs.push(id);
        }
        self.handoff.submit(request, source, now);
    }

    /// A prefill leg whose decode leg is here, too, has sampled.
    fn ahead(&mut self, leg: &Leg, sampled: &Sampled, way: &mut Way<'_>) {
        let Placement::Split { first_token: FirstToken::Prefill, .. } = self.terms.placement else { return };
        let Some(live) = self.live.get_mut(&leg.exchange) else { return };
        let is_stream = live.exchange.as_ref().is_some_and(Exchange::is_stream);
        if is_stream && live.first[leg.choice] == First::Due {
            live.first[leg.choice] = First::Ahead(sampled.token);
            self.token(leg, sampled, way);
        }
    }

    /// A leg whose tokens are the answer has sampled; the first of them may have been told.
    fn visible(&mut self, leg: &Leg, sampled: &Sampled, way: &mut Way<'_>) {
        let Some(live) = self.live.get_mut(&leg.exchange) else { return };
        match std::mem::replace(&mut live.first[leg.choice], First::Told) {
            First::Due | First::Told => self.token(leg, sampled, way),
            First::Ahead(token) if token == sampled.token => {}
            First::Ahead(_) => {
                let cause = Cause::Mismatch;
                self.fail(leg.exchange, &error_of(cause), cause, way);
            }
        }
    }

    fn token(&mut self, leg: &Leg, sampled: &Sampled, way: &mut Way<'_>) {
        let Some(live) = self.live.get_mut(&leg.exchange) else { return };
        let Some(exchange) = live.exchange.as_mut() else { return };
        let mut out = Vec::new();
        let step = exchange.push(leg.choice, sampled, &self.text.tokenizer, &mut out);
        live.stream(&out, way);
        if step == Step::Stop {
            live.timings[leg.choice].ended = Some(way.now);
            match leg.part {
                // Decode's KV: it ends by the same token, and this leg when it has that KV.
                Part::Ahead => return,
                Part::Kept => {}
                Part::Visible | Part::Prefill | Part::Held => {
                    self.handoff.worker_mut(leg.worker).abort(leg.slot, Cause::ClientGone);
                    self.end_partner(leg, Cause::ClientGone);
                }
            }
            self.close_if_over(leg.exchange, way);
        }
    }

    fn finished(
        &mut self,
        request: RequestId,
        outcome: Outcome,
        stamps: &Stamps,
        cached: u32,
        way: &mut Way<'_>,
    ) {
        let Some(leg) = self.legs.get_mut(&request) else { return };
        leg.finished = true;
        let leg = *leg;
        let failure = match outcome {
            Outcome::Failed(cause) => Some(cause),
            _ => None,
        };
        self.count(&leg, outcome);
        self.handoff.finished(leg.worker, leg.slot, failure, way.now);
        let Some(live) = self.live.get_mut(&leg.exchange) else { return };
        let times = &mut live.timings[leg.choice];
        match leg.part {
            Part::Prefill => times.prefill = Some(*stamps),
            Part::Visible | Part::Held | Part::Ahead | Part::Kept => times.decode = Some(*stamps),
        }
        if let (Some(sampled), None) = (leg.held, failure) {
            self.token(&leg, &sampled, way);
        }
        let Some(live) = self.live.get_mut(&leg.exchange) else { return };
        match (leg.part, failure) {
            (Part::Prefill, None) => {}
            // Before its last post, prefill's failure is decode's as well; later it is decode's to find out.
            (Part::Prefill, Some(cause)) => {
                if !live.begun || matches!(live.first[leg.choice], First::Ahead(_)) {
                    self.end_partner(&leg, cause);
                }
            }
            (Part::Visible | Part::Held | Part::Ahead | Part::Kept, None) => {
                self.end_choice(&leg, outcome, cached, way);
            }
            (Part::Visible | Part::Held | Part::Ahead | Part::Kept, Some(cause)) => {
                self.end_partner(&leg, cause);
                let ended =
                    self.live.get(&leg.exchange).is_some_and(|live| live.timings[leg.choice].ended.is_some());
                // A choice that a stop string ended was told to stop; that is no failure.
                if !ended && !self.awaits_word(leg.exchange, cause, way.now) {
                    self.fail(leg.exchange, &error_of(cause), cause, way);
                }
            }
        }
    }

    fn end_choice(&mut self, leg: &Leg, outcome: Outcome, cached: u32, way: &mut Way<'_>) {
        let Some(live) = self.live.get_mut(&leg.exchange) else { return };
        live.timings[leg.choice].ended.get_or_insert(way.now);
        self.record(leg, way.now);
        let Some(live) = self.live.get(&leg.exchange) else { return };
        let timings = live.request.return_timings.then(|| self.timings(leg));
        let Some(live) = self.live.get_mut(&leg.exchange) else { return };
        let Some(exchange) = live.exchange.as_mut() else { return };
        let mut out = Vec::new();
        exchange.finish(leg.choice, outcome, cached, timings.as_ref(), &mut out);
        live.stream(&out, way);
        self.close_if_over(leg.exchange, way);
    }

    fn close_if_over(&mut self, id: u64, way: &mut Way<'_>) {
        let Some(live) = self.live.get(&id) else { return };
        let Some(exchange) = live.exchange.as_ref().filter(|exchange| exchange.is_over()) else { return };
        let conn = live.conn;
        let mut out = Vec::new();
        if exchange.is_stream() {
            exchange.close(None, &mut out);
            if let Some(live) = self.live.get_mut(&id) {
                live.stream(&out, way);
            }
            way.connections.end_stream(way.reactor, conn, way.now);
        } else {
            let timings = live.request.return_timings.then(|| self.first_timings(live));
            exchange.close(timings.as_ref(), &mut out);
            way.answer(conn, &Answer::json(&out));
        }
        self.forget(id);
    }

    /// Ends an exchange with an error: as a status, or as an event where a stream has begun.
    fn fail(&mut self, id: u64, error: &ApiError, cause: Cause, way: &mut Way<'_>) {
        let Some(live) = self.live.get_mut(&id) else { return };
        let conn = live.conn;
        match live.exchange.as_mut().filter(|exchange| exchange.is_stream() && live.begun) {
            Some(exchange) => {
                let mut out = Vec::new();
                exchange.abort(error, &mut out);
                way.connections.stream(way.reactor, conn, &out);
                way.connections.end_stream(way.reactor, conn, way.now);
            }
            None => way.refuse(conn, error),
        }
        self.drop_exchange(id, cause, way.now);
    }

    /// Forgets an exchange and ends its legs.
    fn drop_exchange(&mut self, id: u64, cause: Cause, now: Instant) {
        let Some(mut live) = self.forget(id) else { return };
        self.drop_asked(id, &mut live, now);
        for request in live.legs {
            if let Some(leg) = self.legs.get(&request).copied().filter(|leg| !leg.finished) {
                self.handoff.worker_mut(leg.worker).abort(leg.slot, cause);
            }
        }
    }

    fn forget(&mut self, id: u64) -> Option<Live> {
        let live = self.live.remove(&id)?;
        self.by_conn.remove(&live.conn);
        Some(live)
    }

    fn end_partner(&mut self, leg: &Leg, cause: Cause) {
        let partner = leg.partner.and_then(|partner| self.legs.get(&partner)).copied();
        if let Some(partner) = partner.filter(|partner| !partner.finished) {
            self.handoff.worker_mut(partner.worker).abort(partner.slot, cause);
        }
    }
}

impl Way<'_> {
    /// Answers with an error.
    pub fn refuse(&mut self, conn: ConnId, error: &ApiError) {
        self.connections.refuse(self.reactor, conn, error, self.now);
    }

    /// Answers whole.
    pub fn answer(&mut self, conn: ConnId, answer: &Answer<'_>) {
        self.connections.answer(self.reactor, conn, answer, self.now);
    }
}

/// What a client is told of a failure.
fn error_of(cause: Cause) -> ApiError {
    let message = match cause {
        Cause::ClientGone => "the connection of the request's other leg was closed",
        Cause::Aborted => "the request was aborted",
        Cause::Refused => "the request does not fit this server's KV memory",
        Cause::Overloaded => return ApiError::overloaded(1),
        Cause::PeerLost => "the worker at the other end of the hand-off was lost",
        Cause::Deadline => "the request took too long",
        Cause::Mismatch => "prefill and decode disagree about the request",
        Cause::Corrupt => "handed-over data failed their check",
        Cause::OtherLeg => "the other leg of the request failed",
        // Requests that came before this worker's own drain are finished.
        Cause::Draining => {
            let error = ApiError::draining("the prefill worker of this request is draining");
            return ApiError { param: Some(SOURCE_PARAM.into()), ..error };
        }
        Cause::Internal => "internal error",
        Cause::Denied => "the decode worker's NIC refused what it was to be handed",
        Cause::Unreachable => "the fabric between the two workers carries nothing",
        Cause::Flushed => "the hand-off was cut short when another one broke",
        Cause::Incompatible => {
            "the prefill and the decode worker do not fit each other; their logs name what differs"
        }
    };
    ApiError::new(cause.http_status(), cause.name(), message)
}
