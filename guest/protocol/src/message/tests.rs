use proptest::prelude::*;

use super::samples::{agent, client, to_agent, to_host};
use super::*;
use crate::cause::{
    CancelReason, Cause, CauseKind, Counts, Oom, OomScope, Record, StartStage, Stream,
};
use crate::frame::Frame;
use crate::limits::{
    MAX_DATA, MAX_GROUPS, MAX_LISTED, MAX_NUMBERS, MAX_OUTPUT_LIMIT, MAX_STRING, MAX_STRINGS,
    MAX_TEXT, MAX_TIMEOUT_NS, MAX_WINDOW,
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
            Box::new(|n| join(&[&[1], &counted(n), &[0; 4]])),
        ),
        (
            "refused numbers",
            FrameKind::Refused,
            0,
            MAX_NUMBERS,
            Box::new(|n| {
                let count = (n as u32).to_le_bytes();
                join(&[&[1], &[0; 4], &count, &vec![0; 8 * n]])
            }),
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
    AgentMessage::Refused(Refusal::new(RefusedCode::Invalid, message))
        .encode(1, 1, &mut bytes)
        .unwrap();
    let decoded = AgentMessage::decode(&frame(FrameKind::Refused, payload(&bytes)));
    let Ok(AgentMessage::Refused(Refusal { message, .. })) = decoded else {
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
            |r| r.argv.extend([(); 3].map(|()| vec![b'x'; 100_000])),
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

#[test]
fn fullest_part_of_a_list_fits_its_frame_and_one_more_is_refused() {
    let info = |exec| ExecInfo {
        exec,
        pid: u32::MAX,
        state: ExecState::Ended,
        kept: true,
        clients: u32::MAX,
        earliest: [u64::MAX; 2],
        length: [u64::MAX; 2],
        store_bytes: u64::MAX,
        age_ns: u64::MAX,
        progress_ns: u64::MAX,
        cpu_ns: u64::MAX,
        end: Some((CauseKind::Lost, 125)),
        command: "x".repeat(1000),
    };
    for (count, reads) in [(MAX_LISTED, true), (MAX_LISTED + 1, false)] {
        let page = ExecsPage {
            execs: (1..=count as u64).map(info).collect(),
            more: true,
        };
        let mut bytes = Vec::new();
        AgentMessage::Execs(page).encode(1, 1, &mut bytes).unwrap();
        let decoded = AgentMessage::decode(&frame(FrameKind::Execs, payload(&bytes)));
        assert_eq!(decoded.is_ok(), reads, "{count}");
    }
}

#[test]
fn ex16_strings_that_the_kernel_would_not_take_have_a_refusal_of_their_own() {
    let mut request = ExecRequest::new(["x".repeat(MAX_STRING)]);
    assert_eq!(request.validate(), Ok(()));
    request.argv[0].push(b'x');
    let error = request.validate().unwrap_err();
    assert_eq!(error.code(), RefusedCode::TooLarge);
    assert!(
        error.to_string().contains("argv has 131072 bytes"),
        "{error}"
    );
    request = ExecRequest::new(["x"]);
    request.env = vec![[b"A=".as_slice(), &vec![b'x'; MAX_STRING]].concat()];
    assert!(request.validate().unwrap_err().to_string().contains("env"));
    request.env = vec![vec![b'='; 1]];
    assert_eq!(request.validate().unwrap_err().code(), RefusedCode::Invalid);
    request = ExecRequest::new(["x"]);
    (request.detached, request.stdin) = (true, true);
    assert_eq!(request.validate(), Err(InvalidRequest::DetachedStdin));
}
