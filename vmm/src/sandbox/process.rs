//! A process that cannot be taken for another one that has its number later.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// A process by its number, the time of its start (in clock ticks since boot) as `/proc/PID/stat` has it, and the boot:
/// a state root on a disk outlives its host's, and services start alike after each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// When it started.
    pub start_time: u64,
    /// The host's boot; `None` where the host does not tell.
    pub boot: Option<u128>,
}

impl Process {
    /// This process.
    ///
    /// # Errors
    /// When `/proc` is not mounted.
    pub fn own() -> io::Result<Self> {
        let pid = std::process::id();
        Ok(Self {
            pid,
            start_time: stat(pid)?.start_time,
            boot: boot(),
        })
    }

    /// True while it runs: one that is being killed does not, though it may take a while over giving back its memory.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        let runs = || self.stat().is_some_and(|stat| !stat.ending);
        // The kernel writes a line field by field. Between two of them a kill may turn from pending (a field far behind)
        // to taken (one before it), so that neither shows; the next line has the one.
        runs() && runs()
    }

    /// A descriptor of it that becomes readable when it ends, and through which a signal reaches no other.
    ///
    /// `None` if it is not alive.
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn open(&self) -> io::Result<Option<OwnedFd>> {
        Ok(self.descriptor()?.filter(|_| self.is_alive()))
    }

    /// Waits until the last of its threads has ended, and it has let go of all it held; false if that takes longer.
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn gone(&self, within: Duration) -> io::Result<bool> {
        match self.descriptor()? {
            Some(descriptor) => Self::ended(&descriptor, within),
            None => Ok(true),
        }
    }

    /// The same by a descriptor from [`Process::open`].
    ///
    /// # Errors
    /// What poll(2) says.
    pub fn ended(descriptor: impl AsFd, within: Duration) -> io::Result<bool> {
        let begun = Instant::now();
        loop {
            let rest = within.saturating_sub(begun.elapsed());
            let timeout = Timespec {
                tv_sec: i64::try_from(rest.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: rest.subsec_nanos().into(),
            };
            let mut polled = [PollFd::new(&descriptor, PollFlags::IN)];
            match poll(&mut polled, Some(&timeout)) {
                Ok(count) => return Ok(count > 0),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn descriptor(&self) -> io::Result<Option<OwnedFd>> {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else {
            return Ok(None);
        };
        match pidfd_open(pid, PidfdFlags::empty()) {
            // The number may have been another's when the descriptor was made; now it cannot change any more.
            Ok(descriptor) => Ok(self.stat().map(|_| descriptor)),
            Err(rustix::io::Errno::SRCH) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// What the host says of it; `None` if the number is free or another's.
    fn stat(&self) -> Option<Stat> {
        stat(self.pid)
            .ok()
            .filter(|stat| stat.start_time == self.start_time && self.boot == boot())
    }
}

/// The host's boot, by the kernel's random number for it.
fn boot() -> Option<u128> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    u128::from_str_radix(&text.trim().replace('-', ""), 16).ok()
}

/// What matters of `/proc/PID/stat`.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    start_time: u64,
    /// It runs no more, or will not once its threads have seen that they are killed.
    ending: bool,
}

fn stat(pid: u32) -> io::Result<Stat> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    parse(&text).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

/// The program's name may hold anything, so fields count from the last parenthesis on. proc(5) numbers them from 1, and
/// the first there is 3.
fn parse(text: &str) -> Option<Stat> {
    let fields: Vec<&str> = text
        .get(text.rfind(')')? + 1..)?
        .split_ascii_whitespace()
        .collect();
    let field = |number: usize| fields.get(number - 3).copied();
    let number = |at: usize| field(at)?.parse::<u64>().ok();
    // PF_EXITING and PF_SIGNALED of include/linux/sched.h: the main thread is on its way out.
    const LEAVES: u64 = 0x4 | 0x400;
    const KILL: u64 = 1 << (libc::SIGKILL - 1);
    let zombie = matches!(field(3)?, "Z" | "X");
    Some(Stat {
        start_time: number(22)?,
        ending: zombie || number(9)? & LEAVES != 0 || number(31)? & KILL != 0,
    })
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
        assert!(own.boot.is_some());
        let earlier = Process {
            boot: own.boot.map(|boot| !boot),
            ..own
        };
        assert!(!earlier.is_alive());
        assert!(earlier.open().unwrap().is_none());
    }

    #[test]
    fn ended_processes_are_not_alive_even_before_they_are_collected() {
        let mut child = std::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let start_time = stat(child.id()).unwrap().start_time;
        let process = Process {
            pid: child.id(),
            start_time,
            boot: boot(),
        };
        let descriptor = process.open().unwrap().unwrap();
        assert!(!process.gone(Duration::ZERO).unwrap());
        drop(child.stdin.take());
        assert!(Process::ended(&descriptor, Duration::from_secs(60)).unwrap());
        assert!(!process.is_alive() && process.open().unwrap().is_none());
        assert!(process.gone(Duration::ZERO).unwrap());
        child.wait().unwrap();
        assert!(!process.is_alive() && process.gone(Duration::ZERO).unwrap());
    }

    #[test]
    fn names_with_parentheses_and_spaces_do_not_confuse() {
        let stat = |state, flags, pending| {
            let rest = format!(
                "1 7 7 0 -1 {flags} 0 0 0 0 0 0 0 0 20 0 1 0 4242 0 0 9 0 0 0 0 0 {pending} 0"
            );
            parse(&format!("7 (a) b (c) {state} {rest}"))
        };
        for (state, flags, pending, ending) in [
            ("R", 0x40_0000, 0, false),
            ("S", 0, 1 << 14, false),
            ("Z", 0, 0, true),
            ("R", 0x40_0004, 0, true),
            ("R", 0x400, 0, true),
            ("D", 0, 1 << 8, true),
        ] {
            let wanted = Stat {
                start_time: 4242,
                ending,
            };
            assert_eq!(stat(state, flags, pending), Some(wanted), "{state} {flags}");
        }
        assert_eq!(parse("7 (a"), None);
        assert_eq!(parse("7 (a) R 1"), None);
    }

    #[test]
    fn lc02_a_process_that_is_killed_is_not_alive_from_then_on() {
        for _ in 0..20 {
            let mut child = std::process::Command::new("cat")
                .stdin(std::process::Stdio::piped())
                .spawn()
                .unwrap();
            let process = Process {
                pid: child.id(),
                start_time: stat(child.id()).unwrap().start_time,
                boot: boot(),
            };
            assert!(process.is_alive());
            child.kill().unwrap();
            assert!(!process.is_alive());
            child.wait().unwrap();
        }
    }
}
