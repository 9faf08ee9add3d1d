//! A process that cannot be taken for another one that has its number later.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// A process by its number and the time of its start (in clock ticks since boot), as `/proc/PID/stat` has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// When it started.
    pub start_time: u64,
}

impl Process {
    /// This process.
    ///
    /// # Errors
    /// When `/proc` is not mounted.
    pub fn own() -> io::Result<Self> {
        let pid = std::process::id();
        let (start_time, _) = stat(pid)?;
        Ok(Self { pid, start_time })
    }

    /// True while it runs: a zombie does not.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        stat(self.pid)
            .is_ok_and(|(start, state)| start == self.start_time && !matches!(state, b'Z' | b'X'))
    }

    /// A descriptor of it that becomes readable when it ends, and through which a signal reaches no other.
    ///
    /// `None` if it has ended.
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn open(&self) -> io::Result<Option<OwnedFd>> {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else {
            return Ok(None);
        };
        match pidfd_open(pid, PidfdFlags::empty()) {
            // The number may have been another's when the descriptor was made; now it cannot change any more.
            Ok(descriptor) => Ok(self.is_alive().then_some(descriptor)),
            Err(rustix::io::Errno::SRCH) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// Start time and state of a process.
fn stat(pid: u32) -> io::Result<(u64, u8)> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    parse(&text).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

/// The program's name may hold anything, so fields count from the last parenthesis on: state is the first, start time
/// the twentieth (proc(5) numbers them 3 and 22).
fn parse(text: &str) -> Option<(u64, u8)> {
    let mut fields = text.get(text.rfind(')')? + 1..)?.split_ascii_whitespace();
    let state = *fields.next()?.as_bytes().first()?;
    let start = fields.nth(18)?.parse().ok()?;
    Some((start, state))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_process_is_alive_and_another_start_time_is_not_it() {
        let own = Process::own().unwrap();
        assert!(own.is_alive());
        assert!(own.open().unwrap().is_some());
        let other = Process {
            start_time: own.start_time + 1,
            ..own
        };
        assert!(!other.is_alive());
        assert!(other.open().unwrap().is_none());
    }

    #[test]
    fn ended_processes_are_not_alive_even_before_they_are_collected() {
        let mut child = std::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let (start_time, _) = stat(child.id()).unwrap();
        let process = Process {
            pid: child.id(),
            start_time,
        };
        let descriptor = process.open().unwrap().unwrap();
        drop(child.stdin.take());
        let mut poll = [rustix::event::PollFd::new(
            &descriptor,
            rustix::event::PollFlags::IN,
        )];
        rustix::event::poll(&mut poll, None).unwrap();
        assert!(!process.is_alive());
        child.wait().unwrap();
        assert!(!process.is_alive());
    }

    #[test]
    fn names_with_parentheses_and_spaces_do_not_confuse() {
        let text = "7 (a) b (c) R 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4242 0 0";
        assert_eq!(parse(text), Some((4242, b'R')));
        assert_eq!(parse("7 (a"), None);
        assert_eq!(parse("7 (a) R 1"), None);
    }
}
