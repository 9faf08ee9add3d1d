//! What a hostile driver puts in its queues and headers.

use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::testing::{Part, read};
use crate::vsock::header::{HEADER_LEN, MAX_PAYLOAD};

const NEEDS_RESET: u32 = 64;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const BUFFER: u64 = 0x10_0000;

/// The device has given up and is quiet, and comes up again after a reset.
fn assert_needs_reset(rig: &mut Rig, what: &str) {
    rig.driver.write(0x50, 0);
    rig.driver.write(0x50, 1);
    rig.run();
    assert_eq!(rig.driver.status() & NEEDS_RESET, NEEDS_RESET, "{what}");
    assert_eq!(
        rig.driver.take_interrupt() & 2,
        2,
        "{what}: the driver is told"
    );
    assert_eq!(rig.host.connections(), 0, "{what}");
    assert!(rig.wakeups_in(WHILE / 20) <= 1, "{what}: spins");
    rig.start();
    rig.connected(80);
}

#[test]
fn ho01_tx_chains_without_end_or_outside_of_memory_need_a_reset() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    type Break = fn(&mut Rig);
    let breaks: [(&str, Break); 10] = [
        ("loop of one", |rig| {
            rig.tx.write_descriptor(0, BUFFER, 64, NEXT, 0);
            rig.tx.publish(0);
        }),
        ("loop of two", |rig| {
            rig.tx.write_descriptor(0, BUFFER, 64, NEXT, 1);
            rig.tx.write_descriptor(1, BUFFER, 64, NEXT, 0);
            rig.tx.publish(0);
        }),
        ("next beyond the table", |rig| {
            rig.tx.write_descriptor(0, BUFFER, 64, NEXT, 256);
            rig.tx.publish(0);
        }),
        ("head beyond the table", |rig| rig.tx.publish(256)),
        ("buffer outside of memory", |rig| {
            rig.tx.write_descriptor(0, 1 << 40, 64, 0, 0);
            rig.tx.publish(0);
        }),
        ("buffer across the end of memory", |rig| {
            rig.tx.write_descriptor(0, (32 << 20) - 10, 64, 0, 0);
            rig.tx.publish(0);
        }),
        ("address that overflows", |rig| {
            rig.tx.write_descriptor(0, u64::MAX - 10, 64, 0, 0);
            rig.tx.publish(0);
        }),
        ("chain of 4 GiB", |rig| {
            for index in 0..255 {
                rig.tx
                    .write_descriptor(index, BUFFER, 31 << 20, NEXT, index + 1);
            }
            rig.tx.write_descriptor(255, BUFFER, 31 << 20, 0, 0);
            rig.tx.publish(0);
        }),
        ("indirect table in an indirect table", |rig| {
            rig.tx.write_descriptor(0, BUFFER, 16, INDIRECT, 0);
            let nested = [0x1000u64, 16 | u64::from(INDIRECT) << 32];
            rig.memory
                .write_obj(nested[0], GuestAddress(BUFFER))
                .unwrap();
            rig.memory
                .write_obj(nested[1], GuestAddress(BUFFER + 8))
                .unwrap();
            rig.tx.publish(0);
        }),
        ("available index that runs ahead", |rig| {
            rig.tx.write_index(1000);
        }),
    ];
    for (what, break_it) in breaks {
        break_it(&mut rig);
        assert_needs_reset(&mut rig, what);
    }
}

#[test]
fn ho01_rx_chains_without_room_or_outside_of_memory_need_a_reset() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    type Break = fn(&mut Rig);
    let breaks: [(&str, Break); 6] = [
        ("loop", |rig| {
            rig.rx.write_descriptor(0, BUFFER, 64, NEXT | WRITE, 0);
            rig.rx.publish(0);
        }),
        ("read-only", |rig| {
            rig.rx.write_descriptor(0, BUFFER, 4096, 0, 0);
            rig.rx.publish(0);
        }),
        ("zero length", |rig| {
            rig.rx.write_descriptor(0, BUFFER, 0, WRITE, 0);
            rig.rx.publish(0);
        }),
        ("header only", |rig| {
            rig.rx
                .write_descriptor(0, BUFFER, HEADER_LEN as u32, WRITE, 0);
            rig.rx.publish(0);
        }),
        ("outside of memory", |rig| {
            rig.rx.write_descriptor(0, 1 << 40, 4096, WRITE, 0);
            rig.rx.publish(0);
        }),
        ("available index that runs ahead", |rig| {
            rig.rx.write_index(1000);
        }),
    ];
    for (what, break_it) in breaks {
        // Empty queues; and something must be owed, or the queue is not even looked at.
        rig.start();
        rig.send(Rig::header(1, 2, Op::Shutdown), &[]);
        break_it(&mut rig);
        assert_needs_reset(&mut rig, what);
    }
}

#[test]
fn ho01_short_and_empty_packets_are_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let (mut server, header) = dialled(&mut rig, 700, 5000);
    for length in [0, 1, HEADER_LEN as u32 - 1] {
        rig.tx.add(&[Part {
            address: BUFFER,
            length,
            writable: false,
        }]);
        rig.kick(1);
    }
    // Only what the device may write.
    rig.tx.add(&[Part {
        address: BUFFER,
        length: 4096,
        writable: true,
    }]);
    rig.kick(1);
    rig.run();
    assert_eq!(rig.host.counters().malformed, 4);
    // The device lives, and so does the connection.
    rig.send_data(header, b"alive");
    rig.run();
    assert_eq!(read(&mut server), b"alive");
    assert_eq!(rig.driver.status() & NEEDS_RESET, 0);
}

#[test]
fn ho01_zero_length_descriptors_between_are_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let (mut server, header) = dialled(&mut rig, 700, 5000);
    let packet = Header {
        len: 5,
        ..with(header, Op::ReadWrite, 0)
    };
    rig.send_split(packet, b"hello", &[0, 0, 10, 10, 44, 44, 46, 46]);
    rig.run();
    assert_eq!(read(&mut server), b"hello");
}

#[test]
fn ho01_head_repeated_in_flight_is_survived() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let (mut server, header) = dialled(&mut rig, 700, 5000);
    let packet = Header {
        len: 1,
        ..with(header, Op::ReadWrite, 0)
    };
    rig.send(packet, b"x");
    let head = rig.tx.add(&[Part {
        address: BUFFER,
        length: HEADER_LEN as u32 + 1,
        writable: false,
    }]);
    rig.memory
        .write_slice(
            &[&packet.to_bytes()[..], b"y"].concat(),
            GuestAddress(BUFFER),
        )
        .unwrap();
    for _ in 0..200 {
        rig.tx.publish(head);
    }
    rig.kick(1);
    rig.run();
    assert_eq!(read(&mut server).len(), 202);
    assert_eq!(rig.driver.status() & NEEDS_RESET, 0);
}

#[test]
fn ho02_header_rewritten_after_it_was_read_has_no_effect() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let (mut server, header) = dialled(&mut rig, 700, 5000);
    // The guest rewrites the length of its packet without pause while the device reads it: each
    // time it is seen as the one or the other, and what arrives adds up to what was counted.
    let packet = Header {
        len: 1,
        ..with(header, Op::ReadWrite, 0)
    };
    let bytes = [&packet.to_bytes()[..], &[b'x'; 100]].concat();
    rig.memory
        .write_slice(&bytes, GuestAddress(BUFFER))
        .unwrap();
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let rewriter = std::thread::spawn({
        let (memory, stop) = (rig.memory.clone(), std::sync::Arc::clone(&stop));
        move || {
            let length = GuestAddress(BUFFER + 24);
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                memory.write_obj(100u32, length).unwrap();
                memory.write_obj(u32::MAX, length).unwrap();
                memory.write_obj(1u32, length).unwrap();
            }
        }
    });
    let mut received = 0;
    for _ in 0..2000 {
        rig.tx.add(&[Part {
            address: BUFFER,
            length: bytes.len() as u32,
            writable: false,
        }]);
        rig.kick(1);
        rig.run();
        let came = read(&mut server);
        assert!(matches!(came.len(), 0 | 1 | 100), "{}", came.len());
        received += came.len() as u64;
        while rig.tx.next_used().is_some() {}
        if rig.host.connections() == 0 {
            // The absurd length was seen: reset, which is right too. Dial again.
            drop(std::fs::remove_file(rig.server_path(5000)));
            rig.exchange();
            (server, _) = dialled(&mut rig, 700, 5000);
        }
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    rewriter.join().unwrap();
    assert_eq!(rig.host.counters().tx_bytes, received);
}

#[test]
fn ho03_every_header_field_at_0_1_max_and_max_plus_1() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let payload = noise(MAX_PAYLOAD as usize + 1);
    type Set = fn(&mut Header, u64);
    let fields: [(&str, u64, Set); 10] = [
        ("src_cid", u64::MAX, |header, value| header.src_cid = value),
        ("dst_cid", u64::MAX, |header, value| header.dst_cid = value),
        ("src_port", u64::from(u32::MAX), |header, value| {
            header.src_port = value as u32;
        }),
        ("dst_port", u64::from(u32::MAX), |header, value| {
            header.dst_port = value as u32;
        }),
        ("len", u64::from(MAX_PAYLOAD), |header, value| {
            header.len = value as u32;
        }),
        ("kind", 1, |header, value| header.kind = value as u16),
        ("op", 7, |header, value| header.op = value as u16),
        ("flags", 3, |header, value| header.flags = value as u32),
        ("buf_alloc", u64::from(u32::MAX), |header, value| {
            header.buf_alloc = value as u32;
        }),
        ("fwd_cnt", u64::from(u32::MAX), |header, value| {
            header.fwd_cnt = value as u32;
        }),
    ];
    let mut port = 700;
    for op in 0..=8 {
        for (name, max, set) in fields {
            for value in [0, 1, max, max.wrapping_add(1), u64::MAX] {
                port += 1;
                drop(std::fs::remove_file(rig.server_path(5000)));
                let (_server, header) = dialled(&mut rig, port, 5000);
                let mut packet = Header {
                    op,
                    len: 100,
                    ..header
                };
                set(&mut packet, value);
                rig.send(packet, &payload);
                rig.exchange();
                assert!(rig.host.buffered() <= 256 * 1024, "{name} {value}");
                assert_eq!(rig.driver.status() & NEEDS_RESET, 0, "{name} {value}");
                // Whatever it did, the connection can be ended.
                rig.send(with(header, Op::Reset, 0), &[]);
                rig.run();
                assert_eq!(rig.host.connections(), 0, "{op} {name} {value}");
            }
        }
    }
}

#[test]
fn ho01_connections_that_come_and_go_without_a_buffer_posted_do_not_pile_up() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let server = UnixListener::bind(rig.server_path(5000)).unwrap();
    // One stays, so that what is owed to it heads every list.
    rig.send(Rig::header(1, 5000, Op::Request), &[]);
    rig.run();
    let mut kept = server.accept().unwrap().0;
    std::io::Write::write_all(&mut kept, b"banner").unwrap();
    for port in 2..5000 {
        let header = Rig::header(port, 5000, Op::Request);
        rig.send(header, &[]);
        rig.run();
        let mut client = server.accept().unwrap().0;
        std::io::Write::write_all(&mut client, b"banner").unwrap();
        rig.run();
        rig.send(with(header, Op::Reset, 0), &[]);
        rig.run();
    }
    assert_eq!(rig.host.connections(), 1);
    assert!(rig.host.pending() <= 4, "{}", rig.host.pending());
    let packets = rig.exchange();
    assert_eq!(data(&packets), b"banner");
}
