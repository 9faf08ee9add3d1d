//! Model-specific registers at boot: what firmware would have left.

use kvm_bindings::{Msrs, kvm_msr_entry};

/// `IA32_MISC_ENABLE`: string instructions may use fast microcode.
const MISC_ENABLE: u32 = 0x1a0;
const MISC_ENABLE_FAST_STRING: u64 = 1;
/// `IA32_MTRR_DEF_TYPE`: MTRRs on, everything write-back unless a page table says otherwise. Linux takes
/// "off" for a broken firmware and then maps all memory uncached.
const MTRR_DEF_TYPE: u32 = 0x2ff;
const MTRR_ENABLE_WRITE_BACK: u64 = (1 << 11) | 6;

/// Registers to set on each vCPU before it runs, with their values.
///
/// All others (system call and descriptor bases among them) are zero in a fresh vCPU already, and the
/// kernel sets them before it uses them.
pub const BOOT: [(u32, u64); 2] = [
    (MISC_ENABLE, MISC_ENABLE_FAST_STRING),
    (MTRR_DEF_TYPE, MTRR_ENABLE_WRITE_BACK),
];

/// [`BOOT`] as KVM takes it.
///
/// # Errors
/// Never in practice: the list is far below KVM's limit.
pub fn boot() -> Result<Msrs, vmm_sys_util::fam::Error> {
    Msrs::from_entries(&BOOT.map(|(index, data)| kvm_msr_entry {
        index,
        data,
        ..Default::default()
    }))
}
