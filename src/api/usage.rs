//! The number of tokens that a whole answer reports.
//!
//! Owns: the fields of OpenAI's and SGLang's answers with it. Not here: streams, which a router
//! counts event by event.

use serde::Deserialize;

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
}

/// An answer of `/generate`.
#[derive(Deserialize)]
struct Generated {
    meta_info: Usage,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Answer {
    OpenAi { usage: Usage },
    One(Generated),
    Many(Vec<Generated>),
}

/// Tokens of the prompts and of all choices. With `samples` choices for each prompt, the prompt
/// counts once. `None`: the answer does not tell.
pub fn tokens_of_answer(body: &[u8], samples: usize) -> Option<u64> {
    let usages = match serde_json::from_slice(body).ok()? {
        Answer::OpenAi { usage } => vec![usage],
        Answer::One(generated) => vec![generated.meta_info],
        Answer::Many(all) => all.into_iter().map(|generated| generated.meta_info).collect(),
    };
    let prompts = usages.iter().step_by(samples.max(1)).map(|usage| usage.prompt_tokens);
    let answers = usages.iter().map(|usage| usage.completion_tokens);
    Some(prompts.chain(answers).fold(0, u64::saturating_add))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_prompt_counts_once_and_each_choice_counts() {
        let meta = |prompt: u32, answer: u32| {
            format!(
                r#"{{"text":"a","meta_info":{{"id":"x","prompt_tokens":{prompt},
                "completion_tokens":{answer}}}}}"#
            )
        };
        let openai = r#"{"choices":[{"usage":1}],"usage":{"prompt_tokens":3,"completion_tokens":8,
            "total_tokens":11,"prompt_tokens_details":null}}"#;
        assert_eq!(tokens_of_answer(openai.as_bytes(), 4), Some(11));
        assert_eq!(tokens_of_answer(meta(5, 2).as_bytes(), 1), Some(7));
        let many = [meta(5, 1), meta(5, 2), meta(7, 3), meta(7, 4)].join(",");
        assert_eq!(tokens_of_answer(format!("[{many}]").as_bytes(), 2), Some(22));
        for odd in ["", "7", r#"{"usage":{"prompt_tokens":-1,"completion_tokens":1}}"#, "{}"] {
            assert_eq!(tokens_of_answer(odd.as_bytes(), 1), None, "{odd}");
        }
    }
}
