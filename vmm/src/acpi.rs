//! ACPI tables: enough for an unmodified kernel to find its CPUs, its devices and the way to power off.
//!
//! ```text
//! RSDP -> XSDT -> FADT -> DSDT  (\_S5, virtio-mmio LNRO0005, serial PNP0501, panic QEMU0001)
//!              -> MADT          (one local APIC a vCPU, one IOAPIC)
//! ```
//!
//! The platform is hardware-reduced (ACPI 6.5, 4.1): no PM timer, no SCI, no legacy devices, so that a
//! kernel waits for none of them. Power-off goes through the sleep registers, reset through the reset register.

use acpi_tables::Aml;
use acpi_tables::aml::{
    Device, EISAName, IO, Interrupt, Memory32Fixed, Name, Package, Path, ResourceTemplate, Scope,
};
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{
    EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic,
};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;

use crate::layout::{
    ACPI, ACPI_END, IOAPIC, LAPIC, PANIC, RESET, SERIAL, SERIAL_GSI, SLEEP_CONTROL, SLEEP_STATUS,
    VIRTIO_MMIO_SIZE, virtio_gsi, virtio_mmio,
};

const OEM: [u8; 6] = *b"VMM   ";
const OEM_TABLE: [u8; 8] = *b"VMM     ";
const REVISION: u32 = 1;

/// Sleep type of `\_S5`, as the guest writes it into the sleep control register.
pub const SLEEP_TYPE_OFF: u8 = 5;
/// Value of the reset register that resets.
pub const RESET_VALUE: u8 = 1;
/// Sleep control register (ACPI 6.5, table 4.18): bits 4-2 the type, bit 5 "go".
const SLEEP_TYPE_SHIFT: u8 = 2;
const SLEEP_ENABLE: u8 = 1 << 5;

/// Boot architecture flags (ACPI 6.5, table 5.10): no VGA, no MSI refusal, no CMOS clock; bit 1 (8042) clear.
const NO_VGA: u16 = 1 << 2;
const NO_CMOS_CLOCK: u16 = 1 << 5;

/// Whether a write to the sleep control register turns the machine off.
#[must_use]
pub const fn turns_off(value: u8) -> bool {
    value & SLEEP_ENABLE != 0 && (value >> SLEEP_TYPE_SHIFT) & 7 == SLEEP_TYPE_OFF
}

/// All tables for `cpus` vCPUs and `virtio` virtio-mmio devices, to be written at [`ACPI`].
#[must_use]
pub fn build(cpus: u8, virtio: usize) -> Vec<u8> {
    let mut out = vec![0; Rsdp::len()];
    let mut place = |table: &dyn Aml| {
        out.resize(out.len().next_multiple_of(16), 0);
        let address = ACPI + out.len() as u64;
        table.to_aml_bytes(&mut out);
        address
    };
    let dsdt = place(&dsdt(virtio));
    let fadt = place(&fadt(dsdt));
    let madt = place(&madt(cpus));
    let mut xsdt = XSDT::new(OEM, OEM_TABLE, REVISION);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = place(&xsdt);
    let mut rsdp = Vec::new();
    Rsdp::new(OEM, xsdt).to_aml_bytes(&mut rsdp);
    out[..rsdp.len()].copy_from_slice(&rsdp);
    debug_assert!(out.len() as u64 <= ACPI_END - ACPI);
    out
}

fn port(address: u16) -> GAS {
    GAS::new(
        AddressSpace::SystemIo,
        8,
        0,
        AccessSize::ByteAccess,
        u64::from(address),
    )
}

fn fadt(dsdt: u64) -> acpi_tables::fadt::FADT {
    let mut fadt = FADTBuilder::new(OEM, OEM_TABLE, REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup);
    fadt.iapc_boot_arch = (NO_VGA | NO_CMOS_CLOCK).into();
    fadt.reset_reg = port(RESET);
    fadt.reset_value = RESET_VALUE;
    // Without both, Linux does not offer power-off (acpi_sleep_state_supported).
    fadt.sleep_control_reg = port(SLEEP_CONTROL);
    fadt.sleep_status_reg = port(SLEEP_STATUS);
    fadt.finalize()
}

fn madt(cpus: u8) -> MADT {
    let mut madt = MADT::new(
        OEM,
        OEM_TABLE,
        REVISION,
        LocalInterruptController::Address(LAPIC as u32),
    );
    for id in 0..cpus {
        madt.add_structure(ProcessorLocalApic::new(id, id, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(0, IOAPIC as u32, 0));
    madt
}

fn dsdt(virtio: usize) -> Sdt {
    let mut aml = Vec::new();
    let off = u32::from(SLEEP_TYPE_OFF);
    Name::new(
        Path::new("_S5_"),
        &Package::new(vec![&off, &0u8, &0u8, &0u8]),
    )
    .to_aml_bytes(&mut aml);
    for index in 0..virtio {
        virtio_node(index, &mut aml);
    }
    serial_node(&mut aml);
    panic_node(&mut aml);
    let mut dsdt = Sdt::new(*b"DSDT", 36, 2, OEM, OEM_TABLE, REVISION);
    dsdt.append_slice(&aml);
    dsdt
}

/// Adds one device under `\_SB`.
fn node(name: &str, id: &dyn Aml, unique: u32, resources: Vec<&dyn Aml>, aml: &mut Vec<u8>) {
    let hid = Name::new(Path::new("_HID"), id);
    let uid = Name::new(Path::new("_UID"), &unique);
    // Cache-coherent: Linux refuses DMA of a platform device that does not say so.
    let cca = Name::new(Path::new("_CCA"), &1u8);
    let crs = Name::new(Path::new("_CRS"), &ResourceTemplate::new(resources));
    let device = Device::new(Path::new(name), vec![&hid, &uid, &cca, &crs]);
    Scope::new(Path::new("_SB_"), vec![&device]).to_aml_bytes(aml);
}

fn virtio_node(index: usize, aml: &mut Vec<u8>) {
    // Devices lie below 4 GiB: VIRTIO_MAX pages from the start of the gap.
    let window = Memory32Fixed::new(true, virtio_mmio(index) as u32, VIRTIO_MMIO_SIZE as u32);
    // Edge: an irqfd without a resample descriptor raises and lowers the line in one go.
    let line = Interrupt::new(true, true, false, false, virtio_gsi(index));
    let name = format!("V{index:03}");
    node(&name, &"LNRO0005", index as u32, vec![&window, &line], aml);
}

fn serial_node(aml: &mut Vec<u8>) {
    let ports = IO::new(SERIAL, SERIAL, 1, 8);
    let line = Interrupt::new(true, true, false, false, SERIAL_GSI);
    node(
        "COM1",
        &EISAName::new("PNP0501"),
        0,
        vec![&ports, &line],
        aml,
    );
}

fn panic_node(aml: &mut Vec<u8>) {
    let ports = IO::new(PANIC, PANIC, 1, 1);
    node("PEVT", &"QEMU0001", 0, vec![&ports], aml);
}

#[cfg(test)]
mod tests;
