//! A queue's doorbell.
// One borrow of a raw descriptor: vmm-sys-util's EventFd, which KVM's wrappers take, does not
// implement AsFd.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// A queue's doorbell: rung by KVM (as an ioeventfd at [`super::NOTIFY_OFFSET`] with the queue's
/// index as datamatch) or by a plain `QueueNotify` write, heard by the device's loop.
#[derive(Clone, Debug)]
pub struct Kick(Arc<EventFd>);

impl Kick {
    /// A new doorbell.
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?)))
    }

    /// The eventfd to register with KVM.
    #[must_use]
    pub fn event(&self) -> &EventFd {
        &self.0
    }

    /// Rings it.
    pub fn ring(&self) {
        // Fails only when the counter is full, and then it rings already.
        let _ = self.0.write(1);
    }

    /// Clears it; true if it had been rung.
    pub fn take(&self) -> bool {
        self.0.read().is_ok()
    }
}

impl AsFd for Kick {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is owned by the EventFd in the Arc, which outlives the borrow of
        // self.
        unsafe { BorrowedFd::borrow_raw(self.0.as_raw_fd()) }
    }
}
