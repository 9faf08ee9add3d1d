//! What only init does: the guest's file systems, modules, identity, and its end.

pub mod identity;
pub mod modules;
pub mod mounts;

use rustix::system::RebootCommand;

/// Syncs and switches the machine off. Returns only if the kernel will not.
pub fn power_off() {
    rustix::fs::sync();
    let _ = rustix::system::reboot(RebootCommand::PowerOff);
    // Without a power-off driver: a halted machine still ends its virtual CPUs.
    let _ = rustix::system::reboot(RebootCommand::Halt);
}
