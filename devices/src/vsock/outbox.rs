//! What a guest has sent and its host's socket has not taken yet.

use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::net::SendFlags;
use vm_memory::VolatileSlice;

use super::io::{self, retry};
use super::queues;

/// A buffer in front of a socket. Its bound is the connection's credit window: the muxer refuses
/// what goes beyond. Empty, it holds no memory.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    bytes: Vec<u8>,
    start: usize,
}

impl Outbox {
    pub(super) fn len(&self) -> usize {
        self.bytes.len() - self.start
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sends data from guest memory straight to the socket if nothing is queued, and queues the
    /// rest. Returns how many bytes the socket took.
    pub(super) fn send(
        &mut self,
        fd: BorrowedFd<'_>,
        data: &mut Vec<VolatileSlice<'_>>,
    ) -> Result<usize, Errno> {
        let mut sent = 0;
        if self.is_empty() && !data.is_empty() {
            sent = match io::send(fd, data) {
                Ok(sent) => sent,
                Err(Errno::AGAIN) => 0,
                Err(error) => return Err(error),
            };
            queues::advance(data, sent);
        }
        for slice in data.iter() {
            self.push(slice);
        }
        Ok(sent)
    }

    /// Sends what is queued. Returns how many bytes the socket took.
    pub(super) fn flush(&mut self, fd: BorrowedFd<'_>) -> Result<usize, Errno> {
        let mut total = 0;
        while !self.is_empty() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match retry(|| rustix::net::send(fd, &self.bytes[self.start..], flags)) {
                Ok(sent) => {
                    self.start += sent;
                    total += sent;
                }
                Err(Errno::AGAIN) => break,
                Err(error) => return Err(error),
            }
        }
        if self.is_empty() {
            self.clear();
        }
        Ok(total)
    }

    /// Drops what is queued and returns how much that was.
    pub(super) fn clear(&mut self) -> usize {
        let dropped = self.len();
        *self = Self::default();
        dropped
    }

    fn push(&mut self, slice: &VolatileSlice<'_>) {
        // What was sent is dropped before the buffer grows, so that it stays near the window's
        // size.
        if self.start > 0 && self.bytes.len() + slice.len() > self.bytes.capacity() {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        let end = self.bytes.len();
        self.bytes.resize(end + slice.len(), 0);
        slice.copy_to(&mut self.bytes[end..]);
    }
}
