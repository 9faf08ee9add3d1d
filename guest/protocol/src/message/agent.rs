//! Agent to client.

use super::{ExecsPage, FrameKind, MessageError, Refusal, TooLarge, seal};
use crate::cause::{Oom, Record, Stream, wire_enum};
use crate::frame::{Frame, HEADER_LEN, Header};
use crate::hello::Hello;
use crate::limits::{MAX_DATA, MAX_TEXT};
use crate::wire::{Reader, WireError, Writer};

/// What an agent says on a session. The frame's id is the request's; hello and goodbye have id 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AgentMessage<'a> {
    /// The first frame.
    Hello(Hello),
    /// The process runs; before its first byte of output.
    Started {
        /// The exec's number, unique in the guest.
        exec: u64,
        /// Its main process in the guest.
        pid: u32,
    },
    /// Bytes of a stream.
    Output {
        /// Which.
        stream: Stream,
        /// Where in it: gapless from 0.
        offset: u64,
        /// The bytes, at least one.
        data: &'a [u8],
    },
    /// The cap was hit: nothing beyond these lengths of stdout and stderr will ever come.
    Limit([u64; 2]),
    /// A process of the exec, or its guest, was killed for memory.
    Oom(Oom),
    /// Nothing reads stdin any more; what is sent from now on is thrown away.
    StdinClosed(ClosedWhy),
    /// Stdin bytes that were consumed: as many more may be sent.
    StdinCredit(u64),
    /// The end, after the last byte.
    Exit(Box<Record>),
    /// The request was not taken; nothing was done, and its id is free.
    Refused(Refusal),
    /// The answer to a ping.
    Pong,
    /// The session ends here.
    Goodbye {
        /// Why.
        code: GoodbyeCode,
        /// In plain words.
        message: String,
    },
    /// What was asked for is done.
    Done,
    /// A part of the list of execs.
    Execs(ExecsPage),
}

wire_enum! {
    /// Why nothing reads stdin any more.
    ClosedWhy, "stdin closed",
    /// The workload closed its end.
    BrokenPipe = 1 => "broken_pipe",
    /// The exec has ended.
    Ended = 2 => "ended",
    /// Stdin was not asked for.
    NotAsked = 3 => "not_asked",
}

wire_enum! {
    /// Why an agent ends a session.
    GoodbyeCode, "goodbye code",
    /// The client broke the protocol.
    Violation = 1 => "violation",
    /// The client means another generation.
    Stale = 2 => "stale",
    /// No version is common.
    Version = 3 => "version",
    /// The hello, or the rest of a frame, did not come in time.
    Deadline = 4 => "deadline",
    /// The guest goes down.
    GoingDown = 5 => "going_down",
    /// The agent has as many sessions as it may have.
    TooManySessions = 6 => "too_many_sessions",
}

/// Bytes before an output frame's data: header, stream, offset, length.
pub const OUTPUT_HEAD: usize = HEADER_LEN + 13;

/// Everything of an output frame but its data, which then need not be copied.
///
/// ```
/// use vmm_protocol::{AgentMessage, Stream, output_head};
///
/// let mut whole = Vec::new();
/// AgentMessage::Output { stream: Stream::Stderr, offset: 9, data: b"abc" }.encode(1, 2, &mut whole)?;
/// let mut parts = output_head(1, 2, Stream::Stderr, 9, 3).to_vec();
/// parts.extend_from_slice(b"abc");
/// assert_eq!(whole, parts);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn output_head(
    id: u64,
    sequence: u64,
    stream: Stream,
    offset: u64,
    length: u32,
) -> [u8; OUTPUT_HEAD] {
    let mut head = [0; OUTPUT_HEAD];
    let header = Header {
        length: length.saturating_add(13),
        kind: FrameKind::Output,
        id,
        sequence,
    };
    head[..24].copy_from_slice(&header.encode());
    head[24] = stream as u8;
    head[25..33].copy_from_slice(&offset.to_le_bytes());
    head[33..37].copy_from_slice(&length.to_le_bytes());
    head
}

impl<'a> AgentMessage<'a> {
    /// Its kind.
    pub fn kind(&self) -> FrameKind {
        match self {
            Self::Hello(_) => FrameKind::AgentHello,
            Self::Started { .. } => FrameKind::Started,
            Self::Output { .. } => FrameKind::Output,
            Self::Limit(_) => FrameKind::Limit,
            Self::Oom(_) => FrameKind::Oom,
            Self::StdinClosed(_) => FrameKind::StdinClosed,
            Self::StdinCredit(_) => FrameKind::StdinCredit,
            Self::Exit(_) => FrameKind::Exit,
            Self::Refused(_) => FrameKind::Refused,
            Self::Pong => FrameKind::Pong,
            Self::Goodbye { .. } => FrameKind::Goodbye,
            Self::Done => FrameKind::Done,
            Self::Execs(_) => FrameKind::Execs,
        }
    }

    /// Appends it as a whole frame.
    pub fn encode(&self, id: u64, sequence: u64, out: &mut Vec<u8>) -> Result<(), TooLarge> {
        seal(self.kind(), id, sequence, out, |writer| self.write(writer))
    }

    fn write(&self, writer: &mut Writer<'_>) {
        match self {
            Self::Hello(hello) => hello.write(writer),
            Self::Started { exec, pid } => {
                writer.u64(*exec).u32(*pid);
            }
            Self::Output {
                stream,
                offset,
                data,
            } => {
                writer.u8(*stream as u8).u64(*offset).bytes(data);
            }
            Self::Limit([stdout, stderr]) => {
                writer.u64(*stdout).u64(*stderr);
            }
            Self::Oom(oom) => oom.write(writer),
            Self::StdinClosed(why) => {
                writer.u8(*why as u8);
            }
            Self::StdinCredit(bytes) => {
                writer.u64(*bytes);
            }
            Self::Exit(record) => record.write(writer),
            Self::Refused(refusal) => refusal.write(writer),
            Self::Execs(page) => page.write(writer),
            Self::Goodbye { code, message } => {
                writer.u8(*code as u8).text(message, MAX_TEXT);
            }
            Self::Pong | Self::Done => {}
        }
    }

    /// Reads the message of a frame.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, MessageError> {
        let kind = frame.header.kind;
        let mut reader = Reader::new(frame.payload);
        Self::read(kind, &mut reader)?
            .and_then(|message| reader.finish().map(|()| message))
            .map_err(|source| MessageError::Payload { kind, source })
    }

    fn read(
        kind: FrameKind,
        reader: &mut Reader<'a>,
    ) -> Result<Result<Self, WireError>, MessageError> {
        Ok(match kind {
            FrameKind::AgentHello => Hello::read(reader).map(Self::Hello),
            FrameKind::Started => started(reader),
            FrameKind::Output => output(reader),
            FrameKind::Limit => limit(reader),
            FrameKind::Oom => Oom::read(reader).map(Self::Oom),
            FrameKind::StdinClosed => reader
                .u8("stdin closed")
                .and_then(ClosedWhy::from_wire)
                .map(Self::StdinClosed),
            FrameKind::StdinCredit => reader.u64("stdin credit").map(Self::StdinCredit),
            FrameKind::Exit => Record::read(reader).map(|record| Self::Exit(Box::new(record))),
            FrameKind::Refused => Refusal::read(reader).map(Self::Refused),
            FrameKind::Done => Ok(Self::Done),
            FrameKind::Execs => ExecsPage::read(reader).map(Self::Execs),
            FrameKind::Pong => Ok(Self::Pong),
            FrameKind::Goodbye => goodbye(reader),
            _ => return Err(MessageError::Direction { kind }),
        })
    }
}

fn started<'a>(reader: &mut Reader<'_>) -> Result<AgentMessage<'a>, WireError> {
    Ok(AgentMessage::Started {
        exec: reader.u64("exec number")?,
        pid: reader.u32("pid")?,
    })
}

fn output<'a>(reader: &mut Reader<'a>) -> Result<AgentMessage<'a>, WireError> {
    let stream = Stream::from_wire(reader.u8("stream")?)?;
    let offset = reader.u64("offset")?;
    let data = reader.bytes(MAX_DATA, "data")?;
    if data.is_empty() {
        return Err(WireError::Value {
            field: "data",
            value: 0,
        });
    }
    Ok(AgentMessage::Output {
        stream,
        offset,
        data,
    })
}

fn limit<'a>(reader: &mut Reader<'_>) -> Result<AgentMessage<'a>, WireError> {
    Ok(AgentMessage::Limit([
        reader.u64("stdout length")?,
        reader.u64("stderr length")?,
    ]))
}

fn goodbye<'a>(reader: &mut Reader<'_>) -> Result<AgentMessage<'a>, WireError> {
    let code = GoodbyeCode::from_wire(reader.u8("goodbye code")?)?;
    Ok(AgentMessage::Goodbye {
        code,
        message: reader.text(MAX_TEXT, "message")?,
    })
}
