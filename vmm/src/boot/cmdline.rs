//! The kernel's command line: checked, then put at its place.

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::layout::{CMDLINE, CMDLINE_MAX};

/// Why a command line cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    /// Longer than this kernel takes.
    #[error("command line has {length} bytes, the kernel takes {limit}: shorten --cmdline")]
    TooLong {
        /// Its length, without the NUL.
        length: usize,
        /// What the kernel takes.
        limit: usize,
    },
    /// A byte that would end or garble it.
    #[error(
        "command line has byte {byte:#04x} at offset {offset}: use printable ASCII in --cmdline"
    )]
    Byte {
        /// The byte.
        byte: u8,
        /// Its place.
        offset: usize,
    },
    /// Guest memory is too small for it.
    #[error("command line does not fit guest memory: use a larger --memory")]
    Memory,
}

/// Checks a command line against the limit of a kernel (`None`: one without a setup header).
///
/// # Errors
/// [`Error::TooLong`], [`Error::Byte`].
pub fn check(cmdline: &str, kernel_limit: Option<u32>) -> Result<(), Error> {
    let limit = kernel_limit.map_or(CMDLINE_MAX - 1, |limit| {
        (limit as usize).min(CMDLINE_MAX - 1)
    });
    if cmdline.len() > limit {
        return Err(Error::TooLong {
            length: cmdline.len(),
            limit,
        });
    }
    match cmdline
        .bytes()
        .position(|byte| !(b' '..=b'~').contains(&byte))
    {
        Some(offset) => Err(Error::Byte {
            byte: cmdline.as_bytes()[offset],
            offset,
        }),
        None => Ok(()),
    }
}

/// Checks the command line and writes it, with its NUL.
///
/// # Errors
/// As for [`check`], and [`Error::Memory`].
pub fn write(memory: &GuestMemoryMmap, cmdline: &str, limit: Option<u32>) -> Result<(), Error> {
    check(cmdline, limit)?;
    let mut bytes = Vec::with_capacity(cmdline.len() + 1);
    bytes.extend_from_slice(cmdline.as_bytes());
    bytes.push(0);
    memory
        .write_slice(&bytes, GuestAddress(CMDLINE))
        .map_err(|_| Error::Memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn length_is_held_against_the_kernel_and_our_own_limit() {
        let longest = "x".repeat(CMDLINE_MAX - 1);
        assert_eq!(check(&longest, None), Ok(()));
        assert_eq!(check(&longest, Some(u32::MAX)), Ok(()));
        assert_eq!(
            check(&longest, Some(255)),
            Err(Error::TooLong {
                length: CMDLINE_MAX - 1,
                limit: 255
            })
        );
        assert!(matches!(
            check(&"x".repeat(CMDLINE_MAX), None),
            Err(Error::TooLong { .. })
        ));
    }

    #[test]
    fn bytes_that_garble_are_named_with_their_place() {
        assert_eq!(
            check("a\nb", None),
            Err(Error::Byte {
                byte: b'\n',
                offset: 1
            })
        );
        assert_eq!(check("ab\0", None), Err(Error::Byte { byte: 0, offset: 2 }));
        assert_eq!(
            check("\u{e9}", None),
            Err(Error::Byte {
                byte: 0xc3,
                offset: 0
            })
        );
    }

    #[test]
    fn written_line_ends_with_nul() {
        let memory = crate::memory::create(crate::memory::MIN).unwrap();
        memory
            .write_slice(&[0xff; 16], GuestAddress(CMDLINE))
            .unwrap();
        write(&memory, "quiet", None).unwrap();
        let mut bytes = [0; 7];
        memory
            .read_slice(&mut bytes, GuestAddress(CMDLINE))
            .unwrap();
        assert_eq!(&bytes, b"quiet\0\xff");
    }
}
