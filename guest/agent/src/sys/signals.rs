//! SIGCHLD as a descriptor, and signals for a process that a descriptor names.
// Signal handlers and real-time signals have no safe wrappers here.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use super::last_errno;

/// Sends any signal, real-time ones included, to the process that `process` names: never to
/// another that got its number.
///
/// # Errors
/// What the kernel says; [`Errno::SRCH`] when it has been collected.
pub fn send(process: impl AsFd, number: u8) -> Result<(), Errno> {
    // SAFETY: takes a descriptor, a number, no siginfo and no flags.
    let result = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            process.as_fd().as_raw_fd(),
            libc::c_int::from(number),
            std::ptr::null::<libc::siginfo_t>(),
            0,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(last_errno())
    }
}

/// What the handler writes to; -1 before there is one.
static WAKE: AtomicI32 = AtomicI32::new(-1);

/// Readable while a child has died since the last [`ChildSignal::drain`].
///
/// A handler and not a signalfd: a signal for a process may be taken by any thread that does not
/// block it, and for one that is ignored by default that means lost. The handler hears it on
/// whichever thread it lands.
#[derive(Debug)]
pub struct ChildSignal(OwnedFd);

impl ChildSignal {
    /// Handles SIGCHLD from now on. There is one per process: a second one silences the first.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn new() -> Result<Self, Errno> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        WAKE.store(fd.as_raw_fd(), Ordering::SeqCst);
        // SAFETY: all fields are integers, pointers or sets, for which zero is a value; the
        // handler only does what is allowed in one.
        let result = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handle as extern "C" fn(libc::c_int) as usize;
            action.sa_flags = libc::SA_RESTART | libc::SA_NOCLDSTOP;
            libc::sigaction(libc::SIGCHLD, &raw const action, std::ptr::null_mut())
        };
        if result == 0 {
            Ok(Self(fd))
        } else {
            Err(last_errno())
        }
    }

    /// Forgets the signals seen so far. Look at the children after this, never before.
    pub fn drain(&self) {
        let mut count = [0u8; 8];
        let _ = rustix::io::read(&self.0, &mut count);
    }
}

impl Drop for ChildSignal {
    fn drop(&mut self) {
        let ours = self.0.as_raw_fd();
        let _ = WAKE.compare_exchange(ours, -1, Ordering::SeqCst, Ordering::SeqCst);
    }
}

/// Interrupts anything: one write, nothing allocated or locked, errno kept.
extern "C" fn handle(_: libc::c_int) {
    let fd = WAKE.load(Ordering::SeqCst);
    if fd >= 0 {
        let one = 1u64.to_ne_bytes();
        // SAFETY: `write` is async-signal-safe and the buffer lives through it; a descriptor that
        // was closed meanwhile is an error without effect. errno is this thread's own.
        unsafe {
            let errno = *libc::__errno_location();
            libc::write(fd, one.as_ptr().cast(), one.len());
            *libc::__errno_location() = errno;
        }
    }
}

impl AsFd for ChildSignal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
