//! How an exec ended: exactly one cause each, and the record around it.

use crate::limits::MAX_TEXT;
use crate::wire::{Reader, WireError, Writer};

/// Why an exec ended. Disjoint: a kill that was sent wins over what it looks like, and of several
/// kills the first recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cause {
    /// The main process exited with this code.
    Exited(u8),
    /// The main process died of this signal.
    Signaled(u8),
    /// The exec's timeout passed.
    TimedOut,
    /// It wrote more than its cap, under the policy that kills for it.
    OutputLimit,
    /// The main process was killed for memory.
    OomKilled(Oom),
    /// It was cancelled, or its client was lost.
    Cancelled(CancelReason),
    /// Nothing ran.
    StartFailed {
        /// What was being done.
        stage: StartStage,
        /// The kernel's answer.
        errno: i32,
    },
    /// The agent, the monitor or the session is gone, or the status could not be learned; in plain
    /// words.
    Lost(String),
}

impl Cause {
    /// The exit status that shells are given.
    ///
    /// ```
    /// use vmm_protocol::{CancelReason, Cause, StartStage};
    ///
    /// assert_eq!(Cause::Exited(7).status(), 7);
    /// assert_eq!(Cause::Signaled(9).status(), 137);
    /// assert_eq!(Cause::Cancelled(CancelReason::Interrupt).status(), 130);
    /// assert_eq!(Cause::StartFailed { stage: StartStage::Execute, errno: 2 }.status(), 127);
    /// ```
    pub fn status(&self) -> u8 {
        match self {
            Self::Exited(code) => *code,
            Self::Signaled(signal) => 128_u8.saturating_add(*signal),
            Self::TimedOut => 124,
            Self::OutputLimit | Self::Lost(_) => 125,
            Self::OomKilled(_) => 137,
            Self::Cancelled(CancelReason::Interrupt) => 130,
            Self::Cancelled(CancelReason::Terminate) => 143,
            Self::Cancelled(CancelReason::Request | CancelReason::ClientLost) => 137,
            Self::StartFailed {
                stage: StartStage::Execute,
                errno: ENOENT,
            } => 127,
            Self::StartFailed { .. } => 126,
        }
    }

    /// Which one it is, without what belongs to it.
    pub fn kind(&self) -> CauseKind {
        match self {
            Self::Exited(_) => CauseKind::Exited,
            Self::Signaled(_) => CauseKind::Signaled,
            Self::TimedOut => CauseKind::TimedOut,
            Self::OutputLimit => CauseKind::OutputLimit,
            Self::OomKilled(_) => CauseKind::OomKilled,
            Self::Cancelled(_) => CauseKind::Cancelled,
            Self::StartFailed { .. } => CauseKind::StartFailed,
            Self::Lost(_) => CauseKind::Lost,
        }
    }

    /// The cause's name, as `--json` prints it.
    pub fn name(&self) -> &'static str {
        self.kind().name()
    }

    pub(crate) fn write(&self, writer: &mut Writer<'_>) {
        match self {
            Self::Exited(code) => writer.u8(1).u8(*code),
            Self::Signaled(signal) => writer.u8(2).u8(*signal),
            Self::TimedOut => writer.u8(3),
            Self::OutputLimit => writer.u8(4),
            Self::OomKilled(oom) => {
                oom.write(writer.u8(5));
                writer
            }
            Self::Cancelled(reason) => writer.u8(6).u8(*reason as u8),
            Self::StartFailed { stage, errno } => writer.u8(7).u8(*stage as u8).i32(*errno),
            Self::Lost(reason) => writer.u8(8).text(reason, MAX_TEXT),
        };
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        Ok(match reader.u8("cause")? {
            1 => Self::Exited(reader.u8("exit code")?),
            2 => Self::Signaled(signal(reader.u8("signal")?)?),
            3 => Self::TimedOut,
            4 => Self::OutputLimit,
            5 => Self::OomKilled(Oom::read(reader)?),
            6 => Self::Cancelled(CancelReason::from_wire(reader.u8("cancel reason")?)?),
            7 => Self::StartFailed {
                stage: StartStage::from_wire(reader.u8("start stage")?)?,
                errno: reader.i32("errno")?,
            },
            8 => Self::Lost(reader.text(MAX_TEXT, "lost reason")?),
            value => {
                return Err(WireError::Value {
                    field: "cause",
                    value: value.into(),
                });
            }
        })
    }
}

/// `ENOENT` of every Linux architecture.
const ENOENT: i32 = 2;

/// Checks a signal number: 1 to 64.
pub(crate) fn signal(value: u8) -> Result<u8, WireError> {
    match value {
        1..=64 => Ok(value),
        _ => Err(WireError::Value {
            field: "signal",
            value: value.into(),
        }),
    }
}

/// Defines an enum of one byte on the wire.
macro_rules! wire_enum {
    (
        $(#[$meta:meta])*
        $name:ident, $field:literal,
        $($(#[$variant_meta:meta])* $variant:ident = $value:literal => $text:literal,)+
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum $name {
            $($(#[$variant_meta])* $variant = $value,)+
        }

        impl $name {
            /// Every value.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The name that people see.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $text,)+ }
            }

            pub(crate) fn from_wire(value: u8) -> Result<Self, $crate::wire::WireError> {
                use $crate::wire::WireError;
                match value {
                    $($value => Ok(Self::$variant),)+
                    value => Err(WireError::Value { field: $field, value: value.into() }),
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}
pub(crate) use wire_enum;

wire_enum! {
    /// Which [`Cause`] it is.
    CauseKind, "cause",
    /// [`Cause::Exited`].
    Exited = 1 => "exited",
    /// [`Cause::Signaled`].
    Signaled = 2 => "signaled",
    /// [`Cause::TimedOut`].
    TimedOut = 3 => "timed_out",
    /// [`Cause::OutputLimit`].
    OutputLimit = 4 => "output_limit",
    /// [`Cause::OomKilled`].
    OomKilled = 5 => "oom_killed",
    /// [`Cause::Cancelled`].
    Cancelled = 6 => "cancelled",
    /// [`Cause::StartFailed`].
    StartFailed = 7 => "start_failed",
    /// [`Cause::Lost`].
    Lost = 8 => "lost",
}

wire_enum! {
    /// Who wanted an exec to end.
    CancelReason, "cancel reason",
    /// A client asked for it.
    Request = 1 => "request",
    /// The launcher was interrupted (SIGINT).
    Interrupt = 2 => "interrupt",
    /// The launcher was told to terminate (SIGTERM).
    Terminate = 3 => "terminate",
    /// Its client is gone.
    ClientLost = 4 => "client_lost",
}

wire_enum! {
    /// The step at which a start failed.
    StartStage, "start stage",
    /// Making the exec's cgroup leaf.
    Leaf = 1 => "leaf",
    /// Making its pipes or its terminal.
    Pipes = 2 => "pipes",
    /// Making the process.
    Fork = 3 => "fork",
    /// Session, terminal and signals of the new process.
    Session = 4 => "session",
    /// Namespaces and mounts of the new process.
    Isolate = 5 => "isolate",
    /// Changing user and groups.
    User = 6 => "user",
    /// Entering the working directory.
    Directory = 7 => "cwd",
    /// Executing the program.
    Execute = 8 => "exec",
}

wire_enum! {
    /// Whose memory limit was hit.
    OomScope, "oom scope",
    /// The exec's own.
    Exec = 1 => "exec",
    /// The whole guest's.
    Guest = 2 => "guest",
}

wire_enum! {
    /// One of an exec's two output streams.
    Stream, "stream",
    /// Standard output, or a terminal's output.
    Stdout = 1 => "stdout",
    /// Standard error.
    Stderr = 2 => "stderr",
}

impl Stream {
    /// Its place in the two-element arrays of this crate.
    pub fn index(self) -> usize {
        match self {
            Self::Stdout => 0,
            Self::Stderr => 1,
        }
    }
}

/// A kill for memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Oom {
    /// Whose limit.
    pub scope: OomScope,
    /// The process that was killed; 0 where the kernel did not say.
    pub pid: u32,
    /// Its name; empty where the kernel did not say.
    pub victim: String,
    /// The limit in bytes; 0 for none.
    pub limit: u64,
    /// The most memory that the scope used, in bytes.
    pub peak: u64,
}

impl Oom {
    pub(crate) fn write(&self, writer: &mut Writer<'_>) {
        writer
            .u8(self.scope as u8)
            .u32(self.pid)
            .text(&self.victim, MAX_TEXT)
            .u64(self.limit)
            .u64(self.peak);
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        Ok(Self {
            scope: OomScope::from_wire(reader.u8("oom scope")?)?,
            pid: reader.u32("oom pid")?,
            victim: reader.text(MAX_TEXT, "oom victim")?,
            limit: reader.u64("oom limit")?,
            peak: reader.u64("oom peak")?,
        })
    }
}

/// What became of one stream's bytes. `seen` is the sum of the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Read from the workload.
    pub seen: u64,
    /// Taken into the exec's store, to be sent: a prefix of what was seen.
    pub forwarded: u64,
    /// Thrown away after the limit, or because nobody was left to read them.
    pub dropped: u64,
}

/// The end of an exec, after its last byte.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Why it ended.
    pub cause: Cause,
    /// Counts of stdout and stderr, by [`Stream::index`].
    pub streams: [Counts; 2],
    /// Output was cut off while something still held a stream open.
    pub truncated: bool,
    /// The cap was hit, whatever the cause.
    pub limited: bool,
    /// No process of the exec was left when this was written.
    pub leaf_empty: bool,
    /// Nothing proves that the exec's processes could not leave its leaf.
    pub unproven: bool,
    /// From start to end in nanoseconds.
    pub wall_ns: u64,
    /// Processor time of all its processes in nanoseconds.
    pub cpu_ns: u64,
    /// The most memory that it used, in bytes; 0 if unknown.
    pub peak_memory: u64,
}

impl Record {
    /// The exit status that shells are given.
    pub fn status(&self) -> u8 {
        self.cause.status()
    }

    pub(crate) fn write(&self, writer: &mut Writer<'_>) {
        self.cause.write(writer);
        for counts in &self.streams {
            writer
                .u64(counts.seen)
                .u64(counts.forwarded)
                .u64(counts.dropped);
        }
        let bit = |set: bool, bit: u8| if set { bit } else { 0 };
        let flags = bit(self.truncated, 1)
            | bit(self.limited, 2)
            | bit(self.leaf_empty, 4)
            | bit(self.unproven, 8);
        writer
            .u8(flags)
            .u64(self.wall_ns)
            .u64(self.cpu_ns)
            .u64(self.peak_memory);
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        let cause = Cause::read(reader)?;
        let mut streams = [Counts::default(); 2];
        for counts in &mut streams {
            *counts = Counts {
                seen: reader.u64("seen")?,
                forwarded: reader.u64("forwarded")?,
                dropped: reader.u64("dropped")?,
            };
            if counts.forwarded.checked_add(counts.dropped) != Some(counts.seen) {
                return Err(WireError::Value {
                    field: "seen",
                    value: counts.seen,
                });
            }
        }
        let flags = reader.flags(15, "record flags")?;
        Ok(Self {
            cause,
            streams,
            truncated: flags & 1 != 0,
            limited: flags & 2 != 0,
            leaf_empty: flags & 4 != 0,
            unproven: flags & 8 != 0,
            wall_ns: reader.u64("wall time")?,
            cpu_ns: reader.u64("cpu time")?,
            peak_memory: reader.u64("peak memory")?,
        })
    }
}
