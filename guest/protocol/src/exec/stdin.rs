//! Stdin bytes on their way to a workload: never more than the client was given credit for.

use crate::limits::STDIN_WINDOW;

/// What a client has sent and the workload has not yet taken.
///
/// ```
/// use vmm_protocol::exec::Stdin;
///
/// let mut stdin = Stdin::new();
/// stdin.push(b"hello");
/// stdin.close();
/// assert_eq!(stdin.pending(), b"hello");
/// assert_eq!(stdin.wrote(5), 5); // as many more may be sent
/// assert!(stdin.ended()); // now the pipe is closed
/// ```
#[derive(Debug, Default)]
pub struct Stdin {
    bytes: Vec<u8>,
    head: usize,
    closing: bool,
    broken: bool,
}

impl Stdin {
    /// Nothing sent yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes what came in a frame. The session has checked it against the credit, so this is
    /// bounded by [`STDIN_WINDOW`]. After the end, or when nothing reads any more, it is thrown
    /// away.
    pub fn push(&mut self, data: &[u8]) {
        if self.closing || self.broken {
            return;
        }
        debug_assert!(
            (self.bytes.len() - self.head + data.len()) as u64 <= STDIN_WINDOW,
            "beyond the credit"
        );
        if self.head == self.bytes.len() {
            self.bytes.clear();
            self.head = 0;
        }
        self.bytes.extend_from_slice(data);
    }

    /// The client has closed it: what is pending is still delivered.
    pub fn close(&mut self) {
        self.closing = true;
    }

    /// What is to be written to the workload next.
    pub fn pending(&self) -> &[u8] {
        &self.bytes[self.head..]
    }

    /// The workload took `count` bytes; the answer is the credit to give back.
    pub fn wrote(&mut self, count: usize) -> u64 {
        let count = count.min(self.bytes.len() - self.head);
        self.head += count;
        // Shift when half is gone, so that a slow reader costs at most one copy per byte.
        if self.head * 2 >= self.bytes.len() {
            self.bytes.drain(..self.head);
            self.head = 0;
        }
        count as u64
    }

    /// Nothing reads it any more: what is pending is thrown away, and the answer is the credit to
    /// give back.
    pub fn broke(&mut self) -> u64 {
        self.broken = true;
        let lost = self.pending().len() as u64;
        self.bytes = Vec::new();
        self.head = 0;
        lost
    }

    /// Everything is delivered and the client has closed it, or nothing reads: the pipe can go.
    pub fn ended(&self) -> bool {
        self.broken || (self.closing && self.pending().is_empty())
    }
}
