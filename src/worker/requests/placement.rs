//! The placement of a choice: its workers, and the request for each of them.
//!
//! Thread: `ctl`. This module takes slots. All other changes are in [`RequestTable::start_leg`].

use super::{ChoiceInput, Context, LegKind, NewLeg, RequestTable, error_of};
use crate::api::{ApiError, BootstrapParams, GenerateRequest, KeptKv, kv_transfer};
use crate::cause::Cause;
use crate::config::{BOOTSTRAP_PORT, FirstToken};
use crate::ids::{RequestId, RequestKey, Room, WorkerId};
use crate::kv::page_key::Salt;
use crate::kv::request_pages::RequestPages;
use crate::link::handoff::{Handoff, Source, prompt_of, room_of};
use crate::model::logprobs::PromptLogprobs;
use crate::model::sampler::SamplingParams;
use crate::net::Entropy;
use crate::sched::masks::RequestGrammar;
use crate::sched::messages::EngineCommand;
use crate::sched::request::{EngineRequest, Stamps};
use crate::stdx::failpoint::is_failpoint_active;
use crate::stdx::rng::INCREMENT;
use crate::transfer::manager::rooms::Slot;
use crate::worker::text::PreparedGrammar;
use std::time::Duration;

/// The workers of this process that run the legs of a choice.
#[derive(Clone, Debug)]
pub enum Placement {
    /// One prefill and one decode worker, with a hand-off between them.
    Split {
        /// Prefill workers.
        prefill: Vec<WorkerId>,
        /// Decode workers.
        decode: Vec<WorkerId>,
        /// The leg that sends the first token of a stream.
        first_token: FirstToken,
    },
    /// One worker, no hand-off.
    Mixed(Vec<WorkerId>),
    /// This process prefills for decode workers of other processes. The router names the room.
    Prefill {
        /// The worker.
        worker: WorkerId,
        /// Whether the bootstrap host 2.2.2.2 means that no decode worker will ask for the KV.
        fake_bootstrap: bool,
        /// Host and port of its bootstrap registry. `None`: this worker knows no host that others
        /// can reach.
        registry: (Option<String>, u16),
        /// Maximum time until a decode worker asks for a request.
        bootstrap_timeout: Duration,
    },
    /// This process decodes for prefill workers of other processes. The router names them and the
    /// room.
    Decode {
        /// The worker.
        worker: WorkerId,
        /// Whether the bootstrap host 2.2.2.2 is the fake source.
        fake_bootstrap: bool,
        /// Whether a request without a prefill worker uses the fake source, too.
        fake_by_default: bool,
        /// Whether prefill workers must prove the cluster key.
        proven: bool,
        /// Whether this worker computes the prompt if the request names no prefill worker.
        local_prefill: bool,
    },
}

/// A choice to place.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChoicePlace<'a> {
    /// Its request.
    pub(super) key: RequestKey,
    /// Its number in the request.
    pub(super) choice: usize,
    /// Its number among the samples of its prompt.
    pub(super) sample: usize,
    /// Its input tokens.
    pub(super) input: &'a ChoiceInput,
}

impl ChoicePlace<'_> {
    /// A leg of this choice without source and partner.
    fn leg(self, kind: LegKind) -> NewLeg<'static> {
        NewLeg { key: self.key, choice: self.choice, kind, source: None, partner: None }
    }
}

/// SGLang's host name for a fake prefill worker.
const FAKE_HOST: &str = "2.2.2.2";

impl RequestTable {
    /// Places one choice on its worker or workers.
    ///
    /// # Errors
    /// No worker has a free slot, or the request does not name the partner that this role needs.
    pub(super) fn place_choice(
        &mut self,
        place: ChoicePlace<'_>,
        cx: &mut Context<'_>,
    ) -> Result<(), ApiError> {
        self.turn += 1;
        let logprobs = self.reserve_prompt_logprobs(place)?;
        match self.config.placement.clone() {
            Placement::Prefill { worker, fake_bootstrap, .. } => {
                self.place_on_prefill(place, worker, (fake_bootstrap, logprobs), cx)
            }
            Placement::Decode { worker, local_prefill: true, .. }
                if self.comes_alone(place.key) =>
            {
                let mut request = self.build_request(place, worker, Room(0), None, cx)?;
                request.alone = true;
                score_prompt(&mut request, logprobs);
                self.start_leg(place.leg(LegKind::Visible), request, cx);
                Ok(())
            }
            Placement::Decode { worker, fake_bootstrap, fake_by_default, proven, .. } => {
                let (room, source) = self.room_and_source(
                    place.key,
                    place.choice,
                    fake_bootstrap,
                    fake_by_default,
                    cx.reactor.entropy(),
                )?;
                // A fake source computes nothing, so there is nothing to wait for.
                let wanted = logprobs.is_some() && source != Source::Fake;
                self.await_prompt_logprobs(place, wanted);
                let mut request = self.build_request(place, worker, room, None, cx)?;
                self.salt_as_from(&source, proven, &mut request);
                let leg = NewLeg { source: Some(&source), ..place.leg(LegKind::Visible) };
                self.start_leg(leg, request, cx);
                Ok(())
            }
            Placement::Mixed(workers) => {
                let worker = self.most_free_worker(&workers, cx.handoff)?;
                let mut request = self.build_request(place, worker, Room(0), None, cx)?;
                score_prompt(&mut request, logprobs);
                self.start_leg(place.leg(LegKind::Visible), request, cx);
                Ok(())
            }
            Placement::Split { prefill, decode, .. } => {
                self.place_on_pair(place, (&prefill, &decode), logprobs, cx)
            }
        }
    }

    /// A prefill worker of a cluster computes the prompt. Decode is in another process, or claims
    /// the KV later.
    fn place_on_prefill(
        &mut self,
        place: ChoicePlace<'_>,
        worker: WorkerId,
        (fake_bootstrap, logprobs): (bool, Option<Box<PromptLogprobs>>),
        cx: &mut Context<'_>,
    ) -> Result<(), ApiError> {
        let active = self.active.get(&place.key);
        if let Some((kept, active)) =
            active.and_then(|active| Some((active.kept.as_ref()?, active)))
        {
            // If decode claims the KV itself, prefill computes after the claim. Otherwise, a
            // deadlock could occur: decode holds pages and waits for this pool, and this pool waits
            // for decode's pages.
            let is_claimed = active.request.keeps_kv.as_ref().is_some_and(|keep| keep.claimed);
            let room = kept.room(place.choice);
            // The engine can be faster than the refusal of its hand-off.
            if cx.handoff.is_over(worker, room) {
                return Err(error_of(Cause::OtherLeg));
            }
            let mut request = self.build_request(place, worker, room, Some(1), cx)?;
            score_prompt(&mut request, logprobs);
            request.keep = !is_claimed;
            self.start_leg(place.leg(LegKind::KvKept), request, cx);
            return Ok(());
        }
        let (room, source) = self.room_and_source(
            place.key,
            place.choice,
            fake_bootstrap,
            false,
            cx.reactor.entropy(),
        )?;
        let mut request = self.build_request(place, worker, room, Some(1), cx)?;
        score_prompt(&mut request, logprobs);
        let is_ahead = self
            .active
            .get(&place.key)
            .is_some_and(|active| active.request.stream && active.request.first_token);
        let kind = match is_ahead {
            true => LegKind::TokenBeforeHandover,
            false => LegKind::TokenAfterHandover,
        };
        self.start_leg(NewLeg { source: Some(&source), ..place.leg(kind) }, request, cx);
        Ok(())
    }

    /// Places a choice on two workers of this process: a prefill leg and a decode leg, which are
    /// partners.
    fn place_on_pair(
        &mut self,
        place: ChoicePlace<'_>,
        (prefill, decode): (&[WorkerId], &[WorkerId]),
        logprobs: Option<Box<PromptLogprobs>>,
        cx: &mut Context<'_>,
    ) -> Result<(), ApiError> {
        let source = self.most_free_worker(prefill, cx.handoff)?;
        let destination = self.most_free_worker(decode, cx.handoff)?;
        debug_assert_ne!(source, destination, "a hand-off has two workers");
        let room = room_of(cx.reactor.entropy().next_u64());
        let mut reader = self.build_request(place, source, room, Some(1), cx)?;
        let writer = match self.build_request(place, destination, room, None, cx) {
            Ok(writer) => writer,
            Err(error) => {
                let slot = Slot { id: reader.slot, generation: reader.generation };
                cx.handoff.release_slot(source, slot);
                return Err(error);
            }
        };
        self.await_prompt_logprobs(place, logprobs.is_some());
        score_prompt(&mut reader, logprobs);
        let (reader_id, writer_id) = (reader.id, writer.id);
        let leg = NewLeg { partner: Some(writer_id), ..place.leg(LegKind::Prefill) };
        self.start_leg(leg, reader, cx);
        let from = Source::Local(source);
        let leg =
            NewLeg { source: Some(&from), partner: Some(reader_id), ..place.leg(LegKind::Visible) };
        self.start_leg(leg, writer, cx);
        Ok(())
    }

    /// The place where a request's KV will be kept, if the client asks for that.
    ///
    /// # Errors
    /// The KV cannot be kept here, or there is no address to announce.
    pub(super) fn make_kept_kv(
        &self,
        request: &GenerateRequest,
        entropy: &mut Entropy,
    ) -> Result<Option<KeptKv>, ApiError> {
        let refused = |why| Err(ApiError::invalid(kv_transfer::FIELD, why));
        let Some(keep) = &request.keeps_kv else { return Ok(None) };
        match &self.config.placement {
            _ if request.bootstrap.is_some() => {
                refused("cannot be used together with bootstrap_room")
            }
            Placement::Prefill { registry: (own, port), .. } => {
                match keep.host.as_ref().or(own.as_ref()) {
                    Some(host) => {
                        let room = keep.room.unwrap_or_else(|| room_of(entropy.next_u64()));
                        Ok(Some(KeptKv::new(host, keep.port.unwrap_or(*port), room)))
                    }
                    None => refused(
                        "needs an address that decode workers can reach: set remote_host in it, \
                         or --advertise-host for this worker",
                    ),
                }
            }
            Placement::Split { .. } | Placement::Mixed(_) | Placement::Decode { .. } => {
                refused("asks to keep KV for a decode worker, but this is not a prefill worker")
            }
        }
    }

    /// Whether the request names no prefill worker and is no self-test.
    fn comes_alone(&self, key: RequestKey) -> bool {
        self.active
            .get(&key)
            .is_some_and(|active| active.request.bootstrap.is_none() && !active.is_self_test)
    }

    /// Sets the salt, which decides which requests can share KV from this source.
    pub(super) fn salt_as_from(&self, source: &Source, proven: bool, request: &mut EngineRequest) {
        if *source == Source::Fake {
            // No worker computed this KV, so no other request must use it.
            request.salt = None;
        } else if !proven {
            // A client can name any host, and that host can send any bytes. A salt for each source
            // limits the harm to requests that name the same source.
            request.salt = request.salt.map(|salt| salt.of(&source.to_string()));
        }
    }

    /// The room and the source of a choice, from the router's fields. [`FAKE_HOST`] gives the fake
    /// source if `fake_bootstrap` is set.
    pub(super) fn room_and_source(
        &self,
        key: RequestKey,
        choice: usize,
        fake_bootstrap: bool,
        fake_by_default: bool,
        entropy: &mut Entropy,
    ) -> Result<(Room, Source), ApiError> {
        let active = self.active.get(&key);
        if active.is_some_and(|active| active.is_self_test) {
            return Ok((room_of(entropy.next_u64()), Source::Fake));
        }
        let met = active.and_then(|active| active.request.bootstrap.as_ref()?.get(choice).cloned());
        let BootstrapParams { host, port, room } = met.ok_or_else(|| {
            ApiError::invalid(
                "bootstrap_room",
                "is missing: send the request to a router; only mixed workers and decode workers \
                 with --local-prefill serve requests alone",
            )
        })?;
        let port = port.unwrap_or(BOOTSTRAP_PORT);
        let source = match host {
            Some(host) if fake_bootstrap && host == FAKE_HOST => Source::Fake,
            Some(host) => Source::remote(&host, port),
            None if fake_by_default => Source::Fake,
            None => Source::remote("localhost", port),
        };
        Ok((room, source))
    }

    /// The worker with the most free slots. Workers with equally many take turns.
    fn most_free_worker(
        &self,
        workers: &[WorkerId],
        handoff: &Handoff<EngineCommand>,
    ) -> Result<WorkerId, ApiError> {
        assert!(!workers.is_empty(), "a placement names its workers");
        let start = self.turn % workers.len();
        let in_turn = workers[start..].iter().chain(&workers[..start]);
        let best = in_turn.copied().reduce(|best, next| {
            let free = |worker| handoff.worker(worker).free_slots();
            if free(next) > free(best) { next } else { best }
        });
        best.filter(|&worker| handoff.worker(worker).free_slots() > 0)
            .ok_or_else(ApiError::queue_full)
    }

    /// Builds a request with a slot of `worker` and with all the memory that it will need.
    pub(super) fn build_request(
        &mut self,
        place: ChoicePlace<'_>,
        worker: WorkerId,
        room: Room,
        max_new: Option<u32>,
        cx: &mut Context<'_>,
    ) -> Result<Box<EngineRequest>, ApiError> {
        let Some(active) = self.active.get(&place.key) else {
            return Err(ApiError::from_cause(Cause::Internal, "lost"));
        };
        let ChoiceInput { ids, resumed } = place.input;
        debug_assert!(*resumed as usize <= ids.len(), "resumed tokens are a part of the input");
        let asked = &active.request;
        let (deadline, home) = (active.arrived + asked.patience, cx.handoff.worker_mut(worker));
        let room_left = home.tokens().min(self.text.context).saturating_sub(ids.len()) as u32;
        let most = asked.max_tokens.map_or(room_left, |most| most - resumed);
        let max_new = max_new.unwrap_or(most).max(1);
        if ids.len() + max_new as usize > home.tokens() {
            return Err(ApiError::kv_memory_exceeded(ids.len(), max_new as usize, home.tokens()));
        }
        debug_assert!(max_new > 0, "a choice without a token to generate is not placed");
        let slot = home.take_slot(prompt_of(ids), deadline).ok_or_else(ApiError::queue_full)?;
        let keys = home.layout().pages_for(ids.len() as u32 + max_new) as usize;
        // Without groups, no page belongs to tokens.
        let pages = keys * home.groups().total().min(1);
        self.next_request += 1;
        let mut request = Box::new(EngineRequest {
            id: RequestId(self.next_request),
            worker,
            room,
            alone: false,
            keep: false,
            slot: slot.id,
            generation: slot.generation,
            prompt: ids.to_vec(),
            resumed: *resumed,
            output: Vec::with_capacity(max_new as usize),
            pages: RequestPages::with_capacity(pages, home.groups()),
            keys: Vec::with_capacity(keys),
            // A self-test must compute its whole prompt, so it shares no KV.
            salt: (!active.is_self_test).then(|| salt(asked)),
            sampling: sampling(asked, place.sample, cx.reactor.entropy()),
            grammar: None,
            rules: active.rules.clone(),
            top_logprobs: asked.logprobs.unwrap_or(0),
            prompt_logprobs: None,
            priority: asked.priority,
            max_new,
            stop_tokens: active.stop_tokens(&self.config.eos),
            ignore_eos: asked.ignore_eos,
            deadline,
            stamps: Stamps::new(
                match is_failpoint_active("arrival has the time of the placement") {
                    true => cx.now,
                    false => active.arrived,
                },
            ),
        });
        match self.take_grammar(place, &request) {
            Ok(grammar) => {
                request.grammar = grammar;
                Ok(request)
            }
            Err(error) => {
                cx.handoff.release_slot(worker, slot);
                Err(error)
            }
        }
    }

    /// The grammar of a choice for a leg. The leg that generates more than the first token takes
    /// its state, so a choice has one such leg.
    fn take_grammar(
        &mut self,
        place: ChoicePlace<'_>,
        request: &EngineRequest,
    ) -> Result<Option<RequestGrammar>, ApiError> {
        let active = self.active.get_mut(&place.key);
        let grammars = active.map(|active| &mut active.grammars).filter(|all| !all.is_empty());
        let Some(grammars) = grammars else { return Ok(None) };
        let prepared = &mut grammars[place.choice];
        let lost = || ApiError::from_cause(Cause::Internal, "the grammar is lost");
        if request.max_new == 1 {
            let first = &prepared.as_ref().ok_or_else(lost)?.first;
            return Ok(Some(RequestGrammar::of_one_token(first)));
        }
        let PreparedGrammar { state, first } = prepared.take().ok_or_else(lost)?;
        let at = (request.worker, request.slot);
        let grammar = self.masks.begin(at, request.id, state, &first);
        grammar.map(Some).ok_or_else(|| ApiError::busy("too many grammars wait; try again later"))
    }
}

/// Lets an engine compute the logprobs of a prompt, if they are wanted. It computes the prompt
/// without the prefix cache, which has no logprobs.
fn score_prompt(request: &mut EngineRequest, logprobs: Option<Box<PromptLogprobs>>) {
    if logprobs.is_some() {
        request.salt = None;
    }
    request.prompt_logprobs = logprobs;
}

/// The salt of a request in the prefix cache.
fn salt(request: &GenerateRequest) -> Salt {
    let shared = Salt::default();
    request.cache_salt.as_deref().map_or(shared, |text| shared.of(text))
}

/// Sampling parameters of one sample. The samples of a seeded request differ, but the same seed
/// gives the same samples again.
fn sampling(request: &GenerateRequest, sample: usize, entropy: &mut Entropy) -> SamplingParams {
    let asked = &request.sampling;
    let seed = asked.seed.unwrap_or_else(|| entropy.next_u64());
    SamplingParams {
        temperature: asked.temperature,
        top_p: asked.top_p,
        top_k: asked.top_k.unwrap_or(0),
        min_p: asked.min_p,
        presence_penalty: asked.presence_penalty,
        frequency_penalty: asked.frequency_penalty,
        repetition_penalty: asked.repetition_penalty,
        // An odd constant keeps the samples' seeds apart.
        seed: seed.wrapping_add((sample as u64).wrapping_mul(INCREMENT)),
    }
}
