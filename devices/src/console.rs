//! The last bytes that a guest wrote to its console.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How much of the console is kept by default, in bytes.
pub const DEFAULT_CAPACITY: usize = 64 * 1024;

/// A bounded log of console output: a flooding guest costs no more than its capacity (LC07). Clones
/// share it, so the vCPU that writes and whoever reports an error hold the same log.
///
/// ```
/// use std::io::Write;
/// use vmm_devices::console::ConsoleLog;
///
/// let log = ConsoleLog::new(16);
/// log.clone().write_all(b"Linux version 6\nKernel panic")?;
/// assert_eq!(log.bytes(), b"n 6\nKernel panic");
/// assert_eq!(log.last_lines(1), "Kernel panic");
/// assert_eq!(log.dropped(), 12);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ConsoleLog(Arc<Mutex<Ring>>);

#[derive(Debug)]
struct Ring {
    bytes: VecDeque<u8>,
    capacity: usize,
    dropped: u64,
}

impl ConsoleLog {
    /// A log that keeps the last `capacity` bytes. Memory is taken as it fills.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self(Arc::new(Mutex::new(Ring {
            bytes: VecDeque::new(),
            capacity,
            dropped: 0,
        })))
    }

    /// Appends `data`, dropping the oldest bytes beyond the capacity.
    pub fn append(&self, data: &[u8]) {
        let mut ring = self.ring();
        let kept = &data[data.len().saturating_sub(ring.capacity)..];
        let excess = (ring.bytes.len() + kept.len()).saturating_sub(ring.capacity);
        ring.bytes.drain(..excess);
        ring.bytes.extend(kept);
        ring.dropped += (excess + data.len() - kept.len()) as u64;
    }

    /// All bytes kept.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        self.ring().bytes.iter().copied().collect()
    }

    /// How many bytes were dropped so far.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.ring().dropped
    }

    /// The last `count` lines that are not empty, for an error message: control bytes other than
    /// the line feed are left out, so that a guest cannot write to the terminal of whoever reads
    /// it.
    #[must_use]
    pub fn last_lines(&self, count: usize) -> String {
        let bytes = self.bytes();
        let text = String::from_utf8_lossy(&bytes);
        let mut lines: Vec<String> = text
            .rsplit('\n')
            .map(|line| line.chars().filter(|c| !c.is_control()).collect::<String>())
            .filter(|line| !line.trim().is_empty())
            .take(count)
            .collect();
        lines.reverse();
        lines.join("\n")
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        // Each critical section leaves the ring whole, so a poisoned lock holds nothing wrong.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for ConsoleLog {
    fn default() -> Self {
        Self::new(DEFAULT_CAPACITY)
    }
}

impl io::Write for ConsoleLog {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.append(data);
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lc07_flooding_console_stays_bounded() {
        let log = ConsoleLog::new(1000);
        for round in 0..10_000u32 {
            log.append(format!("line {round}\n").as_bytes());
        }
        assert_eq!(log.bytes().len(), 1000);
        assert!(log.ring().bytes.capacity() <= 2048);
        assert_eq!(log.last_lines(2), "line 9998\nline 9999");
    }

    #[test]
    fn one_write_larger_than_the_log_keeps_its_end() {
        let log = ConsoleLog::new(4);
        log.append(b"ab");
        log.append(b"0123456789");
        assert_eq!(log.bytes(), b"6789");
        assert_eq!(log.dropped(), 8);
    }

    #[test]
    fn last_lines_carry_no_control_bytes_and_survive_bad_utf8() {
        let log = ConsoleLog::new(100);
        log.append(b"\x1b[31mred\r\n\n\xff\xfe\n");
        assert_eq!(log.last_lines(5), "[31mred\n\u{fffd}\u{fffd}");
        assert_eq!(log.last_lines(0), "");
    }
}
