//! Who may connect to whom, and what they are told.

use std::collections::HashSet;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Gid, Uid};

use super::*;
use crate::testing::read;
use crate::vsock::{Fence, Token, VsockConfig, create};

const TAG: &str = "7-000102030405060708090a0b0c0d0e0f";
const SECOND: Duration = Duration::from_secs(1);

#[test]
fn tagged_and_plain_clients_are_answered_in_kind() {
    let folder = tempfile::tempdir().unwrap();
    let ready = Arc::new(AtomicBool::new(true));
    let mut rig = Rig::new(folder.path(), |config| {
        config.agent_ready = Arc::clone(&ready);
    });
    let (_plain, first) = rig.connected(5000);
    let mut tagged = rig.client(&format!("CONNECT 1000 {TAG}\n"));
    let request = rig.exchange()[0].1;
    assert_ne!(request.src_port, first);
    assert_eq!(request.dst_port, 1000);
    rig.send(Rig::header(1000, request.src_port, Op::Response), &[]);
    rig.run();
    let expected = format!("OK {} 7\n", request.src_port);
    assert_eq!(read(&mut tagged), expected.as_bytes());
}

#[test]
fn line_in_pieces_with_data_behind_it_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let mut client = rig.client("CONNECT");
    rig.run();
    client.write_all(b" 50").unwrap();
    rig.run();
    client.write_all(b"00\nhello\nCONNECT 1\n").unwrap();
    let request = rig.exchange()[0].1;
    rig.send(Rig::header(5000, request.src_port, Op::Response), &[]);
    assert_eq!(data(&rig.exchange()), b"hello\nCONNECT 1\n");
}

#[test]
fn ge11_stale_client_uses_nothing_of_the_guest() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    rig.post(8);
    rig.run();
    for _ in 0..1000 {
        let mut client = rig.client("CONNECT 1000 6-000102030405060708090a0b0c0d0e0f\n");
        rig.run();
        assert_eq!(read(&mut client), b"ERR STALE this is generation 7\n");
    }
    assert!(rig.received().is_empty());
    assert_eq!(rig.host.counters().rx_packets, 0);
    assert_eq!(rig.host.counters().refusals, 1000);
    assert_eq!(rig.host.connections(), 0);
}

#[test]
fn ge11_a_thousand_stale_clients_cost_a_stream_no_byte_and_no_descriptor() {
    const ROUNDS: u64 = 1000;
    let stream = |stale: bool| {
        let folder = tempfile::tempdir().unwrap();
        let mut rig = Rig::new(folder.path(), |_| ());
        let (mut client, port) = rig.connected(80);
        let header = Rig::header(80, port, Op::ReadWrite);
        for round in 0..ROUNDS {
            let [up, down] = [round, !round].map(u64::to_le_bytes);
            client.write_all(&down).unwrap();
            rig.send_data(header, &up);
            if stale {
                let nonce = "000102030405060708090a0b0c0d0e0f";
                let mut wrong = rig.client(&format!("CONNECT 5000 {}-{nonce}\n", round + 8));
                rig.run();
                assert_eq!(read(&mut wrong), b"ERR STALE this is generation 7\n");
            }
            assert_eq!(data(&rig.exchange()), down);
            assert_eq!(read(&mut client), up);
        }
        assert_eq!(rig.poller.registered(), 5, "and the stream");
        let counters = rig.host.counters();
        assert_eq!(counters.refusals, if stale { ROUNDS } else { 0 });
        (counters.rx_packets, counters.rx_bytes, counters.tx_packets)
    };
    assert_eq!(stream(true), stream(false));
}

#[test]
fn vs11_connect_before_the_guest_listens_is_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let mut client = rig.client("CONNECT 5000\n");
    let request = rig.exchange()[0].1;
    rig.send(Rig::header(5000, request.src_port, Op::Reset), &[]);
    rig.run();
    assert_eq!(
        read(&mut client),
        b"ERR REFUSED the guest refused the connection\n"
    );
    assert_eq!(rig.host.connections(), 0);
    assert!(rig.exchange().is_empty(), "a reset is not answered");
}

#[test]
fn vs11_silent_guest_is_answered_for_at_the_deadline() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let mut client = rig.client("CONNECT 5000\n");
    let request = rig.exchange()[0].1;
    rig.advance(5 * SECOND - Duration::from_millis(1));
    assert_eq!(read(&mut client), b"");
    assert_eq!(rig.host.timeout(rig.now), Some(Duration::from_millis(1)));
    rig.advance(Duration::from_millis(1));
    assert_eq!(
        read(&mut client),
        b"ERR NOT_READY the guest did not answer in time\n"
    );
    // The guest is told, and what it says too late has no effect.
    assert_eq!(ops(&rig.exchange()), [Op::Reset]);
    rig.send(Rig::header(5000, request.src_port, Op::Response), &[]);
    assert_eq!(ops(&rig.exchange()), [Op::Reset]);
    assert_eq!(rig.host.timeout(rig.now), None);
}

#[test]
fn vs11_guest_without_driver_or_agent_is_not_ready() {
    let folder = tempfile::tempdir().unwrap();
    let ready = Arc::new(AtomicBool::new(false));
    let mut rig = Rig::asleep(folder.path(), |config| {
        config.agent_ready = Arc::clone(&ready);
    });
    let mut client = rig.client("CONNECT 5000\n");
    rig.run();
    assert_eq!(
        read(&mut client),
        b"ERR NOT_READY the guest has no vsock driver yet\n"
    );
    rig.start();
    let mut client = rig.client(&format!("CONNECT 1000 {TAG}\n"));
    rig.run();
    assert_eq!(read(&mut client), b"ERR NOT_READY the agent is not ready\n");
    ready.store(true, Ordering::SeqCst);
    let _client = rig.client(&format!("CONNECT 1000 {TAG}\n"));
    assert_eq!(ops(&rig.exchange()), [Op::Request]);
}

#[test]
fn vs11_reset_while_a_client_waits_is_told_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let mut client = rig.client("CONNECT 5000\n");
    rig.run();
    rig.driver.reset();
    rig.run();
    assert_eq!(
        read(&mut client),
        b"ERR NOT_READY the guest's driver was reset\n"
    );
}

#[test]
fn vs12_full_backlog_does_not_block_the_loop() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let path = SocketAddrUnix::new(rig.server_path(5000)).unwrap();
    let socket = |flags| {
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
    };
    let server = socket(SocketFlags::empty());
    rustix::net::bind(&server, &path).unwrap();
    rustix::net::listen(&server, 0).unwrap();
    let mut waiting: Vec<OwnedFd> = Vec::new();
    loop {
        let client = socket(SocketFlags::NONBLOCK);
        if rustix::net::connect(&client, &path).is_err() {
            break;
        }
        waiting.push(client);
    }
    let request = Rig::header(700, 5000, Op::Request);
    rig.send(request, &[]);
    assert_eq!(ops(&rig.exchange()), [Op::Reset]);
    // Others are served meanwhile, and so is it once there is room.
    let _other = rig.connected(80);
    rustix::net::accept(&server).unwrap();
    rig.send(request, &[]);
    assert_eq!(ops(&rig.exchange()), [Op::Response]);
}

#[test]
fn port_that_nobody_serves_is_reset_and_one_can_be_mapped() {
    let folder = tempfile::tempdir().unwrap();
    let mapped = folder.path().join("elsewhere");
    let listener = UnixListener::bind(&mapped).unwrap();
    let mut rig = Rig::new(folder.path(), |config| {
        config.guest_ports.insert(6000, mapped);
    });
    // Nothing there; a file that is no socket; a socket whose server has gone.
    std::fs::write(rig.server_path(5001), "").unwrap();
    drop(UnixListener::bind(rig.server_path(5002)).unwrap());
    for port in [5000, 5001, 5002, 0, u32::MAX] {
        rig.send(Rig::header(700, port, Op::Request), &[]);
        assert_eq!(ops(&rig.exchange()), [Op::Reset], "{port}");
    }
    rig.send(Rig::header(700, 6000, Op::Request), &[]);
    assert_eq!(ops(&rig.exchange()), [Op::Response]);
    assert!(listener.accept().is_ok());
}

#[test]
fn se03_one_control_connection_from_a_privileged_port_only() {
    let folder = tempfile::tempdir().unwrap();
    let (sender, dialled) = mpsc::channel();
    let mut rig = Rig::new(folder.path(), |config| {
        config.control = Some(Box::new(move |stream| sender.send(stream).unwrap()));
    });
    let dial = |port| Rig::header(port, 1001, Op::Request);
    for (port, answer) in [
        (1024, Op::Reset),
        (u32::MAX, Op::Reset),
        (1023, Op::Response),
        (1, Op::Reset),
    ] {
        rig.send(dial(port), &[]);
        assert_eq!(ops(&rig.exchange()), [answer], "{port}");
    }
    let mut control: UnixStream = dialled.try_recv().unwrap();
    assert!(dialled.try_recv().is_err());
    // It works in both directions, without ever blocking its owner.
    rig.send_data(dial(1023), b"ready");
    rig.run();
    assert_eq!(read(&mut control), b"ready");
    control.write_all(b"life").unwrap();
    assert_eq!(data(&rig.exchange()), b"life");
    // Once it has ended, the agent may dial again.
    rig.send(with(dial(1023), Op::Reset, 0), &[]);
    rig.send(dial(1022), &[]);
    assert_eq!(ops(&rig.exchange()), [Op::Response]);
    assert!(dialled.try_recv().is_ok());
}

#[test]
fn vs14_a_thousand_half_open_clients_are_bounded_in_number_and_time() {
    allow_many_files();
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let silent: Vec<UnixStream> = (0..1000).map(|_| rig.client("")).collect();
    rig.run();
    assert_eq!(rig.host.half_open(), 256);
    assert!(rig.wakeups_in(WHILE) <= 2, "the backlog must not spin");
    // A client that speaks gets through although all places are taken by silent ones.
    let started = rig.now;
    let mut polite = rig.client("CONNECT 1000\n");
    while read(&mut polite).is_empty() {
        let step = rig.host.timeout(rig.now).unwrap();
        rig.advance(step);
    }
    assert!(rig.now - started <= 4 * SECOND);
    // The others had their time.
    rig.advance(10 * SECOND);
    rig.advance(10 * SECOND);
    assert_eq!(rig.host.half_open(), 0);
    assert_eq!(
        rig.poller.registered(),
        4,
        "three doorbells and the listener"
    );
    for mut client in silent {
        assert_eq!(read(&mut client), b"ERR REFUSED no request in time\n");
    }
}

#[test]
fn client_that_goes_away_or_never_ends_its_line_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    drop(rig.client("CONNECT 50"));
    let mut endless = rig.client(&"x".repeat(1000));
    rig.run();
    assert!(read(&mut endless).starts_with(b"ERR REFUSED line too long\n"));
    assert_eq!(rig.host.half_open(), 0);
    assert_eq!(rig.poller.registered(), 4);
}

#[test]
fn ho06_peer_of_another_user_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let open = |path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let mode = std::fs::metadata(rig.socket())
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    // Even where the modes would let it in.
    open(folder.path(), 0o755);
    open(rig.socket(), 0o666);
    let path = rig.socket().to_owned();
    let stranger = if rustix::process::geteuid().is_root() {
        // Credentials are a thread's: this one becomes somebody else and ends.
        let connect = move || {
            rustix::thread::set_thread_res_gid(
                Gid::from_raw(65534),
                Gid::from_raw(65534),
                Gid::from_raw(65534),
            )
            .unwrap();
            rustix::thread::set_thread_res_uid(
                Uid::from_raw(65534),
                Uid::from_raw(65534),
                Uid::from_raw(65534),
            )
            .unwrap();
            UnixStream::connect(path).unwrap()
        };
        std::thread::spawn(connect).join().unwrap()
    } else {
        rig.host
            .pretend_owner(rustix::process::geteuid().as_raw() + 1);
        UnixStream::connect(path).unwrap()
    };
    rig.run();
    let mut stranger = stranger;
    stranger.set_nonblocking(true).unwrap();
    assert_eq!(
        read(&mut stranger),
        b"ERR REFUSED this sandbox belongs to another user\n"
    );
    assert_eq!(rig.host.half_open(), 0);
}

#[test]
fn connections_beyond_the_limit_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |config| config.limits.connections = 2);
    let _first = rig.connected(80);
    let _second = rig.connected(80);
    let mut third = rig.client("CONNECT 80\n");
    rig.run();
    assert_eq!(read(&mut third), b"ERR REFUSED too many connections\n");
    rig.send(Rig::header(700, 1001, Op::Request), &[]);
    assert_eq!(ops(&rig.exchange()), [Op::Reset]);
}

#[test]
fn socket_is_bound_once_and_removed_at_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let rig = Rig::new(folder.path(), |_| ());
    let path = rig.socket().to_owned();
    let fence = || Fence {
        counter: 1,
        nonce: [0; 16],
        require_generation: false,
    };
    let poller = vmm_events::Poller::<Token>::new().unwrap();
    let second = VsockConfig::new(path.clone(), fence());
    assert!(create(second, poller.registrar()).is_err());
    assert!(path.exists(), "the first is undisturbed");
    drop(rig);
    assert!(!path.exists());
    let long = VsockConfig::new(folder.path().join("x".repeat(108)), fence());
    let error = create(long, poller.registrar()).unwrap_err();
    assert!(error.to_string().starts_with("cannot bind "), "{error}");
    assert_eq!(poller.registered(), 0);
}

#[test]
fn ports_of_clients_are_distinct() {
    allow_many_files();
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(folder.path(), |_| ());
    let started = Instant::now();
    let clients: Vec<(UnixStream, u32)> = (0..200).map(|_| rig.connected(80)).collect();
    let ports: HashSet<u32> = clients.iter().map(|(_, port)| *port).collect();
    assert_eq!(ports.len(), 200);
    assert!(started.elapsed() < 30 * SECOND);
}
