//! The agent's real loop and the host's real session library, end to end.

use std::io::Write;
use std::time::Duration;

use vmm_client::{Ended, Event, Session};
use vmm_protocol::{CancelReason, Cause, ExecRequest, Record};

use crate::client::sh;
use crate::harness::{GENERATION, PATIENCE, Sandbox};

fn session(sandbox: &Sandbox) -> Session {
    Session::over(sandbox.dial(), GENERATION, PATIENCE).unwrap()
}

fn uncapped(script: &str) -> ExecRequest {
    let mut request = sh(script);
    request.output_limit = None;
    request
}

fn record(ended: Ended) -> Record {
    match ended {
        Ended::Exit(record) => *record,
        other => panic!("no record but {other:?}"),
    }
}

#[test]
fn library_runs_a_workload_with_split_streams_and_status() {
    let sandbox = Sandbox::new();
    let session = session(&sandbox);
    let collected = session
        .exec(&sh("echo out; echo err >&2; exit 7"))
        .unwrap()
        .collect_output();
    assert_eq!(
        (collected.stdout, collected.stderr),
        (b"out\n".to_vec(), b"err\n".to_vec())
    );
    assert_eq!(record(collected.ended).cause, Cause::Exited(7));
    assert!(session.ping(PATIENCE).unwrap() < PATIENCE);
}

#[test]
fn library_receives_more_than_every_window_byte_exact() {
    let sandbox = Sandbox::new();
    let script = "head -c 20000000 /dev/zero | tr '\\0' a; echo end >&2";
    let collected = session(&sandbox)
        .exec(&uncapped(script))
        .unwrap()
        .collect_output();
    assert_eq!(collected.stdout.len(), 20_000_000);
    assert!(collected.stdout.iter().all(|byte| *byte == b'a'));
    assert_eq!(collected.stderr, b"end\n");
    assert_eq!(record(collected.ended).cause, Cause::Exited(0));
}

#[test]
fn library_feeds_stdin_beyond_its_window_and_closes_it() {
    let sandbox = Sandbox::new();
    let session = session(&sandbox);
    let mut request = uncapped("cat");
    request.stdin = true;
    let mut exec = session.exec(&request).unwrap();
    let mut stdin = exec.stdin().unwrap();
    let bytes: Vec<u8> = (0..1_000_000_u32).map(|at| (at % 251) as u8).collect();
    let sent = bytes.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&sent));
    let collected = exec.collect_output();
    writer.join().unwrap().unwrap();
    assert!(collected.stdout == bytes);
    assert_eq!(record(collected.ended).cause, Cause::Exited(0));
}

#[test]
fn se02_library_exec_that_is_not_read_leaves_twenty_siblings_alone() {
    let sandbox = Sandbox::new();
    let session = session(&sandbox);
    let flood = session.exec(&uncapped("yes")).unwrap();
    let execs: Vec<_> = (0..20)
        .map(|number| session.exec(&sh(&format!("echo {number}"))).unwrap())
        .collect();
    for (number, exec) in execs.into_iter().enumerate() {
        assert_eq!(
            exec.collect_output().stdout,
            format!("{number}\n").into_bytes()
        );
    }
    flood
        .control()
        .cancel(CancelReason::Request, Duration::ZERO)
        .unwrap();
    let cause = record(flood.wait()).cause;
    assert_eq!(cause, Cause::Cancelled(CancelReason::Request));
}

#[test]
fn library_handle_that_is_dropped_takes_its_workload_with_it() {
    let sandbox = Sandbox::new();
    let session = session(&sandbox);
    let mut exec = session.exec(&sh("echo $$; exec sleep 1000")).unwrap();
    let started = exec.next();
    assert!(matches!(started, Some(Event::Started { .. })));
    let Some(Event::Output { data, .. }) = exec.next() else {
        panic!("its pid was to come")
    };
    assert!(!data.is_empty());
    drop(exec);
    // Answered after the cancel, in order.
    session.ping(PATIENCE).unwrap();
    let next = session.exec(&sh("exit 3")).unwrap().wait();
    assert_eq!(next.status(), 3);
}

#[test]
fn ge13_library_names_the_last_offsets_when_the_connection_is_cut() {
    let sandbox = Sandbox::new();
    let stream = sandbox.dial();
    let cut = stream.try_clone().unwrap();
    let session = Session::over(stream, GENERATION, PATIENCE).unwrap();
    let mut exec = session.exec(&sh("printf 12345; exec sleep 1000")).unwrap();
    while !matches!(exec.next(), Some(Event::Output { .. })) {}
    cut.shutdown(std::net::Shutdown::Both).unwrap();
    let Ended::Lost(lost) = exec.wait() else {
        panic!("the session was cut")
    };
    assert_eq!(lost.received, [5, 0]);
}
