//! What a client receives of a workload's output, and when.

use std::time::{Duration, Instant};

use vmm_protocol::limits::DEFAULT_OUTPUT_LIMIT;
use vmm_protocol::{CancelReason, Cause, Policy, Stream};

use crate::client::{Said, sh};
use crate::harness::Sandbox;

const CAP: usize = DEFAULT_OUTPUT_LIMIT as usize;

#[test]
fn split_streams_status_and_counts() {
    let sandbox = Sandbox::new();
    let outcome = sandbox.connect().run(&sh("echo out; echo err >&2; exit 7"));
    assert_eq!(
        (outcome.stdout.as_slice(), outcome.stderr.as_slice()),
        (&b"out\n"[..], &b"err\n"[..])
    );
    let record = outcome.record();
    assert_eq!(record.cause, Cause::Exited(7));
    assert_eq!(
        record.streams.map(|counts| (counts.seen, counts.dropped)),
        [(4, 0), (4, 0)]
    );
    assert!(record.leaf_empty && !record.truncated && !record.limited && !record.unproven);
    assert!(record.wall_ns > 0);
    assert!(
        matches!(outcome.said[0], Said::Started { .. }),
        "started comes first"
    );
}

#[test]
fn ex01_the_chunk_that_crosses_the_cap_is_forwarded_up_to_the_last_byte_that_fits() {
    let sandbox = Sandbox::new();
    // The last write is one: 32 KiB of b and 50 of c, from a file.
    let script = "head -c 1048476 /dev/zero | tr '\\0' a; \
                  { head -c 32768 /dev/zero | tr '\\0' b; printf %050d 0 | tr 0 c; } > $0; \
                  dd if=$0 bs=64k count=1 2>/dev/null; echo never";
    let file = sandbox.folder.path().join("chunk");
    let mut request = sh(script);
    request
        .argv
        .push(file.into_os_string().into_encoded_bytes());
    let outcome = sandbox.connect().run(&request);
    assert_eq!(outcome.stdout.len(), CAP);
    assert!(outcome.stdout[..CAP - 100].iter().all(|byte| *byte == b'a'));
    assert!(outcome.stdout[CAP - 100..].iter().all(|byte| *byte == b'b'));
    assert_eq!(*outcome.cause(), Cause::OutputLimit);
    assert_eq!(outcome.record().status(), 125);
    assert!(outcome.record().limited);
    let counts = outcome.record().streams[0];
    assert_eq!(counts.forwarded, CAP as u64);
    assert_eq!(counts.dropped, counts.seen - counts.forwarded);
}

#[test]
fn ex02_after_the_limit_a_descendant_outside_the_process_group_dies_unheard() {
    let sandbox = Sandbox::new();
    let alive = sandbox.folder.path().join("alive");
    // The flood begins when the descendant is there: its number is in the file by then.
    let mut request = sh("mkfifo $0.up; \
         setsid sh -c 'trap \"\" TERM HUP PIPE; echo $$ > $0; echo > $0.up; while :; do echo zzzzzzzz; done' $0 & \
         read up < $0.up; head -c 4000 /dev/zero | tr '\\0' a; wait");
    request
        .argv
        .push(alive.clone().into_os_string().into_encoded_bytes());
    request.output_limit = Some(2000);
    let outcome = sandbox.connect().run(&request);
    assert_eq!(
        outcome.stdout.len(),
        2000,
        "exactly the cap, whoever wrote it"
    );
    assert_eq!(*outcome.cause(), Cause::OutputLimit);
    assert!(outcome.record().leaf_empty);
    let pid: u32 = std::fs::read_to_string(alive)
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    assert!(
        !std::path::Path::new(&format!("/proc/{pid}")).exists(),
        "it has died"
    );
}

#[test]
fn ex02_under_drain_nothing_more_is_forwarded_and_the_rest_is_counted() {
    let sandbox = Sandbox::new();
    let mut request = sh("head -c 5000 /dev/zero; echo late >&2; exit 3");
    request.output_limit = Some(1000);
    request.policy = Policy::Drain;
    let outcome = sandbox.connect().run(&request);
    assert_eq!((outcome.stdout.len(), outcome.stderr.len()), (1000, 0));
    assert_eq!(*outcome.cause(), Cause::Exited(3));
    let record = outcome.record();
    assert!(record.limited);
    assert_eq!(record.streams[0].seen, 5000);
    assert_eq!(record.streams[1].dropped, 5);
}

#[test]
fn ex03_limit_then_small_chunk_is_not_forwarded() {
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    for _ in 0..20 {
        // stderr has data before, with and after the crossing on stdout.
        let mut request = sh("printf xxxxxxxxxxx & printf e >&2; wait; printf e >&2; sleep 10");
        request.output_limit = Some(10);
        let outcome = client.run(&request);
        assert_eq!(*outcome.cause(), Cause::OutputLimit);
        let limit = outcome
            .said
            .iter()
            .position(|said| matches!(said, Said::Limit(_)))
            .unwrap();
        let after = &outcome.said[limit + 1..];
        assert!(
            !after.iter().any(|said| matches!(said, Said::Output(..))),
            "{after:?}"
        );
        assert_eq!(outcome.stdout.len() + outcome.stderr.len(), 10);
    }
}

#[test]
fn ex04_at_the_cap_and_one_beyond_it_on_either_stream_or_both() {
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    for (out, err, expected) in [
        (100, 0, Cause::Exited(0)),
        (101, 0, Cause::OutputLimit),
        (0, 100, Cause::Exited(0)),
        (0, 101, Cause::OutputLimit),
        (60, 40, Cause::Exited(0)),
        (60, 41, Cause::OutputLimit),
    ] {
        let mut request = sh(&format!(
            "head -c {out} /dev/zero; head -c {err} /dev/zero >&2; exec sleep 0.0"
        ));
        request.output_limit = Some(100);
        let outcome = client.run(&request);
        assert_eq!(*outcome.cause(), expected, "{out} and {err}");
        assert_eq!(outcome.stdout.len() + outcome.stderr.len(), 100);
        assert_eq!(outcome.stdout.len(), out.min(100));
    }
}

#[test]
fn ex05_every_interleaving_yields_prefixes_and_one_record() {
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    // Two writers with a pattern of their own, ended at many points by cancel or limit.
    let script = "i=0; while :; do echo out $i; echo err $i >&2; i=$((i+1)); done";
    let expected = |name: &str, length: usize| -> Vec<u8> {
        (0..)
            .flat_map(|i| format!("{name} {i}\n").into_bytes())
            .take(length)
            .collect()
    };
    for round in 0..40u64 {
        let mut request = sh(script);
        request.output_limit = Some(1 + round * 97);
        request.window = 50 + round * 13;
        let id = client.exec(&request);
        if round % 3 == 0 {
            client.started(id);
            client.cancel(id, (round % 2) * 1_000_000);
        }
        let outcome = client.finish(id);
        assert_eq!(
            outcome.stdout,
            expected("out", outcome.stdout.len()),
            "round {round}"
        );
        assert_eq!(
            outcome.stderr,
            expected("err", outcome.stderr.len()),
            "round {round}"
        );
        let record = outcome.record();
        assert!(
            matches!(
                record.cause,
                Cause::OutputLimit | Cause::Cancelled(CancelReason::Request)
            ),
            "{record:?}"
        );
        let lengths = [outcome.stdout.len() as u64, outcome.stderr.len() as u64];
        assert_eq!(record.streams.map(|counts| counts.forwarded), lengths);
    }
    client.round_trip();
    assert!(
        client.quiet_for(Duration::from_millis(20)),
        "no second record"
    );
}

#[test]
fn ex08_a_byte_without_newline_arrives_while_the_workload_sleeps() {
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    // The best of ten: one that was held back on purpose would be late each time, a busy machine is not.
    let best = (0..10).map(|_| {
        let id = client.exec(&sh("printf x; exec sleep 600"));
        client.started(id);
        let start = Instant::now();
        let said = client.next_of(id);
        let took = start.elapsed();
        assert_eq!(said, Some(Said::Output(Stream::Stdout, b"x".to_vec())));
        client.cancel(id, 0);
        client.finish(id);
        took
    });
    let best = best.min().unwrap();
    assert!(best < Duration::from_millis(50), "{best:?}");
}

#[test]
fn ex20_the_limit_is_told_at_once_although_credit_is_used_up() {
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    client.crediting = false;
    let mut request = sh("head -c 5000 /dev/zero; exec sleep 20");
    request.output_limit = Some(1000);
    request.policy = Policy::Drain;
    request.window = 100;
    let id = client.exec(&request);
    client.started(id);
    // 100 bytes are all that the window lets through; the event does not wait for the other 900.
    assert_eq!(
        client.next_of(id),
        Some(Said::Output(Stream::Stdout, vec![0; 100]))
    );
    assert_eq!(client.next_of(id), Some(Said::Limit([1000, 0])));
    client.cancel(id, 0);
    client.crediting = true;
    client.send(id, &vmm_protocol::ClientMessage::Credit([100, 0]));
    let rest = client.finish(id);
    assert_eq!(rest.stdout.len(), 900);
}

#[test]
fn uncapped_output_flows_through_the_ring_byte_exact() {
    let sandbox = Sandbox::new();
    let mut request = sh("head -c 20000000 /dev/zero | tr '\\0' q");
    request.output_limit = None;
    let outcome = sandbox.connect().run(&request);
    assert_eq!(outcome.stdout.len(), 20_000_000);
    assert!(outcome.stdout.iter().all(|byte| *byte == b'q'));
    assert_eq!(*outcome.cause(), Cause::Exited(0));
}
