use std::collections::BTreeMap;

use super::*;
use crate::exec::{Action, Exec, MainEnd, Room, Settings, Usage};
use crate::frame::{Decoder, Header};
use crate::hello::Hello;
use crate::limits::{HELLO_DEADLINE_NS, MAX_DATA, STDIN_WINDOW};
use crate::message::{AgentMessage, ClientMessage, ExecRequest, Policy};
use crate::{CancelReason, Cause, Stream};

pub(super) fn hello() -> Hello {
    Hello::new(GenerationId {
        counter: 3,
        public_id: 77,
    })
}

/// Moves bytes into a session as the driver does.
fn feed(session: &mut AgentSession, mut bytes: &[u8], now: u64) {
    while !bytes.is_empty() {
        let space = session.space();
        let count = space.len().min(bytes.len());
        space[..count].copy_from_slice(&bytes[..count]);
        session.filled(count, now);
        bytes = &bytes[count..];
        if !bytes.is_empty() {
            while session.next().unwrap().is_some() {}
        }
    }
}

/// Takes what a session has for its socket, at most `most` bytes.
pub(super) fn drain(
    session: &mut AgentSession,
    execs: &BTreeMap<u64, Exec>,
    most: usize,
) -> Vec<u8> {
    session.fill(execs);
    let slices = session.gather(execs).unwrap();
    let mut bytes = Vec::new();
    slices
        .iter()
        .for_each(|slice| bytes.extend_from_slice(slice));
    bytes.truncate(most);
    session.wrote(bytes.len(), 0);
    bytes
}

/// The messages in a byte stream, with their ids; sequence numbers are checked.
fn messages(bytes: &[u8], first: u64) -> Vec<(u64, String)> {
    let mut decoder = Decoder::with_capacity(bytes.len().max(24));
    decoder.space()[..bytes.len()].copy_from_slice(bytes);
    decoder.filled(bytes.len());
    let mut all = Vec::new();
    while let Some(frame) = decoder.next().unwrap() {
        assert_eq!(frame.header.sequence, first + all.len() as u64);
        let text = match AgentMessage::decode(&frame).unwrap() {
            AgentMessage::Output {
                stream,
                offset,
                data,
            } => format!("{stream} {offset}+{}", data.len()),
            AgentMessage::Refused(refusal) => format!("refused {}", refusal.code),
            AgentMessage::Goodbye { code, .. } => format!("goodbye {code}"),
            other => format!("{:?}", other.kind()),
        };
        all.push((frame.header.id, text));
    }
    assert!(!decoder.partial());
    all
}

fn texts(bytes: &[u8], first: u64) -> Vec<String> {
    messages(bytes, first)
        .into_iter()
        .map(|(_, text)| text)
        .collect()
}

/// A session that has taken its hello and the given messages, which are all fine.
fn opened(more: &[(u64, ClientMessage<'_>)]) -> AgentSession {
    let mut session = AgentSession::new(hello(), 0);
    let mut bytes = Vec::new();
    ClientMessage::Hello(hello())
        .encode(0, 1, &mut bytes)
        .unwrap();
    for (at, (id, message)) in more.iter().enumerate() {
        message.encode(*id, at as u64 + 2, &mut bytes).unwrap();
    }
    feed(&mut session, &bytes, 0);
    while session.next().unwrap().is_some() {}
    session
}

fn request(window: u64) -> ExecRequest {
    let mut request = ExecRequest::new(["test"]);
    request.window = window;
    request
}

fn exec_message(window: u64) -> ClientMessage<'static> {
    ClientMessage::Exec(Box::new(request(window)))
}

fn running(limit: Option<u64>, policy: Policy) -> Exec {
    let mut request = request(1000);
    (request.output_limit, request.policy) = (limit, policy);
    let mut exec = Exec::new(Settings::new(&request), 0);
    exec.started(9, 100);
    exec
}

pub(super) fn end(exec: &mut Exec) {
    exec.main_exited(MainEnd::Exited(0), 1);
    exec.leaf_empty();
    exec.close(Stream::Stdout);
    exec.close(Stream::Stderr);
    while let Some(action) = exec.action() {
        if action == Action::Finish {
            exec.finish(Usage::default(), 1);
        }
    }
}

#[test]
fn se01_each_violation_ends_the_session_and_changes_nothing() {
    let frame = |id, sequence, message: &ClientMessage<'_>| {
        let mut bytes = Vec::new();
        message.encode(id, sequence, &mut bytes).unwrap();
        bytes
    };
    let ping = |id, sequence| frame(id, sequence, &ClientMessage::Ping);
    let patched = |at: usize, value: u8| {
        let mut bytes = ping(9, 4);
        bytes[at] = value;
        bytes
    };
    let stdin = vec![0; MAX_DATA];
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("gap", ping(9, 5)),
        ("repeat", ping(9, 3)),
        ("sequence zero", ping(9, 0)),
        ("reused id", ping(7, 4)),
        ("smaller id", ping(3, 4)),
        ("id zero", ping(0, 4)),
        ("unknown id", frame(8, 4, &ClientMessage::StdinClose)),
        ("exec id reused", frame(7, 4, &exec_message(10))),
        ("exec id zero", frame(0, 4, &exec_message(10))),
        (
            "credit overrun",
            frame(7, 4, &ClientMessage::Credit([101, 0])),
        ),
        (
            "credit overrun stderr",
            frame(7, 4, &ClientMessage::Credit([0, 1])),
        ),
        (
            "credit overflow",
            frame(7, 4, &ClientMessage::Credit([u64::MAX, u64::MAX])),
        ),
        ("stdin overrun", frame(7, 4, &ClientMessage::Stdin(&stdin))),
        ("second hello", frame(0, 4, &ClientMessage::Hello(hello()))),
        ("flag bit", patched(5, 1)),
        ("reserved bit", patched(6, 1)),
        ("reserved high bit", patched(7, 0x80)),
        ("unknown kind", patched(4, 0x3f)),
        ("kind of the agent", patched(4, 0x4a)),
        ("kind of the control connection", patched(4, 0xc2)),
        ("length beyond the limit", patched(0, 1)),
        ("huge length", patched(3, 0xff)),
    ];
    for (name, bytes) in cases {
        let mut session = opened(&[
            (7, exec_message(1000)),
            (7, ClientMessage::Stdin(&[0; 200])),
        ]);
        let mut exec = running(None, Policy::Kill);
        exec.absorb(Stream::Stdout, &[1; 100], 0);
        let execs = BTreeMap::from([(7, exec)]);
        drain(&mut session, &execs, usize::MAX);

        feed(&mut session, &bytes, 0);
        let verdict = session.next().map(|request| format!("{request:.20?}"));
        assert!(verdict.is_err(), "{name}: {verdict:?}");
        let before = format!("{:?}", session.live().collect::<Vec<_>>());
        assert_eq!(before, "[7]", "{name}");
        session.end(&verdict.unwrap_err());
        assert_eq!(
            texts(&drain(&mut session, &execs, usize::MAX), 4),
            ["goodbye violation"],
            "{name}"
        );
        assert_eq!(session.next(), Ok(None), "{name}");
        assert!(!session.wants_read());
    }
}

#[test]
fn se01_stdin_within_the_window_is_taken_and_one_more_byte_is_not() {
    let window = STDIN_WINDOW as usize;
    let data = vec![7; window];
    let parts: Vec<_> = data
        .chunks(MAX_DATA)
        .map(|chunk| (1, ClientMessage::Stdin(chunk)))
        .collect();
    let mut script = vec![(1, exec_message(10))];
    script.extend(parts);
    let next = script.len() as u64 + 2;
    for (granted, ok) in [(0, false), (1, true)] {
        let mut session = opened(&script);
        session.grant_stdin(1, granted);
        let mut bytes = Vec::new();
        ClientMessage::Stdin(b"y")
            .encode(1, next, &mut bytes)
            .unwrap();
        feed(&mut session, &bytes, 0);
        assert_eq!(session.next().is_ok(), ok);
    }
}

#[test]
fn ho04_anything_before_the_hello_ends_the_session() {
    for message in [
        ClientMessage::Ping,
        exec_message(10),
        ClientMessage::StdinClose,
    ] {
        let mut session = AgentSession::new(hello(), 0);
        let mut bytes = Vec::new();
        message.encode(1, 1, &mut bytes).unwrap();
        feed(&mut session, &bytes, 0);
        assert!(matches!(session.next(), Err(Violation::Hello { .. })));
    }
}

#[test]
fn ge11_hello_of_another_generation_is_stale_on_both_sides() {
    let mut theirs = hello();
    theirs.generation.counter -= 1;
    let mut agent = AgentSession::new(hello(), 0);
    let mut client = ClientSession::new(theirs, 0);
    let id = client.exec(&request(10)).unwrap();
    assert_eq!(id, 1);
    let bytes = client.outgoing().to_vec();
    feed(&mut agent, &bytes, 0);
    let violation = agent.next().unwrap_err();
    assert_eq!(
        violation,
        Violation::Stale {
            ours: hello().generation,
            theirs: theirs.generation
        }
    );
    agent.end(&violation);
    let bytes = drain(&mut agent, &BTreeMap::new(), usize::MAX);
    assert_eq!(texts(&bytes, 1), ["AgentHello", "goodbye stale"]);
    client.space()[..bytes.len()].copy_from_slice(&bytes);
    client.filled(bytes.len(), 0);
    assert!(matches!(client.next(), Err(Violation::Stale { .. })));
    assert!(client.ended());
}

#[test]
fn hello_without_a_common_version_is_refused_on_both_sides() {
    let mut theirs = hello();
    theirs.versions = Versions {
        lowest: 2,
        highest: 9,
    };
    let mut agent = AgentSession::new(hello(), 0);
    let bytes = ClientSession::new(theirs, 0).outgoing().to_vec();
    feed(&mut agent, &bytes, 0);
    assert!(matches!(agent.next(), Err(Violation::Version { .. })));
}

#[test]
fn ex07_half_a_header_then_silence_ends_the_session_at_its_deadline() {
    let mut session = opened(&[]);
    assert_eq!(session.deadline(), None);
    let mut bytes = Vec::new();
    ClientMessage::Ping.encode(1, 2, &mut bytes).unwrap();
    feed(&mut session, &bytes[..12], 1000);
    assert_eq!(session.next(), Ok(None));
    assert_eq!(session.deadline(), Some(1000 + HELLO_DEADLINE_NS));
    assert_eq!(session.tick(999 + HELLO_DEADLINE_NS), Ok(()));
    // One more byte does not buy more time.
    feed(&mut session, &bytes[12..13], 5000);
    assert_eq!(session.next(), Ok(None));
    assert_eq!(
        session.tick(1000 + HELLO_DEADLINE_NS),
        Err(Violation::Deadline)
    );

    feed(&mut session, &bytes[13..], 6000);
    assert_eq!(session.next(), Ok(None));
    assert_eq!(session.deadline(), None);
}

#[test]
fn ex07_hello_has_a_deadline() {
    let mut session = AgentSession::new(hello(), 10);
    assert_eq!(session.deadline(), Some(10 + HELLO_DEADLINE_NS));
    assert_eq!(
        session.tick(10 + HELLO_DEADLINE_NS),
        Err(Violation::Deadline)
    );
}

#[test]
fn ex20_limit_is_sent_in_order_and_at_once_without_credit() {
    // Credit for everything: the limit comes after the bytes before it.
    let mut exec = running(Some(50), Policy::Drain);
    exec.absorb(Stream::Stdout, &[1; 60], 0);
    let execs = BTreeMap::from([(1, exec)]);
    let mut session = opened(&[(1, exec_message(1000))]);
    let all = drain(&mut session, &execs, usize::MAX);
    assert_eq!(
        texts(&all, 1),
        ["AgentHello", "Started", "stdout 0+50", "Limit"]
    );

    // Credit for less: the limit does not wait for it.
    let mut session = opened(&[(1, exec_message(20))]);
    let all = drain(&mut session, &execs, usize::MAX);
    assert_eq!(
        texts(&all, 1),
        ["AgentHello", "Started", "stdout 0+20", "Limit"]
    );
    let mut bytes = Vec::new();
    ClientMessage::Credit([20, 0])
        .encode(1, 3, &mut bytes)
        .unwrap();
    feed(&mut session, &bytes, 0);
    assert_eq!(
        session.next(),
        Ok(Some(Request::Consumed {
            id: 1,
            bytes: [20, 0]
        }))
    );
    assert_eq!(
        texts(&drain(&mut session, &execs, usize::MAX), 5),
        ["stdout 20+20"]
    );
}

#[test]
fn ex20_memory_kill_is_told_at_once_although_a_chunk_waits_for_credit() {
    let mut exec = running(None, Policy::Kill);
    exec.absorb(Stream::Stdout, &[1; 60], 0);
    let mut execs = BTreeMap::from([(1, exec)]);
    let mut session = opened(&[(1, exec_message(20))]);
    drain(&mut session, &execs, usize::MAX);
    let oom = crate::Oom {
        scope: crate::OomScope::Exec,
        pid: 5,
        victim: "hog".into(),
        limit: 1,
        peak: 1,
    };
    execs.get_mut(&1).unwrap().oom(oom, false);
    assert_eq!(texts(&drain(&mut session, &execs, usize::MAX), 4), ["Oom"]);
}

#[test]
fn exit_comes_after_the_last_byte_and_then_the_exec_may_go() {
    let mut exec = running(Some(50), Policy::Drain);
    exec.absorb(Stream::Stdout, &[1; 30], 0);
    exec.absorb(Stream::Stderr, &[2; 10], 0);
    end(&mut exec);
    let execs = BTreeMap::from([(1, exec)]);
    let mut session = opened(&[(1, exec_message(35))]);
    let all = drain(&mut session, &execs, usize::MAX);
    assert_eq!(
        texts(&all, 1),
        ["AgentHello", "Started", "stdout 0+30", "stderr 0+5"]
    );
    assert_eq!(session.finished(), [0; 0]);
    let mut bytes = Vec::new();
    ClientMessage::Credit([30, 5])
        .encode(1, 3, &mut bytes)
        .unwrap();
    feed(&mut session, &bytes, 0);
    assert!(session.next().unwrap().is_some());
    // The record may not be forgotten before its last byte is on the way.
    let first = drain(&mut session, &execs, 100);
    assert_eq!(session.finished(), [0; 0]);
    let mut all = first;
    all.extend(drain(&mut session, &execs, usize::MAX));
    assert_eq!(texts(&all, 5), ["stderr 5+5", "Exit"]);
    assert_eq!(session.finished(), [1]);
    assert_eq!(session.live().count(), 0);
}

#[test]
fn ex19_frames_for_an_exec_that_has_just_ended_are_no_violation() {
    let mut exec = running(None, Policy::Kill);
    end(&mut exec);
    let execs = BTreeMap::from([(1, exec)]);
    let mut session = opened(&[(1, exec_message(10))]);
    drain(&mut session, &execs, usize::MAX);
    let late = [
        ClientMessage::Cancel {
            reason: CancelReason::Request,
            grace_ns: 0,
        },
        ClientMessage::Stdin(b"late"),
        ClientMessage::Credit([9, 9]),
        ClientMessage::Signal(15),
    ];
    let mut bytes = Vec::new();
    for (at, message) in late.iter().enumerate() {
        message.encode(1, at as u64 + 3, &mut bytes).unwrap();
    }
    feed(&mut session, &bytes, 0);
    assert_eq!(session.next(), Ok(None));
}

#[test]
fn se02_exec_that_nobody_reads_leaves_its_siblings_flowing() {
    let mut execs = BTreeMap::new();
    let mut script = Vec::new();
    for id in 1..=3 {
        let mut exec = running(None, Policy::Kill);
        exec.absorb(Stream::Stdout, &vec![1; 300_000], 0);
        execs.insert(id, exec);
        script.push((id, exec_message(if id == 1 { 10 } else { 1 << 20 })));
    }
    let mut session = opened(&script);
    let mut sent = [0; 4];
    loop {
        let bytes = drain(&mut session, &execs, usize::MAX);
        if bytes.is_empty() {
            break;
        }
        let mut decoder = Decoder::with_capacity(bytes.len());
        decoder.space()[..bytes.len()].copy_from_slice(&bytes);
        decoder.filled(bytes.len());
        while let Some(frame) = decoder.next().unwrap() {
            if let AgentMessage::Output { data, .. } = AgentMessage::decode(&frame).unwrap() {
                sent[frame.header.id as usize] += data.len();
            }
        }
    }
    assert_eq!(sent, [0, 10, 300_000, 300_000]);
}

#[test]
fn ex12_first_byte_of_a_new_exec_waits_for_one_frame_of_a_flood() {
    let mut flood = running(None, Policy::Kill);
    flood.absorb(Stream::Stdout, &vec![1; 1 << 20], 0);
    let mut execs = BTreeMap::from([(1, flood), (2, running(None, Policy::Kill))]);
    let mut session = opened(&[(1, exec_message(1 << 20)), (2, exec_message(100))]);
    drain(&mut session, &execs, 70_000);
    execs.get_mut(&2).unwrap().absorb(Stream::Stdout, b"x", 0);
    session.fill(&execs);
    // What is queued is bounded, so the newcomer's wait is too.
    assert!(
        session.queued() < 256 * 1024 + 2 * MAX_DATA,
        "{}",
        session.queued()
    );
}

#[test]
fn ho03_client_that_asks_without_reading_is_no_longer_read() {
    let mut session = opened(&[]);
    let mut id = 0;
    let mut worst = 0;
    for _ in 0..100_000 {
        if !session.wants_read() {
            break;
        }
        id += 1;
        let mut bytes = Vec::new();
        ClientMessage::Ping.encode(id, id + 1, &mut bytes).unwrap();
        feed(&mut session, &bytes, 0);
        assert_eq!(session.next(), Ok(None));
        worst = worst.max(session.queued());
    }
    assert!(!session.wants_read());
    assert!(worst < 65 << 10, "{worst}");
    let pongs = drain(&mut session, &BTreeMap::new(), usize::MAX);
    assert_eq!(texts(&pongs, 1).len() as u64, id + 1);
    assert!(session.wants_read());
}

#[test]
fn ho03_too_many_execs_are_refused_and_the_session_lives() {
    let script: Vec<_> = (1..=1025).map(|id| (id, exec_message(10))).collect();
    let mut session = opened(&script);
    assert_eq!(session.live().count(), 1024);
    let bytes = drain(&mut session, &BTreeMap::new(), usize::MAX);
    assert_eq!(
        messages(&bytes, 1)[1],
        (1025, "refused too_many_execs".to_owned())
    );
}

#[test]
fn ex16_invalid_request_is_refused_and_the_session_lives() {
    let mut bad = request(10);
    bad.timeout_ns = u64::MAX;
    let mut session = opened(&[
        (1, ClientMessage::Exec(Box::new(bad.clone()))),
        (2, ClientMessage::Ping),
    ]);
    let bytes = drain(&mut session, &BTreeMap::new(), usize::MAX);
    assert_eq!(texts(&bytes, 1), ["AgentHello", "refused invalid", "Pong"]);

    let mut client = ClientSession::new(hello(), 0);
    let before = client.outgoing().len();
    assert!(matches!(client.exec(&bad), Err(RequestError::Invalid(_))));
    assert_eq!(client.outgoing().len(), before, "nothing is sent");
}

/// A client whose agent has said these things after its hello; the last one's verdict.
fn client_hears(script: &[(u64, AgentMessage<'_>)]) -> Result<(), Violation> {
    let mut client = ClientSession::new(hello(), 0);
    for _ in 0..2 {
        client.exec(&request(100)).unwrap();
    }
    let mut bytes = Vec::new();
    AgentMessage::Hello(hello())
        .encode(0, 1, &mut bytes)
        .unwrap();
    for (at, (id, message)) in script.iter().enumerate() {
        message.encode(*id, at as u64 + 2, &mut bytes).unwrap();
    }
    client.space()[..bytes.len()].copy_from_slice(&bytes);
    client.filled(bytes.len(), 0);
    for _ in 0..script.len() {
        assert!(client.next()?.is_some());
    }
    client.next().map(drop)
}

#[test]
fn se01_client_checks_what_an_agent_says() {
    let started = (1, AgentMessage::Started { exec: 1, pid: 2 });
    let output = |offset, data| {
        (
            1,
            AgentMessage::Output {
                stream: Stream::Stdout,
                offset,
                data,
            },
        )
    };
    let mut exec = running(None, Policy::Kill);
    exec.absorb(Stream::Stdout, b"abc", 0);
    end(&mut exec);
    let record = AgentMessage::Exit(Box::new(exec.record().unwrap().clone()));
    let pong = (1, AgentMessage::Pong);

    assert_eq!(
        client_hears(&[started.clone(), output(0, b"abc"), (1, record.clone())]),
        Ok(())
    );
    let bad: Vec<Vec<_>> = vec![
        vec![output(0, b"early")],
        vec![started.clone(), started.clone()],
        vec![started.clone(), output(1, b"gap")],
        vec![started.clone(), output(0, b"abc"), output(0, b"again")],
        vec![started.clone(), output(0, &[0; 101])],
        vec![
            started.clone(),
            (1, AgentMessage::Limit([2, 0])),
            output(0, b"abc"),
        ],
        vec![
            started.clone(),
            (1, AgentMessage::Limit([2, 0])),
            (1, AgentMessage::Limit([2, 0])),
        ],
        vec![started.clone(), (1, record.clone())],
        vec![
            started.clone(),
            output(0, b"abc"),
            (1, record.clone()),
            output(3, b"d"),
        ],
        vec![(3, AgentMessage::Started { exec: 1, pid: 2 })],
        vec![(0, AgentMessage::StdinCredit(1))],
        vec![pong],
        vec![(0, AgentMessage::Hello(hello()))],
    ];
    for script in bad {
        assert!(client_hears(&script).is_err(), "{script:?}");
    }
}

#[test]
fn client_gives_credit_back_in_portions() {
    let mut client = ClientSession::new(hello(), 0);
    let id = client.exec(&request(100)).unwrap();
    let mut bytes = Vec::new();
    AgentMessage::Hello(hello())
        .encode(0, 1, &mut bytes)
        .unwrap();
    AgentMessage::Started { exec: 1, pid: 1 }
        .encode(id, 2, &mut bytes)
        .unwrap();
    AgentMessage::Output {
        stream: Stream::Stdout,
        offset: 0,
        data: &[0; 100],
    }
    .encode(id, 3, &mut bytes)
    .unwrap();
    client.space()[..bytes.len()].copy_from_slice(&bytes);
    client.filled(bytes.len(), 0);
    while client.next().unwrap().is_some() {}
    let sent = client.outgoing().len();
    client.consumed(id, Stream::Stdout, 24);
    assert_eq!(client.outgoing().len(), sent);
    client.consumed(id, Stream::Stdout, 1);
    assert_eq!(client.outgoing().len(), sent + 24 + 16);
    client.consumed(id, Stream::Stdout, 1000);
    assert_eq!(
        client.outgoing().len(),
        sent + 2 * (24 + 16),
        "only what was received counts"
    );
}

#[test]
fn missing_exec_is_an_error_and_not_a_torn_frame() {
    let mut exec = running(None, Policy::Kill);
    exec.absorb(Stream::Stdout, b"abc", 0);
    let mut execs = BTreeMap::from([(1, exec)]);
    let mut session = opened(&[(1, exec_message(10))]);
    session.fill(&execs);
    execs.clear();
    assert_eq!(session.gather(&execs).unwrap_err(), MissingExec { id: 1 });
}

#[test]
fn header_is_what_its_bytes_say() {
    let header = Header {
        length: 0,
        kind: FrameKind::Ping,
        id: 0x0102_0304_0506_0708,
        sequence: 1 << 60,
    };
    assert_eq!(Header::decode(&header.encode()), Ok(header));
    assert!(matches!(Cause::Exited(0).name(), "exited"));
    let mut exec = running(Some(1), Policy::Kill);
    assert!(matches!(exec.room(Stream::Stdout), Room::Store(space) if space.len() == 1));
}
