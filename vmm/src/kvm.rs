//! The few calls to `/dev/kvm` that assemble a machine, in the order that costs least.
#![allow(unsafe_code)] // KVM_SET_USER_MEMORY_REGION hands the kernel our mapping: see its SAFETY line.

use std::io;
use std::path::Path;

use kvm_bindings::{KVM_PIT_SPEAKER_DUMMY, kvm_pit_config, kvm_userspace_memory_region};
use kvm_ioctls::{Cap, Kvm, VmFd};
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vmm_sys_util::errno;

use crate::layout::{KVM_IDENTITY_MAP, KVM_TSS};

/// The device that all of this goes through.
pub const DEVICE: &str = "/dev/kvm";

/// Why KVM could not be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no such device.
    #[error(
        "no {0}: load KVM with 'modprobe kvm_intel' or 'modprobe kvm_amd', or turn on virtualization in the firmware or in the machine around this one"
    )]
    Missing(String),
    /// It is there, for others.
    #[error(
        "no permission for {0}: run 'sudo usermod -aG kvm $USER' and log in again, or run as root"
    )]
    Permission(String),
    /// Something else is wrong with it.
    #[error("cannot open {path}: run 'vmm doctor'")]
    Open {
        /// The device.
        path: String,
        /// What the host said.
        #[source]
        source: io::Error,
    },
    /// It speaks another interface.
    #[error("{path} has interface version {version}, this program speaks 12")]
    Version {
        /// The device.
        path: String,
        /// Its version.
        version: i32,
    },
    /// A capability that every KVM of the last ten years has.
    #[error("this KVM lacks {0}: use Linux 5.10 or newer")]
    Capability(&'static str),
    /// A call failed.
    #[error("{call} failed")]
    Call {
        /// Its name.
        call: &'static str,
        /// What the host said.
        #[source]
        source: errno::Error,
    },
}

/// Puts the name of the call to its error.
pub(crate) fn call(call: &'static str) -> impl Fn(errno::Error) -> Error {
    move |source| Error::Call { call, source }
}

/// Opens a KVM device and checks that it is one.
///
/// # Errors
/// [`Error::Missing`], [`Error::Permission`], [`Error::Open`], [`Error::Version`].
pub fn open(path: &Path) -> Result<Kvm, Error> {
    let name = path.display().to_string();
    let source = match rustix::fs::open(
        path,
        rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    ) {
        Ok(fd) => {
            let kvm = from_owned(fd);
            return match kvm.get_api_version() {
                12 => Ok(kvm),
                -1 => Err(Error::Open {
                    path: name,
                    source: io::Error::other("not a KVM device"),
                }),
                version => Err(Error::Version {
                    path: name,
                    version,
                }),
            };
        }
        Err(source) => source,
    };
    Err(match source {
        // ENXIO and ENODEV: a device node with no driver behind it.
        rustix::io::Errno::NOENT | rustix::io::Errno::NXIO | rustix::io::Errno::NODEV => {
            Error::Missing(name)
        }
        rustix::io::Errno::ACCESS | rustix::io::Errno::PERM => Error::Permission(name),
        other => Error::Open {
            path: name,
            source: other.into(),
        },
    })
}

fn from_owned(fd: rustix::fd::OwnedFd) -> Kvm {
    use std::os::fd::{FromRawFd, IntoRawFd};
    // SAFETY: the descriptor is open, ours alone, and given up by `into_raw_fd`.
    unsafe { Kvm::from_raw_fd(fd.into_raw_fd()) }
}

/// What KVM can do that a machine depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// The TSC deadline timer is emulated.
    pub tsc_deadline: bool,
    /// Most vCPUs of one machine.
    pub max_cpus: usize,
}

impl Capabilities {
    /// Asks KVM.
    ///
    /// # Errors
    /// [`Error::Capability`] for one that we cannot do without.
    pub fn ask(kvm: &Kvm) -> Result<Self, Error> {
        for (cap, name) in [
            (Cap::Irqfd, "irqfd"),
            (Cap::Ioeventfd, "ioeventfd"),
            (Cap::ImmediateExit, "immediate exit"),
        ] {
            if !kvm.check_extension(cap) {
                return Err(Error::Capability(name));
            }
        }
        Ok(Self {
            tsc_deadline: kvm.check_extension(Cap::TscDeadlineTimer),
            max_cpus: kvm.get_max_vcpus(),
        })
    }
}

/// Creates an empty machine.
///
/// # Errors
/// [`Error::Call`].
pub fn create_vm(kvm: &Kvm) -> Result<VmFd, Error> {
    loop {
        match kvm.create_vm() {
            // KVM_CREATE_VM gives up on a signal instead of starting over.
            Err(error) if error.errno() == rustix::io::Errno::INTR.raw_os_error() => {}
            other => return other.map_err(call("KVM_CREATE_VM")),
        }
    }
}

/// Gives the machine its memory, then its interrupt controllers and timer.
///
/// Memory comes first: adding a slot waits for every reader of the old slots, and once the interrupt
/// controllers are there the kernel waits a whole grace period (6 ms of the start of a small machine).
/// The caller keeps `memory` for as long as `vm` lives.
///
/// # Errors
/// [`Error::Call`].
pub fn furnish(vm: &VmFd, memory: &GuestMemoryMmap) -> Result<(), Error> {
    for (slot, region) in memory.iter().enumerate() {
        let region = kvm_userspace_memory_region {
            slot: slot as u32,
            flags: 0,
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: region.as_ptr() as u64,
        };
        // SAFETY: the mapping is live and as long as said, and outlives `vm` (the caller's promise); all
        // accesses of ours to it are volatile, so that the guest's writes break no assumption.
        unsafe { vm.set_user_memory_region(region) }.map_err(call("KVM_SET_USER_MEMORY_REGION"))?;
    }
    vm.set_identity_map_address(KVM_IDENTITY_MAP)
        .map_err(call("KVM_SET_IDENTITY_MAP_ADDR"))?;
    vm.set_tss_address(KVM_TSS as usize)
        .map_err(call("KVM_SET_TSS_ADDR"))?;
    vm.create_irq_chip().map_err(call("KVM_CREATE_IRQCHIP"))?;
    // Port 0x61 belongs to the timer too: kernels calibrate by it.
    let pit = kvm_pit_config {
        flags: KVM_PIT_SPEAKER_DUMMY,
        ..Default::default()
    };
    vm.create_pit2(pit).map_err(call("KVM_CREATE_PIT2"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lc04_no_device_and_no_permission_have_their_own_remedies() {
        let missing = open(Path::new("/no/such/kvm")).unwrap_err();
        assert!(missing.to_string().contains("/no/such/kvm"));
        assert!(missing.to_string().contains("modprobe"));
        assert!(
            Error::Permission(DEVICE.into())
                .to_string()
                .contains("usermod")
        );
        let other = open(Path::new("/dev/null")).unwrap_err();
        assert!(matches!(other, Error::Open { .. }), "{other}");
    }
}
