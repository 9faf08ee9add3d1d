//! The one place that waits for children.
//!
//! Init is the parent of every orphan, so it must wait for processes that it never started, and
//! a status can be had only once. With two waiters one of them takes the other's. Here there is
//! one: whatever has died is collected, and told apart by its pid, which cannot have been reused
//! because it is only now given back.

use std::collections::HashMap;

use rustix::io::Errno;
use rustix::process::{Pid, WaitOptions};

/// How a main process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// It exited with this code.
    Exited(u8),
    /// It died of this signal.
    Signaled(u8),
    /// The kernel's word for it is neither.
    Unknown,
}

/// Waits for all children; knows which are an exec's main process.
#[derive(Debug, Default)]
pub struct Reaper {
    mains: HashMap<Pid, u64>,
    orphans: u64,
}

/// How many deaths are handled before the rest of the loop has its turn.
pub const BURST: usize = 256;

impl Reaper {
    /// Announces the main process of `exec`; in the same turn of the loop as its fork.
    pub fn expect(&mut self, pid: Pid, exec: u64) {
        self.mains.insert(pid, exec);
    }

    /// Collects up to [`BURST`] dead children. The mains among them come back in `dead`; the
    /// result says whether there may be more.
    pub fn collect(&mut self, dead: &mut Vec<(u64, Status)>) -> bool {
        for _ in 0..BURST {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => {
                    let status = match (status.exit_status(), status.terminating_signal()) {
                        (Some(code), _) => {
                            u8::try_from(code).map_or(Status::Unknown, Status::Exited)
                        }
                        (_, Some(signal)) => {
                            u8::try_from(signal).map_or(Status::Unknown, Status::Signaled)
                        }
                        _ => Status::Unknown,
                    };
                    match self.mains.remove(&pid) {
                        Some(exec) => dead.push((exec, status)),
                        None => self.orphans += 1,
                    }
                }
                Err(Errno::INTR) => {}
                // None has died, or there is none.
                Ok(None) | Err(_) => return false,
            }
        }
        true
    }

    /// How many processes were collected that nobody waited for.
    pub fn orphans(&self) -> u64 {
        self.orphans
    }
}
