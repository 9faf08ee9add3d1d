//! `vmm run` of workloads in a stock guest: streams, statuses, limits, ends.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // All of it is test code.

use std::time::{Duration, Instant};

use vmm_tests::{Ended, Vmm};

const CAP: usize = 1 << 20;

fn sh(script: &str) -> Ended {
    run(&[], script)
}

fn run(flags: &[&str], script: &str) -> Ended {
    Vmm::machine()
        .args(flags)
        .args(["--", "sh", "-c", script])
        .run()
}

#[test]
fn streams_are_apart_and_the_status_is_the_workloads() {
    let ended = sh("uname -r; echo out; echo err >&2; exit 7");
    assert_eq!(ended.status, 7);
    assert!(ended.text().ends_with("\nout\n"), "{}", ended.text());
    assert!(ended.text().contains("cloud"), "{}", ended.text());
    assert_eq!(ended.stderr, "err\n");
}

#[test]
fn bytes_are_bytes_both_ways() {
    let escapes: String = (0..=255).map(|byte: u8| format!("\\{byte:03o}")).collect();
    let ended = sh(&format!("printf '{escapes}'"));
    assert_eq!(ended.status, 0, "{}", ended.stderr);
    assert_eq!(ended.stdout, (0..=255).collect::<Vec<u8>>());
}

#[test]
fn ex01_ex04_output_is_capped_at_exactly_1_mib_and_the_status_is_125() {
    let ended = sh("head -c 3000000 /dev/zero | tr '\\0' a");
    assert_eq!(ended.stdout.len(), CAP);
    assert!(ended.stdout.iter().all(|byte| *byte == b'a'));
    assert_eq!(ended.status, 125, "{}", ended.stderr);
    let ended = sh("head -c 1048576 /dev/zero; exit 3");
    assert_eq!(
        (ended.stdout.len(), ended.status),
        (CAP, 3),
        "exactly the cap is no excess"
    );
}

#[test]
fn ex02_nothing_survives_the_limit_not_even_outside_the_process_group() {
    let ended =
        sh("setsid sh -c 'while :; do echo descendant; done' & while :; do echo main; done");
    assert_eq!(ended.status, 125, "{}", ended.stderr);
    assert_eq!(ended.stdout.len(), CAP);
}

#[test]
fn ex03_the_cap_is_on_both_streams_together() {
    let ended = sh(
        "(head -c 2000000 /dev/zero | tr '\\0' e >&2) & head -c 2000000 /dev/zero | tr '\\0' o; wait",
    );
    assert_eq!(ended.status, 125);
    let out = ended.stdout.iter().filter(|byte| **byte == b'o').count();
    let err = ended
        .stderr
        .bytes()
        .take_while(|byte| *byte == b'e')
        .count();
    assert_eq!(out, ended.stdout.len());
    assert_eq!(out + err, CAP);
}

#[test]
fn a_drained_excess_leaves_the_status_to_the_workload() {
    let ended = run(
        &["--output-limit", "10", "--on-limit", "drain"],
        "head -c 100000 /dev/zero; exit 3",
    );
    assert_eq!(
        (ended.stdout.len(), ended.status),
        (10, 3),
        "{}",
        ended.stderr
    );
}

#[test]
fn ex08_a_byte_without_newline_comes_at_once() {
    let vmm = Vmm::machine()
        .args(["--", "sh", "-c", "printf x; sleep 5"])
        .start();
    vmm.stdout.wait_for("x");
    let came = Instant::now();
    assert_eq!(vmm.end().status, 0);
    let before = came.elapsed();
    assert!(
        before > Duration::from_secs(4),
        "only {before:?} before the end of 5 s of sleep"
    );
}

#[test]
fn a_timeout_is_124_and_output_until_then_is_there() {
    let ended = run(&["--timeout", "2s"], "echo before; sleep 1000; echo after");
    assert_eq!(ended.status, 124, "{}", ended.stderr);
    assert_eq!(ended.text(), "before\n");
}

#[test]
fn a_signal_is_128_and_its_number() {
    assert_eq!(sh("kill -TERM $$").status, 143);
    assert_eq!(sh("kill -KILL $$").status, 137);
}

#[test]
fn ex17_what_cannot_be_started_is_126_or_127_with_errno_and_stage() {
    for (flags, argv, status, words) in [
        (
            &[][..],
            &["no-such-program"][..],
            127,
            &["no-such-program"][..],
        ),
        (&[], &["/etc/passwd"], 126, &["ermission denied"]),
        (
            &["--cwd", "/missing"],
            &["true"],
            126,
            &["/missing", "o such file"],
        ),
        (
            &["--cwd", "/etc/passwd"],
            &["true"],
            126,
            &["ot a directory"],
        ),
        (
            &["--cwd", "/root", "--user", "1000:1000"],
            &["true"],
            126,
            &["ermission denied"],
        ),
    ] {
        let ended = Vmm::machine().args(flags).arg("--").args(argv).run();
        assert_eq!(ended.status, status, "{flags:?} {argv:?}: {}", ended.stderr);
        for word in words {
            assert!(
                ended.stderr.contains(word),
                "{flags:?} {argv:?}: {}",
                ended.stderr
            );
        }
    }
}

#[test]
fn user_folder_and_environment_are_as_asked() {
    let flags = [
        "--user",
        "1000:1000",
        "--cwd",
        "/tmp",
        "--env",
        "A=1 2",
        "--env",
        "A=3",
    ];
    let ended = run(
        &flags,
        "id -u; id -g; pwd; echo \"$A\"; echo \"$PATH\"; ls /proc/self/fd | wc -l",
    );
    assert_eq!(ended.status, 0, "{}", ended.stderr);
    let path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    // Descriptors 0, 1, 2, and the folder that `ls` reads.
    assert_eq!(ended.text(), format!("1000\n1000\n/tmp\n3\n{path}\n4\n"));
}

#[test]
fn json_has_a_record_for_each_event() {
    let ended = run(&["--json"], "echo out; echo err >&2; exit 5");
    assert_eq!(ended.status, 5, "{}", ended.stderr);
    let events: Vec<serde_json::Value> = ended
        .text()
        .lines()
        .map(|line| serde_json::from_str(line).expect("one object a line"))
        .collect();
    let kinds: Vec<&str> = events
        .iter()
        .filter_map(|event| event["event"].as_str())
        .collect();
    assert_eq!(kinds.first(), Some(&"started"), "{events:?}");
    assert_eq!(kinds.last(), Some(&"exit"), "{events:?}");
    let exit = events.last().unwrap();
    assert_eq!(exit["status"], 5, "{exit}");
}

#[test]
fn vs06_a_long_stream_is_intact() {
    const LAST: u32 = 4_000_000;
    let flags = ["--output-limit", "none"];
    let script = format!("seq 1 {LAST}");
    let ended = Vmm::machine()
        .args(flags)
        .args(["--", "sh", "-c", &script])
        .patience(Duration::from_secs(200))
        .run();
    assert_eq!(ended.status, 0, "{}", ended.stderr);
    let expected: String = (1..=LAST).map(|number| format!("{number}\n")).collect();
    assert!(
        ended.stdout == expected.as_bytes(),
        "{} bytes of {}",
        ended.stdout.len(),
        expected.len()
    );
}
