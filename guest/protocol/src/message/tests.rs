use proptest::prelude::*;

use super::*;
use crate::GenerationId;
use crate::cause::{CancelReason, Cause, Counts, Oom, OomScope, Record, StartStage, Stream};
use crate::frame::Frame;
use crate::hello::{Hello, Versions};
use crate::limits::{
    MAX_DATA, MAX_GROUPS, MAX_OUTPUT_LIMIT, MAX_STRINGS, MAX_TEXT, MAX_TIMEOUT_NS, MAX_WINDOW,
};
use crate::wire::WireError;

fn frame(kind: FrameKind, payload: &[u8]) -> Frame<'_> {
    Frame {
        header: Header {
            length: payload.len() as u32,
            kind,
            id: 1,
            sequence: 1,
        },
        payload,
    }
}

fn payload(bytes: &[u8]) -> &[u8] {
    &bytes[HEADER_LEN..]
}

fn generation() -> impl Strategy<Value = GenerationId> {
    any::<(u64, u128)>().prop_map(|(counter, public_id)| GenerationId { counter, public_id })
}

fn hello() -> impl Strategy<Value = Hello> {
    (any::<(u16, u16, u64)>(), generation()).prop_map(
        |((lowest, highest, features), generation)| Hello {
            versions: Versions { lowest, highest },
            features,
            generation,
        },
    )
}

fn strings() -> impl Strategy<Value = Vec<Vec<u8>>> {
    proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..20), 0..6)
}

fn winsize() -> impl Strategy<Value = Winsize> {
    (1..=u16::MAX, 1..=u16::MAX).prop_map(|(rows, columns)| Winsize { rows, columns })
}

fn user() -> impl Strategy<Value = User> {
    (
        any::<(u32, u32)>(),
        proptest::collection::vec(any::<u32>(), 0..5),
    )
        .prop_map(|((uid, gid), groups)| User { uid, gid, groups })
}

fn exec() -> impl Strategy<Value = ExecRequest> {
    let lists = (
        strings(),
        strings(),
        proptest::collection::vec(any::<u8>(), 0..20),
    );
    let rest = (
        proptest::option::of(user()),
        proptest::option::of(winsize()),
        any::<(bool, bool, u64, Option<u64>, u64)>(),
    );
    (lists, rest).prop_map(
        |((argv, env, cwd), (user, tty, (stdin, kill, timeout_ns, output_limit, window)))| {
            let policy = if kill { Policy::Kill } else { Policy::Drain };
            ExecRequest {
                argv,
                env,
                cwd,
                user,
                tty,
                stdin,
                policy,
                timeout_ns,
                output_limit,
                window,
            }
        },
    )
}

fn one_of<T: Copy + std::fmt::Debug + 'static>(all: &'static [T]) -> impl Strategy<Value = T> {
    proptest::sample::select(all)
}

fn client() -> impl Strategy<Value = ClientMessage<'static>> {
    prop_oneof![
        hello().prop_map(ClientMessage::Hello),
        exec().prop_map(|exec| ClientMessage::Exec(Box::new(exec))),
        Just(ClientMessage::Stdin(b"some bytes")),
        Just(ClientMessage::Stdin(&[0xff; MAX_DATA])),
        Just(ClientMessage::StdinClose),
        (1..=64_u8).prop_map(ClientMessage::Signal),
        winsize().prop_map(ClientMessage::Resize),
        (one_of(CancelReason::ALL), any::<u64>())
            .prop_map(|(reason, grace_ns)| ClientMessage::Cancel { reason, grace_ns }),
        any::<[u64; 2]>().prop_map(ClientMessage::Credit),
        Just(ClientMessage::Ping),
    ]
}

fn oom() -> impl Strategy<Value = Oom> {
    (one_of(OomScope::ALL), ".{0,20}", any::<(u32, u64, u64)>()).prop_map(
        |(scope, victim, (pid, limit, peak))| Oom {
            scope,
            pid,
            victim,
            limit,
            peak,
        },
    )
}

fn cause() -> impl Strategy<Value = Cause> {
    prop_oneof![
        any::<u8>().prop_map(Cause::Exited),
        (1..=64_u8).prop_map(Cause::Signaled),
        Just(Cause::TimedOut),
        Just(Cause::OutputLimit),
        oom().prop_map(Cause::OomKilled),
        one_of(CancelReason::ALL).prop_map(Cause::Cancelled),
        (one_of(StartStage::ALL), any::<i32>())
            .prop_map(|(stage, errno)| Cause::StartFailed { stage, errno }),
        ".{0,20}".prop_map(Cause::Lost),
    ]
}

fn counts() -> impl Strategy<Value = Counts> {
    any::<(u32, u32)>().prop_map(|(forwarded, dropped)| {
        let (forwarded, dropped) = (forwarded.into(), dropped.into());
        Counts {
            seen: forwarded + dropped,
            forwarded,
            dropped,
        }
    })
}

fn record() -> impl Strategy<Value = Record> {
    (
        cause(),
        counts(),
        counts(),
        any::<[bool; 4]>(),
        any::<[u64; 3]>(),
    )
        .prop_map(
            |(
                cause,
                stdout,
                stderr,
                [truncated, limited, leaf_empty, unproven],
                [wall_ns, cpu_ns, peak_memory],
            )| Record {
                cause,
                streams: [stdout, stderr],
                truncated,
                limited,
                leaf_empty,
                unproven,
                wall_ns,
                cpu_ns,
                peak_memory,
            },
        )
}

fn agent() -> impl Strategy<Value = AgentMessage<'static>> {
    let output = |(stream, offset)| AgentMessage::Output {
        stream,
        offset,
        data: &[7; MAX_DATA],
    };
    prop_oneof![
        hello().prop_map(AgentMessage::Hello),
        any::<(u64, u32)>().prop_map(|(exec, pid)| AgentMessage::Started { exec, pid }),
        (one_of(Stream::ALL), any::<u64>()).prop_map(output),
        any::<[u64; 2]>().prop_map(AgentMessage::Limit),
        oom().prop_map(AgentMessage::Oom),
        one_of(ClosedWhy::ALL).prop_map(AgentMessage::StdinClosed),
        any::<u64>().prop_map(AgentMessage::StdinCredit),
        record().prop_map(|record| AgentMessage::Exit(Box::new(record))),
        (one_of(RefusedCode::ALL), ".{0,20}")
            .prop_map(|(code, message)| AgentMessage::Refused { code, message }),
        Just(AgentMessage::Pong),
        (one_of(GoodbyeCode::ALL), ".{0,20}")
            .prop_map(|(code, message)| AgentMessage::Goodbye { code, message }),
    ]
}

fn to_host() -> impl Strategy<Value = ControlToHost> {
    prop_oneof![
        any::<(u16, u16, u64)>().prop_map(|(lowest, highest, features)| ControlToHost::Hello {
            versions: Versions { lowest, highest },
            features
        }),
        generation().prop_map(ControlToHost::Ready),
        (one_of(ReadyStage::ALL), any::<i32>(), ".{0,20}").prop_map(|(stage, errno, message)| {
            ControlToHost::Failed {
                stage,
                errno,
                message,
            }
        }),
        (one_of(DownReason::ALL), ".{0,20}")
            .prop_map(|(reason, message)| ControlToHost::Down { reason, message }),
        any::<u64>().prop_map(ControlToHost::Confirm),
        any::<u64>().prop_map(ControlToHost::Pong),
        (any::<u64>(), counters())
            .prop_map(|(number, counters)| ControlToHost::Counters { number, counters }),
    ]
}

fn counters() -> impl Strategy<Value = AgentCounters> {
    any::<[u64; 6]>().prop_map(
        |[
            wakeups,
            without_progress,
            stale_events,
            muted,
            sessions,
            execs,
        ]| AgentCounters {
            wakeups,
            without_progress,
            stale_events,
            muted,
            sessions,
            execs,
        },
    )
}

fn life() -> impl Strategy<Value = Life> {
    (
        generation(),
        any::<(u16, u64, u64)>(),
        any::<[u8; 16]>(),
        "[a-z0-9-]{0,64}",
    )
        .prop_map(
            |(generation, (version, restore_count, wall_clock_ns), machine_id, hostname)| Life {
                version,
                restore_count,
                wall_clock_ns,
                entropy: std::array::from_fn(|at| machine_id[at % 16]),
                machine_id,
                hostname,
                ..Life::new(generation)
            },
        )
}

fn to_agent() -> impl Strategy<Value = ControlToAgent> {
    prop_oneof![
        life().prop_map(|life| ControlToAgent::Life(Box::new(life))),
        any::<u64>().prop_map(|grace_ns| ControlToAgent::PowerOff { grace_ns }),
        any::<u64>().prop_map(ControlToAgent::Ping),
        any::<u64>().prop_map(ControlToAgent::AskCounters),
        (any::<u64>(), generation())
            .prop_map(|(token, generation)| ControlToAgent::Confirmed { token, generation }),
    ]
}

/// What every message keeps: it comes back as it was; cut anywhere, or longer, it does not come at
/// all.
macro_rules! keeps {
    ($message:expr, $encode:expr, $type:ident) => {{
        let message = $message;
        let mut bytes = Vec::new();
        prop_assert_eq!($encode(&message, &mut bytes), Ok(()));
        let (kind, all) = (message.kind(), payload(&bytes));
        prop_assert!(all.len() <= max_payload(kind));
        prop_assert_eq!($type::decode(&frame(kind, all)), Ok(message));
        for cut in (0..all.len()).filter(|cut| *cut < 300 || *cut + 3 > all.len()) {
            prop_assert!(
                $type::decode(&frame(kind, &all[..cut])).is_err(),
                "cut at {}",
                cut
            );
        }
        let mut longer = all.to_vec();
        longer.push(0);
        prop_assert!($type::decode(&frame(kind, &longer)).is_err());
    }};
}

proptest! {
    #![proptest_config(crate::cases(200))]

    #[test]
    fn client_messages_come_back(message in client()) {
        keeps!(message, |message: &ClientMessage<'_>, out| message.encode(1, 1, out), ClientMessage);
    }

    #[test]
    fn agent_messages_come_back(message in agent()) {
        keeps!(message, |message: &AgentMessage<'_>, out| message.encode(1, 1, out), AgentMessage);
    }

    #[test]
    fn control_messages_come_back(host in to_host(), agent in to_agent()) {
        keeps!(host, |message: &ControlToHost, out| message.encode(1, out), ControlToHost);
        keeps!(agent, |message: &ControlToAgent, out| message.encode(1, out), ControlToAgent);
    }

    #[test]
    fn ho03_any_payload_is_a_message_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        for kind in FrameKind::ALL.iter().copied() {
            let frame = frame(kind, &bytes);
            let decoded = [
                ClientMessage::decode(&frame).is_ok(),
                AgentMessage::decode(&frame).is_ok(),
                ControlToHost::decode(&frame).is_ok(),
                ControlToAgent::decode(&frame).is_ok(),
            ];
            prop_assert!(decoded.iter().filter(|ok| **ok).count() <= 1, "a kind has one direction");
        }
    }
}

#[test]
fn ho03_counts_that_cannot_be_true_allocate_nothing() {
    for count in [1, 1000, MAX_STRINGS as u32, u32::MAX] {
        let mut bytes = count.to_le_bytes().to_vec();
        bytes.extend_from_slice(&[1, 0]);
        let error = ClientMessage::decode(&frame(FrameKind::Exec, &bytes)).unwrap_err();
        assert!(
            matches!(
                error,
                MessageError::Payload {
                    kind: FrameKind::Exec,
                    ..
                }
            ),
            "{count}: {error:?}"
        );
    }
}

/// A field of `length` bytes behind its count.
fn counted(length: usize) -> Vec<u8> {
    let mut bytes = (length as u32).to_le_bytes().to_vec();
    bytes.resize(4 + length, b'x');
    bytes
}

#[test]
fn ho03_every_field_of_variable_length_at_zero_one_max_and_one_more() {
    let join = |parts: &[&[u8]]| parts.concat();
    let none: &[u8] = &[0; 4];
    // An exec whose other fields are as small as they can be.
    let tail = |user: &[u8]| join(&[user, &[0, 0, 1, 0], &[0; 8], &[0], &[0; 8], &[0; 8]]);
    let strings = |count: usize| {
        let mut bytes = (count as u32).to_le_bytes().to_vec();
        bytes.resize(4 + 4 * count, 0);
        bytes
    };
    let groups = |count: usize| {
        let mut bytes = vec![1];
        bytes.extend_from_slice(&[0; 8]);
        bytes.extend_from_slice(&(count as u32).to_le_bytes());
        bytes.resize(bytes.len() + 4 * count, 0);
        bytes
    };
    type Build<'a> = Box<dyn Fn(usize) -> Vec<u8> + 'a>;
    let fields: Vec<(&str, FrameKind, usize, usize, Build<'_>)> = vec![
        ("stdin", FrameKind::Stdin, 0, MAX_DATA, Box::new(counted)),
        (
            "output",
            FrameKind::Output,
            1,
            MAX_DATA,
            Box::new(|n| join(&[&[1], &[0; 8], &counted(n)])),
        ),
        (
            "refused",
            FrameKind::Refused,
            0,
            MAX_TEXT,
            Box::new(|n| join(&[&[1], &counted(n)])),
        ),
        (
            "goodbye",
            FrameKind::Goodbye,
            0,
            MAX_TEXT,
            Box::new(|n| join(&[&[1], &counted(n)])),
        ),
        (
            "victim",
            FrameKind::Oom,
            0,
            MAX_TEXT,
            Box::new(|n| join(&[&[1], &[0; 4], &counted(n), &[0; 16]])),
        ),
        (
            "lost",
            FrameKind::Exit,
            0,
            MAX_TEXT,
            Box::new(|n| join(&[&[8], &counted(n), &[0; 48], &[0], &[0; 24]])),
        ),
        (
            "failed",
            FrameKind::Failed,
            0,
            MAX_TEXT,
            Box::new(|n| join(&[&[1], &[0; 4], &counted(n)])),
        ),
        (
            "down",
            FrameKind::Down,
            0,
            MAX_TEXT,
            Box::new(|n| join(&[&[1], &counted(n)])),
        ),
        (
            "host name",
            FrameKind::Life,
            0,
            64,
            Box::new(|n| join(&[&[0; 122], &counted(n)])),
        ),
        (
            "argv",
            FrameKind::Exec,
            0,
            MAX_STRINGS,
            Box::new(|n| join(&[&strings(n), none, none, &tail(&[0])])),
        ),
        (
            "env",
            FrameKind::Exec,
            0,
            MAX_STRINGS,
            Box::new(|n| join(&[none, &strings(n), none, &tail(&[0])])),
        ),
        (
            "groups",
            FrameKind::Exec,
            0,
            MAX_GROUPS,
            Box::new(|n| join(&[none, none, none, &tail(&groups(n))])),
        ),
    ];
    for (name, kind, least, most, build) in fields {
        for length in [0, 1, most - 1, most, most + 1] {
            let payload = build(length);
            let frame = frame(kind, &payload);
            let taken = ClientMessage::decode(&frame).is_ok()
                || AgentMessage::decode(&frame).is_ok()
                || ControlToHost::decode(&frame).is_ok()
                || ControlToAgent::decode(&frame).is_ok();
            assert_eq!(
                taken,
                (least..=most).contains(&length),
                "{name} of {length}"
            );
        }
    }
}

#[test]
fn output_without_a_byte_is_no_output() {
    let mut bytes = Vec::new();
    let empty = AgentMessage::Output {
        stream: Stream::Stdout,
        offset: 0,
        data: &[],
    };
    empty.encode(1, 1, &mut bytes).unwrap();
    let error = AgentMessage::decode(&frame(FrameKind::Output, payload(&bytes))).unwrap_err();
    let source = WireError::Value {
        field: "data",
        value: 0,
    };
    assert_eq!(
        error,
        MessageError::Payload {
            kind: FrameKind::Output,
            source
        }
    );
}

#[test]
fn record_whose_counts_do_not_add_up_is_refused() {
    let record = Record {
        cause: Cause::TimedOut,
        streams: [
            Counts {
                seen: 5,
                forwarded: 3,
                dropped: 1,
            },
            Counts::default(),
        ],
        truncated: false,
        limited: false,
        leaf_empty: true,
        unproven: false,
        wall_ns: 0,
        cpu_ns: 0,
        peak_memory: 0,
    };
    let mut bytes = Vec::new();
    AgentMessage::Exit(Box::new(record))
        .encode(1, 1, &mut bytes)
        .unwrap();
    assert!(AgentMessage::decode(&frame(FrameKind::Exit, payload(&bytes))).is_err());
}

#[test]
fn long_texts_are_cut_between_characters() {
    let message = "é".repeat(MAX_TEXT);
    let mut bytes = Vec::new();
    AgentMessage::Refused {
        code: RefusedCode::Invalid,
        message,
    }
    .encode(1, 1, &mut bytes)
    .unwrap();
    let decoded = AgentMessage::decode(&frame(FrameKind::Refused, payload(&bytes)));
    let Ok(AgentMessage::Refused { message, .. }) = decoded else {
        panic!("{decoded:?}")
    };
    assert_eq!(message, "é".repeat(MAX_TEXT / 2));
}

#[test]
fn message_that_is_too_large_leaves_nothing_behind() {
    let mut bytes = b"before".to_vec();
    let request = ExecRequest::new([vec![b'x'; MAX_EXEC_PAYLOAD]]);
    let error = ClientMessage::Exec(Box::new(request))
        .encode(1, 1, &mut bytes)
        .unwrap_err();
    assert_eq!(
        (error.kind, error.limit),
        (FrameKind::Exec, MAX_EXEC_PAYLOAD)
    );
    assert_eq!(bytes, b"before");
}

#[test]
fn ex16_request_out_of_range_is_invalid_and_named() {
    let valid = || ExecRequest::new(["sh", "-c", "true"]);
    type Spoil = fn(&mut ExecRequest);
    let cases: [(Spoil, &str); 17] = [
        (|r| r.argv.clear(), "no program"),
        (|r| r.argv[0].clear(), "no program"),
        (|r| r.argv[2].push(0), "argv holds a zero byte"),
        (|r| r.env.push(b"A=\0".to_vec()), "env holds a zero byte"),
        (|r| r.cwd = b"/\0".to_vec(), "cwd holds a zero byte"),
        (|r| r.env.push(b"NAME".to_vec()), "\"NAME\""),
        (|r| r.env.push(b"=value".to_vec()), "\"=value\""),
        (|r| r.env.push(Vec::new()), "\"\""),
        (|r| r.argv = vec![b"x".to_vec(); MAX_STRINGS + 1], "16385"),
        (
            |r| {
                r.user = Some(User {
                    uid: 1,
                    gid: 1,
                    groups: vec![1; MAX_GROUPS + 1],
                })
            },
            "1025",
        ),
        (
            |r| {
                r.tty = Some(Winsize {
                    rows: 0,
                    columns: 80,
                })
            },
            "one row",
        ),
        (|r| r.timeout_ns = MAX_TIMEOUT_NS + 1, "timeout"),
        (|r| r.output_limit = Some(0), "output limit of 0"),
        (
            |r| r.output_limit = Some(MAX_OUTPUT_LIMIT + 1),
            "1073741825",
        ),
        (|r| r.window = 0, "window of 0"),
        (|r| r.window = MAX_WINDOW + 1, "16777217"),
        (
            |r| r.argv.push(vec![b'x'; MAX_EXEC_PAYLOAD]),
            "at most 262144",
        ),
    ];
    assert_eq!(valid().validate(), Ok(()));
    for (spoil, text) in cases {
        let mut request = valid();
        spoil(&mut request);
        let error = request.validate().unwrap_err().to_string();
        assert!(error.contains(text), "{error:?} names {text:?}");
    }
}

#[test]
fn ex18_odd_environment_travels_exactly() {
    let mut request = ExecRequest::new(["env"]);
    request.env = vec![
        b"A=1".to_vec(),
        b"A=2".to_vec(),
        b"B==x=".to_vec(),
        b"C=\n\xff\xfe".to_vec(),
        b"D=".to_vec(),
    ];
    assert_eq!(request.validate(), Ok(()));
    let mut bytes = Vec::new();
    ClientMessage::Exec(Box::new(request.clone()))
        .encode(1, 1, &mut bytes)
        .unwrap();
    let decoded = ClientMessage::decode(&frame(FrameKind::Exec, payload(&bytes)));
    assert_eq!(decoded, Ok(ClientMessage::Exec(Box::new(request))));
}

#[test]
fn causes_are_disjoint_and_their_numbers_are_those_of_shells() {
    let oom = Oom {
        scope: OomScope::Guest,
        pid: 0,
        victim: String::new(),
        limit: 0,
        peak: 0,
    };
    let started = |stage, errno| Cause::StartFailed { stage, errno };
    let cases = [
        (Cause::Exited(0), 0, "exited"),
        (Cause::Exited(255), 255, "exited"),
        (Cause::Signaled(15), 143, "signaled"),
        (Cause::TimedOut, 124, "timed_out"),
        (Cause::OutputLimit, 125, "output_limit"),
        (Cause::OomKilled(oom), 137, "oom_killed"),
        (Cause::Cancelled(CancelReason::Request), 137, "cancelled"),
        (Cause::Cancelled(CancelReason::ClientLost), 137, "cancelled"),
        (Cause::Cancelled(CancelReason::Interrupt), 130, "cancelled"),
        (Cause::Cancelled(CancelReason::Terminate), 143, "cancelled"),
        (started(StartStage::Execute, 2), 127, "start_failed"),
        (started(StartStage::Execute, 13), 126, "start_failed"),
        (started(StartStage::Directory, 2), 126, "start_failed"),
        (Cause::Lost(String::new()), 125, "lost"),
    ];
    for (cause, status, name) in cases {
        assert_eq!((cause.status(), cause.name()), (status, name), "{cause:?}");
    }
}
