//! Any message of each direction, for property tests.

use proptest::prelude::*;

use super::*;
use crate::GenerationId;
use crate::cause::{
    CancelReason, Cause, CauseKind, Counts, Oom, OomScope, Record, StartStage, Stream,
};
use crate::hello::{Hello, Versions};
use crate::limits::MAX_DATA;

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
        any::<(bool, bool, bool, u64, Option<u64>, u64)>(),
    );
    (lists, rest).prop_map(
        |(
            (argv, env, cwd),
            (user, tty, (stdin, kill, detached, timeout_ns, output_limit, window)),
        )| {
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
                detached,
            }
        },
    )
}

fn one_of<T: Copy + std::fmt::Debug + 'static>(all: &'static [T]) -> impl Strategy<Value = T> {
    proptest::sample::select(all)
}

pub(super) fn client() -> impl Strategy<Value = ClientMessage<'static>> {
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
        any::<(u64, [u64; 2], u64)>().prop_map(|(exec, from, window)| ClientMessage::Attach {
            exec,
            from,
            window
        }),
        any::<u64>().prop_map(ClientMessage::Wait),
        Just(ClientMessage::Detach),
        any::<u64>().prop_map(|after| ClientMessage::List { after }),
        (any::<u64>(), 1..=64_u8)
            .prop_map(|(exec, signal)| ClientMessage::SignalExec { exec, signal }),
        (any::<[u64; 2]>(), one_of(CancelReason::ALL)).prop_map(|([exec, grace_ns], reason)| {
            ClientMessage::CancelExec {
                exec,
                reason,
                grace_ns,
            }
        }),
        any::<u64>().prop_map(ClientMessage::Release),
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

fn listed() -> impl Strategy<Value = ExecInfo> {
    (
        any::<(u64, u32, u32, bool)>(),
        one_of(ExecState::ALL),
        any::<[u64; 8]>(),
        proptest::option::of((one_of(CauseKind::ALL), any::<u8>())),
        ".{0,20}",
    )
        .prop_map(
            |((exec, pid, clients, kept), state, numbers, end, command)| {
                let [e0, e1, l0, l1, store_bytes, age_ns, progress_ns, cpu_ns] = numbers;
                ExecInfo {
                    exec,
                    pid,
                    state,
                    kept,
                    clients,
                    earliest: [e0, e1],
                    length: [l0, l1],
                    store_bytes,
                    age_ns,
                    progress_ns,
                    cpu_ns,
                    end,
                    command,
                }
            },
        )
}

pub(super) fn agent() -> impl Strategy<Value = AgentMessage<'static>> {
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
        (
            one_of(RefusedCode::ALL),
            ".{0,20}",
            proptest::collection::vec(any::<u64>(), 0..4)
        )
            .prop_map(|(code, message, numbers)| {
                AgentMessage::Refused(Refusal {
                    code,
                    message,
                    numbers,
                })
            }),
        Just(AgentMessage::Done),
        (proptest::collection::vec(listed(), 0..3), any::<bool>())
            .prop_map(|(execs, more)| AgentMessage::Execs(ExecsPage { execs, more })),
        Just(AgentMessage::Pong),
        (one_of(GoodbyeCode::ALL), ".{0,20}")
            .prop_map(|(code, message)| AgentMessage::Goodbye { code, message }),
    ]
}

pub(super) fn to_host() -> impl Strategy<Value = ControlToHost> {
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
    any::<[u64; 7]>().prop_map(
        |[
            wakeups,
            without_progress,
            stale_events,
            muted,
            sessions,
            execs,
            resident_bytes,
        ]| AgentCounters {
            wakeups,
            without_progress,
            stale_events,
            muted,
            sessions,
            execs,
            resident_bytes,
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

pub(super) fn to_agent() -> impl Strategy<Value = ControlToAgent> {
    prop_oneof![
        life().prop_map(|life| ControlToAgent::Life(Box::new(life))),
        any::<u64>().prop_map(|grace_ns| ControlToAgent::PowerOff { grace_ns }),
        any::<u64>().prop_map(ControlToAgent::Ping),
        any::<u64>().prop_map(ControlToAgent::AskCounters),
        (any::<u64>(), generation())
            .prop_map(|(token, generation)| ControlToAgent::Confirmed { token, generation }),
    ]
}
