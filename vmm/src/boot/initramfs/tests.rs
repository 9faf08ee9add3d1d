use std::io::Write;

use super::*;

fn archive(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, data) in files {
        entry(&mut out, name, 0o100_644, data.len());
        out.extend_from_slice(data);
        out.resize(out.len().next_multiple_of(4), 0);
    }
    entry(&mut out, "TRAILER!!!", 0, 0);
    out
}

fn load_bytes(
    bytes: Option<&[u8]>,
    agent: Option<&[u8]>,
    memory: u64,
    kernel_end: u64,
) -> Result<(GuestMemoryMmap, Option<Placed>), Error> {
    let memory = crate::memory::create(memory).unwrap();
    let file = bytes.map(|bytes| {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        (file.reopen().unwrap(), Path::new("/the/initramfs"))
    });
    let placed = load(&memory, file, agent, kernel_end)?;
    Ok((memory, placed))
}

fn content(memory: &GuestMemoryMmap, placed: Placed) -> Vec<u8> {
    let mut bytes = vec![0; placed.size as usize];
    memory
        .read_slice(&mut bytes, GuestAddress(placed.address))
        .unwrap();
    bytes
}

#[test]
fn agent_follows_the_archive_on_a_4_byte_boundary() {
    for padding in 0..4usize {
        let mut first = archive(&[("init", b"#!/bin/sh\n")]);
        first.extend(std::iter::repeat_n(0, padding));
        let agent = vec![0x5a; 1001 + padding];
        let (memory, placed) = load_bytes(Some(&first), Some(&agent), 16 << 20, 0x20_0000).unwrap();
        let bytes = content(&memory, placed.unwrap());
        let start = first.len().next_multiple_of(4);
        assert_eq!(&bytes[..first.len()], first);
        let second = &bytes[start..];
        assert_eq!(&second[..6], b"070701");
        assert_eq!(&second[HEADER..HEADER + 5], b".vmm\0");
        let at = second
            .windows(11)
            .position(|window| window == b".vmm/agent\0")
            .unwrap();
        let data = (at + 11).next_multiple_of(4);
        assert_eq!(&second[data..data + agent.len()], agent);
        // The second archive is a whole one of its own.
        let end = placed.unwrap();
        let own = Placed {
            address: end.address + start as u64,
            size: second.len() as u64,
        };
        assert_eq!(walk(&memory, own), Ok(()));
    }
}

#[test]
fn placed_at_the_top_of_low_memory_and_above_the_kernel() {
    let first = archive(&[]);
    let (_, placed) = load_bytes(Some(&first), None, 16 << 20, 0x20_0000).unwrap();
    let placed = placed.unwrap();
    assert_eq!(
        placed,
        Placed {
            address: (16 << 20) - 4096,
            size: first.len() as u64
        }
    );
    let (_, placed) = load_bytes(Some(&first), None, 4 << 30, 0x20_0000).unwrap();
    assert_eq!(placed.unwrap().address, LIMIT - 4096);
    let (_, none) = load_bytes(None, None, 16 << 20, 0).unwrap();
    assert_eq!(none, None);
}

#[test]
fn lc04_no_room_is_refused_with_the_numbers() {
    let error = load_bytes(
        Some(&archive(&[])),
        Some(&[0; 4096]),
        4 << 20,
        (4 << 20) - 4096,
    );
    let message = error.unwrap_err().to_string();
    assert!(
        message.contains("0x3ff000") && message.contains("--memory"),
        "{message}"
    );
}

#[test]
fn lc04_truncated_archive_is_refused_at_every_length() {
    let whole = archive(&[("init", &[7; 333]), ("etc/passwd", b"root:x:0:0\n")]);
    for length in 6..whole.len() - 3 {
        let error = load_bytes(Some(&whole[..length]), None, 4 << 20, 0x20_0000).unwrap_err();
        assert!(
            matches!(error, Error::Truncated { .. }),
            "{length}: {error}"
        );
    }
    load_bytes(Some(&whole), None, 4 << 20, 0x20_0000).unwrap();
}

#[test]
fn lc04_not_an_initramfs_is_refused() {
    for bytes in [
        &b""[..],
        b"07",
        b"\x7fELF....",
        b"hello world, this is no archive",
    ] {
        let error = load_bytes(Some(bytes), None, 4 << 20, 0x20_0000).unwrap_err();
        assert!(matches!(error, Error::Unknown { .. }), "{error}");
        assert!(error.to_string().contains("/the/initramfs"));
    }
    for magic in [
        &b"\x1f\x8b\x08rest"[..],
        b"\x28\xb5\x2f\xfdrest",
        b"\xfd7zXZ\0rest",
    ] {
        load_bytes(Some(magic), None, 4 << 20, 0x20_0000).unwrap();
    }
    assert!(
        open(Path::new("/no/such/initramfs"))
            .unwrap_err()
            .to_string()
            .contains("/no/such")
    );
}
