//! The folders that the tools work in.

use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use crate::error::{Naming, Result};

/// Where things are.
#[derive(Clone, Debug)]
pub struct Place {
    /// The checkout.
    pub workspace: PathBuf,
    /// Cargo's output.
    pub target: PathBuf,
    /// What is fetched or made once: `$XDG_CACHE_HOME/vmm`, else `~/.cache/vmm`.
    pub cache: PathBuf,
}

impl Place {
    /// The folders of this process's environment.
    pub fn find() -> Self {
        // Cargo sets it for what it runs; the value of build time serves a binary that is run by hand.
        let manifest =
            env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let workspace = Path::new(&manifest)
            .parent()
            .map_or_else(|| PathBuf::from("."), Path::to_path_buf);
        let target = folder("CARGO_TARGET_DIR")
            .map_or_else(|| workspace.join("target"), |target| workspace.join(target));
        let cache = folder("XDG_CACHE_HOME")
            .or_else(|| folder("HOME").map(|home| home.join(".cache")))
            .map_or_else(|| target.join("cache"), |cache| cache.join("vmm"));
        Self {
            workspace,
            target,
            cache,
        }
    }

    /// A folder of the cache, made where it is missing.
    pub fn cached(&self, name: &str) -> Result<PathBuf> {
        let folder = self.cache.join(name);
        fs::create_dir_all(&folder).naming(|| format!("create {}", folder.display()))?;
        Ok(folder)
    }

    /// Keeps other tools out of one part of the cache until the returned file is dropped.
    pub fn lock(&self, name: &str) -> Result<File> {
        let path = self.cached("locks")?.join(name);
        let file = File::create(&path).naming(|| format!("create {}", path.display()))?;
        flock(&file, FlockOperation::LockExclusive)
            .naming(|| format!("lock {}", path.display()))?;
        Ok(file)
    }
}

fn folder(variable: &str) -> Option<PathBuf> {
    env::var_os(variable)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}

/// Puts `bytes` at `path` whole or not at all.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(folder)
        .naming(|| format!("create a file in {}", folder.display()))?;
    std::io::Write::write_all(&mut file, bytes).naming(|| format!("write {}", path.display()))?;
    let mode = rustix::fs::Mode::from_raw_mode(0o644);
    rustix::fs::fchmod(file.as_file(), mode)
        .naming(|| format!("open {} to readers", path.display()))?;
    file.persist(path)
        .map_err(|error| error.error)
        .naming(|| format!("write {}", path.display()))?;
    Ok(())
}

/// The SHA-256 of the parts in order, each with its length, as 32 hex digits: a name for what was made of them.
pub fn digest<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    use sha2::Digest;
    let mut hash = sha2::Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize()
        .iter()
        .take(16)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}
