//! Bytes as a list of operations on a session, for fuzzers and property tests: what a client, or an agent, may do to the
//! other side's machine, in any order, well formed or not.
//!
//! Every list of bytes is a list of operations: one byte that says which, and those that it takes. What is missing at the
//! end is zero. What must hold whatever comes is asserted here, so that a fuzzer and a property test find the same.

use std::collections::BTreeMap;

use crate::cause::{CancelReason, Stream};
use crate::exec::{Action, Exec, MainEnd, Reader, Room, Settings, Usage};
use crate::frame::{Decoder, HEADER_LEN, Header};
use crate::generation::GenerationId;
use crate::hello::Hello;
use crate::limits::MAX_PAYLOAD;
use crate::message::{
    AgentMessage, ClientMessage, ExecRequest, ExecsPage, FrameKind, Refusal, RefusedCode,
};
use crate::session::{AgentSession, Ask, ClientSession, Event, Execs, Request};

/// Operations of one run, at most: a longer list shows nothing new.
const MAX_OPERATIONS: usize = 256;

/// One operation on a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// Bytes as they are.
    Raw(Vec<u8>),
    /// A frame with a header that is right but for its id, and any payload.
    Frame {
        /// Its kind, by its place in [`FrameKind::ALL`].
        kind: u8,
        /// Its id.
        id: u8,
        /// Its payload.
        payload: Vec<u8>,
    },
    /// A message that is well formed, of the kinds of the other side.
    Message {
        /// Which.
        which: u8,
        /// Its id.
        id: u8,
        /// A number in it.
        number: u16,
    },
    /// The side under test does something of its own: an exec writes, ends, is read; a client asks.
    Own {
        /// What.
        which: u8,
        /// To which request.
        id: u8,
        /// How much.
        number: u16,
    },
    /// Time passes, in milliseconds.
    Pass(u16),
}

impl Operation {
    /// The operations that bytes stand for.
    pub fn list(bytes: &[u8]) -> Vec<Self> {
        let mut bytes = bytes.iter().copied();
        let mut all = Vec::new();
        while let (Some(which), true) = (bytes.next(), all.len() < MAX_OPERATIONS) {
            let mut take = || bytes.next().unwrap_or(0);
            all.push(match which % 8 {
                0 => {
                    let count = take();
                    Self::Raw((0..count).map(|_| take()).collect())
                }
                1 => {
                    let (kind, id, count) = (take(), take(), take());
                    let payload = (0..count).map(|_| take()).collect();
                    Self::Frame { kind, id, payload }
                }
                2..=4 => Self::Message {
                    which: take(),
                    id: take(),
                    number: u16::from_le_bytes([take(), take()]),
                },
                5 | 6 => Self::Own {
                    which: take(),
                    id: take(),
                    number: u16::from_le_bytes([take(), take()]),
                },
                _ => Self::Pass(u16::from_le_bytes([take(), take()])),
            });
        }
        all
    }
}

fn hello() -> Hello {
    Hello::new(GenerationId {
        counter: 3,
        public_id: 77,
    })
}

/// What one side writes: frames with the sequence numbers that are due.
#[derive(Default)]
struct Wire {
    bytes: Vec<u8>,
    sequence: u64,
}

impl Wire {
    fn frame(&mut self, kind: u8, id: u8, payload: &[u8]) {
        let kinds = FrameKind::ALL;
        self.sequence += 1;
        let header = Header {
            length: payload.len() as u32,
            kind: kinds[usize::from(kind) % kinds.len()],
            id: id.into(),
            sequence: self.sequence,
        };
        self.bytes.extend_from_slice(&header.encode());
        self.bytes.extend_from_slice(payload);
    }

    fn client(&mut self, id: u8, message: &ClientMessage<'_>) {
        self.sequence += 1;
        let written = message.encode(id.into(), self.sequence, &mut self.bytes);
        assert_eq!(written, Ok(()));
    }

    fn agent(&mut self, id: u8, message: &AgentMessage<'_>) {
        self.sequence += 1;
        let written = message.encode(id.into(), self.sequence, &mut self.bytes);
        assert_eq!(written, Ok(()));
    }
}

/// The execs of an agent under test.
#[derive(Default)]
struct Guest {
    /// By their numbers.
    execs: BTreeMap<u64, Exec>,
    /// By the ids of requests, with the reader of each that reads.
    ids: BTreeMap<u64, (u64, Option<Reader>)>,
    last: u64,
}

impl Execs for Guest {
    fn exec(&self, id: u64) -> Option<&Exec> {
        self.execs.get(&self.ids.get(&id)?.0)
    }
}

/// An agent's session against whatever a client does, with execs that write and end meanwhile.
///
/// # Panics
/// When something does not hold: that is what a fuzzer looks for.
pub fn agent(input: &[u8]) {
    let mut session = AgentSession::new(hello(), 0);
    let mut guest = Guest::default();
    let mut wire = Wire::default();
    let mut client = Decoder::with_capacity(1 << 20);
    let (mut now, mut ended) = (0, false);
    wire.client(0, &ClientMessage::Hello(hello()));
    for operation in Operation::list(input) {
        match operation {
            Operation::Raw(bytes) => wire.bytes.extend_from_slice(&bytes),
            Operation::Frame { kind, id, payload } => wire.frame(kind, id, &payload),
            Operation::Message { which, id, number } => {
                client_message(&mut wire, which, id, number)
            }
            Operation::Own { which, id, number } => own(&mut guest, which, id, number, now),
            Operation::Pass(milliseconds) => {
                now += u64::from(milliseconds) * 1_000_000;
                for exec in guest.execs.values_mut() {
                    exec.tick(now);
                    settle(exec, now);
                }
                if !ended && let Err(violation) = session.tick(now) {
                    session.end(&violation);
                    ended = true;
                }
            }
        }
        let mut rest = std::mem::take(&mut wire.bytes);
        while !rest.is_empty() && session.wants_read() {
            let space = session.space();
            let count = space.len().min(rest.len());
            space[..count].copy_from_slice(&rest[..count]);
            session.filled(count, now);
            rest.drain(..count);
            if !serve(&mut session, &mut guest, now) {
                ended = true;
            }
        }
        if !session.wants_read() && !ended {
            // Later, when it has been heard.
            wire.bytes = rest;
        }
        if !deliver(&mut session, &mut guest, &mut client, now) {
            return;
        }
        if ended {
            assert_eq!(
                session.next(),
                Ok(None),
                "nothing is acted on after the end"
            );
            assert!(!session.wants_read());
        }
        for exec in guest.execs.values() {
            check(exec);
        }
    }
}

fn client_message(wire: &mut Wire, which: u8, id: u8, number: u16) {
    let long: u64 = number.into();
    let mut request = ExecRequest::new(["sh"]);
    request.window = long;
    request.detached = which & 0x80 != 0;
    request.output_limit = (which & 0x40 == 0).then_some(long);
    request.timeout_ns = if which & 0x20 == 0 { 0 } else { long };
    let data = vec![7; usize::from(number % 5000)];
    let message = match which % 15 {
        0 | 1 => ClientMessage::Exec(Box::new(request)),
        2 => ClientMessage::Stdin(&data),
        3 => ClientMessage::StdinClose,
        4 => ClientMessage::Signal((number % 64) as u8 + 1),
        5 => ClientMessage::Cancel {
            reason: CancelReason::Request,
            grace_ns: long,
        },
        6 => ClientMessage::Credit([long, 0]),
        7 => ClientMessage::Credit([0, long]),
        8 => ClientMessage::Ping,
        9 | 10 => ClientMessage::Attach {
            exec: long % 8,
            from: [long >> 8, 0],
            window: long,
        },
        11 => ClientMessage::Wait(long % 8),
        12 => ClientMessage::Detach,
        13 => ClientMessage::List { after: long % 8 },
        _ => ClientMessage::Release(long % 8),
    };
    wire.client(id, &message);
}

/// Acts on every request; `false` if the session has ended.
fn serve(session: &mut AgentSession, guest: &mut Guest, now: u64) -> bool {
    loop {
        let request = match session.next() {
            Ok(Some(request)) => request,
            Ok(None) => return true,
            Err(violation) => {
                session.end(&violation);
                return false;
            }
        };
        match request {
            Request::Exec { id, request } => {
                assert_eq!(request.validate(), Ok(()), "checked before it is asked for");
                guest.last += 1;
                let mut exec = Exec::new(Settings::new(&request), now);
                exec.started(guest.last, 1);
                guest.execs.insert(guest.last, exec);
                let reader = (!request.detached).then_some(Reader::FIRST);
                guest.ids.insert(id, (guest.last, reader));
            }
            Request::Ask { id, ask } => asked(session, guest, id, ask, now),
            Request::Consumed { id, bytes } => {
                if let Some((number, Some(reader))) = guest.ids.get(&id)
                    && let Some(exec) = guest.execs.get_mut(number)
                {
                    exec.acknowledge(*reader, bytes);
                }
            }
            Request::Cancel {
                id,
                reason,
                grace_ns,
            } => {
                let number = guest.ids.get(&id).map_or(0, |(number, _)| *number);
                if let Some(exec) = guest.execs.get_mut(&number) {
                    exec.cancel(reason, grace_ns, now);
                    settle(exec, now);
                }
            }
            Request::Stdin { id, data } => {
                let count = data.len() as u64;
                session.grant_stdin(id, count);
            }
            _ => {}
        }
    }
}

fn asked(session: &mut AgentSession, guest: &mut Guest, id: u64, ask: Ask, now: u64) {
    let unknown = || Refusal::new(RefusedCode::UnknownExec, "there is none");
    match ask {
        Ask::Attach { exec, from } => {
            match guest.execs.get_mut(&exec).map(|exec| exec.attach(from)) {
                Some(Ok(reader)) => drop(guest.ids.insert(id, (exec, Some(reader)))),
                Some(Err(error)) => {
                    session.refuse(id, Refusal::new(RefusedCode::BelowStart, error.to_string()));
                }
                None => session.refuse(id, unknown()),
            }
        }
        Ask::Wait { exec } if guest.execs.contains_key(&exec) => {
            guest.ids.insert(id, (exec, None));
        }
        Ask::Wait { .. } => session.refuse(id, unknown()),
        Ask::List { .. } => session.list(id, ExecsPage::default()),
        Ask::Cancel { exec, .. } | Ask::Signal { exec, .. } => {
            let result = guest.execs.get_mut(&exec).ok_or_else(unknown);
            let result = result.map(|exec| {
                exec.cancel(CancelReason::Request, 0, now);
                settle(exec, now);
            });
            session.done(id, result);
        }
        Ask::Release { exec } => {
            let used = guest.ids.values().any(|(number, _)| *number == exec);
            let ended = guest
                .execs
                .get(&exec)
                .is_some_and(|exec| exec.record().is_some());
            if ended && !used {
                guest.execs.remove(&exec);
            }
            session.done(id, ended.then_some(()).ok_or_else(unknown));
        }
    }
}

/// What an exec under test does by itself.
fn own(guest: &mut Guest, which: u8, id: u8, number: u16, now: u64) {
    let numbers: Vec<u64> = guest.execs.keys().copied().collect();
    let Some(place) = usize::from(id).checked_rem(numbers.len()) else {
        return;
    };
    let Some(exec) = guest.execs.get_mut(&numbers[place]) else {
        return;
    };
    let stream = if which & 0x80 == 0 {
        Stream::Stdout
    } else {
        Stream::Stderr
    };
    match which % 4 {
        0 | 1 => {
            if exec.record().is_none() {
                exec.absorb(stream, &vec![which; usize::from(number)], now);
            }
        }
        2 => exec.close(stream),
        _ => {
            exec.main_exited(MainEnd::Exited(which), now);
            exec.leaf_empty();
        }
    }
    settle(exec, now);
}

fn settle(exec: &mut Exec, now: u64) {
    while let Some(action) = exec.action() {
        match action {
            Action::KillLeaf => {
                exec.main_exited(MainEnd::Signaled(9), now);
                exec.leaf_empty();
            }
            Action::ReadOut => {
                for stream in [Stream::Stdout, Stream::Stderr] {
                    if matches!(exec.room(stream), Room::Store(_) | Room::Discard) {
                        exec.close(stream);
                    }
                }
            }
            Action::Finish => exec.finish(Usage::default(), now),
            Action::Signal(_) => {}
        }
    }
}

fn check(exec: &Exec) {
    for stream in [Stream::Stdout, Stream::Stderr] {
        assert!(exec.earliest(stream) <= exec.length(stream));
    }
    if let Some(record) = exec.record() {
        for (stream, counts) in [Stream::Stdout, Stream::Stderr].iter().zip(record.streams) {
            assert_eq!(counts.forwarded, exec.length(*stream));
        }
    }
}

/// Takes what the session has to say, which must be frames that read. `false` if it cannot go on, as a client that gives
/// back what it has not received brings about.
fn deliver(session: &mut AgentSession, guest: &mut Guest, client: &mut Decoder, now: u64) -> bool {
    let mut sequence = None;
    for _ in 0..64 {
        session.fill(guest);
        assert!(session.queued() < 1 << 20, "what is queued is bounded");
        let Ok(slices) = session.gather(guest) else {
            return false;
        };
        let bytes: Vec<u8> = slices
            .iter()
            .flat_map(|slice| slice.iter().copied())
            .collect();
        if bytes.is_empty() {
            break;
        }
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let space = client.space();
            let count = space.len().min(rest.len());
            space[..count].copy_from_slice(&rest[..count]);
            client.filled(count);
            rest = &rest[count..];
            while let Some(frame) = client.next().unwrap_or_else(|error| panic!("{error}")) {
                assert!(frame.payload.len() <= MAX_PAYLOAD);
                assert!(AgentMessage::decode(&frame).is_ok(), "{:?}", frame.header);
                let found = frame.header.sequence;
                assert!(sequence.is_none_or(|last: u64| found == last + 1));
                sequence = Some(found);
            }
        }
        let count = bytes.len();
        session.wrote(count, now);
        for id in session.finished() {
            if let Some((number, Some(reader))) = guest.ids.remove(&id)
                && let Some(exec) = guest.execs.get_mut(&number)
            {
                exec.detach(reader);
            }
        }
        if !serve(session, guest, now) {
            break;
        }
    }
    true
}

/// A client's session against whatever an agent says, while it asks for things of its own.
///
/// # Panics
/// When something does not hold: that is what a fuzzer looks for.
pub fn client(input: &[u8]) {
    let mut session = ClientSession::new(hello(), 0);
    let mut wire = Wire::default();
    let mut offsets: BTreeMap<u64, [u64; 2]> = BTreeMap::new();
    let mut over: Vec<u64> = Vec::new();
    let (mut now, mut failed) = (0, false);
    wire.agent(0, &AgentMessage::Hello(hello()));
    for operation in Operation::list(input) {
        match operation {
            Operation::Raw(bytes) => wire.bytes.extend_from_slice(&bytes),
            Operation::Frame { kind, id, payload } => wire.frame(kind, id, &payload),
            Operation::Message { which, id, number } => agent_message(&mut wire, which, id, number),
            Operation::Own { which, id, number } => {
                ask(&mut session, &mut offsets, which, id, number)
            }
            Operation::Pass(milliseconds) => {
                now += u64::from(milliseconds) * 1_000_000;
                failed |= session.tick(now).is_err();
            }
        }
        let outgoing = session.outgoing().len();
        session.wrote(outgoing);
        let mut rest = std::mem::take(&mut wire.bytes);
        while !rest.is_empty() && !session.ended() {
            let space = session.space();
            assert!(!space.is_empty(), "there is room, or nothing more is read");
            let count = space.len().min(rest.len());
            space[..count].copy_from_slice(&rest[..count]);
            session.filled(count, now);
            rest.drain(..count);
            loop {
                match session.next() {
                    Ok(Some(event)) => hear(&event, &mut offsets, &mut over),
                    Ok(None) => break,
                    Err(_) => {
                        failed = true;
                        break;
                    }
                }
            }
        }
        if failed {
            assert!(session.ended());
            assert_eq!(session.next(), Ok(None));
            assert!(session.ping().is_err(), "nothing can be asked for any more");
            return;
        }
    }
}

fn hear(event: &Event<'_>, offsets: &mut BTreeMap<u64, [u64; 2]>, over: &mut Vec<u64>) {
    match event {
        Event::Output {
            id,
            stream,
            offset,
            data,
        } => {
            assert!(!over.contains(id), "nothing comes after the end");
            assert!(!data.is_empty());
            let next = &mut offsets.entry(*id).or_default()[stream.index()];
            assert_eq!(*offset, *next, "no gap and no duplicate");
            *next += data.len() as u64;
        }
        Event::Exit { id, .. } | Event::Refused { id, .. } | Event::Done { id } => {
            assert!(!over.contains(id), "one end each");
            over.push(*id);
        }
        _ => {}
    }
}

fn ask(
    session: &mut ClientSession,
    offsets: &mut BTreeMap<u64, [u64; 2]>,
    which: u8,
    id: u8,
    number: u16,
) {
    let long: u64 = number.into();
    let id: u64 = id.into();
    let mut request = ExecRequest::new(["sh"]);
    (request.window, request.detached) = (long.max(1), which & 0x80 != 0);
    // What is wrong with a wish is said, and changes nothing.
    match which % 12 {
        0..=2 => drop(session.exec(&request)),
        3 | 4 => {
            if let Ok(id) = session.attach(long % 8, [long, 0], long) {
                offsets.insert(id, [long, 0]);
            }
        }
        5 => drop(session.wait(long % 8)),
        6 => drop(session.list(long)),
        7 => drop(session.release(long)),
        8 => drop(session.detach(id)),
        9 => session.consumed(id, Stream::Stdout, long),
        10 => drop(session.ping()),
        _ => drop(session.cancel(id, CancelReason::Request, long)),
    }
}

fn agent_message(wire: &mut Wire, which: u8, id: u8, number: u16) {
    let long: u64 = number.into();
    let data = vec![5; usize::from(number % 3000) + 1];
    let stream = if which & 0x80 == 0 {
        Stream::Stdout
    } else {
        Stream::Stderr
    };
    let message = match which % 12 {
        0..=2 => AgentMessage::Started { exec: long, pid: 1 },
        3 | 4 => AgentMessage::Output {
            stream,
            offset: 0,
            data: &data,
        },
        5 => AgentMessage::Output {
            stream,
            offset: long,
            data: &data,
        },
        6 => AgentMessage::Limit([long, 0]),
        7 => AgentMessage::StdinCredit(long),
        8 => AgentMessage::Refused(Refusal::new(RefusedCode::Invalid, "no")),
        9 => AgentMessage::Pong,
        10 => AgentMessage::Done,
        _ => AgentMessage::Execs(ExecsPage::default()),
    };
    wire.agent(id, &message);
}

/// Bytes that a decoder is given in pieces: frames or an error, never more memory than one frame.
///
/// # Panics
/// When something does not hold.
pub fn frames(input: &[u8]) {
    let mut decoder = Decoder::new();
    let mut rest = input;
    while !rest.is_empty() {
        match decoder.next() {
            Ok(Some(frame)) => {
                let _ = ClientMessage::decode(&frame);
                let _ = AgentMessage::decode(&frame);
                let _ = crate::message::ControlToHost::decode(&frame);
                let _ = crate::message::ControlToAgent::decode(&frame);
                continue;
            }
            Ok(None) => {}
            Err(_) => return,
        }
        let space = decoder.space();
        assert!(space.len() <= crate::limits::MAX_EXEC_PAYLOAD + HEADER_LEN);
        let count = space.len().min(rest.len());
        space[..count].copy_from_slice(&rest[..count]);
        decoder.filled(count);
        rest = &rest[count..];
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Bytes that are mostly operations which do something: any would mostly be garbage.
    fn input() -> impl Strategy<Value = Vec<u8>> {
        let small = 0..6_u8;
        let operation = prop_oneof![
            6 => (any::<u8>(), small.clone(), any::<u16>())
                .prop_map(|(which, id, number)| [&[2, which, id][..], &number.to_le_bytes()].concat()),
            6 => (any::<u8>(), small.clone(), any::<u16>())
                .prop_map(|(which, id, number)| [&[5, which, id][..], &number.to_le_bytes()].concat()),
            1 => any::<u16>().prop_map(|time| [&[7][..], &time.to_le_bytes()].concat()),
            1 => (any::<u8>(), small, proptest::collection::vec(any::<u8>(), 0..40))
                .prop_map(|(kind, id, payload)| [&[1, kind, id, payload.len() as u8][..], &payload].concat()),
            1 => proptest::collection::vec(any::<u8>(), 0..8),
        ];
        proptest::collection::vec(operation, 0..60).prop_map(|all| all.concat())
    }

    proptest! {
        #![proptest_config(crate::cases(500))]

        #[test]
        fn ho04_agent_session_holds_against_any_operations(input in input()) {
            agent(&input);
        }

        #[test]
        fn ho04_client_session_holds_against_any_operations(input in input()) {
            client(&input);
        }

        #[test]
        fn ho03_frames_of_any_bytes_read_or_do_not(input in proptest::collection::vec(any::<u8>(), 0..300)) {
            frames(&input);
        }
    }
}
