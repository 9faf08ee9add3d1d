//! The golden vectors: what the written specification says in bytes. They must keep decoding, and
//! encoding must keep giving them, for as long as version 1 is spoken.

use std::path::Path;

use super::*;
use crate::GenerationId;
use crate::cause::{
    CancelReason, Cause, CauseKind, Counts, Oom, OomScope, Record, StartStage, Stream,
};
use crate::frame::Decoder;
use crate::hello::{Hello, VERSIONS};

const GENERATION: GenerationId = GenerationId {
    counter: 7,
    public_id: 0x0011_2233_4455_6677_8899_aabb_ccdd_eeff,
};

struct Vectors {
    file: &'static str,
    lines: Vec<(String, Vec<u8>)>,
}

impl Vectors {
    fn new(file: &'static str) -> Self {
        Self {
            file,
            lines: Vec::new(),
        }
    }

    fn add(&mut self, name: &str, encode: impl FnOnce(u64, &mut Vec<u8>) -> Result<(), TooLarge>) {
        let mut bytes = Vec::new();
        encode(self.lines.len() as u64 + 1, &mut bytes).unwrap();
        self.lines.push((name.to_owned(), bytes));
    }

    /// Compares with the file; with `VMM_GOLDEN=write` in the environment it is written instead.
    fn check(self, decodes: impl Fn(&crate::Frame<'_>) -> bool) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("golden")
            .join(self.file);
        let mut text = String::from(
            "# name, then the whole frame in hexadecimal; sequence numbers count from 1\n",
        );
        for (name, bytes) in &self.lines {
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            text.push_str(&format!("{name} {hex}\n"));
            let mut decoder = Decoder::with_capacity(bytes.len());
            decoder.space()[..bytes.len()].copy_from_slice(bytes);
            decoder.filled(bytes.len());
            assert!(decodes(&decoder.next().unwrap().unwrap()), "{name}");
        }
        if std::env::var_os("VMM_GOLDEN").is_some_and(|value| value == "write") {
            std::fs::write(&path, &text).unwrap();
        }
        let golden = std::fs::read_to_string(&path).unwrap();
        for (ours, theirs) in text.lines().zip(golden.lines()) {
            assert_eq!(ours, theirs, "{}", self.file);
        }
        assert_eq!(
            text.lines().count(),
            golden.lines().count(),
            "{}",
            self.file
        );
    }
}

#[test]
fn client_frames_are_those_of_the_specification() {
    let mut exec = ExecRequest::new(["sh", "-c", "echo hello"]);
    exec.env = vec![b"A=1".to_vec(), b"B=\xff".to_vec()];
    exec.cwd = b"/tmp".to_vec();
    exec.user = Some(User {
        uid: 1000,
        gid: 100,
        groups: vec![4, 27],
    });
    exec.tty = Some(Winsize {
        rows: 24,
        columns: 80,
    });
    (exec.stdin, exec.policy, exec.timeout_ns) = (true, Policy::Drain, 10_000_000_000);
    let mut plain = ExecRequest::new(["true"]);
    plain.output_limit = None;
    let mut detached = ExecRequest::new(["true"]);
    detached.detached = true;

    let mut vectors = Vectors::new("client.txt");
    let mut add = |name: &str, id, message: &ClientMessage<'_>| {
        vectors.add(name, |sequence, out| message.encode(id, sequence, out));
    };
    add("hello", 0, &ClientMessage::Hello(Hello::new(GENERATION)));
    add("exec", 1, &ClientMessage::Exec(Box::new(exec)));
    add("exec_uncapped", 2, &ClientMessage::Exec(Box::new(plain)));
    add("stdin", 1, &ClientMessage::Stdin(b"typed\n"));
    add("stdin_close", 1, &ClientMessage::StdinClose);
    add("signal", 1, &ClientMessage::Signal(15));
    add(
        "resize",
        1,
        &ClientMessage::Resize(Winsize {
            rows: 50,
            columns: 132,
        }),
    );
    add(
        "cancel",
        1,
        &ClientMessage::Cancel {
            reason: CancelReason::Request,
            grace_ns: 2_000_000_000,
        },
    );
    add("credit", 1, &ClientMessage::Credit([262_144, 12]));
    add("ping", 3, &ClientMessage::Ping);
    add("exec_detached", 4, &ClientMessage::Exec(Box::new(detached)));
    let attach = ClientMessage::Attach {
        exec: 12,
        from: [5000, 1],
        window: 1 << 20,
    };
    add("attach", 5, &attach);
    add("wait", 6, &ClientMessage::Wait(12));
    add("detach", 5, &ClientMessage::Detach);
    add("list", 7, &ClientMessage::List { after: 256 });
    let signal = ClientMessage::SignalExec {
        exec: 12,
        signal: 10,
    };
    add("signal_exec", 8, &signal);
    let cancel = ClientMessage::CancelExec {
        exec: 12,
        reason: CancelReason::Request,
        grace_ns: 2_000_000_000,
    };
    add("cancel_exec", 9, &cancel);
    add("release", 10, &ClientMessage::Release(12));
    vectors.check(|frame| ClientMessage::decode(frame).is_ok());
}

#[test]
fn agent_frames_are_those_of_the_specification() {
    let oom = || Oom {
        scope: OomScope::Exec,
        pid: 44,
        victim: "hog".into(),
        limit: 64 << 20,
        peak: 64 << 20,
    };
    let exit = |cause| {
        AgentMessage::Exit(Box::new(Record {
            cause,
            streams: [
                Counts {
                    seen: 10,
                    forwarded: 6,
                    dropped: 4,
                },
                Counts {
                    seen: 1,
                    forwarded: 1,
                    dropped: 0,
                },
            ],
            truncated: false,
            limited: true,
            leaf_empty: true,
            unproven: false,
            wall_ns: 1_500_000_000,
            cpu_ns: 20_000_000,
            peak_memory: 1 << 20,
        }))
    };
    let mut vectors = Vectors::new("agent.txt");
    let mut add = |name: &str, id, message: &AgentMessage<'_>| {
        vectors.add(name, |sequence, out| message.encode(id, sequence, out));
    };
    add("hello", 0, &AgentMessage::Hello(Hello::new(GENERATION)));
    add("started", 1, &AgentMessage::Started { exec: 12, pid: 345 });
    add(
        "output_stdout",
        1,
        &AgentMessage::Output {
            stream: Stream::Stdout,
            offset: 0,
            data: b"hello\n",
        },
    );
    add(
        "output_stderr",
        1,
        &AgentMessage::Output {
            stream: Stream::Stderr,
            offset: 300,
            data: b"\xff",
        },
    );
    add("limit", 1, &AgentMessage::Limit([6, 1]));
    add("oom", 1, &AgentMessage::Oom(oom()));
    add(
        "stdin_closed",
        1,
        &AgentMessage::StdinClosed(ClosedWhy::BrokenPipe),
    );
    add("stdin_credit", 1, &AgentMessage::StdinCredit(4096));
    add("exit_exited", 1, &exit(Cause::Exited(7)));
    add("exit_signaled", 1, &exit(Cause::Signaled(15)));
    add("exit_timed_out", 1, &exit(Cause::TimedOut));
    add("exit_output_limit", 1, &exit(Cause::OutputLimit));
    add("exit_oom_killed", 1, &exit(Cause::OomKilled(oom())));
    add(
        "exit_cancelled",
        1,
        &exit(Cause::Cancelled(CancelReason::Interrupt)),
    );
    add(
        "exit_start_failed",
        1,
        &exit(Cause::StartFailed {
            stage: StartStage::Execute,
            errno: 2,
        }),
    );
    add("exit_lost", 1, &exit(Cause::Lost("status unknown".into())));
    add(
        "refused",
        2,
        &AgentMessage::Refused(Refusal {
            code: RefusedCode::NoBudget,
            message: "no room".into(),
            numbers: vec![3, 9],
        }),
    );
    add("pong", 3, &AgentMessage::Pong);
    add(
        "goodbye",
        0,
        &AgentMessage::Goodbye {
            code: GoodbyeCode::Violation,
            message: "gap".into(),
        },
    );
    add("done", 10, &AgentMessage::Done);
    let running = ExecInfo {
        exec: 12,
        pid: 345,
        state: ExecState::Running,
        kept: true,
        clients: 1,
        earliest: [0, 0],
        length: [6, 1],
        store_bytes: 1 << 20,
        age_ns: 5_000_000_000,
        progress_ns: 1_000_000_000,
        cpu_ns: 20_000_000,
        end: None,
        command: "sh -c work".into(),
    };
    let ended = ExecInfo {
        exec: 13,
        state: ExecState::Ended,
        end: Some((CauseKind::Exited, 7)),
        ..running.clone()
    };
    let page = ExecsPage {
        execs: vec![running, ended],
        more: false,
    };
    add("execs", 7, &AgentMessage::Execs(page));
    vectors.check(|frame| AgentMessage::decode(frame).is_ok());
}

#[test]
fn control_frames_are_those_of_the_specification() {
    let mut vectors = Vectors::new("control-agent.txt");
    let mut add = |name: &str, message: &ControlToHost| {
        vectors.add(name, |sequence, out| message.encode(sequence, out));
    };
    add(
        "hello",
        &ControlToHost::Hello {
            versions: VERSIONS,
            features: 0,
        },
    );
    add("ready", &ControlToHost::Ready(GENERATION));
    add(
        "failed",
        &ControlToHost::Failed {
            stage: ReadyStage::Clock,
            errno: 1,
            message: "settime".into(),
        },
    );
    add(
        "down",
        &ControlToHost::Down {
            reason: DownReason::PowerOff,
            message: "told to".into(),
        },
    );
    add("confirm", &ControlToHost::Confirm(1));
    add("pong", &ControlToHost::Pong(9));
    add(
        "counters",
        &ControlToHost::Counters {
            number: 5,
            counters: AgentCounters {
                wakeups: 1_000_000,
                without_progress: 2,
                stale_events: 3,
                muted: 1,
                sessions: 4,
                execs: 300,
                resident_bytes: 2_097_152,
            },
        },
    );
    vectors.check(|frame| ControlToHost::decode(frame).is_ok());

    let mut life = Life::new(GENERATION);
    life.restore_count = 2;
    life.wall_clock_ns = 1_700_000_000_000_000_000;
    life.entropy = std::array::from_fn(|at| at as u8);
    life.machine_id = std::array::from_fn(|at| 0xf0 | at as u8);
    life.hostname = "box".into();
    let mut vectors = Vectors::new("control-host.txt");
    let mut add = |name: &str, message: &ControlToAgent| {
        vectors.add(name, |sequence, out| message.encode(sequence, out));
    };
    add("life", &ControlToAgent::Life(Box::new(life)));
    add(
        "power_off",
        &ControlToAgent::PowerOff {
            grace_ns: 8_000_000_000,
        },
    );
    add("ping", &ControlToAgent::Ping(9));
    add(
        "confirmed",
        &ControlToAgent::Confirmed {
            token: 1,
            generation: GENERATION,
        },
    );
    add("ask_counters", &ControlToAgent::AskCounters(5));
    vectors.check(|frame| ControlToAgent::decode(frame).is_ok());
}

#[test]
fn specification_has_every_kind_with_its_limit() {
    let text = include_str!("../../PROTOCOL.md");
    for kind in FrameKind::ALL.iter().copied() {
        let row = format!("| {:#04x} |", kind as u8);
        let line = text.lines().find(|line| line.starts_with(&row)).unwrap();
        // The last number before the end of the row or its semicolon.
        let cell = line.trim_end_matches(" |").rsplit("| ").next().unwrap();
        let number: String = cell
            .split(';')
            .next()
            .unwrap()
            .chars()
            .filter(char::is_ascii_digit)
            .collect();
        assert_eq!(number, max_payload(kind).to_string(), "{line}");
    }
}
