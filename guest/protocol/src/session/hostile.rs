//! HO03 and HO04: bytes that were damaged, repeated, cut or made up, into every machine. None
//! panics, none grows, and after an error none goes on.

use proptest::prelude::*;

use super::tests::{end, hello};
use super::*;
use crate::control::{AgentControl, ControlEvent, HostControl, HostEvent};
use crate::exec::{Exec, Settings};
use crate::hello::VERSIONS;
use crate::message::{
    AgentCounters, AgentMessage, ClientMessage, ControlToAgent, ControlToHost, ExecRequest, Life,
    Winsize,
};
use crate::{CancelReason, Stream};

/// What is done to a byte stream on its way.
#[derive(Debug, Clone)]
enum Damage {
    Set { at: usize, value: u8 },
    Remove { at: usize, count: usize },
    Repeat { at: usize, count: usize },
    Insert { at: usize, bytes: Vec<u8> },
}

fn damage() -> impl Strategy<Value = Vec<Damage>> {
    let at = 0..600_usize;
    let one = prop_oneof![
        4 => (at.clone(), any::<u8>()).prop_map(|(at, value)| Damage::Set { at, value }),
        1 => (at.clone(), 1..80_usize).prop_map(|(at, count)| Damage::Remove { at, count }),
        1 => (at.clone(), 1..80_usize).prop_map(|(at, count)| Damage::Repeat { at, count }),
        1 => (at, proptest::collection::vec(any::<u8>(), 1..60))
            .prop_map(|(at, bytes)| Damage::Insert { at, bytes }),
    ];
    proptest::collection::vec(one, 0..4)
}

fn damaged(mut bytes: Vec<u8>, damage: &[Damage]) -> Vec<u8> {
    for damage in damage {
        match damage {
            Damage::Set { at, value } => {
                let at = at % bytes.len().max(1);
                bytes[at..]
                    .iter_mut()
                    .take(1)
                    .for_each(|byte| *byte = *value);
            }
            Damage::Remove { at, count } => {
                let at = (*at).min(bytes.len());
                bytes.drain(at..bytes.len().min(at + count));
            }
            Damage::Repeat { at, count } => {
                let at = (*at).min(bytes.len());
                let piece = bytes[at..bytes.len().min(at + count)].to_vec();
                bytes.splice(at..at, piece);
            }
            Damage::Insert { at, bytes: more } => {
                let at = (*at).min(bytes.len());
                bytes.splice(at..at, more.iter().copied());
            }
        }
    }
    bytes
}

/// Feeds a stream in pieces; `take` empties the machine and says whether it goes on.
fn feed<M>(
    machine: &mut M,
    bytes: &[u8],
    piece: usize,
    space: impl Fn(&mut M) -> &mut [u8],
    filled: impl Fn(&mut M, usize),
    mut take: impl FnMut(&mut M) -> bool,
) {
    for mut rest in bytes.chunks(piece) {
        while !rest.is_empty() {
            let room = space(machine);
            assert!(
                room.len() <= 256 << 10,
                "no machine makes room for more than a frame"
            );
            let count = room.len().min(rest.len());
            if count == 0 {
                return;
            }
            room[..count].copy_from_slice(&rest[..count]);
            filled(machine, count);
            rest = &rest[count..];
            if !take(machine) {
                return;
            }
        }
    }
}

fn client_stream() -> Vec<u8> {
    let exec = || ClientMessage::Exec(Box::new(ExecRequest::new(["sh", "-c", "true"])));
    let script = [
        (0, ClientMessage::Hello(hello())),
        (1, exec()),
        (2, ClientMessage::Ping),
        (1, ClientMessage::Stdin(b"typed")),
        (3, exec()),
        (
            1,
            ClientMessage::Resize(Winsize {
                rows: 1,
                columns: 1,
            }),
        ),
        (3, ClientMessage::Signal(9)),
        (
            1,
            ClientMessage::Cancel {
                reason: CancelReason::Request,
                grace_ns: 1,
            },
        ),
        (1, ClientMessage::StdinClose),
        (3, ClientMessage::Credit([0, 0])),
        (
            4,
            ClientMessage::Attach {
                exec: 1,
                from: [2, 0],
                window: 9,
            },
        ),
        (4, ClientMessage::Detach),
        (5, ClientMessage::Wait(1)),
        (6, ClientMessage::List { after: 0 }),
        (7, ClientMessage::Release(1)),
    ];
    let mut bytes = Vec::new();
    for (sequence, (id, message)) in (1..).zip(&script) {
        assert_eq!(message.encode(*id, sequence, &mut bytes), Ok(()));
    }
    bytes
}

fn agent_stream() -> Vec<u8> {
    let mut exec = Exec::new(Settings::new(&ExecRequest::new(["sh"])), 0);
    exec.started(1, 1);
    exec.absorb(Stream::Stdout, b"hello", 0);
    end(&mut exec);
    let record = exec.record().cloned().map(Box::new);
    let output = AgentMessage::Output {
        stream: Stream::Stdout,
        offset: 0,
        data: b"hello",
    };
    let mut script = vec![
        (0, AgentMessage::Hello(hello())),
        (1, AgentMessage::Started { exec: 1, pid: 1 }),
        (1, output),
        (2, AgentMessage::Started { exec: 2, pid: 2 }),
        (1, AgentMessage::StdinCredit(5)),
    ];
    script.extend(record.map(|record| (1, AgentMessage::Exit(record))));
    let mut bytes = Vec::new();
    for (sequence, (id, message)) in (1..).zip(&script) {
        assert_eq!(message.encode(*id, sequence, &mut bytes), Ok(()));
    }
    bytes
}

fn life() -> Life {
    Life::new(hello().generation)
}

proptest! {
    #![proptest_config(crate::cases(1000))]

    #[test]
    fn ho04_agent_session_takes_any_bytes(damage in damage(), piece in 1..700_usize) {
        let mut session = AgentSession::new(hello(), 0);
        let mut ended = false;
        feed(&mut session, &damaged(client_stream(), &damage), piece,
            AgentSession::space, |session, count| session.filled(count, 0),
            |session| loop {
                match session.next().map(|request| request.is_some()) {
                    Ok(true) => {}
                    Ok(false) => return true,
                    Err(violation) => {
                        session.end(&violation);
                        ended = true;
                        return false;
                    }
                }
            });
        prop_assert!(session.live().count() <= 8);
        prop_assert!(session.queued() < 16 << 10);
        if ended {
            prop_assert_eq!(session.next(), Ok(None));
            prop_assert!(!session.wants_read());
        } else if damage.is_empty() {
            prop_assert_eq!(session.live().collect::<Vec<_>>(), [1, 3, 5]);
        }
    }

    #[test]
    fn ho04_client_session_takes_any_bytes(damage in damage(), piece in 1..700_usize) {
        let mut session = ClientSession::new(hello(), 0);
        for _ in 0..2 {
            prop_assert!(session.exec(&ExecRequest::new(["sh"])).is_ok());
        }
        let mut failed = false;
        feed(&mut session, &damaged(agent_stream(), &damage), piece,
            ClientSession::space, |session, count| session.filled(count, 0),
            |session| loop {
                match session.next().map(|event| event.is_some()) {
                    Ok(true) => {}
                    Ok(false) => return !session.ended(),
                    Err(_) => {
                        failed = true;
                        return false;
                    }
                }
            });
        if failed {
            prop_assert!(session.ended());
            prop_assert_eq!(session.next(), Ok(None));
        } else if damage.is_empty() {
            prop_assert_eq!(session.live().collect::<Vec<_>>(), [2]);
        }
    }

    #[test]
    fn ho04_control_machines_take_any_bytes(damage in damage(), piece in 1..700_usize) {
        let mut bytes = Vec::new();
        let generation = hello().generation;
        let script = [
            ControlToHost::Hello { versions: VERSIONS, features: 0 },
            ControlToHost::Confirm(1),
            ControlToHost::Ready(generation),
            ControlToHost::Counters { number: 1, counters: AgentCounters::default() },
            ControlToHost::Confirm(2),
        ];
        for (sequence, message) in (1..).zip(&script) {
            prop_assert!(message.encode(sequence, &mut bytes).is_ok());
        }
        let mut host = HostControl::new(0);
        feed(&mut host, &damaged(bytes, &damage), piece,
            HostControl::space, |host, count| host.filled(count, 0),
            |host| loop {
                match host.next() {
                    Ok(Some(HostEvent::Hello { .. })) => assert_eq!(host.live(&life()), Ok(())),
                    Ok(Some(HostEvent::Ready)) => assert_eq!(host.ask_counters(), Ok(Some(1))),
                    Ok(Some(_)) => {}
                    Ok(None) => return true,
                    Err(_) => return false,
                }
            });
        prop_assert!(host.outgoing().len() < 4096);
        if damage.is_empty() {
            prop_assert!(host.ready());
        }

        let mut bytes = Vec::new();
        let script = [
            ControlToAgent::Life(Box::new(life())),
            ControlToAgent::Ping(1),
            ControlToAgent::Confirmed { token: 1, generation },
            ControlToAgent::AskCounters(1),
            ControlToAgent::PowerOff { grace_ns: 1 },
            ControlToAgent::AskCounters(2),
        ];
        for (sequence, message) in (1..).zip(&script) {
            prop_assert!(message.encode(sequence, &mut bytes).is_ok());
        }
        let mut agent = AgentControl::new(0);
        agent.confirm();
        feed(&mut agent, &damaged(bytes, &damage), piece,
            AgentControl::space, |agent, count| agent.filled(count, 0),
            |agent| loop {
                match agent.next() {
                    Ok(Some(ControlEvent::Life(_))) => agent.ready(),
                    Ok(Some(ControlEvent::Counters)) => agent.counters(AgentCounters::default()),
                    Ok(Some(_)) => {}
                    Ok(None) => return true,
                    Err(_) => return false,
                }
            });
        if damage.is_empty() {
            prop_assert_eq!(agent.generation(), Some(generation));
        }
    }
}
