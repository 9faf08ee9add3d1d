//! Client to agent.

use super::{ExecRequest, FrameKind, MessageError, TooLarge, Winsize, seal};
use crate::cause::{CancelReason, signal};
use crate::frame::Frame;
use crate::hello::Hello;
use crate::limits::MAX_DATA;
use crate::wire::{Reader, WireError, Writer};

/// What a client says on a session. The frame's id names the exec, or the ping; a hello has id 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientMessage<'a> {
    /// The first frame.
    Hello(Hello),
    /// Run this, under the frame's id.
    Exec(Box<ExecRequest>),
    /// Bytes for stdin, within the credit for it.
    Stdin(&'a [u8]),
    /// Stdin ends after what was sent.
    StdinClose,
    /// A signal for the main process.
    Signal(u8),
    /// The terminal's new size.
    Resize(Winsize),
    /// End it: `SIGTERM` now and `SIGKILL` for its whole leaf after the grace, or at once without
    /// one.
    Cancel {
        /// Who wants it.
        reason: CancelReason,
        /// Time between the two, in nanoseconds.
        grace_ns: u64,
    },
    /// Bytes of stdout and stderr that were consumed: they may leave an uncapped store, and as many
    /// more may be sent.
    Credit([u64; 2]),
    /// Answered by a pong with the same id.
    Ping,
    /// The output of an exec from these offsets on, its notices from the first, and its end, under the frame's id.
    Attach {
        /// The exec's number in the guest.
        exec: u64,
        /// Offsets in stdout and stderr.
        from: [u64; 2],
        /// As in an exec request.
        window: u64,
    },
    /// The end of an exec, by its number, under the frame's id.
    Wait(u64),
    /// Ends an attach or a wait, not its exec; answered by done.
    Detach,
    /// The execs with numbers above this one.
    List {
        /// Where to begin; 0 for the first.
        after: u64,
    },
    /// A signal for the main process of an exec; answered by done.
    SignalExec {
        /// The exec's number in the guest.
        exec: u64,
        /// The signal's number.
        signal: u8,
    },
    /// Ends an exec as [`Cancel`](Self::Cancel) does; answered by done.
    CancelExec {
        /// The exec's number in the guest.
        exec: u64,
        /// Who wants it.
        reason: CancelReason,
        /// Time between `SIGTERM` and the kill, in nanoseconds.
        grace_ns: u64,
    },
    /// Forgets an exec that has ended, by its number; answered by done.
    Release(u64),
}

impl<'a> ClientMessage<'a> {
    /// Its kind.
    pub fn kind(&self) -> FrameKind {
        match self {
            Self::Hello(_) => FrameKind::ClientHello,
            Self::Exec(_) => FrameKind::Exec,
            Self::Stdin(_) => FrameKind::Stdin,
            Self::StdinClose => FrameKind::StdinClose,
            Self::Signal(_) => FrameKind::Signal,
            Self::Resize(_) => FrameKind::Resize,
            Self::Cancel { .. } => FrameKind::Cancel,
            Self::Credit(_) => FrameKind::Credit,
            Self::Ping => FrameKind::Ping,
            Self::Attach { .. } => FrameKind::Attach,
            Self::Wait(_) => FrameKind::Wait,
            Self::Detach => FrameKind::Detach,
            Self::List { .. } => FrameKind::List,
            Self::SignalExec { .. } => FrameKind::SignalExec,
            Self::CancelExec { .. } => FrameKind::CancelExec,
            Self::Release(_) => FrameKind::Release,
        }
    }

    /// Appends it as a whole frame.
    pub fn encode(&self, id: u64, sequence: u64, out: &mut Vec<u8>) -> Result<(), TooLarge> {
        seal(self.kind(), id, sequence, out, |writer| self.write(writer))
    }

    fn write(&self, writer: &mut Writer<'_>) {
        match self {
            Self::Hello(hello) => hello.write(writer),
            Self::Exec(request) => request.write(writer),
            Self::Stdin(data) => {
                writer.bytes(data);
            }
            Self::Signal(signal) => {
                writer.u8(*signal);
            }
            Self::Resize(size) => {
                writer.u16(size.rows).u16(size.columns);
            }
            Self::Cancel { reason, grace_ns } => {
                writer.u8(*reason as u8).u64(*grace_ns);
            }
            Self::Credit([stdout, stderr]) => {
                writer.u64(*stdout).u64(*stderr);
            }
            Self::Attach { exec, from, window } => {
                let [stdout, stderr] = from;
                writer.u64(*exec).u64(*stdout).u64(*stderr).u64(*window);
            }
            Self::Wait(number) | Self::List { after: number } | Self::Release(number) => {
                writer.u64(*number);
            }
            Self::SignalExec { exec, signal } => {
                writer.u64(*exec).u8(*signal);
            }
            Self::CancelExec {
                exec,
                reason,
                grace_ns,
            } => {
                writer.u64(*exec).u8(*reason as u8).u64(*grace_ns);
            }
            Self::StdinClose | Self::Ping | Self::Detach => {}
        }
    }

    /// Reads the message of a frame.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, MessageError> {
        let kind = frame.header.kind;
        let mut reader = Reader::new(frame.payload);
        let message = match kind {
            FrameKind::ClientHello => Hello::read(&mut reader).map(Self::Hello),
            FrameKind::Exec => {
                ExecRequest::read(&mut reader).map(|request| Self::Exec(Box::new(request)))
            }
            FrameKind::Stdin => reader.bytes(MAX_DATA, "data").map(Self::Stdin),
            FrameKind::StdinClose => Ok(Self::StdinClose),
            FrameKind::Signal => reader.u8("signal").and_then(signal).map(Self::Signal),
            FrameKind::Resize => resize(&mut reader).map(Self::Resize),
            FrameKind::Cancel => cancel(&mut reader),
            FrameKind::Credit => credit(&mut reader).map(Self::Credit),
            FrameKind::Ping => Ok(Self::Ping),
            FrameKind::Attach => attach(&mut reader),
            FrameKind::Wait => reader.u64("exec number").map(Self::Wait),
            FrameKind::Detach => Ok(Self::Detach),
            FrameKind::List => reader.u64("exec number").map(|after| Self::List { after }),
            FrameKind::SignalExec => signal_exec(&mut reader),
            FrameKind::CancelExec => cancel_exec(&mut reader),
            FrameKind::Release => reader.u64("exec number").map(Self::Release),
            _ => return Err(MessageError::Direction { kind }),
        };
        message
            .and_then(|message| reader.finish().map(|()| message))
            .map_err(|source| MessageError::Payload { kind, source })
    }
}

fn resize(reader: &mut Reader<'_>) -> Result<Winsize, WireError> {
    let size = Winsize {
        rows: reader.u16("rows")?,
        columns: reader.u16("columns")?,
    };
    for (field, value) in [("rows", size.rows), ("columns", size.columns)] {
        if value == 0 {
            return Err(WireError::Value { field, value: 0 });
        }
    }
    Ok(size)
}

fn cancel<'a>(reader: &mut Reader<'_>) -> Result<ClientMessage<'a>, WireError> {
    let reason = CancelReason::from_wire(reader.u8("cancel reason")?)?;
    Ok(ClientMessage::Cancel {
        reason,
        grace_ns: reader.u64("grace")?,
    })
}

fn attach<'a>(reader: &mut Reader<'_>) -> Result<ClientMessage<'a>, WireError> {
    Ok(ClientMessage::Attach {
        exec: reader.u64("exec number")?,
        from: [reader.u64("stdout offset")?, reader.u64("stderr offset")?],
        window: reader.u64("window")?,
    })
}

fn signal_exec<'a>(reader: &mut Reader<'_>) -> Result<ClientMessage<'a>, WireError> {
    Ok(ClientMessage::SignalExec {
        exec: reader.u64("exec number")?,
        signal: reader.u8("signal").and_then(signal)?,
    })
}

fn cancel_exec<'a>(reader: &mut Reader<'_>) -> Result<ClientMessage<'a>, WireError> {
    Ok(ClientMessage::CancelExec {
        exec: reader.u64("exec number")?,
        reason: CancelReason::from_wire(reader.u8("cancel reason")?)?,
        grace_ns: reader.u64("grace")?,
    })
}

fn credit(reader: &mut Reader<'_>) -> Result<[u64; 2], WireError> {
    Ok([reader.u64("stdout credit")?, reader.u64("stderr credit")?])
}
