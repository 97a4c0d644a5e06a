//! Which workers a choice goes to, and what they are asked to do.
//!
//! Thread: `ctl`. Takes slots. Everything else changes in [`RequestTable::start_leg`].

use super::{ChoiceInput, Context, LegKind, RequestTable};
use crate::api::{ApiError, BootstrapParams, GenerateRequest, KeptKv, kv_transfer};
use crate::config::{BOOTSTRAP_PORT, FirstToken};
use crate::ids::{RequestId, Room, WorkerId};
use crate::kv::prefix::Salt;
use crate::model::sampler::SamplingParams;
use crate::peer::handoff::{self, Handoff, Source, prompt_of, room_of};
use crate::sched::request::{EngineRequest, Stamps};
use crate::transfer::manager::rooms::Slot;
use std::time::Duration;

/// Which workers of this process run a choice's legs.
#[derive(Clone, Debug)]
pub enum Placement {
    /// One prefill and one decode worker, with a hand-off between them.
    Split {
        /// Prefill workers.
        prefill: Vec<WorkerId>,
        /// Decode workers.
        decode: Vec<WorkerId>,
        /// Which leg's token begins a stream.
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
        /// Host and port of its bootstrap registry. `None`: no host is known that others can reach.
        registry: (Option<String>, u16),
        /// How long a decode worker can take to ask for a request.
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
        /// Whether prefill workers prove the cluster key.
        proven: bool,
        /// Whether this worker computes the prompt if the request names no prefill worker.
        reads_alone: bool,
    },
}

/// SGLang's host name for a fake prefill worker.
const FAKE_HOST: &str = "2.2.2.2";

impl RequestTable {
    /// Gives one choice to its worker or workers.
    pub(super) fn place_choice(
        &mut self,
        exchange: u64,
        choice: usize,
        sample: usize,
        given: &ChoiceInput,
        cx: &mut Context<'_>,
    ) -> Result<(), ApiError> {
        self.turn += 1;
        match self.config.placement.clone() {
            Placement::Prefill { worker, fake_bootstrap, .. } => {
                let live = self.active.get(&exchange);
                if let Some((kept, live)) = live.and_then(|live| Some((live.kept.as_ref()?, live)))
                {
                    // If decode claims the KV itself, prefill computes after the claim. Otherwise
                    // decode could hold pages while it waits for this pool, and this pool for
                    // decode's pages.
                    let is_claimed =
                        live.request.keeps_kv.as_ref().is_some_and(|keep| keep.claimed);
                    let mut request = self.build_request(
                        exchange,
                        sample,
                        worker,
                        kept.room(choice),
                        given,
                        Some(1),
                        cx.handoff,
                    )?;
                    request.keep = !is_claimed;
                    self.start_leg(exchange, choice, LegKind::KvKept, request, None, None, cx);
                    return Ok(());
                }
                let (room, source) =
                    self.room_and_source(exchange, choice, fake_bootstrap, false)?;
                let request =
                    self.build_request(exchange, sample, worker, room, given, Some(1), cx.handoff)?;
                let is_ahead = self
                    .active
                    .get(&exchange)
                    .is_some_and(|live| live.request.stream && live.request.first_token);
                let part = if is_ahead {
                    LegKind::TokenBeforeHandover
                } else {
                    LegKind::TokenAfterHandover
                };
                self.start_leg(exchange, choice, part, request, Some(&source), None, cx);
            }
            Placement::Decode { worker, reads_alone: true, .. } if self.comes_alone(exchange) => {
                let mut request =
                    self.build_request(exchange, sample, worker, Room(0), given, None, cx.handoff)?;
                request.alone = true;
                self.start_leg(exchange, choice, LegKind::Visible, request, None, None, cx);
            }
            Placement::Decode { worker, fake_bootstrap, fake_by_default, proven, .. } => {
                let (room, source) =
                    self.room_and_source(exchange, choice, fake_bootstrap, fake_by_default)?;
                let mut request =
                    self.build_request(exchange, sample, worker, room, given, None, cx.handoff)?;
                self.salt_as_from(&source, proven, &mut request);
                self.start_leg(
                    exchange,
                    choice,
                    LegKind::Visible,
                    request,
                    Some(&source),
                    None,
                    cx,
                );
            }
            Placement::Mixed(workers) => {
                let worker = self.most_free_worker(&workers, cx.handoff)?;
                let request =
                    self.build_request(exchange, sample, worker, Room(0), given, None, cx.handoff)?;
                self.start_leg(exchange, choice, LegKind::Visible, request, None, None, cx);
            }
            Placement::Split { prefill, decode, .. } => {
                let (source, destination) = (
                    self.most_free_worker(&prefill, cx.handoff)?,
                    self.most_free_worker(&decode, cx.handoff)?,
                );
                let room = room_of(random());
                let reader =
                    self.build_request(exchange, sample, source, room, given, Some(1), cx.handoff)?;
                let writer = match self.build_request(
                    exchange,
                    sample,
                    destination,
                    room,
                    given,
                    None,
                    cx.handoff,
                ) {
                    Ok(writer) => writer,
                    Err(error) => {
                        let slot = Slot { id: reader.slot, generation: reader.generation };
                        cx.handoff.release_slot(source, slot);
                        return Err(error);
                    }
                };
                let partners = (reader.id, writer.id);
                self.start_leg(
                    exchange,
                    choice,
                    LegKind::Prefill,
                    reader,
                    None,
                    Some(partners.1),
                    cx,
                );
                let from = Source::Local(source);
                self.start_leg(
                    exchange,
                    choice,
                    LegKind::Visible,
                    writer,
                    Some(&from),
                    Some(partners.0),
                    cx,
                );
            }
        }
        Ok(())
    }

    /// Where a request's KV will be kept, if the client asks for that.
    ///
    /// # Errors
    /// The KV cannot be kept here, or there is no address to announce.
    pub(super) fn keeps(&self, request: &GenerateRequest) -> Result<Option<KeptKv>, ApiError> {
        let refused = |why| Err(ApiError::invalid(kv_transfer::FIELD, why));
        let Some(keep) = &request.keeps_kv else { return Ok(None) };
        match &self.config.placement {
            _ if request.bootstrap.is_some() => refused("and bootstrap_room exclude each other"),
            Placement::Prefill { registry: (own, port), .. } => {
                match keep.host.as_ref().or(own.as_ref()) {
                    Some(host) => {
                        Ok(Some(KeptKv::new(host, keep.port.unwrap_or(*port), room_of(random()))))
                    }
                    None => refused(
                        "needs an address that decode workers reach: in its remote_host, or by \
                         this worker's --advertise-host",
                    ),
                }
            }
            Placement::Split { .. } | Placement::Mixed(_) | Placement::Decode { .. } => {
                refused("asks to keep KV for a decode worker; this is no prefill worker")
            }
        }
    }

    /// Whether the request names no prefill worker and is no self-test.
    fn comes_alone(&self, exchange: u64) -> bool {
        self.active
            .get(&exchange)
            .is_some_and(|live| live.request.bootstrap.is_none() && !live.is_self_test)
    }

    /// Sets which requests can share KV from this source.
    pub(super) fn salt_as_from(&self, source: &Source, proven: bool, request: &mut EngineRequest) {
        if *source == Source::Fake {
            // No worker computed this KV, so no other request must use it.
            request.salt = None;
        } else if !proven {
            // A client can name any host, and that host can send anything. A salt per source limits
            // the harm to requests that name the same source.
            request.salt = request.salt.map(|salt| salt.of(&source.to_string()));
        }
    }

    /// The room and the source of a choice, from the router's fields. [`FAKE_HOST`] gives the fake
    /// source if `fake_bootstrap` is set.
    pub(super) fn room_and_source(
        &self,
        exchange: u64,
        choice: usize,
        fake_bootstrap: bool,
        fake_by_default: bool,
    ) -> Result<(Room, Source), ApiError> {
        let live = self.active.get(&exchange);
        if live.is_some_and(|live| live.is_self_test) {
            return Ok((room_of(random()), Source::Fake));
        }
        let met = live.and_then(|live| live.request.bootstrap.as_ref()?.get(choice).cloned());
        let BootstrapParams { host, port, room } = met.ok_or_else(|| {
            ApiError::invalid(
                "bootstrap_room",
                "is needed: this worker takes part in a hand-off and serves no request alone \
                 (a decode worker does with --local-prefill)",
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

    /// The worker with the most free slots; equal ones in turn.
    fn most_free_worker(
        &self,
        workers: &[WorkerId],
        handoff: &Handoff,
    ) -> Result<WorkerId, ApiError> {
        let start = self.turn % workers.len();
        let in_turn = workers[start..].iter().chain(&workers[..start]);
        let best = in_turn.copied().reduce(|best, next| {
            let free = |worker| handoff.worker(worker).free_slots();
            if free(next) > free(best) { next } else { best }
        });
        best.filter(|&worker| handoff.worker(worker).free_slots() > 0)
            .ok_or_else(|| ApiError::overloaded(1))
    }

    /// A request with a slot of `worker` and all the memory that it will ever need.
    #[allow(clippy::too_many_arguments)] // The only constructor of a request.
    pub(super) fn build_request(
        &mut self,
        exchange: u64,
        sample: usize,
        worker: WorkerId,
        room: Room,
        given: &ChoiceInput,
        max_new: Option<u32>,
        handoff: &mut Handoff,
    ) -> Result<Box<EngineRequest>, ApiError> {
        let Some(live) = self.active.get(&exchange) else {
            return Err(ApiError::new(500, "internal", "lost"));
        };
        let ChoiceInput { ids, resumed } = given;
        let asked = &live.request;
        let deadline = live.arrived + asked.patience;
        let home = handoff.worker_mut(worker);
        let room_left =
            home.tokens().min(self.text.context).saturating_sub(ids.len()).max(1) as u32;
        let max_new =
            max_new.unwrap_or_else(|| asked.max_tokens.map_or(room_left, |most| most - resumed));
        if ids.len() + max_new as usize > home.tokens() {
            return Err(ApiError::kv_memory_exceeded(ids.len(), max_new as usize, home.tokens()));
        }
        let slot =
            home.take_slot(prompt_of(ids), deadline).ok_or_else(|| ApiError::overloaded(1))?;
        let pages = home.layout().pages_for(ids.len() as u32 + max_new) as usize;
        let ending = if asked.ignore_eos { &[][..] } else { &self.config.eos };
        self.next_request += 1;
        Ok(Box::new(EngineRequest {
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
            pages: Vec::with_capacity(pages),
            // A self-test must compute everything, so it shares nothing.
            salt: (!live.is_self_test).then(|| {
                let shared = Salt::default();
                asked.cache_salt.as_deref().map_or(shared, |text| shared.of(text))
            }),
            sampling: sampling(asked, sample),
            top_logprobs: asked.logprobs.unwrap_or(0),
            max_new,
            stop_tokens: ending.iter().chain(&asked.stop_token_ids).copied().collect(),
            ignore_eos: asked.ignore_eos,
            deadline,
            stamps: Stamps::new(live.arrived),
        }))
    }
}

/// Sampling parameters of one sample. The n samples of a seeded request differ, and the same seed
/// gives the same n samples.
fn sampling(request: &GenerateRequest, sample: usize) -> SamplingParams {
    let asked = &request.sampling;
    let seed = asked.seed.unwrap_or_else(random);
    SamplingParams {
        temperature: asked.temperature,
        top_p: asked.top_p,
        top_k: asked.top_k.unwrap_or(0),
        min_p: asked.min_p,
        presence_penalty: asked.presence_penalty,
        frequency_penalty: asked.frequency_penalty,
        repetition_penalty: asked.repetition_penalty,
        // An odd constant (2^64 over the golden ratio) keeps the samples' seeds apart.
        seed: seed.wrapping_add((sample as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)),
    }
}

/// 64 random bits for rooms and seeds.
fn random() -> u64 {
    u64::from_le_bytes(handoff::random())
}
