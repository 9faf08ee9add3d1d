//! Sessions: what a client that breaks the rules can do, and cannot.

use std::io::Write;
use std::time::Duration;

use vmm_protocol::{
    CancelReason, Cause, ClientMessage, ControlToAgent, ControlToHost, DownReason, ExecRequest,
    GenerationId, GoodbyeCode, Hello, Life, ReadyStage, RefusedCode, Stream,
};

use crate::client::{Client, Said, goodbye, sh};
use crate::fake::{alive, wait_dead};
use crate::harness::{GENERATION, Options, Sandbox};

fn ping(id: u64, sequence: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    ClientMessage::Ping
        .encode(id, sequence, &mut bytes)
        .unwrap();
    bytes
}

#[test]
fn ex07_half_a_header_then_silence_stops_nothing_and_ends_after_its_deadline() {
    let sandbox = Sandbox::new();
    let mut silent = sandbox.connect();
    let id = silent.exec(&sh(
        "i=0; while [ $i -lt 10 ]; do echo $i; sleep 0.05; i=$((i+1)); done",
    ));
    silent.started(id);
    silent.crediting = false;
    silent
        .stream
        .write_all(&ping(9, silent.sent + 1)[..12])
        .unwrap();
    // Its own output and reaping go on, and so does everybody else.
    let mut other = sandbox.connect();
    let mut timed = sh("exec sleep 600");
    timed.timeout_ns = 100_000_000;
    assert_eq!(*other.run(&timed).cause(), Cause::TimedOut);
    let outcome = silent.finish(id);
    assert_eq!(outcome.text(), "0\n1\n2\n3\n4\n5\n6\n7\n8\n9\n");
    assert_eq!(*outcome.cause(), Cause::Exited(0));
    let start = std::time::Instant::now();
    assert_eq!(goodbye(&mut silent), GoodbyeCode::Deadline);
    assert!(start.elapsed() < Duration::from_secs(6));
    other.round_trip();
}

#[test]
fn ex07_a_hello_that_never_comes_ends_after_its_deadline_too() {
    let sandbox = Sandbox::new();
    let mut silent = Client::new(sandbox.dial());
    assert_eq!(
        silent.next(),
        Some((0, Said::Hello(Hello::new(GENERATION))))
    );
    assert_eq!(goodbye(&mut silent), GoodbyeCode::Deadline);
}

#[test]
fn se01_each_violation_ends_its_session_alone_and_changes_nothing() {
    let sandbox = Sandbox::new();
    let mut witness = sandbox.connect();
    let mark = sandbox.folder.path().join("mark");
    let touch = ExecRequest::new([
        b"touch".to_vec(),
        mark.clone().into_os_string().into_encoded_bytes(),
    ]);
    type Break<'a> = (&'a str, Box<dyn Fn(&mut Client) + 'a>);
    let raw = |client: &mut Client, bytes: &[u8]| client.stream.write_all(bytes).unwrap();
    let exec = |id: u64, sequence: u64| {
        let mut bytes = Vec::new();
        ClientMessage::Exec(Box::new(touch.clone()))
            .encode(id, sequence, &mut bytes)
            .unwrap();
        bytes
    };
    let breaks: Vec<Break<'_>> = vec![
        (
            "sequence gap",
            Box::new(|client| raw(client, &exec(2, client.sent + 2))),
        ),
        (
            "sequence repeat",
            Box::new(|client| raw(client, &exec(2, client.sent))),
        ),
        (
            "id zero",
            Box::new(|client| raw(client, &exec(0, client.sent + 1))),
        ),
        (
            "reused id",
            Box::new(|client| raw(client, &exec(1, client.sent + 1))),
        ),
        (
            "unknown id",
            Box::new(|client| client.send(77, &ClientMessage::StdinClose)),
        ),
        (
            "second hello",
            Box::new(|client| {
                client.send(0, &ClientMessage::Hello(Hello::new(GENERATION)));
            }),
        ),
        (
            "reserved bit",
            Box::new(|client| {
                let mut bytes = exec(2, client.sent + 1);
                bytes[5] = 1;
                raw(client, &bytes);
            }),
        ),
        (
            "reserved field",
            Box::new(|client| {
                let mut bytes = exec(2, client.sent + 1);
                bytes[7] = 0x80;
                raw(client, &bytes);
            }),
        ),
        (
            "length beyond the kind's",
            Box::new(|client| {
                let mut bytes = ping(2, client.sent + 1);
                bytes[0] = 1;
                raw(client, &bytes);
            }),
        ),
        (
            "length of 4 GiB",
            Box::new(|client| {
                let mut bytes = exec(2, client.sent + 1);
                bytes[..4].copy_from_slice(&[0xff; 4]);
                raw(client, &bytes);
            }),
        ),
        (
            "length short of the fields",
            Box::new(|client| {
                let mut bytes = exec(2, client.sent + 1);
                bytes[0] -= 1;
                bytes.pop();
                raw(client, &bytes);
            }),
        ),
        (
            "kind of the agent's",
            Box::new(|client| {
                let mut bytes = ping(2, client.sent + 1);
                bytes[4] = 0x4a;
                raw(client, &bytes);
            }),
        ),
        (
            "unknown kind",
            Box::new(|client| {
                let mut bytes = ping(2, client.sent + 1);
                bytes[4] = 0x3f;
                raw(client, &bytes);
            }),
        ),
    ];
    for (name, violate) in breaks {
        let mut client = sandbox.connect();
        let first = client.exec(&ExecRequest::new(["true"]));
        client.finish(first);
        violate(&mut client);
        assert_eq!(goodbye(&mut client), GoodbyeCode::Violation, "{name}");
        witness.round_trip();
        assert!(!mark.exists(), "{name}: it was run");
    }
}

#[test]
fn se01_credit_overrun_ends_the_session() {
    let mut sandbox = Sandbox::new();
    let mut stdin = sandbox.connect();
    let mut request = sh("echo $$; exec sleep 600");
    request.stdin = true;
    let id = stdin.exec(&request);
    stdin.started(id);
    let Some(Said::Output(_, pid)) = stdin.next_of(id) else {
        panic!("no pid")
    };
    let pid = String::from_utf8(pid).unwrap();
    // The pipe takes 64 KiB, and gives credit for them; the window takes as many again. The agent
    // may have ended the session before the last of them is sent.
    for _ in 0..5 {
        match stdin.try_send(id, &ClientMessage::Stdin(&[0; 60_000])) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => break,
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(goodbye(&mut stdin), GoodbyeCode::Violation);
    assert!(
        alive(pid.trim()),
        "until it is known that its client is lost"
    );
    sandbox.control().confirm(GENERATION);
    sandbox.connect().round_trip();

    let mut credit = sandbox.connect();
    let id = credit.exec(&sh("exec sleep 600"));
    credit.started(id);
    credit.send(id, &ClientMessage::Credit([1, 0]));
    assert_eq!(goodbye(&mut credit), GoodbyeCode::Violation);
    sandbox.control().confirm(GENERATION);
}

#[test]
fn se02_an_exec_that_nobody_reads_holds_up_no_sibling_on_its_session() {
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    client.crediting = false;
    let mut flood = sh("while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done");
    flood.output_limit = None;
    flood.window = 1000;
    let flooding = client.exec(&flood);
    client.started(flooding);
    for round in 0..50 {
        let outcome = client.run(&sh(&format!("echo {round}")));
        assert_eq!(outcome.text(), format!("{round}\n"));
    }
    client.cancel(flooding, 0);
}

#[test]
fn hello_of_another_generation_or_version_is_refused_by_name() {
    let sandbox = Sandbox::new();
    let mut stale = Client::new(sandbox.dial());
    let other = GenerationId {
        counter: GENERATION.counter - 1,
        ..GENERATION
    };
    stale.send(0, &ClientMessage::Hello(Hello::new(other)));
    assert_eq!(goodbye(&mut stale), GoodbyeCode::Stale);
    let mut future = Client::new(sandbox.dial());
    let mut hello = Hello::new(GENERATION);
    hello.versions.lowest = 900;
    hello.versions.highest = 901;
    future.send(0, &ClientMessage::Hello(hello));
    assert_eq!(goodbye(&mut future), GoodbyeCode::Version);
}

#[test]
fn each_ceiling_has_a_refusal_of_its_own() {
    let options = Options {
        sessions: Some(2),
        store_bytes: Some(3 << 20),
        ..Options::default()
    };
    let sandbox = Sandbox::with(options);
    let mut client = sandbox.connect();
    let sleepers: Vec<u64> = (0..3).map(|_| client.exec(&sh("exec sleep 600"))).collect();
    let refused = client.run(&sh("echo never"));
    let Some(Said::Refused(RefusedCode::NoBudget, message)) = refused.said.last() else {
        panic!("{refused:?}")
    };
    assert!(
        message.contains("1, 2, 3"),
        "the holders are named: {message}"
    );
    // One that ends makes room.
    client.cancel(sleepers[0], 0);
    client.finish(sleepers[0]);
    assert_eq!(client.run(&sh("echo again")).text(), "again\n");

    let _second = sandbox.connect();
    let mut third = Client::new(sandbox.dial());
    assert_eq!(goodbye(&mut third), GoodbyeCode::TooManySessions);
    client.round_trip();
}

#[test]
fn a_lost_client_is_a_cancel_once_the_life_is_known_to_be_the_same() {
    let mut sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    let mut request = sh("echo $$; trap '' TERM; while :; do sleep 600; done");
    request.output_limit = None;
    let id = client.exec(&request);
    client.started(id);
    let Some(Said::Output(Stream::Stdout, pid)) = client.next_of(id) else {
        panic!("no pid")
    };
    let pid = String::from_utf8(pid).unwrap();
    drop(client);
    let token = sandbox.control().asked();
    assert!(alive(pid.trim()), "not before it is confirmed");
    sandbox.control().send(&ControlToAgent::Confirmed {
        token,
        generation: GENERATION,
    });
    sandbox.connect().round_trip();
    wait_dead(&pid);
}

#[test]
fn ge14_a_session_lost_with_the_life_is_no_lost_client() {
    let mut sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    let id = client.exec(&sh("echo $$; exec sleep 600"));
    client.started(id);
    let Some(Said::Output(Stream::Stdout, pid)) = client.next_of(id) else {
        panic!("no pid")
    };
    let pid = String::from_utf8(pid).unwrap();
    // As a transport reset does: both connections are cut, and the next life is told.
    client.stream.shutdown(std::net::Shutdown::Both).unwrap();
    let next = GenerationId {
        counter: GENERATION.counter + 1,
        public_id: 99,
    };
    sandbox.redial().give_life(next);
    let mut client = Client::new(sandbox.dial());
    client.hello(next);
    client.round_trip();
    assert!(alive(pid.trim()), "its workload lives on");
    assert_eq!(
        client.run(&sh("echo $VMM_GENERATION")).text(),
        format!("{next}\n")
    );
}

#[test]
fn ge14_a_control_connection_that_comes_back_in_the_same_life_confirms_it() {
    let mut sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    let id = client.exec(&sh("echo $$; exec sleep 600"));
    client.started(id);
    let Some(Said::Output(Stream::Stdout, pid)) = client.next_of(id) else {
        panic!("no pid")
    };
    let pid = String::from_utf8(pid).unwrap();
    let mut other = sandbox.connect();
    sandbox.redial();
    drop(client);
    other.round_trip();
    assert!(alive(pid.trim()));
    sandbox.control().give_life(GENERATION);
    other.round_trip();
    wait_dead(&pid);
}

#[test]
fn ti03_a_life_that_cannot_be_taken_on_is_not_ready_and_says_why() {
    let mut sandbox = Sandbox::new();
    let control = sandbox.redial();
    let mut life = Life::new(GenerationId {
        counter: 9,
        public_id: 9,
    });
    life.hostname = "unready".to_owned();
    control.send(&ControlToAgent::Life(Box::new(life)));
    match control.next() {
        Some(ControlToHost::Failed {
            stage: ReadyStage::Clock,
            errno: 1,
            message,
        }) => {
            assert!(message.contains("clock_settime"), "{message}");
        }
        other => panic!("{other:?}"),
    }
    // Nobody gets a session in it.
    let mut client = Client::new(sandbox.dial());
    assert_eq!(client.next(), None);
}

#[test]
fn pr08_a_panic_reaches_the_monitor_with_its_words_before_the_end() {
    let mut sandbox = Sandbox::new();
    let control = sandbox.redial();
    let mut life = Life::new(GenerationId {
        counter: 9,
        public_id: 9,
    });
    life.hostname = "panic".to_owned();
    control.send(&ControlToAgent::Life(Box::new(life)));
    match control.next() {
        Some(ControlToHost::Down {
            reason: DownReason::Panic,
            message,
        }) => {
            assert!(message.contains("as a test wants it"), "{message}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(control.next(), None);
}

#[test]
fn a_control_ping_is_answered() {
    let mut sandbox = Sandbox::new();
    let control = sandbox.control();
    control.send(&ControlToAgent::Ping(7));
    assert_eq!(control.next(), Some(ControlToHost::Pong(7)));
}

#[test]
fn cancelled_for_the_launchers_signal_has_that_status() {
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    for (reason, status) in [
        (CancelReason::Interrupt, 130),
        (CancelReason::Terminate, 143),
        (CancelReason::Request, 137),
    ] {
        let id = client.exec(&sh("exec sleep 600"));
        client.started(id);
        client.send(
            id,
            &ClientMessage::Cancel {
                reason,
                grace_ns: 0,
            },
        );
        let outcome = client.finish(id);
        assert_eq!(*outcome.cause(), Cause::Cancelled(reason));
        assert_eq!(outcome.record().status(), status);
    }
}
