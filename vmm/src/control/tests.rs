use std::io::{Read, Write};

use vmm_events::{Inbox, inbox};
use vmm_protocol::control::{AgentControl, ControlEvent};

use super::*;

struct Rig {
    poller: Poller<()>,
    control: Control,
    slot: Slot,
    notices: Inbox<Notice>,
    ready: Arc<AtomicBool>,
}

fn rig() -> Rig {
    let (sender, notices) = inbox(NOTICES).unwrap();
    let identity = Identity {
        generation: GenerationId {
            counter: 3,
            public_id: 0xabc,
        },
        hostname: "box".to_owned(),
        machine_id: [7; 16],
    };
    let ready = Arc::new(AtomicBool::new(false));
    let control = Control::new(identity, Notices(sender), ready.clone());
    Rig {
        poller: Poller::new().unwrap(),
        control,
        slot: Slot::default(),
        notices,
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
