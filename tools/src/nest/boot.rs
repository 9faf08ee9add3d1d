//! What the nest boots: a Debian kernel and an initramfs of our init and a few modules, made once.

use std::path::PathBuf;

use crate::cpio::Archive;
use crate::error::Result;
use crate::kernel::{Flavour, kernel};
use crate::modules::Tree;
use crate::place::{Place, digest, write_whole};
use crate::process;
use crate::setup::{self, Qemu};

/// The devices of the nest, its root, its layers and its purpose.
const MODULES: [&str; 6] = [
    "virtio_pci",
    "virtio_console",
    "9pnet_virtio",
    "9p",
    "overlay",
    "kvm_amd",
];

/// All that a machine is started from.
pub struct Files {
    /// The emulator.
    pub qemu: Qemu,
    /// ELF image of the kernel: QEMU enters it directly, which spares its unpacking under emulation.
    pub kernel: PathBuf,
    /// The initramfs.
    pub initramfs: PathBuf,
}

/// Finds or makes them.
pub fn files(place: &Place) -> Result<Files> {
    let qemu = setup::qemu(place)?;
    let kernel = kernel(place, Flavour::Generic, false)?;
    let init = process::read(&process::build_static(place, "nest-init", "nest-init")?)?;
    let name = digest([kernel.name.as_bytes(), MODULES.join(" ").as_bytes(), &init]);
    let initramfs = place.cached("nest")?.join(format!("{name}.cpio"));
    if !initramfs.exists() {
        write_whole(&initramfs, &initramfs_of(&kernel.modules, &init)?)?;
    }
    Ok(Files {
        qemu,
        kernel: kernel.vmlinux,
        initramfs,
    })
}

fn initramfs_of(modules: &std::path::Path, init: &[u8]) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    archive.folder("dev", 0o755);
    archive.device("dev/console", 0o600, 5, 1);
    archive.device("dev/null", 0o666, 1, 3);
    archive.folder("modules", 0o755);
    let mut order = String::new();
    for module in Tree::open(modules)?.resolve(&MODULES)? {
        let file = format!("{}.ko", module.name);
        archive.file(&format!("modules/{file}"), 0o644, &module.image);
        order = order + &file + "\n";
    }
    archive.file("modules/order", 0o644, order.as_bytes());
    archive.file("init", 0o755, init);
    Ok(archive.finish())
}
