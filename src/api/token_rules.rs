//! Rules of a request about tokens: `logit_bias`, `allowed_token_ids`, `bad_words`.
//!
//! Not here: the check against the vocabulary, and the ids of bad words (`worker::text`).

use super::error::ApiError;
use super::fields::Fields;
use crate::limits::{
    ALLOWED_IDS_MAX, BAD_WORDS_MAX, LOGIT_BIAS_MAX, LOGIT_BIASES_MAX, NAME_BYTES_MAX,
};
use serde_json::{Map, Value};

/// The rules as sent.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct TokenRuleFields {
    /// Path of the object that has the fields: empty, or `sampling_params.`.
    pub path: String,
    /// Added to the logits of these ids.
    pub bias: Vec<(u32, f32)>,
    /// The only ids that can be chosen; empty: all.
    pub allowed: Vec<u32>,
    /// Texts that must not occur.
    pub bad_words: Vec<String>,
}

/// Reads the fields.
pub(super) fn read(fields: &mut Fields<'_>) -> Result<TokenRuleFields, ApiError> {
    let allowed = match fields.take("allowed_token_ids") {
        None => Vec::new(),
        Some(raw) => {
            let must = "must be a list of token ids, at least one";
            let ids = fields.list::<u32, ALLOWED_IDS_MAX>("allowed_token_ids", raw.get(), must)?;
            if ids.is_empty() {
                return Err(fields.invalid("allowed_token_ids", must));
            }
            ids
        }
    };
    let bad_words = match fields.take("bad_words") {
        None => Vec::new(),
        Some(raw) => {
            let must = "must be a list of strings";
            fields.list::<String, BAD_WORDS_MAX>("bad_words", raw.get(), must)?
        }
    };
    fields.sized("bad_words", &bad_words, NAME_BYTES_MAX)?;
    Ok(TokenRuleFields { path: fields.name_of(""), bias: read_bias(fields)?, allowed, bad_words })
}

fn read_bias(fields: &mut Fields<'_>) -> Result<Vec<(u32, f32)>, ApiError> {
    let must = "must be an object from token ids to numbers from -100 to 100";
    let map = fields.tree::<Map<String, Value>>("logit_bias", must)?.unwrap_or_default();
    if map.len() > LOGIT_BIASES_MAX {
        let why = format!("has {} entries; at most {LOGIT_BIASES_MAX} are allowed", map.len());
        return Err(fields.invalid("logit_bias", why));
    }
    let entry = |(id, bias): (&String, &Value)| {
        let bias = bias.as_f64().filter(|bias| bias.abs() <= LOGIT_BIAS_MAX)?;
        Some((id.parse().ok()?, bias as f32))
    };
    let entries: Option<Vec<(u32, f32)>> = map.iter().map(entry).collect();
    entries.ok_or_else(|| fields.invalid("logit_bias", must))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_read_or_refused_by_name() {
        let read = |body: &str| read(&mut Fields::parse(body.as_bytes()).unwrap());
        assert_eq!(read("{}").unwrap(), TokenRuleFields::default());
        let rules = read(
            r#"{"logit_bias":{"5":-100,"7":1.5},"allowed_token_ids":[5,7],"bad_words":["a b"]}"#,
        );
        assert_eq!(
            rules.unwrap(),
            TokenRuleFields {
                path: String::new(),
                bias: vec![(5, -100.0), (7, 1.5)],
                allowed: vec![5, 7],
                bad_words: vec!["a b".into()],
            }
        );
        for (body, param) in [
            (r#"{"logit_bias":{"x":1}}"#, "logit_bias"),
            (r#"{"logit_bias":{"5":101}}"#, "logit_bias"),
            (r#"{"logit_bias":[5]}"#, "logit_bias"),
            (r#"{"allowed_token_ids":[]}"#, "allowed_token_ids"),
            (r#"{"allowed_token_ids":[-1]}"#, "allowed_token_ids"),
            (r#"{"bad_words":[""]}"#, "bad_words"),
            (r#"{"bad_words":"a"}"#, "bad_words"),
        ] {
            assert_eq!(read(body).unwrap_err().param.as_deref(), Some(param), "{body}");
        }
    }
}
