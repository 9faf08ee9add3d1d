//! A fake cgroup tree for an ordinary user.
//!
//! What makes a process a member must be inherited by all its descendants, survive `setsid`,
//! `execve` and reparenting, and not show in the environment: here it is a unique soft limit for
//! real-time processor time, which nothing in these tests uses. Killing looks for it in /proc
//! until no process bears it.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, Signal, getpid, pidfd_open, pidfd_send_signal, setrlimit,
};
use vmm_agent::cgroup::{Hierarchy, Leaf, Usage};

#[derive(Default)]
pub struct FakeHierarchy {
    pub next: u64,
    /// Leaves whose processes do not die, as one in an uninterruptible sleep.
    pub stubborn: bool,
}

impl Hierarchy for FakeHierarchy {
    type Leaf = FakeLeaf;

    fn create(&mut self) -> Result<FakeLeaf, Errno> {
        self.next += 1;
        let agent = u64::from(getpid().as_raw_nonzero().get().unsigned_abs());
        let mark = (1 << 62) | (agent << 24) | self.next;
        Ok(FakeLeaf {
            mark,
            stubborn: self.stubborn,
        })
    }
}

pub struct FakeLeaf {
    mark: u64,
    stubborn: bool,
}

impl Leaf for FakeLeaf {
    fn enter(&mut self) -> Result<Option<BorrowedFd<'_>>, Errno> {
        // The next fork inherits it; the agent itself is left out by its pid.
        let limit = Rlimit {
            current: Some(self.mark),
            maximum: None,
        };
        setrlimit(Resource::Rttime, limit)?;
        Ok(None)
    }

    fn watch(&self) -> Result<Option<OwnedFd>, Errno> {
        Ok(None)
    }

    fn populated(&self, _watch: Option<BorrowedFd<'_>>) -> Result<bool, Errno> {
        Ok(!self.members().is_empty())
    }

    fn kill(&mut self) -> Result<(), Errno> {
        if self.stubborn {
            return Ok(());
        }
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(5) {
            let members = self.members();
            if members.is_empty() {
                return Ok(());
            }
            for pid in members {
                let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else {
                    continue;
                };
                // Looked at again now that the descriptor names it, whatever its number does.
                if mark(pid) == Some(self.mark) {
                    let _ = pidfd_send_signal(&process, Signal::KILL);
                    let timeout = Timespec {
                        tv_sec: 1,
                        tv_nsec: 0,
                    };
                    let _ = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&timeout));
                }
            }
        }
        Err(Errno::TIMEDOUT)
    }

    fn oom_kills(&self) -> u64 {
        0
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }

    fn remove(&mut self) -> Result<(), Errno> {
        if self.members().is_empty() {
            Ok(())
        } else {
            Err(Errno::BUSY)
        }
    }
}

impl FakeLeaf {
    fn members(&self) -> Vec<Pid> {
        let Ok(processes) = std::fs::read_dir("/proc") else {
            return Vec::new();
        };
        processes
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .filter_map(Pid::from_raw)
            .filter(|pid| {
                *pid != getpid() && mark(*pid) == Some(self.mark) && alive(&pid.to_string())
            })
            .collect()
    }
}

fn mark(pid: Pid) -> Option<u64> {
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", pid.as_raw_nonzero())).ok()?;
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max realtime timeout"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// A zombie is no member: it has left its cgroup, and only waits to be collected.
pub fn alive(pid: &str) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .ok()
        .and_then(|stat| {
            Some(
                stat.rsplit_once(')')?
                    .1
                    .trim_start()
                    .starts_with(['Z', 'X']),
            )
        })
        .is_some_and(|dead| !dead)
}

/// Waits until a process has died; panics when it does not. A real cgroup's kill is a signal
/// that its processes take when they next run.
pub fn wait_dead(pid: &str) {
    let Ok(number) = pid.trim().parse() else {
        panic!("{pid:?} is no process")
    };
    let Some(number) = Pid::from_raw(number) else {
        panic!("{pid:?} is no process")
    };
    // Gone and collected already, if it cannot be opened.
    if let Ok(process) = pidfd_open(number, PidfdFlags::empty()) {
        crate::harness::wait_readable(process, crate::harness::PATIENCE);
    }
}
