//! The agent's side of the control connection.

use crate::frame::Decoder;
use crate::generation::GenerationId;
use crate::hello::{VERSIONS, Versions};
use crate::limits::HELLO_DEADLINE_NS;
use crate::message::{AgentCounters, ControlToAgent, ControlToHost, DownReason, Life, ReadyStage};
use crate::session::{Inbound, Outgoing, Violation};

/// Something that the host said, checked.
#[derive(Debug, PartialEq, Eq)]
pub enum ControlEvent {
    /// A new life: apply all of it, then [`AgentControl::ready`] or [`AgentControl::failed`].
    Life(Box<Life>),
    /// Switch off.
    PowerOff {
        /// Nanoseconds that workloads have between `SIGTERM` and their death.
        grace_ns: u64,
    },
    /// The life is the same as before: a lost session is a lost client.
    Confirmed {
        /// What [`AgentControl::confirm`] gave.
        token: u64,
    },
    /// The host asks for the counters: [`AgentControl::counters`] answers.
    Counters,
}

/// The agent's side. Driven like [`ClientSession`](crate::session::ClientSession).
///
/// ```
/// use vmm_protocol::control::{AgentControl, ControlEvent, HostControl, HostEvent};
/// use vmm_protocol::{GenerationId, Life};
///
/// let (mut agent, mut host) = (AgentControl::new(0), HostControl::new(0));
/// let life = Life::new(GenerationId { counter: 1, public_id: 9 });
///
/// let hello = agent.outgoing().to_vec();
/// agent.wrote(hello.len());
/// host.space()[..hello.len()].copy_from_slice(&hello);
/// host.filled(hello.len(), 0);
/// assert!(matches!(host.next()?, Some(HostEvent::Hello { .. })));
/// host.live(&life)?;
///
/// let answer = host.outgoing().to_vec();
/// agent.space()[..answer.len()].copy_from_slice(&answer);
/// agent.filled(answer.len(), 0);
/// assert_eq!(agent.next()?, Some(ControlEvent::Life(Box::new(life))));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct AgentControl {
    phase: Phase,
    inbound: Inbound,
    out: Outgoing,
    token: u64,
    /// The number of the host's last question.
    number: u64,
    /// It has no answer yet.
    asked: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    AwaitLife {
        until: u64,
    },
    Alive {
        generation: GenerationId,
        ready: bool,
    },
    Ended,
}

impl AgentControl {
    /// A connection that has just been made. The hello is queued.
    pub fn new(now: u64) -> Self {
        let mut control = Self {
            phase: Phase::AwaitLife {
                until: now.saturating_add(HELLO_DEADLINE_NS),
            },
            inbound: Inbound::new(Decoder::new()),
            out: Outgoing::default(),
            token: 0,
            number: 0,
            asked: false,
        };
        control.say(&ControlToHost::Hello {
            versions: VERSIONS,
            features: 0,
        });
        control
    }

    /// The life that this connection belongs to, once it was told.
    pub fn generation(&self) -> Option<GenerationId> {
        match self.phase {
            Phase::Alive { generation, .. } => Some(generation),
            _ => None,
        }
    }

    /// Says that the life is applied and sessions are taken.
    pub fn ready(&mut self) {
        if let Phase::Alive { generation, .. } = self.phase {
            self.phase = Phase::Alive {
                generation,
                ready: true,
            };
            self.say(&ControlToHost::Ready(generation));
        }
    }

    /// Says that the life could not be applied.
    pub fn failed(&mut self, stage: ReadyStage, errno: i32, message: &str) {
        self.say(&ControlToHost::Failed {
            stage,
            errno,
            message: message.to_owned(),
        });
    }

    /// Says that the guest goes down.
    pub fn down(&mut self, reason: DownReason, message: &str) {
        self.say(&ControlToHost::Down {
            reason,
            message: message.to_owned(),
        });
    }

    /// Asks whether the life is still the same; the answer comes as [`ControlEvent::Confirmed`]
    /// with this token.
    pub fn confirm(&mut self) -> u64 {
        self.token += 1;
        self.say(&ControlToHost::Confirm(self.token));
        self.token
    }

    /// Answers [`ControlEvent::Counters`]; where nothing was asked, nothing is said.
    pub fn counters(&mut self, counters: AgentCounters) {
        if std::mem::take(&mut self.asked) {
            self.say(&ControlToHost::Counters {
                number: self.number,
                counters,
            });
        }
    }

    fn say(&mut self, message: &ControlToHost) {
        // Every control message is far below its kind's limit: texts are cut to MAX_TEXT.
        let written = self.out.push(|sequence, out| message.encode(sequence, out));
        debug_assert_eq!(written, Ok(()));
    }

    /// Where bytes from the socket go.
    pub fn space(&mut self) -> &mut [u8] {
        self.inbound.space()
    }

    /// `count` bytes came.
    pub fn filled(&mut self, count: usize, now: u64) {
        self.inbound.filled(count, now);
    }

    /// Bytes to be sent.
    pub fn outgoing(&self) -> &[u8] {
        self.out.pending()
    }

    /// How many frames were said so far. A panic handler, which has no way to this state, goes on
    /// from there.
    pub fn sent(&self) -> u64 {
        self.out.sequence()
    }

    /// The first `count` of them were.
    pub fn wrote(&mut self, count: usize) {
        self.out.wrote(count);
    }

    /// The next thing that the host said; pings are answered on the way. After an error nothing
    /// more is taken.
    #[expect(
        clippy::should_implement_trait,
        reason = "fails, and can have more after none"
    )]
    pub fn next(&mut self) -> Result<Option<ControlEvent>, Violation> {
        if self.phase == Phase::Ended {
            return Ok(None);
        }
        let result = self.advance();
        if result.is_err() {
            self.phase = Phase::Ended;
        }
        result
    }

    fn advance(&mut self) -> Result<Option<ControlEvent>, Violation> {
        while self.inbound.take()? {
            let Some(frame) = self.inbound.frame() else {
                break;
            };
            let (id, kind) = (frame.header.id, frame.header.kind);
            let message = ControlToAgent::decode(&frame)?;
            if id != 0 {
                return Err(Violation::UnknownId { kind, id });
            }
            match (message, self.phase) {
                (ControlToAgent::Life(life), Phase::AwaitLife { .. }) => {
                    let theirs = Versions {
                        lowest: life.version,
                        highest: life.version,
                    };
                    VERSIONS.common(theirs).ok_or(Violation::Version {
                        ours: VERSIONS,
                        theirs,
                    })?;
                    self.phase = Phase::Alive {
                        generation: life.generation,
                        ready: false,
                    };
                    return Ok(Some(ControlEvent::Life(life)));
                }
                (ControlToAgent::PowerOff { grace_ns }, _) => {
                    return Ok(Some(ControlEvent::PowerOff { grace_ns }));
                }
                (ControlToAgent::Ping(token), _) => self.say(&ControlToHost::Pong(token)),
                (
                    ControlToAgent::Confirmed { token, generation },
                    Phase::Alive {
                        generation: ours, ..
                    },
                ) => {
                    if generation != ours {
                        return Err(Violation::Stale {
                            ours,
                            theirs: generation,
                        });
                    }
                    if token == 0 || token > self.token {
                        return Err(Violation::UnknownId { kind, id: token });
                    }
                    return Ok(Some(ControlEvent::Confirmed { token }));
                }
                (ControlToAgent::AskCounters(number), Phase::Alive { ready: true, .. })
                    if number > self.number && !self.asked =>
                {
                    (self.number, self.asked) = (number, true);
                    return Ok(Some(ControlEvent::Counters));
                }
                (
                    ControlToAgent::Life(_)
                    | ControlToAgent::Confirmed { .. }
                    | ControlToAgent::AskCounters(_),
                    _,
                ) => {
                    return Err(Violation::Order { kind, id });
                }
            }
        }
        Ok(None)
    }

    /// When [`tick`](Self::tick) is due.
    pub fn deadline(&self) -> Option<u64> {
        match self.phase {
            Phase::AwaitLife { until } => Some(until),
            Phase::Alive { .. } => self.inbound.deadline(),
            Phase::Ended => None,
        }
    }

    /// The clock says `now`.
    pub fn tick(&mut self, now: u64) -> Result<(), Violation> {
        match self.deadline() {
            Some(at) if at <= now => {
                self.phase = Phase::Ended;
                Err(Violation::Deadline)
            }
            _ => Ok(()),
        }
    }
}
