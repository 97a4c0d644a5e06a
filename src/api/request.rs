//! A parsed request, and the fields that all endpoints share.
//!
//! Owns: ranges and defaults of those fields. Not here: fields of a single endpoint
//! ([`super::completion`], [`super::chat`], [`super::generate`]).

use super::bootstrap::{self, BootstrapParams};
use super::error::ApiError;
use super::fields::{Fields, OneOrMany, first_item};
use super::kv_transfer::{self, Keep, KvTransfer, PrefillAddress};
use super::peer_fields;
use super::resume::{self, Resume};
use super::structured_output::{self, StructuredOutput};
use super::token_rules::{self, TokenRuleFields};
use super::tools::Tools;
use crate::limits::{
    CHOICES_MAX, IGNORED_FIELDS_BYTES_MAX, NAME_BYTES_MAX, REQUEST_TIME_MAX, SAMPLES_MAX,
    STOP_IDS_MAX, STOP_STRING_BYTES_MAX, STOP_STRINGS_MAX, TOP_LOGPROBS_MAX,
};
use crate::model::answer::{AnswerRules, AnswerStyle, ReasoningDelivery};
use serde_json::{Map, Value};
use std::ops::{Range, RangeInclusive};
use std::time::Duration;

/// Values of `priority`.
const PRIORITIES: RangeInclusive<i128> = -(i32::MAX as i128)..=i32::MAX as i128;

/// The response header that names the fields of the request that were ignored.
pub const IGNORED_FIELDS: &str = "x-ignored-fields";

/// The names of these fields for a header, separated by commas. Other characters than those of
/// usual names become `?`.
pub fn list_fields(names: &[String]) -> String {
    let mut list = String::new();
    for (index, name) in names.iter().enumerate() {
        if list.len() + name.len() > IGNORED_FIELDS_BYTES_MAX {
            list.push_str(&format!(" and {} more", names.len() - index));
            break;
        }
        list.push_str(if list.is_empty() { "" } else { ", " });
        let is_usual = |c: char| c.is_ascii_alphanumeric() || "_-.[]".contains(c);
        list.extend(name.chars().map(|c| if is_usual(c) { c } else { '?' }));
    }
    list.trim_start().to_owned()
}

/// The endpoint, which decides the form of the answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ApiEndpoint {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    Chat,
    /// `/generate`.
    Generate,
}

/// The prompts of a request.
#[derive(Clone, PartialEq, Debug)]
pub enum Prompts {
    /// Texts to tokenise.
    Texts(Vec<String>),
    /// Lists of token ids, none of them empty. They are not checked against the vocabulary.
    Ids(Vec<Vec<u32>>),
    /// One conversation.
    Chat(ChatPrompt),
}

impl Prompts {
    /// Number of prompts.
    pub fn len(&self) -> usize {
        match self {
            Self::Texts(texts) => texts.len(),
            Self::Ids(lists) => lists.len(),
            Self::Chat(_) => 1,
        }
    }

    /// Whether there is no prompt. An accepted request has at least one.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The input of a chat template.
#[derive(Clone, PartialEq, Debug)]
pub struct ChatPrompt {
    /// Objects with a string `role` and a string `content`; other keys come from the client.
    pub messages: Vec<Value>,
    /// Tools that the model can call, as OpenAI writes them.
    pub tools: Vec<Value>,
    /// Whether the template opens the assistant's turn.
    pub add_generation_prompt: bool,
    /// Whether the model continues the last message.
    pub continues: bool,
    /// The client's own template, in place of the model's.
    pub template: Option<String>,
    /// More variables for the template, such as `enable_thinking`.
    pub template_kwargs: Map<String, Value>,
}

impl ChatPrompt {
    /// The same conversation with these tools.
    pub(super) fn with_tools(self, tools: Option<&Tools>) -> ChatPrompt {
        ChatPrompt { tools: tools.map_or(Vec::new(), |tools| tools.definitions.clone()), ..self }
    }
}

/// Parameters for the choice of a token from logits.
#[derive(Clone, PartialEq, Debug)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// Within (0, 1].
    pub top_p: f32,
    /// Keep only the `k` most probable tokens; `None` keeps all.
    pub top_k: Option<u32>,
    /// Within [0, 1], relative to the most probable.
    pub min_p: f32,
    /// Within [-2, 2].
    pub presence_penalty: f32,
    /// Within [-2, 2].
    pub frequency_penalty: f32,
    /// Within (0, 2]; 1 has no effect.
    pub repetition_penalty: f32,
    /// The same seed gives the same answer.
    pub seed: Option<u64>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: None,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            seed: None,
        }
    }
}

/// A request of any of the three endpoints, each value within its range.
#[derive(Clone, PartialEq, Debug)]
pub struct GenerateRequest {
    /// The endpoint that received it.
    pub endpoint: ApiEndpoint,
    /// The requested model name.
    pub model: Option<String>,
    /// The prompts; at least one.
    pub prompts: Prompts,
    /// Whether the tokeniser adds its special tokens; `None`: to texts, not to conversations.
    pub add_special_tokens: Option<bool>,
    /// Number of choices for each prompt.
    pub samples: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Maximum tokens to generate; `None`: until the context is full. 0: the answer is the echo of
    /// the prompt.
    pub max_tokens: Option<u32>,
    /// Tokens before the answer can end.
    pub min_tokens: u32,
    /// Order in the queues: the lowest number is the first, as in vLLM.
    pub priority: i32,
    /// Rules about tokens.
    pub rules: TokenRuleFields,
    /// Whether the stop string or stop token that ends the answer is a part of it.
    pub includes_stop: bool,
    /// Whether the tokens of logprobs have the form `token_id:ID`.
    pub tokens_as_ids: bool,
    /// Strings that end the answer. They are not part of it.
    pub stop: Vec<String>,
    /// Token ids that end the answer.
    pub stop_token_ids: Vec<u32>,
    /// Whether the model's end-of-sequence token does not end the answer.
    pub ignore_eos: bool,
    /// What the answer must be, if the client says so.
    pub structured: Option<StructuredOutput>,
    /// Tools that the model can call.
    pub tools: Option<Tools>,
    /// Whether reasoning is not a part of the content.
    pub separate_reasoning: bool,
    /// Whether the answer has its reasoning.
    pub include_reasoning: bool,
    /// Whether a stream has reasoning piece by piece, not as a whole.
    pub stream_reasoning: bool,
    /// Whether special tokens are left out of the text.
    pub skip_special_tokens: bool,
    /// Number of alternatives for each logprob; `None`: no logprobs.
    pub logprobs: Option<usize>,
    /// Whether `/generate` returns the text of each logprob's token.
    pub logprob_text: bool,
    /// The logprobs of the prompt, if the answer has them.
    pub prompt_logprobs: Option<PromptLogprobFields>,
    /// Whether the prompt's text precedes the answer's text.
    pub echo: bool,
    /// Whether the answer is a stream of server-sent events.
    pub stream: bool,
    /// Whether the stream ends with the usage.
    pub include_usage: bool,
    /// Whether each chunk of the stream has the usage so far.
    pub continuous_usage: bool,
    /// Whether token ids are returned besides text.
    pub return_token_ids: bool,
    /// Whether stage times are returned.
    pub return_timings: bool,
    /// Whether the prompts came as a list; then `/generate` returns a list.
    pub batch: bool,
    /// Request ids of the prompts, for `/abort_request`: none, or one per prompt.
    pub rids: Vec<String>,
    /// Separates prefix caches: requests share KV only if their salts are equal.
    pub cache_salt: Option<String>,
    /// Maximum duration, counted from the time at which the request was read.
    pub patience: Duration,
    /// The registry and room of each hand-off: one entry per choice, prompt by prompt.
    pub bootstrap: Option<Vec<BootstrapParams>>,
    /// Prefill: keep the KV for a decode leg, which is sent after this request's answer.
    pub keeps_kv: Option<Keep>,
    /// Decode: the prefill worker that must be asked for the KV.
    pub prefill: Option<PrefillAddress>,
    /// The part of the stream that the client already has, if a router continues the stream on this
    /// worker.
    pub resume: Option<Resume>,
    /// Prefill: send the first token as soon as it is sampled, before decode has the KV.
    pub first_token: bool,
    /// Fields that were ignored, for the log.
    pub unknown: Vec<String>,
}

/// Which logprobs of the prompt an answer has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PromptLogprobFields {
    /// Position of the first token in the answer. Its own logprob is null.
    pub start: u32,
    /// Number of alternatives that are computed for each token.
    pub top: usize,
    /// Number of alternatives in vLLM's field `prompt_logprobs`; `None`: the answer has no such
    /// field.
    pub field: Option<usize>,
}

impl PromptLogprobFields {
    /// The positions that have a logprob, in a prompt of `tokens` tokens.
    pub fn positions(&self, tokens: u32) -> Range<u32> {
        self.start.saturating_add(1).min(tokens)..tokens
    }
}

/// The differences between OpenAI's and SGLang's API in the fields that they share.
pub(super) struct Dialect {
    /// Default of `max_tokens`; `None`: the context's length.
    pub(super) default_length: Option<u32>,
    pub(super) max_tokens: &'static [&'static str],
    /// Least value of `max_tokens`.
    pub(super) least_tokens: i128,
    pub(super) min_tokens: &'static str,
    pub(super) seed: &'static [&'static str],
}

impl GenerateRequest {
    /// Reads the fields that every body can have, except sampling. All others get their defaults.
    pub(super) fn read(
        endpoint: ApiEndpoint,
        prompts: Prompts,
        fields: &mut Fields<'_>,
    ) -> Result<Self, ApiError> {
        fields.refuse(peer_fields::REFUSED)?;
        let request = Self {
            endpoint,
            model: fields.name("model")?,
            prompts,
            add_special_tokens: None,
            samples: 1,
            sampling: Sampling::default(),
            max_tokens: None,
            min_tokens: 0,
            priority: fields.integer("priority", PRIORITIES)?.unwrap_or(0),
            rules: TokenRuleFields::default(),
            includes_stop: false,
            tokens_as_ids: false,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            structured: structured_output::read(fields)?,
            tools: None,
            separate_reasoning: true,
            include_reasoning: true,
            stream_reasoning: true,
            skip_special_tokens: true,
            logprobs: None,
            logprob_text: false,
            prompt_logprobs: None,
            echo: false,
            stream: fields.flag("stream", false)?,
            include_usage: false,
            continuous_usage: false,
            return_token_ids: fields.flag("return_token_ids", false)?,
            return_timings: fields.flag("return_timings", false)?,
            batch: false,
            rids: Vec::new(),
            cache_salt: fields.name("cache_salt")?,
            patience: REQUEST_TIME_MAX,
            bootstrap: None,
            keeps_kv: None,
            prefill: None,
            resume: None,
            first_token: fields.flag(resume::FIRST_TOKEN, false)?,
            unknown: Vec::new(),
        };
        peer_fields::IGNORED.iter().for_each(|(name, _)| fields.accept(&[name]));
        Ok(request)
    }

    /// Reads sampling, lengths and stop conditions from `fields`, which can be an object in the
    /// body.
    pub(super) fn read_sampling(
        &mut self,
        fields: &mut Fields<'_>,
        dialect: &Dialect,
        defaults: &Sampling,
    ) -> Result<(), ApiError> {
        self.sampling = sampling(fields, dialect, defaults)?;
        self.samples = fields.integer("n", 1..=i128::from(SAMPLES_MAX))?.unwrap_or(1);
        if self.prompts.len() * self.samples > CHOICES_MAX {
            let asked = self.prompts.len() * self.samples;
            let why =
                format!("times the number of prompts is {asked}; the maximum is {CHOICES_MAX}");
            return Err(fields.invalid("n", why));
        }
        for name in dialect.max_tokens {
            let value = fields.integer(name, dialect.least_tokens..=i128::from(u32::MAX))?;
            self.max_tokens = self.max_tokens.or(value);
        }
        self.max_tokens = self.max_tokens.or(dialect.default_length);
        let most = self.max_tokens.unwrap_or(u32::MAX);
        self.min_tokens = fields.integer(dialect.min_tokens, 0..=i128::from(most))?.unwrap_or(0);
        self.rules = token_rules::read(fields)?;
        self.includes_stop = fields.flag("include_stop_str_in_output", false)?;
        self.includes_stop |= fields.flag("no_stop_trim", false)?;
        self.stop = stops(fields)?;
        if let Some(raw) = fields.take("stop_token_ids") {
            let must = format!("must be a list of at most {STOP_IDS_MAX} token ids");
            self.stop_token_ids =
                fields.list::<u32, STOP_IDS_MAX>("stop_token_ids", raw.get(), &must)?;
        }
        self.ignore_eos = fields.flag("ignore_eos", false)?;
        if let (true, Some(structured)) = (self.ignore_eos, &self.structured) {
            let why = format!("and `{}` exclude each other", structured.field);
            return Err(fields.invalid("ignore_eos", why));
        }
        self.skip_special_tokens = fields.flag("skip_special_tokens", true)?;
        Ok(())
    }

    /// How the answer is read. `None`: all of its text is content.
    pub fn answer_rules(&self, style: &AnswerStyle) -> Option<AnswerRules> {
        if self.endpoint != ApiEndpoint::Chat {
            return None;
        }
        let (functions, is_single) = match &self.tools {
            Some(tools) => (tools.functions.clone(), !tools.is_parallel),
            None => ([].into(), false),
        };
        let delivery = match (self.include_reasoning, self.stream_reasoning) {
            (false, _) => ReasoningDelivery::Left,
            (true, false) => ReasoningDelivery::Whole,
            (true, true) => ReasoningDelivery::Pieces,
        };
        style.rules(&functions, is_single, self.separate_reasoning.then_some(delivery))
    }

    /// Reads the fields that depend on the number of choices, and records the unread fields.
    pub(super) fn finish(mut self, mut fields: Fields<'_>) -> Result<Self, ApiError> {
        self.rids = rids(&mut fields, self.prompts.len())?;
        self.bootstrap = bootstrap::read(&mut fields, self.prompts.len(), self.samples)?;
        match kv_transfer::read(&mut fields, self.prompts.len() * self.samples)? {
            None => {}
            Some(KvTransfer::Keep(keep)) => {
                self.keeps_kv = Some(keep);
                // The decode leg has the answer. `echo` only means that it needs the logprobs of
                // the prompt, which are read already.
                self.echo = false;
            }
            Some(KvTransfer::Take(_)) if self.bootstrap.is_some() => {
                return Err(
                    fields.invalid(kv_transfer::FIELD, "and `bootstrap_room` exclude each other")
                );
            }
            Some(KvTransfer::Take(met)) => self.bootstrap = Some(met),
        }
        if self.keeps_kv.is_none() {
            self.check_form(&fields)?;
        }
        self.prefill = kv_transfer::read_prefill(&mut fields)?;
        if self.prefill.is_some() && (self.bootstrap.is_some() || self.keeps_kv.is_some()) {
            let why = "excludes `bootstrap_room` and `kv_transfer_params`";
            return Err(fields.invalid(kv_transfer::PREFILL, why));
        }
        // A leg that keeps KV counts as a stream, because the decode leg continues the stream.
        let goes_on = self.stream || self.keeps_kv.is_some();
        self.resume = resume::read(&mut fields, self.prompts.len() * self.samples, goes_on)?;
        self.unknown.extend(fields.rest());
        Ok(self)
    }

    /// Reads vLLM's `prompt_logprobs`. The logprobs of the answer and `echo` are already read.
    pub(super) fn read_prompt_logprobs(&mut self, fields: &mut Fields<'_>) -> Result<(), ApiError> {
        let field = fields.integer("prompt_logprobs", 0..=TOP_LOGPROBS_MAX as i128)?;
        let echoed = self.logprobs.filter(|_| self.echo);
        self.prompt_logprobs =
            field.max(echoed).map(|top| PromptLogprobFields { start: 0, top, field });
        Ok(())
    }

    /// Refuses forms of the answer that exclude each other. A leg that keeps KV has no such answer.
    fn check_form(&self, fields: &Fields<'_>) -> Result<(), ApiError> {
        if self.stream && self.prompt_logprobs.is_some_and(|wanted| wanted.field.is_some()) {
            return Err(fields.invalid("prompt_logprobs", "and `stream` exclude each other"));
        }
        if self.max_tokens == Some(0) && (!self.echo || self.stream) {
            let must = "must be at least 1, or 0 with `echo` and without `stream`";
            return Err(fields.invalid("max_tokens", must));
        }
        Ok(())
    }

    /// Reads `stream_options` and the form of tokens, which only the OpenAI endpoints have.
    pub(super) fn read_stream_options(&mut self, fields: &mut Fields<'_>) -> Result<(), ApiError> {
        self.tokens_as_ids = fields.flag("return_tokens_as_token_ids", false)?;
        if let Some(mut options) = fields.object("stream_options")? {
            self.include_usage = options.flag("include_usage", false)?;
            // Requests padding that hides lengths from observers of encrypted traffic. It has no
            // effect here.
            options.flag("include_obfuscation", false)?;
            let is_continuous = options.flag("continuous_usage_stats", false)?;
            self.continuous_usage = self.include_usage && is_continuous;
            self.unknown.extend(options.rest());
        }
        Ok(())
    }
}

fn sampling(
    fields: &mut Fields<'_>,
    dialect: &Dialect,
    defaults: &Sampling,
) -> Result<Sampling, ApiError> {
    let penalty = |x: f32| (-2.0..=2.0).contains(&x);
    let (unit, pm2) = ("must be a number from 0 to 1", "must be a number from -2 to 2");
    let mut seed = defaults.seed;
    for name in dialect.seed {
        let value = fields.integer::<i128>(name, i128::from(i64::MIN)..=i128::from(u64::MAX))?;
        // Negative seeds are valid: only the bits count.
        seed = value.map(|value| value as u64).or(seed);
    }
    Ok(Sampling {
        temperature: fields.number(
            "temperature",
            defaults.temperature,
            |x| x >= 0.0,
            "must be a number, at least 0",
        )?,
        top_p: fields.number(
            "top_p",
            defaults.top_p,
            |x| x > 0.0 && x <= 1.0,
            "must be a number above 0, at most 1",
        )?,
        top_k: match fields.integer::<i128>("top_k", -1..=i128::from(u32::MAX))? {
            None => defaults.top_k,
            Some(k) => u32::try_from(k).ok().filter(|&k: &u32| k > 0),
        },
        min_p: fields.number("min_p", defaults.min_p, |x| (0.0..=1.0).contains(&x), unit)?,
        presence_penalty: fields.number(
            "presence_penalty",
            defaults.presence_penalty,
            penalty,
            pm2,
        )?,
        frequency_penalty: fields.number(
            "frequency_penalty",
            defaults.frequency_penalty,
            penalty,
            pm2,
        )?,
        repetition_penalty: fields.number(
            "repetition_penalty",
            defaults.repetition_penalty,
            |x| x > 0.0 && x <= 2.0,
            "must be a number above 0, at most 2",
        )?,
        seed,
    })
}

fn stops(fields: &mut Fields<'_>) -> Result<Vec<String>, ApiError> {
    let must = format!("must be a string or a list of at most {STOP_STRINGS_MAX} strings");
    let stops = match fields.one_or_many::<String, STOP_STRINGS_MAX>("stop", &must)? {
        None => Vec::new(),
        Some(OneOrMany::One(stop)) => vec![stop],
        Some(OneOrMany::Many(stops)) => stops,
    };
    fields.sized("stop", &stops, STOP_STRING_BYTES_MAX)?;
    Ok(stops)
}

/// Reads one request id for each prompt. A single id gets the prompt's number appended if there are
/// several prompts.
fn rids(fields: &mut Fields<'_>, prompts: usize) -> Result<Vec<String>, ApiError> {
    let must = "must be a string or a list of strings, one per prompt";
    let rids = match fields.one_or_many::<String, CHOICES_MAX>("rid", must)? {
        None => return Ok(Vec::new()),
        Some(OneOrMany::One(rid)) if prompts == 1 => vec![rid],
        Some(OneOrMany::One(rid)) => (0..prompts).map(|i| format!("{rid}_{i}")).collect(),
        Some(OneOrMany::Many(rids)) => rids,
    };
    if rids.len() != prompts {
        return Err(fields.invalid("rid", must));
    }
    fields.sized("rid", &rids, NAME_BYTES_MAX)?;
    Ok(rids)
}

/// Reads the prompts in the field `name`, and whether they came as a list.
pub(super) fn prompts(
    fields: &mut Fields<'_>,
    name: &str,
) -> Result<Option<(Prompts, bool)>, ApiError> {
    let must = "must be a string, a list of token ids, or a list of either";
    let Some(raw) = fields.take(name) else { return Ok(None) };
    let json = raw.get();
    let broken = |error| fields.explain(name, &error, must);
    let prompts = match first_item(json) {
        None if json.starts_with('[') => return Err(fields.invalid(name, "must not be empty")),
        None => (Prompts::Texts(vec![serde_json::from_str(json).map_err(broken)?]), false),
        Some(b'"') => (Prompts::Texts(fields.list::<String, CHOICES_MAX>(name, json, must)?), true),
        Some(b'[') => (Prompts::Ids(fields.list::<Vec<u32>, CHOICES_MAX>(name, json, must)?), true),
        Some(_) => (Prompts::Ids(vec![serde_json::from_str(json).map_err(broken)?]), false),
    };
    if let (Prompts::Ids(lists), _) = &prompts
        && lists.iter().any(Vec::is_empty)
    {
        return Err(fields.invalid(name, "must not hold an empty list"));
    }
    Ok(Some(prompts))
}
