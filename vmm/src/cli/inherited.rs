//! Descriptors that a launcher left open for us, by number.
#![allow(unsafe_code)] // A number becomes a descriptor of ours by one system call that no safe wrapper makes of a number.

use std::fs::File;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use rustix::fs::{OFlags, fcntl_getfl};

/// A descriptor of our own for what `number` leads to, be it a file, a pipe or a socket; the other stays as it is.
///
/// # Errors
/// When it is not open, or not for writing, or one of ours that happens to have that number.
pub fn writable(number: u32) -> io::Result<File> {
    let number = i32::try_from(number).map_err(|_| io::Error::from_raw_os_error(libc::EBADF))?;
    // SAFETY: takes and returns numbers only, and fails for one that is not open. From 3, so that it is never stdio.
    let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 3) };
    if copy < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nobody else knows.
    let copy = unsafe { OwnedFd::from_raw_fd(copy) };
    // SAFETY: takes and returns numbers only. What came through an exec is open across the next one, what we open is not.
    let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
    if flags < 0 || flags & libc::FD_CLOEXEC != 0 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // Writing is known to fail now, not when there is something to write.
    match fcntl_getfl(&copy)? & OFlags::RWMODE {
        OFlags::RDONLY => Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "it is open for reading only",
        )),
        _ => Ok(copy.into()),
    }
}

/// As [`writable`], and the launcher's own is closed, so that who reads from the other end sees the end of ours. Standard
/// input, output and error stay.
///
/// # Errors
/// As [`writable`]; nothing is closed then.
pub fn take(number: u32) -> io::Result<File> {
    let file = writable(number)?;
    if let Some(number) = i32::try_from(number).ok().filter(|number| *number > 2) {
        // SAFETY: open, and left by the launcher for this use, as it is not one of ours: nobody else here closes it.
        drop(unsafe { OwnedFd::from_raw_fd(number) });
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::{AsFd, AsRawFd};
    use std::os::unix::net::UnixStream;

    use super::*;

    /// As it is after an exec.
    fn inherited(fd: &(impl AsFd + AsRawFd)) -> u32 {
        rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty()).unwrap();
        u32::try_from(fd.as_raw_fd()).unwrap()
    }

    #[test]
    fn pipes_sockets_and_files_are_written_where_the_launcher_stands() {
        let (mut reader, writer) = io::pipe().unwrap();
        writable(inherited(&writer))
            .unwrap()
            .write_all(b"a")
            .unwrap();
        drop(writer);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "a", "and then its end: the copy has gone");

        let (ours, mut theirs) = UnixStream::pair().unwrap();
        writable(inherited(&ours)).unwrap().write_all(b"b").unwrap();
        theirs.read_exact(&mut [0]).unwrap();

        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"before ").unwrap();
        writable(inherited(&file)).unwrap().write_all(b"c").unwrap();
        assert_eq!(file.metadata().unwrap().len(), 8);
    }

    #[test]
    fn one_that_is_taken_ends_with_what_is_written_to_it() {
        let (mut reader, writer) = io::pipe().unwrap();
        let number = inherited(&writer);
        std::mem::forget(writer);
        let mut file = take(number).unwrap();
        file.write_all(b"ready\n").unwrap();
        drop(file);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "ready\n");
    }

    #[test]
    fn closed_and_unwritable_ones_are_refused() {
        let (reader, writer) = io::pipe().unwrap();
        let error = writable(inherited(&reader)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        // The last one is open, and ours: no launcher could have left it.
        let ours = u32::try_from(writer.as_raw_fd()).unwrap();
        for number in [987_654, u32::MAX, ours] {
            let error = writable(number).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EBADF));
        }
    }
}
