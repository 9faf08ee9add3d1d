//! Bytes on their way to a socket, of a side that sends only messages of its own.

use crate::message::TooLarge;

#[derive(Debug, Default)]
pub(crate) struct Outgoing {
    bytes: Vec<u8>,
    head: usize,
    sequence: u64,
}

impl Outgoing {
    /// Appends what `encode` writes under the next sequence number.
    pub(crate) fn push(
        &mut self,
        encode: impl FnOnce(u64, &mut Vec<u8>) -> Result<(), TooLarge>,
    ) -> Result<(), TooLarge> {
        encode(self.sequence + 1, &mut self.bytes)?;
        self.sequence += 1;
        Ok(())
    }

    /// The sequence number of the last frame.
    pub(crate) fn sequence(&self) -> u64 {
        self.sequence
    }

    pub(crate) fn pending(&self) -> &[u8] {
        &self.bytes[self.head..]
    }

    pub(crate) fn wrote(&mut self, count: usize) {
        self.head = self.bytes.len().min(self.head + count);
        // Shift when half is gone, so that each byte is moved at most once.
        if self.head * 2 >= self.bytes.len() {
            self.bytes.drain(..self.head);
            self.bytes.shrink_to(64 << 10);
            self.head = 0;
        }
    }
}
