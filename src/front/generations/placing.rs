//! Which workers a choice goes to, and what they are asked.
//!
//! Thread: `ctl`. Takes slots; nothing else is changed before [`Generations::start`].

use super::{Generations, Given, Part};
use crate::config::resolved::{BOOTSTRAP_PORT, FirstToken};
use crate::front::handoff::{self, Source, prompt_of, room_of};
use crate::front::openai::{ApiError, Bootstrap, GenerateRequest, KeptKv, kv_transfer};
use crate::ids::{RequestId, Room, WorkerId};
use crate::kv::prefix::Salt;
use crate::model::sampler::SamplingParams;
use crate::sched::request::{Request, Stamps};
use crate::transfer::manager::rooms::Slot;
use std::time::{Duration, Instant};

/// Which workers of this process a choice's legs go to.
#[derive(Clone, Debug)]
pub enum Placement {
    /// One of each, the hand-off between them.
    Split {
        /// Prefill workers.
        prefill: Vec<WorkerId>,
        /// Decode workers.
        decode: Vec<WorkerId>,
        /// Whose token a stream begins with.
        first_token: FirstToken,
    },
    /// One worker, no hand-off.
    Mixed(Vec<WorkerId>),
    /// This process reads prompts for decode workers elsewhere; a router names the room.
    Prefill {
        /// The worker.
        worker: WorkerId,
        /// Whether at the bootstrap host 2.2.2.2 nobody waits for the KV.
        fake_bootstrap: bool,
        /// Host, if it has one that others reach it by, and port of its registry.
        registry: (Option<String>, u16),
        /// How long a decode worker may take to ask for a request.
        bootstrap_timeout: Duration,
    },
    /// This process takes over from prefill workers elsewhere; a router names them and the room.
    Decode {
        /// The worker.
        worker: WorkerId,
        /// Whether the bootstrap host 2.2.2.2 is the fake source.
        fake_bootstrap: bool,
        /// Whether a request that names no prefill worker has the fake one, too.
        fake_by_default: bool,
        /// Whether prefill workers have proven that they know the cluster key.
        proven: bool,
        /// Whether a request that names none is read here.
        reads_alone: bool,
    },
}

/// SGLang's name for a prefill worker that is none.
const FAKE_HOST: &str = "2.2.2.2";

impl Generations {
    /// Gives one choice to its worker or workers.
    pub(super) fn place(
        &mut self,
        exchange: u64,
        choice: usize,
        sample: usize,
        given: &Given,
        now: Instant,
    ) -> Result<(), ApiError> {
        self.turn += 1;
        match self.terms.placement.clone() {
            Placement::Prefill { worker, fake_bootstrap, .. } => {
                let live = self.live.get(&exchange);
                if let Some((kept, live)) = live.and_then(|live| Some((live.kept.as_ref()?, live)))
                {
                    // Decode that leases pages first must not wait for a pool in which others wait for decode's.
                    let is_claimed =
                        live.request.keeps_kv.as_ref().is_some_and(|keep| keep.claimed);
                    let mut request =
                        self.request(exchange, sample, worker, kept.room(choice), given, Some(1))?;
                    request.keep = !is_claimed;
                    self.start(exchange, choice, Part::Kept, request, None, None, now);
                    return Ok(());
                }
                let (room, source) = self.meeting(exchange, choice, fake_bootstrap, false)?;
                let request = self.request(exchange, sample, worker, room, given, Some(1))?;
                let is_ahead = self
                    .live
                    .get(&exchange)
                    .is_some_and(|live| live.request.stream && live.request.first_token);
                let part = if is_ahead { Part::Ahead } else { Part::Held };
                self.start(exchange, choice, part, request, Some(&source), None, now);
            }
            Placement::Decode { worker, reads_alone: true, .. } if self.comes_alone(exchange) => {
                let mut request = self.request(exchange, sample, worker, Room(0), given, None)?;
                request.alone = true;
                self.start(exchange, choice, Part::Visible, request, None, None, now);
            }
            Placement::Decode { worker, fake_bootstrap, fake_by_default, proven, .. } => {
                let (room, source) =
                    self.meeting(exchange, choice, fake_bootstrap, fake_by_default)?;
                let mut request = self.request(exchange, sample, worker, room, given, None)?;
                self.salt_as_from(&source, proven, &mut request);
                self.start(exchange, choice, Part::Visible, request, Some(&source), None, now);
            }
            Placement::Mixed(workers) => {
                let worker = self.roomiest(&workers)?;
                let request = self.request(exchange, sample, worker, Room(0), given, None)?;
                self.start(exchange, choice, Part::Visible, request, None, None, now);
            }
            Placement::Split { prefill, decode, .. } => {
                let (source, destination) = (self.roomiest(&prefill)?, self.roomiest(&decode)?);
                let room = room_of(random());
                let reader = self.request(exchange, sample, source, room, given, Some(1))?;
                let writer = match self.request(exchange, sample, destination, room, given, None) {
                    Ok(writer) => writer,
                    Err(error) => {
                        let slot = Slot { id: reader.slot, generation: reader.generation };
                        self.handoff.released(source, slot);
                        return Err(error);
                    }
                };
                let partners = (reader.id, writer.id);
                self.start(exchange, choice, Part::Prefill, reader, None, Some(partners.1), now);
                let from = Source::Local(source);
                self.start(
                    exchange,
                    choice,
                    Part::Visible,
                    writer,
                    Some(&from),
                    Some(partners.0),
                    now,
                );
            }
        }
        Ok(())
    }

    /// Where a request's KV is to be kept, if that is asked for.
    ///
    /// # Errors
    /// It cannot be kept here, or nobody could be told where it is.
    pub(super) fn keeps(&self, request: &GenerateRequest) -> Result<Option<KeptKv>, ApiError> {
        let refused = |why| Err(ApiError::invalid(kv_transfer::FIELD, why));
        let Some(keep) = &request.keeps_kv else { return Ok(None) };
        match &self.terms.placement {
            _ if request.bootstrap.is_some() => refused("and bootstrap_room exclude each other"),
            Placement::Prefill { registry: (own, port), .. } => {
                match keep.host.as_ref().or(own.as_ref()) {
                    Some(host) => {
                        Ok(Some(KeptKv::new(host, keep.port.unwrap_or(*port), room_of(random()))))
                    }
                    None => refused(
                        "needs an address that decode workers reach: in its remote_host, or by this worker's --advertise-host",
                    ),
                }
            }
            Placement::Split { .. } | Placement::Mixed(_) | Placement::Decode { .. } => {
                refused("asks to keep KV for a decode worker; this is no prefill worker")
            }
        }
    }

    /// Whether nobody is to hand anything over to it.
    fn comes_alone(&self, exchange: u64) -> bool {
        self.live.get(&exchange).is_some_and(|live| live.request.bootstrap.is_none() && !live.trial)
    }

    /// Who shares what comes from this source.
    pub(super) fn salt_as_from(&self, source: &Source, proven: bool, request: &mut Request) {
        if *source == Source::Fake {
            // It goes on from KV that nobody computed, which is nobody else's to go on from.
            request.salt = None;
        } else if !proven {
            // Whoever a client names is asked, and may send anything: that harms its own clients alone.
            request.salt = request.salt.map(|salt| salt.of(&source.to_string()));
        }
    }

    /// Where the two legs of a choice meet: as the router said, or nowhere. [`FAKE_HOST`] names nowhere where
    /// that is honoured.
    pub(super) fn meeting(
        &self,
        exchange: u64,
        choice: usize,
        fake_bootstrap: bool,
        fake_by_default: bool,
    ) -> Result<(Room, Source), ApiError> {
        let live = self.live.get(&exchange);
        if live.is_some_and(|live| live.trial) {
            return Ok((room_of(random()), Source::Fake));
        }
        let met = live.and_then(|live| live.request.bootstrap.as_ref()?.get(choice).cloned());
        let Bootstrap { host, port, room } = met.ok_or_else(|| {
            ApiError::invalid(
                "bootstrap_room",
                "is needed: this worker takes part in a hand-off and serves no request alone (a decode worker does \
                 with --local-prefill)",
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

    /// The worker with most free slots; of equals, in turn.
    fn roomiest(&self, workers: &[WorkerId]) -> Result<WorkerId, ApiError> {
        let start = self.turn % workers.len();
        let in_turn = workers[start..].iter().chain(&workers[..start]);
        let best = in_turn.copied().reduce(|best, next| {
            let free = |worker| self.handoff.worker(worker).free_slots();
            if free(next) > free(best) { next } else { best }
        });
        best.filter(|&worker| self.handoff.worker(worker).free_slots() > 0)
            .ok_or_else(|| ApiError::overloaded(1))
    }

    /// A request with a slot of `worker` and everything allocated that it will ever need.
    #[allow(clippy::too_many_arguments)] // One place where a request is made; each has its own type.
    pub(super) fn request(
        &mut self,
        exchange: u64,
        sample: usize,
        worker: WorkerId,
        room: Room,
        given: &Given,
        max_new: Option<u32>,
    ) -> Result<Box<Request>, ApiError> {
        let Some(live) = self.live.get(&exchange) else {
            return Err(ApiError::new(500, "internal", "lost"));
        };
        let Given { ids, resumed } = given;
        let asked = &live.request;
        let deadline = live.arrived + asked.patience;
        let home = self.handoff.worker_mut(worker);
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
        let ending = if asked.ignore_eos { &[][..] } else { &self.terms.eos };
        self.next_request += 1;
        Ok(Box::new(Request {
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
            // What tries a worker out does all the work.
            salt: (!live.trial).then(|| {
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

/// Sampling of one sample: the n samples of a seeded request differ, and the same seed gives the same n.
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

/// 64 bits for rooms and seeds.
fn random() -> u64 {
    u64::from_le_bytes(handoff::random())
}
