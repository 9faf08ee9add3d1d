//! `struct boot_params` (the "zero page") and the e820 memory map in it.

use linux_loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use super::initramfs::Placed;
use crate::layout::{
    ACPI, ACPI_END, BOOT_PARAMS, CMDLINE, CMDLINE_MAX, HIGH_RAM, KVM_IDENTITY_MAP, LOW_RAM_END,
};

/// e820 types (ACPI 6.5, table 15.1).
const RAM: u32 = 1;
const RESERVED: u32 = 2;
const RECLAIMABLE: u32 = 3;

// Setup header (boot.rst, "Details of header fields").
const BOOT_FLAG: u16 = 0xaa55;
const HEADER_MAGIC: u32 = 0x5372_6448;
const LOADER_UNDEFINED: u8 = 0xff;
const LOADED_HIGH: u8 = 1;
const KERNEL_ALIGNMENT: u32 = 0x100_0000;

/// The memory map: `(start, length, type)`, in order and without overlap.
#[must_use]
pub fn e820(regions: &[(u64, u64)]) -> Vec<(u64, u64, u32)> {
    let mut map = vec![(0, LOW_RAM_END, RAM), (ACPI, ACPI_END - ACPI, RECLAIMABLE)];
    for &(start, length) in regions {
        if start == 0 {
            map.push((HIGH_RAM, length - HIGH_RAM, RAM));
            // What VMX needs of KVM's lies in the gap: nothing may be mapped over it.
            map.push((KVM_IDENTITY_MAP, 4 * 4096, RESERVED));
        } else {
            map.push((start, length, RAM));
        }
    }
    map
}

/// Writes the zero page. `header` is the kernel's own setup header, if it has one.
///
/// # Errors
/// When guest memory does not reach up to the zero page.
pub fn write(
    memory: &GuestMemoryMmap,
    header: Option<setup_header>,
    initramfs: Option<Placed>,
) -> Result<(), vm_memory::GuestMemoryError> {
    let hdr = header.unwrap_or_else(|| setup_header {
        boot_flag: BOOT_FLAG,
        header: HEADER_MAGIC,
        kernel_alignment: KERNEL_ALIGNMENT,
        cmdline_size: CMDLINE_MAX as u32 - 1,
        loadflags: LOADED_HIGH,
        ..Default::default()
    });
    let mut params = boot_params {
        hdr,
        ..Default::default()
    };
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.cmd_line_ptr = CMDLINE as u32;
    params.acpi_rsdp_addr = ACPI;
    if let Some(Placed { address, size }) = initramfs {
        // Both fit: an initramfs lies below 2 GiB.
        params.hdr.ramdisk_image = address as u32;
        params.hdr.ramdisk_size = size as u32;
    }
    let regions: Vec<(u64, u64)> = memory
        .iter()
        .map(|region| (region.start_addr().0, region.len()))
        .collect();
    let map = e820(&regions);
    for (slot, &(addr, size, kind)) in params.e820_table.iter_mut().zip(&map) {
        *slot = boot_e820_entry {
            addr,
            size,
            r#type: kind,
        };
    }
    params.e820_entries = map.len() as u8;
    memory.write_obj(params, GuestAddress(BOOT_PARAMS))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory;

    #[test]
    fn e820_is_ordered_disjoint_and_has_all_of_high_memory() {
        for size in [
            memory::MIN,
            128 << 20,
            3 << 30,
            (3 << 30) + 4096,
            4 << 30,
            64 << 30,
        ] {
            let map = e820(&memory::regions(size));
            let mut sorted = map.clone();
            sorted.sort_unstable();
            for pair in sorted.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{size:#x}: {map:x?}");
            }
            let ram: u64 = map
                .iter()
                .filter(|entry| entry.2 == RAM)
                .map(|entry| entry.1)
                .sum();
            // All of it but the legacy window from 639 KiB to 1 MiB.
            assert_eq!(ram, size - (HIGH_RAM - LOW_RAM_END), "{size:#x}");
        }
    }

    #[test]
    fn e820_of_128_mib_as_written() {
        assert_eq!(
            e820(&memory::regions(128 << 20)),
            [
                (0, 0x9_fc00, 1),
                (0xe_0000, 0x2_0000, 3),
                (0x10_0000, 0x7f0_0000, 1),
                (0xfffb_c000, 0x4000, 2),
            ]
        );
    }

    #[test]
    fn zero_page_carries_the_fields_that_a_kernel_reads() {
        let memory = memory::create(8 << 20).unwrap();
        write(
            &memory,
            None,
            Some(Placed {
                address: 0x40_0000,
                size: 77,
            }),
        )
        .unwrap();
        let at = |offset| GuestAddress(BOOT_PARAMS + offset);
        assert_eq!(memory.read_obj::<u16>(at(0x1fe)).unwrap(), BOOT_FLAG);
        assert_eq!(memory.read_obj::<u32>(at(0x202)).unwrap(), HEADER_MAGIC);
        assert_eq!(memory.read_obj::<u8>(at(0x210)).unwrap(), LOADER_UNDEFINED);
        assert_eq!(memory.read_obj::<u32>(at(0x218)).unwrap(), 0x40_0000);
        assert_eq!(memory.read_obj::<u32>(at(0x21c)).unwrap(), 77);
        assert_eq!(memory.read_obj::<u32>(at(0x228)).unwrap(), CMDLINE as u32);
        assert_eq!(memory.read_obj::<u64>(at(0x70)).unwrap(), ACPI);
        assert_eq!(memory.read_obj::<u8>(at(0x1e8)).unwrap(), 4);
        assert_eq!(memory.read_obj::<u8>(at(0x1ef)).unwrap(), 0, "sentinel");
    }
}
