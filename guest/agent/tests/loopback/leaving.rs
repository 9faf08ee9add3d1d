//! Switching off: workloads get their time, clients their records, and the guest goes whatever they do.

use vmm_protocol::{
    CancelReason, Cause, ControlToAgent, ControlToHost, DownReason, ExecRequest, GoodbyeCode,
    RefusedCode, Stream,
};

use crate::client::{Client, Said, goodbye, sh};
use crate::fake::wait_dead;
use crate::harness::{Options, Sandbox};

/// Nanoseconds that nothing here waits for.
const LONG: u64 = 600_000_000_000;

/// The next output, which says that the workload is as far as that.
fn until_output(client: &mut Client, id: u64) -> String {
    match client.next_of(id) {
        Some(Said::Output(Stream::Stdout, data)) => String::from_utf8(data).unwrap(),
        other => panic!("no output but {other:?}"),
    }
}

fn power_off(sandbox: &mut Sandbox, grace_ns: u64) {
    sandbox
        .control()
        .send(&ControlToAgent::PowerOff { grace_ns });
}

/// Waits for the agent's last word.
fn down(sandbox: &mut Sandbox) {
    loop {
        match sandbox.control().next() {
            Some(ControlToHost::Down { reason, .. }) => {
                assert_eq!(reason, DownReason::PowerOff);
                return;
            }
            // It asks whether lost clients are lost.
            Some(ControlToHost::Confirm(_)) => {}
            other => panic!("not down but {other:?}"),
        }
    }
}

#[test]
fn workloads_end_by_themselves_within_the_grace_and_their_clients_have_it_all() {
    let mut sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    let idle = sandbox.connect();
    let id = client.exec(&sh(
        "trap 'echo bye; exit 3' TERM; echo up; sleep 600 & wait; exit 9",
    ));
    client.started(id);
    assert_eq!(until_output(&mut client, id), "up\n");
    power_off(&mut sandbox, LONG);
    let outcome = client.finish(id);
    assert_eq!(outcome.text(), "bye\n");
    assert_eq!(*outcome.cause(), Cause::Cancelled(CancelReason::Terminate));
    // Who is told goodbye hangs up, and then nothing is waited for.
    for mut client in [client, idle] {
        assert_eq!(goodbye(&mut client), GoodbyeCode::GoingDown);
    }
    down(&mut sandbox);
}

#[test]
fn a_workload_that_will_not_end_is_killed_after_the_grace_and_nothing_new_is_taken() {
    let mut sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    let id = client.exec(&sh("trap '' TERM; echo $$; while :; do sleep 600; done"));
    client.started(id);
    let pid = until_output(&mut client, id);
    power_off(&mut sandbox, LONG);
    // Once it takes no more it has had the word.
    loop {
        match client.run(&ExecRequest::new(["true"])).said.last() {
            Some(Said::Refused(RefusedCode::GoingDown, _)) => break,
            Some(Said::Exit(_)) => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(
        goodbye(&mut Client::new(sandbox.dial())),
        GoodbyeCode::GoingDown
    );
    // Told again with less time, it takes that.
    power_off(&mut sandbox, 1);
    let outcome = client.finish(id);
    assert_eq!(*outcome.cause(), Cause::Cancelled(CancelReason::Terminate));
    assert_eq!(goodbye(&mut client), GoodbyeCode::GoingDown);
    wait_dead(pid.trim());
    drop(client);
    down(&mut sandbox);
}

#[test]
fn neither_a_client_that_never_reads_nor_a_leaf_that_never_empties_keeps_it_up() {
    let mut sandbox = Sandbox::with(Options {
        stubborn: true,
        ..Options::default()
    });
    let mut deaf = sandbox.connect();
    deaf.crediting = false;
    let mut flood = sh("exec yes");
    flood.output_limit = None;
    let id = deaf.exec(&flood);
    deaf.started(id);
    let mut client = sandbox.connect();
    let id = client.exec(&sh("exec sleep 600"));
    client.started(id);
    power_off(&mut sandbox, 0);
    down(&mut sandbox);
}
