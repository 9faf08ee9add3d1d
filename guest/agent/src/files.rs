//! Files in a tree that workloads can write: never wait for one, never follow a link out.

use std::io::{Read, Write};
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

/// Reads a regular file, at most `limit` bytes of it. A FIFO put in its place, which would block
/// an ordinary open for ever, is refused.
///
/// # Errors
/// What the kernel says; `EINVAL` for something that is no regular file.
pub fn read(path: &Path, limit: u64) -> std::io::Result<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = rustix::fs::open(path, flags, Mode::empty())?;
    if FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) != FileType::RegularFile {
        return Err(Errno::INVAL.into());
    }
    let mut content = Vec::new();
    std::fs::File::from(file)
        .take(limit)
        .read_to_end(&mut content)?;
    Ok(content)
}

/// Replaces a file as a whole, so that no reader sees half of it. The folder is made.
///
/// # Errors
/// What the kernel says.
pub fn replace(path: &Path, content: &[u8]) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let temporary = path.with_extension("new");
    match rustix::fs::unlink(&temporary) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    // Exclusive: whatever appears there in between is not opened but refused.
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::open(&temporary, flags, Mode::from_raw_mode(0o644))?;
    std::fs::File::from(file).write_all(content)?;
    std::fs::rename(&temporary, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fifo_in_the_place_of_a_file_is_refused_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("passwd");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, FileType::Fifo, Mode::RUSR, 0).unwrap();
        assert_eq!(read(&fifo, 10).unwrap_err().raw_os_error(), Some(22));

        let id = folder.path().join("machine-id");
        let trap = folder.path().join("machine-id.new");
        rustix::fs::mknodat(rustix::fs::CWD, &trap, FileType::Fifo, Mode::RUSR, 0).unwrap();
        replace(&id, b"0123456789").unwrap();
        assert_eq!(read(&id, 4).unwrap(), b"0123");
    }
}
