//! The I/O side: one epoll descriptor and the registrations that live in it.
// A muted descriptor must leave epoll, whose interface takes its number, while its owner (and
// with it the borrow) is elsewhere.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

use crate::slots::{Answer, Change, Counters, Interest, Key, Readiness, Slots};

/// Events fetched from the kernel at once.
pub const BATCH: usize = 64;

/// An operation on the loop that the kernel refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No epoll descriptor.
    #[error("cannot create an epoll descriptor")]
    Create(#[source] Errno),
    /// The descriptor cannot be watched (a regular file, say), or a limit is reached.
    #[error("cannot watch a descriptor")]
    Register(#[source] Errno),
    /// The interest could not be changed.
    #[error("cannot change what a descriptor is watched for")]
    Modify(#[source] Errno),
    /// Waiting failed.
    #[error("cannot wait for events")]
    Wait(#[source] Errno),
    /// No event descriptor for a waker.
    #[error("cannot create an event descriptor")]
    Waker(#[source] Errno),
    /// All slots are taken.
    #[error("no slot is free for another descriptor")]
    Full,
}

/// One thing that happened.
#[derive(Clone, Copy, Debug)]
pub struct Event<T> {
    /// What the owner registered under.
    pub token: T,
    /// What happened.
    pub readiness: Readiness,
    key: Key,
    revision: u64,
}

struct Shared<T> {
    epoll: OwnedFd,
    slots: Mutex<Slots<T>>,
}

impl<T: Clone> Shared<T> {
    fn slots(&self) -> MutexGuard<'_, Slots<T>> {
        // No code that can panic runs under the lock; if it did, the table is still whole.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn apply(&self, key: Key, fd: BorrowedFd<'_>, change: Change) -> Result<(), Errno> {
        let data = epoll::EventData::new_u64(key.to_data());
        match change {
            Change::Nothing => Ok(()),
            Change::Add(interest) => epoll::add(&self.epoll, fd, data, flags(interest)),
            Change::Modify(interest) => epoll::modify(&self.epoll, fd, data, flags(interest)),
            Change::Delete => epoll::delete(&self.epoll, fd),
        }
    }
}

/// What a [`Source`] needs of the loop, whatever its tokens are.
trait Table: Send + Sync {
    fn modify(&self, key: Key, fd: BorrowedFd<'_>, interest: Interest) -> Result<(), Errno>;
    fn renew(&self, key: Key, fd: BorrowedFd<'_>) -> Result<(), Errno>;
    fn remove(&self, key: Key, fd: BorrowedFd<'_>);
}

impl<T: Clone + Send> Table for Shared<T> {
    fn modify(&self, key: Key, fd: BorrowedFd<'_>, interest: Interest) -> Result<(), Errno> {
        let mut slots = self.slots();
        let change = slots.modify(key, interest);
        self.apply(key, fd, change)
            .inspect_err(|_| slots.disarm(key))
    }

    fn renew(&self, key: Key, fd: BorrowedFd<'_>) -> Result<(), Errno> {
        let mut slots = self.slots();
        let change = slots.renew(key);
        self.apply(key, fd, change)
            .inspect_err(|_| slots.disarm(key))
    }

    fn remove(&self, key: Key, fd: BorrowedFd<'_>) {
        let change = self.slots().remove(key);
        // Deleted by hand, before the close: a child forked meanwhile may hold a copy of the
        // descriptor, and epoll forgets an entry only with the last copy (epoll(7), Q6).
        if let Err(error) = self.apply(key, fd, change) {
            tracing::error!(?key, %error, "cannot take a descriptor out of epoll");
        }
    }
}

/// A registered descriptor. Dropping it takes it out of the loop, then closes it.
pub struct Source<F: AsFd> {
    fd: F,
    key: Key,
    table: Arc<dyn Table>,
}

impl<F: AsFd> Source<F> {
    /// The descriptor.
    pub fn inner(&self) -> &F {
        &self.fd
    }

    /// The descriptor, for reading from and writing to. It must stay the same one.
    pub fn inner_mut(&mut self) -> &mut F {
        &mut self.fd
    }

    /// Changes what to be told of. Another interest is a new revision: it is registered afresh
    /// and misses start over. The same interest changes nothing.
    ///
    /// # Errors
    /// [`Error::Modify`]; the descriptor is then out of the loop until a next change.
    pub fn modify(&self, interest: Interest) -> Result<(), Error> {
        self.table
            .modify(self.key, self.fd.as_fd(), interest)
            .map_err(Error::Modify)
    }

    /// A new revision of the same interest: registered again if misses took it out.
    ///
    /// # Errors
    /// As [`Source::modify`].
    pub fn renew(&self) -> Result<(), Error> {
        self.table
            .renew(self.key, self.fd.as_fd())
            .map_err(Error::Modify)
    }
}

impl<F: AsFd> Drop for Source<F> {
    fn drop(&mut self) {
        self.table.remove(self.key, self.fd.as_fd());
    }
}

impl<F: AsFd + fmt::Debug> fmt::Debug for Source<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source")
            .field("fd", &self.fd)
            .field("key", &self.key)
            .finish()
    }
}

/// Registers descriptors with a loop from wherever it is needed.
pub struct Registrar<T> {
    shared: Arc<Shared<T>>,
}

impl<T: Clone + Send + 'static> Registrar<T> {
    /// Watches `fd` for `interest`; its events bear `token`.
    ///
    /// # Errors
    /// [`Error::Register`], [`Error::Full`]. The descriptor is closed then.
    pub fn register<F: AsFd>(
        &self,
        fd: F,
        interest: Interest,
        token: T,
    ) -> Result<Source<F>, Error> {
        let mut slots = self.shared.slots();
        let key = slots
            .insert(fd.as_fd().as_raw_fd(), interest, token)
            .ok_or(Error::Full)?;
        if !interest.is_none()
            && let Err(error) = self.shared.apply(key, fd.as_fd(), Change::Add(interest))
        {
            slots.disarm(key);
            slots.remove(key);
            return Err(Error::Register(error));
        }
        drop(slots);
        let table: Arc<dyn Table> = Arc::<Shared<T>>::clone(&self.shared);
        Ok(Source { fd, key, table })
    }
}

impl<T> Clone for Registrar<T> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
        }
    }
}

impl<T> fmt::Debug for Registrar<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registrar").finish_non_exhaustive()
    }
}

/// The loop's end of epoll. Tokens are anything small that can be cloned.
pub struct Poller<T> {
    registrar: Registrar<T>,
    buffer: Vec<epoll::Event>,
    pending: VecDeque<(Key, Readiness)>,
    counters: Counters,
    /// Whether the batch under way has events, and whether one was handled.
    batch: Option<bool>,
}

impl<T: Clone + Send + 'static> Poller<T> {
    /// A loop that watches nothing yet.
    ///
    /// # Errors
    /// [`Error::Create`].
    pub fn new() -> Result<Self, Error> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(Error::Create)?;
        Ok(Self {
            registrar: Registrar {
                shared: Arc::new(Shared {
                    epoll,
                    slots: Mutex::new(Slots::new()),
                }),
            },
            buffer: Vec::with_capacity(BATCH),
            pending: VecDeque::with_capacity(BATCH),
            counters: Counters::default(),
            batch: None,
        })
    }

    /// A handle to register with while the loop itself is borrowed or elsewhere.
    pub fn registrar(&self) -> Registrar<T> {
        self.registrar.clone()
    }

    /// See [`Registrar::register`].
    ///
    /// # Errors
    /// The same.
    pub fn register<F: AsFd>(
        &self,
        fd: F,
        interest: Interest,
        token: T,
    ) -> Result<Source<F>, Error> {
        self.registrar.register(fd, interest, token)
    }

    /// Sleeps until something happens or `timeout` has passed (`None`: no timeout), and keeps
    /// what happened for [`Poller::next_event`]. A signal ends the wait early with nothing.
    ///
    /// # Errors
    /// [`Error::Wait`].
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        self.settle();
        self.buffer.clear();
        let timeout = timeout.map(round_up);
        let epoll = &self.registrar.shared.epoll;
        match epoll::wait(epoll, spare_capacity(&mut self.buffer), timeout.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(()),
            Err(error) => return Err(Error::Wait(error)),
        }
        self.counters.wakeups += 1;
        self.batch = (!self.buffer.is_empty()).then_some(false);
        for event in &self.buffer {
            let data = event.data;
            self.pending
                .push_back((Key::from_data(data.u64()), readiness(event.flags)));
        }
        Ok(())
    }

    /// The next event of the batch that still has its owner and is still wanted.
    pub fn next_event(&mut self) -> Option<Event<T>> {
        while let Some((key, readiness)) = self.pending.pop_front() {
            match self.registrar.shared.slots().deliver(key, readiness) {
                Some((token, readiness, revision)) => {
                    return Some(Event {
                        token,
                        readiness,
                        key,
                        revision,
                    });
                }
                None => self.counters.stale += 1,
            }
        }
        None
    }

    /// Says what became of an event. The second miss of one slot generation and revision takes
    /// the descriptor out of epoll, so that it cannot spin; its owner keeps it and may revive it
    /// by [`Source::modify`] or [`Source::renew`].
    pub fn answer(&mut self, event: &Event<T>, answer: Answer) {
        if answer == Answer::Handled {
            self.batch = self.batch.map(|_| true);
            return;
        }
        let shared = &self.registrar.shared;
        let mut slots = shared.slots();
        let Some(fd) = slots.miss(event.key, event.revision) else {
            return;
        };
        // SAFETY: the slot is live and the table is locked, so the source that owns `fd` has not
        // been dropped: it leaves the table, under this lock, before it closes.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let deleted = shared.apply(event.key, fd, Change::Delete);
        drop(slots);
        self.counters.muted += 1;
        tracing::error!(
            key = ?event.key,
            revision = event.revision,
            ?deleted,
            "an event without a handler, twice: no longer watched"
        );
    }

    /// What the loop has done so far, the batch under way not counted as idle yet.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Live registrations.
    pub fn registered(&self) -> usize {
        self.registrar.shared.slots().len()
    }

    fn settle(&mut self) {
        self.counters.stale += self.pending.len() as u64;
        self.pending.clear();
        if self.batch.take() == Some(false) {
            self.counters.without_progress += 1;
        }
    }
}

impl<T> fmt::Debug for Poller<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Poller")
            .field("counters", &self.counters)
            .finish_non_exhaustive()
    }
}

fn flags(interest: Interest) -> epoll::EventFlags {
    let mut flags = epoll::EventFlags::empty();
    for (bit, flag) in [
        (Interest::READ, epoll::EventFlags::IN),
        (Interest::WRITE, epoll::EventFlags::OUT),
        (Interest::PRIORITY, epoll::EventFlags::PRI),
        (Interest::PEER_CLOSED, epoll::EventFlags::RDHUP),
    ] {
        flags.set(flag, interest.contains(bit));
    }
    flags
}

fn readiness(flags: epoll::EventFlags) -> Readiness {
    Readiness {
        asked: Interest::NONE
            .with(Interest::READ, flags.contains(epoll::EventFlags::IN))
            .with(Interest::WRITE, flags.contains(epoll::EventFlags::OUT))
            .with(Interest::PRIORITY, flags.contains(epoll::EventFlags::PRI))
            .with(
                Interest::PEER_CLOSED,
                flags.contains(epoll::EventFlags::RDHUP),
            ),
        hung_up: flags.contains(epoll::EventFlags::HUP),
        failed: flags.contains(epoll::EventFlags::ERR),
    }
}

/// To whole milliseconds, upwards: what epoll takes everywhere, and never early.
fn round_up(timeout: Duration) -> Timespec {
    let millis = timeout.as_nanos().div_ceil(1_000_000).min(i32::MAX as u128);
    // Cut to 31 bits just above.
    let millis = i64::try_from(millis).unwrap_or(i64::from(i32::MAX));
    Timespec {
        tv_sec: millis / 1000,
        tv_nsec: (millis % 1000) * 1_000_000,
    }
}
