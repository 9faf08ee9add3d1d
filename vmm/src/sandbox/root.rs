//! The state root: where it is, and that it is ours alone.

use std::env;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::process::geteuid;

/// Longest path of a Unix socket (`sun_path` less its NUL).
const SOCKET_PATH_MAX: usize = 107;
/// The longest name in a life's folder: the guest's dialling to the largest port.
const LONGEST_SOCKET: &str = "vsock.sock_4294967295";

/// Why the state root cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A folder could not be made.
    #[error("cannot make {}: choose another state root with --dir", path.display())]
    Make {
        /// The folder.
        path: PathBuf,
        /// What the host said.
        #[source]
        source: io::Error,
    },
    /// It is no folder.
    #[error("{} is not a folder: choose another state root with --dir", .0.display())]
    NotFolder(PathBuf),
    /// Someone else's.
    #[error("{} belongs to uid {owner}, not to {us}: choose another state root with --dir", path.display())]
    Owner {
        /// The folder.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// Us.
        us: u32,
    },
    /// Others may look into it.
    #[error("{} has mode {mode:04o}, others may enter it: run 'chmod 700 {}'", path.display(), path.display())]
    Mode {
        /// The folder.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// Sockets in it would have paths that no socket can have.
    #[error("socket path {} has {length} bytes, a socket's may have {SOCKET_PATH_MAX}: choose a shorter --dir", path.display())]
    TooLong {
        /// The path.
        path: PathBuf,
        /// Its length.
        length: usize,
    },
}

/// The state root: the one given, `$VMM_DIR`, or the user's own place.
#[must_use]
pub fn root(given: Option<&Path>) -> PathBuf {
    let variable = |name| {
        env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    if let Some(given) = given {
        return given.to_owned();
    }
    if let Some(folder) = variable("VMM_DIR") {
        return folder;
    }
    let uid = geteuid().as_raw();
    match variable("XDG_RUNTIME_DIR") {
        _ if uid == 0 => "/run/vmm".into(),
        Some(folder) => folder.join("vmm"),
        None => format!("/tmp/vmm-{uid}").into(),
    }
}

/// Refuses a life's folder whose sockets would have paths that no socket can have. Makes nothing.
pub(super) fn check_length(folder: &Path) -> Result<(), Error> {
    let longest = folder.join(LONGEST_SOCKET);
    let length = longest.as_os_str().len();
    if length > SOCKET_PATH_MAX {
        return Err(Error::TooLong {
            path: longest,
            length,
        });
    }
    Ok(())
}

/// Makes the root where it is missing, and checks that it is ours alone.
pub(super) fn ready(root: &Path) -> Result<(), Error> {
    make(root, true)?;
    check(root)
}

/// Makes a folder; with `parents`, those above it too, and one that is there already will do.
pub(super) fn make(path: &Path, parents: bool) -> Result<(), Error> {
    let mut builder = DirBuilder::new();
    builder.mode(0o700);
    let made = match builder.create(path) {
        Err(error) if parents && error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        // Folders above the root are made like any other of the user's.
        Err(error) if parents && error.kind() == io::ErrorKind::NotFound => path
            .parent()
            .map_or(Ok(()), fs::create_dir_all)
            .and_then(|()| builder.create(path)),
        other => other,
    };
    made.map_err(|source| Error::Make {
        path: path.to_owned(),
        source,
    })
}

/// A folder of ours that others cannot enter; a link to one is none.
pub(super) fn check(path: &Path) -> Result<(), Error> {
    let owned = || path.to_owned();
    let found = fs::symlink_metadata(path).map_err(|source| Error::Make {
        path: owned(),
        source,
    })?;
    let (us, mode) = (geteuid().as_raw(), found.mode() & 0o7777);
    if !found.is_dir() {
        Err(Error::NotFolder(owned()))
    } else if found.uid() != us {
        Err(Error::Owner {
            path: owned(),
            owner: found.uid(),
            us,
        })
    } else if mode & 0o077 != 0 {
        Err(Error::Mode {
            path: owned(),
            mode,
        })
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn ho06_roots_that_others_may_enter_or_that_are_links_are_refused() {
        let temp = tempfile::tempdir().unwrap();
        let root = temp.path().join("a/root");
        ready(&root).unwrap();
        ready(&root).unwrap();
        assert_eq!(fs::metadata(&root).unwrap().mode() & 0o777, 0o700);
        fs::set_permissions(&root, fs::Permissions::from_mode(0o755)).unwrap();
        let error = ready(&root).unwrap_err().to_string();
        assert!(
            error.contains("0755") && error.contains("chmod 700"),
            "{error}"
        );
        fs::set_permissions(&root, fs::Permissions::from_mode(0o700)).unwrap();
        let link = temp.path().join("link");
        symlink(&root, &link).unwrap();
        assert!(matches!(ready(&link), Err(Error::NotFolder(_))));
        let file = temp.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(matches!(ready(&file), Err(Error::NotFolder(_))));
    }

    #[test]
    fn path_too_long_for_a_socket_is_refused() {
        let folder = Path::new("/").join("x".repeat(90));
        let error = check_length(&folder).unwrap_err();
        assert!(matches!(error, Error::TooLong { .. }), "{error}");
        check_length(&Path::new("/").join("x".repeat(80))).unwrap();
    }

    #[test]
    fn given_root_wins() {
        assert_eq!(root(Some(Path::new("/x"))), Path::new("/x"));
    }
}
