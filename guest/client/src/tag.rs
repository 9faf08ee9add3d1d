//! The name of a generation as a client knows it: with the secret part.

use std::fmt;

use vmm_protocol::GenerationId;

/// A generation with its nonce, as read from the sandbox's `current.json`.
///
/// The nonce appears in no `Debug` or `Display` output; only [`connect_line`](Self::connect_line)
/// has it.
///
/// ```
/// use vmm_client::GenerationTag;
/// use vmm_protocol::GenerationId;
///
/// let tag = GenerationTag::new(GenerationId { counter: 7, public_id: 1 }, [0xab; 16]);
/// assert_eq!(tag.connect_line(1000), format!("CONNECT 1000 7-{}\n", "ab".repeat(16)));
/// assert!(!format!("{tag:?}").contains("abab"));
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct GenerationTag {
    id: GenerationId,
    nonce: [u8; 16],
}

impl GenerationTag {
    /// A generation and its nonce.
    pub fn new(id: GenerationId, nonce: [u8; 16]) -> Self {
        Self { id, nonce }
    }

    /// The public part.
    pub fn id(&self) -> GenerationId {
        self.id
    }

    /// The line that asks this generation, and no other, for a port of its guest.
    pub fn connect_line(&self, port: u32) -> String {
        let nonce = u128::from_be_bytes(self.nonce);
        format!("CONNECT {port} {}-{nonce:032x}\n", self.id.counter)
    }
}

impl fmt::Debug for GenerationTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GenerationTag")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

impl fmt::Display for GenerationTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.id.fmt(f)
    }
}
