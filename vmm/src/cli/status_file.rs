//! `--status-file`: the exit object, whole or not at all.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use serde_json::Value;

use super::inherited;

/// Where the exit object is to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StatusFile {
    /// To a new file.
    Path(PathBuf),
    /// To an open descriptor.
    Descriptor(u32),
}

/// Why it cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is something of that name.
    #[error("--status-file {} exists already: remove it, or name another", .0.display())]
    Exists(PathBuf),
    /// It cannot be written.
    #[error("cannot write --status-file {name}")]
    Write {
        /// What was given.
        name: String,
        /// What the host said.
        #[source]
        source: io::Error,
    },
}

impl FromStr for StatusFile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("fd:") {
            Some(number) => number
                .parse()
                .map(Self::Descriptor)
                .map_err(|_| format!("{text:?} names no descriptor: use fd:N, as in fd:3")),
            None if text.is_empty() => Err("an empty path: name a file, or fd:N".to_owned()),
            None => Ok(Self::Path(text.into())),
        }
    }
}

/// One that was checked, and can be written once.
#[derive(Debug)]
pub struct Open {
    name: String,
    to: To,
}

#[derive(Debug)]
enum To {
    Path(PathBuf),
    File(File),
}

impl StatusFile {
    /// Checks, before anything runs, that it can be written.
    ///
    /// # Errors
    /// [`Error::Exists`], [`Error::Write`].
    pub fn open(&self) -> Result<Open, Error> {
        match self {
            Self::Path(path) => {
                let name = path.display().to_string();
                if path.symlink_metadata().is_ok() {
                    return Err(Error::Exists(path.clone()));
                }
                // A folder that cannot be written is found now, not when the exit is known.
                let draft = draft(path);
                let failed = |source| Error::Write {
                    name: name.clone(),
                    source,
                };
                create(&draft).map_err(failed)?;
                std::fs::remove_file(&draft).map_err(failed)?;
                Ok(Open {
                    name,
                    to: To::Path(path.clone()),
                })
            }
            Self::Descriptor(number) => {
                let name = format!("fd:{number}");
                let file = inherited::writable(*number).map_err(|source| Error::Write {
                    name: name.clone(),
                    source,
                })?;
                Ok(Open {
                    name,
                    to: To::File(file),
                })
            }
        }
    }
}

impl Open {
    /// Writes the exit object.
    ///
    /// # Errors
    /// [`Error::Exists`] if a file of that name has come meanwhile: it is left alone; [`Error::Write`].
    pub fn write(self, exit: &Value) -> Result<(), Error> {
        let line = format!("{exit}\n");
        let failed = |source| Error::Write {
            name: self.name.clone(),
            source,
        };
        let path = match self.to {
            To::File(mut file) => return file.write_all(line.as_bytes()).map_err(failed),
            To::Path(path) => path,
        };
        let draft = draft(&path);
        let written = create(&draft)
            .and_then(|mut file| {
                file.write_all(line.as_bytes())?;
                file.sync_all()
            })
            .and_then(|()| {
                Ok(renameat_with(
                    CWD,
                    &draft,
                    CWD,
                    &path,
                    RenameFlags::NOREPLACE,
                )?)
            });
        written.map_err(|source| {
            let _ = std::fs::remove_file(&draft);
            match source.kind() {
                io::ErrorKind::AlreadyExists => Error::Exists(path.clone()),
                _ => failed(source),
            }
        })
    }
}

fn create(draft: &Path) -> io::Result<File> {
    // Never one that is there: in a folder of others its name might lead elsewhere.
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o666)
        .open(draft)
}

/// Beside it, so that the rename stays in one file system.
fn draft(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.draft", std::process::id()));
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_object_is_whole_and_nothing_else_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("status");
        let file: StatusFile = path.to_str().unwrap().parse().unwrap();
        let open = file.open().unwrap();
        assert!(!path.exists());
        open.write(&json!({"cause": "exited"})).unwrap();
        assert_eq!(
            std::fs::read_to_string(&path).unwrap(),
            "{\"cause\":\"exited\"}\n"
        );
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn existing_files_are_refused_before_and_left_alone_after() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("status");
        let file = StatusFile::Path(path.clone());
        let open = file.open().unwrap();
        std::fs::write(&path, "mine").unwrap();
        assert!(matches!(file.open(), Err(Error::Exists(_))));
        assert!(matches!(open.write(&json!({})), Err(Error::Exists(_))));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn descriptors_are_checked_and_written() {
        use std::io::Read;
        use std::os::fd::AsRawFd;
        let (mut reader, writer) = io::pipe().unwrap();
        // As it is after an exec.
        rustix::io::fcntl_setfd(&writer, rustix::io::FdFlags::empty()).unwrap();
        let file: StatusFile = format!("fd:{}", writer.as_raw_fd()).parse().unwrap();
        file.open().unwrap().write(&json!({"status": 3})).unwrap();
        drop(writer);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "{\"status\":3}\n");
        let error = StatusFile::Descriptor(987_654)
            .open()
            .unwrap_err()
            .to_string();
        assert!(error.contains("fd:987654"), "{error}");
        for text in ["fd:", "fd:-1", "fd:x", ""] {
            text.parse::<StatusFile>().unwrap_err();
        }
    }
}
