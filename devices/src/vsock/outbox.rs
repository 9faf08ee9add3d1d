//! What a guest has sent and its host's socket has not taken yet.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::Errno;
use rustix::net::SendFlags;
use vm_memory::VolatileSlice;

use super::io::{self, retry};
use super::queues;

/// What all outboxes of a device hold together, in bytes.
pub(super) type Account = Arc<AtomicUsize>;

/// A buffer in front of a socket. Its bound is the connection's credit window: the muxer refuses
/// what goes beyond. Empty, it holds no memory.
#[derive(Debug)]
pub(super) struct Outbox {
    bytes: Vec<u8>,
    start: usize,
    window: usize,
    account: Account,
}

impl Outbox {
    /// An empty one, for as much as `window` bytes.
    pub(super) fn new(window: u32, account: Account) -> Self {
        Self {
            bytes: Vec::new(),
            start: 0,
            window: window as usize,
            account,
        }
    }

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
                    self.account.fetch_sub(sent, Ordering::Relaxed);
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
        self.account.fetch_sub(dropped, Ordering::Relaxed);
        (self.bytes, self.start) = (Vec::new(), 0);
        dropped
    }

    fn push(&mut self, slice: &VolatileSlice<'_>) {
        let needed = |bytes: &Vec<u8>| bytes.len() + slice.len();
        // What was sent is dropped before the buffer grows.
        if self.start > 0 && needed(&self.bytes) > self.bytes.capacity() {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        let (needed, capacity) = (needed(&self.bytes), self.bytes.capacity());
        if needed > capacity {
            // By doubling, but to no more than the window, which is what may have to be held.
            let grown = (capacity * 2).min(self.window).max(needed);
            self.bytes.reserve_exact(grown - self.bytes.len());
        }
        let end = self.bytes.len();
        self.bytes.resize(needed, 0);
        slice.copy_to(&mut self.bytes[end..]);
        self.account.fetch_add(slice.len(), Ordering::Relaxed);
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn lc07_what_is_held_is_accounted_for_and_takes_no_more_than_the_window() {
        const WINDOW: u32 = 100_000;
        let account = Account::default();
        let held = || account.load(Ordering::Relaxed);
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut memory = vec![7; 3000];
        let mut outbox = Outbox::new(WINDOW, Arc::clone(&account));
        let mut sent = 0;
        while held() + memory.len() <= WINDOW as usize {
            let mut data = vec![VolatileSlice::from(&mut memory[..])];
            sent += outbox.send(ours.as_fd(), &mut data).unwrap();
            assert_eq!(held(), outbox.len());
        }
        assert!(sent > 0 && outbox.bytes.capacity() <= WINDOW as usize);
        let mut read = vec![0; sent];
        std::io::Read::read_exact(&mut (&theirs), &mut read).unwrap();
        assert!(outbox.flush(ours.as_fd()).unwrap() > 0);
        assert_eq!(held(), outbox.len());
        drop(outbox);
        assert_eq!(held(), 0);
    }
}
