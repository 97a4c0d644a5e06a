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
    /// Special tokens of tool calls.
    pub tool_tags: Vec<u32>,
    /// Special tokens of reasoning.
    pub reasoning_tags: Vec<u32>,
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
            // `chat` describes tools in the format of Hermes.
            ToolCallParser::Auto if template.is_none_or(|template| !template.takes_tools()) => {
                Some(ToolFormat::Hermes)
            }
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
        let ids = |tags: &[&str]| {
            tags.iter().filter_map(|tag| special_token(tokenizer, tag)).collect::<Vec<u32>>()
        };
        AnswerStyle {
            tools,
            reasoning,
            tool_tags: ids(tools.map_or(&[], ToolFormat::tags)),
            reasoning_tags: ids(reasoning.map_or(&[], |_| &ReasoningFormat::TAGS)),
        }
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
        let of_tools = if tools.is_some() { &self.tool_tags[..] } else { &[] };
        let tags: Arc<[u32]> = of_tools.iter().chain(&self.reasoning_tags).copied().collect();
        // Reasoning that is content still has its tags.
        (tools.is_some() || self.reasoning.is_some()).then_some(AnswerRules {
            tools,
            functions: functions.clone(),
            is_single_call,
            reasoning,
            delivery: delivery.unwrap_or_default(),
            has_grammar: false,
            tags,
        })
    }

    /// Where a prompt leaves the reasoning.
    pub fn reasoning_after(&self, prompt: &[u32], tokenizer: &Tokenizer) -> ReasoningStart {
        let end = &prompt[prompt.len().saturating_sub(PROMPT_END)..];
        match ReasoningStart::of_prompt(&tokenizer.decode(end, false)) {
            // Such a model does not write the opening tag.
            ReasoningStart::Outside if self.reasoning == Some(ReasoningFormat::DeepseekR1) => {
                ReasoningStart::Inside
            }
            start => start,
        }
    }
}

/// The id of `text`, if it is one special token.
pub fn special_token(tokenizer: &Tokenizer, text: &str) -> Option<u32> {
    match *tokenizer.encode(text, false).ok()? {
        [id] if tokenizer.is_special(id) => Some(id),
        _ => None,
    }
}
