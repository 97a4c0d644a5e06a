//! What a client has of its answer, event by event, so that another worker can go on with it.
//!
//! A worker of this software marks its events (`openai::resume`): the marks are kept here and the events passed on
//! whole, so that what has left is a number of events and never half of one. A stream without marks, and whatever is
//! not a stream, passes as it is and cannot go on elsewhere. What prefill tells ahead of decode comes on a second side,
//! whose marks say what of decode's events the client has already.
//! Thread: `ctl`. Bounded: an event by [`SSE_EVENT_MAX`]; what is kept by the ids of the answer.

use crate::cause::Cause;
use crate::front::openai::resume::{Mark, Resume, Told};
use crate::front::router::failure;
use crate::limits::{CHOICES_MAX, SSE_EVENT_MAX};

/// The end of a stream.
const DONE: &[u8] = b"data: [DONE]\n\n";
/// How an event begins.
const DATA: &[u8] = b"data: ";
/// How a mark begins; one character more than any comment of others, who write no JSON there.
const MARK: &[u8] = b": {";

/// How an answer comes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Form {
    /// Nothing of it has come that says.
    Unknown,
    /// Events, each with what it stands for.
    Marked,
    /// Anything else.
    Plain,
}

/// What a worker's answer comes to, so far.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Passed {
    /// This is the client's; it may be nothing.
    Bytes(Vec<u8>),
    /// And then the worker failed, which the client is not told if another one can go on.
    Failed {
        /// The client's until then.
        bytes: Vec<u8>,
        /// Why.
        cause: Cause,
        /// What it said, as JSON.
        error: Vec<u8>,
    },
    /// What came is no stream of events.
    Broken,
}

/// What of this try's answer a leg has told, whoever told it first.
#[derive(Clone, Default, Debug)]
struct Side {
    /// Ids of each choice, those before this try among them.
    ids: Vec<usize>,
    /// How far what waits was searched for an event's end.
    searched: usize,
}

impl Side {
    /// A leg of a try that begins behind this.
    fn behind(has: &Resume) -> Side {
        let ids = has.choices.iter().map(|told| told.as_ref().map_or(0, |told| told.ids.len()));
        Side { ids: ids.collect(), searched: 0 }
    }

    /// Whether a mark of this side is of what the client lacks, or of what it has.
    ///
    /// # Errors
    /// It is of neither: the two legs differ.
    fn is_new(&self, mark: &Mark, has: &Resume) -> Result<bool, ()> {
        let from = self.ids.get(mark.choice).copied().unwrap_or(0);
        let Some(has) = has.told(mark.choice) else { return Ok(true) };
        let Told { ids, end, .. } = &mark.told;
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
        self.ids[mark.choice] += mark.told.ids.len();
    }

    /// The next whole event of what waits, behind the first `used` bytes.
    fn next<'a>(&mut self, body: &'a [u8], used: usize) -> Option<&'a [u8]> {
        let from = used.max(self.searched);
        match body[from..].windows(2).position(|pair| pair == b"\n\n") {
            Some(len) => Some(&body[used..from + len + 2]),
            None => {
                // The first half of an end may be there.
                self.searched = body.len().saturating_sub(1).max(used);
                None
            }
        }
    }

    /// So many bytes of what waited are done with.
    fn used(&mut self, body: &mut Vec<u8>, used: usize) {
        body.drain(..used);
        self.searched = self.searched.saturating_sub(used);
    }
}

/// One answer on its way.
#[derive(Clone, Debug)]
pub struct Relay {
    form: Form,
    has: Resume,
    /// Nothing but a mark says that this worker goes on where the last one ended.
    must_mark: bool,
    /// An event behind all choices has passed: the usage.
    tail: bool,
    /// Whose answer is the client's, and who may tell its first tokens.
    lead: Side,
    prefill: Side,
    done: bool,
}

impl Default for Relay {
    fn default() -> Relay {
        Relay {
            form: Form::Unknown,
            has: Resume::default(),
            must_mark: false,
            tail: false,
            lead: Side::default(),
            prefill: Side::default(),
            done: false,
        }
    }
}

impl Relay {
    /// What the client has, for the next worker.
    pub fn resume(&self) -> &Resume {
        &self.has
    }

    /// Whether another worker can go on behind what the client has.
    pub fn is_resumable(&self) -> bool {
        self.form != Form::Plain
    }

    /// Whether the client has all of it, its end included.
    pub fn is_done(&self) -> bool {
        self.done
    }

    /// A worker begins. Behind another one it must say by its marks that it goes on where that one ended; unless only
    /// the end of the stream is missing.
    pub fn turn(&mut self, choices: usize) {
        let has_begun = self.has.has_begun();
        self.form = if has_begun { Form::Marked } else { Form::Unknown };
        self.must_mark = has_begun && !self.has.has_ended(choices);
        self.lead = Side::behind(&self.has);
        self.prefill = self.lead.clone();
    }

    /// Takes what can be passed on from what has come.
    pub fn take(&mut self, body: &mut Vec<u8>) -> Passed {
        if self.form == Form::Unknown {
            self.form = match body.get(..MARK.len()) {
                Some(MARK) => Form::Marked,
                None if MARK.starts_with(body) => return Passed::Bytes(Vec::new()),
                _ => Form::Plain,
            };
        }
        if self.form == Form::Plain {
            return Passed::Bytes(std::mem::take(body));
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
                    return Passed::Failed { bytes, cause, error };
                }
                // What was good before it is the client's; the next look begins with it.
                Err(()) if !bytes.is_empty() => {
                    self.lead.used(body, before);
                    return Passed::Bytes(bytes);
                }
                Err(()) => return Passed::Broken,
            }
        }
        self.lead.used(body, used);
        if body.len() > SSE_EVENT_MAX { Passed::Broken } else { Passed::Bytes(bytes) }
    }

    /// Takes from what has come of a prefill leg the events that the client lacks; how choices end is decode's to say, and
    /// whatever is not marked is of no use.
    pub fn take_ahead(&mut self, body: &mut Vec<u8>) -> Passed {
        let (mut bytes, mut used) = (Vec::new(), 0);
        while let Some(event) = self.prefill.next(body, used) {
            used += event.len();
            let mark = mark_of(event).filter(|_| self.form != Form::Plain && !self.done);
            if let Some((mark, event)) = mark.and_then(Result::ok) {
                if mark.told.end.is_none() && self.prefill.is_new(&mark, &self.has) == Ok(true) {
                    self.prefill.advance(&mark);
                    if self.has.note(mark).is_ok() {
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
                return Passed::Failed { bytes, cause, error };
            }
        }
        self.prefill.used(body, used);
        if body.len() > SSE_EVENT_MAX {
            self.prefill.used(body, body.len());
        }
        Passed::Bytes(bytes)
    }

    /// One event: passed on, unless it is a failure.
    fn event(&mut self, event: &[u8], bytes: &mut Vec<u8>) -> Result<Option<Cause>, ()> {
        if let Some(mark) = mark_of(event) {
            let (mark, event) = mark?;
            let is_new = self.lead.is_new(&mark, &self.has)?;
            self.lead.advance(&mark);
            self.must_mark = false;
            if is_new {
                self.has.note(mark).map_err(|_| ())?;
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
        // The worker before this one has told it.
        if self.done || !std::mem::replace(&mut self.tail, true) {
            bytes.extend_from_slice(event);
        }
        Ok(None)
    }
}

/// The mark of an event that has one, and the event without.
fn mark_of(event: &[u8]) -> Option<Result<(Mark, &[u8]), ()>> {
    let rest = event.starts_with(MARK).then(|| &event[2..])?;
    let end = rest.iter().position(|&byte| byte == b'\n')?;
    let mark = serde_json::from_slice(&rest[..end]).map_err(|_| ());
    let mark =
        mark.and_then(|mark: Mark| if mark.choice < CHOICES_MAX { Ok(mark) } else { Err(()) });
    Some(mark.map(|mark| (mark, &rest[end + 1..])))
}

/// What an event that tells a failure says.
fn error_in(event: &[u8]) -> Vec<u8> {
    event[DATA.len()..event.len() - 2].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: &str = ": {\"created\":7,\"choice\":0,\"ids\":[4,5]}\ndata: {\"a\":1}\n\n";
    const SECOND: &str = ": {\"created\":7,\"choice\":0,\"ids\":[6]}\ndata: {\"a\":2}\n\n";

    fn take(relay: &mut Relay, body: &mut Vec<u8>, piece: &str) -> Passed {
        body.extend_from_slice(piece.as_bytes());
        relay.take(body)
    }

    fn bytes(text: &str) -> Passed {
        Passed::Bytes(text.into())
    }

    #[test]
    fn events_pass_whole_and_their_marks_stay_here() {
        let whole = [FIRST, SECOND, "data: [DONE]\n\n"].concat();
        for cut in 0..whole.len() {
            let (mut relay, mut body, mut got) = (Relay::default(), Vec::new(), Vec::new());
            for piece in [&whole[..cut], &whole[cut..]] {
                let Passed::Bytes(passed) = take(&mut relay, &mut body, piece) else {
                    panic!("at {cut}")
                };
                assert!(passed.is_empty() || passed.ends_with(b"\n\n"));
                let events = got.len() + passed.len();
                got.extend(passed);
                let ids = relay.resume().told(0).map_or(0, |told| told.ids.len());
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
        let expected = Passed::Failed {
            bytes: "data: {\"a\":1}\n\n".into(),
            cause: Cause::Draining,
            error: "{\"error\":{\"code\":\"draining\"}}".into(),
        };
        assert_eq!(passed, expected);
        // An event that was cut off is forgotten with the worker that sent half of it.
        assert_eq!(take(&mut relay, &mut body, &SECOND[..20]), bytes(""));
        relay.turn(1);
        body.clear();
        let stranger = &SECOND[SECOND.find('d').unwrap()..];
        assert_eq!(
            take(&mut relay.clone(), &mut Vec::new(), "data: 1\n\n"),
            Passed::Broken,
            "{stranger}"
        );
        assert_eq!(take(&mut relay, &mut body, SECOND), bytes("data: {\"a\":2}\n\n"));
        assert_eq!(relay.resume().told(0).unwrap().ids, [4, 5, 6]);
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
        relay.turn(2);
        assert_eq!(
            take(&mut relay.clone(), &mut Vec::new(), usage),
            Passed::Broken,
            "one choice has not begun"
        );
        relay.turn(1);
        let rest = [usage, "data: [DONE]\n\n"].concat();
        assert_eq!(take(&mut relay, &mut body, &rest), bytes("data: [DONE]\n\n"));
    }

    #[test]
    fn what_is_not_marked_passes_as_it_is() {
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
    fn what_prefill_told_is_not_told_again() {
        let (mut relay, mut ahead, mut body) = (Relay::default(), Vec::new(), Vec::new());
        relay.turn(1);
        let (opening, end) = (
            ": {\"created\":7,\"choice\":0}\ndata: {\"role\":1}\n\n",
            ": {\"created\":7,\"choice\":0,\"end\":\"length\"}\ndata: {\"a\":3}\n\n",
        );
        // Bytes that come one by one make no difference.
        let mut told = Vec::new();
        for byte in [opening, FIRST, end, "data: [DONE]\n\n"].concat().bytes() {
            ahead.push(byte);
            let Passed::Bytes(bytes) = relay.take_ahead(&mut ahead) else { panic!("{ahead:?}") };
            told.extend(bytes);
        }
        assert_eq!(told, b"data: {\"role\":1}\n\ndata: {\"a\":1}\n\n");
        assert_eq!(relay.resume().told(0).unwrap().ids, [4, 5]);
        assert_eq!(take(&mut relay, &mut body, &[opening, FIRST].concat()), bytes(""));
        assert_eq!(take(&mut relay, &mut body, SECOND), bytes("data: {\"a\":2}\n\n"));
        assert_eq!(relay.take_ahead(&mut SECOND.into()), bytes(""), "decode was first");
        assert_eq!(take(&mut relay, &mut body, end), bytes("data: {\"a\":3}\n\n"));
        assert_eq!(relay.resume().told(0).unwrap().ids, [4, 5, 6]);
    }

    #[test]
    fn a_plain_stream_has_nothing_told_ahead() {
        let mut relay = Relay::default();
        assert_eq!(take(&mut relay, &mut Vec::new(), "data: 1\n\n"), bytes("data: 1\n\n"));
        assert_eq!(relay.take_ahead(&mut FIRST.into()), bytes(""));
        let error = "data: {\"error\":{\"code\":\"peer_lost\"}}\n\n";
        assert!(matches!(
            relay.take_ahead(&mut error.into()),
            Passed::Failed { cause: Cause::PeerLost, .. }
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
                Passed::Broken,
                "{piece}"
            );
        }
        // What was good before it is the client's, who would otherwise be thought to have it.
        let (mut relay, mut body) = (Relay::default(), Vec::new());
        let both = [FIRST, ": {\"created\":7}\ndata: x\n\n"].concat();
        assert_eq!(take(&mut relay, &mut body, &both), bytes("data: {\"a\":1}\n\n"));
        assert_eq!(relay.take(&mut body), Passed::Broken);
        assert_eq!(relay.resume().told(0).unwrap().ids, [4, 5]);
        let endless = format!("{FIRST}{}", "x".repeat(SSE_EVENT_MAX + 1));
        assert_eq!(take(&mut Relay::default(), &mut Vec::new(), &endless), Passed::Broken);
    }
}
