//! Which life of a sandbox something belongs to.

use std::fmt;

use crate::wire::{Reader, WireError, Writer};

/// One guest timeline in one process, by its public part: a counter and a random id.
///
/// The secret part, a nonce, is no part of this crate: the guest never learns it.
///
/// ```
/// use vmm_protocol::GenerationId;
///
/// let generation = GenerationId { counter: 7, public_id: 0xabcd << 112 };
/// assert_eq!(generation.to_string(), "7-abcd0000000000000000000000000000");
/// assert_eq!(generation.folder(), "g7-abcd0000");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct GenerationId {
    /// Goes up by one per start of that sandbox.
    pub counter: u64,
    /// Random, known to all.
    pub public_id: u128,
}

impl GenerationId {
    /// The name of the folder that holds this generation's sockets.
    pub fn folder(&self) -> String {
        format!("g{}-{:08x}", self.counter, self.public_id >> 96)
    }

    pub(crate) fn write(&self, writer: &mut Writer<'_>) {
        // Most significant byte first: the bytes on the wire then read like the printed id.
        writer.u64(self.counter).raw(&self.public_id.to_be_bytes());
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        Ok(Self {
            counter: reader.u64("generation counter")?,
            public_id: u128::from_be_bytes(reader.array("generation id")?),
        })
    }
}

impl fmt::Display for GenerationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{:032x}", self.counter, self.public_id)
    }
}
