//! How execs end, and what is left of them.

use std::time::{Duration, Instant};

use vmm_protocol::{
    CancelReason, Cause, ClientMessage, ClosedWhy, ExecRequest, Policy, Stream, Winsize,
};

use crate::client::{Said, sh};
use crate::fake::alive;
use crate::harness::{Options, Sandbox};

const MS: u64 = 1_000_000;

#[test]
fn ex06_a_client_that_stops_reading_delays_no_timeout_and_nobody_else() {
    let sandbox = Sandbox::new();
    let mut deaf = sandbox.connect();
    let mut other = sandbox.connect();
    let mut flood = sh("while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done");
    flood.output_limit = None;
    flood.timeout_ns = 300 * MS;
    let start = Instant::now();
    // Credit beyond what the socket holds, so that the socket itself is full, not only the window.
    flood.window = 16 << 20;
    let flooding = deaf.exec(&flood);
    let memory = sandbox.status("VmRSS");
    for _ in 0..20 {
        assert_eq!(*other.run(&sh("echo hi")).cause(), Cause::Exited(0));
    }
    other.round_trip();
    assert!(sandbox.status("VmRSS") < memory + 8192, "kB");
    // It reads again only now: the exec has long been over.
    let outcome = deaf.finish(flooding);
    assert_eq!(*outcome.cause(), Cause::TimedOut);
    assert_eq!(outcome.record().status(), 124);
    assert!(
        outcome.record().wall_ns < 1000 * MS,
        "{}",
        outcome.record().wall_ns
    );
    assert!(start.elapsed() < Duration::from_secs(10));
    assert!(outcome.record().leaf_empty);
}

#[test]
fn ex06_cancel_and_ping_are_heard_from_a_client_that_does_not_read() {
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    let mut flood = sh("while :; do echo x; done");
    flood.output_limit = None;
    flood.window = 16 << 20;
    let id = client.exec(&flood);
    client.started(id);
    let ping = client.ping();
    client.cancel(id, 0);
    let outcome = client.finish(id);
    assert_eq!(*outcome.cause(), Cause::Cancelled(CancelReason::Request));
    assert_eq!(client.next_of(ping), Some(Said::Pong));
}

#[test]
fn ex09_a_background_holder_of_stdout_is_cut_off_after_the_drain_deadline() {
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    let start = Instant::now();
    let outcome = client.run(&sh("sleep 600 & echo $!; exit 4"));
    let took = start.elapsed();
    assert_eq!(*outcome.cause(), Cause::Exited(4));
    let record = outcome.record();
    assert!(record.truncated && record.leaf_empty, "{record:?}");
    assert!(
        took >= Duration::from_millis(500) && took < Duration::from_secs(2),
        "{took:?}"
    );
    assert!(!alive(outcome.text().trim()), "the leaf is emptied");
}

#[test]
fn ex09_a_background_process_without_the_streams_is_no_reason_to_wait() {
    let sandbox = Sandbox::new();
    let outcome = sandbox.connect().run(&sh(
        "sleep 600 >/dev/null 2>&1 </dev/null & echo $!; exit 0",
    ));
    assert!(!outcome.record().truncated && outcome.record().leaf_empty);
    assert!(outcome.record().wall_ns < 400 * MS);
    assert!(!alive(outcome.text().trim()));
}

/// Saving and restoring, two more cells, are not there yet. How long it takes is said here and judged by
/// `cargo xtask bench exec`; the harness ends what never settles.
#[test]
fn ex11_cancel_settles_under_load_whatever_the_child_does_and_whoever_reads() {
    const RUNS: usize = 20;
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    let mut other = sandbox.connect();
    // More that wants the processors than there are of them.
    let load: Vec<u64> = (0..4)
        .map(|_| other.exec(&sh("while :; do :; done")))
        .collect();
    for id in &load {
        other.started(*id);
    }
    let mut worst = Duration::ZERO;
    for script in [
        "while :; do echo flood; done",
        "exec sleep 600",
        "cat",
        "trap '' TERM; while :; do sleep 600; done",
        "setsid sh -c 'trap \"\" TERM; sleep 600' & sh -c 'sleep 600 & sleep 600 &' & wait",
        "kill -STOP $$",
    ] {
        for (terminal, stalled) in [(false, false), (true, false), (false, true)] {
            for _ in 0..RUNS {
                let mut request = sh(script);
                request.stdin = true;
                request.tty = terminal.then_some(Winsize {
                    rows: 24,
                    columns: 80,
                });
                if stalled {
                    // Nothing is given back until the end: both the window and the ring are full.
                    (request.output_limit, request.window) = (None, 1000);
                }
                let id = client.exec(&request);
                client.started(id);
                let start = Instant::now();
                client.cancel(id, 100 * MS);
                let outcome = client.finish(id);
                worst = worst.max(start.elapsed());
                assert_eq!(*outcome.cause(), Cause::Cancelled(CancelReason::Request));
                assert!(outcome.record().leaf_empty, "{script}");
            }
        }
    }
    eprintln!("the slowest took {worst:?} with a grace of 100 ms");
    for id in load {
        other.cancel(id, 0);
        other.finish(id);
    }
}

#[test]
fn thousands_of_orphans_are_collected_and_statuses_stay_right() {
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    let orphans = client.exec(&sh(
        "i=0; while [ $i -lt 2000 ]; do (true &) ; i=$((i+1)); done; exit 9",
    ));
    let mut other = sandbox.connect();
    for code in 0..60 {
        let outcome = other.run(&sh(&format!("exit {code}")));
        assert_eq!(*outcome.cause(), Cause::Exited(code));
    }
    assert_eq!(*client.finish(orphans).cause(), Cause::Exited(9));
    client.round_trip();
    assert_eq!(sandbox.children(), 0, "no zombie is left");
}

#[test]
fn pr03_a_process_that_does_not_die_is_reported_and_the_agent_serves_on() {
    if std::env::var_os("VMM_LOOPBACK_CGROUP").is_some() {
        return; // only the fake tree has such a process
    }
    let sandbox = Sandbox::with(Options {
        stubborn: true,
        ..Options::default()
    });
    let mut client = sandbox.connect();
    let mut request = sh("echo $$; exec sleep 600");
    request.timeout_ns = 100 * MS;
    let stuck = client.exec(&request);
    let mut other = sandbox.connect();
    other.round_trip();
    let outcome = client.finish(stuck);
    assert_eq!(*outcome.cause(), Cause::TimedOut);
    assert!(!outcome.record().leaf_empty);
    assert!(outcome.record().unproven);
    assert_eq!(*other.run(&sh("exit 5")).cause(), Cause::Exited(5));
    // By hand, as the fake will not.
    let pid = outcome.text().trim().parse().unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

#[test]
fn a_signal_after_the_end_reaches_nobody() {
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    let id = client.exec(&sh("exit 0"));
    client.finish(id);
    client.send(id, &ClientMessage::Signal(9));
    client.round_trip();
}

#[test]
fn st01_a_command_that_never_reads_stdin_ends_and_so_does_its_timeout() {
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    let mut request = sh("exit 3");
    request.stdin = true;
    assert_eq!(*client.run(&request).cause(), Cause::Exited(3));
    let mut request = sh("exec sleep 600");
    request.stdin = true;
    request.timeout_ns = 100 * MS;
    let id = client.exec(&request);
    client.send(id, &ClientMessage::Stdin(&[b'x'; 60_000]));
    assert_eq!(*client.finish(id).cause(), Cause::TimedOut);
}

#[test]
fn st02_stdin_and_its_end_before_the_start_are_delivered_after_it() {
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    let mut request = sh("cat");
    request.stdin = true;
    let id = client.exec(&request);
    client.send(id, &ClientMessage::Stdin(b"early"));
    client.send(id, &ClientMessage::StdinClose);
    let outcome = client.finish(id);
    assert_eq!(
        (outcome.text().as_str(), outcome.cause()),
        ("early", &Cause::Exited(0))
    );
}

#[test]
fn st02_an_early_end_of_the_reader_is_an_event_and_no_error() {
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    let mut request = sh("exec <&-; echo closed; exec sleep 600");
    request.stdin = true;
    let id = client.exec(&request);
    client.started(id);
    assert_eq!(
        client.next_of(id),
        Some(Said::Output(Stream::Stdout, b"closed\n".to_vec()))
    );
    client.send(id, &ClientMessage::Stdin(b"nobody reads this"));
    let mut said = [client.next_of(id).unwrap(), client.next_of(id).unwrap()];
    said.sort_by_key(|said| matches!(said, Said::StdinClosed(_)));
    assert_eq!(
        said,
        [
            Said::StdinCredit(17),
            Said::StdinClosed(ClosedWhy::BrokenPipe)
        ]
    );
    client.cancel(id, 0);
    client.finish(id);
}

#[test]
fn st02_stdin_that_was_not_asked_for_is_said_to_be_closed() {
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    let id = client.exec(&sh("cat; echo end; exec sleep 600"));
    client.started(id);
    assert_eq!(
        client.next_of(id),
        Some(Said::Output(Stream::Stdout, b"end\n".to_vec()))
    );
    client.send(id, &ClientMessage::Stdin(b"nobody asked"));
    let mut said = [client.next_of(id).unwrap(), client.next_of(id).unwrap()];
    said.sort_by_key(|said| matches!(said, Said::StdinClosed(_)));
    assert_eq!(
        said,
        [
            Said::StdinCredit(12),
            Said::StdinClosed(ClosedWhy::NotAsked)
        ]
    );
    client.cancel(id, 0);
    client.finish(id);
}

#[test]
fn st03_stdin_flows_under_credit_and_stdout_is_complete_after_its_end() {
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    let mut request = sh("cat");
    request.stdin = true;
    request.output_limit = None;
    let id = client.exec(&request);
    let started = client.started(id);
    assert!(started > 0);
    let whole: Vec<u8> = (0..1_000_000u32).map(|i| (i % 251) as u8).collect();
    let (mut at, mut credit, mut echoed) = (0, 64 << 10, Vec::new());
    let record = loop {
        while credit > 0 && at < whole.len() {
            let count = credit.min(whole.len() - at).min(30_000);
            client.send(id, &ClientMessage::Stdin(&whole[at..at + count]));
            (at, credit) = (at + count, credit - count);
            if at == whole.len() {
                client.send(id, &ClientMessage::StdinClose);
            }
        }
        match client.next_of(id).unwrap() {
            Said::StdinCredit(more) => credit += usize::try_from(more).unwrap(),
            Said::Output(_, data) => echoed.extend(data),
            Said::Exit(record) => break record,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(record.cause, Cause::Exited(0));
    assert_eq!(echoed.len(), whole.len());
    assert!(echoed == whole);
}

#[test]
fn st04_a_terminal_has_its_size_from_the_start_and_hears_of_another() {
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    let mut request = sh(
        "trap 'stty size; exit 6' WINCH; stty size; echo $TERM $HOME; tty; \
         while :; do sleep 0.01; done",
    );
    request.tty = Some(Winsize {
        rows: 33,
        columns: 99,
    });
    request.stdin = true;
    let id = client.exec(&request);
    client.started(id);
    let mut text = String::new();
    while !text.contains("/dev/pts/") {
        match client.next_of(id).unwrap() {
            Said::Output(_, data) => text.push_str(&String::from_utf8_lossy(&data)),
            other => panic!("{other:?} after {text}"),
        }
    }
    assert!(text.starts_with("33 99\r\nxterm /"), "{text}");
    client.send(
        id,
        &ClientMessage::Resize(Winsize {
            rows: 7,
            columns: 8,
        }),
    );
    let outcome = client.finish(id);
    assert!(outcome.text().contains("7 8"), "{}", outcome.text());
    assert_eq!(*outcome.cause(), Cause::Exited(6));
}

#[test]
fn st04_a_terminal_without_stdin_ends_at_once_and_an_unfinished_line_is_handed_over() {
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    let mut request = sh("stty -echo; echo ready; cat; echo over");
    request.tty = Some(Winsize {
        rows: 24,
        columns: 80,
    });
    let outcome = client.run(&request);
    assert!(outcome.text().ends_with("over\r\n"), "{}", outcome.text());
    request.stdin = true;
    let id = client.exec(&request);
    client.started(id);
    assert_eq!(
        client.next_of(id),
        Some(Said::Output(Stream::Stdout, b"ready\r\n".to_vec()))
    );
    client.send(id, &ClientMessage::Stdin(b"half"));
    client.send(id, &ClientMessage::StdinClose);
    assert_eq!(client.finish(id).text(), "halfover\r\n");
}

#[test]
fn st05_killed_by_a_signal_of_the_users_or_its_own() {
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    let outcome = client.run(&sh("kill -SEGV $$"));
    assert_eq!(
        (outcome.cause(), outcome.record().status()),
        (&Cause::Signaled(11), 139)
    );
    for signal in [15u8, 9, 40] {
        let id = client.exec(&sh("exec sleep 600"));
        client.started(id);
        client.send(id, &ClientMessage::Signal(signal));
        assert_eq!(*client.finish(id).cause(), Cause::Signaled(signal));
    }
}

#[test]
fn ev02_an_idle_agent_never_wakes_up() {
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    let mut drained = sh("head -c 100000 /dev/zero; exec 0<&- 1>&- 2>&-; exec sleep 600");
    drained.output_limit = Some(1000);
    drained.policy = Policy::Drain;
    drained.stdin = true;
    let capped = client.exec(&drained);
    client.started(capped);
    while client.next_of(capped) != Some(Said::Limit([1000, 0])) {}
    // An uncapped one that waits for its client.
    client.crediting = false;
    let mut full = sh("while :; do echo x; done");
    full.output_limit = None;
    full.window = 1;
    let waiting = client.exec(&full);
    client.started(waiting);
    client.next_of(waiting);
    sandbox.until_asleep();
    let before = sandbox.wakeups();
    assert!(client.quiet_for(Duration::from_millis(300)));
    assert_eq!(
        sandbox.wakeups(),
        before,
        "at the cap, closed, full: all of them sleep"
    );
    client.cancel(capped, 0);
    client.cancel(waiting, 0);
}

#[test]
fn ev02_a_terminal_whose_shell_has_gone_settles() {
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    let mut request = sh("trap '' HUP; setsid sleep 600 & exit 2");
    request.tty = Some(Winsize {
        rows: 24,
        columns: 80,
    });
    request.stdin = true;
    let outcome = client.run(&request);
    assert_eq!(*outcome.cause(), Cause::Exited(2));
    assert!(outcome.record().truncated && outcome.record().leaf_empty);
    // And one that nobody holds.
    let outcome = client.run(&ExecRequest {
        tty: request.tty,
        ..sh("echo gone; exit 1")
    });
    assert_eq!(
        (outcome.text().as_str(), outcome.record().truncated),
        ("gone\r\n", false)
    );
    sandbox.until_asleep();
    let before = sandbox.wakeups();
    assert!(client.quiet_for(Duration::from_millis(300)));
    assert_eq!(sandbox.wakeups(), before);
}

#[test]
fn a_thousand_execs_leave_memory_descriptors_and_children_where_they_were() {
    let sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    let request = ExecRequest::new(["/bin/true"]);
    for _ in 0..50 {
        client.run(&request);
    }
    // A leaf is removed behind its record, in the same turn of the loop.
    client.round_trip();
    let before = (sandbox.descriptors(), sandbox.children());
    let memory = sandbox.status("VmRSS");
    for _ in 0..1000 {
        assert_eq!(*client.run(&request).cause(), Cause::Exited(0));
    }
    client.round_trip();
    assert_eq!((sandbox.descriptors(), sandbox.children()), before);
    assert!(sandbox.status("VmRSS") <= memory + 256, "kB");
}
