use std::io::{Read, Write};

use vmm_events::{Inbox, inbox};
use vmm_protocol::control::{AgentControl, ControlEvent};
use vmm_protocol::{AgentCounters, ControlToHost};

use super::counters::DEADLINE;
use super::*;

struct Rig {
    poller: Poller<()>,
    control: Control,
    slot: Slot,
    notices: Inbox<Notice>,
    counted: Inbox<Counted>,
    ready: Arc<AtomicBool>,
}

fn rig() -> Rig {
    let (news, notices) = inbox(NOTICES).unwrap();
    let (counts, counted) = inbox(COUNTED).unwrap();
    let identity = Identity {
        generation: GenerationId {
            counter: 3,
            public_id: 0xabc,
        },
        hostname: "box".to_owned(),
        machine_id: [7; 16],
    };
    let ready = Arc::new(AtomicBool::new(false));
    let told = Notices {
        news,
        counted: counts,
    };
    let control = Control::new(identity, told, ready.clone());
    Rig {
        poller: Poller::new().unwrap(),
        control,
        slot: Slot::default(),
        notices,
        counted,
        ready,
    }
}

impl Rig {
    fn dial(&mut self) -> UnixStream {
        let (host, agent) = UnixStream::pair().unwrap();
        host.set_nonblocking(true).unwrap();
        *lock(&self.slot) = Some(host);
        self.control.accept(&self.slot, &self.poller, ());
        agent
    }

    /// An agent that is ready.
    fn agent(&mut self) -> (UnixStream, AgentControl) {
        let mut stream = self.dial();
        let mut agent = AgentControl::new(0);
        assert!(matches!(
            talk(self, &mut stream, &mut agent),
            Some(ControlEvent::Life(_))
        ));
        agent.ready();
        assert_eq!(talk(self, &mut stream, &mut agent), None);
        assert!(self.ready.load(Ordering::Acquire));
        (stream, agent)
    }

    /// What has come of questions, all of it.
    fn answers(&self) -> Vec<Counted> {
        self.counted.turn().collect()
    }

    /// One round of the loop with the events that are there.
    fn round(&mut self) {
        self.poller.wait(Some(Duration::ZERO)).unwrap();
        while let Some(event) = self.poller.next_event() {
            let answer = self.control.dispatch(event.readiness, Instant::now());
            self.poller.answer(&event, answer);
        }
    }
}

/// Moves what an agent's machine has to say, and what is there for it to hear.
fn talk(rig: &mut Rig, stream: &mut UnixStream, agent: &mut AgentControl) -> Option<ControlEvent> {
    stream.write_all(agent.outgoing()).unwrap();
    agent.wrote(agent.outgoing().len());
    rig.round();
    stream.set_nonblocking(true).unwrap();
    if let Ok(count) = stream.read(agent.space()) {
        agent.filled(count, 0);
    }
    agent.next().unwrap()
}

#[test]
fn hello_is_answered_with_the_life_and_ready_opens_the_fence() {
    let mut rig = rig();
    let mut stream = rig.dial();
    let mut agent = AgentControl::new(0);
    let Some(ControlEvent::Life(life)) = talk(&mut rig, &mut stream, &mut agent) else {
        panic!("no life");
    };
    assert_eq!(
        life.generation,
        GenerationId {
            counter: 3,
            public_id: 0xabc
        }
    );
    assert_eq!((life.hostname.as_str(), life.machine_id), ("box", [7; 16]));
    assert_ne!(life.entropy, [0; 64]);
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_nanos() as u64;
    assert!(now - life.wall_clock_ns < 5_000_000_000);
    assert!(!rig.ready.load(Ordering::Acquire));

    agent.ready();
    talk(&mut rig, &mut stream, &mut agent);
    assert_eq!(rig.notices.turn().next(), Some(Notice::Ready));
    assert!(rig.ready.load(Ordering::Acquire));

    drop(stream);
    rig.round();
    assert!(matches!(rig.notices.turn().next(), Some(Notice::Lost(_))));
    assert!(
        !rig.ready.load(Ordering::Acquire),
        "a new session needs a live agent"
    );
}

#[test]
fn se01_garbage_ends_the_connection_and_a_new_one_is_taken() {
    let mut rig = rig();
    let mut stream = rig.dial();
    stream.write_all(&[0xff; 64]).unwrap();
    rig.round();
    assert!(matches!(rig.notices.turn().next(), Some(Notice::Lost(_))));
    assert_eq!(rig.poller.registered(), 0);

    let mut stream = rig.dial();
    let mut agent = AgentControl::new(0);
    assert!(matches!(
        talk(&mut rig, &mut stream, &mut agent),
        Some(ControlEvent::Life(_))
    ));
}

#[test]
fn silence_ends_at_the_hello_deadline() {
    let mut rig = rig();
    let _stream = rig.dial();
    let now = Instant::now();
    let wait = rig.control.timeout(now).unwrap();
    assert!(wait <= Duration::from_secs(5));
    rig.control.tick(now);
    assert_eq!(rig.notices.turn().next(), None);
    rig.control.tick(now + wait + Duration::from_millis(1));
    assert!(matches!(rig.notices.turn().next(), Some(Notice::Lost(_))));
    assert_eq!(rig.control.timeout(now), None);
}

#[test]
fn ho04_an_agent_that_dials_and_hangs_up_for_ever_leaves_a_bounded_number_of_notices() {
    let mut rig = rig();
    for _ in 0..10 * NOTICES {
        drop(rig.dial());
        rig.round();
    }
    assert_eq!(rig.notices.turn().count(), NOTICES);
    assert_eq!(rig.poller.registered(), 0);
}

fn woken(wakeups: u64) -> AgentCounters {
    AgentCounters {
        wakeups,
        ..AgentCounters::default()
    }
}

#[test]
fn questions_for_counters_at_once_are_one_question_with_one_answer() {
    let mut rig = rig();
    let (mut stream, mut agent) = rig.agent();
    let asked = Some(ControlEvent::Counters);
    for round in 1..=3 {
        for _ in 0..4 {
            rig.control.ask_counters(Instant::now());
        }
        assert_eq!(talk(&mut rig, &mut stream, &mut agent), asked);
        // A second one on its way would end the connection here.
        assert_eq!(talk(&mut rig, &mut stream, &mut agent), None);
        assert_eq!(rig.answers(), []);
        agent.counters(woken(round));
        assert_eq!(talk(&mut rig, &mut stream, &mut agent), None);
        assert_eq!(rig.answers(), [Ok(woken(round))]);
        assert_eq!(rig.control.timeout(Instant::now()), None);
    }
}

#[test]
fn an_answer_after_its_time_is_never_that_of_the_next_question() {
    let mut rig = rig();
    let (mut stream, mut agent) = rig.agent();
    let mut now = Instant::now();
    rig.control.ask_counters(now);
    let asked = Some(ControlEvent::Counters);
    assert_eq!(talk(&mut rig, &mut stream, &mut agent), asked);
    // However many ask, and give up, there is one question on its way.
    for _ in 0..50 {
        assert_eq!(rig.control.timeout(now), Some(DEADLINE));
        rig.control.tick(now + DEADLINE - Duration::from_nanos(1));
        assert_eq!(rig.answers(), []);
        now += DEADLINE;
        rig.control.tick(now);
        assert_eq!(rig.answers(), [Err(Uncounted::Late)]);
        assert_eq!(
            rig.control.timeout(now),
            None,
            "nothing is left to wait for"
        );
        assert_eq!(talk(&mut rig, &mut stream, &mut agent), None);
        rig.control.ask_counters(now);
    }
    agent.counters(woken(1));
    assert_eq!(
        talk(&mut rig, &mut stream, &mut agent),
        asked,
        "sent by now"
    );
    assert_eq!(rig.answers(), [], "that was of the first question");
    agent.counters(woken(2));
    assert_eq!(talk(&mut rig, &mut stream, &mut agent), None);
    assert_eq!(rig.answers(), [Ok(woken(2))]);

    // Late, and nobody asks any more.
    rig.control.ask_counters(now);
    assert_eq!(talk(&mut rig, &mut stream, &mut agent), asked);
    rig.control.tick(now + DEADLINE);
    assert_eq!(rig.answers(), [Err(Uncounted::Late)]);
    agent.counters(woken(3));
    assert_eq!(talk(&mut rig, &mut stream, &mut agent), None);
    assert_eq!(rig.answers(), []);
    assert!(
        rig.ready.load(Ordering::Acquire),
        "the agent is none the worse"
    );
}

#[test]
fn without_a_ready_agent_a_question_for_counters_is_answered_at_once() {
    let mut rig = rig();
    let now = Instant::now();
    rig.control.ask_counters(now);
    assert_eq!(rig.answers(), [Err(Uncounted::NotReady)]);
    let mut stream = rig.dial();
    rig.control.ask_counters(now);
    assert_eq!(rig.answers(), [Err(Uncounted::NotReady)]);
    let mut agent = AgentControl::new(0);
    talk(&mut rig, &mut stream, &mut agent);
    rig.control.ask_counters(now);
    assert_eq!(
        rig.answers(),
        [Err(Uncounted::NotReady)],
        "it has a life, no more"
    );
    drop(stream);
    rig.round();
    assert_eq!(rig.answers(), [], "nobody had asked");
    rig.control.ask_counters(now);
    assert_eq!(rig.answers(), [Err(Uncounted::Gone)]);
    assert_eq!(rig.control.timeout(now), None);
}

#[test]
fn an_agent_that_hangs_up_amid_a_question_ends_it_at_once_and_the_next_one_is_asked_afresh() {
    let mut rig = rig();
    for _ in 0..3 {
        let (mut stream, mut agent) = rig.agent();
        rig.control.ask_counters(Instant::now());
        let asked = Some(ControlEvent::Counters);
        assert_eq!(talk(&mut rig, &mut stream, &mut agent), asked);
        drop(stream);
        rig.round();
        assert_eq!(rig.answers(), [Err(Uncounted::Gone)]);
        assert_eq!(rig.control.timeout(Instant::now()), None);

        let (mut stream, mut agent) = rig.agent();
        rig.control.ask_counters(Instant::now());
        assert_eq!(talk(&mut rig, &mut stream, &mut agent), asked);
        agent.counters(woken(7));
        talk(&mut rig, &mut stream, &mut agent);
        assert_eq!(rig.answers(), [Ok(woken(7))]);
        drop(stream);
        rig.round();
        assert_eq!(rig.notices.turn().count(), 4);
    }
}

#[test]
fn ho04_counters_that_nobody_asked_for_end_the_connection_and_the_open_question() {
    for (ask, number, expected) in [
        (false, 1, vec![]),
        (true, 2, vec![Err(Uncounted::Gone)]),
        (true, 0, vec![Err(Uncounted::Gone)]),
    ] {
        let mut rig = rig();
        let (mut stream, agent) = rig.agent();
        if ask {
            rig.control.ask_counters(Instant::now());
        }
        let mut bytes = Vec::new();
        let counters = woken(9);
        ControlToHost::Counters { number, counters }
            .encode(agent.sent() + 1, &mut bytes)
            .unwrap();
        stream.write_all(&bytes).unwrap();
        rig.round();
        assert_eq!(rig.answers(), expected);
        assert!(!rig.ready.load(Ordering::Acquire));
        assert_eq!(rig.poller.registered(), 0);
    }
}
