//! Who takes an exec's output, and how far each has come.

use std::collections::BTreeMap;

/// Someone who takes the output of one exec: made by [`Exec::attach`](super::Exec::attach), over with
/// [`Exec::detach`](super::Exec::detach).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reader(u64);

impl Reader {
    /// The client that has started the exec; a detached exec begins without it.
    pub const FIRST: Self = Self(0);
}

/// Bytes count as consumed once the slowest reader has them. Without any reader it stays at what the readers before
/// had, so that one that comes back finds what is not consumed.
#[derive(Debug)]
pub(super) struct Readers {
    next: u64,
    positions: BTreeMap<Reader, [u64; 2]>,
    floor: [u64; 2],
}

impl Readers {
    /// With the first reader at the beginning, or with none.
    pub(super) fn new(first: bool) -> Self {
        Self {
            next: 1,
            positions: first
                .then_some((Reader::FIRST, [0; 2]))
                .into_iter()
                .collect(),
            floor: [0; 2],
        }
    }

    /// One more, from an offset of each stream on.
    pub(super) fn attach(&mut self, from: [u64; 2]) -> Reader {
        let reader = Reader(self.next);
        self.next += 1;
        self.positions.insert(reader, from);
        reader
    }

    /// A reader has consumed bytes of streams that are this long.
    pub(super) fn consumed(&mut self, reader: Reader, bytes: [u64; 2], lengths: [u64; 2]) {
        if let Some(position) = self.positions.get_mut(&reader) {
            for index in [0, 1] {
                position[index] = position[index]
                    .saturating_add(bytes[index])
                    .min(lengths[index]);
            }
            self.rise();
        }
    }

    /// A reader takes no more.
    pub(super) fn detach(&mut self, reader: Reader) {
        self.positions.remove(&reader);
        self.rise();
    }

    /// The offsets before which nobody needs a byte.
    pub(super) fn consumed_by_all(&self) -> [u64; 2] {
        self.slowest().unwrap_or(self.floor)
    }

    fn slowest(&self) -> Option<[u64; 2]> {
        self.positions
            .values()
            .copied()
            .reduce(|a, b| [a[0].min(b[0]), a[1].min(b[1])])
    }

    fn rise(&mut self) {
        if let Some(slowest) = self.slowest() {
            for (floor, slowest) in self.floor.iter_mut().zip(slowest) {
                *floor = slowest.max(*floor);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTHS: [u64; 2] = [1000, 1000];

    #[test]
    fn slowest_of_two_readers_counts_until_it_goes() {
        let mut readers = Readers::new(true);
        readers.consumed(Reader::FIRST, [500, 10], LENGTHS);
        let second = readers.attach([200, 20]);
        assert_eq!(readers.consumed_by_all(), [200, 10], "it still needs them");
        readers.consumed(second, [5000, 0], LENGTHS);
        assert_eq!(readers.consumed_by_all(), [500, 10], "never beyond the end");
        readers.detach(Reader::FIRST);
        assert_eq!(readers.consumed_by_all(), [1000, 20]);
        readers.detach(second);
        assert_eq!(readers.consumed_by_all(), [1000, 20], "as they left it");
        readers.consumed(second, [1, 1], LENGTHS);
        assert_eq!(
            readers.consumed_by_all(),
            [1000, 20],
            "one that is gone says nothing"
        );
    }
}
