//! Waking the loop from another thread.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

use crate::Error;

/// An event descriptor: register a clone of it for reading, call [`Waker::wake`] anywhere.
///
/// ```
/// use vmm_events::{Interest, Poller, Waker};
///
/// let mut poller = Poller::new()?;
/// let waker = Waker::new()?;
/// let _source = poller.register(waker.clone(), Interest::READ, ())?;
/// let remote = waker.clone();
/// std::thread::spawn(move || remote.wake());
/// poller.wait(None)?;
/// assert!(poller.next_event().is_some());
/// waker.drain();
/// # Ok::<(), vmm_events::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Waker(Arc<OwnedFd>);

impl Waker {
    /// A waker that has not been woken.
    ///
    /// # Errors
    /// [`Error::Waker`] when no descriptor is left.
    pub fn new() -> Result<Self, Error> {
        let fd =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(Error::Waker)?;
        Ok(Self(Arc::new(fd)))
    }

    /// Makes the descriptor readable until it is drained.
    pub fn wake(&self) {
        // The one failure of a write here is a counter that is full: it is readable already.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }

    /// Makes it unreadable again, for the loop to sleep on; says whether it was woken. Look for
    /// work *after* this, or a wake in between is lost.
    pub fn drain(&self) -> bool {
        let mut count = [0u8; 8];
        rustix::io::read(&*self.0, &mut count).is_ok()
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
