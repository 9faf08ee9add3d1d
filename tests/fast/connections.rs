//! A thousand connections at once: what they cost the monitor, and that nothing of them is left.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // All of it is test code.

use std::path::Path;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::Value;
use vmm_devices::vsock::{Limits, socket_window};
use vmm_guests::{pattern, ports};
use vmm_tests::{Client, GUEST_MEMORY, Monitor, Sandbox};

const CONNECTIONS: usize = 1000;
/// The monitor's own memory for each of them, in bytes, as docs/operate.md states it; 520 were seen.
const EACH: u64 = 1024;
/// For one whose client does not read: its window, and this for the allocator; 6,300 were seen with musl's.
const ROUNDING: u64 = 8192;
/// So many have the large window.
const LARGE: usize = 32;

fn connect(socket: &Path, port: u32) -> Client {
    Client::connect(socket, &format!("CONNECT {port}\n"))
        .unwrap_or_else(|line| panic!("port {port}: {line:?}"))
        .0
}

/// Descriptors for both ends: the monitor sees to its own.
fn allow_many_files() {
    let limit = getrlimit(Resource::Nofile);
    let current = limit.maximum;
    setrlimit(Resource::Nofile, Rlimit { current, ..limit }).unwrap();
}

fn number(metrics: &Value, of: &str, name: &str) -> u64 {
    metrics[of][name].as_u64().unwrap()
}

/// A sandbox whose guest has been used once, its monitor, and what that watches and takes then.
fn used_once() -> (Sandbox, Monitor, u64, u64) {
    allow_many_files();
    let sandbox = Sandbox::start("rxbufs=64");
    let monitor = sandbox.monitor();
    connect(&sandbox.socket(), ports::ECHO).check_echo(b"once");
    let (watched, own) = at_rest(&monitor);
    (sandbox, monitor, watched, own)
}

/// Without connections: what is watched, and the monitor's own memory.
fn at_rest(monitor: &Monitor) -> (u64, u64) {
    let metrics = monitor.metrics_with(|metrics| {
        number(metrics, "vsock", "connections") == 0 && number(metrics, "vsock", "buffered") == 0
    });
    let own = monitor.own_memory(GUEST_MEMORY);
    (number(&metrics, "devices", "watched"), own)
}

#[test]
fn lc07_a_thousand_connections_at_once_echo_in_bounded_memory_and_leave_nothing() {
    let (sandbox, monitor, watched, own) = used_once();
    let socket = sandbox.socket();
    let mut peak = 0;
    for round in 0..2 {
        let mut clients: Vec<Client> = (0..CONNECTIONS)
            .map(|_| connect(&socket, ports::ECHO))
            .collect();
        let bytes = |index: usize| pattern((index * 1000 + round) as u64, 500);
        for (index, client) in clients.iter_mut().enumerate() {
            client.send(&bytes(index));
        }
        for (index, client) in clients.iter_mut().enumerate() {
            assert!(client.receive(500) == bytes(index), "connection {index}");
        }
        let metrics = monitor.metrics();
        let count = CONNECTIONS as u64;
        assert_eq!(number(&metrics, "vsock", "connections"), count);
        assert_eq!(number(&metrics, "devices", "watched"), watched + count);
        let more = monitor.own_memory(GUEST_MEMORY) - own;
        assert!(more <= count * EACH, "{more} bytes for {count} connections");
        // The second thousand takes the place of the first.
        assert!(round == 0 || more <= peak + peak / 4, "{more} after {peak}");
        peak = more;
        drop(clients);
        assert_eq!(at_rest(&monitor).0, watched);
    }
}

#[test]
fn lc07_a_thousand_connections_that_nobody_reads_fill_their_windows_and_no_more() {
    let (sandbox, monitor, watched, own) = used_once();
    let socket = sandbox.socket();
    let large = u64::from(socket_window()) * LARGE as u64;
    let small = u64::from(Limits::default().small_window) * (CONNECTIONS - LARGE) as u64;
    for _ in 0..2 {
        let mut clients: Vec<Client> = (0..CONNECTIONS)
            .map(|_| connect(&socket, ports::FLOOD))
            .collect();
        for client in &mut clients {
            client.send(&u64::MAX.to_le_bytes());
        }
        // The guest would send for ever: all that it can do in the end is wait, and so does the monitor.
        monitor.wait_until_idle(Duration::from_secs(1));
        let buffered = number(&monitor.metrics(), "vsock", "buffered");
        // It hears of credit by half windows.
        let windows = (large + small) / 2..=large + small;
        assert!(windows.contains(&buffered), "{buffered} of {windows:?}");
        let more = monitor.own_memory(GUEST_MEMORY) - own;
        let allowed = large + small + CONNECTIONS as u64 * (EACH + ROUNDING);
        assert!(more <= allowed, "{more} bytes where {allowed} are allowed");
        // Others are served meanwhile.
        connect(&socket, ports::ECHO).check_echo(b"served");
        drop(clients);
        assert_eq!(at_rest(&monitor).0, watched);
    }
}
