//! Messages between workers: a decoded message is encoded and decoded again without a change, with
//! and without a seal. A seal detects every change of a byte.
//!
//! An input is a byte that selects a change, then the parts, each after a length of two bytes.

use baton::limits::{MESSAGE_TEXT_MAX, PAGES_MAX, RANKS_MAX};
use baton::wire::auth::{ClusterKey, Hellos, Seal, Side};
use baton::wire::message::{Message, Rank};
use baton::wire::{Multipart, Parts};

pub fn run(data: &[u8]) {
    let Some((&change, bytes)) = data.split_first() else { return };
    let input = multipart(bytes);
    let Ok(Some(message)) = Message::decode(input.parts(), None) else { return };
    bounded(&message);
    let bare = encoded(&message, None);
    assert_eq!(Message::decode(bare.parts(), None).as_ref(), Ok(&Some(message.clone())));
    assert!(bare.byte_len() <= input.byte_len(), "only unknown content is left out");
    assert_eq!(bare.parts().len(), input.parts().len());
    sealed(&message, change);
}

/// All parts of the input. The last one can be shorter than its length says.
fn multipart(mut bytes: &[u8]) -> Multipart {
    let mut message = Multipart::new();
    while let Some((length, rest)) = bytes.split_first_chunk() {
        let (part, rest) = rest.split_at(usize::from(u16::from_le_bytes(*length)).min(rest.len()));
        message.push(part);
        bytes = rest;
    }
    message
}

fn encoded(message: &Message<'_>, seal: Option<&mut Seal>) -> Multipart {
    let mut out = Multipart::new();
    message.encode(seal, &mut out);
    out
}

/// The limits that a receiver relies on.
fn bounded(message: &Message<'_>) {
    let ranks = |ranks: &[Rank]| {
        assert!((1..=RANKS_MAX).contains(&ranks.len()));
        assert!(ranks.iter().all(|rank| rank.lanes > 0));
        assert!(ranks.iter().filter_map(|rank| rank.tcp).all(|tcp| tcp.address.port() > 0));
    };
    match message {
        Message::Announce(announce) => ranks(&announce.ranks),
        Message::Welcome(welcome) => ranks(&welcome.ranks),
        Message::Refused(refused) => {
            let texts = [refused.field, refused.source, refused.destination];
            assert!(texts.iter().all(|text| text.len() <= MESSAGE_TEXT_MAX));
        }
        Message::Destination(destination) => {
            assert!(destination.pages.len() <= PAGES_MAX);
            assert_eq!(destination.pages.iter().count(), destination.pages.len());
            assert!(destination.prefix_tokens < destination.tokens);
        }
        Message::Status(status) => assert!(status.state <= 4),
        Message::Hello(hello) => assert!((1..=RANKS_MAX).contains(&usize::from(hello.ranks))),
        _ => {}
    }
}

/// A sealed message is accepted once, and never with a bit changed.
fn sealed(message: &Message<'_>, change: u8) {
    let (mut ours, mut theirs) = (seal(), seal());
    let whole = encoded(message, Some(&mut ours));
    let at = usize::from(change) * whole.byte_len() / 256;
    let changed = with_bit_changed(whole.parts(), at, change % 8);
    assert!(Message::decode(changed.parts(), Some(&mut seal())).is_err(), "byte {at} changed");
    assert_eq!(
        Message::decode(whole.parts(), Some(&mut theirs)).as_ref(),
        Ok(&Some(message.clone()))
    );
    assert!(Message::decode(whole.parts(), Some(&mut theirs)).is_err(), "taken twice");
}

fn seal() -> Seal {
    let key = ClusterKey::new(&[7; 32]).expect("long enough");
    key.seal(Side::Dialer, &Hellos { dialer: b"d", acceptor: b"a" })
}

fn with_bit_changed(parts: Parts<'_>, mut at: usize, bit: u8) -> Multipart {
    let mut out = Multipart::new();
    for part in parts.iter() {
        let mut part = part.to_vec();
        match part.get_mut(at) {
            Some(byte) => {
                *byte ^= 1 << bit;
                at = usize::MAX;
            }
            None => at = at.saturating_sub(part.len()),
        }
        out.push(&part);
    }
    out
}
