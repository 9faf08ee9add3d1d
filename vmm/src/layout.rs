//! Where everything lies in guest physical memory and port space.
//!
//! ```text
//! 0x0000_0000  real-mode hole kept free        0x0000_7000  boot_params
//! 0x0000_0500  boot GDT                        0x0000_8ff0  boot stack (grows down)
//! 0x0000_9000  page tables (PML4, PDPT, PD)    0x0002_0000  command line
//! 0x000e_0000  ACPI tables                     0x0010_0000  kernel
//! ... RAM ...
//! 0xc000_0000  virtio-mmio, 4 KiB each         0xfec0_0000  IOAPIC
//! 0xfee0_0000  local APICs                     0xfffb_c000  KVM's identity map and TSS
//! 0x1_0000_0000  the rest of RAM
//! ```

/// End of the first RAM region and start of the gap that devices live in.
pub const GAP_START: u64 = 0xc000_0000;
/// End of the gap: RAM above 3 GiB continues here.
pub const GAP_END: u64 = 0x1_0000_0000;

/// GDT with a flat 64-bit code and data segment.
pub const BOOT_GDT: u64 = 0x500;
/// Empty IDT.
pub const BOOT_IDT: u64 = 0x540;
/// `struct boot_params`, the "zero page".
pub const BOOT_PARAMS: u64 = 0x7000;
/// Initial stack pointer.
pub const BOOT_STACK: u64 = 0x8ff0;
/// Page-map level 4; the two tables below it follow.
pub const BOOT_PML4: u64 = 0x9000;
/// Page directory pointer table.
pub const BOOT_PDPT: u64 = 0xa000;
/// Page directory: maps the first GiB by 2 MiB pages.
pub const BOOT_PD: u64 = 0xb000;
/// Command line, NUL-terminated.
pub const CMDLINE: u64 = 0x2_0000;
/// Longest command line with its NUL: `COMMAND_LINE_SIZE` of x86 Linux.
pub const CMDLINE_MAX: usize = 2048;
/// End of conventional memory handed to the kernel; an EBDA would start here.
pub const LOW_RAM_END: u64 = 0x9_fc00;
/// ACPI tables: inside the window that kernels scan for the RSDP (ACPI 6.5, 5.2.5.1).
pub const ACPI: u64 = 0xe_0000;
/// End of the ACPI window.
pub const ACPI_END: u64 = 0x10_0000;
/// Start of extended memory: no kernel segment may lie below it.
pub const HIGH_RAM: u64 = 0x10_0000;

/// First virtio-mmio device.
pub const VIRTIO_MMIO: u64 = GAP_START;
/// Register window of one virtio-mmio device.
pub const VIRTIO_MMIO_SIZE: u64 = 0x1000;
/// Interrupt line of the first virtio-mmio device.
pub const VIRTIO_GSI: u32 = 5;
/// As many devices as lines 5 to 23 of the IOAPIC carry.
pub const VIRTIO_MAX: usize = 19;

/// IOAPIC registers.
pub const IOAPIC: u64 = 0xfec0_0000;
/// Local APIC registers.
pub const LAPIC: u64 = 0xfee0_0000;
/// One page that VMX uses for real mode; KVM wants it told.
pub const KVM_IDENTITY_MAP: u64 = 0xfffb_c000;
/// Three pages of TSS for VMX, after the identity map.
pub const KVM_TSS: u64 = 0xfffb_d000;

/// First serial port.
pub const SERIAL: u16 = 0x3f8;
/// Interrupt line of the serial port.
pub const SERIAL_GSI: u32 = 4;
/// Keyboard controller command port: a reset request of kernels without ACPI.
pub const KEYBOARD_COMMAND: u16 = 0x64;
/// pvpanic's event port.
pub const PANIC: u16 = 0x505;
/// ACPI sleep control register.
pub const SLEEP_CONTROL: u16 = 0x600;
/// ACPI sleep status register.
pub const SLEEP_STATUS: u16 = 0x601;
/// ACPI reset register.
pub const RESET: u16 = 0x602;

/// Address of virtio-mmio device `index`.
#[must_use]
pub const fn virtio_mmio(index: usize) -> u64 {
    VIRTIO_MMIO + index as u64 * VIRTIO_MMIO_SIZE
}

/// Interrupt line of virtio-mmio device `index`.
#[must_use]
pub const fn virtio_gsi(index: usize) -> u32 {
    VIRTIO_GSI + index as u32
}
