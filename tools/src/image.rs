//! The guests' image: a stock Debian cloud kernel and an initramfs of a busybox userland and the few modules needed.
//!
//! A folder under `images/` in the cache, named by a digest of what it is made from:
//!
//! | file | is |
//! |---|---|
//! | `vmlinux` | the kernel's ELF image, what `vmm` boots |
//! | `vmlinuz` | the same as Debian ships it |
//! | `initramfs.cpio` | the userland; `lib/vmm/modules` in it lists the modules in load order |
//!
//! The agent is not in it: `vmm` appends its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::apt::{self, Apt};
use crate::cpio::Archive;
use crate::error::{Naming, Result};
use crate::kernel::{Flavour, Kernel, kernel};
use crate::modules::Tree;
use crate::place::{Place, digest, write_whole};
use crate::process;
use crate::say;

/// What a guest of ours has that a stock kernel keeps in modules: the transport, vsock and the panic device.
const MODULES: [&str; 3] = ["virtio_mmio", "vmw_vsock_virtio_transport", "pvpanic_mmio"];

/// Raised when an image is put together differently from the same parts.
const RECIPE: &[u8] = b"1";

/// Folders of the userland, each after the one that it is in.
const FOLDERS: [(&str, u32); 22] = [
    ("bin", 0o755),
    ("dev", 0o755),
    ("etc", 0o755),
    ("home", 0o755),
    ("home/user", 0o755),
    ("lib", 0o755),
    ("lib/modules", 0o755),
    ("lib/vmm", 0o755),
    ("mnt", 0o755),
    ("opt", 0o755),
    ("proc", 0o555),
    ("root", 0o700),
    ("run", 0o755),
    ("sbin", 0o755),
    ("srv", 0o755),
    ("sys", 0o555),
    ("tmp", 0o1777),
    ("usr", 0o755),
    ("usr/bin", 0o755),
    ("usr/sbin", 0o755),
    ("var", 0o755),
    ("var/tmp", 0o1777),
];

/// Its files, as text.
const FILES: [(&str, &str); 4] = [
    (
        "etc/passwd",
        "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    ),
    (
        "etc/group",
        "root:x:0:\ntty:x:5:\nuser:x:1000:\nnogroup:x:65534:\n",
    ),
    ("etc/hosts", "127.0.0.1 localhost\n::1 localhost\n"),
    ("etc/shells", "/bin/sh\n"),
];

/// An image in the cache.
pub struct Image {
    /// Its folder: what `$VMM_IMAGE` is set to.
    pub folder: PathBuf,
    /// Its kernel as Debian ships it.
    pub bzimage: PathBuf,
}

/// The image, made when it is not in the cache; with `newest`, of the newest kernel that Debian has.
pub fn image(place: &Place, newest: bool) -> Result<Image> {
    let kernel = kernel(place, Flavour::Cloud, newest)?;
    let busybox = busybox(place)?;
    let binary = process::read(&busybox)?;
    let described = format!("{MODULES:?}{FOLDERS:?}{FILES:?}");
    let name = digest([
        RECIPE,
        kernel.name.as_bytes(),
        described.as_bytes(),
        &binary,
    ]);
    let images = place.cached("images")?;
    let folder = images.join(&name);
    let image = Image {
        bzimage: folder.join("vmlinuz"),
        folder,
    };
    let _lock = place.lock("image")?;
    if image.folder.is_dir() {
        return Ok(image);
    }
    say::step(format!("making the image of {}", kernel.name));
    let work = tempfile::tempdir_in(&images)
        .naming(|| format!("create a folder in {}", images.display()))?;
    fill(work.path(), &kernel, &busybox, &binary)?;
    // A temporary folder is for its owner only.
    rustix::fs::chmod(work.path(), rustix::fs::Mode::from_raw_mode(0o755))
        .naming(|| "open the image's folder".into())?;
    let made = work.keep();
    fs::rename(&made, &image.folder)
        .naming(|| format!("move the image to {}", image.folder.display()))?;
    Ok(image)
}

/// Makes the image the one that `vmm` finds by itself: `$XDG_DATA_HOME/vmm/images/default`.
pub fn make_default(image: &Image) -> Result<Option<PathBuf>> {
    let variable = |name: &str| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let Some(data) =
        variable("XDG_DATA_HOME").or_else(|| Some(variable("HOME")?.join(".local/share")))
    else {
        return Ok(None);
    };
    let folder = data.join("vmm/images");
    fs::create_dir_all(&folder).naming(|| format!("create {}", folder.display()))?;
    let link = folder.join("default");
    if link.is_dir() && !link.is_symlink() {
        // Somebody's own image is theirs.
        return Ok(None);
    }
    let fresh = folder.join(format!(".default-{}", std::process::id()));
    let _ = fs::remove_file(&fresh);
    std::os::unix::fs::symlink(&image.folder, &fresh)
        .naming(|| format!("link {}", fresh.display()))?;
    fs::rename(&fresh, &link).naming(|| format!("link {}", link.display()))?;
    Ok(Some(link))
}

/// The static busybox, fetched into the cache when it is not there.
fn busybox(place: &Place) -> Result<PathBuf> {
    let folder = place.cached("busybox")?;
    let program = folder.join("busybox");
    let _lock = place.lock("busybox")?;
    if program.exists() {
        return Ok(program);
    }
    let work = tempfile::tempdir_in(&folder)
        .naming(|| format!("create a folder in {}", folder.display()))?;
    let package = Apt::open(place)?.download_one("busybox-static", work.path())?;
    apt::unpack(&package, work.path(), &["./usr/share"])?;
    // Debian 13 has it under /usr.
    let unpacked = ["bin/busybox", "usr/bin/busybox"].map(|name| work.path().join(name));
    let unpacked = unpacked
        .iter()
        .find(|path| path.exists())
        .unwrap_or(&unpacked[0]);
    fs::rename(unpacked, &program)
        .naming(|| format!("take {} out of the package", unpacked.display()))?;
    Ok(program)
}

fn fill(folder: &Path, kernel: &Kernel, busybox: &Path, binary: &[u8]) -> Result<()> {
    for (from, name) in [(&kernel.vmlinux, "vmlinux"), (&kernel.bzimage, "vmlinuz")] {
        let to = folder.join(name);
        // The cache may span file systems only when somebody mounted into it.
        fs::hard_link(from, &to)
            .or_else(|_| fs::copy(from, &to).map(drop))
            .naming(|| format!("copy {}", from.display()))?;
    }
    let applets = process::capture(Command::new(busybox).arg("--list-full"))?;
    let modules = Tree::open(&kernel.modules)?.resolve(&MODULES)?;
    let mut archive = Archive::default();
    for (path, mode) in FOLDERS {
        archive.folder(path, mode);
    }
    archive.device("dev/console", 0o600, 5, 1);
    archive.device("dev/null", 0o666, 1, 3);
    for (path, text) in FILES {
        archive.file(path, 0o644, text.as_bytes());
    }
    archive.file("bin/busybox", 0o755, binary);
    for path in links(&applets) {
        archive.link(path, "/bin/busybox");
    }
    let mut order = String::from("# kernel modules in load order\n");
    for module in modules {
        let path = format!("lib/modules/{}.ko", module.name);
        archive.file(&path, 0o644, &module.image);
        order = order + "/" + &path + "\n";
    }
    archive.file("lib/vmm/modules", 0o644, order.as_bytes());
    write_whole(&folder.join("initramfs.cpio"), &archive.finish())
}

/// The applets' paths that lie in the userland's folders and are not busybox itself.
fn links(applets: &str) -> impl Iterator<Item = &str> {
    applets.lines().filter(|path| {
        let known = path
            .rsplit_once('/')
            .is_some_and(|(folder, _)| FOLDERS.iter().any(|(known, _)| *known == folder));
        known && *path != "bin/busybox"
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn applets_are_linked_where_their_folder_exists() {
        let found: Vec<&str> =
            links("bin/busybox\nbin/sh\nlinuxrc\nusr/bin/head\nusr/games/x\n").collect();
        assert_eq!(found, ["bin/sh", "usr/bin/head"]);
    }

    #[test]
    fn each_folder_stands_after_its_parent() {
        for (at, (path, _)) in FOLDERS.iter().enumerate() {
            if let Some((parent, _)) = path.rsplit_once('/') {
                assert!(
                    FOLDERS[..at].iter().any(|(known, _)| *known == parent),
                    "{path}"
                );
            }
        }
        for (path, _) in FILES {
            assert!(
                FOLDERS.iter().any(|(known, _)| path.starts_with(known)),
                "{path}"
            );
        }
    }
}
