//! Execs by their numbers: attach, wait, list, signal, cancel, release, over both machines.

use std::collections::BTreeMap;

use super::tests::{drain, end, hello};
use super::*;
use crate::exec::{Exec, Settings};
use crate::message::{AgentMessage, ClientMessage, ExecRequest, ExecsPage, Refusal, RefusedCode};
use crate::{CancelReason, Cause, Stream};

/// A client, an agent's session, and what lies between them. The agent answers as the test says.
struct Pair {
    client: ClientSession,
    agent: AgentSession,
    execs: BTreeMap<u64, Exec>,
}

impl Pair {
    fn new() -> Self {
        Self {
            client: ClientSession::new(hello(), 0),
            agent: AgentSession::new(hello(), 0),
            execs: BTreeMap::new(),
        }
    }

    /// What the agent is asked, in words.
    fn asked(&mut self) -> Vec<String> {
        let bytes = self.client.outgoing().to_vec();
        self.client.wrote(bytes.len());
        self.agent.space()[..bytes.len()].copy_from_slice(&bytes);
        self.agent.filled(bytes.len(), 0);
        let mut all = Vec::new();
        while let Some(request) = self.agent.next().unwrap() {
            all.push(format!("{request:?}"));
        }
        all
    }

    /// What the client hears, in words; output in bytes.
    fn heard(&mut self) -> (Vec<String>, Vec<u8>) {
        let (mut all, mut output) = (Vec::new(), Vec::new());
        loop {
            let bytes = drain(&mut self.agent, &self.execs, 100_000);
            if bytes.is_empty() {
                return (all, output);
            }
            let mut rest = bytes.as_slice();
            while !rest.is_empty() {
                let space = self.client.space();
                let count = space.len().min(rest.len());
                space[..count].copy_from_slice(&rest[..count]);
                self.client.filled(count, 0);
                rest = &rest[count..];
                while let Some(event) = self.client.next().unwrap() {
                    match event {
                        Event::Output { data, .. } => output.extend_from_slice(data),
                        Event::Opened { .. } => {}
                        Event::Exit { id, .. } => all.push(format!("exit {id}")),
                        Event::Refused { id, refusal } => {
                            all.push(format!("refused {id} {}", refusal.code));
                        }
                        event => all.push(format!("{event:?}")),
                    }
                }
            }
        }
    }
}

/// An exec of the guest that has written, and keeps its output.
fn detached(limit: Option<u64>, bytes: &[u8]) -> Exec {
    let mut request = ExecRequest::new(["sh"]);
    (request.detached, request.output_limit) = (true, limit);
    let mut exec = Exec::new(Settings::new(&request), 0);
    exec.started(12, 100);
    assert_eq!(exec.absorb(Stream::Stdout, bytes, 0), bytes.len());
    exec
}

#[test]
fn detached_exec_is_over_for_its_client_once_it_has_started() {
    let mut pair = Pair::new();
    let mut request = ExecRequest::new(["sh"]);
    request.detached = true;
    let id = pair.client.exec(&request).unwrap();
    assert_eq!(pair.asked().len(), 1);
    pair.execs
        .insert(id, detached(Some(100), b"output that is not for it"));
    let (heard, output) = pair.heard();
    assert_eq!(heard, [r#"Started { id: 1, exec: 12, pid: 100 }"#]);
    assert!(output.is_empty());
    assert_eq!(pair.agent.finished(), [id]);
    assert_eq!(
        (pair.client.live().count(), pair.agent.live().count()),
        (0, 0)
    );
}

#[test]
fn detached_exec_that_does_not_start_tells_it() {
    let mut pair = Pair::new();
    let mut request = ExecRequest::new(["sh"]);
    request.detached = true;
    let id = pair.client.exec(&request).unwrap();
    pair.asked();
    let mut exec = Exec::new(Settings::new(&request), 0);
    exec.start_failed(crate::StartStage::Execute, 2);
    end(&mut exec);
    pair.execs.insert(id, exec);
    assert_eq!(pair.heard().0, ["exit 1"]);
    assert_eq!(pair.client.live().count(), 0);
}

#[test]
fn ex14_attach_gives_the_rest_from_its_offsets_without_gap_or_duplicate() {
    let bytes: Vec<u8> = (0..300_000_u32).map(|at| (at % 251) as u8).collect();
    for from in [0, 1, 5000, 299_999, 300_000] {
        let mut pair = Pair::new();
        let id = pair.client.attach(12, [from, 0], 1 << 20).unwrap();
        let asked = pair.asked();
        assert_eq!(
            asked,
            [format!(
                "Ask {{ id: 1, ask: Attach {{ exec: 12, from: [{from}, 0] }} }}"
            )]
        );
        let mut exec = detached(Some(1 << 20), &bytes);
        assert!(exec.attach([from, 0]).is_ok());
        pair.execs.insert(id, exec);
        let (heard, output) = pair.heard();
        assert_eq!(heard, ["Started { id: 1, exec: 12, pid: 100 }"]);
        assert!(output == bytes[from as usize..], "from {from}");
        pair.execs.values_mut().for_each(end);
        assert_eq!(pair.heard().0, ["exit 1"]);
    }
}

#[test]
fn ex15_attach_outside_of_what_is_kept_is_refused_and_names_what_there_is() {
    let mut exec = detached(None, &[7; 1 << 20]);
    let first = exec.attach([0, 0]).unwrap();
    assert!(exec.acknowledge(first, [1 << 20, 0]), "room again");
    assert_eq!(
        exec.earliest(Stream::Stdout),
        0,
        "kept while the ring has room"
    );
    assert_eq!(exec.absorb(Stream::Stdout, &[8; 700_000], 0), 700_000);
    let start = exec.earliest(Stream::Stdout);
    let length = (1 << 20) + 700_000;
    assert!(length - start <= 1 << 20, "never more than the ring");
    assert!(length - start > 1 << 19, "and no less than it must");
    let error = exec.attach([0, 0]).unwrap_err();
    assert!(
        error
            .to_string()
            .contains(&format!("attach from {start},0")),
        "{error}"
    );
    let error = exec.attach([length + 1, 0]).unwrap_err();
    assert!(error.to_string().contains(&length.to_string()), "{error}");
    // One that is further back is waited for, and then not.
    let second = exec.attach([start, 0]).unwrap();
    exec.acknowledge(first, [700_000, 0]);
    let room = (1 << 20) - (length - start);
    assert_eq!(exec.absorb(Stream::Stdout, &[9; 1 << 20], 0) as u64, room);
    assert_eq!(exec.state(), crate::ExecState::Waiting);
    assert!(exec.detach(second), "room again");
    assert_eq!(exec.state(), crate::ExecState::Running);
}

#[test]
fn two_clients_each_get_all_of_an_uncapped_exec() {
    let bytes: Vec<u8> = (0..900_000_u32).map(|at| (at % 241) as u8).collect();
    let mut exec = detached(None, &bytes[..500_000]);
    let (fast, slow) = (exec.attach([0, 0]).unwrap(), exec.attach([0, 0]).unwrap());
    exec.acknowledge(fast, [500_000, 0]);
    assert_eq!(exec.absorb(Stream::Stdout, &bytes[500_000..], 0), 400_000);
    exec.acknowledge(fast, [400_000, 0]);
    let mut seen = Vec::new();
    while seen.len() < bytes.len() {
        let piece = exec.bytes(Stream::Stdout, seen.len() as u64, 100_000);
        assert!(!piece.is_empty(), "at {}", seen.len());
        let count = piece.len() as u64;
        seen.extend_from_slice(piece);
        exec.acknowledge(slow, [count, 0]);
    }
    assert!(seen == bytes);
}

#[test]
fn wait_gives_the_end_alone_and_detach_gives_up_without_one() {
    let mut pair = Pair::new();
    let wait = pair.client.wait(12).unwrap();
    let attach = pair.client.attach(12, [0, 0], 10).unwrap();
    assert_eq!(pair.asked().len(), 2);
    for id in [wait, attach] {
        pair.execs
            .insert(id, detached(Some(100), b"more than ten bytes"));
    }
    let (heard, output) = pair.heard();
    assert_eq!(heard, ["Started { id: 2, exec: 12, pid: 100 }"]);
    assert_eq!(output.len(), 10, "its window");
    assert_eq!(pair.client.detach(attach), Ok(true));
    // Given up, it gives nothing back.
    pair.client.consumed(attach, Stream::Stdout, 10);
    assert_eq!(pair.asked(), ["Detach { id: 2 }"]);
    assert_eq!(pair.heard().0, ["Done { id: 2 }"]);
    assert_eq!(pair.agent.finished(), [attach]);
    end(pair.execs.get_mut(&wait).unwrap());
    assert_eq!(pair.heard().0, ["exit 1"]);
    // And one that crosses the end is no mistake.
    let wait = pair.client.wait(12).unwrap();
    pair.asked();
    let mut exec = detached(Some(100), b"");
    end(&mut exec);
    pair.execs.insert(wait, exec);
    assert_eq!(pair.client.detach(wait), Ok(true));
    assert_eq!(pair.heard().0, ["exit 3"]);
    assert!(pair.asked().is_empty());
    assert!(pair.heard().0.is_empty());
}

#[test]
fn calls_about_execs_are_asked_and_answered_once() {
    let mut pair = Pair::new();
    let list = pair.client.list(5).unwrap();
    let signal = pair.client.signal_exec(12, 10).unwrap();
    let cancel = pair
        .client
        .cancel_exec(12, CancelReason::Request, 7)
        .unwrap();
    let release = pair.client.release(12).unwrap();
    assert!(pair.client.signal_exec(12, 65).is_err());
    assert_eq!(
        pair.asked(),
        [
            "Ask { id: 1, ask: List { after: 5 } }",
            "Ask { id: 2, ask: Signal { exec: 12, signal: 10 } }",
            "Ask { id: 3, ask: Cancel { exec: 12, reason: Request, grace_ns: 7 } }",
            "Ask { id: 4, ask: Release { exec: 12 } }",
        ]
    );
    pair.agent.list(list, ExecsPage::default());
    pair.agent.done(signal, Ok(()));
    pair.agent.done(cancel, Ok(()));
    pair.agent
        .done(release, Err(Refusal::new(RefusedCode::NotEnded, "it runs")));
    let (heard, _) = pair.heard();
    assert!(heard[0].starts_with("Execs { id: 1"), "{heard:?}");
    assert_eq!(
        heard[1..],
        ["Done { id: 2 }", "Done { id: 3 }", "refused 4 not_ended"]
    );
}

#[test]
fn se01_answers_that_were_not_asked_for_end_the_session() {
    let answers = |kind: u8| match kind {
        0 => AgentMessage::Done,
        1 => AgentMessage::Execs(ExecsPage::default()),
        _ => AgentMessage::Pong,
    };
    for kind in 0..3_u8 {
        for call in 0..4_u8 {
            let mut client = ClientSession::new(hello(), 0);
            match call {
                0 => drop(client.ping()),
                1 => drop(client.list(0)),
                2 => drop(client.release(1)),
                _ => drop(client.wait(1)),
            }
            let mut bytes = Vec::new();
            AgentMessage::Hello(hello())
                .encode(0, 1, &mut bytes)
                .unwrap();
            answers(kind).encode(1, 2, &mut bytes).unwrap();
            client.space()[..bytes.len()].copy_from_slice(&bytes);
            client.filled(bytes.len(), 0);
            assert!(matches!(client.next(), Ok(Some(Event::Opened { .. }))));
            let right = matches!((kind, call), (0, 2) | (1, 1) | (2, 0));
            assert_eq!(client.next().is_ok(), right, "{kind} to {call}");
        }
    }
}

#[test]
fn se01_stdin_for_an_exec_of_somebody_elses_and_detach_of_ones_own_end_the_session() {
    let exec = || ClientMessage::Exec(Box::new(ExecRequest::new(["sh"])));
    let attach = ClientMessage::Attach {
        exec: 12,
        from: [0, 0],
        window: 1,
    };
    for (first, second, fine) in [
        (&attach, ClientMessage::Stdin(b"x"), false),
        (&attach, ClientMessage::StdinClose, false),
        (&attach, ClientMessage::Detach, true),
        (&attach, ClientMessage::Signal(1), true),
        (&ClientMessage::Wait(12), ClientMessage::StdinClose, false),
        (&ClientMessage::Wait(12), ClientMessage::Detach, true),
        (&exec(), ClientMessage::Detach, false),
        (&exec(), ClientMessage::StdinClose, true),
    ] {
        let mut agent = AgentSession::new(hello(), 0);
        let mut bytes = Vec::new();
        ClientMessage::Hello(hello())
            .encode(0, 1, &mut bytes)
            .unwrap();
        first.encode(1, 2, &mut bytes).unwrap();
        second.encode(1, 3, &mut bytes).unwrap();
        agent.space()[..bytes.len()].copy_from_slice(&bytes);
        agent.filled(bytes.len(), 0);
        assert!(matches!(agent.next(), Ok(Some(_))));
        assert_eq!(agent.next().is_ok(), fine, "{second:?} after {first:?}");
    }
}

#[test]
fn ho03_attach_window_at_its_ends_is_taken_and_beyond_them_refused() {
    use crate::limits::MAX_WINDOW;
    for (window, fine) in [
        (0, false),
        (1, true),
        (MAX_WINDOW, true),
        (MAX_WINDOW + 1, false),
    ] {
        let mut client = ClientSession::new(hello(), 0);
        assert_eq!(client.attach(1, [0, 0], window).is_ok(), fine, "{window}");
        let mut agent = AgentSession::new(hello(), 0);
        let mut bytes = Vec::new();
        ClientMessage::Hello(hello())
            .encode(0, 1, &mut bytes)
            .unwrap();
        let attach = ClientMessage::Attach {
            exec: 1,
            from: [u64::MAX; 2],
            window,
        };
        attach.encode(1, 2, &mut bytes).unwrap();
        agent.space()[..bytes.len()].copy_from_slice(&bytes);
        agent.filled(bytes.len(), 0);
        assert_eq!(agent.next().unwrap().is_some(), fine, "{window}");
        assert_eq!(agent.live().count(), usize::from(fine));
    }
}

#[test]
fn ex20_limit_is_sent_at_once_ahead_of_a_chunk_that_has_no_credit() {
    let mut pair = Pair::new();
    let id = pair.client.attach(12, [0, 0], 4).unwrap();
    pair.asked();
    let mut exec = detached(Some(10), b"0123456789");
    exec.drop_bytes(Stream::Stdout, 1, 0);
    pair.execs.insert(id, exec);
    let (heard, output) = pair.heard();
    assert_eq!(heard[1..], ["Limit { id: 1, at: [10, 0] }"]);
    assert_eq!(
        output, b"0123",
        "the rest waits for credit, the word does not"
    );
    pair.client.consumed(id, Stream::Stdout, 4);
    pair.asked();
    assert_eq!(pair.heard().1, b"4567");
    end(pair.execs.get_mut(&id).unwrap());
    assert!(pair.heard().0.is_empty(), "the end is behind the last byte");
    pair.client.consumed(id, Stream::Stdout, 4);
    pair.asked();
    let (heard, output) = pair.heard();
    assert_eq!(
        (heard, output.as_slice()),
        (vec!["exit 1".to_owned()], &b"89"[..])
    );
    assert_eq!(
        pair.execs[&id].record().map(|record| &record.cause),
        Some(&Cause::OutputLimit)
    );
}
