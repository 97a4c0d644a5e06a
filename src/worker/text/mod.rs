//! Text to token ids and back, and grammars: the tasks and their execution.
//!
//! Threads: `tok`, `tok-long` and `grammar`, through [`TextQueue`]. Invariant: a prompt that is too
//! long in bytes for any tokenisation to fit the context is refused. That needs no tokenisation.
//! `/tokenize` has only the limit of a body. Not here: the queues (`queue`).

mod queue;

pub use queue::{JobGuard, TextQueue, TextWorker};

use crate::api::request::ChatPrompt;
use crate::api::structured_output::StructuredOutput;
use crate::api::token_rules::TokenRuleFields;
use crate::api::tokenize::{
    DetokenizeAnswer, DetokenizeRequest, Subject, TokenizeAnswer, TokenizeRequest,
};
use crate::api::{ApiEndpoint, ApiError, ErrorCode, Prompts, resume};
use crate::cause::Cause;
use crate::ids::RequestKey;
use crate::model::answer::{AnswerStyle, ToolFormat};
use crate::model::chat::{self, ChatTemplate};
use crate::model::grammar::{GrammarCompiler, GrammarContext, GrammarError, GrammarState};
use crate::model::sampler::TokenRules;
use crate::model::tokenizer::Tokenizer;
use crate::stdx::failpoint::is_failpoint_active;
use crate::sys::clock::Clock;
use serde::Serialize;
use serde_json::Value;

/// Turns text into token ids and back.
#[derive(Debug)]
pub struct TextProcessor {
    /// The tokeniser.
    pub tokenizer: Tokenizer,
    /// The model's chat template, if it has one.
    pub chat: Option<ChatTemplate>,
    /// Maximum number of tokens of one sequence.
    pub context: usize,
    /// Gives chat templates the date.
    pub clock: Clock,
    /// Compiles grammars.
    pub grammars: GrammarCompiler,
    /// How the model writes its answers.
    pub style: AnswerStyle,
    /// Whether a request can have its own chat template.
    pub trusts_templates: bool,
}

/// A task with the id of its result.
#[derive(Debug)]
pub struct TextJob {
    /// Id of the result.
    pub key: RequestKey,
    /// The task.
    pub task: TextTask,
}

/// The prompts of a request for text, and its grammar.
#[derive(Debug)]
pub struct PromptTask {
    /// The prompts to tokenise.
    pub prompts: Prompts,
    /// It decides which field an error names.
    pub endpoint: ApiEndpoint,
    /// What the answer must be.
    pub grammar: Option<GrammarTask>,
    /// Rules about tokens.
    pub rules: TokenRuleFields,
    /// Whether the tokeniser adds its special tokens, if the request says so.
    pub add_special: Option<bool>,
}

/// A grammar to compile.
#[derive(Debug)]
pub struct GrammarTask {
    /// The grammar, and the field that has it.
    pub grammar: StructuredOutput,
    /// By choice: the ids that its client already has.
    pub answered: Vec<Vec<u32>>,
    /// Whether the answer can begin with reasoning, which has no grammar.
    pub can_reason: bool,
}

/// The grammar of one choice before its first token.
#[derive(Debug)]
pub struct PreparedGrammar {
    /// The state.
    pub state: Box<GrammarState>,
    /// The mask of the first token.
    pub first: Vec<u32>,
}

/// A task for the tokeniser threads.
#[derive(Debug)]
pub enum TextTask {
    /// Prompts to tokenise.
    Prompts(PromptTask),
    /// A text or conversation; the answer has its ids.
    Tokenize(TokenizeRequest),
    /// Ids; the answer has their text.
    Detokenize(DetokenizeRequest),
}

impl TextTask {
    /// Whether it has a grammar, which can take longer than any text.
    fn has_grammar(&self) -> bool {
        matches!(self, TextTask::Prompts(PromptTask { grammar: Some(_), .. }))
    }

    /// Size of the input: bytes of text, or number of ids.
    fn size(&self) -> usize {
        let of_chat = |chat: &ChatPrompt| {
            let tools = chat.tools.iter();
            chat.messages
                .iter()
                .chain(chat.template_kwargs.values())
                .chain(tools)
                .map(text_size)
                .chain(chat.template.as_ref().map(String::len))
                .sum()
        };
        match self {
            TextTask::Prompts(PromptTask { prompts, .. }) => match prompts {
                Prompts::Texts(texts) => texts.iter().map(String::len).sum(),
                Prompts::Ids(lists) => lists.iter().map(Vec::len).sum(),
                Prompts::Chat(conversation) => of_chat(conversation),
            },
            TextTask::Tokenize(asked) => match &asked.subject {
                Subject::Prompt(prompt) => prompt.len(),
                Subject::Chat(conversation) => of_chat(conversation),
            },
            TextTask::Detokenize(asked) => asked.tokens.len(),
        }
    }
}

/// Bytes of all strings, plus one for each other value. Recursion is safe because the parser limits
/// depth.
fn text_size(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(text_size).sum(),
        Value::Object(fields) => {
            fields.iter().map(|(name, value)| name.len() + text_size(value)).sum()
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => 1,
    }
}

/// The result of a job.
#[derive(Debug)]
pub struct TextResult {
    /// Id of the job.
    pub key: RequestKey,
    /// The output, or an error.
    pub made: Result<TextOutput, ApiError>,
}

/// What a request for text needs of the tokeniser.
#[derive(Debug)]
pub struct PreparedPrompts {
    /// The prompts, which `echo` needs.
    pub prompts: Prompts,
    /// One list of ids for each prompt.
    pub ids: Vec<Vec<u32>>,
    /// The grammar of each choice, if the request has one.
    pub grammars: Vec<PreparedGrammar>,
    /// Rules about tokens, without the shortest length.
    pub rules: TokenRules,
}

/// The output of a task.
#[derive(Debug)]
pub enum TextOutput {
    /// For prompts.
    Prompts(Box<PreparedPrompts>),
    /// For other tasks: the body of the answer, as JSON.
    Body(Vec<u8>),
}

impl TextProcessor {
    /// Runs a task while `is_wanted` holds.
    fn work(&self, task: TextTask, is_wanted: &dyn Fn() -> bool) -> Result<TextOutput, ApiError> {
        match task {
            TextTask::Prompts(PromptTask { prompts, endpoint, grammar, rules, add_special }) => {
                let ids = self.ids_while(&prompts, endpoint, add_special, is_wanted)?;
                let grammars =
                    grammar.map(|task| self.prepare_grammars(&task, &ids)).transpose()?;
                let grammars = grammars.unwrap_or_default();
                let rules = self.prepare_rules(&rules)?;
                let prepared = PreparedPrompts { prompts, ids, grammars, rules };
                Ok(TextOutput::Prompts(Box::new(prepared)))
            }
            TextTask::Tokenize(asked) => self.tokenize(&asked),
            TextTask::Detokenize(asked) => {
                let prompt = self.tokenizer.decode(&asked.tokens, false);
                body(&DetokenizeAnswer { prompt: &prompt })
            }
        }
    }

    fn tokenize(&self, asked: &TokenizeRequest) -> Result<TextOutput, ApiError> {
        let rendered;
        let source = match &asked.subject {
            Subject::Prompt(prompt) => prompt,
            Subject::Chat(conversation) => {
                rendered = self.render(conversation)?;
                &rendered
            }
        };
        let encoded = self.tokenizer.encode(source, asked.add_special_tokens);
        let tokens = encoded.map_err(|error| ApiError::invalid("prompt", error.to_string()))?;
        let text = |&token| self.tokenizer.token_text(token);
        let token_strs = asked.return_token_strs.then(|| tokens.iter().map(text).collect());
        body(&TokenizeAnswer {
            count: tokens.len(),
            max_model_len: self.context,
            tokens: &tokens,
            token_strs,
        })
    }

    /// The ids of each prompt. Ids from the client are checked against the vocabulary.
    pub fn ids(&self, prompts: &Prompts, endpoint: ApiEndpoint) -> Result<Vec<Vec<u32>>, ApiError> {
        self.ids_while(prompts, endpoint, None, &|| true)
    }

    fn ids_while(
        &self,
        prompts: &Prompts,
        endpoint: ApiEndpoint,
        add_special: Option<bool>,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Vec<Vec<u32>>, ApiError> {
        let param = prompt_param(endpoint, prompts);
        let encode = |text: &str, special: bool| {
            if !is_wanted() {
                return Err(ApiError::from_cause(Cause::ClientGone, "its client has gone"));
            }
            self.fits(param, text)?;
            self.tokenizer
                .encode(text, special)
                .map_err(|error| ApiError::invalid(param, error.to_string()))
        };
        let lists = match prompts {
            Prompts::Texts(texts) => {
                let add_special = add_special.unwrap_or(true);
                texts.iter().map(|text| encode(text, add_special)).collect()
            }
            Prompts::Ids(lists) => {
                let vocab = self.tokenizer.vocab_size();
                match lists.iter().flatten().find(|&&id| id as usize >= vocab) {
                    Some(id) => Err(ApiError::invalid(
                        param,
                        format!("holds the id {id}; the vocabulary has {vocab} ids"),
                    )),
                    None => Ok(lists.clone()),
                }
            }
            Prompts::Chat(conversation) => {
                // A template writes special tokens itself.
                let add_special = add_special.unwrap_or(false);
                self.render(conversation).and_then(|text| Ok(vec![encode(&text, add_special)?]))
            }
        }?;
        match lists.iter().any(Vec::is_empty) {
            true => Err(ApiError::invalid(param, "has no tokens")),
            false => Ok(lists),
        }
    }

    /// Checks ids of rules against the vocabulary, and finds the ids of bad words.
    fn prepare_rules(&self, fields: &TokenRuleFields) -> Result<TokenRules, ApiError> {
        let TokenRuleFields { path, bias, allowed, bad_words } = fields;
        let vocab = self.tokenizer.vocab_size();
        let check = |name: &str, mut ids: &mut dyn Iterator<Item = u32>| match (&mut ids)
            .find(|&id| id as usize >= vocab)
        {
            Some(id) => Err(ApiError::invalid(
                format!("{path}{name}"),
                format!("holds the id {id}; the vocabulary has {vocab} ids"),
            )),
            None => Ok(()),
        };
        check("logit_bias", &mut bias.iter().map(|&(id, _)| id))?;
        check("allowed_token_ids", &mut allowed.iter().copied())?;
        let mut mask = vec![0; if allowed.is_empty() { 0 } else { vocab.div_ceil(32) }];
        for &id in allowed {
            mask[id as usize / 32] |= 1 << (id % 32);
        }
        let mut banned: Vec<Vec<u32>> = Vec::new();
        for word in bad_words {
            let word = word.trim_start();
            // A word at the beginning of a text and one behind a space have other ids.
            for text in [word.to_owned(), format!(" {word}")] {
                let ids = self.tokenizer.encode(&text, false).map_err(|error| {
                    ApiError::invalid(format!("{path}bad_words"), error.to_string())
                })?;
                if !ids.is_empty() && !banned.contains(&ids) {
                    banned.push(ids);
                }
            }
        }
        Ok(TokenRules { bias: bias.clone(), allowed: mask, banned, min_tokens: 0, ends: vec![] })
    }

    /// The grammar of each choice, behind the ids that its client has. `prompts` are their ids.
    fn prepare_grammars(
        &self,
        task: &GrammarTask,
        prompts: &[Vec<u32>],
    ) -> Result<Vec<PreparedGrammar>, ApiError> {
        let StructuredOutput { field, source } = &task.grammar;
        let refused = |why: GrammarError| ApiError::invalid(field.clone(), why);
        // Only a chat reasons, and it has one prompt.
        let reasons = task.can_reason && self.style.reasoning.is_some();
        let prompt = prompts.first().filter(|_| reasons);
        let context = GrammarContext {
            tools: self.style.tools.unwrap_or_default(),
            reasoning: prompt.map(|ids| self.style.reasoning_after(ids, &self.tokenizer)),
        };
        let mut fresh = self.grammars.compile(&self.tokenizer, source, context).map_err(refused)?;
        // All choices without a token begin with the same mask.
        let first = fresh.compute_mask().map_err(refused)?;
        let prepare = |answered: &Vec<u32>| {
            let mut state = Box::new(fresh.fork());
            if answered.is_empty() {
                return Ok(PreparedGrammar { state, first: first.clone() });
            }
            let strays =
                |why| ApiError::invalid(resume::FIELD, format!("strays from `{field}`: {why}"));
            if !is_failpoint_active("grammar of a resumed stream begins anew") {
                answered.iter().try_for_each(|&id| state.advance(id)).map_err(strays)?;
            }
            let first = state.compute_mask().map_err(refused)?;
            Ok(PreparedGrammar { state, first })
        };
        task.answered.iter().map(prepare).collect()
    }

    fn fits(&self, param: &str, text: &str) -> Result<(), ApiError> {
        let most = self.tokenizer.longest_text(self.context);
        match text.len() > most {
            true => Err(ApiError::text_too_long(param, text.len(), most, self.context)),
            false => Ok(()),
        }
    }

    /// The template of the conversation itself, if it has one and the server trusts it.
    fn compile_template(&self, asked: &ChatPrompt) -> Result<Option<ChatTemplate>, ApiError> {
        let Some(source) = &asked.template else { return Ok(None) };
        if !self.trusts_templates {
            let why = "needs a server with --trust-request-chat-template";
            return Err(ApiError::invalid("chat_template", why));
        }
        let compiled = ChatTemplate::of_request(source, self.chat.as_ref());
        compiled
            .map(Some)
            .map_err(|error| ApiError::invalid("chat_template", format!("cannot be used: {error}")))
    }

    /// Renders a conversation with its own template or the model's.
    pub fn render(&self, conversation: &ChatPrompt) -> Result<String, ApiError> {
        let own = self.compile_template(conversation)?;
        let Some(template) = own.as_ref().or(self.chat.as_ref()) else {
            let message = "this model has no chat template; use /v1/completions";
            return Err(ApiError::new(400, ErrorCode::NoChatTemplate, message));
        };
        let tools = &conversation.tools[..];
        if !tools.is_empty() && self.style.tools.is_none() {
            return Err(ApiError::unsupported("tools"));
        }
        let is_described = !tools.is_empty() && !template.takes_tools();
        if is_described && self.style.tools != Some(ToolFormat::Hermes) {
            let why = "cannot be used: the chat template has no place for tools, and the server \
                       describes them only with --tool-call-parser hermes";
            return Err(ApiError::invalid("tools", why));
        }
        let (marked, described);
        let messages = match conversation.continues {
            true => {
                marked = mark_last(&conversation.messages);
                &marked
            }
            false => &conversation.messages,
        };
        let (messages, tools) = match template.takes_tools() {
            true => (messages, tools),
            false => {
                described = chat::describe_tools(messages, tools);
                (&described, &[][..])
            }
        };
        let rendered = template.render(&chat::Conversation {
            messages,
            tools: (!tools.is_empty()).then_some(tools),
            variables: Some(&conversation.template_kwargs),
            add_generation_prompt: conversation.add_generation_prompt,
            now: self.clock.since_epoch(),
        });
        let text = rendered.map_err(|error| match own {
            Some(_) => ApiError::invalid("chat_template", format!("cannot be used: {error}")),
            None => {
                let why = format!("do not fit the model's chat template: {error}");
                ApiError::invalid("messages", why)
            }
        })?;
        match conversation.continues {
            true => cut_at_mark(text),
            false => Ok(text),
        }
    }
}

/// Stands behind the last message while it is rendered, if the model continues it. The space at its
/// end shows whether the template keeps whitespace.
const CONTINUES: &str = "\u{f8ff}the answer continues here\u{f8ff} ";

/// A conversation with [`CONTINUES`] behind its last message.
fn mark_last(messages: &[Value]) -> Vec<Value> {
    let mut marked = messages.to_vec();
    let content = marked.last_mut().and_then(|last| last.get_mut("content"));
    if let Some(Value::String(text)) = content {
        text.push_str(CONTINUES);
    }
    marked
}

/// The same text up to the mark.
fn cut_at_mark(mut text: String) -> Result<String, ApiError> {
    let Some(at) = text.rfind(CONTINUES.trim_end()) else {
        let why = "cannot be used: the chat template leaves the last message out";
        return Err(ApiError::invalid("continue_final_message", why));
    };
    let keeps_blanks = text[at..].starts_with(CONTINUES);
    text.truncate(at);
    if !keeps_blanks {
        text.truncate(text.trim_end().len());
    }
    Ok(text)
}

fn body(answer: &impl Serialize) -> Result<TextOutput, ApiError> {
    serde_json::to_vec(answer)
        .map(TextOutput::Body)
        .map_err(|error| ApiError::from_cause(Cause::Internal, error.to_string()))
}

/// The request field that holds the prompt.
pub fn prompt_param(endpoint: ApiEndpoint, prompts: &Prompts) -> &'static str {
    match (endpoint, prompts) {
        (ApiEndpoint::Completions, _) => "prompt",
        (ApiEndpoint::Chat, _) => "messages",
        (ApiEndpoint::Generate, Prompts::Ids(_)) => "input_ids",
        (ApiEndpoint::Generate, _) => "text",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::parsers::{ReasoningParser, ToolCallParser};

    fn processor(tokenizer: Tokenizer, chat: Option<ChatTemplate>) -> TextProcessor {
        let grammars = GrammarCompiler::new(tokenizer.vocab_size(), &[2]);
        let style = AnswerStyle::new(
            chat.as_ref(),
            &tokenizer,
            ToolCallParser::Auto,
            ReasoningParser::Auto,
        );
        let clock = Clock::default();
        let trusts_templates = true;
        TextProcessor { tokenizer, chat, context: 64, clock, grammars, style, trusts_templates }
    }

    #[test]
    fn a_text_too_long_for_any_tokens_is_refused_by_its_bytes() {
        let tokenizer =
            Tokenizer::from_hf(&crate::model::testing::fixture("llama-f32"), 384).unwrap();
        let text = processor(tokenizer, None);
        let ids = |bytes: usize| {
            text.ids(&Prompts::Texts(vec!["x".repeat(bytes)]), ApiEndpoint::Completions)
        };
        let most = text.tokenizer.longest_text(64);
        assert!(ids(most).is_ok(), "the count of tokens decides");
        let refused = ids(most + 1).unwrap_err();
        assert_eq!(
            (refused.code, refused.param.as_deref()),
            (ErrorCode::ContextLengthExceeded, Some("prompt"))
        );
        assert!(refused.message.contains(&most.to_string()), "{}", refused.message);
    }

    #[test]
    fn a_template_that_cannot_be_evaluated_refuses_its_request() {
        let source =
            "{{ messages[1:][::-1] }}{{ raise_exception('never') if messages|length > 9 }}";
        let chat = ChatTemplate::new(source, Vec::new()).unwrap();
        let tokenizer =
            Tokenizer::from_hf(&crate::model::testing::fixture("llama-f32"), 384).unwrap();
        let text = processor(tokenizer, Some(chat));
        let message = serde_json::json!({"role": "user", "content": "x"});
        let conversation = ChatPrompt {
            messages: vec![message],
            tools: Vec::new(),
            continues: false,
            add_generation_prompt: true,
            template: None,
            template_kwargs: serde_json::Map::new(),
        };
        let refused = text.render(&conversation).unwrap_err();
        assert_eq!((refused.status, refused.param.as_deref()), (400, Some("messages")));
        let with = |template: &str| ChatPrompt {
            template: Some(template.to_owned()),
            ..conversation.clone()
        };
        let rendered = text.render(&with("<{{ messages[0].content }}>"));
        assert_eq!(rendered, Ok("<x>".to_owned()));
        let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}\
                       {% endfor %}";
        for (template, param) in [("{% if %}", "chat_template"), (endless, "chat_template")] {
            let refused = text.render(&with(template)).unwrap_err();
            assert_eq!((refused.status, refused.param.as_deref()), (400, Some(param)));
        }
        let wary = TextProcessor { trusts_templates: false, ..text };
        let refused = wary.render(&with("x")).unwrap_err();
        assert!(refused.message.contains("--trust-request-chat-template"), "{refused}");
    }
}
