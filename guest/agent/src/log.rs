//! What the agent has to say: one line each to the kernel's log, which reaches the console.

use std::fmt;
use std::io::Write;
use std::os::fd::OwnedFd;

/// How much it matters, in the kernel's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// The guest or an exec is worse off.
    Error = 3,
    /// Good to know.
    Info = 6,
}

/// Lines beyond this are counted, not written: a workload must not be able to fill the console
/// by making the agent complain.
const LIMIT: u32 = 200;

/// A bounded log.
#[derive(Debug)]
pub struct Log {
    sink: Option<OwnedFd>,
    kernel: bool,
    written: u32,
}

impl Log {
    /// To the kernel's log; silent where there is none.
    pub fn kernel() -> Self {
        let flags = rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CLOEXEC;
        let sink = rustix::fs::open(c"/dev/kmsg", flags, rustix::fs::Mode::empty()).ok();
        Self {
            sink,
            kernel: true,
            written: 0,
        }
    }

    /// To a descriptor, as plain lines.
    pub fn to(sink: OwnedFd) -> Self {
        Self {
            sink: Some(sink),
            kernel: false,
            written: 0,
        }
    }

    /// Nowhere.
    pub fn none() -> Self {
        Self {
            sink: None,
            kernel: false,
            written: 0,
        }
    }

    /// Something is wrong.
    pub fn error(&mut self, message: impl fmt::Display) {
        self.write(Level::Error, message);
    }

    /// Something is worth knowing.
    pub fn info(&mut self, message: impl fmt::Display) {
        self.write(Level::Info, message);
    }

    fn write(&mut self, level: Level, message: impl fmt::Display) {
        let Some(sink) = &self.sink else { return };
        self.written = self.written.saturating_add(1);
        if self.written > LIMIT {
            return;
        }
        let mut line = Vec::with_capacity(160);
        if self.kernel {
            let _ = write!(line, "<{}>", level as u8);
        }
        let _ = write!(line, "vmm-agent: {message}");
        line.retain(|byte| *byte != b'\n');
        // The kernel takes at most about a thousand bytes at once.
        line.truncate(900);
        if self.written == LIMIT {
            line.extend_from_slice(b" (nothing more will be logged)");
        }
        line.push(b'\n');
        let _ = rustix::io::write(sink, &line);
    }
}
