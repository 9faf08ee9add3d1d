//! The state in which the first vCPU enters a kernel: 64-bit mode, flat segments, the first GiB mapped.
//!
//! boot.rst, "64-bit Boot Protocol": paging on with kernel, zero page and command line identity-mapped,
//! `__BOOT_CS` (0x10) and `__BOOT_DS` (0x18) flat, interrupts off, `rsi` the address of `boot_params`.

use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};

use crate::layout::{BOOT_GDT, BOOT_IDT, BOOT_PARAMS, BOOT_PD, BOOT_PDPT, BOOT_PML4, BOOT_STACK};

const CR0_PE: u64 = 1;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;

const PRESENT_WRITABLE: u64 = 3;
const LARGE: u64 = 1 << 7;

/// Segment selectors and their descriptors, in GDT order: two unused, code, data, task.
const GDT: [u64; 5] = [
    0,
    0,
    0x00af_9b00_0000_ffff,
    0x00cf_9300_0000_ffff,
    0x008f_8b00_0000_ffff,
];
const CODE: u16 = 0x10;
const DATA: u16 = 0x18;
const TASK: u16 = 0x20;

/// Writes the GDT and the page tables.
///
/// # Errors
/// When guest memory does not reach up to them.
pub fn write_tables(memory: &GuestMemoryMmap) -> Result<(), GuestMemoryError> {
    let bytes: Vec<u8> = GDT.iter().flat_map(|entry| entry.to_le_bytes()).collect();
    memory.write_slice(&bytes, GuestAddress(BOOT_GDT))?;
    memory.write_obj(BOOT_PDPT | PRESENT_WRITABLE, GuestAddress(BOOT_PML4))?;
    memory.write_obj(BOOT_PD | PRESENT_WRITABLE, GuestAddress(BOOT_PDPT))?;
    let directory: Vec<u8> = (0..512u64)
        .flat_map(|entry| ((entry << 21) | LARGE | PRESENT_WRITABLE).to_le_bytes())
        .collect();
    memory.write_slice(&directory, GuestAddress(BOOT_PD))
}

/// General registers at `entry`.
#[must_use]
pub fn general(entry: u64) -> kvm_regs {
    kvm_regs {
        // Bit 1 is always set.
        rflags: 2,
        rip: entry,
        rsp: BOOT_STACK,
        rbp: BOOT_STACK,
        rsi: BOOT_PARAMS,
        ..Default::default()
    }
}

/// Puts a vCPU's system registers into 64-bit mode; keeps what KVM set (the APIC base).
pub fn enter_long_mode(sregs: &mut kvm_sregs) {
    let data = segment(DATA);
    sregs.cs = segment(CODE);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = segment(TASK);
    sregs.gdt.base = BOOT_GDT;
    sregs.gdt.limit = (size_of_val(&GDT) - 1) as u16;
    sregs.idt.base = BOOT_IDT;
    sregs.idt.limit = 7;
    sregs.cr0 |= CR0_PE | CR0_PG;
    sregs.cr3 = BOOT_PML4;
    sregs.cr4 |= CR4_PAE;
    sregs.efer |= EFER_LME | EFER_LMA;
}

/// The descriptor behind `selector`, spread out as KVM wants it (Intel SDM 3, 3.4.5).
fn segment(selector: u16) -> kvm_segment {
    let descriptor = GDT[usize::from(selector / 8)];
    let bit = |at: u32| ((descriptor >> at) & 1) as u8;
    kvm_segment {
        base: 0,
        // All have granularity set: the limit counts pages.
        limit: 0xffff_ffff,
        selector,
        type_: ((descriptor >> 40) & 0xf) as u8,
        s: bit(44),
        dpl: ((descriptor >> 45) & 3) as u8,
        present: bit(47),
        avl: bit(52),
        l: bit(53),
        db: bit(54),
        g: bit(55),
        unusable: 0,
        padding: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_match_the_protocol() {
        let (code, data, task) = (segment(CODE), segment(DATA), segment(TASK));
        assert_eq!(
            (code.type_, code.s, code.l, code.db, code.g, code.present),
            (0xb, 1, 1, 0, 1, 1)
        );
        assert_eq!(
            (data.type_, data.s, data.l, data.db, data.g),
            (3, 1, 0, 1, 1)
        );
        assert_eq!((task.type_, task.s, task.present), (0xb, 0, 1));
    }

    #[test]
    fn first_gib_is_mapped_to_itself() {
        let memory = crate::memory::create(crate::memory::MIN).unwrap();
        write_tables(&memory).unwrap();
        let read = |address| memory.read_obj::<u64>(GuestAddress(address)).unwrap();
        assert_eq!(read(BOOT_PML4), BOOT_PDPT | 3);
        assert_eq!(read(BOOT_PDPT), BOOT_PD | 3);
        for entry in [0u64, 1, 8, 511] {
            assert_eq!(read(BOOT_PD + entry * 8), (entry * (2 << 20)) | 0x83);
        }
    }

    #[test]
    fn tables_do_not_overlap() {
        assert!(BOOT_GDT + size_of_val(&GDT) as u64 <= BOOT_IDT);
        const { assert!(BOOT_PARAMS + 4096 <= BOOT_STACK && BOOT_STACK < BOOT_PML4) };
        const { assert!(BOOT_PML4 + 4096 <= BOOT_PDPT && BOOT_PDPT + 4096 <= BOOT_PD) };
    }
}
