//! The messages of the four directions, and the table of their kinds.

mod agent;
mod client;
mod control;
mod counters;
mod listing;
mod refusal;
mod request;

pub use agent::{AgentMessage, ClosedWhy, GoodbyeCode, OUTPUT_HEAD, output_head};
pub use client::ClientMessage;
pub use control::{ControlToAgent, ControlToHost, DownReason, Life, ReadyStage};
pub use counters::AgentCounters;
pub use listing::{ExecInfo, ExecState, ExecsPage};
pub use refusal::{Refusal, RefusedCode};
pub use request::{ExecRequest, InvalidRequest, Policy, User, Winsize};

use crate::frame::{HEADER_LEN, Header};
use crate::limits::{MAX_EXEC_PAYLOAD, MAX_PAYLOAD};
use crate::wire::Writer;

/// A message that cannot be written, because it is larger than its kind may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a {kind:?} of {length} bytes, at most {limit} are allowed")]
pub struct TooLarge {
    /// Its kind.
    pub kind: FrameKind,
    /// Its payload's length.
    pub length: usize,
    /// The limit.
    pub limit: usize,
}

/// Why a frame is no message of the direction that it came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// The kind belongs to another direction.
    #[error("a {kind:?} does not travel in this direction")]
    Direction {
        /// The kind.
        kind: FrameKind,
    },
    /// The payload does not hold the kind's fields.
    #[error("malformed {kind:?}")]
    Payload {
        /// The kind.
        kind: FrameKind,
        /// What is wrong.
        #[source]
        source: crate::wire::WireError,
    },
}

macro_rules! frame_kinds {
    ($($(#[$meta:meta])* $kind:ident = $value:literal, $limit:expr;)+) => {
        /// What a frame's payload is. The two high bits give the direction.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum FrameKind {
            $($(#[$meta])* $kind = $value,)+
        }

        impl FrameKind {
            /// Every kind.
            pub const ALL: &'static [Self] = &[$(Self::$kind),+];

            pub(crate) fn from_wire(value: u8) -> Option<Self> {
                match value {
                    $($value => Some(Self::$kind),)+
                    _ => None,
                }
            }
        }

        /// The largest payload of a kind, in bytes.
        pub const fn max_payload(kind: FrameKind) -> usize {
            match kind {
                $(FrameKind::$kind => $limit,)+
            }
        }
    };
}

frame_kinds! {
    /// Client to agent: the first frame.
    ClientHello = 0x01, 44;
    /// Client to agent: run something.
    Exec = 0x02, MAX_EXEC_PAYLOAD;
    /// Client to agent: bytes for stdin.
    Stdin = 0x03, MAX_PAYLOAD;
    /// Client to agent: stdin ends here.
    StdinClose = 0x04, 0;
    /// Client to agent: a signal for the main process.
    Signal = 0x05, 1;
    /// Client to agent: the terminal's new size.
    Resize = 0x06, 4;
    /// Client to agent: end it.
    Cancel = 0x07, 9;
    /// Client to agent: output bytes consumed.
    Credit = 0x08, 16;
    /// Client to agent: are you there.
    Ping = 0x09, 0;
    /// Client to agent: the output of an exec from some offsets on, and its end.
    Attach = 0x0a, 32;
    /// Client to agent: the end of an exec.
    Wait = 0x0b, 8;
    /// Client to agent: no more of what was asked for by attach or wait.
    Detach = 0x0c, 0;
    /// Client to agent: which execs there are.
    List = 0x0d, 8;
    /// Client to agent: a signal for the main process of an exec of the guest.
    SignalExec = 0x0e, 9;
    /// Client to agent: end an exec of the guest.
    CancelExec = 0x0f, 17;
    /// Client to agent: forget an exec that has ended, with its output and its record.
    Release = 0x10, 8;
    /// Agent to client: the first frame.
    AgentHello = 0x41, 44;
    /// Agent to client: the process runs.
    Started = 0x42, 12;
    /// Agent to client: bytes of a stream.
    Output = 0x43, MAX_PAYLOAD;
    /// Agent to client: the cap was hit.
    Limit = 0x44, 16;
    /// Agent to client: something was killed for memory.
    Oom = 0x45, MAX_PAYLOAD;
    /// Agent to client: nothing reads stdin any more.
    StdinClosed = 0x46, 1;
    /// Agent to client: stdin bytes consumed.
    StdinCredit = 0x47, 8;
    /// Agent to client: the terminal record.
    Exit = 0x48, MAX_PAYLOAD;
    /// Agent to client: the request was not taken.
    Refused = 0x49, MAX_PAYLOAD;
    /// Agent to client: here I am.
    Pong = 0x4a, 0;
    /// Agent to client: the session ends, and why.
    Goodbye = 0x4b, MAX_PAYLOAD;
    /// Agent to client: what was asked for is done.
    Done = 0x4c, 0;
    /// Agent to client: a part of the list of execs.
    Execs = 0x4d, MAX_PAYLOAD;
    /// Agent to host: the first frame of the control connection.
    ControlHello = 0x81, 20;
    /// Agent to host: this generation is applied.
    Ready = 0x82, 24;
    /// Agent to host: it could not be applied.
    Failed = 0x83, MAX_PAYLOAD;
    /// Agent to host: the guest goes down.
    Down = 0x84, MAX_PAYLOAD;
    /// Agent to host: is the life still the same.
    Confirm = 0x85, 8;
    /// Agent to host: the answer to a ping.
    ControlPong = 0x86, 8;
    /// Agent to host: the answer to ask counters.
    Counters = 0x87, AgentCounters::PAYLOAD;
    /// Host to agent: a new life, with all that is new in it.
    Life = 0xc1, MAX_PAYLOAD;
    /// Host to agent: end the workloads within a time, then switch off.
    PowerOff = 0xc2, 8;
    /// Host to agent: are you there.
    ControlPing = 0xc3, 8;
    /// Host to agent: the answer to confirm.
    Confirmed = 0xc4, 32;
    /// Host to agent: what have you counted.
    AskCounters = 0xc5, 8;
}

impl FrameKind {
    /// A client's frame that has a new id.
    pub(crate) fn begins(self) -> bool {
        matches!(
            self,
            Self::Exec
                | Self::Ping
                | Self::Attach
                | Self::Wait
                | Self::List
                | Self::SignalExec
                | Self::CancelExec
                | Self::Release
        )
    }
}

/// Appends a whole frame: room for the header, the payload that `write` gives, then the header
/// itself. On failure `out` is as it was.
fn seal(
    kind: FrameKind,
    id: u64,
    sequence: u64,
    out: &mut Vec<u8>,
    write: impl FnOnce(&mut Writer<'_>),
) -> Result<(), TooLarge> {
    let start = out.len();
    out.extend_from_slice(&[0; HEADER_LEN]);
    write(&mut Writer::new(out));
    let length = out.len() - start - HEADER_LEN;
    let limit = max_payload(kind);
    if length > limit {
        out.truncate(start);
        return Err(TooLarge {
            kind,
            length,
            limit,
        });
    }
    let header = Header {
        length: length as u32,
        kind,
        id,
        sequence,
    };
    out[start..start + HEADER_LEN].copy_from_slice(&header.encode());
    Ok(())
}

#[cfg(test)]
mod golden;
#[cfg(test)]
mod samples;
#[cfg(test)]
mod tests;
