//! Takes the ELF image out of a bzImage.
//!
//! The setup header says where the compressed payload lies (Documentation/arch/x86/boot.rst: `setup_sects`,
//! `payload_offset`, `payload_length`); its first bytes say how it is compressed. The kernel's build appends the
//! unpacked size as four bytes after the stream (scripts/Makefile.lib, `size_append`), except with gzip, whose
//! own trailer is the same.

use std::io::Read;
use std::path::Path;

use crate::error::{Error, Naming, Result};
use crate::process;

/// More than any kernel unpacks to.
const SIZE_MAX: usize = 512 << 20;

/// The ELF image in the bzImage at `path`.
pub fn extract(path: &Path) -> Result<Vec<u8>> {
    let image = process::read(path)?;
    let payload =
        payload(&image).ok_or_else(|| Error::malformed(path, "not a bzImage with a payload"))?;
    let elf = unpack(payload).naming(|| format!("unpack {}", path.display()))?;
    if !elf.starts_with(b"\x7fELF") {
        return Err(Error::malformed(path, "its payload is not an ELF image"));
    }
    Ok(elf)
}

/// The compressed payload by the setup header.
fn payload(image: &[u8]) -> Option<&[u8]> {
    if image.get(0x1fe..0x200)? != [0x55, 0xaa] || image.get(0x202..0x206)? != b"HdrS" {
        return None;
    }
    // The payload's place is known from protocol 2.08.
    if u16::from_le_bytes(image.get(0x206..0x208)?.try_into().ok()?) < 0x208 {
        return None;
    }
    let sectors = match *image.get(0x1f1)? {
        0 => 4,
        sectors => usize::from(sectors),
    };
    let number =
        |at: usize| Some(u32::from_le_bytes(image.get(at..at + 4)?.try_into().ok()?) as usize);
    let start = (sectors + 1) * 512 + number(0x248)?;
    image.get(start..start.checked_add(number(0x24c)?)?)
}

/// Unpacks one kernel payload.
fn unpack(payload: &[u8]) -> std::io::Result<Vec<u8>> {
    let other = |error: &dyn std::fmt::Display| std::io::Error::other(error.to_string());
    match payload {
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => {
            read_all(lzma_rust2::XzReader::new(payload, false))
        }
        [0x28, 0xb5, 0x2f, 0xfd, ..] => read_all(
            ruzstd::decoding::StreamingDecoder::new(payload).map_err(|error| other(&error))?,
        ),
        [0x02, 0x21, 0x4c, 0x18, blocks @ ..] => unpack_lz4(blocks),
        // gzip's header without optional fields, which is how the kernel's build makes it.
        [0x1f, 0x8b, 8, 0, _, _, _, _, _, _, stream @ ..] => {
            miniz_oxide::inflate::decompress_to_vec_with_limit(stream, SIZE_MAX)
                .map_err(|error| other(&error))
        }
        _ => Err(std::io::Error::other(
            "unknown compression (xz, zstd, lz4 and gzip are known)",
        )),
    }
}

fn read_all(stream: impl Read) -> std::io::Result<Vec<u8>> {
    let mut out = Vec::new();
    stream.take(SIZE_MAX as u64).read_to_end(&mut out)?;
    Ok(out)
}

/// LZ4's legacy frame: blocks of up to 8 MiB, each after its length, the appended size after the last.
fn unpack_lz4(mut blocks: &[u8]) -> std::io::Result<Vec<u8>> {
    const BLOCK: usize = 8 << 20;
    let mut out = Vec::new();
    let mut block = vec![0; BLOCK];
    while let Some((length, rest)) = blocks.split_first_chunk::<4>() {
        let length = u32::from_le_bytes(*length) as usize;
        if rest.is_empty() && length == out.len() {
            break;
        }
        let (packed, rest) = rest
            .split_at_checked(length)
            .ok_or_else(|| std::io::Error::other("lz4 block cut short"))?;
        let size =
            lz4_flex::block::decompress_into(packed, &mut block).map_err(std::io::Error::other)?;
        out.extend_from_slice(&block[..size]);
        if out.len() > SIZE_MAX {
            return Err(std::io::Error::other("unpacks to more than 512 MiB"));
        }
        blocks = rest;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 2 * 512];
        image[0x1f1] = 1;
        image[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x206..0x208].copy_from_slice(&0x20fu16.to_le_bytes());
        image[0x248..0x24c].copy_from_slice(&16u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        image.extend_from_slice(&[0; 16]);
        image.extend_from_slice(payload);
        image
    }

    #[test]
    fn the_header_leads_to_the_payload() {
        assert_eq!(payload(&image(b"payload")).unwrap(), b"payload");
        assert_eq!(payload(b"\x7fELF"), None);
        let whole = image(b"payload");
        assert_eq!(payload(&whole[..whole.len() - 1]), None);
        assert_eq!(payload(&whole[..0x240]), None);
    }

    #[test]
    fn lz4_blocks_end_at_the_appended_size() {
        // Two stored blocks: a token with the number of literals, then these.
        let mut stream = vec![0x02, 0x21, 0x4c, 0x18];
        for text in [b"\x7fELF", b"rest"] {
            stream.extend_from_slice(&5u32.to_le_bytes());
            stream.push(0x40);
            stream.extend_from_slice(text);
        }
        stream.extend_from_slice(&8u32.to_le_bytes());
        assert_eq!(unpack(&stream).unwrap(), b"\x7fELFrest");
        stream.truncate(stream.len() - 6);
        assert!(unpack(&stream).is_err());
    }

    #[test]
    fn a_gzip_payload_is_unpacked() {
        let mut stream = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3];
        stream.extend_from_slice(&miniz_oxide::deflate::compress_to_vec(b"\x7fELF image", 6));
        stream.extend_from_slice(&[0; 8]);
        assert_eq!(unpack(&stream).unwrap(), b"\x7fELF image");
    }

    #[test]
    fn unknown_compression_is_named() {
        assert!(
            unpack(b"BZh9")
                .unwrap_err()
                .to_string()
                .contains("unknown compression")
        );
    }
}
