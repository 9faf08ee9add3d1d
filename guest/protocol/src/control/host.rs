//! The host's side of the control connection.

use crate::frame::Decoder;
use crate::generation::GenerationId;
use crate::hello::VERSIONS;
use crate::limits::HELLO_DEADLINE_NS;
use crate::message::{
    AgentCounters, ControlToAgent, ControlToHost, DownReason, FrameKind, Life, ReadyStage, TooLarge,
};
use crate::session::{Inbound, Outgoing, Violation};

/// Bytes of answers above which an agent's further frames wait until it has read some.
const MAX_HELD: usize = 16 << 10;

/// Something that the agent said, checked. None of it is trusted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostEvent {
    /// The agent is up: answer with [`HostControl::live`], with the clock read now.
    Hello {
        /// What it can do beyond the version.
        features: u64,
    },
    /// The life is applied: sessions are taken.
    Ready,
    /// The life could not be applied.
    Failed {
        /// At which step.
        stage: ReadyStage,
        /// The kernel's answer; 0 where there was none.
        errno: i32,
        /// In plain words.
        message: String,
    },
    /// The guest goes down.
    Down {
        /// Why.
        reason: DownReason,
        /// In plain words.
        message: String,
    },
    /// The answer to [`HostControl::ping`].
    Pong {
        /// The ping's token.
        token: u64,
    },
    /// The answer to [`HostControl::ask_counters`].
    Counters {
        /// The question's number.
        number: u64,
        /// What the agent says of itself.
        counters: AgentCounters,
    },
}

/// The host's side. Driven like [`ClientSession`](crate::session::ClientSession).
#[derive(Debug)]
pub struct HostControl {
    phase: Phase,
    inbound: Inbound,
    out: Outgoing,
    token: u64,
    /// The number of the last question.
    number: u64,
    /// It has no answer yet.
    asked: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    AwaitHello {
        until: u64,
    },
    Greeted,
    Told {
        generation: GenerationId,
        ready: bool,
    },
    Ended,
}

impl HostControl {
    /// A connection that the guest has just made.
    pub fn new(now: u64) -> Self {
        Self {
            phase: Phase::AwaitHello {
                until: now.saturating_add(HELLO_DEADLINE_NS),
            },
            inbound: Inbound::new(Decoder::new()),
            out: Outgoing::default(),
            token: 0,
            number: 0,
            asked: false,
        }
    }

    /// The agent has said that it is ready.
    pub fn ready(&self) -> bool {
        matches!(self.phase, Phase::Told { ready: true, .. })
    }

    /// Tells the agent its life. Once, after its hello.
    pub fn live(&mut self, life: &Life) -> Result<(), TooLarge> {
        if self.phase == Phase::Greeted {
            self.say(&ControlToAgent::Life(Box::new(life.clone())))?;
            self.phase = Phase::Told {
                generation: life.generation,
                ready: false,
            };
        }
        Ok(())
    }

    /// Asks the agent to switch off, with a time in nanoseconds for its workloads.
    pub fn power_off(&mut self, grace_ns: u64) -> Result<(), TooLarge> {
        self.say(&ControlToAgent::PowerOff { grace_ns })
    }

    /// Asks whether the agent is there; the answer has this token.
    pub fn ping(&mut self) -> Result<u64, TooLarge> {
        self.token += 1;
        self.say(&ControlToAgent::Ping(self.token))?;
        Ok(self.token)
    }

    /// Asks for the agent's counters; the answer has this number. `None`, and nothing is asked, while
    /// the agent is not ready or owes the answer to the last question.
    pub fn ask_counters(&mut self) -> Result<Option<u64>, TooLarge> {
        if !self.ready() || self.asked {
            return Ok(None);
        }
        self.say(&ControlToAgent::AskCounters(self.number + 1))?;
        self.number += 1;
        self.asked = true;
        Ok(Some(self.number))
    }

    fn say(&mut self, message: &ControlToAgent) -> Result<(), TooLarge> {
        self.out.push(|sequence, out| message.encode(sequence, out))
    }

    /// Whether the agent's bytes should be read: not while it leaves answers unread.
    pub fn wants_read(&self) -> bool {
        self.phase != Phase::Ended && self.out.pending().len() < MAX_HELD
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

    /// The first `count` of them were.
    pub fn wrote(&mut self, count: usize) {
        self.out.wrote(count);
    }

    /// The next thing that the agent said; confirmations are given on the way. After an error
    /// nothing more is taken: close the connection.
    #[expect(
        clippy::should_implement_trait,
        reason = "fails, and can have more after none"
    )]
    pub fn next(&mut self) -> Result<Option<HostEvent>, Violation> {
        if self.phase == Phase::Ended {
            return Ok(None);
        }
        let result = self.advance();
        if result.is_err() {
            self.phase = Phase::Ended;
        }
        result
    }

    fn advance(&mut self) -> Result<Option<HostEvent>, Violation> {
        while self.wants_read() && self.inbound.take()? {
            let Some(frame) = self.inbound.frame() else {
                break;
            };
            let (id, kind) = (frame.header.id, frame.header.kind);
            let message = ControlToHost::decode(&frame)?;
            if id != 0 {
                return Err(Violation::UnknownId { kind, id });
            }
            if let Some(event) = self.judge(kind, message)? {
                return Ok(Some(event));
            }
        }
        Ok(None)
    }

    fn judge(
        &mut self,
        kind: FrameKind,
        message: ControlToHost,
    ) -> Result<Option<HostEvent>, Violation> {
        let event = match (message, self.phase) {
            (
                ControlToHost::Hello {
                    versions: theirs,
                    features,
                },
                Phase::AwaitHello { .. },
            ) => {
                VERSIONS.common(theirs).ok_or(Violation::Version {
                    ours: VERSIONS,
                    theirs,
                })?;
                self.phase = Phase::Greeted;
                HostEvent::Hello { features }
            }
            (ControlToHost::Hello { .. }, _) | (_, Phase::AwaitHello { .. }) => {
                return Err(Violation::Hello { kind });
            }
            (
                ControlToHost::Ready(theirs),
                Phase::Told {
                    generation,
                    ready: false,
                },
            ) => {
                if theirs != generation {
                    return Err(Violation::Stale {
                        ours: generation,
                        theirs,
                    });
                }
                self.phase = Phase::Told {
                    generation,
                    ready: true,
                };
                HostEvent::Ready
            }
            (
                ControlToHost::Failed {
                    stage,
                    errno,
                    message,
                },
                Phase::Greeted | Phase::Told { ready: false, .. },
            ) => HostEvent::Failed {
                stage,
                errno,
                message,
            },
            (ControlToHost::Down { reason, message }, _) => HostEvent::Down { reason, message },
            (ControlToHost::Confirm(token), Phase::Told { generation, .. }) => {
                let written = self.say(&ControlToAgent::Confirmed { token, generation });
                debug_assert_eq!(written, Ok(()));
                return Ok(None);
            }
            (ControlToHost::Pong(token), _) if token != 0 && token <= self.token => {
                HostEvent::Pong { token }
            }
            (ControlToHost::Counters { number, counters }, _)
                if self.asked && number == self.number =>
            {
                self.asked = false;
                HostEvent::Counters { number, counters }
            }
            _ => return Err(Violation::Order { kind, id: 0 }),
        };
        Ok(Some(event))
    }

    /// When [`tick`](Self::tick) is due. How long the way from hello to ready may take is the
    /// driver's.
    pub fn deadline(&self) -> Option<u64> {
        match self.phase {
            Phase::AwaitHello { until } => Some(until),
            Phase::Greeted | Phase::Told { .. } if self.wants_read() => self.inbound.deadline(),
            _ => None,
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
