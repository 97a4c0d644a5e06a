//! The server's decoder: the same bytes give the same requests, however they are split.

use baton::http::{HttpError, HttpLimits, Request, RequestDecoder};

const LIMITS: HttpLimits = HttpLimits { head: 512, headers: 8, body: 32 };

/// The first byte is the size of the pieces.
pub fn run(data: &[u8]) {
    let Some((&step, bytes)) = data.split_first() else { return };
    let (pieces, error) = decode(bytes, usize::from(step).max(1));
    let (whole, whole_error) = decode(bytes, usize::MAX);
    assert_eq!(error, whole_error);
    assert_eq!(pieces.len(), whole.len());
    for (a, b) in pieces.iter().zip(&whole) {
        assert_eq!(
            (a.head.path(), a.head.query(), &a.body),
            (b.head.path(), b.head.query(), &b.body)
        );
        assert!(a.body.len() <= LIMITS.body);
        assert!(a.head.query_pairs().count() <= LIMITS.head);
    }
}

fn decode(bytes: &[u8], step: usize) -> (Vec<Request>, Option<HttpError>) {
    let mut decoder = RequestDecoder::new(LIMITS);
    let mut requests = Vec::new();
    for mut piece in bytes.chunks(step) {
        while !piece.is_empty() {
            match decoder.read(piece) {
                Ok((used, request)) => {
                    assert!(used > 0);
                    requests.extend(request);
                    piece = &piece[used..];
                }
                Err(error) => return (requests, Some(error)),
            }
        }
    }
    (requests, None)
}
