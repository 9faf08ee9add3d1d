//! Vectored socket I/O from and to guest memory, without a copy between.
// The kernel reads and writes guest memory by address here; no reference to it is ever made, as the
// guest may change it at any time.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::ioctl::{Getter, Opcode, ioctl};
use rustix::net::{
    RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, recvmsg, sendmsg,
};
use vm_memory::VolatileSlice;

/// Most slices that one call takes (Linux: `UIO_MAXIOV`).
pub(super) const MAX_SLICES: usize = 1024;

/// `SIOCOUTQ` of linux/sockios.h, which is `TIOCOUTQ`.
const SIOCOUTQ: Opcode = 0x5411;

/// `struct iovec`.
#[repr(C)]
struct IoVec {
    base: *mut u8,
    len: usize,
}

/// Reads from a socket into guest memory; 0 is the end of the stream. At most [`MAX_SLICES`] are
/// filled.
pub(super) fn receive(fd: BorrowedFd<'_>, into: &[VolatileSlice<'_>]) -> Result<usize, Errno> {
    let mut vectors = vectors(into);
    // SAFETY: IoSliceMut is guaranteed to have the layout of struct iovec, which IoVec has too. The
    // slices are only handed to the kernel; nothing dereferences them, so no Rust reference to
    // guest memory arises. The pointers are valid for writes of their lengths as long as `into` is
    // borrowed.
    let vectors = unsafe {
        std::slice::from_raw_parts_mut(vectors.as_mut_ptr().cast::<IoSliceMut<'_>>(), vectors.len())
    };
    let mut control = RecvAncillaryBuffer::default();
    retry(|| recvmsg(fd, vectors, &mut control, RecvFlags::DONTWAIT).map(|received| received.bytes))
}

/// Writes from guest memory to a socket, as much as it takes. At most [`MAX_SLICES`] are looked at.
pub(super) fn send(fd: BorrowedFd<'_>, from: &[VolatileSlice<'_>]) -> Result<usize, Errno> {
    let vectors = vectors(from);
    // SAFETY: as in `receive`, for reads.
    let vectors = unsafe {
        std::slice::from_raw_parts(vectors.as_ptr().cast::<IoSlice<'_>>(), vectors.len())
    };
    let mut control = SendAncillaryBuffer::default();
    retry(|| {
        sendmsg(
            fd,
            vectors,
            &mut control,
            SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
        )
    })
}

/// What a unix socket has sent and its reader has not read, in bytes of memory that it takes: somewhat more than the
/// data. `usize::MAX` if the kernel does not say.
pub(super) fn unread(fd: BorrowedFd<'_>) -> usize {
    // SAFETY: SIOCOUTQ writes one int (unix(7), unix_ioctl of the kernel).
    let bytes = unsafe { ioctl(fd, Getter::<SIOCOUTQ, c_int>::new()) };
    bytes
        .ok()
        .and_then(|bytes| bytes.try_into().ok())
        .unwrap_or(usize::MAX)
}

/// Repeats a call that a signal has interrupted.
pub(super) fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

fn vectors(slices: &[VolatileSlice<'_>]) -> Vec<IoVec> {
    slices
        .iter()
        .take(MAX_SLICES)
        .map(|slice| IoVec {
            // The guard only matters for memory that is mapped on demand (Xen), which this is not:
            // the mapping lives as long as the slice's borrow.
            base: slice.ptr_guard_mut().as_ptr(),
            len: slice.len(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn unread_is_what_the_reader_has_not_taken() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        assert_eq!(unread(ours.as_fd()), 0);
        ours.write_all(&[7; 10_000]).unwrap();
        assert!((10_000..100_000).contains(&unread(ours.as_fd())));
        theirs.read_exact(&mut [0; 10_000]).unwrap();
        assert_eq!(unread(ours.as_fd()), 0);
    }
}
