//! Output bytes in buffers that are used again.
//!
//! A stream at full speed would otherwise allocate and free a buffer a frame, and an allocator that
//! gives large ones back to the kernel has it clear and map fresh pages for every one of them.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

/// Buffers that a session keeps for its next frames.
const SPARES: usize = 8;
/// The largest that is kept, and the least that is worth it.
const KEPT: std::ops::RangeInclusive<usize> = 4 << 10..=64 << 10;

/// Bytes of an exec's output. They read as a slice; [`Bytes::into_vec`] takes them away.
#[derive(Clone, Default)]
pub struct Bytes {
    bytes: Vec<u8>,
    shelf: Option<Arc<Shelf>>,
}

impl Bytes {
    /// The bytes as a vector of the caller's own, without a copy.
    pub fn into_vec(mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }

    pub(crate) fn extend_from_slice(&mut self, more: &[u8]) {
        self.bytes.extend_from_slice(more);
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl AsRef<[u8]> for Bytes {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self { bytes, shelf: None }
    }
}

impl From<&[u8]> for Bytes {
    fn from(bytes: &[u8]) -> Self {
        bytes.to_vec().into()
    }
}

impl PartialEq for Bytes {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes
    }
}

impl Eq for Bytes {}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bytes.fmt(f)
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        if let Some(shelf) = self.shelf.take() {
            shelf.put(std::mem::take(&mut self.bytes));
        }
    }
}

/// Where a session's buffers wait for their next use: at most [`SPARES`] of at most 64 KiB.
#[derive(Debug, Default)]
pub(crate) struct Shelf {
    spares: Mutex<Vec<Vec<u8>>>,
}

impl Shelf {
    /// A copy of `bytes`, in a buffer from the shelf if there is one.
    pub(crate) fn copy(self: &Arc<Self>, bytes: &[u8]) -> Bytes {
        let spare = if *KEPT.start() <= bytes.len() {
            self.lock().pop()
        } else {
            None
        };
        let mut buffer = spare.unwrap_or_default();
        buffer.extend_from_slice(bytes);
        Bytes {
            bytes: buffer,
            shelf: Some(Arc::clone(self)),
        }
    }

    fn put(&self, mut buffer: Vec<u8>) {
        let mut spares = self.lock();
        if KEPT.contains(&buffer.capacity()) && spares.len() < SPARES {
            buffer.clear();
            spares.push(buffer);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Vec<u8>>> {
        // Nothing in here can be left half done.
        self.spares.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_used_again_and_carry_nothing_over() {
        let shelf = Arc::new(Shelf::default());
        let first = shelf.copy(&[1; 20_000]);
        let place = first.as_ptr();
        drop(first);
        let second = shelf.copy(&[2; 10_000]);
        assert_eq!(second.as_ptr(), place);
        assert_eq!(*second, [2; 10_000]);
    }

    #[test]
    fn the_shelf_holds_few_and_none_that_are_large_small_or_taken_away() {
        let shelf = Arc::new(Shelf::default());
        let many: Vec<Bytes> = (0..3 * SPARES).map(|_| shelf.copy(&[0; 8192])).collect();
        drop(many);
        assert_eq!(shelf.lock().len(), SPARES);
        shelf.lock().clear();
        drop(shelf.copy(&[0; 100]));
        drop(shelf.copy(&[0; 70_000]));
        let taken = shelf.copy(&[7; 8192]).into_vec();
        assert_eq!(taken, [7; 8192]);
        assert_eq!(shelf.lock().len(), 0);
    }
}
