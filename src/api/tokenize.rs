//! The bodies of `/tokenize` and `/detokenize`, in vLLM's form.

use super::chat;
use super::error::ApiError;
use super::fields::Fields;
use super::request::ChatPrompt;
use super::tools;
use serde::Serialize;

/// The input of `/tokenize`.
#[derive(Clone, PartialEq, Debug)]
pub enum Subject {
    /// A text.
    Prompt(String),
    /// A conversation, rendered by the model's chat template.
    Chat(ChatPrompt),
}

/// A request to `/tokenize`.
#[derive(Clone, PartialEq, Debug)]
pub struct TokenizeRequest {
    /// The requested model name.
    pub model: Option<String>,
    /// A text or a conversation.
    pub subject: Subject,
    /// Whether the tokenizer adds its special tokens.
    pub add_special_tokens: bool,
    /// Whether to return the tokens' texts.
    pub return_token_strs: bool,
}

impl TokenizeRequest {
    /// Reads a body.
    ///
    /// # Errors
    /// A field is missing or malformed.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let (tools, _) = tools::read(&mut fields)?;
        let subject = match (fields.text("prompt")?, chat::conversation(&mut fields)?) {
            (Some(prompt), None) => Subject::Prompt(prompt),
            (None, Some(conversation)) => Subject::Chat(conversation.with_tools(tools.as_ref())),
            (Some(_), Some(_)) => {
                return Err(fields.invalid("prompt", "and `messages` exclude each other"));
            }
            (None, None) => return Err(fields.invalid("prompt", "or `messages` is required")),
        };
        // The output of a chat template already contains the special tokens.
        let add = matches!(subject, Subject::Prompt(_));
        Ok(Self {
            model: fields.name("model")?,
            subject,
            add_special_tokens: fields.flag("add_special_tokens", add)?,
            return_token_strs: fields.flag("return_token_strs", false)?,
        })
    }
}

/// The response of `/tokenize`.
#[derive(Clone, Debug, Serialize)]
pub struct TokenizeAnswer<'a> {
    /// Number of tokens.
    pub count: usize,
    /// The model's context length.
    pub max_model_len: usize,
    /// The token ids.
    pub tokens: &'a [u32],
    /// The tokens' texts, if requested.
    pub token_strs: Option<Vec<String>>,
}

/// A request to `/detokenize`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DetokenizeRequest {
    /// The requested model name.
    pub model: Option<String>,
    /// Token ids, not checked against the vocabulary.
    pub tokens: Vec<u32>,
}

impl DetokenizeRequest {
    /// Reads a body.
    ///
    /// # Errors
    /// A field is missing or malformed.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let tokens = fields.get("tokens", "must be a list of token ids")?;
        let tokens = tokens.ok_or_else(|| fields.invalid("tokens", "is missing"))?;
        Ok(Self { model: fields.name("model")?, tokens })
    }
}

/// The response of `/detokenize`.
#[derive(Clone, Debug, Serialize)]
pub struct DetokenizeAnswer<'a> {
    /// The text.
    pub prompt: &'a str,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_texts_and_conversations() {
        let text = TokenizeRequest::parse(br#"{"model":"m","prompt":"hi"}"#).unwrap();
        assert_eq!(text.subject, Subject::Prompt("hi".into()));
        assert_eq!((text.add_special_tokens, text.return_token_strs), (true, false));
        let chat = TokenizeRequest::parse(
            br#"{"messages":[{"role":"user","content":"hi"}],"add_generation_prompt":false,
            "return_token_strs":true}"#,
        )
        .unwrap();
        let Subject::Chat(conversation) = &chat.subject else { panic!("a conversation") };
        assert!(!conversation.add_generation_prompt);
        assert_eq!((chat.add_special_tokens, chat.return_token_strs), (false, true));
        for body in [
            "{}",
            r#"{"prompt":"a","messages":[{"role":"user","content":"b"}]}"#,
            r#"{"prompt":["a"]}"#,
        ] {
            assert_eq!(
                TokenizeRequest::parse(body.as_bytes()).unwrap_err().param.as_deref(),
                Some("prompt")
            );
        }
        assert_eq!(DetokenizeRequest::parse(br#"{"tokens":[1,2]}"#).unwrap().tokens, [1, 2]);
        for body in ["{}", r#"{"tokens":[-1]}"#, r#"{"tokens":"x"}"#] {
            assert_eq!(
                DetokenizeRequest::parse(body.as_bytes()).unwrap_err().param.as_deref(),
                Some("tokens")
            );
        }
    }

    #[test]
    fn answers_as_vllm() {
        let answer =
            TokenizeAnswer { count: 2, max_model_len: 8, tokens: &[1, 2], token_strs: None };
        assert_eq!(
            serde_json::to_string(&answer).unwrap(),
            r#"{"count":2,"max_model_len":8,"tokens":[1,2],"token_strs":null}"#
        );
        assert_eq!(
            serde_json::to_string(&DetokenizeAnswer { prompt: "a" }).unwrap(),
            r#"{"prompt":"a"}"#
        );
    }
}
