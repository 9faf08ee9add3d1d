//! What an exec's handle gives.

use crate::bytes::Bytes;
use vmm_protocol::{ClosedWhy, Oom, Record, Refusal, Stream};

/// Something that happened to an exec, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The process runs.
    Started {
        /// The exec's number in the guest.
        exec: u64,
        /// Its main process in the guest.
        pid: u32,
    },
    /// Bytes of a stream.
    Output {
        /// Which.
        stream: Stream,
        /// Where in it.
        offset: u64,
        /// The bytes.
        data: Bytes,
    },
    /// The cap was hit: these are the final lengths of stdout and stderr.
    Limit([u64; 2]),
    /// Something was killed for memory.
    Oom(Oom),
    /// Nothing reads stdin any more.
    StdinClosed(ClosedWhy),
    /// The last event.
    Ended(Ended),
}

/// How an exec ended for its client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// With its record.
    Exit(Box<Record>),
    /// It never began, or cannot be attached to or waited for.
    Refused(Refusal),
    /// The session went first.
    Lost(Lost),
}

/// A session that went away under an exec.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lost {
    /// Why.
    pub reason: String,
    /// How much of stdout and stderr had been received: the offsets from which to attach.
    pub received: [u64; 2],
}

impl Ended {
    /// The exit status that shells are given.
    pub fn status(&self) -> u8 {
        match self {
            Self::Exit(record) => record.status(),
            Self::Refused(_) | Self::Lost(_) => 125,
        }
    }
}

impl std::fmt::Display for Lost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [stdout, stderr] = self.received;
        write!(
            f,
            "{}, after {stdout} bytes of stdout and {stderr} of stderr",
            self.reason
        )
    }
}
