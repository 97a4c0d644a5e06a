//! The body of `POST /v1/completions`.

use super::error::ApiError;
use super::fields::{Fields, Neutral};
use super::request::{self, ApiEndpoint, Dialect, GenerateRequest, Sampling};
use crate::limits::TOP_LOGPROBS_MAX;

const DIALECT: Dialect = Dialect {
    default_length: Some(16),
    // The second name is that of the chat endpoint. Other engines accept it here, too.
    max_tokens: &["max_tokens", "max_completion_tokens"],
    least_tokens: 0,
    min_tokens: "min_tokens",
    seed: &["seed"],
};

/// Fields of OpenAI that are not supported, with the values that have no effect.
pub const REFUSED: &[Neutral<'_>] = &[("suffix", &["\"\""])];

/// Reads a body. Sampling fields that are absent take their values from `defaults`.
///
/// # Errors
/// A field is missing, malformed, out of range or not supported; the error names it.
pub fn parse(body: &[u8], defaults: &Sampling) -> Result<GenerateRequest, ApiError> {
    let mut fields = Fields::parse(body)?;
    fields.refuse(REFUSED)?;
    let (prompts, batch) = request::prompts(&mut fields, "prompt")?
        .ok_or_else(|| fields.invalid("prompt", "is missing"))?;
    let mut request = GenerateRequest::read(ApiEndpoint::Completions, prompts, &mut fields)?;
    request.batch = batch;
    request.add_special_tokens = fields.get("add_special_tokens", "must be true or false")?;
    request.read_sampling(&mut fields, &DIALECT, defaults)?;
    request.read_stream_options(&mut fields)?;
    request.logprobs = fields.integer("logprobs", 0..=TOP_LOGPROBS_MAX as i128)?;
    request.echo = fields.flag("echo", false)?;
    request.read_prompt_logprobs(&mut fields)?;
    let best_of = fields.integer("best_of", 1..=i128::from(u32::MAX))?;
    if best_of.is_some_and(|best_of: usize| best_of != request.samples) {
        return Err(ApiError::unsupported("best_of"));
    }
    request.finish(fields)
}

#[cfg(test)]
mod tests {
    use super::super::Prompts;
    use super::*;

    fn read(body: &str) -> Result<GenerateRequest, ApiError> {
        parse(body.as_bytes(), &Sampling::default())
    }

    #[test]
    fn reads_prompts_in_all_forms() {
        let prompts = |json: &str| {
            let request = read(&format!("{{\"prompt\":{json}}}")).unwrap();
            (request.prompts, request.batch)
        };
        assert_eq!(prompts("\"a\""), (Prompts::Texts(vec!["a".into()]), false));
        assert_eq!(
            prompts("[ \"a\", \"b\"]"),
            (Prompts::Texts(vec!["a".into(), "b".into()]), true)
        );
        assert_eq!(prompts("[1,4294967295]"), (Prompts::Ids(vec![vec![1, u32::MAX]]), false));
        assert_eq!(prompts("[[1],[2,3]]"), (Prompts::Ids(vec![vec![1], vec![2, 3]]), true));
    }

    #[test]
    fn absent_null_and_default_mean_the_same() {
        let bare = read(r#"{"prompt":"a"}"#).unwrap();
        assert_eq!(
            (bare.max_tokens, bare.samples, bare.logprobs, bare.stream),
            (Some(16), 1, None, false)
        );
        assert_eq!(bare.sampling, Sampling::default());
        for rest in [
            r#""model":null,"temperature":null,"n":null,"stop":null,"logprobs":null,"seed":null,
            "bootstrap_room":null"#,
            r#""suffix":"","logit_bias":{ },"best_of":1,"n":1,"stop":[],"top_k":-1,"min_tokens":0,
            "user":"u""#,
            r#""temperature":1,"top_p":1.0,"top_k":0,"min_p":0,"presence_penalty":0,
            "repetition_penalty":1"#,
            r#""no_stop_trim":false,"ignore_eos":false,"skip_special_tokens":true,
            "return_hidden_states":false"#,
            r#""stream_options":{"include_usage":false},"echo":false,"suffix":null,"best_of":null"#,
        ] {
            assert_eq!(read(&format!("{{\"prompt\":\"a\",{rest}}}")), Ok(bare.clone()), "{rest}");
        }
    }

    #[test]
    fn reads_every_field() {
        let request = read(
            r#"{"model":"m","prompt":[[1]],"n":2,"best_of":2,"temperature":0,"top_p":0.5,"top_k":7,
            "min_p":0.1,"presence_penalty":-2,"frequency_penalty":2,"repetition_penalty":1.5,
            "seed":-1,"max_tokens":9,"min_tokens":0,"stop":"x","stop_token_ids":[5],
            "ignore_eos":true,"skip_special_tokens":false,"logprobs":0,"stream":true,
            "stream_options":{"include_usage":true,"every":1},"return_token_ids":true,
            "return_timings":true,"rid":"r","cache_salt":"s","bootstrap_room":4,
            "no_stop_trim":true,"foo":1}"#,
        )
        .unwrap();
        assert_eq!(
            request.sampling,
            Sampling {
                temperature: 0.0,
                top_p: 0.5,
                top_k: Some(7),
                min_p: 0.1,
                presence_penalty: -2.0,
                frequency_penalty: 2.0,
                repetition_penalty: 1.5,
                seed: Some(u64::MAX),
            }
        );
        assert_eq!((request.model.as_deref(), request.samples), (Some("m"), 2));
        assert_eq!(request.max_tokens, Some(9));
        assert_eq!((request.stop, request.stop_token_ids), (vec!["x".to_owned()], vec![5]));
        assert!(
            request.ignore_eos
                && !request.skip_special_tokens
                && request.stream
                && request.include_usage
        );
        assert!(request.return_token_ids && request.return_timings && request.includes_stop);
        assert_eq!(request.logprobs, Some(0));
        assert_eq!(
            (request.rids, request.cache_salt.as_deref()),
            (vec!["r".to_owned()], Some("s"))
        );
        let rooms: Vec<_> = request.bootstrap.unwrap().iter().map(|b| b.room.0).collect();
        assert_eq!(rooms, [4, 5]);
        assert_eq!(request.unknown, ["stream_options.every", "foo"]);
    }

    #[test]
    fn defaults_are_the_callers() {
        let defaults = Sampling { temperature: 0.6, top_k: Some(20), ..Sampling::default() };
        let request = parse(br#"{"prompt":"a","top_k":-1}"#, &defaults).unwrap();
        assert_eq!(request.sampling, Sampling { top_k: None, ..defaults });
    }

    #[test]
    fn refuses_by_name() {
        let texts = format!("[{}\"a\"]", "\"a\",".repeat(1024));
        let stops = format!("[{}\"a\"]", "\"a\",".repeat(32));
        let long = "x".repeat(1025);
        for (field, value) in [
            ("prompt", "7"),
            ("prompt", "{}"),
            ("prompt", "[]"),
            ("prompt", "[[]]"),
            ("prompt", "[1,\"a\"]"),
            ("prompt", "[\"a\",1]"),
            ("prompt", "[[1],2]"),
            ("prompt", "[-1]"),
            ("prompt", "[4294967296]"),
            ("prompt", "[1.5]"),
            ("prompt", "[null]"),
            ("prompt", &texts),
            ("model", "7"),
            ("temperature", "-0.1"),
            ("temperature", "\"hot\""),
            ("temperature", "1e39"),
            ("temperature", "1e999"),
            ("top_p", "0"),
            ("top_p", "1.01"),
            ("top_k", "-2"),
            ("top_k", "1.5"),
            ("min_p", "-0.1"),
            ("min_p", "2"),
            ("presence_penalty", "2.1"),
            ("frequency_penalty", "-2.1"),
            ("repetition_penalty", "0"),
            ("seed", "\"x\""),
            ("seed", "18446744073709551616"),
            ("n", "0"),
            ("n", "129"),
            ("max_tokens", "0"),
            ("max_tokens", "-1"),
            ("max_tokens", "4294967296"),
            ("min_tokens", "17"),
            ("bad_words", "[\"\"]"),
            ("allowed_token_ids", "[]"),
            ("include_stop_str_in_output", "1"),
            ("return_tokens_as_token_ids", "1"),
            ("stream_options.continuous_usage_stats", "1"),
            ("stop", "7"),
            ("stop", "\"\""),
            ("stop", "[\"\"]"),
            ("stop", &stops),
            ("stop", &format!("\"{long}\"")),
            ("stop_token_ids", "7"),
            ("stop_token_ids", "[-1]"),
            ("logprobs", "21"),
            ("logprobs", "-1"),
            ("logprobs", "true"),
            ("stream", "\"yes\""),
            ("stream_options", "true"),
            ("stream_options.include_usage", "1"),
            ("suffix", "\"x\""),
            ("logit_bias", "{\"5\":101}"),
            ("best_of", "2"),
            ("rid", "[\"a\",\"b\"]"),
            ("rid", "\"\""),
            ("cache_salt", "\"\""),
            ("bootstrap_room", "-1"),
        ] {
            let body = match field.split_once('.') {
                Some((outer, inner)) => {
                    format!("{{\"prompt\":\"a\",\"{outer}\":{{\"{inner}\":{value}}}}}")
                }
                None if field == "prompt" => format!("{{\"prompt\":{value}}}"),
                None => format!("{{\"prompt\":\"a\",\"{field}\":{value}}}"),
            };
            let error = read(&body).expect_err(&body);
            assert_eq!(
                (error.status, error.param.as_deref()),
                (400, Some(field)),
                "{value}: {error}"
            );
        }
        assert_eq!(read("{}").unwrap_err().param.as_deref(), Some("prompt"));
        assert_eq!(
            read(r#"{"prompt":"a","prompt_logprobs":1,"stream":true}"#)
                .unwrap_err()
                .param
                .as_deref(),
            Some("prompt_logprobs")
        );
        let crowd = format!("{{\"n\":2,\"prompt\":[{}\"a\"]}}", "\"a\",".repeat(600));
        assert_eq!(read(&crowd).unwrap_err().param.as_deref(), Some("n"));
        assert_eq!(
            read(r#"{"prompt":"a","suffix":"x"}"#).unwrap_err().code.name(),
            "unsupported_field"
        );
    }
}
