//! Logs that grow to a bound and no further.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Bytes of one file; with the one before it, twice that is kept.
const HALF: u64 = 1 << 20;

/// An append-only log of at most 2 MiB: when it has grown to 1 MiB it becomes `<name>.1` in place of the one before,
/// and a new one begins. What is written is in the file at once.
#[derive(Debug)]
pub struct LogFile {
    path: PathBuf,
    file: File,
    length: u64,
}

impl LogFile {
    /// Begins an empty log; what was there goes.
    ///
    /// # Errors
    /// What the host says.
    pub fn create(path: &Path) -> io::Result<Self> {
        match fs::remove_file(older(path)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        Ok(Self {
            path: path.to_owned(),
            file: begin(path)?,
            length: 0,
        })
    }

    /// The file that is written now.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Its length in bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.length
    }

    /// The file that holds what came before, if there is any.
    #[must_use]
    pub fn older(path: &Path) -> PathBuf {
        older(path)
    }
}

fn older(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

/// A new file, never the old one emptied: who reads that one keeps it.
fn begin(path: &Path) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    OpenOptions::new()
        .append(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

impl Write for LogFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.length >= HALF {
            fs::rename(&self.path, older(&self.path))?;
            self.file = begin(&self.path)?;
            self.length = 0;
        }
        let room = usize::try_from(HALF - self.length).unwrap_or(usize::MAX);
        let count = self.file.write(&bytes[..bytes.len().min(room)])?;
        self.length += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_bounded_and_its_end_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.log");
        let mut log = LogFile::create(&path).unwrap();
        let block: Vec<u8> = (0..300_000_u32).map(|i| (i % 251) as u8).collect();
        for _ in 0..20 {
            log.write_all(&block).unwrap();
        }
        let (old, new) = (fs::read(older(&path)).unwrap(), fs::read(&path).unwrap());
        assert_eq!(old.len() as u64, HALF);
        assert!(new.len() as u64 <= HALF);
        let kept = [old, new].concat();
        let all = block.repeat(20);
        assert!(all.ends_with(&kept));
        let again = LogFile::create(&path).unwrap();
        assert_eq!(again.length, 0);
        assert!(!older(&path).exists());
    }
}
