//! The state in which the Linux 64-bit boot protocol enters a kernel.

use std::error::Error;

use kvm_bindings::kvm_segment;
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// The command line.
pub const COMMAND_LINE: GuestAddress = GuestAddress(0x2_0000);
const BOOT_PARAMS: u64 = 0x7000;
const GDT: u64 = 0x500;
const PML4: u64 = 0x9000;
const PDPT: u64 = 0xa000;
const PD: u64 = 0xb000;

/// Page tables (the first GiB in 2 MiB pages), descriptors and the pointer to the command line.
pub fn write_tables(memory: &GuestMemoryMmap<()>) -> Result<(), Box<dyn Error>> {
    memory.write_obj(COMMAND_LINE.0 as u32, GuestAddress(BOOT_PARAMS + 0x228))?;
    memory.write_obj(PDPT | 3, GuestAddress(PML4))?;
    memory.write_obj(PD | 3, GuestAddress(PDPT))?;
    for page in 0..512u64 {
        memory.write_obj(page << 21 | 0x83, GuestAddress(PD + page * 8))?;
    }
    for (index, entry) in [0, 0, 0x00af_9b00_0000_ffffu64, 0x00cf_9300_0000_ffff]
        .iter()
        .enumerate()
    {
        memory.write_obj(*entry, GuestAddress(GDT + index as u64 * 8))?;
    }
    Ok(())
}

/// 64-bit mode, boot_params in RSI.
pub fn set_registers(vcpu: &VcpuFd, start: u64) -> Result<(), Box<dyn Error>> {
    let mut system = vcpu.get_sregs()?;
    let code = kvm_segment {
        limit: u32::MAX,
        selector: 0x10,
        type_: 11,
        present: 1,
        s: 1,
        l: 1,
        g: 1,
        ..Default::default()
    };
    let data = kvm_segment {
        selector: 0x18,
        type_: 3,
        l: 0,
        db: 1,
        ..code
    };
    system.cs = code;
    for segment in [
        &mut system.ds,
        &mut system.es,
        &mut system.fs,
        &mut system.gs,
        &mut system.ss,
    ] {
        *segment = data;
    }
    system.gdt.base = GDT;
    system.gdt.limit = 31;
    system.cr0 = 0x8000_0033; // PG, NE, ET, MP, PE
    system.cr3 = PML4;
    system.cr4 = 0x20; // PAE
    system.efer = 0x500; // LME, LMA
    vcpu.set_sregs(&system)?;
    let mut general = vcpu.get_regs()?;
    general.rip = start;
    general.rsi = BOOT_PARAMS;
    general.rflags = 2;
    vcpu.set_regs(&general)?;
    Ok(())
}
