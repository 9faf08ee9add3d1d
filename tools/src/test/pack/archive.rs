//! The archive itself: what goes in, and the file that it becomes, whole or not at all.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use flate2::Compression;
use flate2::write::GzEncoder;
use tempfile::NamedTempFile;

use crate::error::{Error, Naming, Result};
use crate::process::read;

/// The one folder of an archive.
pub const FOLDER: &str = "vmm-tests";

/// Where the bytes of an entry come from.
#[derive(Debug)]
enum Source {
    Text(String),
    File(PathBuf),
}

/// Files by their path in the archive's folder, in order.
#[derive(Debug, Default)]
pub struct Contents(BTreeMap<String, (u32, Source)>);

impl Contents {
    /// Adds a file with this text.
    pub fn text(&mut self, path: &str, mode: u32, text: &str) -> Result<()> {
        self.add(path, mode, Source::Text(text.into()))
    }

    /// Adds a copy of a file.
    pub fn file(&mut self, path: &str, mode: u32, file: &Path) -> Result<()> {
        self.add(path, mode, Source::File(file.into()))
    }

    /// Adds copies of all files below a folder.
    pub fn folder(&mut self, path: &str, folder: &Path) -> Result<()> {
        let listing = || format!("list {}", folder.display());
        for entry in fs::read_dir(folder).naming(listing)? {
            let entry = entry.naming(listing)?;
            let name = entry.file_name();
            let name = name
                .to_str()
                .ok_or_else(|| Error::malformed(entry.path(), "a name that is not UTF-8"))?;
            let path = format!("{path}/{name}");
            let kind = entry.file_type().naming(listing)?;
            if kind.is_dir() {
                self.folder(&path, &entry.path())?;
            } else if kind.is_file() {
                self.file(&path, 0o644, &entry.path())?;
            } else {
                return Err(Error::malformed(
                    entry.path(),
                    "neither a file nor a folder",
                ));
            }
        }
        Ok(())
    }

    /// The paths in the archive's folder.
    #[cfg(test)]
    pub fn paths(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }

    fn add(&mut self, path: &str, mode: u32, source: Source) -> Result<()> {
        let plain = path.split('/').all(|part| !matches!(part, "" | "." | ".."));
        if !plain {
            return Err(Error::Invalid(format!(
                "{path:?} is no path inside an archive"
            )));
        }
        if self.0.insert(path.into(), (mode, source)).is_some() {
            return Err(Error::Invalid(format!("{path} is in the archive twice")));
        }
        Ok(())
    }

    fn write(&self, to: impl Write) -> Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |since| since.as_secs());
        let mut archive = tar::Builder::new(to);
        for (path, (mode, source)) in &self.0 {
            let packing = || format!("pack {path}");
            let mut header = tar::Header::new_gnu();
            header.set_mode(*mode);
            header.set_mtime(now);
            header.set_uid(0);
            header.set_gid(0);
            let path = format!("{FOLDER}/{path}");
            match source {
                Source::Text(text) => {
                    header.set_size(text.len() as u64);
                    archive.append_data(&mut header, path, text.as_bytes())
                }
                Source::File(file) => {
                    // Whole: its size stands before it.
                    let bytes = read(file)?;
                    header.set_size(bytes.len() as u64);
                    archive.append_data(&mut header, path, bytes.as_slice())
                }
            }
            .naming(packing)?;
        }
        archive.finish().naming(|| "end the archive".into())
    }
}

/// A file that an archive can become.
#[derive(Debug)]
pub struct Output {
    path: PathBuf,
    compressed: bool,
    /// Beside it, gone unless it takes its place.
    file: NamedTempFile,
}

impl Output {
    /// Looks whether the name can be used.
    pub fn at(path: &Path) -> Result<Self> {
        let refused = |why: &str| Error::Invalid(format!("{}: {why}", path.display()));
        let name = path.file_name().and_then(|name| name.to_str());
        let compressed = match name {
            Some(name) if name.ends_with(".tar.gz") || name.ends_with(".tgz") => true,
            Some(name) if name.ends_with(".tar") => false,
            _ => {
                return Err(refused(
                    "expected a name that ends in .tar, .tar.gz or .tgz",
                ));
            }
        };
        if path.symlink_metadata().is_ok() {
            return Err(refused("there already: remove it, or give another name"));
        }
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        if !folder.is_dir() {
            return Err(refused("the folder that it is to be in is missing"));
        }
        let file = tempfile::Builder::new()
            .prefix(".vmm-tests-")
            .tempfile_in(folder)
            .naming(|| format!("create {}", path.display()))?;
        Ok(Self {
            path: path.into(),
            compressed,
            file,
        })
    }

    /// Writes it all.
    pub fn write(self, contents: &Contents) -> Result<()> {
        let writing = || format!("write {}", self.path.display());
        let mut buffer = BufWriter::new(self.file.as_file());
        if self.compressed {
            let mut encoder = GzEncoder::new(&mut buffer, Compression::default());
            contents.write(&mut encoder)?;
            encoder.finish().naming(writing)?;
        } else {
            contents.write(&mut buffer)?;
        }
        buffer.flush().naming(writing)?;
        drop(buffer);
        let mode = rustix::fs::Mode::from_raw_mode(0o644);
        rustix::fs::fchmod(self.file.as_file(), mode).naming(writing)?;
        self.file.as_file().sync_all().naming(writing)?;
        // One that came meanwhile is somebody's.
        self.file
            .persist_noclobber(&self.path)
            .map_err(|error| error.error)
            .naming(|| format!("name {}", self.path.display()))?;
        Ok(())
    }
}
