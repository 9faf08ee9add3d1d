//! The monitor asks the agent what it has counted.

use vmm_protocol::{AgentCounters, CancelReason, Cause, ControlToAgent, Policy};

use crate::client::sh;
use crate::harness::{GENERATION, Sandbox};

#[test]
fn counters_are_those_of_the_loop_and_of_what_runs_now() {
    let mut sandbox = Sandbox::new();
    let now = |counters: AgentCounters| (counters.sessions, counters.execs);
    let first = sandbox.control().counters(1);
    assert_eq!(now(first), (0, 0));
    let mut client = sandbox.connect();
    let mut other = sandbox.connect();
    client.round_trip();
    other.round_trip();
    let id = client.exec(&sh("exec sleep 600"));
    client.started(id);
    let busy = sandbox.control().counters(2);
    assert_eq!(now(busy), (2, 1));
    assert!(busy.wakeups > first.wakeups, "{first:?} {busy:?}");
    client.cancel(id, 0);
    let cause = Cause::Cancelled(CancelReason::Request);
    assert_eq!(*client.finish(id).cause(), cause);
    let after = sandbox.control().counters(3);
    assert_eq!(now(after), (2, 0), "it has its record");
    assert_eq!((after.without_progress, after.muted), (0, 0), "{after:?}");
}

#[test]
fn ev02_a_question_for_counters_wakes_an_idle_agent_once_and_leaves_nothing() {
    let mut sandbox = Sandbox::new();
    assert_eq!(
        *sandbox.connect().run(&sh("exit 0")).cause(),
        Cause::Exited(0)
    );
    // The session that has just gone is confirmed to be lost, if it had anything to lose.
    sandbox.until_asleep();
    let first = sandbox.control().counters(1);
    for number in 2..=20 {
        let counters = sandbox.control().counters(number);
        let expected = AgentCounters {
            wakeups: first.wakeups + number - 1,
            resident_bytes: counters.resident_bytes,
            ..first
        };
        assert_eq!(counters, expected);
    }
}

#[test]
fn ex06_counters_are_told_while_an_exec_floods_and_its_client_does_not_read() {
    let mut sandbox = Sandbox::new();
    let mut reads_not = sandbox.connect();
    let mut drained = sh("while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done");
    drained.policy = Policy::Drain;
    let flooding = reads_not.exec(&drained);
    reads_not.started(flooding);
    let mut last = sandbox.control().counters(1);
    for number in 2..=200 {
        let counters = sandbox.control().counters(number);
        assert_eq!((counters.sessions, counters.execs), (1, 1));
        assert!(counters.wakeups > last.wakeups, "{last:?} {counters:?}");
        last = counters;
    }
    assert_eq!((last.without_progress, last.muted), (0, 0), "{last:?}");
    reads_not.cancel(flooding, 0);
    let outcome = reads_not.finish(flooding);
    assert_eq!(*outcome.cause(), Cause::Cancelled(CancelReason::Request));
}

#[test]
fn ho04_a_question_out_of_turn_ends_the_control_connection_and_no_exec() {
    let mut sandbox = Sandbox::new();
    let mut client = sandbox.connect();
    let id = client.exec(&sh("exec sleep 600"));
    client.started(id);
    sandbox.control().counters(5);
    sandbox.control().send(&ControlToAgent::AskCounters(5));
    assert_eq!(sandbox.control().next(), None);
    let control = sandbox.redial();
    control.give_life(GENERATION);
    // Numbers are a connection's own.
    let counters = control.counters(1);
    assert_eq!((counters.sessions, counters.execs), (1, 1));
    client.cancel(id, 0);
    let cause = Cause::Cancelled(CancelReason::Request);
    assert_eq!(*client.finish(id).cause(), cause);
}
