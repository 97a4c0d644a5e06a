//! Bodies of `/v1/chat/completions` and `/tokenize`.

use super::completion_body::check;
use baton::api::tokenize::TokenizeRequest;
use baton::api::{Prompts, Sampling, chat};

pub fn run(data: &[u8]) {
    let result = chat::parse(data, &Sampling::default());
    if let Ok(Prompts::Chat(conversation)) = result.as_ref().map(|request| &request.prompts) {
        for message in &conversation.messages {
            assert!(message["role"].is_string() && message["content"].is_string());
        }
    }
    check(result);
    let _ = TokenizeRequest::parse(data);
}
