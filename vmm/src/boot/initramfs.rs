//! The initramfs: the user's archive, read straight into guest memory, and the agent after it.
//!
//! The kernel unpacks archives one after the other, whatever each is compressed with, as long as each
//! starts on a 4-byte boundary; zeros between them are skipped (Linux `Documentation/driver-api/early-userspace/
//! buffer-format.rst`). So the agent needs neither a rebuild of the image nor a decompressor here.

use std::fs::File;
use std::io;
use std::path::Path;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::memory::low_end;

/// Where the agent lies in the guest.
pub const AGENT_PATH: &str = "/.vmm/agent";
/// No initramfs byte lies at or above this: `initrd_addr_max` of every kernel allows it.
const LIMIT: u64 = 0x8000_0000;

/// Why an initramfs cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be opened or read.
    #[error("cannot read initramfs {path}: check --initramfs")]
    Read {
        /// The file.
        path: String,
        /// What the host said.
        #[source]
        source: io::Error,
    },
    /// Not something that a kernel unpacks.
    #[error(
        "{path} is not an initramfs: give --initramfs a cpio archive (newc), plain or compressed"
    )]
    Unknown {
        /// The file.
        path: String,
    },
    /// A plain archive ends before its trailer.
    #[error(
        "initramfs {path} is truncated: its archive breaks off at byte {at} of {length}; copy it again"
    )]
    Truncated {
        /// The file.
        path: String,
        /// Where the archive's next part should begin or end.
        at: u64,
        /// Its length.
        length: u64,
    },
    /// No room between the kernel and the end of memory.
    #[error(
        "initramfs of {size} bytes does not fit between {from:#x} and {to:#x}: use a larger --memory"
    )]
    TooLarge {
        /// Bytes, the agent included.
        size: u64,
        /// End of the kernel.
        from: u64,
        /// End of usable memory.
        to: u64,
    },
    /// Guest memory could not be written.
    #[error("cannot copy the initramfs into guest memory")]
    Copy(#[source] vm_memory::GuestMemoryError),
}

/// An initramfs in guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Its first byte.
    pub address: u64,
    /// Its length.
    pub size: u64,
}

/// Opens a regular file; a folder or device is refused at once and not at the first read.
pub(crate) fn open_file(path: &Path) -> io::Result<File> {
    let file = File::open(path)?;
    let kind = file.metadata()?.file_type();
    if kind.is_file() {
        Ok(file)
    } else if kind.is_dir() {
        Err(io::ErrorKind::IsADirectory.into())
    } else {
        Err(io::Error::other("not a regular file"))
    }
}

/// Opens an initramfs file.
///
/// # Errors
/// [`Error::Read`].
pub fn open(path: &Path) -> Result<File, Error> {
    open_file(path).map_err(|source| Error::Read {
        path: path.display().to_string(),
        source,
    })
}

/// Places the user's archive and the agent as high as they may lie above `kernel_end`; `None` when there is neither.
///
/// # Errors
/// All of [`Error`].
pub fn load(
    memory: &GuestMemoryMmap,
    archive: Option<(File, &Path)>,
    agent: Option<&[u8]>,
    kernel_end: u64,
) -> Result<Option<Placed>, Error> {
    let length = match &archive {
        Some((file, path)) => {
            let read = |source| Error::Read {
                path: path.display().to_string(),
                source,
            };
            file.metadata().map_err(read)?.len()
        }
        None => 0,
    };
    let agent = agent.map(Archive::of_agent);
    let start_of_agent = length.next_multiple_of(4);
    let size = match &agent {
        Some(agent) => start_of_agent.saturating_add(agent.size()),
        None => length,
    };
    if size == 0 {
        return match archive {
            Some((_, path)) => Err(Error::Unknown {
                path: path.display().to_string(),
            }),
            None => Ok(None),
        };
    }
    let to = low_end(memory).min(LIMIT);
    let from = kernel_end.next_multiple_of(4096);
    let address = match to.checked_sub(size).map(|address| address & !4095) {
        Some(address) if address >= from => address,
        _ => return Err(Error::TooLarge { size, from, to }),
    };
    if let Some((mut file, path)) = archive {
        let name = || path.display().to_string();
        memory
            .read_exact_volatile_from(GuestAddress(address), &mut file, length as usize)
            .map_err(|error| Error::Read {
                path: name(),
                source: io::Error::other(error),
            })?;
        check(
            memory,
            Placed {
                address,
                size: length,
            },
        )
        .map_err(|bad| match bad {
            Bad::Unknown => Error::Unknown { path: name() },
            Bad::Truncated(at) => Error::Truncated {
                path: name(),
                at,
                length,
            },
        })?;
    }
    if let Some(agent) = agent {
        agent
            .write(memory, address + start_of_agent)
            .map_err(Error::Copy)?;
    }
    Ok(Some(Placed { address, size }))
}

#[derive(Debug, PartialEq, Eq)]
enum Bad {
    Unknown,
    Truncated(u64),
}

const HEADER: usize = 110;
const TRAILER: &[u8] = b"TRAILER!!!";

/// Walks a plain archive to its trailer; of a compressed one only the magic number is looked at (the kernel
/// reports the rest), because unpacking it here would cost more than the boot.
fn check(memory: &GuestMemoryMmap, placed: Placed) -> Result<(), Bad> {
    let mut magic = [0; 6];
    let length = placed.size.min(6) as usize;
    memory
        .read_slice(&mut magic[..length], GuestAddress(placed.address))
        .map_err(|_| Bad::Unknown)?;
    match magic {
        [b'0', b'7', b'0', b'7', b'0', b'1' | b'2'] => walk(memory, placed),
        // gzip, bzip2, lzma, xz, lzo, lz4, zstd (Linux lib/decompress.c).
        [0x1f, 0x8b | 0x9e, ..]
        | [0x42, 0x5a, ..]
        | [0x5d, 0x00, ..]
        | [0xfd, 0x37, ..]
        | [0x89, 0x4c, ..]
        | [0x02, 0x21, ..]
        | [0x28, 0xb5, ..] => Ok(()),
        _ => Err(Bad::Unknown),
    }
}

fn walk(memory: &GuestMemoryMmap, placed: Placed) -> Result<(), Bad> {
    let mut at = 0u64;
    loop {
        let mut header = [0; HEADER + TRAILER.len()];
        let length = (placed.size - at).min(header.len() as u64) as usize;
        if length < HEADER {
            return Err(Bad::Truncated(at));
        }
        memory
            .read_slice(&mut header[..length], GuestAddress(placed.address + at))
            .map_err(|_| Bad::Truncated(at))?;
        if !matches!(&header[..6], b"070701" | b"070702") {
            return Err(Bad::Truncated(at));
        }
        let (size, name) = (hex(&header[54..62])?, hex(&header[94..102])?);
        let end = (at + HEADER as u64 + name).next_multiple_of(4) + size;
        if end > placed.size {
            return Err(Bad::Truncated(end));
        }
        if header[HEADER..length].starts_with(TRAILER) {
            // What follows is another archive or padding: the kernel's business.
            return Ok(());
        }
        at = end.next_multiple_of(4).min(placed.size);
    }
}

fn hex(digits: &[u8]) -> Result<u64, Bad> {
    std::str::from_utf8(digits)
        .ok()
        .and_then(|text| u64::from_str_radix(text, 16).ok())
        .ok_or(Bad::Unknown)
}

/// A second archive with the agent in it: two short pieces around the agent's own bytes, so that those are
/// copied once.
struct Archive<'a> {
    before: Vec<u8>,
    agent: &'a [u8],
    after: Vec<u8>,
}

impl<'a> Archive<'a> {
    fn of_agent(agent: &'a [u8]) -> Self {
        let path = AGENT_PATH.trim_start_matches('/');
        let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
        let mut before = Vec::new();
        entry(&mut before, folder, 0o040_755, 0);
        entry(&mut before, path, 0o100_755, agent.len());
        let mut after = vec![0; agent.len().next_multiple_of(4) - agent.len()];
        entry(&mut after, "TRAILER!!!", 0, 0);
        Self {
            before,
            agent,
            after,
        }
    }

    fn size(&self) -> u64 {
        (self.before.len() + self.agent.len() + self.after.len()) as u64
    }

    fn write(
        &self,
        memory: &GuestMemoryMmap,
        address: u64,
    ) -> Result<(), vm_memory::GuestMemoryError> {
        let agent = address + self.before.len() as u64;
        memory.write_slice(&self.before, GuestAddress(address))?;
        memory.write_slice(self.agent, GuestAddress(agent))?;
        memory.write_slice(&self.after, GuestAddress(agent + self.agent.len() as u64))
    }
}

/// Appends one newc header with its name, padded to 4 bytes counted from the header.
fn entry(out: &mut Vec<u8>, name: &str, mode: u32, size: usize) {
    let links = if mode & 0o040_000 != 0 { 2 } else { 1 };
    // Magic, inode, mode, uid, gid, links, mtime, size, four device numbers, name size, checksum.
    let start = out.len();
    out.extend_from_slice(
        format!(
            "070701{:08x}{mode:08x}{z:08x}{z:08x}{links:08x}{z:08x}{size:08x}{z:08x}{z:08x}{z:08x}{z:08x}{:08x}{z:08x}",
            0,
            name.len() + 1,
            z = 0
        )
        .as_bytes(),
    );
    out.extend_from_slice(name.as_bytes());
    out.push(0);
    let written = out.len() - start;
    out.resize(start + written.next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests;
