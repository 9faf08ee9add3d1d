//! What an agent counts of itself.

use crate::wire::{Reader, WireError, Writer};

/// The agent's own numbers. The first four count since it began, the others are of now.
///
/// A machine that cannot be trusted says them: they are for people and graphs, never for a decision.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AgentCounters {
    /// Wake-ups of its event loop.
    pub wakeups: u64,
    /// Those of them that brought events of which none was handled.
    pub without_progress: u64,
    /// Events of a former owner of a descriptor, dropped.
    pub stale_events: u64,
    /// Descriptors no longer watched, because nobody handled their events.
    pub muted: u64,
    /// Sessions.
    pub sessions: u64,
    /// Execs that have no terminal record yet.
    pub execs: u64,
    /// Bytes of memory that it has in use itself, stored output included; 0 when its kernel does not say.
    pub resident_bytes: u64,
}

impl AgentCounters {
    /// Bytes on the wire: the question's number, then these.
    pub(super) const PAYLOAD: usize = 64;

    pub(super) fn write(&self, writer: &mut Writer<'_>) {
        writer
            .u64(self.wakeups)
            .u64(self.without_progress)
            .u64(self.stale_events)
            .u64(self.muted)
            .u64(self.sessions)
            .u64(self.execs)
            .u64(self.resident_bytes);
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        Ok(Self {
            wakeups: reader.u64("wake-ups")?,
            without_progress: reader.u64("wake-ups without progress")?,
            stale_events: reader.u64("stale events")?,
            muted: reader.u64("muted")?,
            sessions: reader.u64("sessions")?,
            execs: reader.u64("execs")?,
            resident_bytes: reader.u64("resident bytes")?,
        })
    }
}
