//! Debian's kernels in the cache: fetched and unpacked, never installed.

use std::fs;
use std::path::{Path, PathBuf};

use crate::apt::{self, Apt};
use crate::bzimage;
use crate::error::{Error, Naming, Result};
use crate::place::{Place, write_whole};
use crate::say;

/// Debian's builds of its kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Flavour {
    /// For virtual machines: what the guests boot.
    Cloud,
    /// For all hardware: what the nest boots, for its `kvm_amd`, 9p and overlay.
    Generic,
}

impl Flavour {
    fn metapackage(self) -> &'static str {
        match self {
            Self::Cloud => "linux-image-cloud-amd64",
            Self::Generic => "linux-image-amd64",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Cloud => "cloud",
            Self::Generic => "generic",
        }
    }
}

/// A kernel in the cache.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Its folder's name: release and package version.
    pub name: String,
    /// As Debian ships it.
    pub bzimage: PathBuf,
    /// The ELF image inside.
    pub vmlinux: PathBuf,
    /// `lib/modules/<release>`.
    pub modules: PathBuf,
}

/// Parts of a kernel package that no machine of ours can use, and that are most of it.
const USELESS: [&str; 15] = [
    "./usr",
    "*/kernel/sound",
    "*/kernel/drivers/gpu",
    "*/kernel/drivers/media",
    "*/kernel/drivers/net/ethernet",
    "*/kernel/drivers/net/wireless",
    "*/kernel/drivers/net/usb",
    "*/kernel/drivers/usb",
    "*/kernel/drivers/scsi",
    "*/kernel/drivers/infiniband",
    "*/kernel/drivers/staging",
    "*/kernel/drivers/iio",
    "*/kernel/drivers/hwmon",
    "*/kernel/drivers/input",
    "*/kernel/drivers/platform",
];

/// The kernel of this flavour that is in the cache, fetched when there is none or when `newest` is asked for.
pub fn kernel(place: &Place, flavour: Flavour, newest: bool) -> Result<Kernel> {
    let folder = place.cached("kernels")?;
    let current = folder.join(format!("current-{}", flavour.name()));
    let _lock = place.lock(&format!("kernel-{}", flavour.name()))?;
    if !newest
        && let Ok(name) = fs::read_to_string(&current)
        && let Ok(kernel) = open(&folder, name.trim())
    {
        return Ok(kernel);
    }
    let name = fetch(place, &folder, flavour)?;
    let kernel = open(&folder, &name)?;
    write_whole(&current, name.as_bytes())?;
    Ok(kernel)
}

fn open(folder: &Path, name: &str) -> Result<Kernel> {
    let root = folder.join(name);
    let kernel = Kernel {
        name: name.to_owned(),
        bzimage: root.join("vmlinuz"),
        vmlinux: root.join("vmlinux"),
        modules: root.join("modules"),
    };
    for path in [&kernel.bzimage, &kernel.vmlinux, &kernel.modules] {
        fs::metadata(path).naming(|| format!("find {}", path.display()))?;
    }
    Ok(kernel)
}

/// Fetches the newest kernel of a flavour and returns its name.
fn fetch(place: &Place, folder: &Path, flavour: Flavour) -> Result<String> {
    let apt = Apt::open(place)?;
    let metapackage = flavour.metapackage();
    let package = apt
        .depends(metapackage)?
        .into_iter()
        .find(|name| name.starts_with("linux-image-"))
        .ok_or_else(|| {
            Error::Invalid(format!(
                "the package sources have no {metapackage}: add Debian's main archive"
            ))
        })?;
    let release = package.trim_start_matches("linux-image-").to_owned();

    let work = tempfile::tempdir_in(folder)
        .naming(|| format!("create a folder in {}", folder.display()))?;
    let deb = apt.download_one(&package, work.path())?;
    let version = deb
        .file_name()
        .and_then(|name| name.to_str())
        .and_then(|name| name.split('_').nth(1))
        .map(|version| version.replace('%', "-"))
        .ok_or_else(|| Error::malformed(&deb, "its name has no version"))?;
    let name = format!("{release}_{version}");
    if open(folder, &name).is_ok() {
        return Ok(name);
    }
    say::step(format!("unpacking kernel {release}"));
    let tree = work.path().join("tree");
    fs::create_dir(&tree).naming(|| format!("create {}", tree.display()))?;
    apt::unpack(&deb, &tree, &USELESS)?;

    let whole = work.path().join("whole");
    fs::create_dir(&whole).naming(|| format!("create {}", whole.display()))?;
    let take = |from: PathBuf, to: &str| {
        fs::rename(&from, whole.join(to))
            .naming(|| format!("take {} out of the package", from.display()))
    };
    take(tree.join(format!("boot/vmlinuz-{release}")), "vmlinuz")?;
    take(tree.join(format!("boot/config-{release}")), "config")?;
    take(tree.join(format!("lib/modules/{release}")), "modules")?;
    let vmlinux = bzimage::extract(&whole.join("vmlinuz"))?;
    write_whole(&whole.join("vmlinux"), &vmlinux)?;

    let place = folder.join(&name);
    // What is there already is a remnant that `open` refused.
    let _ = fs::remove_dir_all(&place);
    fs::rename(&whole, &place).naming(|| format!("move the kernel to {}", place.display()))?;
    Ok(name)
}
