//! What a client has of its answer, event by event, so that another worker can go on with it.
//!
//! A worker of this software marks its events (`openai::resume`): the marks are kept here and the events passed on
//! whole, so that what has left is a number of events and never half of one. A stream without marks, and whatever is
//! not a stream, passes as it is and cannot go on elsewhere.
//! Thread: `ctl`. Bounded: an event by [`SSE_EVENT_MAX`]; what is kept by the ids of the answer.

use crate::cause::Cause;
use crate::front::openai::resume::{Mark, Resume};
use crate::front::router::failure;
use crate::limits::SSE_EVENT_MAX;

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

/// One answer on its way.
#[derive(Clone, Debug)]
pub struct Relay {
    form: Form,
    has: Resume,
    /// Nothing but a mark says that this worker goes on where the last one ended.
    must_mark: bool,
    /// An event behind all choices has passed: the usage.
    tail: bool,
    /// How far what waits was searched for an event's end.
    searched: usize,
    done: bool,
}

impl Default for Relay {
    fn default() -> Relay {
        Relay {
            form: Form::Unknown,
            has: Resume::default(),
            must_mark: false,
            tail: false,
            searched: 0,
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
        self.searched = 0;
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
        let (mut used, mut from) = (0, std::mem::take(&mut self.searched));
        while let Some(len) = body[from..].windows(2).position(|pair| pair == b"\n\n") {
            let event = &body[used..from + len + 2];
            used += event.len();
            from = used;
            match self.event(event, &mut bytes) {
                Ok(None) => {}
                Ok(Some(cause)) => {
                    let error = event[DATA.len()..event.len() - 2].to_vec();
                    body.drain(..used);
                    return Passed::Failed { bytes, cause, error };
                }
                Err(()) => return Passed::Broken,
            }
        }
        body.drain(..used);
        self.searched = body.len().saturating_sub(1);
        if body.len() > SSE_EVENT_MAX { Passed::Broken } else { Passed::Bytes(bytes) }
    }

    /// One event: passed on, unless it is a failure.
    fn event(&mut self, event: &[u8], bytes: &mut Vec<u8>) -> Result<Option<Cause>, ()> {
        if event.starts_with(MARK) {
            let end = event.iter().position(|&byte| byte == b'\n').ok_or(())?;
            let mark: Mark = serde_json::from_slice(&event[2..end]).map_err(|_| ())?;
            self.has.note(mark).map_err(|_| ())?;
            self.must_mark = false;
            bytes.extend_from_slice(&event[end + 1..]);
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
                let Passed::Bytes(passed) = take(&mut relay, &mut body, piece) else { panic!("at {cut}") };
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
        assert_eq!(take(&mut relay.clone(), &mut Vec::new(), "data: 1\n\n"), Passed::Broken, "{stranger}");
        assert_eq!(take(&mut relay, &mut body, SECOND), bytes("data: {\"a\":2}\n\n"));
        assert_eq!(relay.resume().told(0).unwrap().ids, [4, 5, 6]);
    }

    #[test]
    fn the_usage_is_told_once() {
        let (mut relay, mut body) = (Relay::default(), Vec::new());
        let last = ": {\"created\":7,\"choice\":0,\"ids\":[4],\"end\":\"stop\"}\ndata: {\"a\":1}\n\n";
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
                ":" => assert_eq!((passed, relay.is_resumable()), (bytes(""), true), "it may become a mark"),
                _ => assert_eq!((passed, relay.is_resumable()), (bytes(piece), false)),
            }
        }
    }

    #[test]
    fn nonsense_is_not_passed_on() {
        for piece in
            [": {\"created\":7}\ndata: x\n\n", ": {\"created\":7,\"choice\":99999}\ndata: x\n\n", ": {\n\n"]
        {
            assert_eq!(take(&mut Relay::default(), &mut Vec::new(), piece), Passed::Broken, "{piece}");
        }
        let endless = format!("{FIRST}{}", "x".repeat(SSE_EVENT_MAX + 1));
        assert_eq!(take(&mut Relay::default(), &mut Vec::new(), &endless), Passed::Broken);
    }
}
