use super::*;

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
}

fn u32_at(bytes: &[u8], offset: usize) -> usize {
    u32::from_le_bytes(bytes[offset..offset + 4].try_into().unwrap()) as usize
}

fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(bytes[offset..offset + 8].try_into().unwrap())
}

/// The table at a guest address, with its checksum checked.
fn table(all: &[u8], address: u64) -> &[u8] {
    let start = (address - ACPI) as usize;
    let length = u32_at(all, start + 4);
    let table = &all[start..start + length];
    assert_eq!(sum(table), 0, "{}", String::from_utf8_lossy(&table[..4]));
    table
}

fn tables(all: &[u8]) -> [&[u8]; 3] {
    assert_eq!(&all[..8], b"RSD PTR ");
    assert_eq!(sum(&all[..20]), 0);
    assert_eq!(sum(&all[..36]), 0);
    let xsdt = table(all, u64_at(all, 24));
    assert_eq!((&xsdt[..4], xsdt.len()), (&b"XSDT"[..], 36 + 16));
    let fadt = table(all, u64_at(xsdt, 36));
    let madt = table(all, u64_at(xsdt, 44));
    [fadt, madt, table(all, u64_at(fadt, 140))]
}

#[test]
fn every_table_is_reached_from_the_rsdp_and_sums_to_zero() {
    for (cpus, virtio) in [(1, 0), (1, 1), (4, 2), (32, crate::layout::VIRTIO_MAX)] {
        let all = build(cpus, virtio);
        let [fadt, madt, dsdt] = tables(&all);
        assert_eq!(
            [&fadt[..4], &madt[..4], &dsdt[..4]],
            [b"FACP", b"APIC", b"DSDT"]
        );
        assert!(all.len() as u64 <= ACPI_END - ACPI);
    }
}

#[test]
fn fadt_is_hardware_reduced_with_reset_and_both_sleep_registers() {
    let all = build(1, 1);
    let [fadt, ..] = tables(&all);
    let flags = u32_at(fadt, 112);
    assert_eq!(flags, (1 << 20) | (1 << 10));
    // Boot flags: no VGA, no CMOS clock, and no 8042 among them.
    assert_eq!(fadt[109..111], [0x24, 0]);
    let io = |port: u16| {
        let [low, high] = port.to_le_bytes();
        [1, 8, 0, 1, low, high, 0, 0, 0, 0, 0, 0]
    };
    assert_eq!(fadt[116..128], io(0x602));
    assert_eq!(fadt[128], RESET_VALUE);
    assert_eq!(fadt[244..256], io(0x600));
    assert_eq!(fadt[256..268], io(0x601));
}

#[test]
fn madt_has_each_cpu_and_the_ioapic() {
    let all = build(3, 1);
    let [_, madt, _] = tables(&all);
    assert_eq!(u32_at(madt, 36), 0xfee0_0000);
    let mut expected = Vec::new();
    for id in 0..3 {
        expected.extend([0, 8, id, id, 1, 0, 0, 0]);
    }
    expected.extend([1, 12, 0, 0, 0, 0, 0xc0, 0xfe, 0, 0, 0, 0]);
    assert_eq!(madt[44..], expected);
}

#[test]
fn dsdt_bytes_are_as_the_specification_has_them() {
    let all = build(1, 1);
    let [_, _, dsdt] = tables(&all);
    let aml = &dsdt[36..];
    // Name(_S5_, Package(4) {5, 0, 0, 0}) with the 5 as a dword.
    let sleep = [
        &[0x08][..],
        b"_S5_",
        &[
            0x12, 0x0c, 0x04, 0x0c, 5, 0, 0, 0, 0x0a, 0, 0x0a, 0, 0x0a, 0,
        ],
    ]
    .concat();
    let find = |needle: &[u8]| {
        aml.windows(needle.len())
            .position(|window| window == needle)
    };
    assert!(find(&sleep[..5]).is_some());
    // Memory32Fixed(ReadWrite, 0xc0000000, 0x1000); Interrupt(consumer, edge, high, exclusive) 5.
    let virtio = [
        &[0x86, 9, 0, 1, 0, 0, 0, 0xc0, 0, 0x10, 0, 0][..],
        &[0x89, 6, 0, 0x03, 1, 5, 0, 0, 0, 0x79, 0],
    ]
    .concat();
    assert!(find(&virtio).is_some(), "{aml:x?}");
    assert!(find(b"\x08_HID\x0dLNRO0005\0").is_some());
    assert!(find(b"\x08_HID\x0dQEMU0001\0").is_some());
    // EISA id of PNP0501, IO(Decode16, 0x3f8, 0x3f8, 1, 8).
    assert!(find(b"\x08_HID\x0c\x41\xd0\x05\x01").is_some());
    assert!(find(&[0x47, 1, 0xf8, 3, 0xf8, 3, 1, 8]).is_some());
    assert!(find(&[0x47, 1, 0x05, 5, 0x05, 5, 1, 1]).is_some());
}

#[test]
fn only_the_off_type_with_enable_turns_off() {
    let off: Vec<u8> = (0..=255).filter(|&value| turns_off(value)).collect();
    assert!(off.contains(&((5 << 2) | 0x20)));
    assert!(off.iter().all(|value| value & 0x3c == 0x34));
    assert!(!turns_off(0x20) && !turns_off(5 << 2));
}
