//! A request for text before any worker has it: what is refused at once, its prompts as ids, and what each of its choices is
//! computed from.
//!
//! Thread: `ctl`. Invariant: what a client has of an answer is told to its choices before any of them is placed. Not here: the
//! tokeniser (`text`), places (`placing`).

use super::live::{First, Given};
use super::{Generations, Way};
use crate::cause::Cause;
use crate::front::connections::{Answer, JSON};
use crate::front::exchange::{Exchange, Prompted, echoes};
use crate::front::openai::render::Renderer;
use crate::front::openai::{ApiError, GenerateRequest, Prompts, resume};
use crate::front::stages::ChoiceTimes;
use crate::front::text::{self, Made, prompt_param};
use crate::net::ConnId;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

impl Generations {
    /// Refuses a model that is not served here.
    pub fn check_model(&self, name: Option<&str>) -> Result<(), ApiError> {
        match name {
            Some(name) if !self.terms.names.iter().any(|own| own == name) => {
                Err(ApiError::model_not_found(name, &self.terms.names))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn check(&self, request: &GenerateRequest) -> Result<(), ApiError> {
        self.check_model(request.model.as_deref())?;
        // One token there always is.
        if request.min_tokens > u32::from(request.keeps_kv.is_some()) {
            return Err(ApiError::unsupported("min_tokens"));
        }
        let choices = request.prompts.len() * request.samples;
        let most = self.terms.choices;
        if choices > most {
            let message = format!(
                "asks for {choices} choices at once; a worker here has {most} places for requests that run or wait \
                 (--max-running-requests and --max-queued-requests)"
            );
            return Err(ApiError::new(400, "too_many_choices", message));
        }
        Ok(())
    }

    /// The tokeniser is done with a job, whose client may have gone.
    pub(super) fn answered(&mut self, answer: text::Answer, way: &mut Way<'_>) {
        let text::Answer { id, made } = answer;
        match (made, self.converted(id)) {
            (Ok(Made::Body(body)), Some(conn)) => {
                way.answer(
                    conn,
                    &Answer { status: 200, media: JSON, body: &body, retry_after: None },
                );
            }
            (Err(error), Some(conn)) => way.refuse(conn, &error),
            (Ok(Made::Ids(prompts, ids)), _) => self.tokenised(id, &prompts, ids, way),
            (Err(error), None) => self.fail(id, &error, Cause::Refused, way),
            (Ok(Made::Body(_)), None) => {}
        }
    }

    /// Takes the client of a conversion, if that is one and the client waits.
    pub(super) fn converted(&mut self, id: u64) -> Option<ConnId> {
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
        let echoed =
            if request.echo { echoes(prompts, &ids, &self.text.tokenizer) } else { Vec::new() };
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
        let renderer =
            Renderer::new(request, &live.id, created, &self.terms.names[0]).with_kept(kept);
        let exchange =
            Exchange::new(request, renderer, &prompted, &self.terms.eos, live.id.clone());
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
        live.timings[choice].resumed = told.ids.len() as u32;
        Ok((!exchange.has_ended(choice)).then(|| Given {
            ids: prompt.iter().chain(&told.ids).copied().collect(),
            resumed: told.ids.len() as u32,
        }))
    }

    fn fits(&self, request: &GenerateRequest, param: &str, prompt: usize) -> Result<(), ApiError> {
        let answer = request.max_tokens.map_or(1, |max| max as usize);
        if prompt + answer > self.text.context {
            return Err(ApiError::context_length_exceeded(
                param,
                prompt,
                answer,
                self.text.context,
            ));
        }
        Ok(())
    }
}
