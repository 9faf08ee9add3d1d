//! The first frame of a connection, both ways.

use crate::generation::GenerationId;
use crate::wire::{Reader, WireError, Writer};

/// First field of a session's hello.
pub const SESSION_MAGIC: [u8; 8] = *b"vmm-sess";
/// First field of a control connection's hello.
pub const CONTROL_MAGIC: [u8; 8] = *b"vmm-ctrl";
/// The versions that this crate speaks.
pub const VERSIONS: Versions = Versions {
    lowest: 1,
    highest: 1,
};

/// A range of protocol versions, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Versions {
    /// The oldest version spoken.
    pub lowest: u16,
    /// The newest version spoken.
    pub highest: u16,
}

impl Versions {
    /// The newest version that both sides speak.
    ///
    /// ```
    /// use vmm_protocol::Versions;
    ///
    /// let ours = Versions { lowest: 1, highest: 3 };
    /// assert_eq!(ours.common(Versions { lowest: 2, highest: 9 }), Some(3));
    /// assert_eq!(ours.common(Versions { lowest: 4, highest: 9 }), None);
    /// ```
    pub fn common(self, other: Self) -> Option<u16> {
        let highest = self.highest.min(other.highest);
        (highest >= self.lowest.max(other.lowest)).then_some(highest)
    }

    pub(crate) fn write(self, writer: &mut Writer<'_>) {
        writer.u16(self.lowest).u16(self.highest);
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        Ok(Self {
            lowest: reader.u16("lowest version")?,
            highest: reader.u16("highest version")?,
        })
    }
}

/// The hello of a session; the same from both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// The versions that the sender speaks.
    pub versions: Versions,
    /// What the sender can do beyond the version; a bit that the receiver does not know is ignored.
    pub features: u64,
    /// The life that the sender means (client) or is in (agent).
    pub generation: GenerationId,
}

impl Hello {
    /// The hello of this crate's version in a generation.
    pub fn new(generation: GenerationId) -> Self {
        Self {
            versions: VERSIONS,
            features: 0,
            generation,
        }
    }

    pub(crate) fn write(&self, writer: &mut Writer<'_>) {
        writer.raw(&SESSION_MAGIC);
        self.versions.write(writer);
        writer.u64(self.features);
        self.generation.write(writer);
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        magic(reader, SESSION_MAGIC)?;
        Ok(Self {
            versions: Versions::read(reader)?,
            features: reader.u64("features")?,
            generation: GenerationId::read(reader)?,
        })
    }
}

pub(crate) fn magic(reader: &mut Reader<'_>, expected: [u8; 8]) -> Result<(), WireError> {
    let found: [u8; 8] = reader.array("magic")?;
    if found != expected {
        return Err(WireError::Value {
            field: "magic",
            value: u64::from_le_bytes(found),
        });
    }
    Ok(())
}
