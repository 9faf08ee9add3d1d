//! One vCPU: its set-up, its thread and its stop.
//!
//! ```text
//! create -> configure (CPUID, MSRs, registers, LAPIC) -> spawn -> KVM_RUN loop -> exit
//!                                                           ^ kick: signal + immediate_exit
//! ```

mod kick;
mod report;
mod run;
mod run_page;

use kvm_bindings::{CpuId, Msrs, kvm_lapic_state};
use kvm_ioctls::{VcpuFd, VmFd};

use crate::boot::registers;
use crate::kvm::{Error, call};

pub(crate) use run::Running;

/// Offsets of the local interrupt pins in the LAPIC page (Intel SDM 3, table 11-1).
const LVT_LINT0: usize = 0x350;
const LVT_LINT1: usize = 0x360;
/// Delivery modes of a pin, at bits 10-8.
const MODE_NMI: u32 = 4 << 8;
const MODE_EXTINT: u32 = 7 << 8;
const MODE_MASK: u32 = 7 << 8;

/// A vCPU that does not run yet.
pub(crate) struct Vcpu {
    id: u8,
    fd: VcpuFd,
}

impl Vcpu {
    /// Creates vCPU `id`.
    pub(crate) fn create(vm: &VmFd, id: u8) -> Result<Self, Error> {
        let fd = vm
            .create_vcpu(u64::from(id))
            .map_err(call("KVM_CREATE_VCPU"))?;
        Ok(Self { id, fd })
    }

    /// Sets what firmware would have set. `entry` is for the first vCPU; the others wait for their
    /// start-up interrupt, the state in which KVM makes them (`KVM_MP_STATE_UNINITIALIZED`).
    pub(crate) fn configure(
        &self,
        cpuid: &CpuId,
        msrs: &Msrs,
        entry: Option<u64>,
    ) -> Result<(), Error> {
        // CPUID first: KVM checks later registers against it.
        self.fd.set_cpuid2(cpuid).map_err(call("KVM_SET_CPUID2"))?;
        let written = self.fd.set_msrs(msrs).map_err(call("KVM_SET_MSRS"))?;
        if written != msrs.as_slice().len() {
            return Err(Error::Capability("a boot MSR"));
        }
        self.set_local_interrupts()?;
        let Some(entry) = entry else { return Ok(()) };
        let mut sregs = self.fd.get_sregs().map_err(call("KVM_GET_SREGS"))?;
        registers::enter_long_mode(&mut sregs);
        self.fd.set_sregs(&sregs).map_err(call("KVM_SET_SREGS"))?;
        self.fd
            .set_regs(&registers::general(entry))
            .map_err(call("KVM_SET_REGS"))
    }

    /// LINT0 takes the 8259's interrupts, LINT1 is the NMI: the wiring of the virtual-wire mode that a
    /// kernel expects of firmware (MultiProcessor specification 1.4, 3.6.2.2).
    fn set_local_interrupts(&self) -> Result<(), Error> {
        let mut lapic = self.fd.get_lapic().map_err(call("KVM_GET_LAPIC"))?;
        for (offset, mode) in [(LVT_LINT0, MODE_EXTINT), (LVT_LINT1, MODE_NMI)] {
            let value = register(&lapic, offset) & !MODE_MASK | mode;
            set_register(&mut lapic, offset, value);
        }
        self.fd.set_lapic(&lapic).map_err(call("KVM_SET_LAPIC"))
    }
}

fn register(lapic: &kvm_lapic_state, offset: usize) -> u32 {
    (0..4).fold(0, |value, index| {
        value | u32::from(lapic.regs[offset + index] as u8) << (8 * index)
    })
}

fn set_register(lapic: &mut kvm_lapic_state, offset: usize, value: u32) {
    for (index, byte) in value.to_le_bytes().into_iter().enumerate() {
        lapic.regs[offset + index] = byte as _;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lapic_registers_are_little_endian_and_keep_their_neighbours() {
        let mut lapic = kvm_lapic_state::default();
        set_register(&mut lapic, LVT_LINT0, 0x8001_0700);
        assert_eq!(register(&lapic, LVT_LINT0), 0x8001_0700);
        assert_eq!(register(&lapic, LVT_LINT0 + 4), 0);
        assert_eq!(register(&lapic, LVT_LINT0 - 4), 0);
    }
}
