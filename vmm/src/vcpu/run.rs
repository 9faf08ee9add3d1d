//! The vCPU thread: enters the guest, serves what it leaves for, and stops when told.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};

use kvm_ioctls::{VcpuExit, VcpuFd};
use vmm_sys_util::signal::Killable;

use super::{Vcpu, kick, report, run_page};
use crate::bus::Bus;
use crate::exits::{ExitReason, Outcome};
use crate::kvm::{Error, call};

/// Stack of a vCPU thread: only what it touches is backed.
const STACK: usize = 256 << 10;

/// A vCPU in its thread.
pub(crate) struct Running {
    thread: JoinHandle<()>,
}

impl Running {
    /// Takes the vCPU out of the guest; it stops if the stop flag is set. Never lost, see [`kick`].
    pub(crate) fn kick(&self) {
        // The one error is a thread that has ended.
        let _ = self.thread.kill(kick::signal());
    }

    /// Waits for the thread's end.
    pub(crate) fn join(self) {
        // A panic of the thread has been recorded as the machine's end by its guard.
        let _ = self.thread.join();
    }
}

impl Vcpu {
    /// Starts the thread. It runs until `stop` is set and it is kicked, or the machine ends.
    pub(crate) fn spawn(
        self,
        bus: Arc<Bus>,
        outcome: Arc<Outcome>,
        stop: Arc<AtomicBool>,
    ) -> Result<Running, Error> {
        kick::install().map_err(call("sigaction"))?;
        let Self { id, fd } = self;
        let thread = Builder::new()
            .name(format!("vcpu{id}"))
            .stack_size(STACK)
            .spawn(move || {
                let guard = Guard { outcome, id };
                let reason = run(fd, id, &bus, &stop, &guard.outcome);
                guard.outcome.end(reason);
            })
            .map_err(|error: io::Error| Error::Call {
                call: "clone",
                source: vmm_sys_util::errno::Error::new(error.raw_os_error().unwrap_or(0)),
            })?;
        Ok(Running { thread })
    }
}

/// Ends the machine if the thread unwinds, so that nobody waits for a vCPU that is gone.
struct Guard {
    outcome: Arc<Outcome>,
    id: u8,
}

impl Drop for Guard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.outcome.end(ExitReason::Failed(format!(
                "vCPU {} panicked in the monitor",
                self.id
            )));
        }
    }
}

fn run(mut fd: VcpuFd, id: u8, bus: &Bus, stop: &AtomicBool, outcome: &Outcome) -> ExitReason {
    let entered = kick::Entered::new(&mut fd);
    loop {
        // Before the flag is looked at: a kick after this makes the next KVM_RUN return at once.
        entered.clear();
        if stop.load(Ordering::SeqCst) {
            return ExitReason::Stopped;
        }
        let end = step(&mut fd, id, bus);
        outcome.count_exit();
        if let Some(reason) = end {
            return reason;
        }
    }
}

/// Enters the guest once and serves its exit.
fn step(fd: &mut VcpuFd, id: u8, bus: &Bus) -> Option<ExitReason> {
    let end = match fd.run() {
        Ok(VcpuExit::IoOut(..)) => {
            let access = run_page::port_access(fd);
            return bus.port_out(access.port, access.width, access.data);
        }
        Ok(VcpuExit::IoIn(..)) => {
            let access = run_page::port_access(fd);
            bus.port_in(access.port, access.width, access.data);
            return None;
        }
        Ok(VcpuExit::MmioRead(address, data)) => {
            bus.mmio_read(address, data);
            return None;
        }
        Ok(VcpuExit::MmioWrite(address, data)) => {
            bus.mmio_write(address, data);
            return None;
        }
        Ok(VcpuExit::Intr) => return None,
        Ok(VcpuExit::Shutdown) => return Some(ExitReason::TripleFault),
        Ok(VcpuExit::InternalError) => None,
        Ok(VcpuExit::FailEntry(reason, cpu)) => Some(format!(
            "the CPU refused to enter the guest: reason {reason:#x} on host CPU {cpu}"
        )),
        Ok(other) => Some(format!("unexpected exit {other:?}")),
        Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => return None,
        Err(error) => Some(format!("KVM_RUN: {error}")),
    };
    let what = end.unwrap_or_else(|| {
        let (number, data) = run_page::internal_error(fd);
        format!(
            "{} (suberror {number}: {})",
            report::suberror(number),
            report::words(&data)
        )
    });
    Some(ExitReason::Failed(format!(
        "vCPU {id}: {what}; {}",
        report::place(fd)
    )))
}
