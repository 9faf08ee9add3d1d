//! A small epoll loop whose registrations own their descriptors.
//!
//! ```text
//!   register(fd, interest, token)            wait(timeout)
//!   ---------------> Poller <-------------------------- kernel (epoll)
//!   <-- Source{fd}     |  slot = {token, generation, revision, misses}
//!                      v
//!          next_event() -> Event{token, readiness}   stale events end here
//!                      |
//!          answer(event, Handled | Unhandled)        the second miss mutes
//! ```
//!
//! An epoll event carries a number that its user chose, and the kernel hands it out after the
//! descriptor behind it may long be closed and its number taken by another. Here a number names a
//! slot *and* the slot's generation, a registration owns its descriptor, and dropping it leaves
//! epoll, bumps the generation and closes, in that order: an event of a former owner is
//! recognised and dropped, also within one batch.
//!
//! All interests are level-triggered. An event that nobody handles would therefore come back at
//! once and for ever; after one free retry per slot generation and revision it is deregistered
//! and logged instead, until its owner gives it a new revision.
//!
//! # Example
//!
//! ```
//! use std::io::Write;
//! use std::os::unix::net::UnixStream;
//! use vmm_events::{Answer, Interest, Poller};
//!
//! let mut poller = Poller::new()?;
//! let (mut ours, theirs) = UnixStream::pair()?;
//! let source = poller.register(theirs, Interest::READ, "peer")?;
//! ours.write_all(b"x")?;
//!
//! poller.wait(None)?;
//! while let Some(event) = poller.next_event() {
//!     assert_eq!(event.token, "peer");
//!     assert!(event.readiness.readable());
//!     poller.answer(&event, Answer::Handled);
//! }
//! drop(source); // out of epoll, then closed
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Limits
//!
//! - One thread waits. [`Source`], [`Waker`], [`Sender`] and the [`Registrar`] may be used from others.
//! - 2^32 slots, [`BATCH`] events a wait; what did not fit comes with the next one.
//! - Timeouts are rounded up to a millisecond: never an early wake-up, so never a spin.
//!
//! # Modules and errors
//!
//! `slots` decides (pure: no descriptors, no system calls), `poller` does the I/O, `timers` is a
//! heap of deadlines that yields the next timeout, `waker` an eventfd, `inbox` a bounded queue from
//! other threads that never leaves an item without a wake-up. The only error type is
//! [`Error`], a variant for each operation that failed.

mod inbox;
mod poller;
mod slots;
mod timers;
mod waker;

pub use inbox::{Inbox, Sender, TrySendError, Turn, inbox};
pub use poller::{BATCH, Error, Event, Poller, Registrar, Source};
pub use slots::{Answer, Counters, Interest, Readiness};
pub use timers::{TimerId, Timers};
pub use waker::Waker;

/// True if a test asks for this protection to be left out, to see that its test notices.
fn negative_control(case: &str) -> bool {
    cfg!(feature = "negative-control")
        && std::env::var_os("VMM_NEGATIVE_CONTROL").is_some_and(|removed| removed == case)
}
