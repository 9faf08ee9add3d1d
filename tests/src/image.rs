//! The image that the machine tests boot, as `cargo xtask test` names it.

use std::path::PathBuf;

/// `$VMM_IMAGE`'s kernel as an ELF.
///
/// # Panics
/// When a variable is missing: these tests are run by `cargo xtask test`.
pub fn elf() -> PathBuf {
    folder().join("vmlinux")
}

/// `$VMM_IMAGE`'s initramfs.
///
/// # Panics
/// As for [`elf`].
pub fn initramfs() -> PathBuf {
    folder().join("initramfs.cpio")
}

/// The same kernel as its distribution ships it.
///
/// # Panics
/// As for [`elf`].
pub fn bzimage() -> PathBuf {
    variable("VMM_KERNEL_BZIMAGE")
}

fn folder() -> PathBuf {
    variable("VMM_IMAGE")
}

fn variable(name: &str) -> PathBuf {
    match std::env::var_os(name) {
        Some(value) => value.into(),
        None => panic!("${name} is not set: run these tests by `cargo xtask test`"),
    }
}
