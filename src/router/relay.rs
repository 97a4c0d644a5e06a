//! The part of an answer that the client already has, event by event. Another worker can continue
//! from it.
//!
//! Workers of Baton mark their events (`api::resume`). The relay keeps the marks and passes
//! complete events to the client. A stream without marks, and an answer that is not a stream,
//! passes unchanged and cannot continue on another worker.
//! If prefill sends events before decode, they come from a second leg. Their marks say which of
//! decode's events the client already has.
//! Thread: `ctl`. Bounds: [`SSE_EVENT_MAX`] for an event; the tokens of the answer for the marks.

use crate::api::resume::{ChoiceProgress, Mark, Resume};
use crate::cause::Cause;
use crate::limits::{CHOICES_MAX, SSE_EVENT_MAX};
use crate::stdx::failpoint::is_failpoint_active;
use crate::upstream::failure;

/// The end of a stream.
const DONE: &[u8] = b"data: [DONE]\n\n";
/// The beginning of an event.
const DATA: &[u8] = b"data: ";
/// The beginning of a mark. It has one character more than other comments, which contain no JSON.
const MARK: &[u8] = b": {";

/// The form of an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Form {
    /// The received bytes do not show it yet.
    Unknown,
    /// Events with marks.
    Marked,
    /// Any other answer.
    Plain,
}

/// The next part of a worker's answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Relayed {
    /// Bytes for the client; can be empty.
    Bytes(Vec<u8>),
    /// The worker failed after these bytes. If another worker can continue, the client does not get
    /// the error.
    Failed {
        /// Bytes for the client from before the failure.
        bytes: Vec<u8>,
        /// The cause.
        cause: Cause,
        /// The worker's error, as JSON.
        error: Vec<u8>,
    },
    /// The answer is not a valid stream of events.
    Broken,
}

/// The progress of one leg in this attempt's answer.
#[derive(Clone, Default, Debug)]
struct LegProgress {
    /// Number of token ids of each choice, including those from before this attempt.
    ids: Vec<usize>,
    /// Number of waiting bytes that were searched for the end of an event.
    searched: usize,
}

impl LegProgress {
    /// A leg of an attempt that continues after the client's tokens.
    fn behind(has: &Resume) -> LegProgress {
        let less = usize::from(is_failpoint_active("resumed stream is one token behind"));
        let ids = has.choices.iter().map(|progress| {
            progress.as_ref().map_or(0, |progress| progress.ids.len().saturating_sub(less))
        });
        LegProgress { ids: ids.collect(), searched: 0 }
    }

    /// Whether a mark of this leg has tokens that the client lacks.
    ///
    /// # Errors
    /// The tokens contradict those of the client: the two legs differ.
    fn is_new(&self, mark: &Mark, has: &Resume) -> Result<bool, ()> {
        let from = self.ids.get(mark.choice).copied().unwrap_or(0);
        let Some(has) = has.progress_of(mark.choice) else { return Ok(true) };
        let ChoiceProgress { ids, end, .. } = &mark.progress;
        if from == has.ids.len() && (end.is_some() || !ids.is_empty()) {
            return Ok(true);
        }
        match has.ids.get(from..from + ids.len()) {
            Some(known) if known == ids && end.is_none() => Ok(false),
            _ => Err(()),
        }
    }

    fn advance(&mut self, mark: &Mark) {
        if self.ids.len() <= mark.choice {
            self.ids.resize(mark.choice + 1, 0);
        }
        self.ids[mark.choice] += mark.progress.ids.len();
    }

    /// The next complete event after the first `used` bytes.
    fn next<'a>(&mut self, body: &'a [u8], used: usize) -> Option<&'a [u8]> {
        let from = used.max(self.searched);
        match body[from..].windows(2).position(|pair| pair == b"\n\n") {
            Some(len) => Some(&body[used..from + len + 2]),
            None => {
                // The last byte can be the first byte of the end mark.
                self.searched = body.len().saturating_sub(1).max(used);
                None
            }
        }
    }

    /// Removes this many waiting bytes.
    fn used(&mut self, body: &mut Vec<u8>, used: usize) {
        body.drain(..used);
        self.searched = self.searched.saturating_sub(used);
    }
}

/// One answer on its way to the client.
#[derive(Clone, Debug)]
pub struct Relay {
    form: Form,
    has: Resume,
    /// Tokens of the prompts, as far as the marks tell.
    prompt_tokens: u64,
    /// Events of an answer without marks.
    plain_events: u64,
    /// Whether the first event must have a mark, which shows that this worker continues the answer.
    must_mark: bool,
    /// Whether the event after all choices, the usage, was passed on.
    tail: bool,
    /// The leg that brings the client's answer, and the prefill leg that can send its first tokens.
    lead: LegProgress,
    prefill: LegProgress,
    done: bool,
}

impl Default for Relay {
    fn default() -> Relay {
        Relay {
            form: Form::Unknown,
            has: Resume::default(),
            prompt_tokens: 0,
            plain_events: 0,
            must_mark: false,
            tail: false,
            lead: LegProgress::default(),
            prefill: LegProgress::default(),
            done: false,
        }
    }
}

impl Relay {
    /// The data with which the next worker continues.
    pub fn resume(&self) -> &Resume {
        &self.has
    }

    /// Tokens of the prompts and of the client's part of the answer. Without marks, the prompts
    /// have `prompt` tokens, and each event stands for one token.
    pub fn tokens(&self, prompt: u32) -> u64 {
        let ids: usize = self.has.choices.iter().flatten().map(|choice| choice.ids.len()).sum();
        let prompt = if self.prompt_tokens > 0 { self.prompt_tokens } else { prompt.into() };
        prompt + ids as u64 + self.plain_events
    }

    /// Whether another worker can continue the answer.
    pub fn is_resumable(&self) -> bool {
        self.form != Form::Plain
    }

    /// Whether the client has the complete answer, with its end.
    pub fn is_done(&self) -> bool {
        self.done
    }

    /// Starts an attempt. If the client has a part of the answer, the worker's events must have
    /// marks, unless only the end of the stream is missing.
    pub fn start_attempt(&mut self, choices: usize) {
        let has_begun = self.has.has_begun();
        self.form = if has_begun { Form::Marked } else { Form::Unknown };
        self.must_mark = has_begun && !self.has.has_ended(choices);
        self.lead = LegProgress::behind(&self.has);
        self.prefill = self.lead.clone();
    }

    /// Takes the received bytes that can be passed on.
    pub fn take(&mut self, body: &mut Vec<u8>) -> Relayed {
        if self.form == Form::Unknown {
            self.form = match body.get(..MARK.len()) {
                Some(MARK) => Form::Marked,
                None if MARK.starts_with(body) => return Relayed::Bytes(Vec::new()),
                _ => Form::Plain,
            };
        }
        if self.form == Form::Plain {
            let ends = body.windows(2).filter(|pair| pair == b"\n\n").count();
            self.plain_events += ends as u64;
            return Relayed::Bytes(std::mem::take(body));
        }
        let mut bytes = Vec::with_capacity(body.len());
        let mut used = 0;
        while let Some(event) = self.lead.next(body, used) {
            let before = used;
            used += event.len();
            match self.event(event, &mut bytes) {
                Ok(None) => {}
                Ok(Some(cause)) => {
                    let error = error_in(event);
                    self.lead.used(body, used);
                    return Relayed::Failed { bytes, cause, error };
                }
                // The valid events before the error go to the client. The next call starts with the
                // error.
                Err(()) if !bytes.is_empty() => {
                    self.lead.used(body, before);
                    return Relayed::Bytes(bytes);
                }
                Err(()) => return Relayed::Broken,
            }
        }
        self.lead.used(body, used);
        if body.len() > SSE_EVENT_MAX { Relayed::Broken } else { Relayed::Bytes(bytes) }
    }

    /// Takes the events of a prefill leg that the client does not have. Only decode ends a choice.
    /// Events without marks are dropped.
    pub fn take_ahead(&mut self, body: &mut Vec<u8>) -> Relayed {
        let (mut bytes, mut used) = (Vec::new(), 0);
        while let Some(event) = self.prefill.next(body, used) {
            used += event.len();
            let mark = mark_of(event).filter(|_| self.form != Form::Plain && !self.done);
            if let Some((mark, event)) = mark.and_then(Result::ok) {
                if mark.progress.end.is_none() && self.prefill.is_new(&mark, &self.has) == Ok(true)
                {
                    self.prefill.advance(&mark);
                    if self.note(mark).is_ok() {
                        bytes.extend_from_slice(event);
                        if self.form == Form::Unknown {
                            (self.form, self.must_mark) = (Form::Marked, true);
                        }
                    }
                } else {
                    self.prefill.advance(&mark);
                }
            } else if let Some(cause) =
                failure::cause_in(event.strip_prefix(DATA).unwrap_or_default())
            {
                let error = error_in(event);
                self.prefill.used(body, used);
                return Relayed::Failed { bytes, cause, error };
            }
        }
        self.prefill.used(body, used);
        if body.len() > SSE_EVENT_MAX {
            self.prefill.used(body, body.len());
        }
        Relayed::Bytes(bytes)
    }

    /// Records the mark of an event that goes to the client.
    fn note(&mut self, mark: Mark) -> Result<(), ()> {
        if self.has.progress_of(mark.choice).is_none() {
            self.prompt_tokens += u64::from(mark.prompt);
        }
        self.has.note(mark).map_err(|_| ())
    }

    /// Handles one event: passes it on, unless it is a failure.
    fn event(&mut self, event: &[u8], bytes: &mut Vec<u8>) -> Result<Option<Cause>, ()> {
        if let Some(mark) = mark_of(event) {
            let (mark, event) = mark?;
            let is_new = self.lead.is_new(&mark, &self.has)?;
            self.lead.advance(&mark);
            self.must_mark = false;
            if is_new {
                self.note(mark)?;
                bytes.extend_from_slice(event);
            }
            return Ok(None);
        }
        let data = event.strip_prefix(DATA).unwrap_or_default();
        if let Some(cause) = failure::cause_in(data) {
            return Ok(Some(cause));
        }
        if self.must_mark {
            return Err(());
        }
        self.done = event == DONE;
        // The previous worker has already sent the usage.
        if self.done || !std::mem::replace(&mut self.tail, true) {
            bytes.extend_from_slice(event);
        }
        Ok(None)
    }
}

/// The mark of an event, and the event without it. `None` if it has no mark.
fn mark_of(event: &[u8]) -> Option<Result<(Mark, &[u8]), ()>> {
    let rest = event.starts_with(MARK).then(|| &event[2..])?;
    let end = rest.iter().position(|&byte| byte == b'\n')?;
    let mark = serde_json::from_slice(&rest[..end]).map_err(|_| ());
    let mark =
        mark.and_then(|mark: Mark| if mark.choice < CHOICES_MAX { Ok(mark) } else { Err(()) });
    Some(mark.map(|mark| (mark, &rest[end + 1..])))
}

/// The error object of a failure event.
fn error_in(event: &[u8]) -> Vec<u8> {
    event[DATA.len()..event.len() - 2].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: &str = ": {\"created\":7,\"choice\":0,\"ids\":[4,5]}\ndata: {\"a\":1}\n\n";
    const SECOND: &str = ": {\"created\":7,\"choice\":0,\"ids\":[6]}\ndata: {\"a\":2}\n\n";

    fn take(relay: &mut Relay, body: &mut Vec<u8>, piece: &str) -> Relayed {
        body.extend_from_slice(piece.as_bytes());
        relay.take(body)
    }

    fn bytes(text: &str) -> Relayed {
        Relayed::Bytes(text.into())
    }

    #[test]
    fn events_pass_whole_and_their_marks_stay_here() {
        let whole = [FIRST, SECOND, "data: [DONE]\n\n"].concat();
        for cut in 0..whole.len() {
            let (mut relay, mut body, mut got) = (Relay::default(), Vec::new(), Vec::new());
            for piece in [&whole[..cut], &whole[cut..]] {
                let Relayed::Bytes(passed) = take(&mut relay, &mut body, piece) else {
                    panic!("at {cut}")
                };
                assert!(passed.is_empty() || passed.ends_with(b"\n\n"));
                let events = got.len() + passed.len();
                got.extend(passed);
                let ids = relay.resume().progress_of(0).map_or(0, |progress| progress.ids.len());
                assert_eq!(
                    ids,
                    if events == 0 {
                        0
                    } else if events < 30 {
                        2
                    } else {
                        3
                    },
                    "at {cut}"
                );
            }
            assert_eq!(got, b"data: {\"a\":1}\n\ndata: {\"a\":2}\n\ndata: [DONE]\n\n");
            assert!(relay.is_done() && relay.is_resumable());
        }
    }

    #[test]
    fn a_failure_is_not_the_clients_yet() {
        let (mut relay, mut body) = (Relay::default(), Vec::new());
        let error = "data: {\"error\":{\"code\":\"draining\"}}\n\n";
        let passed = take(&mut relay, &mut body, &[FIRST, error].concat());
        let expected = Relayed::Failed {
            bytes: "data: {\"a\":1}\n\n".into(),
            cause: Cause::Draining,
            error: "{\"error\":{\"code\":\"draining\"}}".into(),
        };
        assert_eq!(passed, expected);
        // A partial event of a lost worker is dropped.
        assert_eq!(take(&mut relay, &mut body, &SECOND[..20]), bytes(""));
        relay.start_attempt(1);
        body.clear();
        let stranger = &SECOND[SECOND.find('d').unwrap()..];
        assert_eq!(
            take(&mut relay.clone(), &mut Vec::new(), "data: 1\n\n"),
            Relayed::Broken,
            "{stranger}"
        );
        assert_eq!(take(&mut relay, &mut body, SECOND), bytes("data: {\"a\":2}\n\n"));
        assert_eq!(relay.resume().progress_of(0).unwrap().ids, [4, 5, 6]);
    }

    #[test]
    fn the_usage_is_told_once() {
        let (mut relay, mut body) = (Relay::default(), Vec::new());
        let last =
            ": {\"created\":7,\"choice\":0,\"ids\":[4],\"end\":\"stop\"}\ndata: {\"a\":1}\n\n";
        let usage = "data: {\"usage\":1}\n\n";
        assert_eq!(
            take(&mut relay, &mut body, &[last, usage].concat()),
            bytes("data: {\"a\":1}\n\ndata: {\"usage\":1}\n\n")
        );
        relay.start_attempt(2);
        assert_eq!(
            take(&mut relay.clone(), &mut Vec::new(), usage),
            Relayed::Broken,
            "one choice has not begun"
        );
        relay.start_attempt(1);
        let rest = [usage, "data: [DONE]\n\n"].concat();
        assert_eq!(take(&mut relay, &mut body, &rest), bytes("data: [DONE]\n\n"));
    }

    #[test]
    fn bytes_without_a_mark_pass_unchanged() {
        for piece in ["data: 1\n\n", "{\"choices\":[]}", ": keep-alive\n\n", ":"] {
            let (mut relay, mut body) = (Relay::default(), Vec::new());
            let passed = take(&mut relay, &mut body, piece);
            match piece {
                ":" => assert_eq!(
                    (passed, relay.is_resumable()),
                    (bytes(""), true),
                    "it may become a mark"
                ),
                _ => assert_eq!((passed, relay.is_resumable()), (bytes(piece), false)),
            }
        }
    }

    #[test]
    fn tokens_are_those_of_the_marks_or_an_estimate() {
        let (mut relay, mut body) = (Relay::default(), Vec::new());
        assert_eq!(relay.tokens(9), 9);
        let first = FIRST.replace("\"choice\":0", "\"choice\":0,\"prompt\":5");
        take(&mut relay, &mut body, &first);
        assert_eq!(relay.tokens(9), 7, "the prompt, and two ids");
        relay.start_attempt(1);
        take(&mut relay, &mut body, &SECOND.replace("\"ids\"", "\"prompt\":5,\"ids\""));
        assert_eq!(relay.tokens(9), 8, "another worker continues, and the prompt counts once");
        let mut plain = Relay::default();
        take(&mut plain, &mut Vec::new(), "data: 1\n\ndata: 2\n\n");
        assert_eq!(plain.tokens(9), 11);
    }

    #[test]
    fn tokens_that_prefill_has_sent_are_not_sent_again() {
        let (mut relay, mut ahead, mut body) = (Relay::default(), Vec::new(), Vec::new());
        relay.start_attempt(1);
        let (opening, end) = (
            ": {\"created\":7,\"choice\":0}\ndata: {\"role\":1}\n\n",
            ": {\"created\":7,\"choice\":0,\"end\":\"length\"}\ndata: {\"a\":3}\n\n",
        );
        // The same if the bytes arrive one by one.
        let mut relayed = Vec::new();
        for byte in [opening, FIRST, end, "data: [DONE]\n\n"].concat().bytes() {
            ahead.push(byte);
            let Relayed::Bytes(bytes) = relay.take_ahead(&mut ahead) else { panic!("{ahead:?}") };
            relayed.extend(bytes);
        }
        assert_eq!(relayed, b"data: {\"role\":1}\n\ndata: {\"a\":1}\n\n");
        assert_eq!(relay.resume().progress_of(0).unwrap().ids, [4, 5]);
        assert_eq!(take(&mut relay, &mut body, &[opening, FIRST].concat()), bytes(""));
        assert_eq!(take(&mut relay, &mut body, SECOND), bytes("data: {\"a\":2}\n\n"));
        assert_eq!(relay.take_ahead(&mut SECOND.into()), bytes(""), "decode was first");
        assert_eq!(take(&mut relay, &mut body, end), bytes("data: {\"a\":3}\n\n"));
        assert_eq!(relay.resume().progress_of(0).unwrap().ids, [4, 5, 6]);
    }

    #[test]
    fn a_plain_stream_has_nothing_told_ahead() {
        let mut relay = Relay::default();
        assert_eq!(take(&mut relay, &mut Vec::new(), "data: 1\n\n"), bytes("data: 1\n\n"));
        assert_eq!(relay.take_ahead(&mut FIRST.into()), bytes(""));
        let error = "data: {\"error\":{\"code\":\"peer_lost\"}}\n\n";
        assert!(matches!(
            relay.take_ahead(&mut error.into()),
            Relayed::Failed { cause: Cause::PeerLost, .. }
        ));
        let mut endless = "x".repeat(SSE_EVENT_MAX + 1).into_bytes();
        assert_eq!((relay.take_ahead(&mut endless), endless.len()), (bytes(""), 0));
    }

    #[test]
    fn nonsense_is_not_passed_on() {
        for piece in [
            ": {\"created\":7}\ndata: x\n\n",
            ": {\"created\":7,\"choice\":99999}\ndata: x\n\n",
            ": {\n\n",
        ] {
            assert_eq!(
                take(&mut Relay::default(), &mut Vec::new(), piece),
                Relayed::Broken,
                "{piece}"
            );
        }
        // Valid events before the error go to the client; otherwise they would be counted as sent.
        let (mut relay, mut body) = (Relay::default(), Vec::new());
        let both = [FIRST, ": {\"created\":7}\ndata: x\n\n"].concat();
        assert_eq!(take(&mut relay, &mut body, &both), bytes("data: {\"a\":1}\n\n"));
        assert_eq!(relay.take(&mut body), Relayed::Broken);
        assert_eq!(relay.resume().progress_of(0).unwrap().ids, [4, 5]);
        let endless = format!("{FIRST}{}", "x".repeat(SSE_EVENT_MAX + 1));
        assert_eq!(take(&mut Relay::default(), &mut Vec::new(), &endless), Relayed::Broken);
    }
}
