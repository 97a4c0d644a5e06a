//! A request for text before a worker has it: early refusals, token ids of its prompts, and the
//! input of each choice.
//!
//! Thread: `ctl`. Invariant: all choices get what the client already has before one of them is
//! placed. Not here: the tokeniser (`text`), the choice of workers (`placement`).

use super::active::{ChoiceInput, FirstTokenState};
use super::{Context, RequestTable};
use crate::api::render::Renderer;
use crate::api::{ApiError, GenerateRequest, Prompts, resume};
use crate::cause::Cause;
use crate::http::response::{JSON, Response};
use crate::net::ConnId;
use crate::worker::response::{PreparedPrompt, ResponseBuilder, echoes};
use crate::worker::stages::ChoiceTimes;
use crate::worker::text::{self, TextOutput, prompt_param};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

impl RequestTable {
    /// Refuses a model that is not served here.
    ///
    /// # Errors
    /// The name is not one of this worker's names.
    pub fn check_model(&self, name: Option<&str>) -> Result<(), ApiError> {
        match name {
            Some(name) if !self.config.names.iter().any(|own| own == name) => {
                Err(ApiError::model_not_found(name, &self.config.names))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn check_request(&self, request: &GenerateRequest) -> Result<(), ApiError> {
        self.check_model(request.model.as_deref())?;
        // A request that keeps KV always gets one token.
        if request.min_tokens > u32::from(request.keeps_kv.is_some()) {
            return Err(ApiError::unsupported("min_tokens"));
        }
        let choices = request.prompts.len() * request.samples;
        let most = self.config.choices;
        if choices > most {
            let message = format!(
                "asks for {choices} choices at once; a worker here has {most} places for \
                 requests that run or wait (--max-running-requests and --max-queued-requests)"
            );
            return Err(ApiError::new(400, "too_many_choices", message));
        }
        Ok(())
    }

    /// Takes a result of the tokeniser. Its client can have gone.
    pub(super) fn handle_text_result(&mut self, answer: text::TextResult, cx: &mut Context<'_>) {
        let text::TextResult { id, made } = answer;
        match (made, self.converted(id)) {
            (Ok(TextOutput::Body(body)), Some(conn)) => {
                cx.send_response(
                    conn,
                    &Response { status: 200, media: JSON, body: &body, retry_after: None },
                );
            }
            (Err(error), Some(conn)) => cx.send_error(conn, &error),
            (Ok(TextOutput::Ids(prompts, ids)), _) => self.handle_tokens(id, &prompts, ids, cx),
            (Err(error), None) => self.fail_request(id, &error, Cause::Refused, cx),
            (Ok(TextOutput::Body(_)), None) => {}
        }
    }

    /// Removes a conversion and returns its client. `None`: `id` is no conversion, or its client
    /// has gone.
    pub(super) fn converted(&mut self, id: u64) -> Option<ConnId> {
        let (conn, _) = self.converting.remove(&id)?;
        self.forget_connection(conn);
        Some(conn)
    }

    fn handle_tokens(
        &mut self,
        id: u64,
        prompts: &Prompts,
        ids: Vec<Vec<u32>>,
        cx: &mut Context<'_>,
    ) {
        let Some(live) = self.active.get(&id) else { return };
        let param = prompt_param(live.request.endpoint, prompts);
        let fit = ids
            .iter()
            .try_for_each(|ids| self.check_context_length(&live.request, param, ids.len()));
        if let Err(error) = fit {
            return self.fail_request(id, &error, Cause::Refused, cx);
        }
        let Some(live) = self.active.get_mut(&id) else { return };
        let request = &live.request;
        let echoed =
            if request.echo { echoes(prompts, &ids, &self.text.tokenizer) } else { Vec::new() };
        let prompted: Vec<PreparedPrompt> = ids
            .into_iter()
            .enumerate()
            .map(|(index, ids)| PreparedPrompt {
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
            Renderer::new(request, &live.id, created, &self.config.names[0]).with_kept(kept);
        let exchange =
            ResponseBuilder::new(request, renderer, &prompted, &self.config.eos, live.id.clone());
        live.response = Some(exchange);
        live.timings = vec![ChoiceTimes::default(); prompted.len() * request.samples];
        live.first_tokens = vec![FirstTokenState::default(); live.timings.len()];
        let samples = request.samples;
        let mut out = Vec::new();
        let mut open = Vec::new();
        // Resume all choices before anything is sent. The opening event of a stream covers only
        // choices that the client has nothing of.
        for choice in 0..prompted.len() * samples {
            match self.resume_choice(id, choice, &prompted[choice / samples].ids, &mut out) {
                Ok(given) => open.extend(given.map(|given| (choice, given))),
                Err(error) => return self.fail_request(id, &error, Cause::Refused, cx),
            }
        }
        if let Some(live) = self.active.get_mut(&id).filter(|_| !out.is_empty()) {
            live.stream(&out, cx);
        }
        if self.active.get(&id).is_some_and(|live| live.pending_prefill.is_some()) {
            return self.ask_prefill(id, open, samples, cx);
        }
        for (choice, given) in open {
            if let Err(error) = self.place_choice(id, choice, choice % samples, &given, cx) {
                let cause = if error.status == 429 { Cause::Overloaded } else { Cause::Refused };
                return self.fail_request(id, &error, cause, cx);
            }
        }
        // Send at once where the KV will be, so that decode asks for it while it is computed.
        if let Some(live) = self.active.get_mut(&id).filter(|live| live.kept.is_some()) {
            live.stream(&[], cx);
        }
        self.close_if_over(id, cx);
    }

    /// The input of a choice: its prompt, then what the client already has of the answer. `None`:
    /// the client has all tokens. If only the end is missing, appends it to `out`.
    fn resume_choice(
        &mut self,
        id: u64,
        choice: usize,
        prompt: &Arc<[u32]>,
        out: &mut Vec<u8>,
    ) -> Result<Option<ChoiceInput>, ApiError> {
        let given = ChoiceInput { ids: prompt.clone(), resumed: 0 };
        let Some(live) = self.active.get_mut(&id) else { return Ok(None) };
        let Some(exchange) = live.response.as_mut() else { return Ok(None) };
        let Some(told) = live.request.resume.as_ref().and_then(|resume| resume.told(choice)) else {
            return Ok(Some(given));
        };
        let vocab = self.text.tokenizer.vocab_size();
        if told.ids.iter().any(|&id| id as usize >= vocab) {
            return Err(ApiError::invalid(
                resume::FIELD,
                format!("has an id outside the vocabulary of {vocab} ids"),
            ));
        }
        let room = self.text.context - prompt.len();
        let most = live.request.max_tokens.map_or(room, |most| most as usize);
        if told.ids.len() > most {
            return Err(ApiError::invalid(
                resume::FIELD,
                format!("has more ids than the maximum of {most}"),
            ));
        }
        exchange.resume_choice(choice, told, most, &self.text.tokenizer, out);
        live.timings[choice].resumed = told.ids.len() as u32;
        Ok((!exchange.has_ended(choice)).then(|| ChoiceInput {
            ids: prompt.iter().chain(&told.ids).copied().collect(),
            resumed: told.ids.len() as u32,
        }))
    }

    fn check_context_length(
        &self,
        request: &GenerateRequest,
        param: &str,
        prompt: usize,
    ) -> Result<(), ApiError> {
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
