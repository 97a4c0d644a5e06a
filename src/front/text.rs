//! Text to ids and back: what is asked, and how it is done.
//!
//! Thread: `tok` and `tok-long`, by way of [`TextQueue`]. Invariant: a prompt that is too long for the context whatever its
//! tokens are is refused by its bytes, before time is spent on it; who asks for the tokens of a text gets those of one as long
//! as a body may be. Not here: who waits for whom (`queue`).

mod queue;

pub use queue::{TextQueue, Ticket};

use crate::cause::Cause;
use crate::front::openai::request::Conversation;
use crate::front::openai::tokenize::{
    DetokenizeAnswer, DetokenizeRequest, Subject, TokenizeAnswer, TokenizeRequest,
};
use crate::front::openai::{ApiError, Endpoint, Prompts};
use crate::model::chat::{self, ChatTemplate};
use crate::model::tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::Value;
use std::time::SystemTime;

/// What turns text into ids and back.
#[derive(Debug)]
pub struct Text {
    /// The vocabulary.
    pub tokenizer: Tokenizer,
    /// The model's chat template, where it has one.
    pub chat: Option<ChatTemplate>,
    /// Tokens of one sequence at most.
    pub context: usize,
}

/// Something to do.
#[derive(Debug)]
pub struct Job {
    /// Names the answer.
    pub id: u64,
    /// What to do.
    pub task: Task,
}

/// What is to be done.
#[derive(Debug)]
pub enum Task {
    /// Prompts to tokenise; the endpoint decides the name of the field at fault.
    Prompts(Prompts, Endpoint),
    /// A text or conversation whose ids are the answer.
    Tokenize(TokenizeRequest),
    /// Ids whose text is the answer.
    Detokenize(DetokenizeRequest),
}

impl Task {
    /// Bytes of text, or ids, that it is about.
    fn size(&self) -> usize {
        let of_chat = |chat: &Conversation| {
            chat.messages.iter().chain(chat.template_kwargs.values()).map(text_size).sum()
        };
        match self {
            Task::Prompts(Prompts::Texts(texts), _) => texts.iter().map(String::len).sum(),
            Task::Prompts(Prompts::Ids(lists), _) => lists.iter().map(Vec::len).sum(),
            Task::Prompts(Prompts::Chat(conversation), _) => of_chat(conversation),
            Task::Tokenize(asked) => match &asked.subject {
                Subject::Prompt(prompt) => prompt.len(),
                Subject::Chat(conversation) => of_chat(conversation),
            },
            Task::Detokenize(asked) => asked.tokens.len(),
        }
    }
}

/// Bytes of all strings in it, and one for each value of another kind; what a parser has read is not deep.
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

/// What has come of a job.
#[derive(Debug)]
pub struct Answer {
    /// Of the job.
    pub id: u64,
    /// What it was asked for, or why there is none.
    pub made: Result<Made, ApiError>,
}

/// What a task makes.
#[derive(Debug)]
pub enum Made {
    /// Of prompts the ids, one list each; and the prompts back, for those that are echoed.
    Ids(Prompts, Vec<Vec<u32>>),
    /// Of the others the answer's body, as JSON.
    Body(Vec<u8>),
}

impl Text {
    /// Does a task, for as long as it is wanted.
    fn work(&self, task: Task, is_wanted: &dyn Fn() -> bool) -> Result<Made, ApiError> {
        match task {
            Task::Prompts(prompts, endpoint) => {
                let ids = self.ids_while(&prompts, endpoint, is_wanted)?;
                Ok(Made::Ids(prompts, ids))
            }
            Task::Tokenize(asked) => self.tokenize(&asked),
            Task::Detokenize(asked) => {
                let prompt = self.tokenizer.decode(&asked.tokens, false);
                body(&DetokenizeAnswer { prompt: &prompt })
            }
        }
    }

    fn tokenize(&self, asked: &TokenizeRequest) -> Result<Made, ApiError> {
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

    /// The ids of each prompt. Ids given as such are compared with the vocabulary.
    pub fn ids(&self, prompts: &Prompts, endpoint: Endpoint) -> Result<Vec<Vec<u32>>, ApiError> {
        self.ids_while(prompts, endpoint, &|| true)
    }

    fn ids_while(
        &self,
        prompts: &Prompts,
        endpoint: Endpoint,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Vec<Vec<u32>>, ApiError> {
        let param = prompt_param(endpoint, prompts);
        let encode = |text: &str, special: bool| {
            if !is_wanted() {
                let cause = Cause::ClientGone;
                return Err(ApiError::new(
                    cause.http_status(),
                    cause.name(),
                    "nobody waits for it",
                ));
            }
            self.fits(param, text)?;
            self.tokenizer
                .encode(text, special)
                .map_err(|error| ApiError::invalid(param, error.to_string()))
        };
        let lists = match prompts {
            Prompts::Texts(texts) => texts.iter().map(|text| encode(text, true)).collect(),
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
                self.render(conversation).and_then(|text| Ok(vec![encode(&text, false)?]))
            }
        }?;
        match lists.iter().any(Vec::is_empty) {
            true => Err(ApiError::invalid(param, "has no tokens")),
            false => Ok(lists),
        }
    }

    fn fits(&self, param: &str, text: &str) -> Result<(), ApiError> {
        let most = self.tokenizer.longest_text(self.context);
        match text.len() > most {
            true => Err(ApiError::text_too_long(param, text.len(), most, self.context)),
            false => Ok(()),
        }
    }

    /// A conversation as the model's template writes it.
    pub fn render(&self, conversation: &Conversation) -> Result<String, ApiError> {
        let Some(template) = &self.chat else {
            let message = "this model has no chat template; use /v1/completions";
            return Err(ApiError::new(400, "no_chat_template", message));
        };
        let rendered = template.render(&chat::Conversation {
            messages: &conversation.messages,
            tools: None,
            variables: Some(&conversation.template_kwargs),
            add_generation_prompt: conversation.add_generation_prompt,
            now: SystemTime::now(),
        });
        rendered.map_err(|error| {
            ApiError::invalid("messages", format!("do not fit the template: {error}"))
        })
    }
}

fn body(answer: &impl Serialize) -> Result<Made, ApiError> {
    serde_json::to_vec(answer)
        .map(Made::Body)
        .map_err(|error| ApiError::new(500, "internal", error.to_string()))
}

/// The field that held the prompt.
pub fn prompt_param(endpoint: Endpoint, prompts: &Prompts) -> &'static str {
    match (endpoint, prompts) {
        (Endpoint::Completions, _) => "prompt",
        (Endpoint::Chat, _) => "messages",
        (Endpoint::Generate, Prompts::Ids(_)) => "input_ids",
        (Endpoint::Generate, _) => "text",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_too_long_for_any_tokens_is_refused_by_its_bytes() {
        let tokenizer = Tokenizer::from_hf(&crate::model::testing::fixture("llama-f32")).unwrap();
        let text = Text { tokenizer, chat: None, context: 64 };
        let ids = |bytes: usize| {
            text.ids(&Prompts::Texts(vec!["x".repeat(bytes)]), Endpoint::Completions)
        };
        let most = text.tokenizer.longest_text(64);
        assert!(ids(most).is_ok(), "that is for who counts tokens to say");
        let refused = ids(most + 1).unwrap_err();
        assert_eq!(
            (refused.code, refused.param.as_deref()),
            ("context_length_exceeded", Some("prompt"))
        );
        assert!(refused.message.contains(&most.to_string()), "{}", refused.message);
    }

    #[test]
    fn a_template_that_cannot_be_evaluated_refuses_its_request() {
        let source =
            "{{ messages[1:][::-1] }}{{ raise_exception('never') if messages|length > 9 }}";
        let chat = ChatTemplate::new(source, Vec::new()).unwrap();
        let tokenizer = Tokenizer::from_hf(&crate::model::testing::fixture("llama-f32")).unwrap();
        let text = Text { tokenizer, chat: Some(chat), context: 64 };
        let message = serde_json::json!({"role": "user", "content": "x"});
        let conversation = Conversation {
            messages: vec![message],
            add_generation_prompt: true,
            template_kwargs: serde_json::Map::new(),
        };
        let refused = text.render(&conversation).unwrap_err();
        assert_eq!((refused.status, refused.param.as_deref()), (400, Some("messages")));
    }
}
