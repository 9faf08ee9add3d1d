use std::io::Write;

use super::*;

/// An ELF with one segment of `in_file` bytes at `address`, `in_memory` long in memory.
pub(super) fn elf(address: u64, entry: u64, in_file: u64, in_memory: u64) -> Vec<u8> {
    let mut bytes = vec![0; 64 + PHDR];
    bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
    let mut put = |offset: usize, value: u64, size: usize| {
        bytes[offset..offset + size].copy_from_slice(&value.to_le_bytes()[..size]);
    };
    put(18, 62, 2);
    put(24, entry, 8);
    put(32, 64, 8);
    put(54, PHDR as u64, 2);
    put(56, 1, 2);
    put(64, PT_LOAD, 4);
    put(64 + 8, (64 + PHDR) as u64, 8);
    put(64 + 24, address, 8);
    put(64 + 32, in_file, 8);
    put(64 + 40, in_memory, 8);
    bytes.resize(64 + PHDR + in_file as usize, 0x90);
    bytes
}

fn bzimage(payload: usize, flags: u16, init_size: u32) -> Vec<u8> {
    let mut bytes = vec![0; 1024 + payload];
    let mut put = |offset: usize, value: u64, size: usize| {
        bytes[offset..offset + size].copy_from_slice(&value.to_le_bytes()[..size]);
    };
    put(0x1f1, 1, 1);
    put(0x1f4, payload.div_ceil(16) as u64, 4);
    put(0x202, u64::from(u32::from_le_bytes(*b"HdrS")), 4);
    put(0x206, 0x20f, 2);
    put(0x211, 1, 1);
    put(0x214, 0x10_0000, 4);
    put(0x236, u64::from(flags), 2);
    put(0x258, 0x100_0000, 8);
    put(0x260, u64::from(init_size), 4);
    bytes
}

fn load_bytes(bytes: &[u8], memory: u64) -> Result<Kernel, Error> {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    load(
        &crate::memory::create(memory).unwrap(),
        file,
        Path::new("/the/kernel"),
    )
}

fn message(bytes: &[u8], memory: u64) -> String {
    let message = load_bytes(bytes, memory).unwrap_err().to_string();
    assert!(message.contains("/the/kernel"), "{message}");
    message
}

#[test]
fn elf_is_loaded_and_entered_at_its_entry() {
    let kernel = load_bytes(&elf(0x10_0000, 0x10_0010, 64, 0x2000), 8 << 20).unwrap();
    assert_eq!((kernel.entry, kernel.end), (0x10_0010, 0x10_2000));
    assert!(kernel.header.is_none());
}

#[test]
fn bzimage_is_entered_at_its_64_bit_entry_and_owns_its_decompression_memory() {
    let kernel = load_bytes(&bzimage(4096, 1, 0x20_0000), 32 << 20).unwrap();
    assert_eq!((kernel.entry, kernel.end), (0x10_0200, 0x120_0000));
    assert_eq!({ kernel.header.unwrap().pref_address }, 0x100_0000);
}

#[test]
fn lc04_kernel_missing_or_a_folder_is_named() {
    let missing = open(Path::new("/no/such/kernel")).unwrap_err();
    assert!(missing.to_string().contains("/no/such/kernel"));
    assert!(matches!(
        open(Path::new("/")).unwrap_err(),
        Error::Read { .. }
    ));
}

#[test]
fn lc04_not_a_kernel_says_what_it_is() {
    assert!(message(b"", 8 << 20).contains("empty"));
    assert!(message(b"#!/bin/sh\n", 8 << 20).contains("script"));
    assert!(message(b"\x1f\x8b\x08rest", 8 << 20).contains("gzip"));
    assert!(message(&[0; 5000], 8 << 20).contains("no ELF and no bzImage"));
    let mut arm = elf(0x10_0000, 0x10_0000, 8, 8);
    arm[18] = 183;
    assert!(message(&arm, 8 << 20).contains("another machine"));
    assert!(message(&bzimage(4096, 0, 4096), 32 << 20).contains("64-bit entry"));
    assert!(message(&elf(0x10_0000, 0x50_0000, 8, 8), 8 << 20).contains("entry"));
}

#[test]
fn lc04_truncated_at_any_length_is_refused() {
    let whole = elf(0x10_0000, 0x10_0000, 64, 64);
    for length in 4..whole.len() {
        let error = load_bytes(&whole[..length], 8 << 20).unwrap_err();
        assert!(
            matches!(error, Error::Truncated { .. }),
            "{length}: {error}"
        );
    }
    let whole = bzimage(4096, 1, 0x1000);
    for length in [0x206, 0x240, 0x267, 1024, 1025, 4000, whole.len() - 16] {
        let error = load_bytes(&whole[..length], 32 << 20).unwrap_err();
        assert!(
            matches!(error, Error::Truncated { .. }),
            "{length}: {error}"
        );
    }
}

#[test]
fn lc04_too_large_for_memory_names_both() {
    let error = message(&elf(0x10_0000, 0x10_0000, 8, 9 << 20), 8 << 20);
    assert!(
        error.contains("0xa00000") && error.contains("0x800000"),
        "{error}"
    );
    let error = message(&bzimage(64, 1, 0x400_0000), 32 << 20);
    assert!(error.contains("0x5000000"), "{error}");
    // Sums that would wrap are too large as well, not small.
    assert!(message(&elf(0x10_0000, 0x10_0000, 8, u64::MAX), 8 << 20).contains("--memory"));
}

#[test]
fn segment_over_boot_data_is_refused() {
    assert!(message(&elf(0x7000, 0x7000, 8, 8), 8 << 20).contains("0x7000"));
}
