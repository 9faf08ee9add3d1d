//! A bounded queue into a loop that brings its own wake-ups.

mod queue;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{Error, Waker};
use queue::Queue;

/// Both ends of a queue that holds `capacity` items (at least one): register the [`Inbox`] for reading and take a
/// [`turn`](Inbox::turn) when it is readable.
///
/// A channel with a waker beside it loses a wake-up as soon as a consumer drains the waker and then stops before the
/// channel is empty. Here one thing holds at every moment: what is in the queue has a wake-up outstanding, or a turn
/// that looks again before it ends. Many items cost one wake-up.
///
/// # Errors
/// [`Error::Waker`] when no descriptor is left.
///
/// ```
/// use vmm_events::{Answer, Interest, Poller, inbox};
///
/// let mut poller = Poller::new()?;
/// let (sender, receiver) = inbox(8)?;
/// let receiver = poller.register(receiver, Interest::READ, ())?;
/// std::thread::spawn(move || sender.try_send("a word"));
///
/// poller.wait(None)?;
/// let event = poller.next_event().expect("a word has come");
/// assert_eq!(receiver.inner().turn().next(), Some("a word"));
/// poller.answer(&event, Answer::Handled);
/// # Ok::<(), vmm_events::Error>(())
/// ```
pub fn inbox<T>(capacity: usize) -> Result<(Sender<T>, Inbox<T>), Error> {
    let shared = Arc::new(Shared {
        queue: Mutex::new(Queue::new(capacity.max(1))),
        waker: Waker::new()?,
    });
    Ok((Sender(Arc::clone(&shared)), Inbox(shared)))
}

struct Shared<T> {
    queue: Mutex<Queue<T>>,
    waker: Waker,
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, Queue<T>> {
        // Nothing that runs under the lock can panic with the queue half changed.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the queue, and wakes its loop if the change asks for it. Under the lock: a wake-up that came after the
    /// turn that took its item would be one for nothing.
    fn change(&self, change: impl FnOnce(&mut Queue<T>) -> bool) {
        let mut queue = self.lock();
        if change(&mut queue) {
            self.waker.wake();
        }
    }
}

/// The end that is written to, from any thread. Clones write to the same queue; when the last one is gone, the loop
/// is woken once more, to see that nothing can come.
pub struct Sender<T>(Arc<Shared<T>>);

/// Why an item was not taken; it comes back.
#[derive(Debug, PartialEq, Eq)]
pub enum TrySendError<T> {
    /// The loop has not taken what is there.
    Full(T),
    /// There is no loop any more.
    Closed(T),
}

impl<T> Sender<T> {
    /// Adds an item, without waiting.
    ///
    /// # Errors
    /// [`TrySendError`], with the item, when the queue is full or has no reader.
    pub fn try_send(&self, item: T) -> Result<(), TrySendError<T>> {
        let mut result = Ok(());
        self.0.change(|queue| match queue.publish(item) {
            Ok(wake) => wake,
            Err(refused) => {
                result = Err(refused);
                false
            }
        });
        result
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        self.0.lock().join();
        Self(Arc::clone(&self.0))
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.0.change(Queue::leave);
    }
}

impl<T> std::fmt::Debug for Sender<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sender").finish_non_exhaustive()
    }
}

/// The end that is registered in a loop: readable while something is to be looked at.
pub struct Inbox<T>(Arc<Shared<T>>);

impl<T> Inbox<T> {
    /// Takes items until the turn is dropped. Whatever is left then is woken for again: a turn may stop at any item.
    pub fn turn(&self) -> Turn<'_, T> {
        // In this order: what comes in between is looked at by this turn and needs no wake-up.
        self.0.lock().begin();
        self.0.waker.drain();
        Turn(&self.0)
    }
}

impl<T> AsFd for Inbox<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.waker.as_fd()
    }
}

impl<T> Drop for Inbox<T> {
    fn drop(&mut self) {
        // Taken out under the lock, dropped after it: an item may hold a sender of this very queue.
        let left = self.0.lock().close();
        drop(left);
    }
}

impl<T> std::fmt::Debug for Inbox<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inbox").finish_non_exhaustive()
    }
}

/// A look into an [`Inbox`]: its items, oldest first, until none is there.
pub struct Turn<'a, T>(&'a Shared<T>);

impl<T> Turn<'_, T> {
    /// True once nothing is there and nothing can come: all senders are gone.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.0.lock().is_over()
    }
}

impl<T> Iterator for Turn<'_, T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        self.0.lock().take()
    }
}

impl<T> Drop for Turn<'_, T> {
    fn drop(&mut self) {
        self.0.change(Queue::end);
    }
}

impl<T> std::fmt::Debug for Turn<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Turn").finish_non_exhaustive()
    }
}
