//! Execs by their numbers, as the library asks for them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // All of it is test code.

mod common;

use std::time::Duration;

use common::{Agent, SOON, with_agent};
use vmm_client::{Ended, Event, SessionError};
use vmm_protocol::{ExecRequest, RefusedCode};

#[test]
fn list_is_asked_for_part_by_part_and_each_call_has_its_own_answer() {
    let (session, agent) = with_agent(Agent::serve);
    let numbers: Vec<u64> = session
        .list(SOON)
        .unwrap()
        .iter()
        .map(|info| info.exec)
        .collect();
    assert_eq!(numbers, [1, 2, 3]);
    session.cancel(9, Duration::ZERO, SOON).unwrap();
    for result in [session.signal(9, 15, SOON), session.release(9, SOON)] {
        let Err(SessionError::Refused(refusal)) = result else {
            panic!("{result:?}")
        };
        assert_eq!(refusal.code, RefusedCode::UnknownExec);
    }
    assert!(matches!(
        session.signal(9, 99, SOON),
        Err(SessionError::Request(_))
    ));
    for exec in [session.attach(9, [1, 2]), session.wait(9)] {
        let ended = exec.unwrap().wait();
        assert!(
            matches!(&ended, Ended::Refused(refusal) if refusal.code == RefusedCode::UnknownExec)
        );
        assert_eq!(ended.status(), 125);
    }
    drop(session);
    agent.join().unwrap();
}

#[test]
fn call_that_is_not_answered_has_its_deadline_and_one_on_a_lost_session_its_error() {
    let (session, agent) = with_agent(|agent: &mut Agent| {
        // It hears the hello, and says its own.
        agent.hear();
        agent.hear();
        agent.stream.shutdown(std::net::Shutdown::Both).unwrap();
    });
    let error = session.list(Duration::from_millis(20)).unwrap_err();
    assert!(
        matches!(
            error,
            SessionError::TimedOut { .. } | SessionError::Lost { .. }
        ),
        "{error}"
    );
    agent.join().unwrap();
    let error = session.release(1, SOON).unwrap_err();
    assert!(matches!(error, SessionError::Lost { .. }), "{error}");
}

#[test]
fn start_of_a_detached_exec_is_over_once_it_runs_and_its_handle_ends() {
    let (session, agent) = with_agent(Agent::serve);
    let request = ExecRequest::new(["sh"]);
    assert_eq!(session.start(&request, SOON).unwrap().exec, 1);
    let mut detached = request.clone();
    detached.detached = true;
    let events: Vec<Event> = session.exec(&detached).unwrap().collect();
    assert!(
        matches!(events[..], [Event::Started { exec: 2, pid: 1 }]),
        "{events:?}"
    );
    drop(session);
    agent.join().unwrap();
}
