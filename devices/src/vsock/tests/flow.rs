//! Data and its end, in both directions.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::testing::{DriverQueue, Part, RX_BUFFER, read};
use crate::vsock::Key;
use crate::vsock::header::{HEADER_LEN, MAX_PAYLOAD, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};

const BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;
const GIB: usize = 1 << 30;

#[test]
fn vs01_guest_without_buffers_host_writes_and_closes_loop_sleeps() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let (mut client, _) = rig.connected(80);
    // Take back every buffer: what is posted from here on is what the test posts.
    while rig.rx.free() < 256 {
        client.write_all(b"x").unwrap();
        rig.run();
        rig.received();
    }
    let message = noise(10_000);
    client.write_all(&message).unwrap();
    drop(client);
    let wakeups = rig.wakeups_in(WHILE);
    assert!(wakeups <= 2, "{wakeups} wake-ups");
    // Two wake-ups at most for a single buffer, too: it takes what fits and sleeps again.
    rig.post(1);
    let wakeups = rig.wakeups_in(WHILE);
    assert!(wakeups <= 2, "{wakeups} wake-ups");
    let mut received: Vec<u8> = rig.received().remove(0).1;
    let rest = rig.exchange();
    received.extend(data(&rest));
    assert_eq!(received, message);
    let (op, end, _) = rest.last().unwrap();
    assert_eq!(
        (*op, end.flags & SHUTDOWN_SEND),
        (Op::Shutdown, SHUTDOWN_SEND)
    );
}

#[test]
fn vs02_host_peer_dead_with_queued_data_ends_in_reset_without_spin() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let (server, header) = dialled(&mut rig, 700, 5000);
    // More than the socket takes.
    let chunk = noise(MAX_PAYLOAD as usize);
    for _ in 0..4 {
        rig.send_data(header, &chunk);
        rig.run();
    }
    while rig.host.buffered() == 0 {
        rig.send_data(header, &chunk);
        rig.run();
    }
    rig.exchange();
    assert_eq!(rig.wakeups_in(WHILE), 0, "a full socket is silent");
    drop(server);
    let end = ops(&rig.exchange());
    assert_eq!(end.last(), Some(&Op::Reset), "{end:?}");
    assert_eq!(rig.host.connections(), 0);
    assert_eq!(rig.host.buffered(), 0);
    assert_eq!(rig.poller.registered(), 4);
    assert_eq!(rig.wakeups_in(WHILE), 0);
}

#[test]
fn vs03_doorbell_of_an_inactive_or_reset_device_is_drained() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::asleep(folder.path(), |_| ());
    let ring = |rig: &mut Rig| {
        for queue in 0..3 {
            rig.driver.write(0x50, queue);
        }
        let wakeups = rig.wakeups_in(WHILE / 4);
        assert!(wakeups <= 1, "{wakeups} wake-ups");
    };
    ring(&mut rig);
    rig.start();
    rig.run();
    ring(&mut rig);
    rig.driver.reset();
    rig.run();
    ring(&mut rig);
    assert_eq!(rig.poller.counters().muted, 0);
    // And the device comes up again.
    rig.start();
    rig.connected(80);
}

#[test]
fn vs05_event_without_handler_is_muted_and_heard_again_once_registered_anew() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    // A socket that the device knows nothing of, under a token of its kind.
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let key = Key {
        host_port: 1,
        guest_port: 2,
    };
    let source = rig
        .poller
        .register(
            theirs,
            vmm_events::Interest::READ,
            crate::vsock::Token::Stream(key),
        )
        .unwrap();
    ours.write_all(b"x").unwrap();
    let wakeups = rig.wakeups_in(WHILE);
    assert_eq!((wakeups, rig.poller.counters().muted), (2, 1));
    source.renew().unwrap();
    rig.poller.wait(Some(WHILE)).unwrap();
    let event = rig.poller.next_event().unwrap();
    assert_eq!(event.token, crate::vsock::Token::Stream(key));
    assert!(rig.poller.next_event().is_none());
}

#[test]
fn vs06_packet_over_any_descriptors_arrives_intact() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let (mut server, header) = dialled(&mut rig, 700, 5000);
    let payload = noise(MAX_PAYLOAD as usize);
    let many: Vec<usize> = (1..200).map(|part| part * 300).collect();
    let bytes: Vec<usize> = (1..100).collect();
    for splits in [
        &[][..],
        &[HEADER_LEN],
        &[20],
        &[10, 44, 45, 5000],
        &many,
        &bytes,
    ] {
        for length in [1, 2, 43, 44, 45, 4096, MAX_PAYLOAD as usize] {
            for indirect in [false, true] {
                let len = length as u32;
                let packet = Header {
                    len,
                    ..with(header, Op::ReadWrite, 0)
                };
                if indirect {
                    rig.send_indirect(packet, &payload[..length], splits);
                } else {
                    rig.send_split(packet, &payload[..length], splits);
                }
                rig.run();
                assert_eq!(read(&mut server), payload[..length], "{splits:?} {length}");
            }
        }
    }
    let updates = rig.exchange();
    assert!(updates.iter().all(|(op, ..)| *op == Op::CreditUpdate));
}

#[test]
fn vs06_a_gib_from_the_guest_arrives_intact() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let (server, header) = dialled(&mut rig, 700, 5000);
    server.set_nonblocking(false).unwrap();
    let pattern = noise(MAX_PAYLOAD as usize);
    let reader = std::thread::spawn({
        let pattern = pattern.clone();
        move || check_stream(server, &pattern)
    });
    let (mut sent, mut forwarded) = (0usize, 0usize);
    let mut window = 256 * 1024;
    while sent < GIB {
        let length = (window - (sent - forwarded))
            .min(GIB - sent)
            .min(pattern.len());
        let start = sent % pattern.len();
        let length = length.min(pattern.len() - start);
        if length > 0 {
            rig.send_data(header, &pattern[start..start + length]);
            sent += length;
        }
        rig.post(16usize.saturating_sub(256 - rig.rx.free()));
        if !rig.round() && length == 0 {
            rig.round_within(Duration::from_secs(5));
        }
        for (packet, _) in rig.received() {
            window = packet.buf_alloc as usize;
            // Counts wrap at 4 GiB, which this stream does not reach.
            forwarded = packet.fwd_cnt as usize;
        }
        assert!(rig.host.buffered() <= window);
    }
    rig.send(with(header, Op::Shutdown, BOTH), &[]);
    while rig.host.connections() > 0 {
        rig.round_within(Duration::from_secs(5));
    }
    assert_eq!(reader.join().unwrap(), GIB);
}

#[test]
fn vs06_a_gib_to_the_guest_arrives_intact() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let (mut server, header) = dialled(&mut rig, 700, 5000);
    server.set_nonblocking(false).unwrap();
    let pattern = noise(MAX_PAYLOAD as usize);
    let writer = std::thread::spawn({
        let pattern = pattern.clone();
        move || {
            for _ in 0..GIB / pattern.len() {
                server.write_all(&pattern).unwrap();
            }
        }
    });
    let (mut received, mut told) = (0usize, 0usize);
    loop {
        rig.post((256 - 16usize).saturating_sub(256 - rig.rx.free()));
        if !rig.round() {
            rig.round_within(Duration::from_secs(5));
        }
        for (packet, payload) in rig.received() {
            match Op::from_wire(packet.op) {
                Some(Op::ReadWrite) => {
                    let start = received % pattern.len();
                    let first = payload.len().min(pattern.len() - start);
                    assert!(payload[..first] == pattern[start..start + first]);
                    assert!(payload[first..] == pattern[..payload.len() - first]);
                    received += payload.len();
                }
                Some(Op::CreditRequest) => told = 0,
                Some(Op::Shutdown) => {
                    assert_eq!(received, GIB);
                    writer.join().unwrap();
                    return;
                }
                other => panic!("{other:?}"),
            }
        }
        if received - told > 128 * 1024 {
            told = received;
            let update = Header {
                fwd_cnt: received as u32,
                buf_alloc: 512 * 1024,
                ..with(header, Op::CreditUpdate, 0)
            };
            rig.send(update, &[]);
        }
    }
}

/// Reads a stream to its end, comparing it with a repeated pattern; its length.
fn check_stream(mut stream: UnixStream, pattern: &[u8]) -> usize {
    let mut buffer = vec![0; 1 << 20];
    let mut total = 0;
    loop {
        let length = stream.read(&mut buffer).unwrap();
        if length == 0 {
            return total;
        }
        let mut rest = &buffer[..length];
        while !rest.is_empty() {
            let start = total % pattern.len();
            let part = rest.len().min(pattern.len() - start);
            assert!(rest[..part] == pattern[start..start + part]);
            total += part;
            rest = &rest[part..];
        }
    }
}

#[test]
fn vs07_guest_ends_sending_the_reply_still_arrives() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let (mut server, header) = dialled(&mut rig, 700, 5000);
    // The end comes while data is still queued: it must not overtake it.
    let question = noise(MAX_PAYLOAD as usize);
    for _ in 0..4 {
        rig.send_data(header, &question);
    }
    rig.send(with(header, Op::Shutdown, SHUTDOWN_SEND), &[]);
    rig.run();
    let mut asked = Vec::new();
    while asked.len() < 4 * question.len() {
        asked.extend(read(&mut server));
        rig.run();
    }
    assert_eq!(asked, question.repeat(4));
    assert_eq!(server.read(&mut [0]).unwrap(), 0, "then the end");
    assert_eq!(rig.wakeups_in(WHILE / 4), 0);
    rig.exchange();
    server.write_all(b"reply").unwrap();
    drop(server);
    let answer = rig.exchange();
    assert_eq!(data(&answer), b"reply");
    let (op, end, _) = answer.last().unwrap();
    assert_eq!((*op, end.flags), (Op::Shutdown, BOTH));
    // The guest has understood.
    rig.send(with(header, Op::Reset, 0), &[]);
    rig.run();
    assert_eq!(rig.host.connections(), 0);
    assert_eq!(rig.host.timeout(rig.now), None);
}

#[test]
fn vs07_host_ends_sending_the_reply_still_arrives() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let (mut client, port) = rig.connected(80);
    let header = Rig::header(80, port, Op::Response);
    client.write_all(b"question").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let asked = rig.exchange();
    assert_eq!(data(&asked), b"question");
    assert_eq!(ops(&asked), [Op::ReadWrite, Op::Shutdown]);
    assert_eq!(asked[1].1.flags, SHUTDOWN_SEND);
    assert_eq!(
        rig.wakeups_in(WHILE / 4),
        0,
        "an end that was seen is silent"
    );
    rig.send_data(header, b"reply");
    rig.run();
    assert_eq!(read(&mut client), b"reply");
    rig.send(with(header, Op::Shutdown, BOTH), &[]);
    assert_eq!(ops(&rig.exchange()), [Op::Reset]);
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    assert_eq!(rig.poller.registered(), 4);
}

#[test]
fn vs07_guest_ends_receiving_the_host_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let (mut client, port) = rig.connected(80);
    let header = Rig::header(80, port, Op::Response);
    rig.send(with(header, Op::Shutdown, SHUTDOWN_RECEIVE), &[]);
    rig.run();
    assert!(client.write_all(b"unwanted").is_err());
    rig.send_data(header, b"wanted");
    rig.run();
    assert_eq!(read(&mut client), b"wanted");
    assert_eq!(rig.wakeups_in(WHILE / 4), 0);
    drop(client);
    let end = rig.exchange();
    assert_eq!(ops(&end), [Op::Shutdown]);
    assert_eq!(end[0].1.flags, BOTH);
    assert_eq!(rig.poller.registered(), 4);
}

#[test]
fn vs08_host_writes_and_closes_at_once_all_bytes_come_before_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let message = noise(150_000);
    // Even without waiting for the answer to its line.
    let mut client = rig.client("CONNECT 80\n");
    client.write_all(&message).unwrap();
    drop(client);
    let port = rig.exchange()[0].1.src_port;
    rig.send(Rig::header(80, port, Op::Response), &[]);
    let packets = rig.exchange();
    assert_eq!(data(&packets), message);
    let (end, before) = packets.split_last().unwrap();
    assert_eq!((end.0, end.1.flags), (Op::Shutdown, BOTH));
    assert!(
        before
            .iter()
            .all(|(op, ..)| matches!(op, Op::ReadWrite | Op::Shutdown))
    );
    assert_eq!(
        rig.poller.registered(),
        4,
        "the socket is let go of at once"
    );
    // A guest that never answers is reset at the deadline.
    rig.advance(Duration::from_secs(8));
    assert_eq!(ops(&rig.exchange()), [Op::Reset]);
    assert_eq!(rig.host.connections(), 0);
}

#[test]
fn vs08_guest_writes_and_closes_at_once_all_bytes_come_to_a_slow_host() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let (mut server, header) = dialled(&mut rig, 700, 5000);
    // The kernel counts a whole packet's books for each byte of a trickle: the socket is full long
    // before the window is.
    let trickle = noise(2000);
    for byte in &trickle {
        rig.send_data(header, std::slice::from_ref(byte));
        rig.exchange();
    }
    let message = noise(MAX_PAYLOAD as usize);
    for _ in 0..3 {
        rig.send_data(header, &message);
    }
    rig.send(with(header, Op::Shutdown, BOTH), &[]);
    assert!(
        ops(&rig.exchange()).contains(&Op::Reset),
        "the guest need not wait"
    );
    assert!(rig.host.buffered() > 0);
    // Not even when it dials again from the same port, or resets, or its driver does.
    rig.send(with(header, Op::Request, 0), &[]);
    rig.driver.reset();
    rig.advance(Duration::from_secs(60));
    let mut received = Vec::new();
    while rig.host.buffered() > 0 {
        received.extend(read(&mut server));
        rig.run();
    }
    server.set_nonblocking(false).unwrap();
    server.read_to_end(&mut received).unwrap();
    assert_eq!(received, [trickle, message.repeat(3)].concat());
    assert_eq!(rig.host.connections(), 0);
}

#[test]
fn vs09_window_of_the_guest_is_kept_shrunk_and_reopened() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let (mut server, header) = dialled(&mut rig, 700, 5000);
    let told = |fwd_cnt, buf_alloc| Header {
        fwd_cnt,
        buf_alloc,
        ..with(header, Op::CreditUpdate, 0)
    };
    rig.send(told(0, 10_000), &[]);
    server.write_all(&noise(30_000)).unwrap();
    let first = rig.exchange();
    assert_eq!(data(&first).len(), 10_000);
    assert_eq!(first.last().unwrap().0, Op::CreditRequest);
    assert_eq!(
        rig.wakeups_in(WHILE / 4),
        0,
        "no credit is no reason to spin"
    );
    // Shrunk below what is in flight: nothing. Freed: exactly that.
    rig.send(told(4_000, 5_000), &[]);
    assert_eq!(data(&rig.exchange()).len(), 0);
    rig.send(told(10_000, 5_000), &[]);
    assert_eq!(data(&rig.exchange()).len(), 5_000);
    // 4 GiB: the rest, and memory of ours none.
    rig.send(told(10_000, u32::MAX), &[]);
    assert_eq!(data(&rig.exchange()).len(), 15_000);
    assert_eq!(rig.host.buffered(), 0);
}

#[test]
fn vs09_guest_beyond_our_window_is_reset_with_memory_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let (_server, header) = dialled(&mut rig, 700, 5000);
    let chunk = noise(MAX_PAYLOAD as usize);
    let mut reset = false;
    for _ in 0..100 {
        rig.send_data(header, &chunk);
        reset |= ops(&rig.exchange()).contains(&Op::Reset);
        assert!(rig.host.buffered() <= 256 * 1024);
        if reset {
            break;
        }
    }
    assert!(reset);
    assert_eq!(rig.host.buffered(), 0);
}

#[test]
fn one_flooding_stream_does_not_starve_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let (mut flood, _) = rig.connected(80);
    let (mut quiet, quiet_port) = rig.connected(80);
    while flood.write(&noise(65_536)).is_ok() {}
    quiet.write_all(b"x").unwrap();
    // One turn of the flood is at most 128 KiB, which is 33 buffers: within two turns the other has
    // its byte.
    let packets = rig.exchange();
    let position = packets
        .iter()
        .position(|(_, header, _)| header.src_port == quiet_port);
    assert!(position.is_some(), "{} packets", packets.len());
}

#[test]
fn few_interrupts_and_doorbells_for_many_packets() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let (mut server, header) = dialled(&mut rig, 700, 5000);
    let before = rig.driver.0.interrupt().signals();
    server
        .write_all(&noise(40 * (RX_BUFFER as usize - HEADER_LEN)))
        .unwrap();
    rig.post(100);
    rig.run();
    assert!(rig.received().len() >= 40);
    assert_eq!(rig.driver.0.interrupt().signals(), before + 1);
    // Sent without a look at the used ring in between: one doorbell is enough.
    rig.tx.needs_kick();
    let bytes = rig.host.counters().tx_bytes;
    for _ in 0..50 {
        rig.send_data(header, b"x");
    }
    rig.run();
    assert_eq!(rig.host.counters().tx_bytes, bytes + 50);
}

#[test]
fn connections_of_before_a_reset_never_reach_the_driver_after_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let (mut old, port) = rig.connected(80);
    old.write_all(b"old").unwrap();
    // Down and up again before the loop looks.
    rig.driver.reset();
    rig.start();
    assert!(rig.exchange().is_empty());
    assert_eq!(
        old.read(&mut [0])
            .map_err(|error| error.kind())
            .unwrap_or(0),
        0
    );
    rig.send(
        with(Rig::header(80, port, Op::Reset), Op::ReadWrite, 0),
        &[],
    );
    assert_eq!(ops(&rig.exchange()), [Op::Reset]);
}

#[test]
fn data_for_a_host_that_has_gone_ends_in_reset() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let (server, header) = dialled(&mut rig, 700, 5000);
    drop(server);
    assert_eq!(ops(&rig.exchange()).last(), Some(&Op::Shutdown));
    // On its way before the guest has looked.
    rig.send_data(header, b"too late");
    assert_eq!(ops(&rig.exchange()), [Op::Reset]);
    assert_eq!(rig.host.connections(), 0);
    assert_eq!(rig.host.timeout(rig.now), None);
}

#[test]
fn reset_by_a_vcpu_while_the_loop_works_does_no_harm() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let Rig {
        ref mut driver,
        ref mut host,
        ref mut poller,
        ref mut rx,
        ref mut tx,
        ref memory,
        now,
        ..
    } = rig;
    let header = Rig::header(700, 5000, Op::Shutdown).to_bytes();
    let packet = GuestAddress(0x10_0000);
    memory.write_slice(&header, packet).unwrap();
    let running = AtomicBool::new(true);
    std::thread::scope(|scope| {
        // The vCPU: sends, rings, resets and starts again without waiting for anybody.
        scope.spawn(|| {
            for _ in 0..2000 {
                assert_eq!(driver.negotiate(1 << 32), 11);
                *rx = DriverQueue::new(memory, 0x1_0000, 256, false);
                *tx = DriverQueue::new(memory, 0x2_0000, 256, false);
                driver.set_up(0, rx);
                driver.set_up(1, tx);
                assert_eq!(driver.add_status(4), 15);
                for (queue, writable) in [(&mut *rx, true), (&mut *tx, false)] {
                    for _ in 0..20 {
                        let (address, length) = (packet.0 + u64::from(writable) * 4096, 45);
                        queue.add(&[Part {
                            address,
                            length,
                            writable,
                        }]);
                    }
                }
                driver.write(0x50, 0);
                driver.write(0x50, 1);
            }
            // While the device is down, the used ring is the driver's alone.
            driver.reset();
            let zeros = [0; 0x1000];
            memory
                .write_slice(&zeros, GuestAddress(tx.used_ring()))
                .unwrap();
            assert!(tx.next_used().is_none());
            running.store(false, Ordering::SeqCst);
        });
        while running.load(Ordering::SeqCst) {
            poller.wait(Some(Duration::from_millis(1))).unwrap();
            while let Some(event) = poller.next_event() {
                let answer = host.dispatch(event.token, event.readiness, now);
                poller.answer(&event, answer);
            }
            host.settle(now);
        }
    });
    assert!(rig.host.counters().tx_packets > 0);
    rig.start();
    rig.connected(80);
    assert_eq!(rig.poller.counters().muted, 0);
}

#[test]
fn lc07_a_thousand_connections_that_nobody_reads_stay_within_their_windows() {
    allow_many_files();
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let listener = UnixListener::bind(rig.server_path(5000)).unwrap();
    let chunk = noise(MAX_PAYLOAD as usize);
    let mut servers = Vec::new();
    for port in 0..1000 {
        let header = Rig::header(port, 5000, Op::Request);
        rig.send(header, &[]);
        let answer = rig.exchange();
        // An update for the one before may come first.
        let (_, response, _) = answer.iter().find(|(op, ..)| *op == Op::Response).unwrap();
        let window = response.buf_alloc;
        servers.push(listener.accept().unwrap().0);
        // As much as the guest may ever send without a credit update: the socket takes a part of it.
        for _ in 0..window / MAX_PAYLOAD {
            rig.send_data(header, &chunk);
        }
        rig.run();
    }
    assert_eq!(rig.host.connections(), 1000);
    assert!(rig.host.buffered() <= 32 * 256 * 1024 + 968 * 64 * 1024);
    assert_eq!(rig.wakeups_in(WHILE / 4), 0);
    drop(servers);
    while rig.host.connections() > 0 {
        rig.exchange();
        rig.advance(Duration::from_secs(8));
    }
    assert_eq!(rig.host.buffered(), 0);
    assert_eq!(rig.poller.registered(), 4);
}

#[test]
fn data_in_a_row_is_delivered_whatever_comes_between_and_after_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let (mut first, one) = dialled(&mut rig, 700, 5000);
    let (mut second, two) = dialled(&mut rig, 701, 5001);
    let bytes = noise(100_000);
    // All of it is in the queue before the device looks.
    for part in bytes[..60_000].chunks(10_000) {
        rig.send_data(one, part);
    }
    rig.send_data(two, &bytes[..5000]);
    rig.send_data(one, &bytes[60_000..70_000]);
    rig.send(with(one, Op::CreditUpdate, 0), &[]);
    rig.send_data(one, &bytes[70_000..80_000]);
    rig.send_data(two, &bytes[5000..6000]);
    rig.send_data(one, &bytes[80_000..]);
    rig.send(with(one, Op::Shutdown, SHUTDOWN_SEND), &[]);
    rig.send_data(two, &bytes[6000..7000]);
    // Its length is beyond its payload: the end of its connection, but not of the data before it.
    let (len, op) = (2000, Op::ReadWrite);
    let lie = Header {
        len,
        ..with(two, op, 0)
    };
    rig.send(lie, &bytes[7000..8000]);
    rig.run();
    assert!(read(&mut first) == bytes);
    assert!(read(&mut second) == bytes[..7000]);
    assert_eq!(rig.host.connections(), 1);
}
