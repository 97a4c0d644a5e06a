//! Which parsers read the answers of a model.

use clap::ValueEnum;
use serde::Serialize;

/// Parser of tool calls, with the names of vLLM. SGLang's names are aliases.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum ToolCallParser {
    /// The one that the model's chat template shows.
    #[default]
    Auto,
    /// No parser: requests with tools are refused.
    None,
    /// JSON in the tags `<tool_call>`.
    #[value(aliases = ["qwen", "qwen25"])]
    Hermes,
    /// Parameters in tags of their own.
    #[value(name = "qwen3_coder")]
    #[serde(rename = "qwen3_coder")]
    Qwen3Coder,
    /// JSON as the whole answer.
    #[value(name = "llama3_json", alias = "llama3")]
    #[serde(rename = "llama3_json")]
    Llama3Json,
    /// JSON behind `[TOOL_CALLS]`.
    Mistral,
    /// Calls of Python.
    Pythonic,
}

/// Parser of reasoning, with the names of vLLM. SGLang's names are aliases.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum ReasoningParser {
    /// The one that the model's chat template shows.
    #[default]
    Auto,
    /// No parser: reasoning is content.
    None,
    /// Text in the tags `<think>`.
    Qwen3,
    /// The same, and an answer begins with reasoning even without the opening tag.
    #[value(name = "deepseek_r1", aliases = ["deepseek-r1", "qwen3-thinking"])]
    #[serde(rename = "deepseek_r1")]
    DeepseekR1,
}
