//! Execs that outlive their clients: found by their numbers, kept until they are released.

use std::io::Write;
use std::time::Duration;

use vmm_client::{Ended, Event, Session, SessionError, StartError};
use vmm_protocol::{
    CancelReason, Cause, CauseKind, ExecInfo, ExecRequest, ExecState, GenerationId, Record,
    Refusal, RefusedCode,
};

use crate::client::{Client, sh};
use crate::fake::{alive, wait_dead};
use crate::harness::{GENERATION, Options, PATIENCE, Sandbox};

const MS: u64 = 1_000_000;
const NOW: Duration = Duration::ZERO;

fn session(sandbox: &Sandbox) -> Session {
    Session::over(sandbox.dial(), GENERATION, PATIENCE).unwrap()
}

fn uncapped(script: &str) -> ExecRequest {
    let mut request = sh(script);
    request.output_limit = None;
    request
}

/// Starts it in a session that is gone when it runs.
fn start(sandbox: &Sandbox, request: &ExecRequest) -> u64 {
    session(sandbox).start(request, PATIENCE).unwrap().exec
}

fn record(ended: Ended) -> Record {
    match ended {
        Ended::Exit(record) => *record,
        other => panic!("no record but {other:?}"),
    }
}

fn refused<T: std::fmt::Debug>(result: Result<T, SessionError>) -> Refusal {
    match result {
        Err(SessionError::Refused(refusal)) => refusal,
        other => panic!("not refused but {other:?}"),
    }
}

fn info(session: &Session, exec: u64) -> Option<ExecInfo> {
    let all = session.list(PATIENCE).unwrap();
    all.into_iter().find(|info| info.exec == exec)
}

/// Asks again and again until it is so; each question goes through the agent's loop.
fn until(session: &Session, exec: u64, is: impl Fn(&ExecInfo) -> bool) -> ExecInfo {
    let began = std::time::Instant::now();
    loop {
        let found = info(session, exec).unwrap();
        if is(&found) {
            return found;
        }
        assert!(began.elapsed() < PATIENCE, "{found:?}");
    }
}

#[test]
fn ex14_output_is_whole_over_clients_that_are_lost_at_any_offset() {
    let sandbox = Sandbox::new();
    let exec = start(&sandbox, &sh("seq 100000; echo end >&2"));
    let expected: String = (1..=100_000).map(|number| format!("{number}\n")).collect();
    let mut received = [Vec::new(), Vec::new()];
    let mut round = 0;
    let ended = loop {
        round += 1;
        let stream = sandbox.dial();
        let cut = stream.try_clone().unwrap();
        let session = Session::over(stream, GENERATION, PATIENCE).unwrap();
        let from = [received[0].len() as u64, received[1].len() as u64];
        let mut chunks = 0;
        let mut last = None;
        for event in session.attach_with(exec, from, 30_000).unwrap() {
            match event {
                Event::Output {
                    stream,
                    offset,
                    data,
                } => {
                    let all: &mut Vec<u8> = &mut received[stream.index()];
                    assert_eq!(offset, all.len() as u64);
                    all.extend_from_slice(&data);
                    chunks += 1;
                    if chunks == 3 && round < 8 {
                        // Whatever is on its way is lost with it.
                        cut.shutdown(std::net::Shutdown::Both).unwrap();
                        break;
                    }
                }
                Event::Ended(ended) => last = Some(ended),
                _ => {}
            }
        }
        if let Some(Ended::Exit(record)) = last {
            break record;
        }
    };
    assert!(round > 1, "no client was lost");
    assert!(received[0] == expected.as_bytes());
    assert_eq!(received[1], b"end\n");
    assert_eq!(ended.cause, Cause::Exited(0));
    // And from any offset once more, after its end.
    for from in [0, 5000, expected.len() as u64] {
        let collected = session(&sandbox)
            .attach(exec, [from, 4])
            .unwrap()
            .collect_output();
        assert!(
            collected.stdout == expected.as_bytes()[from as usize..],
            "from {from}"
        );
        assert!(collected.stderr.is_empty());
    }
}

#[test]
fn detached_exec_is_listed_waited_for_signalled_and_released_from_another_session() {
    let sandbox = Sandbox::new();
    let exec = start(&sandbox, &sh("echo ready; exec sleep 600"));
    let other = session(&sandbox);
    let running = until(&other, exec, |info| info.length == [6, 0]);
    assert_eq!((running.state, running.kept), (ExecState::Running, true));
    assert!(
        running.command.starts_with("/bin/sh -c echo ready"),
        "{}",
        running.command
    );
    assert_eq!((running.end, running.clients), (None, 0));
    assert!(running.progress_ns <= running.age_ns);
    let refusal = refused(other.release(exec, PATIENCE));
    assert_eq!(refusal.code, RefusedCode::NotEnded);
    let waiting = other.wait(exec).unwrap();
    assert_eq!(info(&other, exec).unwrap().clients, 1);
    session(&sandbox).signal(exec, 10, PATIENCE).unwrap();
    assert_eq!(record(waiting.wait()).cause, Cause::Signaled(10));
    // It is over, and all of it is still to be had.
    let ended = info(&other, exec).unwrap();
    assert_eq!(ended.state, ExecState::Ended);
    assert_eq!(ended.end, Some((CauseKind::Signaled, 138)));
    assert_eq!(ended.store_bytes, 6, "no more than its bytes");
    assert_eq!(
        record(other.wait(exec).unwrap().wait()).cause,
        Cause::Signaled(10)
    );
    assert_eq!(
        refused(other.signal(exec, 10, PATIENCE)).code,
        RefusedCode::HasEnded
    );
    other.cancel(exec, NOW, PATIENCE).unwrap();
    other.release(exec, PATIENCE).unwrap();
    assert!(other.list(PATIENCE).unwrap().is_empty());
    for result in [
        other.release(exec, PATIENCE),
        other.signal(exec, 10, PATIENCE),
    ] {
        let refusal = refused(result);
        assert_eq!(refusal.code, RefusedCode::UnknownExec);
        assert!(refusal.message.contains("is not kept"), "{refusal}");
    }
    let Ended::Refused(refusal) = other.attach(77, [0, 0]).unwrap().wait() else {
        panic!("there is none")
    };
    assert!(
        refusal
            .message
            .contains(&format!("the last one was {exec}")),
        "{refusal}"
    );
}

#[test]
fn ex19_cancel_by_number_is_accepted_at_any_time_after_the_start() {
    let sandbox = Sandbox::new();
    let session = session(&sandbox);
    for round in 0..60_u64 {
        // Some end by themselves meanwhile, some have ended before.
        let script = if round % 3 == 0 {
            "exec sleep 600"
        } else {
            "exit 0"
        };
        let exec = session.start(&sh(script), PATIENCE).unwrap().exec;
        if round % 3 == 2 {
            session.wait(exec).unwrap().wait();
        }
        session.cancel(exec, NOW, PATIENCE).unwrap();
        let cause = record(session.wait(exec).unwrap().wait()).cause;
        let natural = cause == Cause::Exited(0);
        assert!(
            natural || cause == Cause::Cancelled(CancelReason::Request),
            "{cause:?}"
        );
        assert!(round % 3 != 0 || !natural);
        session.release(exec, PATIENCE).unwrap();
        session.cancel(exec, NOW, PATIENCE).unwrap();
    }
    assert_eq!(
        refused(session.cancel(1000, NOW, PATIENCE)).code,
        RefusedCode::UnknownExec
    );
    assert_eq!(
        refused(session.cancel(0, NOW, PATIENCE)).code,
        RefusedCode::UnknownExec
    );
}

#[test]
fn ex15_uncapped_exec_without_client_waits_and_timeout_and_cancel_end_it() {
    let sandbox = Sandbox::new();
    let session = session(&sandbox);
    let mut flood = uncapped("while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done");
    let waiting = session.start(&flood, PATIENCE).unwrap().exec;
    let found = until(&session, waiting, |info| info.state == ExecState::Waiting);
    assert_eq!(found.length[0], 1 << 20, "a ring's worth");
    flood.timeout_ns = 300 * MS;
    let timed = session.start(&flood, PATIENCE).unwrap().exec;
    assert_eq!(
        record(session.wait(timed).unwrap().wait()).cause,
        Cause::TimedOut
    );
    assert_eq!(info(&session, waiting).unwrap().state, ExecState::Waiting);
    // A reader makes room, and what it has not consumed holds it up again.
    let mut reader = session.attach(waiting, [0, 0]).unwrap();
    let mut seen = 0;
    while seen < 3 << 20 {
        match reader.next() {
            Some(Event::Output { offset, data, .. }) => {
                assert_eq!(offset, seen);
                seen += data.len() as u64;
            }
            Some(Event::Started { .. }) => {}
            other => panic!("{other:?}"),
        }
    }
    drop(reader);
    let found = until(&session, waiting, |info| info.state == ExecState::Waiting);
    assert!(
        found.earliest[0] > 0 && found.earliest[0] <= seen,
        "{found:?}"
    );
    // A client that says where it was finds all of the rest, and one that is too late is told.
    let Ended::Refused(refusal) = session.attach(waiting, [0, 0]).unwrap().wait() else {
        panic!("it is gone")
    };
    assert_eq!(refusal.code, RefusedCode::BelowStart);
    assert_eq!(refusal.numbers, found.earliest);
    assert!(
        refusal.message.contains(&found.earliest[0].to_string()),
        "{refusal}"
    );
    session.cancel(waiting, NOW, PATIENCE).unwrap();
    let collected = session.attach(waiting, [seen, 0]).unwrap().collect_output();
    let record = record(collected.ended);
    assert_eq!(record.cause, Cause::Cancelled(CancelReason::Request));
    assert_eq!(
        seen + collected.stdout.len() as u64,
        record.streams[0].forwarded
    );
    assert!(record.leaf_empty);
}

#[test]
fn ex15_stores_share_a_budget_and_a_refusal_names_what_was_not_released() {
    let options = Options {
        store_bytes: Some((3 << 20) + 4 * 6),
        ..Options::default()
    };
    let sandbox = Sandbox::with(options);
    let session = session(&sandbox);
    // Each could take a megabyte while it runs, and takes what it wrote when it has ended.
    let full: Vec<u64> = (0..2)
        .map(|_| {
            let exec = session
                .start(&sh("head -c 1048576 /dev/zero"), PATIENCE)
                .unwrap()
                .exec;
            session.wait(exec).unwrap().wait();
            exec
        })
        .collect();
    for _ in 0..5 {
        let small = session.start(&sh("echo small"), PATIENCE).unwrap().exec;
        session.wait(small).unwrap().wait();
    }
    let error = session.start(&sh("echo never"), PATIENCE).unwrap_err();
    let StartError::Ended(Ended::Refused(refusal)) = error else {
        panic!("{error:?}")
    };
    assert_eq!(refusal.code, RefusedCode::NoBudget);
    assert_eq!(refusal.numbers, [1, 2, 3, 4, 5, 6, 7]);
    assert!(refusal.message.contains("not released: 1, 2"), "{refusal}");
    // Nobody else's are refused with it, and a smaller one has room.
    let mut small = sh("echo small enough");
    small.output_limit = Some(1000);
    assert_eq!(
        session.exec(&small).unwrap().collect_output().stdout,
        b"small enough\n"
    );
    session.release(full[0], PATIENCE).unwrap();
    let again = session.start(&sh("echo again"), PATIENCE).unwrap().exec;
    assert_eq!(
        session
            .attach(again, [0, 0])
            .unwrap()
            .collect_output()
            .stdout,
        b"again\n"
    );
    let kept = session
        .attach(full[1], [1_048_000, 0])
        .unwrap()
        .collect_output();
    assert_eq!(kept.stdout.len(), 576);
}

#[test]
fn clients_beside_each_other_each_get_all_of_it() {
    let sandbox = Sandbox::new();
    let mut request = uncapped("cat");
    request.stdin = true;
    let owner = session(&sandbox);
    let mut exec = owner.exec(&request).unwrap();
    let mut stdin = exec.stdin().unwrap();
    let Some(Event::Started { exec: number, .. }) = exec.next() else {
        panic!("it was to start")
    };
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|at| (at % 251) as u8).collect();
    let readers: Vec<_> = (0..3)
        .map(|_| {
            let session = session(&sandbox);
            let exec = session.attach(number, [0, 0]).unwrap();
            std::thread::spawn(move || (exec.collect_output(), session))
        })
        .collect();
    // Attached for certain before the first byte.
    until(&owner, number, |info| info.clients == 4);
    let sent = bytes.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&sent));
    assert!(exec.collect_output().stdout == bytes);
    writer.join().unwrap().unwrap();
    for reader in readers {
        let (collected, _session) = reader.join().unwrap();
        assert!(collected.stdout == bytes);
        assert_eq!(record(collected.ended).cause, Cause::Exited(0));
    }
    assert!(
        owner.list(PATIENCE).unwrap().is_empty(),
        "nothing of it is kept"
    );
}

#[test]
fn client_that_attaches_is_none_whose_loss_ends_the_exec() {
    let mut sandbox = Sandbox::new();
    let owner = session(&sandbox);
    let mut exec = owner.exec(&sh("echo $$; exec sleep 600")).unwrap();
    let Some(Event::Started { exec: number, pid }) = exec.next() else {
        panic!("it was to start")
    };
    let other = session(&sandbox);
    let mut attached = other.attach(number, [0, 0]).unwrap();
    while !matches!(attached.next(), Some(Event::Output { .. })) {}
    drop(attached);
    other.close();
    owner.ping(PATIENCE).unwrap();
    assert!(alive(&pid.to_string()));
    // The loss of its own client does, whoever else is there, and they are told.
    let other = session(&sandbox);
    let attached = other.attach(number, [0, 0]).unwrap();
    other.ping(PATIENCE).unwrap();
    owner.close();
    sandbox.control().confirm(GENERATION);
    let cause = record(attached.wait()).cause;
    assert_eq!(cause, Cause::Cancelled(CancelReason::ClientLost));
    wait_dead(&pid.to_string());
    assert!(other.list(PATIENCE).unwrap().is_empty());
}

#[test]
fn detached_exec_that_cannot_start_says_so_and_is_not_kept() {
    let sandbox = Sandbox::new();
    let session = session(&sandbox);
    let error = session
        .start(&ExecRequest::new(["no-such-program"]), PATIENCE)
        .unwrap_err();
    let StartError::Ended(ended) = error else {
        panic!("{error:?}")
    };
    assert_eq!(ended.status(), 127);
    assert!(session.list(PATIENCE).unwrap().is_empty());
}

#[test]
fn ge14_exec_of_an_older_life_is_kept_with_its_output_and_can_be_attached_to() {
    let mut sandbox = Sandbox::new();
    let first = session(&sandbox);
    let pipe = sandbox.folder.path().join("pipe");
    let script = format!(
        "mkfifo {0}; echo before; read x <{0}; echo after",
        pipe.display()
    );
    let mut running = first.exec(&sh(&script)).unwrap();
    let Some(Event::Started { exec, .. }) = running.next() else {
        panic!("it was to start")
    };
    while !matches!(running.next(), Some(Event::Output { .. })) {}
    // A transport reset, and another life.
    let next = GenerationId {
        counter: GENERATION.counter + 1,
        public_id: 99,
    };
    sandbox.redial().give_life(next);
    let session = Session::over(sandbox.dial(), next, PATIENCE).unwrap();
    until(&session, exec, |info| info.kept);
    std::fs::write(pipe, "go\n").unwrap();
    let collected = session.attach(exec, [0, 0]).unwrap().collect_output();
    assert_eq!(collected.stdout, b"before\nafter\n");
    session.release(exec, PATIENCE).unwrap();
}

#[test]
fn ex13_agent_is_at_its_baseline_after_many_execs_in_a_row() {
    // All 100,000 take ten minutes here, where a leaf is looked for in /proc: a fiftieth, unless it is asked for.
    let count: u64 = std::env::var("VMM_EXECS").map_or(2000, |count| count.parse().unwrap());
    let sandbox = Sandbox::new();
    let session = session(&sandbox);
    let round = |number: u64| {
        if number.is_multiple_of(10) {
            let exec = session.start(&sh("echo detached"), PATIENCE).unwrap().exec;
            session.wait(exec).unwrap().wait();
            session.release(exec, PATIENCE).unwrap();
        } else {
            let ended = session.exec(&ExecRequest::new(["true"])).unwrap().wait();
            assert_eq!(ended.status(), 0);
        }
    };
    (0..100).for_each(round);
    sandbox.until_asleep();
    let baseline = |sandbox: &Sandbox| {
        (
            sandbox.descriptors(),
            sandbox.status("Threads"),
            sandbox.children(),
        )
    };
    let (before, memory) = (baseline(&sandbox), sandbox.status("VmRSS"));
    (0..count).for_each(round);
    sandbox.until_asleep();
    assert_eq!(baseline(&sandbox), before, "descriptors, threads, children");
    let after = sandbox.status("VmRSS");
    assert!(after < memory + 512, "{memory} kB became {after} kB");
    assert!(session.list(PATIENCE).unwrap().is_empty());
}

#[test]
fn refusals_of_one_session_leave_the_others_alone() {
    let sandbox = Sandbox::new();
    let exec = start(&sandbox, &sh("cat /dev/zero"));
    let mut client: Client = sandbox.connect();
    for _ in 0..100 {
        let session = session(&sandbox);
        let handle = session.attach(exec, [1 << 40, 0]).unwrap();
        assert!(
            matches!(handle.wait(), Ended::Refused(refusal) if refusal.code == RefusedCode::Invalid)
        );
    }
    client.round_trip();
    let collected = session(&sandbox)
        .attach(exec, [0, 0])
        .unwrap()
        .collect_output();
    assert_eq!(collected.stdout.len(), 1 << 20);
    assert_eq!(record(collected.ended).cause, Cause::OutputLimit);
}
