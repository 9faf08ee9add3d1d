//! The execs of a guest, as a list of them tells.

use crate::cause::{CauseKind, wire_enum};
use crate::limits::{MAX_COMMAND, MAX_LISTED};
use crate::wire::{Reader, WireError, Writer};

wire_enum! {
    /// What an exec is doing.
    ExecState, "exec state",
    /// Its process has not become its program yet.
    Starting = 1 => "starting",
    /// Its main process runs.
    Running = 2 => "running",
    /// Its output has no room: the workload waits for a reader.
    Waiting = 3 => "waiting",
    /// Its main process is gone, or was killed; its streams or its leaf are not empty yet.
    Ending = 4 => "ending",
    /// It has its record.
    Ended = 5 => "ended",
}

/// One exec in a list. Times are ages at the moment of the answer, in nanoseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecInfo {
    /// Its number in the guest.
    pub exec: u64,
    /// Its main process in the guest; 0 if there never was one.
    pub pid: u32,
    /// What it is doing.
    pub state: ExecState,
    /// It outlives its client, and is kept until it is released.
    pub kept: bool,
    /// Clients that wait for it, or take its output.
    pub clients: u32,
    /// The first offsets of stdout and stderr that can be had.
    pub earliest: [u64; 2],
    /// The lengths of stdout and stderr so far.
    pub length: [u64; 2],
    /// Bytes of the budget for stores that it has: what it may take while it runs, what it takes once it has ended.
    pub store_bytes: u64,
    /// Since it was asked for.
    pub age_ns: u64,
    /// Since something of it moved: a start, output, stdin that was taken, an end.
    pub progress_ns: u64,
    /// Processor time of all its processes.
    pub cpu_ns: u64,
    /// Once it has ended: why, and the exit status that shells are given.
    pub end: Option<(CauseKind, u8)>,
    /// The command, for people: cut to [`MAX_COMMAND`] bytes.
    pub command: String,
}

impl ExecInfo {
    fn write(&self, writer: &mut Writer<'_>) {
        writer.u64(self.exec).u32(self.pid).u8(self.state as u8);
        writer.u8(self.kept.into()).u32(self.clients);
        for value in self.earliest.iter().chain(&self.length) {
            writer.u64(*value);
        }
        writer.u64(self.store_bytes).u64(self.age_ns);
        writer.u64(self.progress_ns).u64(self.cpu_ns);
        let (cause, status) = self
            .end
            .map_or((0, 0), |(cause, status)| (cause as u8, status));
        writer.u8(cause).u8(status).text(&self.command, MAX_COMMAND);
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        let exec = reader.u64("exec number")?;
        let pid = reader.u32("pid")?;
        let state = ExecState::from_wire(reader.u8("exec state")?)?;
        let kept = reader.bool("kept flag")?;
        let clients = reader.u32("clients")?;
        let mut offset = || reader.u64("offset");
        let (earliest, length) = ([offset()?, offset()?], [offset()?, offset()?]);
        let store_bytes = reader.u64("store bytes")?;
        let age_ns = reader.u64("age")?;
        let progress_ns = reader.u64("age of progress")?;
        let cpu_ns = reader.u64("cpu time")?;
        let (cause, status) = (reader.u8("cause")?, reader.u8("status")?);
        let end = match cause {
            0 => None,
            cause => Some((CauseKind::from_wire(cause)?, status)),
        };
        let command = reader.text(MAX_COMMAND, "command")?;
        Ok(Self {
            exec,
            pid,
            state,
            kept,
            clients,
            earliest,
            length,
            store_bytes,
            age_ns,
            progress_ns,
            cpu_ns,
            end,
            command,
        })
    }
}

/// A part of a list: the execs behind the one that was named, in the order of their numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExecsPage {
    /// At most [`MAX_LISTED`].
    pub execs: Vec<ExecInfo>,
    /// There are more behind the last of these.
    pub more: bool,
}

impl ExecsPage {
    pub(crate) fn write(&self, writer: &mut Writer<'_>) {
        writer.u8(self.more.into()).u32(self.execs.len() as u32);
        for exec in &self.execs {
            exec.write(writer);
        }
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        let more = reader.bool("more flag")?;
        let count = reader.count(1, "execs")?;
        if count > MAX_LISTED {
            return Err(WireError::Long {
                field: "execs",
                length: count as u64,
                limit: MAX_LISTED as u64,
            });
        }
        let execs = (0..count)
            .map(|_| ExecInfo::read(reader))
            .collect::<Result<_, _>>()?;
        Ok(Self { execs, more })
    }
}
