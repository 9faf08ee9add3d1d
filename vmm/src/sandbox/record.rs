//! How a life ended, for those who ask later.

use serde_json::{Value, json};
use vmm_protocol::GenerationId;

/// In what way a life ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Its main workload ended.
    Finished,
    /// It was asked to stop, and did.
    Stopped,
    /// It was ended at once.
    Killed,
    /// Its guest ended by itself.
    Guest,
    /// It could not start, or its monitor failed.
    Failed,
}

impl End {
    /// Its name in records.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Stopped => "stopped",
            Self::Killed => "killed",
            Self::Guest => "guest_ended",
            Self::Failed => "failed",
        }
    }
}

/// The last record of a sandbox.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// In what way.
    pub end: End,
    /// In plain words.
    pub reason: String,
    /// The exit status of the process that ran it.
    pub status: u8,
    /// The main workload's exit object, if there was one.
    pub exit: Option<Value>,
}

impl Record {
    pub(super) fn json(&self, generation: GenerationId, started: f64, ended: f64) -> Value {
        json!({
            "schema": 1,
            "generation": generation.to_string(),
            "end": self.end.name(),
            "reason": self.reason,
            "status": self.status,
            "exit": self.exit,
            "started": started,
            "ended": ended,
        })
    }
}
