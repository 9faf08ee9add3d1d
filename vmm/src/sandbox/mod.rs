//! A sandbox on the host: a folder with a name, and while it runs one process that holds its lock.
//!
//! ```text
//! <root>/                   0700, ours
//!   <name>/                 one sandbox, from its first start to `rm`
//!     lock                  locked for the life of the process: pid, start time, boot, generation, state
//!     counter               the number of its last life
//!     config.json           what it was last started with
//!     current.json          the present life, with its nonce: starting, then ready
//!     last.json             how the last life ended
//!     console.log[.1]       what the guest wrote to its serial port; bounded
//!     monitor.log           what the monitor had to say when it ran in the background
//!     output.log[.1]        what the workload of `run -d` wrote; bounded
//!     unnamed               this sandbox is of a run without a name: whoever finds it dead removes it
//!     g<counter>-<8 hex>/   the present life's sockets: vsock.sock, vsock.sock_<port>, control.sock
//! ```
//!
//! Who holds the lock writes; everybody else reads. A reader tells a live sandbox by the pid and start time in the
//! lock file, so that it never takes the lock itself and never keeps a start out.

mod files;
mod life;
mod log;
mod name;
mod process;
mod record;
mod root;
mod view;

#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};

pub use files::{read_json, write_json};
pub use life::{Claim, Keep, Life, sweep_unnamed};
pub use log::LogFile;
pub use name::{BadName, Name};
pub use process::Process;
pub use record::{End, Record};
pub use root::root;
pub use view::{Current, Holder, Phase, State, View};

/// Why a sandbox cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The state root, or a folder in it.
    #[error(transparent)]
    Root(#[from] root::Error),
    /// A file of the sandbox.
    #[error("cannot {what} {}", path.display())]
    File {
        /// What was tried.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What the host said.
        #[source]
        source: io::Error,
    },
    /// A file holds something else.
    #[error("{} is damaged ({why}): remove the sandbox with 'vmm rm -f'", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// In what way.
        why: String,
    },
    /// Another process runs it.
    #[error(
        "sandbox {name} is in use by {holder}: use another name, or end it with 'vmm stop {name}'"
    )]
    Busy {
        /// Its name.
        name: Name,
        /// Who holds it.
        holder: String,
    },
    /// There is none of that name.
    #[error("no sandbox is called {name} in {}: 'vmm ps -a' lists them", root.display())]
    Missing {
        /// The name.
        name: Name,
        /// Where it was looked for.
        root: PathBuf,
    },
    /// Its generation.
    #[error(transparent)]
    Generation(#[from] vmm_snapshot::generation::Error),
}

impl Error {
    fn file(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::File {
            what,
            path: path.to_owned(),
            source,
        }
    }
}

/// A sandbox by its place; whether it exists is another question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sandbox {
    root: PathBuf,
    name: Name,
}

impl Sandbox {
    /// The sandbox of that name in a state root.
    #[must_use]
    pub fn new(root: &Path, name: Name) -> Self {
        Self {
            root: root.to_owned(),
            name,
        }
    }

    /// Every sandbox in a state root, by name. A root that is not there has none.
    ///
    /// # Errors
    /// [`Error::Root`], [`Error::File`].
    pub fn list(root: &Path) -> Result<Vec<Self>, Error> {
        match root::check(root) {
            Err(root::Error::Make { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Ok(Vec::new());
            }
            checked => checked?,
        }
        let mut found = Vec::new();
        for entry in std::fs::read_dir(root).map_err(Error::file("list", root))? {
            let entry = entry.map_err(Error::file("list", root))?;
            // What is no sandbox has no name of one, or no lock.
            let name = entry
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok());
            if let Some(name) = name {
                let sandbox = Self::new(root, name);
                if sandbox.exists() {
                    found.push(sandbox);
                }
            }
        }
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &Name {
        &self.name
    }

    /// Its folder.
    #[must_use]
    pub fn folder(&self) -> PathBuf {
        self.root.join(self.name.as_str())
    }

    /// One of its files.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder().join(name)
    }

    /// True if it was ever started and not removed since.
    #[must_use]
    pub fn exists(&self) -> bool {
        self.file("lock")
            .symlink_metadata()
            .is_ok_and(|lock| lock.is_file())
    }

    /// It, if it exists.
    ///
    /// # Errors
    /// [`Error::Missing`], and [`Error::Root`] for a root that others may enter.
    pub fn existing(self) -> Result<Self, Error> {
        match root::check(&self.root) {
            Err(root::Error::Make { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            checked => checked?,
        }
        if self.exists() {
            Ok(self)
        } else {
            Err(Error::Missing {
                name: self.name,
                root: self.root,
            })
        }
    }
}
