//! The bytes of one output stream, in blocks, addressed by their offset in the stream.

use std::collections::VecDeque;

use crate::limits::MAX_DATA;

/// Bytes of a block: four full output frames. Blocks are allocated as zeroed memory that the kernel
/// hands out page by page, so a short output costs what it fills.
const BLOCK: usize = 4 * MAX_DATA;

/// An append-only sequence of bytes of which the front may be released.
#[derive(Debug)]
pub(super) struct Store {
    blocks: VecDeque<Box<[u8]>>,
    /// Emptied blocks, kept for the next need: a store at full speed neither allocates nor frees.
    spares: Vec<Box<[u8]>>,
    most_spares: usize,
    block: usize,
    base: u64,
    end: u64,
}

impl Store {
    /// A store that will hold at most about `most` bytes at a time, and keeps so many emptied blocks.
    pub(super) fn new(most: u64, most_spares: usize) -> Self {
        let block = usize::try_from(most).unwrap_or(BLOCK).clamp(1, BLOCK);
        Self {
            blocks: VecDeque::new(),
            spares: Vec::new(),
            most_spares,
            block,
            base: 0,
            end: 0,
        }
    }

    /// The offset of the first byte that is still here.
    pub(super) fn earliest(&self) -> u64 {
        self.base
    }

    /// The offset after the last byte.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// Where the next bytes go: at least one, at most `limit` of them.
    pub(super) fn space(&mut self, limit: u64) -> &mut [u8] {
        let used = (self.end - self.base) as usize;
        if used == self.blocks.len() * self.block {
            let block = self
                .spares
                .pop()
                .unwrap_or_else(|| vec![0; self.block].into_boxed_slice());
            self.blocks.push_back(block);
        }
        let at = used % self.block;
        let limit = usize::try_from(limit)
            .unwrap_or(usize::MAX)
            .min(self.block - at);
        match self.blocks.back_mut() {
            Some(block) => &mut block[at..at + limit],
            None => &mut [],
        }
    }

    /// `count` bytes were written to the front of [`space`](Self::space).
    pub(super) fn commit(&mut self, count: usize) {
        let capacity = self.base + (self.blocks.len() * self.block) as u64;
        debug_assert!(
            self.end + count as u64 <= capacity,
            "more bytes than there was space for"
        );
        self.end = capacity.min(self.end + count as u64);
    }

    /// The bytes at an offset, as far as they lie together, at most `limit`; empty where there are
    /// none.
    pub(super) fn slice(&self, offset: u64, limit: usize) -> &[u8] {
        if offset < self.base || offset >= self.end {
            return &[];
        }
        let at = (offset - self.base) as usize;
        let (index, from) = (at / self.block, at % self.block);
        let length = (self.block - from)
            .min((self.end - offset) as usize)
            .min(limit);
        self.blocks
            .get(index)
            .map_or(&[], |block| &block[from..from + length])
    }

    /// Bytes before this offset may go; whole blocks of them do.
    pub(super) fn release(&mut self, offset: u64) {
        while self.release_block(offset) {}
    }

    /// One block goes, if all of it lies before this offset; whether one did.
    pub(super) fn release_block(&mut self, offset: u64) -> bool {
        if offset.min(self.end) < self.base + self.block as u64 {
            return false;
        }
        let Some(block) = self.blocks.pop_front() else {
            return false;
        };
        self.base += self.block as u64;
        if self.spares.len() < self.most_spares {
            self.spares.push(block);
        }
        true
    }

    /// Nothing more will come: what is held beyond the bytes themselves goes. The answer is what is left, in bytes.
    pub(super) fn seal(&mut self) -> u64 {
        self.spares = Vec::new();
        let used = (self.end - self.base) as usize;
        self.blocks.truncate(used.div_ceil(self.block));
        if let (Some(last), rest @ 1..) = (self.blocks.back_mut(), used % self.block) {
            *last = last[..rest].into();
        }
        self.blocks.iter().map(|block| block.len() as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn append(store: &mut Store, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let space = store.space(bytes.len() as u64);
            let count = space.len();
            space.copy_from_slice(&bytes[..count]);
            store.commit(count);
            bytes = &bytes[count..];
        }
    }

    fn collect(store: &Store, from: u64) -> Vec<u8> {
        let mut all = Vec::new();
        loop {
            let piece = store.slice(from + all.len() as u64, 1000);
            if piece.is_empty() {
                return all;
            }
            all.extend_from_slice(piece);
        }
    }

    #[test]
    fn bytes_come_back_from_any_offset() {
        let bytes: Vec<u8> = (0..700_000_u32).map(|i| (i % 251) as u8).collect();
        let mut store = Store::new(u64::MAX, 4);
        append(&mut store, &bytes);
        for from in [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 699_999, 700_000] {
            assert_eq!(collect(&store, from as u64), bytes[from..], "from {from}");
        }
    }

    #[test]
    fn released_blocks_are_used_again() {
        let mut store = Store::new(8, 1);
        for round in 0_u8..100 {
            append(&mut store, &[round; 8]);
            assert_eq!(collect(&store, u64::from(round) * 8), [round; 8]);
            store.release(store.end());
            assert!(store.blocks.is_empty() && store.spares.len() == 1);
        }
        assert_eq!(store.earliest(), 800);
        assert!(store.slice(0, 8).is_empty());
    }

    #[test]
    fn sealed_store_has_its_bytes_and_nothing_else() {
        let mut store = Store::new(10, 4);
        append(&mut store, &[1; 27]);
        store.release(15);
        assert_eq!(store.seal(), 17);
        assert_eq!(collect(&store, 10), [1; 17]);
        store.release(u64::MAX);
        assert_eq!(store.seal(), 7);
        let mut empty = Store::new(10, 4);
        assert_eq!(empty.seal(), 0);
        empty.space(3);
        assert_eq!(empty.seal(), 0);
    }

    #[test]
    fn release_keeps_what_is_not_acknowledged() {
        let mut store = Store::new(10, 4);
        append(&mut store, &[1; 25]);
        store.release(19);
        assert_eq!((store.earliest(), store.end()), (10, 25));
        store.release(u64::MAX);
        assert_eq!((store.earliest(), store.end()), (20, 25));
    }
}
