//! The client's decoder: the same bytes give the same answer, however they are split.

use baton::http::client::{ResponseDecoder, ResponseEvent};
use baton::http::{HttpError, HttpLimits, Method};

const LIMITS: HttpLimits = HttpLimits { head: 512, headers: 8, body: 32 };

/// The first byte is the size of the pieces.
pub fn run(data: &[u8]) {
    let Some((&step, bytes)) = data.split_first() else { return };
    let a = decode(bytes, usize::from(step).max(1));
    let b = decode(bytes, usize::MAX);
    assert_eq!((a.status, a.end, a.error), (b.status, b.end, b.error));
    assert!(a.body.starts_with(&b.body) || b.body.starts_with(&a.body));
    assert!(a.body.len() <= LIMITS.body);
}

#[derive(Default)]
struct Seen {
    status: Option<u16>,
    body: Vec<u8>,
    end: Option<bool>,
    error: Option<HttpError>,
}

impl Seen {
    fn apply(&mut self, event: ResponseEvent<'_>) {
        match event {
            ResponseEvent::Head(head) => self.status = Some(head.status),
            ResponseEvent::Body(piece) => self.body.extend_from_slice(piece),
            ResponseEvent::End { keep_alive } => self.end = Some(keep_alive),
        }
    }
}

fn decode(bytes: &[u8], step: usize) -> Seen {
    let mut decoder = ResponseDecoder::new(Method::Get, LIMITS);
    let mut seen = Seen::default();
    for mut piece in bytes.chunks(step) {
        loop {
            match decoder.read(piece) {
                Ok((used, Some(event))) => {
                    seen.apply(event);
                    piece = &piece[used..];
                }
                Ok((used, None)) => {
                    assert!(used == piece.len() || seen.end.is_some());
                    break;
                }
                Err(error) => return Seen { error: Some(error), ..seen },
            }
        }
    }
    match decoder.close() {
        Ok(event) => event.into_iter().for_each(|event| seen.apply(event)),
        Err(error) => seen.error = Some(error),
    }
    seen
}
