//! The vsock device at real speed: a polling guest in user mode against programs on the host.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // All of it is test code.

use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use vmm::exits::ExitReason;
use vmm_guests::{HASH_START, hash, pattern, ports};
use vmm_tests::{Client, FENCE, InProcess};

/// Every way in which the guest can lay packets out.
const LAYOUTS: [&str; 6] = [
    "",
    "tx=one",
    "rx=split",
    "event_idx=1",
    "rxsize=65536 tx=one event_idx=1",
    "rxsize=100 rxbufs=1",
];

/// Sends `total` bytes to the sink and compares count and hash.
fn sink(guest: &InProcess, total: usize) {
    let mut client = guest.connect(ports::SINK);
    let block = pattern(0, 1 << 20);
    let mut expected = HASH_START;
    let mut left = total;
    while left > 0 {
        let part = &block[..left.min(block.len())];
        client.send(part);
        expected = hash(expected, part);
        left -= part.len();
    }
    client.finish();
    let answer = client.rest();
    assert_eq!(answer.len(), 16, "a reply after the host's half-close");
    let word = |at: usize| u64::from_le_bytes(answer[at..at + 8].try_into().unwrap());
    assert_eq!((word(0), word(8)), (total as u64, expected));
}

/// Receives `total` bytes of the source and compares them.
fn source(guest: &InProcess, total: u64) {
    let mut client = guest.connect(ports::SOURCE);
    client.send(&total.to_le_bytes());
    let mut at = 0;
    while at < total {
        let length = (total - at).min(1 << 20) as usize;
        let came = client.receive(length);
        assert!(
            came == pattern(at, length),
            "bytes {at} to {} differ",
            at + length as u64
        );
        at += length as u64;
    }
    assert!(
        client.rest().is_empty(),
        "the guest's half-close is the end"
    );
}

#[test]
fn vs06_bytes_are_intact_in_every_layout_of_packets() {
    for layout in LAYOUTS {
        let guest = InProcess::boot_vsock(layout);
        let total = if layout.contains("rxsize=100") {
            1 << 20
        } else {
            16 << 20
        };
        sink(&guest, total + 12_345);
        source(&guest, total as u64 + 54_321);
        for length in [1, 2, 43, 44, 45, 4096, 65_535, 65_536, 65_537] {
            guest.connect(ports::ECHO).check_echo(&pattern(3, length));
        }
    }
}

#[test]
fn vs06_one_gib_each_way_is_intact() {
    let guest = InProcess::boot_vsock("rxsize=65536");
    let total = 1 << 30;
    let block = pattern(0, 1 << 20);
    let mut client = guest.connect(ports::SINK);
    for _ in 0..total / block.len() {
        client.send(&block);
    }
    client.finish();
    let answer = client.rest();
    let expected = (0..total / block.len()).fold(HASH_START, |sum, _| hash(sum, &block));
    assert_eq!(answer[..8], (total as u64).to_le_bytes());
    assert_eq!(answer[8..], expected.to_le_bytes());

    let mut client = guest.connect(ports::SOURCE);
    client.send(&(total as u64).to_le_bytes());
    let mut sum = HASH_START;
    for _ in 0..total / block.len() {
        sum = hash(sum, &client.receive(block.len()));
    }
    assert!(client.rest().is_empty());
    let expected = (0..total / block.len()).fold(HASH_START, |sum, index| {
        hash(sum, &pattern((index * block.len()) as u64, block.len()))
    });
    assert_eq!(sum, expected);
}

#[test]
fn vs07_host_half_close_then_the_rest_and_the_reply_arrive() {
    let guest = InProcess::boot_vsock("");
    for length in [0, 1, 100_000] {
        sink(&guest, length);
        let mut client = guest.connect(ports::ECHO);
        let bytes = pattern(9, length.min(60_000));
        client.send(&bytes);
        client.finish();
        assert!(
            client.rest() == bytes,
            "an echo outlives the host's half-close"
        );
    }
}

#[test]
fn vs07_guest_half_close_then_the_hosts_bytes_still_arrive() {
    let guest = InProcess::boot_vsock("");
    let mut client = guest.connect(ports::HALF);
    assert_eq!(client.rest(), b"hello");
    let bytes = pattern(1, 300_000);
    client.send(&bytes);
    drop(client);
    let sum = hash(HASH_START, &bytes);
    guest.console.wait_for(&format!("half: 300000 {sum:#x}\n"));
}

#[test]
fn vs08_host_writes_and_closes_at_once_and_every_byte_arrives_before_the_end() {
    let guest = InProcess::boot_vsock("rxbufs=2");
    for round in 1..=50 {
        let bytes = pattern(round, 1000 * round as usize + 150_000);
        let mut client = guest.connect(ports::COUNT);
        client.send(&bytes);
        drop(client);
        let (length, sum) = (bytes.len(), hash(HASH_START, &bytes));
        guest
            .console
            .wait_for(&format!("half: {length} {sum:#x}\n"));
    }
}

#[test]
fn vs01_no_rx_buffers_while_the_host_writes_then_closes_is_no_spin_and_delivered_on_refill() {
    // Two buffers of 4 KiB, then none for 2e9 cycles: most of a second.
    let guest = InProcess::boot_vsock("rxbufs=2 hold=2000000000");
    let mut client = guest.connect(ports::STARVE);
    let bytes = pattern(5, 40_000);
    client.send(&bytes);
    client.finish();
    // Any round trip through the loop: what the write has caused is done when it is answered.
    assert!(Client::connect(&guest.socket(), "NONSENSE\n").is_err());
    let (before, start) = (guest.sleeps(), Instant::now());
    guest.console.wait_for("vsock: refilled");
    let (woken, elapsed) = (guest.sleeps() - before, start.elapsed());
    assert!(
        elapsed > Duration::from_millis(200),
        "starved for {elapsed:?} only"
    );
    // The case allows two in 200 ms; a spin would make thousands.
    let allowed = 2 * elapsed.as_millis().div_ceil(200);
    assert!(
        u128::from(woken) <= allowed,
        "the loop woke {woken} times in {elapsed:?} with nothing to do"
    );
    let answer = client.rest();
    assert_eq!(answer[..8], 40_000u64.to_le_bytes());
}

#[test]
fn vs02_host_peers_that_die_in_mid_stream_leave_nothing_behind() {
    let guest = InProcess::boot_vsock("");
    let mut echo = guest.connect(ports::ECHO);
    echo.check_echo(b"before");
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let baseline = descriptors();
    for _ in 0..100 {
        let mut client = guest.connect(ports::SOURCE);
        client.send(&u64::MAX.to_le_bytes());
        client.receive(100_000);
    }
    // A connection that is answered after them: the loop is done with theirs.
    guest.connect(ports::ECHO).check_echo(b"after");
    echo.check_echo(b"still here");
    assert!(
        descriptors() <= baseline + 8,
        "{} descriptors, {baseline} before",
        descriptors()
    );
}

#[test]
fn vs09_a_host_that_does_not_read_stops_its_own_stream_only() {
    let guest = InProcess::boot_vsock("");
    let mut deaf = guest.connect(ports::SOURCE);
    let total = 20_000_000u64;
    deaf.send(&total.to_le_bytes());
    let mut echo = guest.connect(ports::ECHO);
    for _ in 0..200 {
        echo.check_echo(&pattern(0, 10_000));
    }
    let came = deaf.receive(total as usize);
    assert!(came == pattern(0, total as usize));
    assert!(deaf.rest().is_empty());
}

#[test]
fn vs10_forged_packets_change_nothing_for_honest_streams() {
    let guest = InProcess::boot_vsock("");
    let mut honest = guest.connect(ports::ECHO);
    honest.check_echo(b"before");
    for _ in 0..20 {
        guest.connect(ports::FORGE).check_echo(b"forged around");
        honest.check_echo(b"undisturbed");
    }
}

#[test]
fn vs11_connect_before_the_guest_listens_is_answered_at_once() {
    let guest = InProcess::boot_with_vsock(vmm_guests::ENDS, "say=up end=spin", FENCE);
    guest.console.wait_for("up");
    let start = Instant::now();
    let line = Client::connect(&guest.socket(), "CONNECT 7\n").unwrap_err();
    assert!(line.starts_with("ERR NOT_READY "), "{line:?}");
    assert!(start.elapsed() < Duration::from_millis(500));

    let guest = InProcess::boot_vsock("");
    let start = Instant::now();
    let line = Client::connect(&guest.socket(), "CONNECT 4242\n").unwrap_err();
    assert!(
        line.starts_with("ERR "),
        "a port without a listener: {line:?}"
    );
    assert!(start.elapsed() < Duration::from_millis(500));
}

#[test]
fn vs11_a_silent_guest_has_a_typed_answer_within_its_deadline() {
    let guest = InProcess::boot_vsock("");
    let start = Instant::now();
    let line =
        Client::connect(&guest.socket(), &format!("CONNECT {}\n", ports::SILENT)).unwrap_err();
    assert!(line.starts_with("ERR "), "{line:?}");
    assert!(
        start.elapsed() < Duration::from_secs(7),
        "{:?}",
        start.elapsed()
    );
}

#[test]
fn vs12_a_full_backlog_on_the_host_blocks_nothing() {
    let guest = InProcess::boot_vsock("");
    let listener = UnixListener::bind(guest.host_port(600)).unwrap();
    // One place in the backlog, never taken from it.
    rustix::net::listen(&listener, 0).unwrap();
    let mut echo = guest.connect(ports::ECHO);
    let mut dialling = Vec::new();
    for _ in 0..10 {
        let mut client = guest.connect(ports::DIAL);
        client.send(&600u32.to_le_bytes());
        echo.check_echo(b"the loop goes on");
        dialling.push(client);
    }
    let refused = dialling.last_mut().unwrap().receive(7);
    assert_eq!(refused, b"refused", "no room is a reset");
}

#[test]
fn the_guest_dials_out_to_the_host() {
    let guest = InProcess::boot_vsock("");
    let listener = UnixListener::bind(guest.host_port(700)).unwrap();
    let mut inside = guest.connect(ports::DIAL);
    inside.send(&700u32.to_le_bytes());
    let (stream, _) = listener.accept().unwrap();
    let mut outside = Client(stream);
    let bytes = pattern(2, 50_000);
    inside.send(&bytes);
    assert!(outside.receive(bytes.len()) == bytes);
    outside.send(&bytes);
    assert!(inside.receive(bytes.len()) == bytes);
    outside.finish();
    assert!(inside.rest().is_empty(), "an end is relayed");

    let mut nobody = guest.connect(ports::DIAL);
    nobody.send(&701u32.to_le_bytes());
    assert_eq!(nobody.rest(), b"refused", "no listener is a reset");
}

#[test]
fn a_reset_by_the_guest_ends_the_hosts_stream_and_no_other() {
    let guest = InProcess::boot_vsock("");
    let mut echo = guest.connect(ports::ECHO);
    let mut client = guest.connect(ports::RESET);
    client.send(b"x");
    assert!(client.rest().is_empty());
    echo.check_echo(b"others live");
}

#[test]
fn ge11_a_client_of_another_generation_is_told_at_once() {
    let guest = InProcess::boot_vsock("");
    let nonce: String = FENCE
        .nonce
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let ask = |tag: &str| Client::connect(&guest.socket(), &format!("CONNECT 7 {tag}\n"));
    for stale in [
        format!("6-{nonce}"),
        format!("8-{nonce}"),
        format!("7-{}", "0".repeat(32)),
    ] {
        let line = ask(&stale).unwrap_err();
        assert!(line.starts_with("ERR STALE "), "{line:?}");
        assert!(!line.contains(&nonce), "a nonce is never shown");
    }
    let (mut client, line) = ask(&format!("7-{nonce}")).unwrap();
    assert!(
        line.ends_with(" 7\n"),
        "the answer names the generation: {line:?}"
    );
    client.check_echo(b"mine");

    let mut fence = FENCE;
    fence.require_generation = true;
    let guest = InProcess::boot_with_vsock(vmm_guests::VSOCK, "", fence);
    guest.console.wait_for("vsock: cid");
    let line = Client::connect(&guest.socket(), "CONNECT 7\n").unwrap_err();
    assert!(line.starts_with("ERR REFUSED "), "{line:?}");
}

#[test]
fn ge11_a_thousand_stale_clients_cost_a_stream_no_byte() {
    const CHUNK: usize = 16 << 10;
    let guest = InProcess::boot_vsock("");
    let mut client = guest.connect(ports::SOURCE);
    client.send(&(1000 * CHUNK as u64).to_le_bytes());
    let stale = format!("CONNECT 7 7-{}\n", "0".repeat(32));
    for chunk in 0..1000 {
        let line = Client::connect(&guest.socket(), &stale).unwrap_err();
        assert!(line.starts_with("ERR STALE "), "{line:?}");
        assert!(client.receive(CHUNK) == pattern((chunk * CHUNK) as u64, CHUNK));
    }
    assert!(client.rest().is_empty());
}

#[test]
fn many_streams_at_once_never_mix() {
    let guest = InProcess::boot_vsock("event_idx=1");
    let mut clients: Vec<Client> = (0..48).map(|_| guest.connect(ports::ECHO)).collect();
    for round in 0..40 {
        for (index, client) in clients.iter_mut().enumerate() {
            client.send(&pattern(index as u64 * 1000 + round, 3000));
        }
        for (index, client) in clients.iter_mut().enumerate() {
            assert!(client.receive(3000) == pattern(index as u64 * 1000 + round, 3000));
        }
    }
    drop(clients);
    for _ in 0..500 {
        guest.connect(ports::ECHO).check_echo(b"one after another");
    }
    guest.connect(ports::POWER).send(b"x");
    assert_eq!(guest.end(), ExitReason::Shutdown);
    assert!(!guest.socket().exists(), "the socket goes with the machine");
}
