//! Streams bytes through the vsock device, driver and sockets and all, and prints how fast that
//! was, one JSON object a direction. The guest is a thread of this program with rings in shared
//! memory: what it shows is the device's own cost, without the machine's.
//!
//! `cargo run --release -p vmm-devices --features testing --example throughput [MIB]`
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use vmm_devices::testing::Rig;
use vmm_devices::vsock::header::{Header, MAX_PAYLOAD, Op};

fn main() {
    let mib: usize = std::env::args()
        .nth(1)
        .map_or(4096, |argument| argument.parse().expect("a number of MiB"));
    let total = mib << 20;
    report("guest_to_host", total, guest_to_host);
    report("host_to_guest", total, host_to_guest);
}

fn report(direction: &str, total: usize, run: fn(&mut Rig, usize)) {
    let folder = std::env::temp_dir().join(format!("vmm-throughput-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let mut rig = Rig::new(&folder, |_| ());
    let started = Instant::now();
    run(&mut rig, total);
    let seconds = started.elapsed().as_secs_f64();
    let counters = rig.host.counters();
    println!(
        "{{\"direction\":\"{direction}\",\"bytes\":{total},\"seconds\":{seconds:.3},\"mb_per_s\":{:.0},\
         \"packets\":{},\"wakeups\":{},\"interrupts\":{}}}",
        total as f64 / seconds / 1e6,
        counters.rx_packets + counters.tx_packets,
        rig.poller.counters().wakeups,
        rig.driver.0.interrupt().signals(),
    );
    drop(rig);
    std::fs::remove_dir_all(&folder).unwrap();
}

fn dial(rig: &mut Rig) -> (UnixStream, Header) {
    let listener = UnixListener::bind(rig.server_path(5000)).unwrap();
    let header = Rig::header(700, 5000, Op::Request);
    rig.send(header, &[]);
    assert_eq!(rig.exchange()[0].0, Op::Response);
    (listener.accept().unwrap().0, header)
}

fn guest_to_host(rig: &mut Rig, total: usize) {
    let (mut server, header) = dial(rig);
    let reader = std::thread::spawn(move || {
        let mut buffer = vec![0; 1 << 20];
        let mut seen = 0;
        while seen < total {
            seen += server.read(&mut buffer).unwrap();
        }
    });
    let chunk = vec![7; MAX_PAYLOAD as usize];
    let (mut sent, mut forwarded, mut window) = (0u64, 0u64, 256 * 1024u64);
    while sent < total as u64 {
        let length = (window - (sent - forwarded)).min(chunk.len() as u64);
        if length > 0 {
            rig.send_data(header, &chunk[..length as usize]);
            sent += length;
        }
        rig.post(16usize.saturating_sub(256 - rig.rx.free()));
        if !rig.round() && length == 0 {
            rig.round_within(Duration::from_secs(5));
        }
        for (packet, _) in rig.received() {
            window = u64::from(packet.buf_alloc);
            forwarded += u64::from(packet.fwd_cnt.wrapping_sub(forwarded as u32));
        }
    }
    while rig.host.buffered() > 0 {
        rig.round_within(Duration::from_secs(5));
    }
    reader.join().unwrap();
}

fn host_to_guest(rig: &mut Rig, total: usize) {
    let (mut server, header) = dial(rig);
    let writer = std::thread::spawn(move || {
        let chunk = vec![7; 1 << 16];
        for _ in 0..total / chunk.len() {
            server.write_all(&chunk).unwrap();
        }
        server
    });
    let (mut received, mut told) = (0, 0);
    while received < total {
        rig.post((256 - 16usize).saturating_sub(256 - rig.rx.free()));
        if !rig.round() {
            rig.round_within(Duration::from_secs(5));
        }
        for (_, payload) in rig.received() {
            received += payload.len();
        }
        if received - told > 128 * 1024 {
            told = received;
            let update = Header {
                op: Op::CreditUpdate.to_wire(),
                fwd_cnt: received as u32,
                buf_alloc: 512 * 1024,
                ..header
            };
            rig.send(update, &[]);
        }
    }
    writer.join().unwrap();
}
