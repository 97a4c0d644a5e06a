//! How one model writes its answers: the formats of tool calls and of reasoning, and the special
//! tokens that belong to them.
//!
//! Invariant: workers of one model and with equal flags have equal styles.

use super::{
    AnswerRules, ReasoningDelivery, ReasoningFormat, ReasoningStart, ToolFormat, ToolFunction,
};
use crate::config::parsers::{ReasoningParser, ToolCallParser};
use crate::model::chat::ChatTemplate;
use crate::model::tokenizer::Tokenizer;
use std::sync::Arc;

/// Tokens at the end of a prompt that can show where the reasoning is.
const PROMPT_END: usize = 16;

/// How a model writes its answers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AnswerStyle {
    /// The format of tool calls; `None`: tools are not supported.
    pub tools: Option<ToolFormat>,
    /// The format of reasoning; `None`: reasoning is content.
    pub reasoning: Option<ReasoningFormat>,
    /// Special tokens that readers need as text.
    pub tags: Arc<[u32]>,
}

impl AnswerStyle {
    /// The style of a model with this template. A template that shows no format gets the format of
    /// Hermes, in which `chat` then describes the tools.
    pub fn new(
        template: Option<&ChatTemplate>,
        tokenizer: &Tokenizer,
        tools: ToolCallParser,
        reasoning: ReasoningParser,
    ) -> AnswerStyle {
        let source = template.map_or("", ChatTemplate::source);
        let tools = match tools {
            ToolCallParser::None => None,
            ToolCallParser::Auto => {
                Some(ToolFormat::of_template(source).unwrap_or(ToolFormat::Hermes))
            }
            ToolCallParser::Hermes => Some(ToolFormat::Hermes),
            ToolCallParser::Qwen3Coder => Some(ToolFormat::Qwen3Coder),
            ToolCallParser::Llama3Json => Some(ToolFormat::Llama3Json),
            ToolCallParser::Mistral => Some(ToolFormat::Mistral),
            ToolCallParser::Pythonic => Some(ToolFormat::Pythonic),
        };
        let reasoning = match reasoning {
            ReasoningParser::None => None,
            ReasoningParser::Auto => ReasoningFormat::of_template(source),
            ReasoningParser::Qwen3 => Some(ReasoningFormat::Qwen3),
            ReasoningParser::DeepseekR1 => Some(ReasoningFormat::DeepseekR1),
        };
        let of_tools = tools.map_or(&[][..], ToolFormat::tags);
        let of_reasoning = reasoning.map_or(&[][..], |_| &ReasoningFormat::TAGS);
        let tags = of_tools.iter().chain(of_reasoning);
        let tags = tags.filter_map(|tag| special_token(tokenizer, tag)).collect();
        AnswerStyle { tools, reasoning, tags }
    }

    /// The rules for a request with these functions. Without a `delivery`, reasoning is content.
    /// `None`: the answer is content as a whole.
    pub fn rules(
        &self,
        functions: &Arc<[ToolFunction]>,
        is_single_call: bool,
        delivery: Option<ReasoningDelivery>,
    ) -> Option<AnswerRules> {
        let tools = self.tools.filter(|_| !functions.is_empty());
        let reasoning = self.reasoning.filter(|_| delivery.is_some());
        let functions = functions.clone();
        let (tags, delivery) = (self.tags.clone(), delivery.unwrap_or_default());
        let rules = AnswerRules { tools, functions, is_single_call, reasoning, delivery, tags };
        (tools.is_some() || reasoning.is_some()).then_some(rules)
    }

    /// Where a prompt leaves the reasoning.
    pub fn reasoning_after(&self, prompt: &[u32], tokenizer: &Tokenizer) -> ReasoningStart {
        let end = &prompt[prompt.len().saturating_sub(PROMPT_END)..];
        ReasoningStart::of_prompt(&tokenizer.decode(end, false))
    }
}

/// The id of `text`, if it is one special token.
pub fn special_token(tokenizer: &Tokenizer, text: &str) -> Option<u32> {
    match *tokenizer.encode(text, false).ok()? {
        [id] if tokenizer.is_special(id) => Some(id),
        _ => None,
    }
}
