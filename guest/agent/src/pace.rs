//! How eagerly the agent takes the processor from its workloads.
//!
//! A workload that floods would be switched away from at each of its writes, as the agent that waits for them has
//! slept and comes first. On a guest's only processor that costs two switches for each 64 KiB. While it goes on, the
//! agent lets itself be woken without taking the processor away: the workload fills its pipe, and all of that goes in
//! one turn. What the agent does for others is late by a scheduler's tick (4 ms) at most meanwhile, and only where
//! something else keeps the processor busy.

/// Output bytes of a turn that make it one of a flood.
const FLOOD: usize = 32 << 10;
/// Turns of a flood after which it is believed.
const BELIEF: u32 = 16;
/// What another turn takes away.
const DOUBT: u32 = 4;

/// Pure: whether the agent should be relaxed, by what its turns were like.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    score: u32,
    relaxed: bool,
}

impl Pace {
    /// A turn is over in which so many bytes of output came; what is to be changed.
    pub(crate) fn turn(&mut self, bytes: usize) -> Option<bool> {
        self.score = match bytes {
            FLOOD.. => (self.score + 1).min(BELIEF),
            _ => self.score.saturating_sub(DOUBT),
        };
        let relaxed = match self.score {
            0 => false,
            BELIEF => true,
            _ => self.relaxed,
        };
        (std::mem::replace(&mut self.relaxed, relaxed) != relaxed).then_some(relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_lasting_flood_relaxes_and_a_few_other_turns_end_it() {
        let mut pace = Pace::default();
        for _ in 1..BELIEF {
            assert_eq!(pace.turn(FLOOD), None);
        }
        assert_eq!(pace.turn(FLOOD), Some(true));
        // Credit and timers come in between.
        for _ in 0..100 {
            assert_eq!(pace.turn(0), None);
            for _ in 0..DOUBT {
                assert_eq!(pace.turn(FLOOD), None);
            }
        }
        let turns = (1..100).find(|_| pace.turn(FLOOD - 1) == Some(false));
        assert_eq!(turns, Some(4));
        assert_eq!(pace.turn(0), None);
    }
}
