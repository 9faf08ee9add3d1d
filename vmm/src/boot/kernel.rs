//! Kernel files: told apart and checked by their first bytes, then read straight into guest memory.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use linux_loader::bootparam::setup_header;
use linux_loader::loader::{BzImage, Elf, KernelLoader};
use vm_memory::GuestMemoryMmap;

use crate::layout::HIGH_RAM;
use crate::memory::low_end;

/// Why a kernel cannot be booted.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be opened or read.
    #[error("cannot read kernel {path}: check --kernel")]
    Read {
        /// The file.
        path: String,
        /// What the host said.
        #[source]
        source: io::Error,
    },
    /// Neither an ELF nor a bzImage.
    #[error("{path} is not a kernel ({found}): give --kernel an x86-64 ELF vmlinux or a bzImage")]
    Unknown {
        /// The file.
        path: String,
        /// What it looks like instead.
        found: &'static str,
    },
    /// Its header promises more bytes than there are.
    #[error("kernel {path} is truncated: it has {have} bytes and needs {need}; copy it again")]
    Truncated {
        /// The file.
        path: String,
        /// Its length.
        have: u64,
        /// Where its last part ends.
        need: u64,
    },
    /// It wants memory that the guest does not have.
    #[error(
        "kernel {path} needs memory up to {need:#x}, the guest has {have:#x} below the gap: use a larger --memory"
    )]
    TooLarge {
        /// The file.
        path: String,
        /// End of its memory.
        need: u64,
        /// End of low guest memory.
        have: u64,
    },
    /// A part would overwrite what boot needs.
    #[error("kernel {path} has a segment at {address:#x}: link it at {HIGH_RAM:#x} or above")]
    TooLow {
        /// The file.
        path: String,
        /// The segment.
        address: u64,
    },
    /// The loader found something else.
    #[error("cannot load kernel {path}")]
    Load {
        /// The file.
        path: String,
        /// What it found.
        #[source]
        source: linux_loader::loader::Error,
    },
}

/// A kernel in guest memory.
#[derive(Debug)]
pub struct Kernel {
    /// Where the first vCPU starts.
    pub entry: u64,
    /// First byte after all that it uses before it knows the memory map.
    pub end: u64,
    /// Setup header of a bzImage.
    pub header: Option<setup_header>,
}

/// What the first bytes say.
#[derive(Debug, PartialEq, Eq)]
enum Kind {
    Elf,
    /// With the end of the memory that decompression uses.
    BzImage {
        end: u64,
    },
}

/// Opens a kernel file.
///
/// # Errors
/// [`Error::Read`], for a folder too.
pub fn open(path: &Path) -> Result<File, Error> {
    super::initramfs::open_file(path).map_err(|source| Error::Read {
        path: path.display().to_string(),
        source,
    })
}

/// Checks the file and loads it.
///
/// # Errors
/// All of [`Error`].
pub fn load(memory: &GuestMemoryMmap, mut file: File, path: &Path) -> Result<Kernel, Error> {
    let name = || path.display().to_string();
    let (kind, end) = check(&file, path, low_end(memory))?;
    let wrap = |source| Error::Load {
        path: name(),
        source,
    };
    match kind {
        Kind::Elf => {
            let loaded = Elf::load(memory, None, &mut file, None).map_err(wrap)?;
            Ok(Kernel {
                entry: loaded.kernel_load.0,
                end,
                header: None,
            })
        }
        Kind::BzImage { .. } => {
            let loaded = BzImage::load(memory, None, &mut file, None).map_err(wrap)?;
            // The 64-bit entry is 0x200 above the 32-bit one.
            Ok(Kernel {
                entry: loaded.kernel_load.0 + 0x200,
                end,
                header: loaded.setup_header,
            })
        }
    }
}

/// Bytes that the checks look at: the setup header ends at 0x268.
const HEAD: usize = 0x268;

fn check(file: &File, path: &Path, have: u64) -> Result<(Kind, u64), Error> {
    let name = || path.display().to_string();
    let read = |source| Error::Read {
        path: name(),
        source,
    };
    let length = file.metadata().map_err(read)?.len();
    let mut head = [0; HEAD];
    let filled = read_up_to(file, &mut head, 0).map_err(read)?;
    let head = &head[..filled];
    let (kind, end) = if head.starts_with(b"\x7fELF") {
        (Kind::Elf, check_elf(file, head, length, path)?)
    } else if field(head, 0x202, 4) == Some(u64::from(u32::from_le_bytes(*b"HdrS"))) {
        let end = check_bzimage(head, length, path)?;
        (Kind::BzImage { end }, end)
    } else {
        return Err(Error::Unknown {
            path: name(),
            found: guess(head),
        });
    };
    if end > have {
        return Err(Error::TooLarge {
            path: name(),
            need: end,
            have,
        });
    }
    Ok((kind, end))
}

fn read_up_to(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read_at(&mut buffer[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// Little-endian field of `size` bytes, if the head reaches that far.
fn field(head: &[u8], offset: usize, size: usize) -> Option<u64> {
    let bytes = head.get(offset..offset + size)?;
    Some(
        bytes
            .iter()
            .rev()
            .fold(0, |value, &byte| (value << 8) | u64::from(byte)),
    )
}

/// Program header, ELF-64: the fields used here.
const PHDR: usize = 56;
const PT_LOAD: u64 = 1;

fn check_elf(file: &File, head: &[u8], length: u64, path: &Path) -> Result<u64, Error> {
    let name = || path.display().to_string();
    let unknown = |found| Error::Unknown {
        path: name(),
        found,
    };
    let (Some(machine), Some(entry), Some(table), Some(size), Some(count)) = (
        field(head, 18, 2),
        field(head, 24, 8),
        field(head, 32, 8),
        field(head, 54, 2),
        field(head, 56, 2),
    ) else {
        return Err(Error::Truncated {
            path: name(),
            have: length,
            need: 64,
        });
    };
    // Class 2 is 64-bit, data 1 little-endian; machine 62 is x86-64.
    if head[4] != 2 || head[5] != 1 || machine != 62 {
        return Err(unknown("an ELF for another machine"));
    }
    if size != PHDR as u64 || count == 0 {
        return Err(unknown("an ELF without program headers"));
    }
    let mut headers = vec![0; count as usize * PHDR];
    let need = table.saturating_add(headers.len() as u64);
    let read = read_up_to(file, &mut headers, table).map_err(|source| Error::Read {
        path: name(),
        source,
    })?;
    if read < headers.len() {
        return Err(Error::Truncated {
            path: name(),
            have: length,
            need,
        });
    }
    let mut end = 0;
    let mut entered = false;
    for header in headers.chunks_exact(PHDR) {
        let at = |offset, size| field(header, offset, size).unwrap_or(0);
        let (offset, address, in_file, in_memory) = (at(8, 8), at(24, 8), at(32, 8), at(40, 8));
        if at(0, 4) != PT_LOAD || in_memory.max(in_file) == 0 {
            continue;
        }
        let need = offset.saturating_add(in_file);
        if need > length {
            return Err(Error::Truncated {
                path: name(),
                have: length,
                need,
            });
        }
        if address < HIGH_RAM {
            return Err(Error::TooLow {
                path: name(),
                address,
            });
        }
        let segment_end = address.saturating_add(in_memory.max(in_file));
        entered |= (address..segment_end).contains(&entry);
        end = end.max(segment_end);
    }
    if !entered {
        return Err(unknown(
            "an ELF whose entry is in none of its physical segments",
        ));
    }
    Ok(end)
}

fn check_bzimage(head: &[u8], length: u64, path: &Path) -> Result<u64, Error> {
    let name = || path.display().to_string();
    let at = |offset, size| {
        field(head, offset, size).ok_or_else(|| Error::Truncated {
            path: name(),
            have: length,
            need: HEAD as u64,
        })
    };
    // Protocol 2.12 brought `xloadflags`; bit 0 says that there is a 64-bit entry.
    if at(0x206, 2)? < 0x20c || at(0x236, 2)? & 1 == 0 {
        return Err(Error::Unknown {
            path: name(),
            found: "a kernel without a 64-bit entry",
        });
    }
    let setup = match at(0x1f1, 1)? {
        0 => 5,
        sectors => sectors + 1,
    } * 512;
    // `syssize` counts paragraphs of 16 bytes and may round up.
    let need = setup + (at(0x1f4, 4)? * 16).saturating_sub(15);
    if need > length {
        return Err(Error::Truncated {
            path: name(),
            have: length,
            need,
        });
    }
    // The decompressor works from `pref_address` on, or from where it was loaded if that is higher.
    let start = at(0x258, 8)?.max(at(0x214, 4)?);
    Ok(start
        .saturating_add(at(0x260, 4)?)
        .max(at(0x214, 4)? + length - setup))
}

/// A word on a file that is no kernel.
fn guess(head: &[u8]) -> &'static str {
    match head {
        [] => "an empty file",
        [0x1f, 0x8b, ..] => "gzip data",
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "zstd data",
        [0xfd, b'7', b'z', b'X', b'Z', ..] => "xz data",
        [b'0', b'7', b'0', b'7', b'0', ..] => "a cpio archive",
        [b'#', b'!', ..] => "a script",
        _ => "no ELF and no bzImage header",
    }
}

#[cfg(test)]
mod tests;
