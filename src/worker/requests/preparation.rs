//! A request for text before its placement: early refusals, token ids of its prompts, and the input
//! of each choice.
//!
//! Thread: `ctl`. Invariant: all choices are resumed before one of them is placed. Not here: the
//! tokeniser (`text`), the choice of workers (`placement`).

use super::active_request::{ActiveRequest, ChoiceInput, FirstTokenState};
use super::{ChoicePlace, Context, RequestTable, ServingConfig};
use crate::api::info::TokenizerInfo;
use crate::api::render::Renderer;
use crate::api::{ApiError, ErrorCode, GenerateRequest, Prompts, resume};
use crate::cause::Cause;
use crate::http::response::{JSON, Response};
use crate::ids::RequestKey;
use crate::limits::PROMPT_LOGPROBS_BYTES_MAX;
use crate::model::answer::{AnswerRules, ReasoningStart, ToolFormat};
use crate::model::chat::ChatTemplate;
use crate::model::logprobs::PromptLogprobs;
use crate::net::ConnId;
use crate::worker::response::{PreparedPrompt, ResponseBuilder, echoes};
use crate::worker::stages::ChoiceTimes;
use crate::worker::text::{
    self, GrammarTask, PreparedPrompts, PromptTask, TextOutput, TextProcessor, TextTask,
    prompt_param,
};
use std::sync::Arc;

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

    /// What clients with a tokeniser of their own need.
    pub fn tokenizer_info(&self) -> TokenizerInfo<'_> {
        let TextProcessor { tokenizer, chat, .. } = &*self.text;
        TokenizerInfo {
            bos_token: chat.as_ref().and_then(|chat| chat.special("bos_token")),
            eos_token: self.config.eos.first().map(|&id| tokenizer.token_text(id)),
            chat_template: chat.as_ref().map(ChatTemplate::source),
        }
    }

    pub(super) fn check_request(&self, request: &GenerateRequest) -> Result<(), ApiError> {
        self.check_model(request.model.as_deref())?;
        let choices = request.prompts.len() * request.samples;
        let most = self.config.choices;
        if choices > most {
            let message = format!(
                "asks for {choices} choices at once, but a worker has only {most} places for \
                 requests that run or wait (--max-running-requests and --max-queued-requests)"
            );
            return Err(ApiError::new(400, ErrorCode::TooManyChoices, message));
        }
        Ok(())
    }

    /// Takes a result of the tokeniser. Its client can have disconnected.
    pub(super) fn handle_text_result(&mut self, answer: text::TextResult, cx: &mut Context<'_>) {
        let text::TextResult { key, made } = answer;
        match (made, self.converted(key)) {
            (Ok(TextOutput::Body(body)), Some(conn)) => {
                cx.send_response(
                    conn,
                    &Response { status: 200, media: JSON, body: &body, retry_after: None },
                );
            }
            (Err(error), Some(conn)) => cx.send_error(conn, &error),
            (Ok(TextOutput::Prompts(prepared)), _) => {
                let PreparedPrompts { prompts, ids, grammars, rules } = *prepared;
                if let Some(active) = self.active.get_mut(&key) {
                    active.grammars = grammars.into_iter().map(Some).collect();
                    active.set_rules(rules, &self.config.eos);
                }
                self.handle_tokens(key, &prompts, ids, cx);
            }
            (Err(error), None) => self.fail_request(key, &error, Cause::Refused, cx),
            (Ok(TextOutput::Body(_)), None) => {}
        }
    }

    /// Removes a conversion and returns its client. `None`: `key` is no conversion, or its client
    /// has disconnected.
    pub(super) fn converted(&mut self, key: RequestKey) -> Option<ConnId> {
        let (conn, _) = self.converting.remove(&key)?;
        self.forget_connection(conn);
        Some(conn)
    }

    fn handle_tokens(
        &mut self,
        key: RequestKey,
        prompts: &Prompts,
        ids: Vec<Vec<u32>>,
        cx: &mut Context<'_>,
    ) {
        let Some(active) = self.active.get(&key) else { return };
        debug_assert_eq!(ids.len(), prompts.len(), "each prompt has its ids");
        debug_assert!(active.response.is_none(), "a request is tokenised once");
        let param = prompt_param(active.request.endpoint, prompts);
        let fit = ids
            .iter()
            .try_for_each(|ids| self.check_context_length(&active.request, param, ids.len()))
            .and_then(|()| check_prompt_logprobs(&active.request, &ids));
        if let Err(error) = fit {
            return self.fail_request(key, &error, Cause::Refused, cx);
        }
        let Some(active) = self.active.get_mut(&key) else { return };
        let begun = active.request.resume.as_ref().and_then(|resume| resume.created);
        let created = begun.unwrap_or_else(|| cx.reactor.since_epoch().as_secs());
        let (response, prompted) =
            build_response(active, (prompts, ids), &self.text, &self.config, created);
        let request = &active.request;
        active.response = Some(response);
        active.count_tokens(cx);
        active.timings = vec![ChoiceTimes::default(); prompted.len() * request.samples];
        active.first_tokens = vec![FirstTokenState::default(); active.timings.len()];
        active.prompt_logprobs.resize_with(active.timings.len(), Default::default);
        let samples = request.samples;
        let mut out = Vec::new();
        let mut open = Vec::new();
        // Resumes all choices before anything is sent, because the opening event of a stream
        // includes only choices of which the client has no token.
        for choice in 0..prompted.len() * samples {
            match self.resume_choice(key, choice, &prompted[choice / samples].ids, &mut out) {
                Ok(given) => open.extend(given.map(|given| (choice, given))),
                Err(error) => return self.fail_request(key, &error, Cause::Refused, cx),
            }
        }
        if let Some(active) = self.active.get_mut(&key).filter(|_| !out.is_empty()) {
            active.stream(&out, cx);
        }
        if self.active.get(&key).is_some_and(|active| active.pending_prefill.is_some()) {
            return self.ask_prefill(key, open, samples, cx);
        }
        for (choice, given) in open {
            let place = ChoicePlace { key, choice, sample: choice % samples, input: &given };
            if let Err(error) = self.place_choice(place, cx) {
                let cause = if error.status == 429 { Cause::Overloaded } else { Cause::Refused };
                return self.fail_request(key, &error, cause, cx);
            }
        }
        // Sends the place of the KV at once, so that decode asks for the KV while it is computed.
        if let Some(active) = self.active.get_mut(&key).filter(|active| active.kept.is_some()) {
            active.stream(&[], cx);
        }
        self.close_if_over(key, cx);
    }

    /// The input of a choice: its prompt, then the tokens of the answer that the client already
    /// has. `None`: the client has all tokens. If only the end of the answer is missing, appends it
    /// to `out`.
    fn resume_choice(
        &mut self,
        key: RequestKey,
        choice: usize,
        prompt: &Arc<[u32]>,
        out: &mut Vec<u8>,
    ) -> Result<Option<ChoiceInput>, ApiError> {
        let given = ChoiceInput { ids: prompt.clone(), resumed: 0 };
        let Some(active) = self.active.get_mut(&key) else { return Ok(None) };
        let Some(response) = active.response.as_mut() else { return Ok(None) };
        let Some(progress) =
            active.request.resume.as_ref().and_then(|resume| resume.progress_of(choice))
        else {
            return Ok(Some(given));
        };
        let vocab = self.text.tokenizer.vocab_size();
        if progress.ids.iter().any(|&id| id as usize >= vocab) {
            return Err(ApiError::invalid(
                resume::FIELD,
                format!("has an id outside the vocabulary of {vocab} ids"),
            ));
        }
        debug_assert!(prompt.len() <= self.text.context, "a prompt was checked before its choices");
        let room = self.text.context - prompt.len();
        let most = active.request.max_tokens.map_or(room, |most| most as usize);
        if progress.ids.len() > most {
            return Err(ApiError::invalid(
                resume::FIELD,
                format!("has more ids than the maximum of {most}"),
            ));
        }
        response.resume_choice(choice, progress, most, &self.text.tokenizer, out);
        active.timings[choice].resumed = progress.ids.len() as u32;
        Ok((!response.has_ended(choice)).then(|| ChoiceInput {
            ids: prompt.iter().chain(&progress.ids).copied().collect(),
            resumed: progress.ids.len() as u32,
        }))
    }

    fn check_context_length(
        &self,
        request: &GenerateRequest,
        param: &str,
        prompt: usize,
    ) -> Result<(), ApiError> {
        // Without a token to generate, one is generated and dropped.
        let answer = request.max_tokens.map_or(1, |max| max.max(1) as usize);
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

/// Refuses a request for more logprobs of its prompts than a request can have.
fn check_prompt_logprobs(request: &GenerateRequest, ids: &[Vec<u32>]) -> Result<(), ApiError> {
    let Some(wanted) = request.prompt_logprobs else { return Ok(()) };
    let tokens = |ids: &Vec<u32>| wanted.positions(ids.len() as u32).len();
    let tokens = ids.iter().map(tokens).sum::<usize>() * request.samples;
    let bytes = PromptLogprobs::bytes_for(tokens, wanted.top);
    if bytes <= PROMPT_LOGPROBS_BYTES_MAX {
        return Ok(());
    }
    let why = format!(
        "the logprobs of {tokens} tokens of prompts with {} alternatives take {bytes} bytes, and \
         the limit is {PROMPT_LOGPROBS_BYTES_MAX}",
        wanted.top
    );
    Err(ApiError::from_cause(Cause::Refused, why))
}

/// Takes the prompts, the rules and the grammar out of a request, for the tokeniser.
pub(super) fn take_prompt_task(request: &mut GenerateRequest) -> TextTask {
    let choices = request.prompts.len() * request.samples;
    let can_reason = matches!(&request.prompts, Prompts::Chat(chat) if !chat.continues);
    let prompts = std::mem::replace(&mut request.prompts, Prompts::Ids(Vec::new()));
    TextTask::Prompts(PromptTask {
        prompts,
        endpoint: request.endpoint,
        rules: std::mem::take(&mut request.rules),
        add_special: request.add_special_tokens,
        grammar: request.structured.take().map(|grammar| GrammarTask {
            grammar,
            answered: answered(request, choices),
            can_reason,
        }),
    })
}

/// By choice: the ids that the client already has.
fn answered(request: &GenerateRequest, choices: usize) -> Vec<Vec<u32>> {
    let resume = request.resume.as_ref();
    let progress = |choice| resume.and_then(|resume| resume.progress_of(choice));
    (0..choices).map(|choice| progress(choice).map_or(Vec::new(), |it| it.ids.clone())).collect()
}

/// The answer of a request that has no token yet, and its prompts. It begins at `created` seconds
/// of Unix time.
fn build_response(
    active: &ActiveRequest,
    (prompts, ids): (&Prompts, Vec<Vec<u32>>),
    text: &TextProcessor,
    config: &ServingConfig,
    created: u64,
) -> (ResponseBuilder, Vec<PreparedPrompt>) {
    let (request, style) = (&active.request, &text.style);
    let echoed = if request.echo { echoes(prompts, &ids, &text.tokenizer) } else { Vec::new() };
    let has_grammar = !active.grammars.is_empty();
    let rules = request.answer_rules(style).map(|rules| AnswerRules { has_grammar, ..rules });
    let continues = matches!(prompts, Prompts::Chat(chat) if chat.continues);
    let prepare = |(index, ids): (usize, Vec<u32>)| PreparedPrompt {
        reasoning: match rules {
            Some(_) if !continues => style.reasoning_after(&ids, &text.tokenizer),
            // A message that is continued is content.
            _ => ReasoningStart::Over,
        },
        ids: ids.into(),
        echo: echoed.get(index).cloned(),
        rid: request.rids.get(index).cloned().unwrap_or_else(|| active.id.clone()),
    };
    let prompted: Vec<PreparedPrompt> = ids.into_iter().enumerate().map(prepare).collect();
    let renderer = Renderer::new(request, &active.id, created, &config.names[0]);
    let mut renderer = renderer.with_kept(active.kept.clone());
    if style.tools == Some(ToolFormat::Mistral) {
        renderer = renderer.with_short_call_ids();
    }
    let id = active.id.clone();
    let response =
        ResponseBuilder::new(request, renderer, &prompted, rules.as_ref(), &config.eos, id);
    (response, prompted)
}
