//! The guest's init agent as a library, so that the loopback harness drives the very loop that
//! runs in a guest.
//!
//! ```text
//!               monitor                                            clients
//!                  | control: life, power off                         | sessions
//!   control::Link <+                                                  +> sessions::Connection
//!        |                                                                   | exec, stdin, cancel
//!        |  new life: old sessions end                                       v
//!        +----------------------------> agent (the loop) <----------- running::Running
//!                                        |  one epoll, one clock             | pipes, PTY, report
//!                                        v                                   v
//!                                   reaper (the only waiter)          sys::spawn -> cgroup leaf
//! ```
//!
//! One thread, no descriptor that blocks, no wait without a deadline, no polling: an idle agent
//! does not wake up. What is decided lies in `vmm-protocol` as state machines without I/O; this
//! crate holds the descriptors and does what they say.
//!
//! # Example
//!
//! An agent is a [`platform::Platform`] (a guest, or a loopback over unix sockets) and its limits:
//!
//! ```no_run
//! use vmm_agent::agent::{self, Limits};
//! use vmm_agent::cgroup::Cgroup2;
//! use vmm_agent::init::mounts;
//! use vmm_agent::log::Log;
//! use vmm_agent::platform::Guest;
//!
//! let mut log = Log::kernel();
//! let hierarchy = Cgroup2::new(mounts::cgroup_tree()?)?;
//! agent::run(Guest::new(hierarchy), Limits::for_memory(128 << 20), &mut log)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Limits
//!
//! [`agent::Limits`]: sessions, execs, and the bytes that all output stores may take; each has a
//! refusal of its own. Per exec the limits are the protocol's. The log is bounded. The kernel must
//! be 5.14 or later: `cgroup.kill` is what makes a kill reach a whole leaf at once.
//!
//! # Modules
//!
//! - `agent` is the loop, `sessions`, `running` and `control` what it watches, `execs` what is kept of execs and for whom,
//!   `leaving` its end.
//! - [`command`] turns a request into a plan, [`sys::spawn`] the plan into a process.
//! - [`cgroup`] and [`platform`] are what differs between a guest and the loopback.
//! - [`reaper`] waits for children, [`init`] does what only process 1 does.
//! - [`sys`] is the only place with unsafe code: one file for each kind of system call.
//!
//! # Errors
//!
//! [`agent::Error`] ends the loop; [`sys::spawn::Failure`] is a start that failed, with its stage;
//! [`init::identity::Unready`] a life that could not be taken on. What a client or a workload does
//! is never an error of the agent's.

pub mod agent;
pub mod cgroup;
pub mod command;
mod control;
mod execs;
pub mod files;
pub mod init;
mod leaving;
pub mod log;
mod pace;
pub mod platform;
pub mod reaper;
mod resident;
mod running;
mod sessions;
pub mod sys;

/// Whether a test has taken the protection of this case away. Always false unless the crate is
/// built with the feature `negative-control`.
fn negative_control(case: &str) -> bool {
    cfg!(feature = "negative-control")
        && std::env::var_os("VMM_NEGATIVE_CONTROL").is_some_and(|value| value == case)
}
