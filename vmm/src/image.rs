//! The kernel and initramfs that a guest boots: given, or found where images are kept.

use std::env;
use std::path::{Path, PathBuf};

/// Default command line of a guest with our agent.
///
/// The serial driver is told that there is no port, since a byte through it costs an exit; the early console
/// stays for what `quiet` lets through: errors and panics, which belong in the console log. `quiet` comes first: a
/// console that is enabled before it replays all that was said until then. There is no PCI bus to be scanned, and the
/// kernel's own ciphers need no test at each boot. Resets go through the ACPI register: kernels that find no firmware
/// tables of a real machine have been seen to jump into a BIOS that is not there.
pub const CMDLINE_AGENT: &str = "quiet earlycon=uart8250,io,0x3f8 keep_bootcon 8250.nr_uarts=0 panic=-1 reboot=acpi pci=off cryptomgr.notests rdinit=/.vmm/agent";
/// Default command line of a guest with its own init, whose console is watched.
pub const CMDLINE_CONSOLE: &str = "console=ttyS0 panic=-1 reboot=acpi pci=off cryptomgr.notests";

/// Why no image could be found.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nowhere.
    #[error(
        "no image: neither --kernel nor any of {0} has a kernel; make one with 'cargo xtask image' and set VMM_IMAGE to the folder that it prints"
    )]
    None(String),
    /// `$VMM_IMAGE` has none.
    #[error("VMM_IMAGE={0} has no vmlinux or vmlinuz: make an image with 'cargo xtask image'")]
    Folder(PathBuf),
    /// A kernel without userland needs an initramfs.
    #[error(
        "image {0} has no initramfs.cpio (.gz, .zst): make one with 'cargo xtask image' or give --initramfs"
    )]
    NoInitramfs(PathBuf),
}

/// Files that a guest boots from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// The folder that they were found in, if they were.
    pub folder: Option<PathBuf>,
    /// The kernel.
    pub kernel: PathBuf,
    /// The initramfs.
    pub initramfs: Option<PathBuf>,
}

const KERNELS: [&str; 2] = ["vmlinux", "vmlinuz"];
const INITRAMFS: [&str; 3] = ["initramfs.cpio", "initramfs.cpio.gz", "initramfs.cpio.zst"];

impl Image {
    /// The files to boot: those given, and the rest from the first folder that has a kernel. With both given, or
    /// a kernel of its own init (`bare`), no folder is looked at.
    ///
    /// # Errors
    /// All of [`Error`].
    pub fn find(
        kernel: Option<&Path>,
        initramfs: Option<&Path>,
        bare: bool,
    ) -> Result<Self, Error> {
        if let Some(kernel) = kernel
            && (bare || initramfs.is_some())
        {
            return Ok(Self {
                folder: None,
                kernel: kernel.to_owned(),
                initramfs: initramfs.map(Path::to_owned),
            });
        }
        let mut found = Self::first(candidates())?;
        if let Some(kernel) = kernel {
            found.kernel = kernel.to_owned();
        }
        match initramfs {
            Some(path) => found.initramfs = Some(path.to_owned()),
            None if found.initramfs.is_none() => {
                return Err(Error::NoInitramfs(found.folder.unwrap_or_default()));
            }
            None => {}
        }
        Ok(found)
    }

    fn first(candidates: Candidates) -> Result<Self, Error> {
        match candidates {
            // Asked for by name, so nothing else will do.
            Candidates::Named(folder) => Self::within(&folder).ok_or(Error::Folder(folder)),
            Candidates::Places(places) => places
                .iter()
                .find_map(|folder| Self::within(folder))
                .ok_or_else(|| {
                    let places: Vec<String> = places
                        .iter()
                        .map(|place| place.display().to_string())
                        .collect();
                    Error::None(places.join(", "))
                }),
        }
    }

    fn within(folder: &Path) -> Option<Self> {
        let first = |names: &[&str]| {
            names
                .iter()
                .map(|name| folder.join(name))
                .find(|path| path.is_file())
        };
        Some(Self {
            folder: Some(folder.to_owned()),
            kernel: first(&KERNELS)?,
            initramfs: first(&INITRAMFS),
        })
    }
}

enum Candidates {
    Named(PathBuf),
    Places(Vec<PathBuf>),
}

fn candidates() -> Candidates {
    if let Some(folder) = env::var_os("VMM_IMAGE").filter(|value| !value.is_empty()) {
        return Candidates::Named(folder.into());
    }
    let mut places = Vec::new();
    if let Ok(program) = env::current_exe()
        && let Some(prefix) = program.parent().and_then(Path::parent)
    {
        places.push(prefix.join("share/vmm"));
    }
    let data = env::var_os("XDG_DATA_HOME")
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
        .or_else(|| env::var_os("HOME").map(|home| Path::new(&home).join(".local/share")));
    if let Some(data) = data {
        places.push(data.join("vmm/images/default"));
    }
    places.push("/usr/share/vmm".into());
    Candidates::Places(places)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn first_folder_with_a_kernel_wins_and_vmlinux_before_vmlinuz() {
        let root = tempfile::tempdir().unwrap();
        let [empty, one, two] = ["empty", "one", "two"].map(|name| root.path().join(name));
        for (folder, files) in [
            (&empty, &["initramfs.cpio"][..]),
            (&one, &["vmlinuz", "vmlinux", "initramfs.cpio.gz"]),
            (&two, &["vmlinux"]),
        ] {
            fs::create_dir(folder).unwrap();
            for file in files {
                fs::write(folder.join(file), "").unwrap();
            }
        }
        let found = Image::first(Candidates::Places(vec![
            empty.clone(),
            one.clone(),
            two.clone(),
        ]))
        .unwrap();
        assert_eq!(found.kernel, one.join("vmlinux"));
        assert_eq!(found.initramfs, Some(one.join("initramfs.cpio.gz")));
        assert_eq!(found.folder, Some(one));
        assert_eq!(Image::within(&two).unwrap().initramfs, None);
        let none = Image::first(Candidates::Places(vec![empty.clone()]))
            .unwrap_err()
            .to_string();
        assert!(
            none.contains("cargo xtask image") && none.contains("empty"),
            "{none}"
        );
        let named = Image::first(Candidates::Named(empty))
            .unwrap_err()
            .to_string();
        assert!(named.contains("VMM_IMAGE="), "{named}");
    }

    #[test]
    fn given_files_need_no_folder() {
        let (kernel, initramfs) = (Path::new("/k"), Path::new("/i"));
        let found = Image::find(Some(kernel), Some(initramfs), false).unwrap();
        assert_eq!(
            (found.folder, found.initramfs),
            (None, Some(initramfs.to_owned()))
        );
        assert_eq!(
            Image::find(Some(kernel), None, true).unwrap().initramfs,
            None
        );
    }
}
