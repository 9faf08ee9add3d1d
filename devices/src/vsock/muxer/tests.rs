use super::*;
use crate::vsock::header::{SHUTDOWN_RECEIVE, SHUTDOWN_SEND};
use proptest::prelude::*;

const CID: u64 = 3;
const KEY: Key = Key {
    host_port: 5000,
    guest_port: 700,
};

fn muxer() -> Muxer {
    Muxer::new(CID, Limits::default())
}

fn packet(key: Key, op: Op) -> Header {
    Header {
        src_cid: CID,
        dst_cid: HOST_CID,
        src_port: key.guest_port,
        dst_port: key.host_port,
        kind: TYPE_STREAM,
        op: op.to_wire(),
        buf_alloc: 1000,
        ..Header::default()
    }
}

fn data(key: Key, length: u32) -> Header {
    Header {
        len: length,
        ..packet(key, Op::ReadWrite)
    }
}

fn owed(muxer: &mut Muxer) -> Vec<(Op, u32)> {
    let mut packets = Vec::new();
    while muxer.has_control() {
        let header = muxer.next_control().unwrap();
        packets.push((Op::from_wire(header.op).unwrap(), header.flags));
    }
    assert_eq!(muxer.next_control(), None);
    packets
}

/// A connection of the guest's making, its response sent.
fn open() -> Muxer {
    let mut muxer = muxer();
    let request = packet(KEY, Op::Request);
    assert_eq!(muxer.on_packet(&request, 0), Verdict::Request(KEY));
    assert!(muxer.accept(KEY, &request));
    assert_eq!(owed(&mut muxer), [(Op::Response, 0)]);
    muxer
}

#[test]
fn vs10_rst_for_an_unknown_connection_is_not_answered() {
    let mut muxer = muxer();
    assert_eq!(
        muxer.on_packet(&packet(KEY, Op::Reset), 0),
        Verdict::Nothing
    );
    assert_eq!(owed(&mut muxer), []);
    // Everything else is.
    for op in [
        Op::Response,
        Op::ReadWrite,
        Op::Shutdown,
        Op::CreditUpdate,
        Op::CreditRequest,
    ] {
        assert_eq!(muxer.on_packet(&packet(KEY, op), 0), Verdict::Nothing);
        let reset = muxer.next_control().unwrap();
        assert_eq!(reset.op, Op::Reset.to_wire());
        assert_eq!((reset.src_port, reset.dst_port), (5000, 700));
        assert_eq!((reset.src_cid, reset.dst_cid), (HOST_CID, CID));
    }
}

#[test]
fn vs10_foreign_addresses_are_dropped() {
    let mut muxer = open();
    let mut foreign = data(KEY, 10);
    for source in [0, 1, 2, 4, u64::MAX, CID | 1 << 32] {
        foreign.src_cid = source;
        assert_eq!(muxer.on_packet(&foreign, 10), Verdict::Nothing);
    }
    foreign.src_cid = CID;
    for destination in [0, 1, 3, u64::MAX, HOST_CID | 1 << 32] {
        foreign.dst_cid = destination;
        assert_eq!(muxer.on_packet(&foreign, 10), Verdict::Nothing);
    }
    assert_eq!(owed(&mut muxer), []);
    assert_eq!(muxer.connection(KEY).unwrap().held(), 0);
}

#[test]
fn vs10_port_is_freed_only_by_its_owner() {
    let mut muxer = muxer();
    let first = muxer.connect(80).unwrap();
    let second = muxer.connect(80).unwrap();
    assert_ne!(first.host_port, second.host_port);
    // The guest dials the very number that a client was given, and hangs up again.
    let guest = Key {
        host_port: first.host_port,
        guest_port: 999,
    };
    let request = packet(guest, Op::Request);
    assert!(muxer.accept(guest, &request));
    assert_eq!(
        muxer.on_packet(&packet(guest, Op::Reset), 0),
        Verdict::Closed(guest)
    );
    assert!(muxer.host_ports.contains(&first.host_port));
    muxer.reset(first);
    assert!(!muxer.host_ports.contains(&first.host_port));
    assert!(muxer.host_ports.contains(&second.host_port));
}

#[test]
fn host_ports_rotate_and_skip_those_in_use() {
    let mut muxer = muxer();
    muxer.next_host_port = u32::MAX - 1;
    let last = muxer.connect(80).unwrap();
    assert_eq!(last.host_port, u32::MAX - 1);
    let first = muxer.connect(80).unwrap();
    assert_eq!(first.host_port, FIRST_HOST_PORT);
    muxer.next_host_port = u32::MAX - 1;
    let next = muxer.connect(80).unwrap();
    assert_eq!(next.host_port, FIRST_HOST_PORT + 1);
}

#[test]
fn types_that_are_not_offered_are_refused_in_kind() {
    let mut muxer = muxer();
    for kind in [0, 2, u16::MAX] {
        let header = Header {
            kind,
            ..packet(KEY, Op::Request)
        };
        assert_eq!(muxer.on_packet(&header, 0), Verdict::Nothing);
        let reset = muxer.next_control().unwrap();
        assert_eq!((reset.op, reset.kind), (Op::Reset.to_wire(), kind));
    }
}

#[test]
fn vs09_credit_request_then_large_packet_is_answered_and_taken() {
    let mut muxer = open();
    let request = packet(KEY, Op::CreditRequest);
    assert_eq!(muxer.on_packet(&request, 0), Verdict::Credit(KEY));
    let large = data(KEY, MAX_PAYLOAD);
    assert_eq!(
        muxer.on_packet(&large, MAX_PAYLOAD as usize),
        Verdict::Data(KEY, MAX_PAYLOAD)
    );
    let update = muxer.next_control().unwrap();
    assert_eq!(update.op, Op::CreditUpdate.to_wire());
    assert_eq!((update.buf_alloc, update.fwd_cnt), (256 * 1024, 0));
}

#[test]
fn ho03_payload_lengths_at_0_1_max_and_max_plus_1() {
    for (length, taken) in [
        (0, true),
        (1, true),
        (MAX_PAYLOAD, true),
        (MAX_PAYLOAD + 1, false),
        (u32::MAX, false),
    ] {
        let mut muxer = open();
        let verdict = muxer.on_packet(&data(KEY, length), length as usize);
        if taken {
            assert_eq!(verdict, Verdict::Data(KEY, length));
        } else {
            assert_eq!(verdict, Verdict::Closed(KEY));
            assert_eq!(owed(&mut muxer), [(Op::Reset, 0)]);
        }
    }
    // One byte more than there is.
    let mut muxer = open();
    assert_eq!(muxer.on_packet(&data(KEY, 11), 10), Verdict::Closed(KEY));
}

#[test]
fn vs07_each_direction_ends_for_good() {
    let mut muxer = open();
    let end = |flags| Header {
        flags,
        ..packet(KEY, Op::Shutdown)
    };
    assert_eq!(muxer.on_packet(&end(SHUTDOWN_SEND), 0), Verdict::Ended(KEY));
    let connection = muxer.connection(KEY).unwrap();
    assert!(!connection.guest_sends() && connection.guest_receives());
    assert!(connection.may_send() > 0);
    // A later packet without the bit does not take it back.
    assert_eq!(muxer.on_packet(&end(0), 0), Verdict::Ended(KEY));
    assert!(!muxer.connection(KEY).unwrap().guest_sends());
    assert_eq!(
        muxer.on_packet(&end(SHUTDOWN_RECEIVE), 0),
        Verdict::Finished(KEY)
    );
    assert_eq!(owed(&mut muxer), [(Op::Reset, 0)]);
    assert!(muxer.is_empty());
}

#[test]
fn data_after_the_end_and_a_second_request_break_the_connection() {
    let mut muxer = open();
    let end = Header {
        flags: SHUTDOWN_SEND,
        ..packet(KEY, Op::Shutdown)
    };
    muxer.on_packet(&end, 0);
    assert_eq!(muxer.on_packet(&data(KEY, 1), 1), Verdict::Closed(KEY));
    let mut muxer = open();
    assert_eq!(
        muxer.on_packet(&packet(KEY, Op::Request), 0),
        Verdict::Closed(KEY)
    );
    assert_eq!(owed(&mut muxer), [(Op::Reset, 0)]);
}

#[test]
fn host_side_over_is_told_after_the_data_and_lost_data_by_reset() {
    let mut muxer = open();
    assert_eq!(muxer.update(KEY, Connection::host_ended), Some(true));
    assert_eq!(owed(&mut muxer), [(Op::Shutdown, SHUTDOWN_SEND)]);
    let stopped = |connection: &mut Connection| connection.host_stopped_receiving(false);
    assert_eq!(muxer.update(KEY, stopped), Some(true));
    let both = SHUTDOWN_SEND | SHUTDOWN_RECEIVE;
    assert_eq!(owed(&mut muxer), [(Op::Shutdown, both)]);
    let mut muxer = open();
    let lost = |connection: &mut Connection| connection.host_stopped_receiving(true);
    assert_eq!(muxer.update(KEY, lost), Some(true));
    assert_eq!(muxer.update(KEY, Connection::host_ended), Some(false));
}

#[test]
fn request_that_never_left_is_taken_back_silently() {
    let mut muxer = muxer();
    let key = muxer.connect(80).unwrap();
    muxer.reset(key);
    assert_eq!(owed(&mut muxer), []);
    let key = muxer.connect(80).unwrap();
    assert_eq!(owed(&mut muxer), [(Op::Request, 0)]);
    muxer.reset(key);
    assert_eq!(owed(&mut muxer), [(Op::Reset, 0)]);
}

#[test]
fn resets_owed_to_a_deaf_guest_are_bounded() {
    let mut muxer = muxer();
    for guest_port in 0..10_000 {
        let key = Key { guest_port, ..KEY };
        muxer.on_packet(&packet(key, Op::Shutdown), 0);
    }
    assert_eq!(owed(&mut muxer).len(), MAX_RESETS);
    assert_eq!(muxer.resets_dropped(), 10_000 - MAX_RESETS as u64);
}

#[test]
fn connections_are_bounded_and_later_ones_get_a_small_window() {
    let mut muxer = muxer();
    for _ in 0..1024 {
        muxer.connect(80).unwrap();
    }
    assert_eq!(muxer.connect(80), Err(Full(1024)));
    let request = packet(KEY, Op::Request);
    assert!(!muxer.accept(KEY, &request));
    let windows: Vec<u32> = std::iter::from_fn(|| muxer.next_control())
        .filter(|header| header.op == Op::Request.to_wire())
        .map(|header| header.buf_alloc)
        .collect();
    assert_eq!(
        windows
            .iter()
            .filter(|window| **window == 256 * 1024)
            .count(),
        32
    );
    assert_eq!(
        windows
            .iter()
            .filter(|window| **window == 64 * 1024)
            .count(),
        992
    );
}

#[test]
fn credit_is_asked_for_once_each_time_it_runs_out() {
    let mut muxer = open();
    muxer.data_header(KEY, 1000).unwrap();
    assert_eq!(muxer.connection(KEY).unwrap().may_send(), 0);
    for _ in 0..3 {
        muxer.update(KEY, Connection::want_credit);
    }
    assert_eq!(owed(&mut muxer), [(Op::CreditRequest, 0)]);
    let update = |fwd_cnt| Header {
        fwd_cnt,
        ..packet(KEY, Op::CreditUpdate)
    };
    // An answer that gives none is no reason to ask again.
    muxer.on_packet(&update(0), 0);
    muxer.update(KEY, Connection::want_credit);
    assert_eq!(owed(&mut muxer), []);
    muxer.on_packet(&update(500), 0);
    muxer.update(KEY, Connection::want_credit);
    assert_eq!(owed(&mut muxer), [(Op::CreditRequest, 0)]);
}

#[derive(Clone, Debug)]
enum Step {
    Packet(u8, u16, u32, u32, u32),
    Connect(u8),
    HostEnded(u8),
    HostStopped(u8, bool),
    Forward(u8),
    Send(u8),
    Reset(u8),
    Control,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let port = || 0..4u8;
    let number = || prop_oneof![0..4u32, Just(65_536), any::<u32>()];
    prop::collection::vec(
        prop_oneof![
            8 => (port(), 0..9u16, number(), 0..4u32, number())
                .prop_map(|(port, op, len, flags, fwd)| Step::Packet(port, op, len, flags, fwd)),
            2 => port().prop_map(Step::Connect),
            1 => port().prop_map(Step::HostEnded),
            1 => (port(), any::<bool>()).prop_map(|(port, lost)| Step::HostStopped(port, lost)),
            2 => port().prop_map(Step::Forward),
            2 => port().prop_map(Step::Send),
            1 => port().prop_map(Step::Reset),
            4 => Just(Step::Control),
        ],
        0..80,
    )
}

proptest! {
    /// Whatever the guest and the host do: what is held stays within the window, packets that are
    /// owed end, each connection's port belongs to it, and a guest that is told of a reset has no
    /// connection there.
    #[test]
    fn no_order_of_events_breaks_the_muxer(steps in steps()) {
        let mut muxer = muxer();
        let key = |port: u8| Key { host_port: 5000 + u32::from(port % 2), guest_port: u32::from(port) };
        let mut keys: Vec<Key> = (0..4).map(key).collect();
        for step in steps {
            let pick = |port: u8| keys[keys.len() - 1 - usize::from(port).min(keys.len() - 1)];
            match step {
                Step::Packet(port, op, len, flags, fwd_cnt) => {
                    let key = if flags & 1 == 0 { key(port) } else { pick(port) };
                    let header = Header { op, len, flags, fwd_cnt, ..packet(key, Op::Request) };
                    match muxer.on_packet(&header, len as usize) {
                        Verdict::Request(key) => {
                            prop_assert!(muxer.connection(key).is_none());
                            let _ = muxer.accept(key, &header);
                        }
                        Verdict::Finished(key) | Verdict::Closed(key) => {
                            prop_assert!(muxer.connection(key).is_none());
                        }
                        Verdict::Data(key, length) => {
                            prop_assert!(length <= MAX_PAYLOAD);
                            prop_assert!(muxer.connection(key).is_some());
                        }
                        _ => {}
                    }
                }
                Step::Connect(port) => keys.push(muxer.connect(u32::from(port)).unwrap()),
                Step::HostEnded(port) => {
                    if muxer.update(pick(port), Connection::host_ended) == Some(false) {
                        muxer.reset(pick(port));
                    }
                }
                Step::HostStopped(port, lost) => {
                    let stop = |connection: &mut Connection| connection.host_stopped_receiving(lost);
                    if muxer.update(pick(port), stop) == Some(false) {
                        muxer.reset(pick(port));
                    }
                }
                Step::Forward(port) => {
                    muxer.update(pick(port), |connection| connection.forwarded(connection.held()));
                }
                Step::Send(port) => {
                    let key = pick(port);
                    let length = muxer.connection(key).map_or(0, Connection::may_send);
                    if length > 0 {
                        let header = muxer.data_header(key, length.min(4052)).unwrap();
                        prop_assert_eq!(header.op, Op::ReadWrite.to_wire());
                    }
                }
                Step::Reset(port) => muxer.reset(pick(port)),
                Step::Control => {
                    let owes = muxer.has_control();
                    prop_assert_eq!(owes, muxer.next_control().is_some());
                }
            }
            for (key, connection) in &muxer.connections {
                prop_assert!(connection.held() <= 256 * 1024);
                if connection.origin() == Origin::Host {
                    prop_assert!(muxer.host_ports.contains(&key.host_port));
                }
            }
            let owners = muxer.connections.values().filter(|connection| connection.origin() == Origin::Host);
            prop_assert_eq!(owners.count(), muxer.host_ports.len());
        }
        let mut owed = 0;
        while muxer.next_control().is_some() {
            owed += 1;
            prop_assert!(owed <= 80 * 3 + MAX_RESETS);
        }
    }
}
