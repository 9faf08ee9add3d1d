//! Copies the loadable segments of a 64-bit ELF to where they say.

use std::error::Error;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

const PT_LOAD: u32 = 1;

/// Loads the file and returns its entry point.
pub fn load(file: &[u8], memory: &GuestMemoryMmap<()>) -> Result<u64, Box<dyn Error>> {
    if file.get(..5) != Some(b"\x7fELF\x02".as_slice()) {
        return Err("not a 64-bit ELF".into());
    }
    let headers = number::<8>(file, 32)? as usize;
    let count = number::<2>(file, 56)? as usize;
    for index in 0..count {
        let header = headers
            .checked_add(index * 56)
            .ok_or("program headers out of range")?;
        if number::<4>(file, header)? as u32 != PT_LOAD {
            continue;
        }
        let offset = number::<8>(file, header + 8)? as usize;
        let address = number::<8>(file, header + 24)?;
        let length = number::<8>(file, header + 32)? as usize;
        let end = offset.checked_add(length).ok_or("segment out of range")?;
        let bytes = file
            .get(offset..end)
            .ok_or("segment beyond the end of the file")?;
        memory.write_slice(bytes, GuestAddress(address))?;
    }
    number::<8>(file, 24)
}

/// The little-endian number of `N` bytes at `offset`.
fn number<const N: usize>(file: &[u8], offset: usize) -> Result<u64, Box<dyn Error>> {
    let bytes = file
        .get(offset..offset.saturating_add(N))
        .ok_or("truncated ELF")?;
    Ok(bytes
        .iter()
        .rev()
        .fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
}
