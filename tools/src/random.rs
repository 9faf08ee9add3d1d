//! Numbers to choose by, the same for the same seed everywhere.

/// xorshift64. A seed of zero would yield nothing but zeros, so it is taken for another.
pub struct Random(u64);

impl Random {
    /// A sequence of its own for each seed.
    pub fn new(seed: u64) -> Self {
        Self(if seed == 0 { SPREAD } else { seed })
    }

    /// A sequence for one of several users of the same seed, unlike those of the others.
    pub fn part(seed: u64, number: u64) -> Self {
        Self::new(seed.wrapping_add(number.wrapping_add(1).wrapping_mul(SPREAD)))
    }

    /// The next number below `bound`, which is not zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// 2^64 divided by the golden ratio: neighbours become far apart.
pub const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

#[cfg(test)]
mod tests {
    use super::*;

    fn first(mut random: Random) -> Vec<u64> {
        (0..16).map(|_| random.below(1 << 40)).collect()
    }

    #[test]
    fn sequences_repeat_with_the_seed_and_differ_between_parts() {
        for seed in [0, 1, 2, u64::MAX] {
            assert_eq!(first(Random::part(seed, 0)), first(Random::part(seed, 0)));
            assert_ne!(first(Random::part(seed, 0)), first(Random::part(seed, 1)));
            assert!(first(Random::new(seed)).iter().any(|number| *number != 0));
        }
    }
}
