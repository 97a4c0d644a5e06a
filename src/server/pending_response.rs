//! The response that a client waits for: its form, its header fields, its translation.
//!
//! Thread: `ctl`. Not here: when it is sent (`connections`).

use crate::api::AnswerTranslator;
use crate::http::{BodyStream, Exchange, ResponseWriter};
use std::borrow::Cow;

/// A response that its client waits for.
#[derive(Debug)]
pub(super) struct PendingResponse {
    pub(super) exchange: Exchange,
    pub(super) request_id: String,
    pub(super) stream: Option<BodyStream>,
    /// Whether the stream consists of server-sent events.
    pub(super) is_events: bool,
    /// Its last bytes.
    pub(super) tail: [u8; 4],
    /// Header fields of the answer beside the usual ones.
    pub(super) headers: Vec<(&'static str, String)>,
    /// For an endpoint that is translated.
    pub(super) translator: Option<AnswerTranslator>,
    /// The status and body of an answer in pieces that is translated as a whole.
    pub(super) collected: Option<(u16, Vec<u8>)>,
}

impl PendingResponse {
    /// The body in the form of the endpoint.
    pub(super) fn translate<'a>(&mut self, status: u16, body: &'a [u8]) -> Cow<'a, [u8]> {
        match &mut self.translator {
            Some(translator) => Cow::Owned(translator.translate_body(status, body)),
            None => Cow::Borrowed(body),
        }
    }

    /// Writes the status and the header fields that do not depend on the body.
    pub(super) fn begin_response<'a>(
        &self,
        out: &'a mut Vec<u8>,
        status: u16,
    ) -> ResponseWriter<'a> {
        let mut writer = ResponseWriter::new(out, self.exchange, status);
        if !self.request_id.is_empty() {
            writer = writer.header("x-request-id", &self.request_id);
        }
        for (name, value) in &self.headers {
            writer = writer.header(name, value);
        }
        writer
    }
}

/// Keeps the last bytes of a stream.
pub(super) fn note_tail(tail: &mut [u8; 4], piece: &[u8]) {
    for &byte in &piece[piece.len().saturating_sub(tail.len())..] {
        tail.rotate_left(1);
        tail[3] = byte;
    }
}

/// Whether these bytes end an event.
pub(super) fn is_between_events(tail: &[u8]) -> bool {
    [&b"\n\n"[..], b"\r\r", b"\r\n\r\n"].iter().any(|end| tail.ends_with(end))
}
