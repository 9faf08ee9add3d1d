//! The control connection: the agent dials the monitor, is told its life, and says when it is
//! ready.

use super::{AgentCounters, FrameKind, MessageError, TooLarge, seal};
use crate::cause::wire_enum;
use crate::frame::Frame;
use crate::generation::GenerationId;
use crate::hello::{CONTROL_MAGIC, VERSIONS, Versions, magic};
use crate::limits::MAX_TEXT;
use crate::wire::{Reader, WireError, Writer};

/// Agent to host. Every frame has id 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ControlToHost {
    /// The first frame.
    Hello {
        /// What the agent speaks.
        versions: Versions,
        /// What it can do beyond that.
        features: u64,
    },
    /// Time, entropy and identity of this life are applied, and sessions are taken.
    Ready(GenerationId),
    /// They could not be applied: this life will not be ready.
    Failed {
        /// What was being done.
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
    /// Answered by [`ControlToAgent::Confirmed`] with the same token, if the life is still the
    /// same.
    Confirm(u64),
    /// The answer to a ping, with its token.
    Pong(u64),
    /// The answer to [`ControlToAgent::AskCounters`].
    Counters {
        /// The question's number.
        number: u64,
        /// What the agent has counted.
        counters: AgentCounters,
    },
}

wire_enum! {
    /// A step on the way to ready.
    ReadyStage, "ready stage",
    /// Mounts of the guest's own file systems.
    Mounts = 1 => "mounts",
    /// Kernel modules of the image.
    Modules = 2 => "modules",
    /// The control group tree.
    Cgroups = 3 => "cgroups",
    /// The listening socket.
    Listen = 4 => "listen",
    /// The wall clock.
    Clock = 5 => "clock",
    /// The kernel's random pool.
    Entropy = 6 => "entropy",
    /// Host name and machine id.
    Identity = 7 => "identity",
}

wire_enum! {
    /// Why a guest goes down.
    DownReason, "down reason",
    /// It was told to.
    PowerOff = 1 => "power_off",
    /// The agent panicked.
    Panic = 2 => "panic",
    /// The agent's loop ended with an error.
    Failed = 3 => "failed",
}

/// Host to agent. Every frame has id 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ControlToAgent {
    /// The first frame: a new life.
    Life(Box<Life>),
    /// Switch off, in order.
    PowerOff {
        /// Nanoseconds that workloads have between `SIGTERM` and their death.
        grace_ns: u64,
    },
    /// Answered by a pong with the same token.
    Ping(u64),
    /// The answer to [`ControlToHost::Confirm`].
    Confirmed {
        /// Its token.
        token: u64,
        /// The life.
        generation: GenerationId,
    },
    /// Answered by [`ControlToHost::Counters`] with the same number, which is larger than every one
    /// before it.
    AskCounters(u64),
}

/// Everything that is new in a life.
#[derive(Clone, PartialEq, Eq)]
pub struct Life {
    /// The protocol version of this connection.
    pub version: u16,
    /// Which life.
    pub generation: GenerationId,
    /// How often the machine has been restored.
    pub restore_count: u64,
    /// The host's wall clock, in nanoseconds since 1970.
    pub wall_clock_ns: u64,
    /// Fresh randomness for the kernel's pool.
    pub entropy: [u8; 64],
    /// The machine's id.
    pub machine_id: [u8; 16],
    /// The host name.
    pub hostname: String,
}

impl Life {
    /// A life of this crate's version, whose clock, entropy and identity are still to be filled in.
    pub fn new(generation: GenerationId) -> Self {
        Self {
            version: VERSIONS.highest,
            generation,
            restore_count: 0,
            wall_clock_ns: 0,
            entropy: [0; 64],
            machine_id: [0; 16],
            hostname: String::new(),
        }
    }
}

impl std::fmt::Debug for Life {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Entropy is left out: it seeds the guest's random numbers, and this may be logged.
        f.debug_struct("Life")
            .field("version", &self.version)
            .field("generation", &self.generation)
            .field("restore_count", &self.restore_count)
            .field("wall_clock_ns", &self.wall_clock_ns)
            .field("hostname", &self.hostname)
            .finish_non_exhaustive()
    }
}

impl ControlToHost {
    /// Its kind.
    pub fn kind(&self) -> FrameKind {
        match self {
            Self::Hello { .. } => FrameKind::ControlHello,
            Self::Ready(_) => FrameKind::Ready,
            Self::Failed { .. } => FrameKind::Failed,
            Self::Down { .. } => FrameKind::Down,
            Self::Confirm(_) => FrameKind::Confirm,
            Self::Pong(_) => FrameKind::ControlPong,
            Self::Counters { .. } => FrameKind::Counters,
        }
    }

    /// Appends it as a whole frame.
    pub fn encode(&self, sequence: u64, out: &mut Vec<u8>) -> Result<(), TooLarge> {
        seal(self.kind(), 0, sequence, out, |writer| {
            match self {
                Self::Hello { versions, features } => {
                    versions.write(writer.raw(&CONTROL_MAGIC));
                    writer.u64(*features)
                }
                Self::Ready(generation) => {
                    generation.write(writer);
                    writer
                }
                Self::Failed {
                    stage,
                    errno,
                    message,
                } => writer.u8(*stage as u8).i32(*errno).text(message, MAX_TEXT),
                Self::Down { reason, message } => writer.u8(*reason as u8).text(message, MAX_TEXT),
                Self::Confirm(token) | Self::Pong(token) => writer.u64(*token),
                Self::Counters { number, counters } => {
                    counters.write(writer.u64(*number));
                    writer
                }
            };
        })
    }

    /// Reads the message of a frame.
    pub fn decode(frame: &Frame<'_>) -> Result<Self, MessageError> {
        let kind = frame.header.kind;
        let mut reader = Reader::new(frame.payload);
        let mut read = || {
            Ok(Some(match kind {
                FrameKind::ControlHello => {
                    magic(&mut reader, CONTROL_MAGIC)?;
                    Self::Hello {
                        versions: Versions::read(&mut reader)?,
                        features: reader.u64("features")?,
                    }
                }
                FrameKind::Ready => Self::Ready(GenerationId::read(&mut reader)?),
                FrameKind::Failed => Self::Failed {
                    stage: ReadyStage::from_wire(reader.u8("ready stage")?)?,
                    errno: reader.i32("errno")?,
                    message: reader.text(MAX_TEXT, "message")?,
                },
                FrameKind::Down => Self::Down {
                    reason: DownReason::from_wire(reader.u8("down reason")?)?,
                    message: reader.text(MAX_TEXT, "message")?,
                },
                FrameKind::Confirm => Self::Confirm(reader.u64("token")?),
                FrameKind::ControlPong => Self::Pong(reader.u64("token")?),
                FrameKind::Counters => Self::Counters {
                    number: reader.u64("number")?,
                    counters: AgentCounters::read(&mut reader)?,
                },
                _ => return Ok(None),
            }))
        };
        let message = read();
        whole(kind, message, reader)
    }
}

impl ControlToAgent {
    /// Its kind.
    pub fn kind(&self) -> FrameKind {
        match self {
            Self::Life(_) => FrameKind::Life,
            Self::PowerOff { .. } => FrameKind::PowerOff,
            Self::Ping(_) => FrameKind::ControlPing,
            Self::Confirmed { .. } => FrameKind::Confirmed,
            Self::AskCounters(_) => FrameKind::AskCounters,
        }
    }

    /// Appends it as a whole frame.
    pub fn encode(&self, sequence: u64, out: &mut Vec<u8>) -> Result<(), TooLarge> {
        seal(self.kind(), 0, sequence, out, |writer| match self {
            Self::Life(life) => life.write(writer),
            Self::PowerOff { grace_ns: number }
            | Self::Ping(number)
            | Self::AskCounters(number) => {
                writer.u64(*number);
            }
            Self::Confirmed { token, generation } => generation.write(writer.u64(*token)),
        })
    }

    /// Reads the message of a frame.
    pub fn decode(frame: &Frame<'_>) -> Result<Self, MessageError> {
        let kind = frame.header.kind;
        let mut reader = Reader::new(frame.payload);
        let mut read = || {
            Ok(Some(match kind {
                FrameKind::Life => Self::Life(Box::new(Life::read(&mut reader)?)),
                FrameKind::PowerOff => Self::PowerOff {
                    grace_ns: reader.u64("grace")?,
                },
                FrameKind::ControlPing => Self::Ping(reader.u64("token")?),
                FrameKind::Confirmed => Self::Confirmed {
                    token: reader.u64("token")?,
                    generation: GenerationId::read(&mut reader)?,
                },
                FrameKind::AskCounters => Self::AskCounters(reader.u64("number")?),
                _ => return Ok(None),
            }))
        };
        let message = read();
        whole(kind, message, reader)
    }
}

impl Life {
    fn write(&self, writer: &mut Writer<'_>) {
        self.generation.write(writer.u16(self.version));
        writer
            .u64(self.restore_count)
            .u64(self.wall_clock_ns)
            .raw(&self.entropy)
            .raw(&self.machine_id);
        writer.text(&self.hostname, 64);
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        Ok(Self {
            version: reader.u16("version")?,
            generation: GenerationId::read(reader)?,
            restore_count: reader.u64("restore count")?,
            wall_clock_ns: reader.u64("wall clock")?,
            entropy: reader.array("entropy")?,
            machine_id: reader.array("machine id")?,
            hostname: reader.text(64, "hostname")?,
        })
    }
}

fn whole<M>(
    kind: FrameKind,
    read: Result<Option<M>, WireError>,
    reader: Reader<'_>,
) -> Result<M, MessageError> {
    let payload = |source| MessageError::Payload { kind, source };
    let message = read
        .map_err(payload)?
        .ok_or(MessageError::Direction { kind })?;
    reader.finish().map_err(payload)?;
    Ok(message)
}
