//! Where the agent runs: a guest, with vsock and the kernel's cgroups, or a loopback, with unix
//! sockets and a fake tree. The loop is the same.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::thread::CapabilitySet;
use vmm_protocol::{AGENT_PORT, CONTROL_PORT, Life};

use crate::cgroup::{Cgroup2, Hierarchy};
use crate::init::identity::{self, Unready};
use crate::sys::{scheduling, spawn, vsock};

/// What the loop asks of its surroundings. Every socket is non-blocking and close-on-exec.
pub trait Platform {
    /// Where exec leaves come from.
    type Hierarchy: Hierarchy;

    /// The hierarchy.
    fn hierarchy(&mut self) -> &mut Self::Hierarchy;

    /// The listener for sessions.
    ///
    /// # Errors
    /// What the kernel says.
    fn listen(&mut self) -> Result<OwnedFd, Errno>;

    /// Takes a connection; `None` if it came from someone who may not have one.
    ///
    /// # Errors
    /// [`Errno::AGAIN`] when there is none; what else the kernel says.
    fn accept(&mut self, listener: &OwnedFd) -> Result<Option<OwnedFd>, Errno>;

    /// Starts to dial the monitor; the socket turns writable when that is decided.
    ///
    /// # Errors
    /// What the kernel says.
    fn dial(&mut self) -> Result<OwnedFd, Errno>;

    /// Takes on a life.
    ///
    /// # Errors
    /// The step that failed.
    fn apply(&mut self, life: &Life) -> Result<(), Unready>;

    /// Whether workloads may go on when the agent is woken, for a while.
    fn relax(&mut self, relaxed: bool);

    /// The capabilities that workloads may keep; `None` where there are none to drop.
    fn confine(&self) -> Option<CapabilitySet>;
}

/// The inside of a machine.
#[derive(Debug)]
pub struct Guest {
    hierarchy: Cgroup2,
    source_port: u32,
}

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 64;

impl Guest {
    /// A guest whose cgroup hierarchy is reached through `hierarchy`.
    pub fn new(hierarchy: Cgroup2) -> Self {
        Self {
            hierarchy,
            source_port: 0,
        }
    }
}

impl Platform for Guest {
    type Hierarchy = Cgroup2;

    fn hierarchy(&mut self) -> &mut Cgroup2 {
        &mut self.hierarchy
    }

    fn listen(&mut self) -> Result<OwnedFd, Errno> {
        vsock::listen(AGENT_PORT, BACKLOG)
    }

    fn accept(&mut self, listener: &OwnedFd) -> Result<Option<OwnedFd>, Errno> {
        let (socket, peer) = vsock::accept(listener)?;
        Ok(is_host(peer).then_some(socket))
    }

    fn dial(&mut self) -> Result<OwnedFd, Errno> {
        let to = vsock::Address {
            cid: vsock::CID_HOST,
            port: CONTROL_PORT,
        };
        // A new source port each time: the monitor, or a former life's, may still know the last
        // one. All are below 1024, where no workload can bind.
        for _ in 1..AGENT_PORT {
            self.source_port = self.source_port % (AGENT_PORT - 1) + 1;
            match vsock::connect(self.source_port, to) {
                Err(Errno::ADDRINUSE) => {}
                result => return result,
            }
        }
        Err(Errno::ADDRINUSE)
    }

    fn apply(&mut self, life: &Life) -> Result<(), Unready> {
        identity::apply(life)
    }

    fn relax(&mut self, relaxed: bool) {
        // A kernel that refuses costs speed alone.
        let _ = scheduling::relax(relaxed);
    }

    fn confine(&self) -> Option<CapabilitySet> {
        Some(spawn::default_capabilities())
    }
}

/// True for the host alone: stock kernels have a vsock loopback, by which a workload reaches the agent's port too.
fn is_host(peer: Option<vsock::Address>) -> bool {
    peer.is_some_and(|peer| peer.cid == vsock::CID_HOST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn se03_workload_on_the_vsock_loopback_is_no_host() {
        let from = |cid| Some(vsock::Address { cid, port: 1000 });
        assert!(is_host(from(2)));
        // The hypervisor's id, the loopback's, the guest's own, a sibling's, any, and a peer that has none.
        for peer in [0, 1, 3, 4, u32::MAX].map(from) {
            assert!(!is_host(peer), "{peer:?}");
        }
        assert!(!is_host(None));
    }
}
