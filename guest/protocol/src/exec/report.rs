//! What goes in and out of an exec besides bytes.

use crate::cause::Oom;
use crate::limits::UNCAPPED_RING;
use crate::message::{AgentMessage, ClosedWhy, ExecRequest, Policy};

/// What an exec does by itself, and when. All times are nanoseconds of one monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// What happens at the cap.
    pub policy: Policy,
    /// The cap on both streams together; none for none.
    pub output_limit: Option<u64>,
    /// How long it may run; 0 for no end.
    pub timeout_ns: u64,
    /// It outlives its client: it begins without a reader, and an uncapped one keeps a ring of what was consumed, too.
    pub detached: bool,
    /// How long the streams may stay open after the main process's exit.
    pub drain_ns: u64,
    /// How long a killed leaf has to become empty before the record says that it is not.
    pub contain_ns: u64,
}

impl Settings {
    /// The settings that a request asks for.
    pub fn new(request: &ExecRequest) -> Self {
        Self {
            policy: request.policy,
            output_limit: request.output_limit,
            timeout_ns: request.timeout_ns,
            detached: request.detached,
            drain_ns: 500_000_000,
            contain_ns: 2_000_000_000,
        }
    }

    /// The most memory that this exec's output takes, for the budget of all stores.
    pub fn store_bytes(&self) -> u64 {
        // An uncapped exec holds up to a ring's worth of unacknowledged bytes in four blocks, and
        // each of its two streams can have one partly acknowledged block, one partly filled, and a
        // spare.
        self.output_limit.unwrap_or(UNCAPPED_RING as u64 / 2 * 5)
    }
}

/// Something that the driver must do for an exec.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Send a signal to the main process.
    Signal(u8),
    /// Kill every process of the leaf, then report [`Exec::leaf_empty`](super::Exec::leaf_empty)
    /// when none is left.
    KillLeaf,
    /// Read both pipes until each would block, ends, or has no room; they may not become readable
    /// by themselves.
    ReadOut,
    /// Nothing more will happen: collect the leaf's usage, remove it, and call
    /// [`Exec::finish`](super::Exec::finish).
    Finish,
}

/// Where the next bytes of a stream go.
#[derive(Debug, PartialEq, Eq)]
pub enum Room<'a> {
    /// Into the store: read at most this much, then [`Exec::commit`](super::Exec::commit).
    Store(&'a mut [u8]),
    /// Nowhere: read into any buffer, then [`Exec::drop_bytes`](super::Exec::drop_bytes).
    Discard,
    /// Leave them in the pipe until the client has consumed some.
    Wait,
    /// The stream is closed.
    Closed,
}

/// Why output cannot be had from some offsets on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// Some of it is kept no longer.
    #[error("output before offset {} of stdout and {} of stderr is kept no longer: attach from {},{}",
        .earliest[0], .earliest[1], .possible[0], .possible[1])]
    BelowStart {
        /// The first offsets that can be had.
        earliest: [u64; 2],
        /// What was asked for, raised to them.
        possible: [u64; 2],
    },
    /// There is nothing there yet.
    #[error("offsets {},{} are beyond the {} bytes of stdout and {} of stderr that there are", .from[0], .from[1], .length[0], .length[1])]
    BeyondEnd {
        /// What was asked for.
        from: [u64; 2],
        /// The lengths of the streams.
        length: [u64; 2],
    },
}

/// How the main process ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MainEnd {
    /// It exited.
    Exited(u8),
    /// It died of a signal.
    Signaled(u8),
    /// Its status could not be learned; why.
    Unknown(String),
}

/// What a leaf used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Processor time in nanoseconds.
    pub cpu_ns: u64,
    /// The most memory in bytes; 0 if unknown.
    pub peak_memory: u64,
    /// Nothing proves that processes could not leave the leaf.
    pub unproven: bool,
}

/// Something that a client is told besides bytes, and where in the streams it happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// Lengths of stdout and stderr at that moment.
    pub at: [u64; 2],
    /// What happened.
    pub what: NoticeKind,
}

/// What a notice tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoticeKind {
    /// The process runs.
    Started {
        /// The exec's number in the guest.
        exec: u64,
        /// Its main process.
        pid: u32,
    },
    /// The cap was hit.
    Limit,
    /// A process was killed for memory.
    Oom(Oom),
    /// Nothing reads stdin any more.
    StdinClosed(ClosedWhy),
}

impl Notice {
    /// The notice as a message.
    pub fn message(&self) -> AgentMessage<'static> {
        match &self.what {
            NoticeKind::Started { exec, pid } => AgentMessage::Started {
                exec: *exec,
                pid: *pid,
            },
            NoticeKind::Limit => AgentMessage::Limit(self.at),
            NoticeKind::Oom(oom) => AgentMessage::Oom(oom.clone()),
            NoticeKind::StdinClosed(why) => AgentMessage::StdinClosed(*why),
        }
    }
}
