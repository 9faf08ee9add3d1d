//! Sessions: the state machines of both sides of one connection between a client and an agent.
//!
//! ```text
//!    accept, connect             the other's hello           violation, goodbye, deadline
//!   ----------------> AwaitHello -----------------> Open ------------------------------> Ended
//! ```
//!
//! Both sides send their hello at once. Every incoming frame is judged whole before it changes
//! anything: header, sequence, fields, id, credit. The first that fails ends the session, and
//! nothing but the session.

mod agent;
mod client;
mod inbound;
mod outbox;
mod outgoing;

pub use agent::{AgentSession, Ask, Execs, MissingExec, Request};
pub use client::{ClientSession, Event, RequestError};
pub(crate) use inbound::Inbound;
pub(crate) use outgoing::Outgoing;

use crate::frame::FrameError;
use crate::generation::GenerationId;
use crate::hello::Versions;
use crate::message::{FrameKind, GoodbyeCode, MessageError};

/// Why a session, or a control connection, ends by its rules.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// A header is wrong.
    #[error("bad frame header")]
    Frame(#[from] FrameError),
    /// A payload is wrong, or travels in the wrong direction.
    #[error("bad message")]
    Message(#[from] MessageError),
    /// A frame is missing, or came twice.
    #[error("frame {found} came where {expected} was due")]
    Sequence {
        /// The number that was due.
        expected: u64,
        /// The number that came.
        found: u64,
    },
    /// The first frame is no hello, or a later one is.
    #[error("{kind:?} came before the hello, or is a second one")]
    Hello {
        /// What came.
        kind: FrameKind,
    },
    /// No version is common.
    #[error("no common version: ours are {ours:?}, theirs {theirs:?}")]
    Version {
        /// Ours.
        ours: Versions,
        /// Theirs.
        theirs: Versions,
    },
    /// The other side is, or means, another life.
    #[error("generation {theirs} is not {ours}")]
    Stale {
        /// Ours.
        ours: GenerationId,
        /// Theirs.
        theirs: GenerationId,
    },
    /// A frame names a request that never was, or one that cannot be.
    #[error("{kind:?} names the unknown request {id}")]
    UnknownId {
        /// What came.
        kind: FrameKind,
        /// The id.
        id: u64,
    },
    /// A new request has an id that is not larger than all before it.
    #[error("request {id} is not new: {last} was the last")]
    ReusedId {
        /// The id.
        id: u64,
        /// The largest so far.
        last: u64,
    },
    /// More was sent, or given back, than the other side had allowed.
    #[error("{kind:?} of request {id} has {count} bytes, {allowed} were allowed")]
    Credit {
        /// What came.
        kind: FrameKind,
        /// The request.
        id: u64,
        /// How many bytes.
        count: u64,
        /// How many were allowed.
        allowed: u64,
    },
    /// Output has a gap or an overlap, or its end does not match its record.
    #[error("offset {found} of request {id} where {expected} was due")]
    Offset {
        /// The request.
        id: u64,
        /// The offset that was due.
        expected: u64,
        /// The offset that came.
        found: u64,
    },
    /// A frame came that its request's state does not allow.
    #[error("{kind:?} is out of order for request {id}")]
    Order {
        /// What came.
        kind: FrameKind,
        /// The request.
        id: u64,
    },
    /// The hello, or the rest of a frame, did not come in time.
    #[error("the rest of a frame did not come in time")]
    Deadline,
}

impl Violation {
    /// How an agent says it.
    pub fn code(&self) -> GoodbyeCode {
        match self {
            Self::Version { .. } => GoodbyeCode::Version,
            Self::Stale { .. } => GoodbyeCode::Stale,
            Self::Deadline => GoodbyeCode::Deadline,
            _ => GoodbyeCode::Violation,
        }
    }

    /// The violation with its causes, in one line.
    pub fn describe(&self) -> String {
        let mut text = self.to_string();
        let mut source = std::error::Error::source(self);
        while let Some(error) = source {
            text.push_str(": ");
            text.push_str(&error.to_string());
            source = error.source();
        }
        text
    }
}

/// Ends the session unless `holds`. The one place of the checks of SE01, so that its negative
/// control can take all of them away.
fn demand(holds: bool, violation: impl FnOnce() -> Violation) -> Result<(), Violation> {
    if holds || crate::negative_control("SE01") {
        return Ok(());
    }
    Err(violation())
}

#[cfg(test)]
mod attach;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod property;
#[cfg(test)]
mod tests;
