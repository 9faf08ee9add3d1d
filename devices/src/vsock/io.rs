//! Vectored socket I/O from and to guest memory, without a copy between.
// The kernel reads and writes guest memory by address here; no reference to it is ever made, as the
// guest may change it at any time.
#![allow(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, recvmsg, sendmsg,
};
use vm_memory::VolatileSlice;

/// Most slices that one call takes (Linux: `UIO_MAXIOV`).
pub(super) const MAX_SLICES: usize = 1024;

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
