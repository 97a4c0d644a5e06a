//! Tools for a chat template that knows none: their description in the system message, and earlier
//! calls and results as text. The text has the format of Hermes.
//!
//! Invariant: roles alternate as in the request, because results become messages of the user.

use serde_json::{Value as Json, json};

const CALL: [&str; 2] = ["<tool_call>\n", "\n</tool_call>"];
const RESULT: [&str; 2] = ["<tool_response>\n", "\n</tool_response>"];

/// The same conversation, without a word that such a template does not know.
pub fn describe_tools(messages: &[Json], tools: &[Json]) -> Vec<Json> {
    let mut described: Vec<Json> = Vec::with_capacity(messages.len() + 1);
    for message in messages {
        let role = message.get("role").and_then(Json::as_str).unwrap_or_default();
        let content = message.get("content").and_then(Json::as_str).unwrap_or_default();
        match role {
            "assistant" => {
                let calls = message.get("tool_calls").and_then(Json::as_array);
                let mut text = content.to_owned();
                for call in calls.into_iter().flatten() {
                    let function = &call["function"];
                    let call = json!({
                        "name": function["name"], "arguments": function["arguments"],
                    });
                    separate(&mut text);
                    text += &format!("{}{call}{}", CALL[0], CALL[1]);
                }
                described.push(json!({"role": role, "content": text}));
            }
            "tool" => {
                let text = format!("{}{content}{}", RESULT[0], RESULT[1]);
                match described.last_mut().filter(|last| is_result(last)) {
                    Some(last) => append(last, &text),
                    None => described.push(json!({"role": "user", "content": text})),
                }
            }
            _ => described.push(message.clone()),
        }
    }
    if !tools.is_empty() {
        let text = describe(tools);
        match described.first_mut().filter(|first| first["role"] == "system") {
            Some(first) => append(first, &text),
            None => described.insert(0, json!({"role": "system", "content": text})),
        }
    }
    described
}

fn is_result(message: &Json) -> bool {
    let content = message["content"].as_str().unwrap_or_default();
    message["role"] == "user" && content.starts_with(RESULT[0]) && content.ends_with(RESULT[1])
}

fn append(message: &mut Json, more: &str) {
    let mut text = message["content"].as_str().unwrap_or_default().to_owned();
    separate(&mut text);
    message["content"] = Json::String(text + more);
}

fn separate(text: &mut String) {
    if !text.is_empty() {
        text.push('\n');
    }
}

fn describe(tools: &[Json]) -> String {
    let mut text = String::from(
        "You can call functions. Each line between <tools> and </tools> describes one:\n<tools>\n",
    );
    for tool in tools {
        text += &format!("{}\n", tool["function"]);
    }
    text += "</tools>\nTo call a function, answer with its name and its arguments as JSON:\n";
    text += CALL[0];
    text += "{\"name\": \"NAME\", \"arguments\": {}}";
    text + CALL[1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_without_tools_gets_them_as_text() {
        let tools = [json!({"type": "function", "function": {"name": "f"}})];
        let call = json!({"id": "1", "function": {"name": "f", "arguments": {"x": 1}}});
        let messages = [
            json!({"role": "system", "content": "Be short."}),
            json!({"role": "user", "content": "Hi"}),
            json!({"role": "assistant", "content": "", "tool_calls": [call, call]}),
            json!({"role": "tool", "content": "2", "tool_call_id": "1"}),
            json!({"role": "tool", "content": "3", "tool_call_id": "1"}),
        ];
        let described = describe_tools(&messages, &tools);
        let called = "<tool_call>\n{\"name\":\"f\",\"arguments\":{\"x\":1}}\n</tool_call>";
        assert_eq!(described.len(), 4);
        let system = described[0]["content"].as_str().unwrap();
        assert!(
            system.starts_with("Be short.\nYou can call") && system.contains("{\"name\":\"f\"}")
        );
        assert_eq!(
            described[2],
            json!({"role": "assistant", "content": format!("{called}\n{called}")})
        );
        let results = "<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>";
        assert_eq!(described[3], json!({"role": "user", "content": results}));
        assert_eq!(describe_tools(&messages[1..2], &tools)[0]["role"], "system");
        assert_eq!(describe_tools(&messages[..2], &[]), messages[..2]);
    }
}
