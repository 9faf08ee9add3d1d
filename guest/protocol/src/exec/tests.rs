use super::rig::{BOTH, Rig, settings};
use super::*;
use crate::message::ExecRequest;

const MIB: usize = 1 << 20;
const CAP: Option<u64> = Some(MIB as u64);

#[test]
fn ex01_crossing_chunk_is_forwarded_to_the_last_byte_that_fits() {
    let mut rig = Rig::new(settings(CAP, Policy::Kill));
    rig.write(Stream::Stdout, &vec![b'a'; MIB - 100]);
    rig.turn();
    let mut chunk = vec![b'b'; 32 << 10];
    chunk.extend_from_slice(&[b'c'; 50]);
    rig.write(Stream::Stdout, &chunk);
    rig.turn();

    let got = rig.forwarded(Stream::Stdout);
    assert_eq!(got.len(), MIB);
    assert_eq!(got[MIB - 100..], [b'b'; 100]);
    assert!(!got.contains(&b'c'));
    assert_eq!(rig.cause(), Some(&Cause::OutputLimit));
}

#[test]
fn ex02_nothing_is_forwarded_after_the_limit_and_the_exec_ends() {
    let mut rig = Rig::new(settings(Some(10), Policy::Kill));
    rig.unkillable = true; // a descendant that the kill does not reach at once
    rig.write(Stream::Stdout, &[b'a'; 11]);
    rig.turn();
    for _ in 0..100 {
        rig.write(Stream::Stdout, b"more");
        rig.write(Stream::Stderr, b"more");
        rig.turn();
    }
    assert_eq!(rig.forwarded(Stream::Stdout), [b'a'; 10]);
    assert_eq!(rig.forwarded(Stream::Stderr), b"");

    rig.held = [false; 2];
    rig.exec.main_exited(MainEnd::Signaled(9), 5);
    rig.exec.leaf_empty();
    rig.turn();
    assert_eq!(rig.cause(), Some(&Cause::OutputLimit));
    assert_eq!(
        rig.actions
            .iter()
            .filter(|action| **action == Action::KillLeaf)
            .count(),
        1
    );
    let record = rig.exec.record().unwrap();
    assert_eq!(
        record.streams[0],
        Counts {
            seen: 411,
            forwarded: 10,
            dropped: 401
        }
    );
    assert_eq!(
        record.streams[1],
        Counts {
            seen: 400,
            forwarded: 0,
            dropped: 400
        }
    );
}

#[test]
fn ex02_unkillable_descendant_ends_the_exec_at_its_deadline_and_is_said() {
    let mut rig = Rig::new(settings(Some(10), Policy::Kill));
    rig.unkillable = true;
    rig.write(Stream::Stdout, &[b'a'; 11]);
    rig.turn();
    rig.tick(1_999_999_999);
    assert_eq!(rig.cause(), None);
    rig.tick(2_000_000_000);
    assert_eq!(rig.cause(), Some(&Cause::OutputLimit));
    let record = rig.exec.record().unwrap();
    assert!(!record.leaf_empty && record.unproven && record.truncated);
    assert_eq!(rig.exec.deadline(), None);
}

#[test]
fn ex03_no_stderr_byte_after_the_limit_of_the_same_round() {
    let mut rig = Rig::new(settings(Some(10), Policy::Drain));
    rig.write(Stream::Stdout, &[b'o'; 11]);
    rig.write(Stream::Stderr, b"e");
    rig.turn();
    assert_eq!(rig.forwarded(Stream::Stderr), b"");
}

#[test]
fn ex03_limit_then_small_chunk_is_not_forwarded() {
    // The cap has room in bytes for nothing; a later small chunk must not slip in on the other
    // stream either.
    let mut rig = Rig::new(settings(Some(10), Policy::Drain));
    rig.write(Stream::Stdout, &[b'o'; 8]);
    rig.turn();
    rig.write(Stream::Stderr, &[b'e'; 5]);
    rig.turn();
    rig.write(Stream::Stdout, b"x");
    rig.turn();
    assert_eq!(rig.forwarded(Stream::Stdout), [b'o'; 8]);
    assert_eq!(rig.forwarded(Stream::Stderr), [b'e'; 2]);
    rig.exit(3);
    rig.turn();
    assert_eq!(rig.cause(), Some(&Cause::Exited(3)), "the policy drains");
    assert!(rig.exec.record().unwrap().limited);
}

#[test]
fn ex04_exactly_the_cap_then_eof_is_exited() {
    for exit_first in [true, false] {
        let mut rig = Rig::new(settings(Some(10), Policy::Kill));
        rig.write(Stream::Stdout, &[b'a'; 10]);
        if !exit_first {
            rig.turn();
        }
        rig.exit(0);
        rig.turn();
        assert_eq!(rig.cause(), Some(&Cause::Exited(0)));
        assert!(!rig.exec.record().unwrap().limited && !rig.exec.record().unwrap().truncated);
    }
}

#[test]
fn ex04_one_more_than_the_cap_is_output_limit_even_after_the_exit() {
    for exit_first in [true, false] {
        let mut rig = Rig::new(settings(Some(10), Policy::Kill));
        rig.write(Stream::Stdout, &[b'a'; 11]);
        if !exit_first {
            rig.turn();
        }
        rig.exit(0);
        rig.turn();
        assert_eq!(rig.cause(), Some(&Cause::OutputLimit));
    }
}

#[test]
fn ex04_cap_split_over_both_streams_is_their_sum() {
    let mut rig = Rig::new(settings(Some(10), Policy::Kill));
    rig.write(Stream::Stdout, &[b'o'; 6]);
    rig.write(Stream::Stderr, &[b'e'; 6]);
    rig.turn();
    assert_eq!(rig.forwarded(Stream::Stdout), [b'o'; 6]);
    assert_eq!(rig.forwarded(Stream::Stderr), [b'e'; 4]);
    assert_eq!(rig.cause(), Some(&Cause::OutputLimit));
}

#[test]
fn ex09_background_holder_is_cut_off_at_the_drain_deadline() {
    let mut rig = Rig::new(settings(CAP, Policy::Kill));
    rig.write(Stream::Stdout, b"early");
    rig.exec.main_exited(MainEnd::Exited(0), 100);
    rig.turn();
    rig.write(Stream::Stdout, b" late");
    rig.tick(500_000_099);
    assert_eq!(rig.cause(), None);
    rig.tick(500_000_100);
    assert_eq!(rig.cause(), Some(&Cause::Exited(0)));
    assert_eq!(
        rig.forwarded(Stream::Stdout),
        b"early late",
        "what the pipe held is read"
    );
    let record = rig.exec.record().unwrap();
    assert!(record.truncated && record.leaf_empty);
    assert_eq!(record.wall_ns, 100);
}

#[test]
fn ex09_stream_that_was_only_read_late_is_not_truncated() {
    for background in [false, true] {
        let mut rig = Rig::new(settings(CAP, Policy::Kill));
        rig.write(Stream::Stdout, b"all of it");
        rig.held = [false; 2];
        rig.exec.main_exited(MainEnd::Exited(0), 0);
        if !background {
            rig.exec.leaf_empty(); // else something lives on that holds neither stream
        }
        rig.tick(900_000_000);
        assert_eq!(rig.cause(), Some(&Cause::Exited(0)));
        assert_eq!(rig.forwarded(Stream::Stdout), b"all of it");
        assert!(!rig.exec.record().unwrap().truncated);
    }
}

#[test]
fn ex09_holder_outside_the_leaf_does_not_keep_the_exec() {
    let mut rig = Rig::new(settings(CAP, Policy::Kill));
    rig.exec.main_exited(MainEnd::Exited(0), 0);
    rig.exec.leaf_empty();
    rig.turn();
    assert_eq!(
        rig.cause(),
        None,
        "the holder may still write until the deadline"
    );
    rig.tick(500_000_000);
    assert_eq!(rig.cause(), Some(&Cause::Exited(0)));
    assert!(rig.exec.record().unwrap().truncated);
}

#[test]
fn ex10_first_kill_recorded_wins_and_there_is_one_record() {
    let mut rig = Rig::new(settings(Some(10), Policy::Kill));
    rig.exec.cancel(CancelReason::Interrupt, 0, 1);
    rig.write(Stream::Stdout, &[b'a'; 11]);
    rig.turn();
    rig.exec.cancel(CancelReason::Request, 0, 2);
    rig.turn();
    assert_eq!(
        rig.cause(),
        Some(&Cause::Cancelled(CancelReason::Interrupt))
    );
    assert_eq!(
        rig.actions
            .iter()
            .filter(|action| **action == Action::Finish)
            .count(),
        1
    );
}

#[test]
fn ex10_cancel_after_the_exit_leaves_the_cause_alone_but_hurries() {
    let mut rig = Rig::new(settings(CAP, Policy::Kill));
    rig.exec.main_exited(MainEnd::Exited(4), 0);
    rig.exec.cancel(CancelReason::Request, 1_000_000_000, 1);
    rig.turn();
    assert_eq!(rig.cause(), Some(&Cause::Exited(4)));
}

#[test]
fn ex11_cancel_asks_then_kills_after_the_grace() {
    let mut rig = Rig::new(settings(CAP, Policy::Kill));
    rig.exec.cancel(CancelReason::Request, 100, 0);
    rig.turn();
    assert_eq!(rig.actions, [Action::Signal(15)]);
    rig.exec.cancel(CancelReason::Request, 50, 0);
    rig.turn();
    assert_eq!(
        (rig.actions.as_slice(), rig.exec.deadline()),
        (&[Action::Signal(15)][..], Some(50))
    );
    rig.tick(50);
    assert_eq!(rig.actions[1], Action::KillLeaf);
    assert_eq!(rig.cause(), Some(&Cause::Cancelled(CancelReason::Request)));
}

#[test]
fn ex11_process_that_heeds_the_first_signal_is_still_cancelled() {
    let mut rig = Rig::new(settings(CAP, Policy::Kill));
    rig.exec.cancel(CancelReason::Terminate, 100, 0);
    rig.exit(0);
    rig.turn();
    assert_eq!(
        rig.cause(),
        Some(&Cause::Cancelled(CancelReason::Terminate))
    );
}

#[test]
fn ex15_uncapped_exec_without_reader_waits_and_a_timeout_ends_it() {
    let mut request = ExecRequest::new(["test"]);
    request.output_limit = None;
    request.timeout_ns = 1000;
    let mut rig = Rig::new(Settings::new(&request));
    rig.write(Stream::Stdout, &vec![7; 2 * MIB]);
    rig.turn();
    assert_eq!(rig.exec.length(Stream::Stdout), MIB as u64);
    assert_eq!(rig.exec.room(Stream::Stdout), Room::Wait);
    assert_eq!(
        rig.exec.room(Stream::Stderr),
        Room::Wait,
        "the ring is shared"
    );

    assert!(rig.exec.acknowledge(Reader::FIRST, [MIB as u64 / 2, 0]));
    rig.turn();
    assert_eq!(rig.exec.length(Stream::Stdout), MIB as u64 * 3 / 2);
    assert!(rig.exec.earliest(Stream::Stdout) > 0);

    rig.tick(1000);
    assert_eq!(rig.cause(), Some(&Cause::TimedOut));
    let record = rig.exec.record().unwrap();
    assert!(record.truncated);
    assert_eq!(record.streams[0].dropped, MIB as u64 / 2);
}

#[test]
fn ex15_slow_reader_loses_nothing_of_a_workload_that_has_ended() {
    let mut rig = Rig::new(settings(None, Policy::Kill));
    rig.write(Stream::Stdout, &vec![7; MIB + 10]);
    rig.turn();
    rig.exit(0);
    rig.turn();
    rig.tick(10_000_000_000);
    assert_eq!(rig.cause(), None, "ten bytes wait in the pipe");
    rig.exec.acknowledge(Reader::FIRST, [100, 0]);
    rig.turn();
    assert_eq!(rig.cause(), Some(&Cause::Exited(0)));
    let record = rig.exec.record().unwrap();
    assert_eq!(
        (record.streams[0].forwarded, record.truncated),
        (MIB as u64 + 10, false)
    );
}

#[test]
fn ex19_cancel_while_starting_kills_at_once() {
    // The child may hang on its way to the program, in a directory of a dead server for instance.
    let mut exec = Exec::new(settings(CAP, Policy::Kill), 0);
    exec.cancel(CancelReason::Request, 0, 0);
    assert_eq!(exec.action(), Some(Action::KillLeaf));
    exec.main_exited(MainEnd::Signaled(9), 1);
    exec.leaf_empty();
    exec.close(Stream::Stdout);
    exec.close(Stream::Stderr);
    while let Some(action) = exec.action() {
        if action == Action::Finish {
            exec.finish(Usage::default(), 2);
        }
    }
    let cause = exec.record().map(|record| &record.cause);
    assert_eq!(cause, Some(&Cause::Cancelled(CancelReason::Request)));
}

#[test]
fn ex17_failed_start_has_its_own_cause_whatever_was_asked() {
    let mut exec = Exec::new(settings(CAP, Policy::Kill), 0);
    exec.cancel(CancelReason::Request, 0, 0);
    exec.start_failed(StartStage::Directory, 20);
    assert_eq!(exec.action(), Some(Action::Finish));
    exec.finish(Usage::default(), 9);
    let record = exec.record().unwrap();
    assert_eq!(
        record.cause,
        Cause::StartFailed {
            stage: StartStage::Directory,
            errno: 20
        }
    );
    assert_eq!((record.status(), exec.notices()), (126, &[][..]));
}

#[test]
fn pr05_memory_kill_of_the_main_process_is_the_cause_and_of_another_an_event() {
    let oom = |pid| Oom {
        scope: crate::OomScope::Exec,
        pid,
        victim: "hog".into(),
        limit: 64,
        peak: 64,
    };
    for (main, cause) in [
        (true, Cause::OomKilled(oom(9))),
        (false, Cause::Signaled(9)),
    ] {
        let mut rig = Rig::new(settings(CAP, Policy::Kill));
        rig.exec.oom(oom(9), main);
        rig.held = [false; 2];
        rig.exec.main_exited(MainEnd::Signaled(9), 5);
        rig.exec.leaf_empty();
        rig.turn();
        assert_eq!(rig.cause(), Some(&cause));
        assert_eq!(rig.exec.notices()[1].what, NoticeKind::Oom(oom(9)));
    }
}

#[test]
fn pr05_notices_of_a_memory_storm_are_bounded() {
    let oom = Oom {
        scope: crate::OomScope::Exec,
        pid: 0,
        victim: String::new(),
        limit: 0,
        peak: 0,
    };
    let mut rig = Rig::new(settings(CAP, Policy::Kill));
    for _ in 0..10_000 {
        rig.exec.oom(oom.clone(), false);
        rig.exec.stdin_closed(ClosedWhy::BrokenPipe);
    }
    assert!(rig.exec.notices().len() <= MAX_NOTICES + 2);
}

#[test]
fn st05_unknown_status_is_never_a_code_of_the_command() {
    let mut rig = Rig::new(settings(CAP, Policy::Kill));
    rig.held = [false; 2];
    rig.exec
        .main_exited(MainEnd::Unknown("wait failed".into()), 0);
    rig.exec.leaf_empty();
    rig.turn();
    assert_eq!(rig.exec.record().unwrap().status(), 125);
}

#[test]
fn ex20_limit_is_noted_where_it_happened() {
    let mut rig = Rig::new(settings(Some(10), Policy::Drain));
    rig.write(Stream::Stdout, &[1; 6]);
    rig.write(Stream::Stderr, &[1; 6]);
    rig.turn();
    assert_eq!(
        rig.exec.notices()[1].message(),
        crate::AgentMessage::Limit([6, 4])
    );
    for stream in BOTH {
        rig.write(stream, &[1; 100]);
    }
    rig.turn();
    assert_eq!(rig.exec.notices().len(), 2, "told once");
}
