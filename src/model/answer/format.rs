//! The formats in which models write tool calls and reasoning, and which one a chat template shows.

use super::{CallReader, ToolFunction};
use super::{hermes, llama, mistral, pythonic, qwen_coder};
use std::sync::Arc;

/// How a model writes tool calls.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum ToolFormat {
    /// JSON in the tags `<tool_call>`, as Hermes and Qwen.
    #[default]
    Hermes,
    /// Parameters in tags of their own, as Qwen3-Coder.
    Qwen3Coder,
    /// JSON as the whole answer, as Llama 3.
    Llama3Json,
    /// JSON behind `[TOOL_CALLS]`, as Mistral.
    Mistral,
    /// Calls of Python, as Llama 4.
    Pythonic,
}

/// How a model writes reasoning.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReasoningFormat {
    /// In the tags `<think>`, as Qwen3. Without a tag there is no reasoning.
    Qwen3,
    /// As DeepSeek-R1: the answer begins with reasoning, with or without the opening tag.
    DeepseekR1,
}

impl ToolFormat {
    /// All formats.
    pub const ALL: [ToolFormat; 5] = [
        ToolFormat::Hermes,
        ToolFormat::Qwen3Coder,
        ToolFormat::Llama3Json,
        ToolFormat::Mistral,
        ToolFormat::Pythonic,
    ];

    /// The format that a chat template shows, by its tags.
    pub fn of_template(template: &str) -> Option<ToolFormat> {
        [
            (qwen_coder::FUNCTION, ToolFormat::Qwen3Coder),
            (hermes::OPENING, ToolFormat::Hermes),
            (mistral::OPENING, ToolFormat::Mistral),
            (pythonic::TAGS[0], ToolFormat::Pythonic),
            (llama::OPENING, ToolFormat::Llama3Json),
            // The role of results in templates of Llama 3.
            ("ipython", ToolFormat::Llama3Json),
        ]
        .into_iter()
        .find(|(tag, _)| template.contains(tag))
        .map(|(_, format)| format)
    }

    /// The tag that always opens a call, if there is one.
    pub(super) fn opening_tag(self) -> Option<&'static str> {
        match self {
            ToolFormat::Hermes | ToolFormat::Qwen3Coder => Some(hermes::OPENING),
            ToolFormat::Mistral => Some(mistral::OPENING),
            ToolFormat::Llama3Json | ToolFormat::Pythonic => None,
        }
    }

    /// All tags, the opening one first. They can be special tokens, which have no text otherwise.
    pub fn tags(self) -> &'static [&'static str] {
        match self {
            ToolFormat::Hermes | ToolFormat::Qwen3Coder => &[hermes::OPENING, hermes::CLOSING],
            ToolFormat::Mistral => &[mistral::OPENING, mistral::ARGUMENTS, mistral::CALL_ID],
            ToolFormat::Llama3Json => &[llama::OPENING],
            ToolFormat::Pythonic => &pythonic::TAGS,
        }
    }

    pub(super) fn reader(self, functions: &Arc<[ToolFunction]>) -> Box<dyn CallReader> {
        let functions = functions.clone();
        match self {
            ToolFormat::Hermes => Box::new(hermes::HermesReader::new()),
            ToolFormat::Qwen3Coder => Box::new(qwen_coder::QwenCoderReader::new(functions)),
            ToolFormat::Llama3Json => Box::new(llama::LlamaReader::new(functions)),
            ToolFormat::Mistral => Box::new(mistral::MistralReader::new()),
            ToolFormat::Pythonic => Box::new(pythonic::PythonicReader::new(functions)),
        }
    }
}

impl ReasoningFormat {
    /// The tags around reasoning.
    pub const TAGS: [&'static str; 2] = ["<think>", "</think>"];

    /// The format that a chat template shows. Only tags in the answer make reasoning then.
    pub fn of_template(template: &str) -> Option<ReasoningFormat> {
        template.contains(Self::TAGS[0]).then_some(ReasoningFormat::Qwen3)
    }
}
