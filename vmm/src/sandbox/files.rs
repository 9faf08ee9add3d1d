//! Small files that are whole or not there.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use serde_json::Value;

use super::Error;

/// More than any file of ours has: a request of 256 KiB whose every byte is escaped with six takes 1.5 MiB.
const MAX: u64 = 4 << 20;

/// Replaces a file by rename: readers see the old one or the new one. Mode 0600.
///
/// # Errors
/// [`Error::File`]; the old file is then as it was.
pub fn write_json(path: &Path, value: &Value) -> Result<(), Error> {
    let new = path.with_extension("new");
    let written = (|| {
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&new)?;
        // At once: formatted into the file, each brace of it would be a system call.
        file.write_all(format!("{value:#}\n").as_bytes())?;
        fs::rename(&new, path)
    })();
    written.map_err(|source| {
        let _ = fs::remove_file(&new);
        Error::file("write", path)(source)
    })
}

/// Reads a file of at most 4 MiB; `None` if there is none.
///
/// # Errors
/// [`Error::File`], [`Error::Damaged`].
pub fn read_json(path: &Path) -> Result<Option<Value>, Error> {
    let mut text = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MAX).read_to_end(&mut text));
    match read {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(Error::file("read", path)(source)),
    }
    serde_json::from_slice(&text)
        .map(Some)
        .map_err(|error| Error::Damaged {
            path: path.to_owned(),
            why: error.to_string(),
        })
}
