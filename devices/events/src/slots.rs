//! The decisions of the loop, apart from its I/O: which event is whose, and when a miss mutes.

use std::fmt;
use std::ops::{BitOr, BitOrAssign};
use std::os::fd::RawFd;

/// What an owner wants to be told of; level-triggered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interest(u8);

impl Interest {
    /// Nothing at all: the descriptor leaves epoll, so that not even a hang-up, which epoll
    /// reports unasked and level-triggered, can wake the loop.
    pub const NONE: Self = Self(0);
    /// Data or an end of file to read.
    pub const READ: Self = Self(1);
    /// Room to write.
    pub const WRITE: Self = Self(1 << 1);
    /// An exceptional condition (`EPOLLPRI`): how cgroup2 and sysfs files announce a change.
    pub const PRIORITY: Self = Self(1 << 2);
    /// The peer has shut down its writing side.
    pub const PEER_CLOSED: Self = Self(1 << 3);

    /// Whether all of `other` is in this interest.
    pub fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether nothing is wanted.
    pub fn is_none(self) -> bool {
        self.0 == 0
    }

    /// This interest with `other` in it, or not, by `wanted`.
    #[must_use]
    pub fn with(self, other: Self, wanted: bool) -> Self {
        if wanted {
            Self(self.0 | other.0)
        } else {
            Self(self.0 & !other.0)
        }
    }
}

impl BitOr for Interest {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitOrAssign for Interest {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}

/// What the kernel says of a descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Readiness {
    pub(crate) asked: Interest,
    pub(crate) hung_up: bool,
    pub(crate) failed: bool,
}

impl Readiness {
    /// A read will not block: data, an end, or an error to be collected.
    ///
    /// ```
    /// # use vmm_events::Readiness;
    /// assert!(!Readiness::default().readable());
    /// ```
    pub fn readable(self) -> bool {
        self.asked.contains(Interest::READ) || self.hung_up || self.failed
    }

    /// A write will not block: room, or an error to be collected.
    pub fn writable(self) -> bool {
        self.asked.contains(Interest::WRITE) || self.failed
    }

    /// A priority event is there.
    pub fn priority(self) -> bool {
        self.asked.contains(Interest::PRIORITY)
    }

    /// The peer has shut down its writing side (only when asked for).
    pub fn peer_closed(self) -> bool {
        self.asked.contains(Interest::PEER_CLOSED)
    }

    /// Both directions are over.
    pub fn hung_up(self) -> bool {
        self.hung_up
    }

    /// An error waits on the descriptor.
    pub fn failed(self) -> bool {
        self.failed
    }

    fn is_empty(self) -> bool {
        self.asked.is_none() && !self.hung_up && !self.failed
    }

    fn within(self, interest: Interest) -> Self {
        Self {
            asked: Interest(self.asked.0 & interest.0),
            ..self
        }
    }
}

/// What became of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Somebody acted on it.
    Handled,
    /// Nobody did. One is forgiven per slot generation and revision.
    Unhandled,
}

/// What the loop has done so far; for tests and metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Returns from the kernel with an event or a timeout.
    pub wakeups: u64,
    /// Those of them that brought events of which none was handled.
    pub without_progress: u64,
    /// Events of a former owner or interest, dropped.
    pub stale: u64,
    /// Registrations taken out after their second miss.
    pub muted: u64,
}

/// Names one registration: a slot and the owner it had at that time.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) slot: u32,
    pub(crate) generation: u32,
}

impl Key {
    pub(crate) fn to_data(self) -> u64 {
        (u64::from(self.generation) << 32) | u64::from(self.slot)
    }

    pub(crate) fn from_data(data: u64) -> Self {
        // The halves are cut on purpose.
        #[allow(clippy::cast_possible_truncation)]
        Self {
            slot: data as u32,
            generation: (data >> 32) as u32,
        }
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.slot, self.generation)
    }
}

/// What the I/O side has to do to epoll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Nothing,
    Add(Interest),
    Modify(Interest),
    Delete,
}

struct Slot<T> {
    generation: u32,
    revision: u64,
    interest: Interest,
    /// Whether epoll holds the descriptor.
    armed: bool,
    missed: bool,
    fd: RawFd,
    token: Option<T>,
}

/// The table of registrations.
pub(crate) struct Slots<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

impl<T: Clone> Slots<T> {
    pub(crate) fn new() -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
        }
    }

    /// Takes a slot; `None` when all 2^32 are taken.
    pub(crate) fn insert(&mut self, fd: RawFd, interest: Interest, token: T) -> Option<Key> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                let slot = u32::try_from(self.slots.len()).ok()?;
                self.slots.push(Slot {
                    generation: 0,
                    revision: 0,
                    interest: Interest::NONE,
                    armed: false,
                    missed: false,
                    fd,
                    token: None,
                });
                slot
            }
        };
        let entry = self.slots.get_mut(slot as usize)?;
        entry.revision = 0;
        entry.interest = interest;
        entry.armed = !interest.is_none();
        entry.missed = false;
        entry.fd = fd;
        entry.token = Some(token);
        Some(Key {
            slot,
            generation: entry.generation,
        })
    }

    /// Gives a slot back; from here on an event that bears the key is stale.
    pub(crate) fn remove(&mut self, key: Key) -> Change {
        let Some(entry) = self.live_mut(key) else {
            return Change::Nothing;
        };
        let armed = entry.armed;
        entry.generation = entry.generation.wrapping_add(1);
        entry.armed = false;
        entry.token = None;
        self.free.push(key.slot);
        if armed {
            Change::Delete
        } else {
            Change::Nothing
        }
    }

    /// Another interest is a new revision; the same one changes nothing, so that an owner may
    /// state it in every round without forgiving its own misses.
    pub(crate) fn modify(&mut self, key: Key, interest: Interest) -> Change {
        match self.live_mut(key) {
            Some(entry) if entry.interest != interest => Self::revise(entry, interest),
            _ => Change::Nothing,
        }
    }

    /// A new revision of the same interest.
    pub(crate) fn renew(&mut self, key: Key) -> Change {
        match self.live_mut(key) {
            Some(entry) => Self::revise(entry, entry.interest),
            None => Change::Nothing,
        }
    }

    fn revise(entry: &mut Slot<T>, interest: Interest) -> Change {
        let was_armed = entry.armed;
        entry.revision += 1;
        entry.missed = false;
        entry.interest = interest;
        entry.armed = !interest.is_none();
        match (was_armed, entry.armed) {
            (true, true) => Change::Modify(interest),
            (false, true) => Change::Add(interest),
            (true, false) => Change::Delete,
            (false, false) => Change::Nothing,
        }
    }

    /// The owner of an event and what of it is still wanted; `None` when it is stale.
    pub(crate) fn deliver(&self, key: Key, readiness: Readiness) -> Option<(T, Readiness, u64)> {
        let entry = self.slots.get(key.slot as usize)?;
        let former = entry.generation != key.generation && !crate::negative_control("VS04");
        if former || !entry.armed {
            return None;
        }
        let readiness = readiness.within(entry.interest);
        if readiness.is_empty() {
            return None;
        }
        Some((entry.token.clone()?, readiness, entry.revision))
    }

    /// Notes a miss; the descriptor to take out of epoll when it was the second one of this
    /// revision.
    pub(crate) fn miss(&mut self, key: Key, revision: u64) -> Option<RawFd> {
        let entry = self.live_mut(key)?;
        if entry.revision != revision || !entry.armed {
            return None;
        }
        if !entry.missed {
            entry.missed = true;
            return None;
        }
        entry.armed = false;
        Some(entry.fd)
    }

    /// Undoes the `armed` of a change that the kernel refused.
    pub(crate) fn disarm(&mut self, key: Key) {
        if let Some(entry) = self.live_mut(key) {
            entry.armed = false;
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    fn live_mut(&mut self, key: Key) -> Option<&mut Slot<T>> {
        self.slots
            .get_mut(key.slot as usize)
            .filter(|entry| entry.generation == key.generation && entry.token.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const READABLE: Readiness = Readiness {
        asked: Interest::READ,
        hung_up: false,
        failed: false,
    };

    #[test]
    fn vs04_an_event_of_a_former_owner_is_stale() {
        let mut slots = Slots::new();
        let first = slots.insert(3, Interest::READ, 'a').unwrap();
        slots.remove(first);
        let second = slots.insert(3, Interest::READ, 'b').unwrap();
        assert_eq!(first.slot, second.slot);
        assert!(slots.deliver(first, READABLE).is_none());
        assert_eq!(slots.deliver(second, READABLE).unwrap().0, 'b');
    }

    #[test]
    fn ev03_second_miss_of_a_revision_deletes_and_a_new_revision_is_armed_again() {
        let mut slots = Slots::new();
        let key = slots.insert(3, Interest::READ, ()).unwrap();
        assert_eq!(slots.miss(key, 0), None);
        assert_eq!(slots.miss(key, 0), Some(3));
        assert!(slots.deliver(key, READABLE).is_none());
        assert_eq!(slots.modify(key, Interest::READ), Change::Nothing);
        assert_eq!(slots.renew(key), Change::Add(Interest::READ));
        let (_, _, revision) = slots.deliver(key, READABLE).unwrap();
        // A miss of the old revision, answered late, costs the new one nothing.
        assert_eq!(slots.miss(key, 0), None);
        assert_eq!(slots.miss(key, revision), None);
        assert_eq!(slots.miss(key, revision), Some(3));
    }

    #[test]
    fn ev03_an_event_is_cut_to_the_interest_that_holds_when_it_is_delivered() {
        let mut slots = Slots::new();
        let key = slots
            .insert(3, Interest::READ | Interest::WRITE, ())
            .unwrap();
        slots.modify(key, Interest::WRITE);
        assert!(slots.deliver(key, READABLE).is_none());
        slots.modify(key, Interest::NONE);
        let hung_up = Readiness {
            hung_up: true,
            ..Readiness::default()
        };
        assert!(
            slots.deliver(key, hung_up).is_none(),
            "no interest, not even in a hang-up"
        );
    }

    #[test]
    fn keys_survive_the_epoll_data() {
        let key = Key {
            slot: 0xdead_beef,
            generation: 0x1234_5678,
        };
        assert_eq!(Key::from_data(key.to_data()), key);
    }

    proptest! {
        /// Whatever the order of operations, `armed` and the changes told to epoll agree.
        #[test]
        fn ev03_changes_always_match_what_epoll_holds(
            ops in proptest::collection::vec(0u8..6, 1..200),
        ) {
            let mut slots = Slots::new();
            let mut live: Vec<(Key, bool)> = Vec::new();
            for op in ops {
                if op == 0 || live.is_empty() {
                    live.push((slots.insert(3, Interest::READ, ()).unwrap(), true));
                    continue;
                }
                let at = usize::from(op) % live.len();
                let (key, held) = live[at];
                let change = match op {
                    1 => slots.remove(key),
                    2 => slots.modify(key, Interest::NONE),
                    3 => slots.modify(key, Interest::WRITE),
                    4 => slots.renew(key),
                    _ => {
                        let revision = slots.slots[key.slot as usize].revision;
                        slots.miss(key, revision).map_or(Change::Nothing, |_| Change::Delete)
                    }
                };
                let held = match change {
                    Change::Nothing => held,
                    Change::Add(_) => { prop_assert!(!held); true }
                    Change::Modify(_) => { prop_assert!(held); true }
                    Change::Delete => { prop_assert!(held); false }
                };
                live[at].1 = held;
                if op == 1 {
                    prop_assert!(!held);
                    live.remove(at);
                }
                prop_assert_eq!(slots.len(), live.len());
            }
        }
    }
}
