//! Sessions against an agent of the tests, over a socket pair.

#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test says so by failing"
)]

mod common;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use common::{Agent, GENERATION, SOON, with_agent};
use vmm_client::{ConnectError, Ended, Event, Session, SessionError};
use vmm_protocol::session::Violation;
use vmm_protocol::{
    AgentMessage, CancelReason, Cause, ClosedWhy, ExecRequest, GenerationId, Hello, Oom, OomScope,
    Policy, Record, Stream,
};

fn uncapped() -> ExecRequest {
    let mut request = ExecRequest::new(["test"]);
    request.output_limit = None;
    request
}

fn record(ended: Ended) -> Record {
    match ended {
        Ended::Exit(record) => *record,
        other => panic!("expected a record, not {other:?}"),
    }
}

fn lost(ended: Ended) -> vmm_client::Lost {
    match ended {
        Ended::Lost(lost) => lost,
        other => panic!("expected a loss, not {other:?}"),
    }
}

#[test]
fn output_arrives_byte_exact_beyond_every_window() {
    let bytes: Vec<u8> = (0..5_000_000_u32).map(|i| (i * 7 % 251) as u8).collect();
    let sent = bytes.clone();
    let (session, agent) = with_agent(move |agent| {
        agent.await_exec(1);
        for chunk in sent.chunks(100_003) {
            agent.write(1, Stream::Stdout, chunk);
            agent.write(1, Stream::Stderr, &chunk[..3]);
        }
        agent.exit(1, 7);
        agent.serve();
    });
    let collected = session.exec(&uncapped()).unwrap().collect_output();
    assert!(collected.stdout == bytes);
    assert_eq!(collected.stderr.len(), 3 * bytes.len().div_ceil(100_003));
    let record = record(collected.ended);
    assert_eq!((record.status(), record.cause), (7, Cause::Exited(7)));
    drop(session);
    agent.join().unwrap();
}

#[test]
fn window_larger_than_the_ring_stalls_nothing() {
    let (session, _agent) = with_agent(|agent| {
        agent.await_exec(1);
        agent.write(1, Stream::Stdout, &vec![1; 5_000_000]);
        agent.exit(1, 0);
        agent.serve();
    });
    let mut request = uncapped();
    request.window = vmm_protocol::limits::MAX_WINDOW;
    let mut exec = session.exec(&request).unwrap();
    let mut total = 0;
    // A stall would be found by the deadline.
    while let Some(event) = exec.next_before(Instant::now() + SOON).unwrap() {
        if let Event::Output { data, .. } = event {
            total += data.len();
        }
    }
    assert_eq!(total, 5_000_000);
}

#[test]
fn events_come_in_order_and_end_once() {
    let (session, _agent) = with_agent(|agent| {
        agent.await_exec(1);
        agent.write(1, Stream::Stdout, b"out");
        agent.write(1, Stream::Stderr, b"error");
        agent.exit(1, 0);
        agent.serve();
    });
    let mut request = ExecRequest::new(["test"]);
    (request.output_limit, request.policy) = (Some(5), Policy::Drain);
    let mut exec = session.exec(&request).unwrap();
    let output = |stream, data: &[u8]| Event::Output {
        stream,
        offset: 0,
        data: data.into(),
    };
    assert_eq!(exec.next(), Some(Event::Started { exec: 1, pid: 1 }));
    assert_eq!(exec.next(), Some(output(Stream::Stdout, b"out")));
    assert_eq!(exec.next(), Some(output(Stream::Stderr, b"er")));
    assert_eq!(exec.next(), Some(Event::Limit([3, 2])));
    assert!(matches!(exec.next(), Some(Event::Ended(Ended::Exit(_)))));
    assert_eq!((exec.next(), exec.next()), (None, None));
}

#[test]
fn se02_exec_that_nobody_reads_leaves_its_siblings_flowing() {
    let (session, _agent) = with_agent(|agent| {
        agent.await_exec(2);
        for _ in 0..64 {
            agent.write(2, Stream::Stdout, &[2; 65_536]);
        }
        agent.exit(2, 0);
        agent.serve();
    });
    let mut request = uncapped();
    request.window = 100;
    let mut idle = session.exec(&request).unwrap();
    let busy = session.exec(&uncapped()).unwrap().collect_output();
    assert_eq!(busy.stdout.len(), 64 * 65_536);
    assert_eq!(
        idle.next_before(Instant::now() + SOON).unwrap(),
        Some(Event::Started { exec: 1, pid: 1 })
    );
    let error = idle.next_before(Instant::now()).unwrap_err();
    assert!(matches!(error, SessionError::TimedOut { .. }));
}

#[test]
fn ge13_end_of_the_connection_ends_every_exec_with_the_offsets_received() {
    let (session, agent) = with_agent(|agent| {
        agent.await_exec(2);
        agent.write(1, Stream::Stdout, &[1; 1000]);
        agent.write(1, Stream::Stderr, &[1; 10]);
        // Then the monitor dies.
    });
    let first = session.exec(&uncapped()).unwrap();
    let second = session.exec(&uncapped()).unwrap();
    agent.join().unwrap();
    let collected = first.collect_output();
    assert_eq!((collected.stdout.len(), collected.stderr.len()), (1000, 10));
    let first = lost(collected.ended);
    assert_eq!(
        (first.received, first.reason.as_str()),
        ([1000, 10], "the agent closed the connection")
    );
    assert_eq!(
        first.to_string(),
        "the agent closed the connection, after 1000 bytes of stdout and 10 of stderr"
    );
    assert_eq!(lost(second.wait()).received, [0, 0]);
    assert_eq!(
        session.lost().as_deref(),
        Some("the agent closed the connection")
    );
    assert!(matches!(
        session.exec(&uncapped()),
        Err(SessionError::Lost { .. })
    ));
    assert!(matches!(session.ping(SOON), Err(SessionError::Lost { .. })));
}

#[test]
fn se01_agent_that_breaks_the_protocol_loses_the_session() {
    let (session, _agent) = with_agent(|agent| {
        agent.await_exec(1);
        let mut bytes = Vec::new();
        AgentMessage::Output {
            stream: Stream::Stdout,
            offset: 5,
            data: b"gap",
        }
        .encode(1, 3, &mut bytes)
        .unwrap();
        agent.stream.write_all(&bytes).unwrap();
        agent.serve();
    });
    let reason = lost(session.exec(&uncapped()).unwrap().wait()).reason;
    assert!(
        reason.starts_with("the agent broke the protocol: "),
        "{reason}"
    );
}

#[test]
fn ge11_hello_of_another_generation_is_refused() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let agent = std::thread::spawn(move || Agent::new(theirs).say());
    let other = GenerationId {
        counter: 6,
        ..GENERATION
    };
    let error = Session::over(ours, other, SOON).unwrap_err();
    assert!(
        matches!(error, ConnectError::Hello(Violation::Stale { ours, theirs }) if ours == other && theirs == GENERATION)
    );
    agent.join().unwrap();
}

#[test]
fn silent_agent_is_given_up_at_the_deadline_of_the_hello() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let began = Instant::now();
    let error = Session::over(ours, GENERATION, Duration::from_millis(50)).unwrap_err();
    assert!(matches!(
        error,
        ConnectError::TimedOut {
            step: "the hello",
            ..
        }
    ));
    assert!(began.elapsed() < SOON);
    let mut said = Vec::new();
    theirs.read_to_end(&mut said).unwrap();
    assert_eq!(said.len(), 24 + 44, "the client's hello, and the end");
}

#[test]
fn goodbye_instead_of_a_session_is_named() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut bytes = Vec::new();
    AgentMessage::Hello(Hello::new(GENERATION))
        .encode(0, 1, &mut bytes)
        .unwrap();
    let goodbye = AgentMessage::Goodbye {
        code: vmm_protocol::GoodbyeCode::GoingDown,
        message: "bye".into(),
    };
    goodbye.encode(0, 2, &mut bytes).unwrap();
    theirs.write_all(&bytes).unwrap();
    drop(theirs);
    let session = Session::over(ours, GENERATION, SOON).unwrap();
    // The hello was fine: the session opens, and ends with what the agent said.
    while session.lost().is_none() {
        if session.ping(SOON).is_err() {
            break;
        }
    }
    let reason = session.lost().unwrap();
    assert_eq!(reason, "the agent ended the session (going_down): bye");
}

#[test]
fn ex19_cancel_from_another_thread_ends_the_exec() {
    let (session, _agent) = with_agent(Agent::serve);
    let exec = session.exec(&uncapped()).unwrap();
    let control = exec.control();
    let canceller =
        std::thread::spawn(move || control.cancel(CancelReason::Interrupt, Duration::ZERO));
    let record = record(exec.wait());
    assert_eq!(record.cause, Cause::Cancelled(CancelReason::Interrupt));
    canceller.join().unwrap().unwrap();
}

#[test]
fn control_is_harmless_after_the_end() {
    let (session, _agent) = with_agent(Agent::serve);
    let exec = session.exec(&uncapped()).unwrap();
    let control = exec.control();
    control.signal(15).unwrap();
    assert_eq!(record(exec.wait()).cause, Cause::Signaled(15));
    control.signal(9).unwrap();
    control.cancel(CancelReason::Request, SOON).unwrap();
    assert!(matches!(control.signal(65), Err(SessionError::Request(_))));
    session.ping(SOON).unwrap();
}

#[test]
fn st03_stdin_beyond_its_window_arrives_byte_exact() {
    let bytes: Vec<u8> = (0..500_000_u32).map(|i| (i % 249) as u8).collect();
    let (session, agent) = with_agent(|agent| {
        agent.await_exec(1);
        let mut total = 0;
        while agent.execs.contains_key(&1) {
            assert!(agent.hear());
            let taken = agent.stdin.get(&1).map_or(0, Vec::len) - total;
            total += taken;
            agent.session.grant_stdin(1, taken as u64);
        }
        agent.stdin.remove(&1)
    });
    let mut request = uncapped();
    request.stdin = true;
    let mut exec = session.exec(&request).unwrap();
    let mut stdin = exec.stdin().unwrap();
    assert!(exec.stdin().is_none(), "there is one");
    let sent = bytes.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&sent));
    assert_eq!(record(exec.wait()).cause, Cause::Exited(0));
    writer.join().unwrap().unwrap();
    assert!(agent.join().unwrap().unwrap() == bytes);
}

#[test]
fn st02_workload_that_closes_stdin_is_a_broken_pipe_and_not_an_error() {
    let (session, _agent) = with_agent(|agent| {
        agent.await_exec(1);
        agent
            .execs
            .get_mut(&1)
            .unwrap()
            .stdin_closed(ClosedWhy::BrokenPipe);
        agent.write(1, Stream::Stdout, b"still here");
        agent.serve();
    });
    let mut request = uncapped();
    request.stdin = true;
    let mut exec = session.exec(&request).unwrap();
    let mut stdin = exec.stdin().unwrap();
    // The window is finite and nobody gives credit: the write ends by the event.
    let error = stdin.write_all(&vec![0; 1 << 20]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe);
    exec.control().signal(1).unwrap();
    let collected = exec.collect_output();
    assert_eq!(collected.stdout, b"still here");
    assert_eq!(record(collected.ended).cause, Cause::Signaled(1));
}

#[test]
fn dropped_handle_cancels_its_exec_alone() {
    let (session, agent) = with_agent(|agent| {
        agent.await_exec(2);
        agent.write(1, Stream::Stdout, &[1; 200_000]);
        agent.serve();
        agent.cancelled.clone()
    });
    let first = session.exec(&uncapped()).unwrap();
    let second = session.exec(&uncapped()).unwrap();
    drop(first);
    session.ping(SOON).unwrap();
    second.control().signal(3).unwrap();
    assert_eq!(record(second.wait()).cause, Cause::Signaled(3));
    drop(session);
    assert_eq!(agent.join().unwrap(), [1]);
}

#[test]
fn session_lives_as_long_as_any_handle() {
    let (session, agent) = with_agent(|agent| {
        agent.serve();
        "gone"
    });
    let exec = session.exec(&uncapped()).unwrap();
    drop(session);
    let control = exec.control();
    control.signal(2).unwrap();
    assert_eq!(record(exec.wait()).cause, Cause::Signaled(2));
    drop(control);
    assert_eq!(agent.join().unwrap(), "gone");
}

#[test]
fn closing_ends_execs_here_and_the_client_there() {
    let (session, agent) = with_agent(Agent::serve);
    let exec = session.exec(&uncapped()).unwrap();
    session.close();
    assert_eq!(lost(exec.wait()).reason, "closed by its client");
    agent.join().unwrap();
}

#[test]
fn ho03_notices_without_end_lose_the_session() {
    let (session, _agent) = with_agent(|agent| {
        agent.await_exec(2);
        let oom = Oom {
            scope: OomScope::Exec,
            pid: 1,
            victim: "x".into(),
            limit: 1,
            peak: 1,
        };
        let mut bytes = Vec::new();
        // Behind the hello and two notices of a start.
        for sequence in 4..10_004 {
            AgentMessage::Oom(oom.clone())
                .encode(1, sequence, &mut bytes)
                .unwrap();
        }
        // The client may leave in the middle.
        let _ = agent.stream.write_all(&bytes);
        agent.serve();
    });
    let unread = session.exec(&uncapped()).unwrap();
    let reason = lost(session.exec(&uncapped()).unwrap().wait()).reason;
    assert_eq!(reason, "the agent sent more notices than any exec has");
    let held = unread.count();
    assert!(held < 600, "{held}");
}

#[test]
fn ho03_single_bytes_of_both_streams_are_held_in_few_chunks() {
    let (written, all_written) = std::sync::mpsc::channel();
    let (session, _agent) = with_agent(move |agent| {
        agent.await_exec(1);
        for _ in 0..5000 {
            agent.write(1, Stream::Stdout, b"o");
            agent.write(1, Stream::Stderr, b"e");
        }
        agent.exit(1, 0);
        written.send(()).unwrap();
        agent.serve();
    });
    let exec = session.exec(&uncapped()).unwrap();
    all_written.recv().unwrap();
    session.ping(SOON).unwrap(); // so all of it has been received, and none taken
    let mut chunks = 0;
    let mut total = [0; 2];
    for event in exec {
        if let Event::Output {
            stream,
            offset,
            data,
        } = event
        {
            assert_eq!(offset, total[stream.index()]);
            total[stream.index()] += data.len() as u64;
            chunks += 1;
        }
    }
    assert_eq!(total, [5000, 5000]);
    assert!(chunks < 300, "{chunks}");
}

#[test]
fn ex16_invalid_request_is_refused_before_anything_is_sent() {
    let (session, agent) = with_agent(|agent| {
        agent.serve();
        agent.execs.len()
    });
    let mut request = uncapped();
    request.timeout_ns = u64::MAX;
    let error = session.exec(&request).unwrap_err();
    assert!(matches!(error, SessionError::Request(_)));
    drop(session);
    assert_eq!(agent.join().unwrap(), 0);
}

#[test]
fn ping_has_its_deadline_and_its_late_answer_harms_nothing() {
    let (answer, may_answer) = std::sync::mpsc::channel::<()>();
    let (session, _agent) = with_agent(move |agent| {
        agent.say();
        may_answer.recv().unwrap();
        agent.serve();
    });
    let error = session.ping(Duration::from_millis(20)).unwrap_err();
    assert_eq!(
        error,
        SessionError::TimedOut {
            after: Duration::from_millis(20)
        }
    );
    answer.send(()).unwrap();
    session.ping(SOON).unwrap();
    let exec = session.exec(&uncapped()).unwrap();
    exec.control().signal(9).unwrap();
    assert_eq!(exec.wait().status(), 137);
}
