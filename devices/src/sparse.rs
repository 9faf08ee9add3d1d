//! Logging of what a guest or a client can provoke without end.

/// Counts occurrences and says which of them are worth a line: the first, second, fourth, eighth
/// ... so that 2^64 of them are 64 lines (HO07).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sparse(u64);

impl Sparse {
    /// Counts one; its number if it is to be told.
    pub(crate) fn tell(&mut self) -> Option<u64> {
        self.0 = self.0.saturating_add(1);
        self.0.is_power_of_two().then_some(self.0)
    }

    /// How many there were.
    pub(crate) fn count(self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ho07_a_million_occurrences_are_few_lines() {
        let mut sparse = Sparse::default();
        let told = (0..1_000_000).filter(|_| sparse.tell().is_some()).count();
        assert_eq!((told, sparse.count()), (20, 1_000_000));
    }
}
