//! Signals as events: blocked everywhere, read from a descriptor by the one loop that acts on them.
#![allow(unsafe_code)] // `signalfd` has no safe wrapper among our crates.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use vmm_sys_util::signal::create_sigset;

/// Signals of this process that wait to be read.
#[derive(Debug)]
pub struct Signals(OwnedFd);

impl Signals {
    /// Blocks `signals` in this thread and all that it starts, and collects them.
    ///
    /// # Errors
    /// When the host refuses, as it does for numbers that are no signals.
    pub fn collect(signals: &[i32]) -> io::Result<Self> {
        let set = create_sigset(signals)?;
        // SAFETY: `set` is an initialized signal set that outlives the calls; the old mask is not asked for.
        let error = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) };
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error));
        }
        // SAFETY: as above; -1 asks for a new descriptor.
        let fd = unsafe { libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor that nobody else knows.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// The next signal that has arrived, if any.
    pub fn next(&self) -> Option<i32> {
        let mut record = [0; size_of::<libc::signalfd_siginfo>()];
        match rustix::io::read(&self.0, &mut record) {
            // `ssi_signo` is the record's first field.
            Ok(length) if length == record.len() => Some(i32::from_ne_bytes([
                record[0], record[1], record[2], record[3],
            ])),
            _ => None,
        }
    }

    /// Does what SIGTSTP does to a process that has not collected it: stops all of it, unless it ignores that signal or
    /// nobody could continue it. Returns once it goes on. Call it on the thread that has collected the signal.
    ///
    /// # Errors
    /// When the host refuses.
    pub fn stop_as_asked(&self) -> io::Result<()> {
        let set = create_sigset(&[libc::SIGTSTP])?;
        // SAFETY: `set` is an initialized signal set that outlives the calls; the old masks are not asked for. The signal
        // has its default action or none here, so that no handler runs.
        let error = unsafe {
            libc::raise(libc::SIGTSTP);
            // It is delivered here, before the call returns.
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut());
            libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut())
        };
        match error {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
