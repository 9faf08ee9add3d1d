//! Nonblocking sockets with deadlines.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

/// Waits until the socket is ready for `flags`, or has an error, or the deadline passes
/// (`TimedOut`).
pub(crate) fn wait(socket: impl AsFd, flags: PollFlags, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::new(&socket, flags)];
        match poll(&mut fds, Some(&timespec(left))) {
            Ok(0) if left.is_zero() => return Err(ErrorKind::TimedOut.into()),
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

/// A time as the kernel takes it, rounded up so that a wait does not end just before its deadline.
fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

/// What came, without waiting: `None` if nothing has, and 0 at the end.
pub(crate) fn receive(socket: BorrowedFd<'_>, space: &mut [u8]) -> io::Result<Option<usize>> {
    loop {
        return match recv(socket, &mut *space, RecvFlags::DONTWAIT) {
            Ok((count, _)) => Ok(Some(count)),
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => Ok(None),
            Err(error) => Err(error.into()),
        };
    }
}

/// Sends what the socket takes, without waiting.
pub(crate) fn transmit(socket: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    loop {
        return match send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(count) => Ok(count),
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => Ok(0),
            Err(error) => Err(error.into()),
        };
    }
}

/// Sends all, by the deadline.
pub(crate) fn transmit_all(
    socket: BorrowedFd<'_>,
    mut bytes: &[u8],
    deadline: Instant,
) -> io::Result<()> {
    while !bytes.is_empty() {
        match transmit(socket, bytes)? {
            0 => wait(socket, PollFlags::OUT, deadline)?,
            count => bytes = &bytes[count..],
        }
    }
    Ok(())
}
