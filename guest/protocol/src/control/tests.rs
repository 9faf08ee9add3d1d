use super::*;
use crate::limits::HELLO_DEADLINE_NS;
use crate::message::{AgentCounters, ControlToAgent, ControlToHost, DownReason, Life, ReadyStage};
use crate::session::Violation;
use crate::{GenerationId, VERSIONS, Versions};

fn life() -> Life {
    let mut life = Life::new(GenerationId {
        counter: 4,
        public_id: 5,
    });
    life.hostname = "box".into();
    life
}

fn to_host(agent: &mut AgentControl, host: &mut HostControl) {
    let bytes = agent.outgoing().to_vec();
    agent.wrote(bytes.len());
    host.space()[..bytes.len()].copy_from_slice(&bytes);
    host.filled(bytes.len(), 0);
}

fn to_agent(host: &mut HostControl, agent: &mut AgentControl) {
    let bytes = host.outgoing().to_vec();
    host.wrote(bytes.len());
    agent.space()[..bytes.len()].copy_from_slice(&bytes);
    agent.filled(bytes.len(), 0);
}

fn told() -> (AgentControl, HostControl) {
    let (mut agent, mut host) = (AgentControl::new(0), HostControl::new(0));
    to_host(&mut agent, &mut host);
    assert_eq!(host.next(), Ok(Some(HostEvent::Hello { features: 0 })));
    host.live(&life()).unwrap();
    to_agent(&mut host, &mut agent);
    assert_eq!(agent.next(), Ok(Some(ControlEvent::Life(Box::new(life())))));
    (agent, host)
}

#[test]
fn life_is_told_applied_confirmed_and_ended() {
    let (mut agent, mut host) = told();
    assert!(!host.ready());
    agent.ready();
    let token = agent.confirm();
    to_host(&mut agent, &mut host);
    assert_eq!(host.next(), Ok(Some(HostEvent::Ready)));
    assert!(host.ready());
    assert_eq!(host.next(), Ok(None));
    let ping = host.ping().unwrap();
    host.power_off(7).unwrap();
    to_agent(&mut host, &mut agent);
    assert_eq!(agent.next(), Ok(Some(ControlEvent::Confirmed { token })));
    assert_eq!(
        agent.next(),
        Ok(Some(ControlEvent::PowerOff { grace_ns: 7 }))
    );
    agent.down(DownReason::PowerOff, "told to");
    to_host(&mut agent, &mut host);
    assert_eq!(host.next(), Ok(Some(HostEvent::Pong { token: ping })));
    let down = HostEvent::Down {
        reason: DownReason::PowerOff,
        message: "told to".into(),
    };
    assert_eq!(host.next(), Ok(Some(down)));
}

/// Past ready.
fn up() -> (AgentControl, HostControl) {
    let (mut agent, mut host) = told();
    agent.ready();
    to_host(&mut agent, &mut host);
    assert_eq!(host.next(), Ok(Some(HostEvent::Ready)));
    (agent, host)
}

#[test]
fn counters_are_asked_one_question_at_a_time_and_answered_by_number() {
    let (_, mut unready) = told();
    assert_eq!(unready.ask_counters(), Ok(None));
    let (mut agent, mut host) = up();
    for number in 1..=3 {
        assert_eq!(host.ask_counters(), Ok(Some(number)));
        assert_eq!(host.ask_counters(), Ok(None), "the answer is owed");
        to_agent(&mut host, &mut agent);
        assert_eq!(agent.next(), Ok(Some(ControlEvent::Counters)));
        assert_eq!(agent.next(), Ok(None));
        let counters = AgentCounters {
            wakeups: 100 * number,
            execs: number,
            ..AgentCounters::default()
        };
        agent.counters(counters);
        agent.counters(AgentCounters::default());
        to_host(&mut agent, &mut host);
        let answer = HostEvent::Counters { number, counters };
        assert_eq!(host.next(), Ok(Some(answer)));
        assert_eq!(host.next(), Ok(None), "one answer a question");
    }
}

#[test]
fn ti03_failure_reaches_the_host_with_its_stage() {
    let (mut agent, mut host) = told();
    agent.failed(ReadyStage::Clock, 1, "no");
    to_host(&mut agent, &mut host);
    let failed = HostEvent::Failed {
        stage: ReadyStage::Clock,
        errno: 1,
        message: "no".into(),
    };
    assert_eq!(host.next(), Ok(Some(failed)));
    assert!(!host.ready());
}

/// What a host makes of an agent that says this; it answers a hello.
fn host_hears(script: &[ControlToHost]) -> Result<(), Violation> {
    let mut host = HostControl::new(0);
    for (at, message) in script.iter().enumerate() {
        let mut bytes = Vec::new();
        message.encode(at as u64 + 1, &mut bytes).unwrap();
        host.space()[..bytes.len()].copy_from_slice(&bytes);
        host.filled(bytes.len(), 0);
        if let Some(HostEvent::Hello { .. }) = host.next()? {
            host.live(&life()).unwrap();
        }
    }
    Ok(())
}

#[test]
fn ho04_host_ends_the_connection_of_an_agent_out_of_order() {
    let hello = ControlToHost::Hello {
        versions: VERSIONS,
        features: u64::MAX,
    };
    let ready = ControlToHost::Ready(life().generation);
    let stale = ControlToHost::Ready(GenerationId {
        counter: 3,
        public_id: 5,
    });
    let future = Versions {
        lowest: 9,
        highest: 9,
    };
    assert_eq!(
        host_hears(&[hello.clone(), ready.clone(), ControlToHost::Confirm(1)]),
        Ok(())
    );
    let bad = [
        vec![ready.clone()],
        vec![ControlToHost::Confirm(1)],
        vec![ControlToHost::Hello {
            versions: future,
            features: 0,
        }],
        vec![hello.clone(), hello.clone()],
        vec![hello.clone(), stale],
        vec![hello.clone(), ready.clone(), ready.clone()],
        vec![hello.clone(), ControlToHost::Pong(1)],
        vec![counters(1)],
        vec![hello.clone(), counters(1)],
        vec![hello.clone(), ready.clone(), counters(0)],
        vec![hello.clone(), ready.clone(), counters(1)],
        vec![
            hello,
            ready,
            ControlToHost::Failed {
                stage: ReadyStage::Clock,
                errno: 0,
                message: String::new(),
            },
        ],
    ];
    for script in bad {
        assert!(host_hears(&script).is_err(), "{script:?}");
    }
}

#[test]
fn ho04_agent_ends_the_connection_of_a_host_out_of_order() {
    let say = |sequence, message: &ControlToAgent| {
        let (mut agent, _) = told();
        let mut bytes = Vec::new();
        message.encode(sequence, &mut bytes).unwrap();
        agent.space()[..bytes.len()].copy_from_slice(&bytes);
        agent.filled(bytes.len(), 0);
        agent.next()
    };
    assert_eq!(say(2, &ControlToAgent::Ping(1)), Ok(None));
    assert!(
        say(2, &ControlToAgent::AskCounters(1)).is_err(),
        "not ready"
    );
    assert!(say(3, &ControlToAgent::Ping(1)).is_err());
    assert!(say(2, &ControlToAgent::Life(Box::new(life()))).is_err());
    let generation = life().generation;
    assert!(
        say(
            2,
            &ControlToAgent::Confirmed {
                token: 1,
                generation
            }
        )
        .is_err(),
        "nobody asked"
    );
}

/// What one side makes of frames that the other one's machine would never have sent, from this sequence number on.
macro_rules! hears {
    ($machine:expr, $sequence:expr, $messages:expr) => {{
        let machine = &mut $machine;
        let mut results = Vec::new();
        for (sequence, message) in ($sequence..).zip($messages) {
            let mut bytes = Vec::new();
            message.encode(sequence, &mut bytes).unwrap();
            machine.space()[..bytes.len()].copy_from_slice(&bytes);
            machine.filled(bytes.len(), 0);
        }
        loop {
            match machine.next() {
                Ok(Some(event)) => results.push(event),
                Ok(None) => break Ok(results),
                Err(violation) => break Err(violation),
            }
        }
    }};
}

fn counters(number: u64) -> ControlToHost {
    let counters = AgentCounters::default();
    ControlToHost::Counters { number, counters }
}

#[test]
fn ho04_questions_for_counters_out_of_turn_end_the_connection_at_the_agent() {
    let ask = ControlToAgent::AskCounters;
    let (mut agent, _) = up();
    assert_eq!(hears!(agent, 2, [ask(7)]), Ok(vec![ControlEvent::Counters]));
    agent.counters(AgentCounters::default());
    assert_eq!(hears!(agent, 3, [ask(9)]), Ok(vec![ControlEvent::Counters]));
    agent.counters(AgentCounters::default());
    for (number, what) in [(9, "again"), (8, "an older one"), (0, "none")] {
        let (mut agent, _) = up();
        hears!(agent, 2, [ask(9)]).unwrap();
        agent.counters(AgentCounters::default());
        assert!(hears!(agent, 3, [ask(number)]).is_err(), "{what}");
        assert_eq!(agent.next(), Ok(None), "nothing more is taken");
    }
    let (mut agent, _) = up();
    assert!(hears!(agent, 2, [ask(0)]).is_err(), "no number");
    let (mut agent, _) = up();
    assert!(hears!(agent, 2, [ask(1), ask(2)]).is_err(), "two at a time");
    let mut agent = AgentControl::new(0);
    assert!(hears!(agent, 1, [ask(1)]).is_err(), "before the life");
}

#[test]
fn ho04_counters_out_of_turn_end_the_connection_at_the_host() {
    for (answers, what) in [
        (vec![counters(2)], "of a question to come"),
        (vec![counters(0)], "of none"),
        (vec![counters(1), counters(1)], "twice"),
    ] {
        let (_, mut host) = up();
        assert_eq!(host.ask_counters(), Ok(Some(1)));
        assert!(hears!(host, 3, answers).is_err(), "{what}");
        assert!(!host.ready());
        assert_eq!(host.ask_counters(), Ok(None));
    }
    let (_, mut host) = up();
    for number in 1..=2 {
        assert_eq!(host.ask_counters(), Ok(Some(number)));
        assert!(hears!(host, 2 + number, [counters(number)]).is_ok());
    }
    assert_eq!(host.ask_counters(), Ok(Some(3)));
    assert!(hears!(host, 5, [counters(2)]).is_err(), "of an older one");
}

#[test]
fn deadlines_of_hello_and_life_are_five_seconds() {
    let mut agent = AgentControl::new(7);
    assert_eq!(agent.deadline(), Some(7 + HELLO_DEADLINE_NS));
    assert_eq!(agent.tick(6 + HELLO_DEADLINE_NS), Ok(()));
    assert_eq!(agent.tick(7 + HELLO_DEADLINE_NS), Err(Violation::Deadline));
    assert_eq!(agent.deadline(), None);
    let mut host = HostControl::new(7);
    assert_eq!(host.tick(7 + HELLO_DEADLINE_NS), Err(Violation::Deadline));
}

#[test]
fn ho03_agent_that_asks_without_reading_is_no_longer_read() {
    let (_, mut host) = told();
    let mut sequence = 1;
    while host.wants_read() {
        sequence += 1;
        let mut bytes = Vec::new();
        ControlToHost::Confirm(sequence)
            .encode(sequence, &mut bytes)
            .unwrap();
        host.space()[..bytes.len()].copy_from_slice(&bytes);
        host.filled(bytes.len(), 0);
        assert_eq!(host.next(), Ok(None));
        assert!(sequence < 10_000);
    }
    assert!(host.outgoing().len() < 20 << 10);
}

#[test]
fn entropy_is_not_in_what_a_log_would_show() {
    let mut life = life();
    life.entropy = [0xee; 64];
    let text = format!("{life:?}");
    assert!(!text.contains("238") && text.contains("box"), "{text}");
}
