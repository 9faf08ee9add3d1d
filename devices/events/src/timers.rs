//! Deadlines in order. Pure: the time is an argument.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Names one deadline, for cancelling it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TimerId {
    deadline: Instant,
    sequence: u64,
}

/// A set of deadlines, each with what to do then. Equal ones fire in the order of insertion.
///
/// A tree rather than a binary heap: a cancelled deadline leaves at once, so a million short
/// commands with hour-long timeouts leave nothing behind.
///
/// ```
/// use std::time::{Duration, Instant};
/// use vmm_events::Timers;
///
/// let start = Instant::now();
/// let mut timers = Timers::new();
/// let late = timers.insert(start + Duration::from_secs(2), "late");
/// timers.insert(start + Duration::from_secs(1), "soon");
/// assert_eq!(timers.timeout(start), Some(Duration::from_secs(1)));
/// assert_eq!(timers.expired(start + Duration::from_secs(3)), Some("soon"));
/// assert_eq!(timers.cancel(late), Some("late"));
/// assert_eq!(timers.timeout(start), None);
/// ```
#[derive(Debug)]
pub struct Timers<K> {
    entries: BTreeMap<TimerId, K>,
    sequence: u64,
}

impl<K> Timers<K> {
    /// No deadlines.
    pub fn new() -> Self {
        Self {
            entries: BTreeMap::new(),
            sequence: 0,
        }
    }

    /// Adds a deadline.
    pub fn insert(&mut self, deadline: Instant, key: K) -> TimerId {
        self.sequence += 1;
        let id = TimerId {
            deadline,
            sequence: self.sequence,
        };
        self.entries.insert(id, key);
        id
    }

    /// Takes a deadline out, if it has not fired.
    pub fn cancel(&mut self, id: TimerId) -> Option<K> {
        self.entries.remove(&id)
    }

    /// How long to sleep: until the first deadline, zero if it has passed, `None` without one.
    pub fn timeout(&self, now: Instant) -> Option<Duration> {
        self.entries
            .first_key_value()
            .map(|(id, _)| id.deadline.saturating_duration_since(now))
    }

    /// Takes out the first deadline that has passed; call it until `None`.
    pub fn expired(&mut self, now: Instant) -> Option<K> {
        let entry = self.entries.first_entry()?;
        (entry.key().deadline <= now).then(|| entry.remove())
    }

    /// How many deadlines are set.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether none is set.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

impl<K> Default for Timers<K> {
    fn default() -> Self {
        Self::new()
    }
}
