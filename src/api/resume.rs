//! Failover of a stream: other workers continue it, given the token ids that its client already
//! has.
//!
//! A router that supports failover adds [`FIELD`] to the body. The worker then writes a *mark*
//! before each event of a choice, as an SSE comment with the ids that the event stands for. The
//! router stores the marks and removes them from the stream. If the stream breaks, it sends the
//! same body to another worker, with the ids in that field. That worker treats them as generated,
//! so that held-back bytes, stop strings, penalties, positions and usage are the same. It sends no
//! event for them and continues after the last one. No text is tokenised again.
//!
//! ```text
//! worker ─▶ router   : {"created":1700000000,"choice":0,"ids":[403,7042]}    mark, then its event
//! router ─▶ worker   "baton_resume":{"created":1700000000,"choices":[{"ids":[403,7042]}]}
//! ```
//! Invariant: with the ids of its marks, a choice has the same state as after its last event.

use super::error::ApiError;
use super::fields::Fields;
use crate::limits::{CHOICES_MAX, TOP_LOGPROBS_MAX};
use crate::model::logprobs::{Sampled, TopLogprobs};
use serde::{Deserialize, Serialize};

/// The field of a body. A router sends it. From a client it does no harm.
pub const FIELD: &str = "baton_resume";

/// The field with which a router asks prefill to send its sampled token before the KV is
/// transferred.
pub const FIRST_TOKEN: &str = "baton_first_token";

/// The reason of a choice's end, for the cases in which its tokens do not show it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChoiceEnd {
    /// It reached its maximum length.
    Length,
    /// Its last token or a stop string ended it.
    Stop,
}

/// The part of a choice that the client already has.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChoiceProgress {
    /// The ids that its events stand for.
    #[serde(default)]
    pub ids: Vec<u32>,
    /// For each id its logprob and its alternatives, as the bits of an f32. Empty if later events
    /// do not repeat them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub logprobs: Vec<(u32, Vec<(u32, u32)>)>,
    /// How it ended, if it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<ChoiceEnd>,
    /// Prompt tokens that were not computed, known once it has ended.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub cached: u32,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl ChoiceProgress {
    /// Appends the progress of a later mark.
    fn extend(&mut self, more: ChoiceProgress) {
        self.ids.extend(more.ids);
        self.logprobs.extend(more.logprobs);
        self.end = more.end.or(self.end);
        self.cached = self.cached.max(more.cached);
    }

    /// The sampled tokens, with the logprobs if they were recorded.
    pub fn sampled(&self) -> impl Iterator<Item = Sampled> {
        self.ids.iter().enumerate().map(|(at, &token)| {
            let mut sampled = Sampled { token, logprob: 0.0, top: TopLogprobs::EMPTY };
            if let Some((logprob, top)) = self.logprobs.get(at) {
                sampled.logprob = f32::from_bits(*logprob);
                top.iter().for_each(|&(id, bits)| sampled.top.push(id, f32::from_bits(bits)));
            }
            sampled
        })
    }
}

/// The SSE comment before an event.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Mark {
    /// The time at which the answer began, in seconds of Unix time.
    pub created: u64,
    /// Index of the choice.
    pub choice: usize,
    /// In the first marks of the first choice of each prompt: the tokens of the prompt.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub prompt: u32,
    /// The progress of the choice with this event.
    #[serde(flatten)]
    pub progress: ChoiceProgress,
}

/// The part of an answer that the client already has.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resume {
    /// The time at which it began, if it has begun.
    #[serde(default)]
    pub created: Option<u64>,
    /// By choice. `None`: the client has no event of it.
    #[serde(default)]
    pub choices: Vec<Option<ChoiceProgress>>,
}

impl Resume {
    /// Whether the client has any event.
    pub fn has_begun(&self) -> bool {
        self.created.is_some()
    }

    /// Whether all `choices` choices have ended.
    pub fn has_ended(&self, choices: usize) -> bool {
        let ended = |progress: &Option<ChoiceProgress>| {
            progress.as_ref().is_some_and(|progress| progress.end.is_some())
        };
        self.choices.len() >= choices && self.choices.iter().all(ended)
    }

    /// Records the mark of an event that was sent.
    ///
    /// # Errors
    /// The mark names a choice that cannot exist; nothing is recorded.
    pub fn note(&mut self, mark: Mark) -> Result<(), ImpossibleChoice> {
        if mark.choice >= CHOICES_MAX {
            return Err(ImpossibleChoice(mark.choice));
        }
        if self.choices.len() <= mark.choice {
            self.choices.resize(mark.choice + 1, None);
        }
        self.created.get_or_insert(mark.created);
        self.choices[mark.choice].get_or_insert_default().extend(mark.progress);
        Ok(())
    }

    /// The part of a choice that the client has.
    pub fn progress_of(&self, choice: usize) -> Option<&ChoiceProgress> {
        self.choices.get(choice)?.as_ref()
    }
}

/// A worker marked an event of a choice that no request can have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ImpossibleChoice(pub usize);

/// Reads the field for `choices` choices; `stream` says whether the body asks for a stream.
pub(super) fn read(
    fields: &mut Fields<'_>,
    choices: usize,
    stream: bool,
) -> Result<Option<Resume>, ApiError> {
    let must = "must be the state of a stream that continues here, as a router sends it";
    let Some(resume) = fields.get::<Resume>(FIELD, must)? else { return Ok(None) };
    if resume.has_begun() && !stream {
        return Err(fields.invalid(FIELD, "needs `stream` to be true"));
    }
    if resume.choices.len() > choices {
        return Err(
            fields.invalid(FIELD, format!("has more than the {choices} choices of the request"))
        );
    }
    let is_sound = |progress: &ChoiceProgress| {
        let all = progress.logprobs.is_empty() || progress.logprobs.len() == progress.ids.len();
        all && progress.logprobs.iter().all(|(_, top)| top.len() <= TOP_LOGPROBS_MAX)
    };
    if !resume.choices.iter().flatten().all(is_sound) {
        return Err(fields.invalid(FIELD, "must have the logprobs of all its ids or of none"));
    }
    Ok(Some(resume))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(value: &str, stream: bool) -> Result<Option<Resume>, ApiError> {
        let body = format!("{{\"{FIELD}\":{value}}}");
        read(&mut Fields::parse(body.as_bytes())?, 2, stream)
    }

    fn mark(choice: usize, ids: &[u32], end: Option<ChoiceEnd>) -> Mark {
        Mark {
            created: 7,
            choice,
            prompt: 0,
            progress: ChoiceProgress { ids: ids.to_vec(), end, ..ChoiceProgress::default() },
        }
    }

    #[test]
    fn marks_add_up_to_the_resume_state_for_the_next_worker() {
        let mut resume = Resume::default();
        assert!(!resume.has_begun());
        for mark in
            [mark(1, &[], None), mark(1, &[5, 6], None), mark(1, &[7], Some(ChoiceEnd::Length))]
        {
            let line = serde_json::to_string(&mark).unwrap();
            resume.note(serde_json::from_str(&line).unwrap()).unwrap();
        }
        let sent = serde_json::to_string(&resume).unwrap();
        assert_eq!(sent, r#"{"created":7,"choices":[null,{"ids":[5,6,7],"end":"length"}]}"#);
        assert_eq!(parse(&sent, true).unwrap(), Some(resume.clone()));
        assert_eq!(
            (
                resume.progress_of(0),
                resume.progress_of(1).unwrap().ids.len(),
                resume.progress_of(2)
            ),
            (None, 3, None)
        );
    }

    #[test]
    fn logprobs_come_back_bit_by_bit() {
        let mut progress = ChoiceProgress::default();
        let (logprob, other) = (-0.1f32, f32::from_bits(0xc0a0_0001));
        progress.extend(ChoiceProgress {
            ids: vec![3],
            logprobs: vec![(logprob.to_bits(), vec![(9, other.to_bits())])],
            ..ChoiceProgress::default()
        });
        let sampled: Vec<Sampled> = progress.sampled().collect();
        assert_eq!((sampled[0].token, sampled[0].logprob.to_bits()), (3, logprob.to_bits()));
        assert_eq!(sampled[0].top.as_slice(), [(9, other)]);
    }

    #[test]
    fn an_invalid_resume_state_is_refused() {
        assert_eq!(parse("null", false).unwrap(), None);
        assert_eq!(parse("{}", false).unwrap(), Some(Resume::default()));
        let top = format!("[1,[{}]]", vec!["[1,2]"; TOP_LOGPROBS_MAX + 1].join(","));
        for (value, stream) in [
            ("7", true),
            (r#"{"created":1,"choices":[]}"#, false),
            (r#"{"created":1,"choices":[null,null,null]}"#, true),
            (r#"{"created":1,"choices":[{"ids":[-1]}]}"#, true),
            (r#"{"created":1,"choices":[{"ids":[1,2],"logprobs":[[1,[]]]}]}"#, true),
            (&format!(r#"{{"created":1,"choices":[{{"ids":[1],"logprobs":[{top}]}}]}}"#), true),
            (r#"{"created":1,"choices":[{"end":"never"}]}"#, true),
        ] {
            let error = parse(value, stream).expect_err(value);
            assert_eq!((error.status, error.param.as_deref()), (400, Some(FIELD)), "{value}");
        }
        assert!(Resume::default().note(mark(CHOICES_MAX, &[], None)).is_err());
    }
}
