//! What to say of a vCPU that KVM cannot run on.

use std::fmt::Write;

use kvm_ioctls::VcpuFd;

/// Names of `KVM_INTERNAL_ERROR_*` (Linux `include/uapi/linux/kvm.h`).
pub(super) fn suberror(number: u32) -> &'static str {
    match number {
        1 => "the guest ran an instruction that this KVM cannot emulate",
        2 => "an interrupt arrived where none may",
        3 => "an exception could not be delivered",
        4 => "the CPU left the guest for a reason that KVM does not know",
        _ => "an internal error of KVM",
    }
}

/// One line on where a vCPU is; for an error message, so what cannot be read is left out.
pub(super) fn place(vcpu: &VcpuFd) -> String {
    let mut line = String::new();
    if let Ok(regs) = vcpu.get_regs() {
        let _ = write!(
            line,
            "rip {:#x} rsp {:#x} rflags {:#x}",
            regs.rip, regs.rsp, regs.rflags
        );
    }
    if let Ok(sregs) = vcpu.get_sregs() {
        let _ = write!(
            line,
            " cs {:#x} cr0 {:#x} cr2 {:#x} cr3 {:#x} cr4 {:#x} efer {:#x}",
            sregs.cs.selector, sregs.cr0, sregs.cr2, sregs.cr3, sregs.cr4, sregs.efer
        );
    }
    line
}

/// Words of an internal error; for an instruction that cannot be emulated the first holds flags and length and
/// the next two its bytes.
pub(super) fn words(data: &[u64]) -> String {
    let words: Vec<String> = data.iter().map(|word| format!("{word:#x}")).collect();
    words.join(" ")
}
