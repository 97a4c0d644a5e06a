//! Every kind of message: encoded and decoded, cut short, lengthened, and out of range.

use super::*;
use crate::cause::Cause;
use crate::ids::{Generation, PageId, Peer, Role, Room, SessionGeneration, SlotId};
use crate::wire::auth::{ClusterKey, Hellos, Keyring, Side};
use proptest::prelude::*;

const ID: TransferId =
    TransferId { room: Room(1 << 62), slot: SlotId(3), generation: Generation((1 << 24) - 1) };
const PAGES: [PageId; 3] = [PageId(0), PageId(7), PageId(u32::MAX)];

fn layout() -> KvLayoutClaim {
    KvLayoutClaim {
        page_size: 16,
        layers: 30,
        kv_heads: 3,
        head_dim: 64,
        pages: 100,
        ranks: 2,
        model_kv_heads: 6,
        ..Zeroable::zeroed()
    }
}

fn rdma() -> RdmaGrant {
    let mut grant = RdmaGrant::empty(1 << 40, 1 << 41);
    for number in [0, 2] {
        let rail = RailGrant {
            gid: [5; 16],
            records_key: 7,
            lid: 8,
            mtu: 1024,
            number,
            ..Zeroable::zeroed()
        };
        grant.push(
            rail.with_keys(1 << 29, [6, 12].into_iter()),
            &[9, 10].map(|number| QueuePairName { number, sequence: 11 }),
        );
    }
    grant
}

fn rank() -> Rank {
    Rank {
        regions: RegionLengths { kv: 1 << 30, aux: 4096, notice: 8192 },
        lanes: 2,
        shm: Some(ShmGrant {
            host: HostId([1; 16]),
            socket: SocketName::new(b"baton-0123").unwrap(),
            token: Token([2; 16]),
        }),
        rdma: Some(rdma()),
        tcp: Some(TcpGrant { address: "10.0.0.7:4000".parse().unwrap(), token: Token([3; 16]) }),
        fake: false,
    }
}

fn every_kind() -> Vec<Message<'static>> {
    let session = SessionGeneration(4);
    let bare = Rank { shm: None, rdma: None, tcp: None, fake: true, ..rank() };
    let v6 = TcpGrant { address: "[2001:db8::1]:1".parse().unwrap(), token: Token([9; 16]) };
    let hash = [5; 32];
    let fingerprint =
        Fingerprint { config: hash, weights: hash, kernels: hash, tokenizer: hash, template: hash };
    let aux = AuxLayoutClaim { version: 1, record_bytes: 256, slots: 64 };
    vec![
        Message::Hello(Hello {
            peer: Peer { id: [1; 16], incarnation: [2; 16] },
            connection: 9,
            capabilities: 1,
            software: [0, 1, 2],
            ranks: 8,
            role: Role::Decode,
            nonce: [3; 32],
            minor: MINOR,
            keys: ClusterKey::new(&[4; 32]).map(|key| Keyring::from(Some(key)).ids()).unwrap(),
        }),
        Message::Proof(Proof { tag: [8; 32] }),
        Message::Announce(Box::new(Announce {
            session,
            fingerprint,
            bit_class: BitClass::named("x86-fma"),
            kv: layout(),
            aux,
            ranks: vec![rank(), bare, Rank { tcp: Some(v6), ..rank() }],
        })),
        Message::Welcome(Box::new(Welcome {
            session,
            transport: Transport::Shm,
            late: true,
            kv: layout(),
            ranks: vec![rank()],
        })),
        Message::Refused(Refused {
            session,
            reason: Refusal::KvLayout,
            field: "head_dim",
            source: "64",
            destination: "128",
        }),
        Message::Destination(Destination {
            id: ID,
            session,
            tokens: 48,
            prefix_tokens: 0,
            ids_hash: ids_hash(&[1, 2, 3]),
            aux_index: 5,
            deadline_ms: 30_000,
            pages: PageList::from(&PAGES[..]),
        }),
        Message::Interest(Interest {
            id: ID,
            session,
            tokens: 48,
            ids_hash: ids_hash(&[1, 2, 3]),
            deadline_ms: 30_000,
        }),
        Message::Ready(Ready { id: ID }),
        Message::Abort(Abort { id: ID, cause: Cause::ClientGone }),
        Message::AbortAck(AbortAck { id: ID, quiet: true, cause: Cause::Deadline }),
        Message::Status(Status { id: ID, state: 0, cause: Some(Cause::PeerLost) }),
        Message::Status(Status { id: ID, state: 4, cause: None }),
        Message::Done(Done { id: ID }),
        Message::Bye(Bye { cause: Some(Cause::Draining) }),
        Message::Bye(Bye { cause: None }),
        Message::PromptRecord(PromptRecord { id: ID, bytes: &[1, 2, 3] }),
        Message::PromptRecord(PromptRecord { id: ID, bytes: &[] }),
    ]
}

fn encoded(message: &Message<'_>) -> Multipart {
    let mut out = Multipart::new();
    message.encode(None, &mut out);
    out
}

/// The same message with one part replaced.
fn with_part(message: &Multipart, index: usize, part: &[u8]) -> Multipart {
    let mut out = Multipart::new();
    for (at, old) in message.parts().iter().enumerate() {
        out.push(if at == index { part } else { old });
    }
    out
}

fn seals() -> (Seal, Seal) {
    let seal = ClusterKey::new(&[1; 32])
        .unwrap()
        .seal(Side::Dialer, &Hellos { dialer: b"", acceptor: b"" });
    (seal.clone(), seal)
}

#[test]
fn every_kind_comes_back_as_sent_bare_and_sealed() {
    let (mut ours, mut theirs) = seals();
    let mut out = Multipart::new();
    for message in every_kind() {
        message.encode(None, &mut out);
        assert_eq!(Message::decode(out.parts(), None), Ok(Some(message.clone())));
        message.encode(Some(&mut ours), &mut out);
        assert_eq!(Message::decode(out.parts(), Some(&mut theirs)), Ok(Some(message)));
    }
}

/// The seeds of `fuzz/` are messages of this version. After a change of a message, run once with
/// BATON_WRITE_CORPUS set.
#[test]
fn the_fuzz_corpus_holds_every_kind() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/message");
    for (index, message) in every_kind().iter().enumerate() {
        let name = format!("{message:?}");
        let name = name.split(['(', ' ']).next().unwrap().to_lowercase();
        let path = folder.join(format!("{index:02}_{name}"));
        // A byte for the target's own use, then each part after its length.
        let mut seed = vec![(index as u8).wrapping_mul(19)];
        for part in encoded(message).parts().iter() {
            seed.extend_from_slice(&(part.len() as u16).to_le_bytes());
            seed.extend_from_slice(part);
        }
        if std::env::var_os("BATON_WRITE_CORPUS").is_some() {
            std::fs::write(&path, &seed).unwrap();
        }
        assert!(
            std::fs::read(&path).is_ok_and(|stored| stored == seed),
            "{} is stale",
            path.display()
        );
    }
}

#[test]
fn a_nic_that_is_named_twice_is_refused() {
    let mut grant = rdma();
    let again = RailGrant { number: 2, ..RailGrant::zeroed().with_keys(1 << 40, [1].into_iter()) };
    grant.push(again, &[9, 10].map(|number| QueuePairName { number, sequence: 11 }));
    let announce = Announce {
        session: SessionGeneration(4),
        fingerprint: Zeroable::zeroed(),
        bit_class: BitClass::UNKNOWN,
        kv: layout(),
        aux: Zeroable::zeroed(),
        ranks: vec![Rank { rdma: Some(grant), ..rank() }],
    };
    let out = encoded(&Message::Announce(Box::new(announce)));
    let refused = MessageError::Value { what: "number of an rdma NIC, again", value: 2 };
    assert_eq!(Message::decode(out.parts(), None).err(), Some(refused));
}

/// An Announce of minor 2 ends before the bit class.
#[test]
fn a_bit_class_is_absent_before_minor_3_and_a_wrong_one_is_refused() {
    let decoded = |class: &[u8]| {
        let announce = Announce {
            session: SessionGeneration(4),
            fingerprint: Zeroable::zeroed(),
            bit_class: BitClass::named("x86-fma"),
            kv: layout(),
            aux: Zeroable::zeroed(),
            ranks: vec![rank()],
        };
        let encoded = encoded(&Message::Announce(Box::new(announce)));
        let mut out = Multipart::new();
        for (index, part) in encoded.parts().iter().enumerate() {
            let end = if index == 0 { part.len() - 16 } else { part.len() };
            out.extend(&part[..end]);
            out.extend(if index == 0 { class } else { &[] });
            out.end_part();
        }
        match Message::decode(out.parts(), None) {
            Ok(Some(Message::Announce(announce))) => Ok(announce.bit_class),
            other => Err(other.unwrap_err()),
        }
    };
    assert_eq!(decoded(&[]), Ok(BitClass::UNKNOWN));
    let unknown = Announce {
        session: SessionGeneration(4),
        fingerprint: Zeroable::zeroed(),
        bit_class: BitClass::UNKNOWN,
        kv: layout(),
        aux: Zeroable::zeroed(),
        ranks: vec![rank()],
    };
    let unknown = encoded(&Message::Announce(Box::new(unknown)));
    assert_eq!(unknown.parts().get(0).map(<[u8]>::len), Some(16), "as minor 2 wrote it");
    assert_eq!(decoded(b"portable\0\0\0\0\0\0\0\0"), Ok(BitClass::named("portable")));
    for wrong in [b"a b\0\0\0\0\0\0\0\0\0\0\0\0\0", b"a\0b\0\0\0\0\0\0\0\0\0\0\0\0\0", &[200; 16]] {
        assert!(matches!(decoded(wrong), Err(MessageError::Content { what: "bit class", .. })));
    }
}

#[test]
fn keys_open_all_of_a_pool_or_are_refused() {
    let announced = |kv: u64, slab_bytes: u64, keys: usize, said: u16| {
        let mut grant = RdmaGrant::empty(1 << 40, 1 << 41);
        let rail = RailGrant::zeroed().with_keys(slab_bytes, (0..).take(keys));
        for rail in [rail, RailGrant { number: 1, slabs: said, ..rail }] {
            grant.push(rail, &[QueuePairName { number: 1, sequence: 2 }]);
        }
        let own =
            Rank { regions: RegionLengths { kv, ..rank().regions }, rdma: Some(grant), ..rank() };
        let announce = Announce {
            session: SessionGeneration(4),
            fingerprint: Zeroable::zeroed(),
            bit_class: BitClass::UNKNOWN,
            kv: layout(),
            aux: Zeroable::zeroed(),
            ranks: vec![own],
        };
        let out = encoded(&Message::Announce(Box::new(announce)));
        match Message::decode(out.parts(), None) {
            Ok(Some(Message::Announce(announce))) => {
                let rdma = announce.ranks[0].rdma.unwrap();
                Ok(rdma.rails().map(|(nic, _)| nic.slab_keys().len()).collect::<Vec<_>>())
            }
            other => Err(other.unwrap_err()),
        }
    };
    let refused = |what, value| Err(MessageError::Value { what, value });
    let (slabs, bytes) = ("rdma slabs", "bytes of an rdma slab");
    assert_eq!(announced(4 << 20, 1 << 20, 4, 4), Ok(vec![4, 4]));
    assert_eq!(announced((4 << 20) + 1, 1 << 20, 4, 4), refused(bytes, 1 << 20));
    assert_eq!(announced(4 << 20, 1 << 20, 4, 3), refused(bytes, 1 << 20), "the second NIC's");
    assert_eq!(
        announced(u64::MAX, 1 << 58, 100, 64),
        Ok(vec![64, 64]),
        "what does not fit is left out"
    );
    assert_eq!(announced(1, 1 << 20, 4, 0), refused(slabs, 0));
    assert_eq!(announced(1, 1 << 20, 4, 65), refused(slabs, 65));
    assert_eq!(announced(1, 1 << 20, 4, u16::MAX), refused(slabs, u16::MAX.into()));
    for wrong in [0, 3 << 20, u64::MAX] {
        assert_eq!(announced(1, wrong, 4, 4), refused(bytes, wrong));
    }
}

#[test]
fn a_message_without_its_seal_is_refused() {
    let (_, mut theirs) = seals();
    let bare = encoded(&Message::Done(Done { id: ID }));
    assert_eq!(Message::decode(bare.parts(), Some(&mut theirs)), Err(MessageError::Seal));
}

#[test]
fn every_cut_of_every_part_is_refused() {
    for message in every_kind() {
        let whole = encoded(&message);
        for (index, part) in whole.parts().iter().enumerate() {
            for len in 0..part.len() {
                let cut = with_part(&whole, index, &part[..len]);
                let result = Message::decode(cut.parts(), None);
                // Texts, lists and records may be shorter; they are then other values.
                let list = match message {
                    Message::Refused(_) | Message::PromptRecord(_) => index > 0,
                    Message::Destination(_) => index > 0 && len % 4 == 0,
                    // As minor 2 wrote it: header and session.
                    Message::Announce(_) => index == 0 && len == 16,
                    _ => false,
                };
                assert_eq!(result.is_err(), !list, "{message:?} part {index} cut to {len}");
            }
        }
        let (fewer, _) = whole.parts().split_last().unwrap();
        assert!(Message::decode(fewer, None).is_err(), "{message:?}");
        let mut more = whole.clone();
        more.push(b"");
        assert!(Message::decode(more.parts(), None).is_err(), "{message:?}");
    }
}

#[test]
fn a_longer_body_is_cut() {
    for message in every_kind() {
        let whole = encoded(&message);
        let longer = [whole.parts().get(0).unwrap(), b"of a later version"].concat();
        let longer = with_part(&whole, 0, &longer);
        assert_eq!(Message::decode(longer.parts(), None), Ok(Some(message)));
    }
}

#[test]
fn headers_are_checked() {
    let done = encoded(&Message::Done(Done { id: ID }));
    let change = |at: usize, value: u8| {
        let mut first = done.parts().get(0).unwrap().to_vec();
        first[at] = value;
        with_part(&done, 0, &first)
    };
    let decode =
        |message: Multipart| Message::decode(message.parts(), None).map(|found| found.is_some());
    assert_eq!(decode(change(0, 0)), Err(MessageError::Magic(0x5400)));
    assert_eq!(decode(change(2, 9)), Err(MessageError::Version { theirs: 9 }));
    assert_eq!(decode(change(6, 1)), Err(MessageError::Parts { said: 2, found: 1 }));
    assert_eq!(decode(change(3, 200)), Ok(false), "an unknown kind is skipped");
    let mut first = done.parts().get(0).unwrap().to_vec();
    (first[3], first[4]) = (200, 1);
    assert_eq!(decode(with_part(&done, 0, &first)), Err(MessageError::Kind(200)));
    assert!(Message::decode(Multipart::new().parts(), None).is_err());
}

#[test]
fn values_out_of_range_are_refused_by_name() {
    let refused = |message: Message<'_>| match Message::decode(encoded(&message).parts(), None) {
        Err(MessageError::Value { what, .. }) => what,
        other => panic!("{other:?}"),
    };
    let done = |id| Message::Done(Done { id });
    assert_eq!(refused(done(TransferId { room: Room(1 << 63), ..ID })), "room");
    assert_eq!(refused(done(TransferId { generation: Generation(0), ..ID })), "generation");
    assert_eq!(refused(done(TransferId { generation: Generation(1 << 24), ..ID })), "generation");
    assert_eq!(refused(Message::Status(Status { id: ID, state: 5, cause: None })), "state");
    for message in every_kind() {
        match message {
            Message::Destination(good) => {
                assert_eq!(
                    refused(Message::Destination(Destination { tokens: 0, ..good })),
                    "tokens"
                );
                for prefix_tokens in [good.tokens, good.tokens + 1] {
                    let long = Destination { prefix_tokens, ..good };
                    assert_eq!(refused(Message::Destination(long)), "prefix");
                }
                let unbound = Destination { session: SessionGeneration(0), ..good };
                assert_eq!(refused(Message::Destination(unbound)), "session");
            }
            Message::Hello(good) => {
                assert_eq!(refused(Message::Hello(Hello { ranks: 0, ..good })), "ranks");
                assert_eq!(refused(Message::Hello(Hello { ranks: 65, ..good })), "ranks");
            }
            Message::Announce(good) => {
                let mut bad = good.clone();
                bad.kv.page_size = 0;
                assert_eq!(refused(Message::Announce(bad)), "page size");
                let mut bad = good.clone();
                bad.ranks[1].lanes = 0;
                assert_eq!(refused(Message::Announce(bad)), "lanes");
                let mut bad = good;
                bad.ranks.clear();
                assert_eq!(refused(Message::Announce(bad)), "ranks");
            }
            _ => {}
        }
    }
}

#[test]
fn texts_are_cut_to_their_bound_at_a_character() {
    let long = "é".repeat(limits::MESSAGE_TEXT_MAX);
    let refused = Refused {
        session: SessionGeneration(1),
        reason: Refusal::Other(77),
        field: &long,
        source: "x",
        destination: "",
    };
    let out = encoded(&Message::Refused(refused));
    let Ok(Some(Message::Refused(back))) = Message::decode(out.parts(), None) else { panic!() };
    assert_eq!(back.field.len(), limits::MESSAGE_TEXT_MAX);
    assert_eq!((back.reason, back.source, back.destination), (Refusal::Other(77), "x", ""));
}

proptest! {
    #[test]
    fn no_bytes_panic(
        kind in 0u8..16,
        parts in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..400), 0..8),
    ) {
        let mut raw = Multipart::new();
        parts.iter().for_each(|part| raw.push(part));
        let _ = Message::decode(raw.parts(), None);
        let header =
            Header { magic: MAGIC, version: VERSION, kind, flags: 0, parts: parts.len() as u16 };
        let mut headed = Multipart::new();
        headed.extend(bytemuck::bytes_of(&header));
        headed.push(&[1; 300]);
        parts.iter().for_each(|part| headed.push(part));
        let _ = Message::decode(headed.parts(), None);
        let _ = Message::decode(headed.parts(), Some(&mut seals().0));
    }

    #[test]
    fn a_decoded_message_is_the_same_after_encoding(
        noise in proptest::collection::vec(any::<u8>(), 120),
        kind in 0usize..13,
    ) {
        let whole = encoded(&every_kind()[kind]);
        let first = whole.parts().get(0).unwrap();
        let changed: Vec<u8> = first.iter().zip(&noise).enumerate()
            .map(|(at, (old, new))| if at < HEADER_LEN || new % 2 == 0 { *old } else { *new })
            .collect();
        let changed = with_part(&whole, 0, &[&changed[..], &first[changed.len()..]].concat());
        if let Ok(Some(message)) = Message::decode(changed.parts(), None) {
            let again = encoded(&message);
            prop_assert_eq!(Message::decode(again.parts(), None), Ok(Some(message)));
        }
    }
}
