//! The scheduler's policy for the agent's only thread.
// rustix has no such call, and the C library here refuses it.
#![allow(unsafe_code)]

use rustix::io::Errno;

/// Whether waking up takes the processor from a workload that runs (`SCHED_OTHER`) or waits for the scheduler's next
/// look (`SCHED_BATCH`). Children start with `SCHED_OTHER` in any case.
///
/// # Errors
/// What the kernel says.
pub fn relax(relaxed: bool) -> Result<(), Errno> {
    let policy = if relaxed {
        libc::SCHED_BATCH
    } else {
        libc::SCHED_OTHER
    };
    // struct sched_param of the kernel: a priority, which these policies do not have.
    let priority: libc::c_int = 0;
    // SAFETY: sched_setscheduler reads an int through the pointer; 0 is the calling thread.
    let result = unsafe {
        libc::syscall(
            libc::SYS_sched_setscheduler,
            0,
            policy | libc::SCHED_RESET_ON_FORK,
            &raw const priority,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(super::last_errno()),
    }
}
