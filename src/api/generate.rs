//! The body of SGLang's `POST /generate`.

use super::error::ApiError;
use super::fields::{Fields, Neutral};
use super::peer_fields;
use super::request::{self, ApiEndpoint, Dialect, GenerateRequest, PromptLogprobFields, Sampling};
use super::structured_output;
use crate::limits::TOP_LOGPROBS_MAX;

const DIALECT: Dialect = Dialect {
    default_length: Some(128),
    max_tokens: &["max_new_tokens"],
    least_tokens: 1,
    min_tokens: "min_new_tokens",
    seed: &["sampling_seed", "seed"],
};

/// Inputs and constraints that this server does not support. It refuses them, because an answer
/// without them would be wrong.
pub const REFUSED: &[Neutral<'_>] = &[("modalities", &["[\"text\"]"]), ("prompt_logprobs", &[])];

/// Reads a body. Sampling fields that are absent take their values from `defaults`.
///
/// # Errors
/// A field is missing, malformed, out of range or not supported; the error names it.
pub fn parse(body: &[u8], defaults: &Sampling) -> Result<GenerateRequest, ApiError> {
    let mut fields = Fields::parse(body)?;
    fields.refuse(REFUSED)?;
    let text = request::prompts(&mut fields, "text")?;
    let ids = request::prompts(&mut fields, "input_ids")?;
    let (prompts, batch) = match (text, ids) {
        (Some((request::Prompts::Ids(_), _)), _) => {
            return Err(fields.invalid("text", "must be a string or a list of strings"));
        }
        (_, Some((request::Prompts::Texts(_), _))) => {
            return Err(
                fields.invalid("input_ids", "must be a list of token ids or a list of such lists")
            );
        }
        (Some(_), Some(_)) => {
            return Err(fields.invalid("input_ids", "and `text` exclude each other"));
        }
        (None, None) => return Err(fields.invalid("input_ids", "or `text` is required")),
        (Some(prompts), None) | (None, Some(prompts)) => prompts,
    };
    let mut request = GenerateRequest::read(ApiEndpoint::Generate, prompts, &mut fields)?;
    request.batch = batch;
    // In SGLang, the highest number is the first.
    request.priority = -request.priority;
    let mut sampling = fields.object("sampling_params")?.unwrap_or_default();
    sampling.refuse(peer_fields::REFUSED)?;
    if let Some(structured) = structured_output::read(&mut sampling)?
        && let Some(other) = request.structured.replace(structured)
    {
        let why = "and the grammar in `sampling_params` exclude each other";
        return Err(ApiError::invalid(other.field, why));
    }
    request.read_sampling(&mut sampling, &DIALECT, defaults)?;
    peer_fields::IGNORED.iter().for_each(|(name, _)| sampling.accept(&[name]));
    request.unknown.extend(sampling.rest());
    let top = fields.integer("top_logprobs_num", 0..=TOP_LOGPROBS_MAX as i128)?.unwrap_or(0);
    request.logprobs = fields.flag("return_logprob", false)?.then_some(top);
    request.logprob_text = fields.flag("return_text_in_logprobs", false)?;
    let start = fields.integer("logprob_start_len", -1..=i128::from(u32::MAX))?;
    let start = start.and_then(|start: i128| u32::try_from(start).ok());
    request.prompt_logprobs = start
        .filter(|_| request.logprobs.is_some())
        .map(|start| PromptLogprobFields { start, top, field: None });
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
    fn reads_what_sglangs_router_sends() {
        let request = read(
            r#"{"model":null,"input_ids":[[1,2],[3]],
            "sampling_params":{"temperature":0,"max_new_tokens":8,"ignore_eos":true,
            "sampling_seed":3,"n":1,"no_stop_trim":false,"skip_special_tokens":true},
            "return_logprob":true,"top_logprobs_num":2,"logprob_start_len":-1,"stream":false,
            "rid":"r","log_metrics":true,"background":false,"no_logs":false,"return_bytes":false,
            "return_entropy":false,"return_text_in_logprobs":true,"return_hidden_states":false,
            "bootstrap_host":["h","h"],"bootstrap_port":[null,8998],"bootstrap_room":[1,2]}"#,
        )
        .unwrap();
        assert_eq!(request.prompts, Prompts::Ids(vec![vec![1, 2], vec![3]]));
        assert_eq!(
            (request.max_tokens, request.logprobs, request.logprob_text),
            (Some(8), Some(2), true)
        );
        assert_eq!((request.sampling.temperature, request.sampling.seed), (0.0, Some(3)));
        assert!(request.ignore_eos && request.batch);
        assert_eq!(request.rids, ["r_0", "r_1"]);
        assert_eq!(request.bootstrap.unwrap().len(), 2);
        assert_eq!(request.unknown, [""; 0]);
    }

    #[test]
    fn little_is_needed() {
        let request = read(r#"{"text":"a"}"#).unwrap();
        assert_eq!(request.prompts, Prompts::Texts(vec!["a".into()]));
        assert_eq!((request.max_tokens, request.logprobs, request.batch), (Some(128), None, false));
        let request =
            read(r#"{"text":["a"],"top_logprobs_num":3,"sampling_params":{"x":1},"y":2}"#).unwrap();
        assert_eq!((request.logprobs, request.batch), (None, true));
        assert_eq!(request.unknown, ["sampling_params.x", "y"]);
    }

    #[test]
    fn refuses_by_path() {
        for (body, param) in [
            ("{}", "input_ids"),
            (r#"{"text":"a","input_ids":[1]}"#, "input_ids"),
            (r#"{"input_ids":"a"}"#, "input_ids"),
            (r#"{"input_ids":[]}"#, "input_ids"),
            (r#"{"text":[1]}"#, "text"),
            (r#"{"text":"a","sampling_params":[]}"#, "sampling_params"),
            (r#"{"text":"a","sampling_params":{"temperature":-1}}"#, "sampling_params.temperature"),
            (
                r#"{"text":"a","sampling_params":{"max_new_tokens":0}}"#,
                "sampling_params.max_new_tokens",
            ),
            (r#"{"text":"a","regex":"a","sampling_params":{"regex":"a"}}"#, "regex"),
            (
                r#"{"text":"a","sampling_params":{"min_new_tokens":129}}"#,
                "sampling_params.min_new_tokens",
            ),
            (
                r#"{"text":"a","sampling_params":{"logit_bias":{"a":1}}}"#,
                "sampling_params.logit_bias",
            ),
            (r#"{"text":"a","image_data":"x"}"#, "image_data"),
            (r#"{"text":"a","top_logprobs_num":21}"#, "top_logprobs_num"),
        ] {
            let error = read(body).expect_err(body);
            assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{error}");
        }
    }
}
