//! What a fresh Debian needs. Each step looks first and does nothing where there is nothing to do; the other tools
//! run the steps that they need, so `setup` is never required.
//!
//! As root, system packages are installed. An ordinary user gets the same packages unpacked into the cache.

mod checkers;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::apt::{self, Apt};
use crate::error::{Error, Naming, Result};
use crate::image;
use crate::kernel::{Flavour, kernel};
use crate::place::Place;
use crate::process;
use crate::say;

pub use checkers::{checker, fuzzer};

/// The emulator and the firmware of its machine.
const QEMU_PACKAGES: [&str; 2] = ["qemu-system-x86", "seabios"];

/// What a machine test starts the documentation's unit with.
const SYSTEMD: &str = "/lib/systemd/systemd";

/// The emulator's program.
const QEMU: &str = "qemu-system-x86_64";

/// What we build for besides the host.
const RUST_TARGETS: [&str; 2] = [process::MUSL, "x86_64-unknown-none"];

/// Every step, each named on stderr.
pub fn all(place: &Place) -> Result<()> {
    say::step("rust targets");
    rust_targets(place)?;
    say::step("emulator");
    qemu(place)?;
    say::step("systemd");
    systemd()?;
    say::step("kernel of the nest");
    kernel(place, Flavour::Generic, false)?;
    say::step("image of the guests");
    image::image(place, false)?;
    for name in checkers::NAMES {
        say::step(format!("checker {name}"));
        checker(place, name)?;
    }
    say::step("fuzzer");
    fuzzer(place)?;
    say::step(format!("all there, in {}", place.cache.display()));
    Ok(())
}

/// The targets' standard libraries.
pub fn rust_targets(place: &Place) -> Result<()> {
    for target in RUST_TARGETS {
        let mut ask = Command::new("rustc");
        ask.args(["--print", "target-libdir", "--target", target])
            .current_dir(&place.workspace);
        if Path::new(process::capture(&mut ask)?.trim()).is_dir() {
            continue;
        }
        if process::find("rustup").is_none() {
            return Err(Error::Missing {
                what: format!("the Rust target {target}"),
                remedy: "install Rust with rustup (ci/bootstrap does), or the target with your package manager".into(),
            });
        }
        say::step(format!("rustup target add {target}"));
        process::chatter(
            Command::new("rustup")
                .args(["target", "add", target])
                .current_dir(&place.workspace),
        )?;
    }
    Ok(())
}

/// A system manager for the tests of docs/operate.md; it runs only in the nest, or in namespaces.
pub fn systemd() -> Result<()> {
    if Path::new(SYSTEMD).exists() {
        return Ok(());
    }
    if process::is_root() {
        say::step("apt-get install systemd");
        return apt::install(&["systemd"]);
    }
    Err(Error::Missing {
        what: "systemd, for the tests of docs/operate.md".into(),
        remedy: "as root: apt-get install systemd".into(),
    })
}

/// The emulator, where it is.
pub struct Qemu {
    /// The program.
    pub program: PathBuf,
    /// The root that it was unpacked under, when it was not installed.
    root: Option<PathBuf>,
}

impl Qemu {
    /// Adds what an unpacked emulator needs to find its libraries, modules and firmware.
    pub fn dress(&self, command: &mut Command) {
        let Some(root) = &self.root else { return };
        let libraries = root.join("usr/lib/x86_64-linux-gnu");
        let path = std::env::join_paths([libraries.clone(), root.join("lib/x86_64-linux-gnu")])
            .unwrap_or_default();
        command.env("LD_LIBRARY_PATH", path);
        command.env("QEMU_MODULE_DIR", libraries.join("qemu"));
        for folder in ["usr/share/seabios", "usr/share/qemu"] {
            command.arg("-L").arg(root.join(folder));
        }
    }
}

/// Finds the emulator, or brings it.
pub fn qemu(place: &Place) -> Result<Qemu> {
    let installed = || {
        process::find(QEMU).map(|program| Qemu {
            program,
            root: None,
        })
    };
    if let Some(qemu) = installed() {
        return Ok(qemu);
    }
    let _lock = place.lock("qemu")?;
    let root = place.cache.join("qemu");
    let program = root.join("usr/bin").join(QEMU);
    if program.exists() {
        return Ok(Qemu {
            program,
            root: Some(root),
        });
    }
    if process::is_root() {
        say::step(format!("apt-get install {}", QEMU_PACKAGES.join(" ")));
        apt::install(&QEMU_PACKAGES)?;
        return installed().ok_or_else(|| Error::Missing {
            what: QEMU.into(),
            remedy: "apt-get left none in $PATH".into(),
        });
    }
    say::step(format!(
        "unpacking the emulator into the cache; as root: apt-get install {}",
        QEMU_PACKAGES.join(" ")
    ));
    let apt = Apt::open(place)?;
    let work = tempfile::tempdir_in(&place.cache)
        .naming(|| format!("create a folder in {}", place.cache.display()))?;
    let (packages, whole) = (work.path().join("packages"), work.path().join("root"));
    for folder in [&packages, &whole] {
        fs::create_dir(folder).naming(|| format!("create {}", folder.display()))?;
    }
    for file in apt.download(&apt.closure(&QEMU_PACKAGES)?, &packages)? {
        apt::unpack(
            &file,
            &whole,
            &[
                "./usr/share/doc",
                "./usr/share/man",
                "./usr/share/locale",
                "./usr/share/icons",
            ],
        )?;
    }
    fs::rename(&whole, &root).naming(|| format!("move the emulator to {}", root.display()))?;
    Ok(Qemu {
        program,
        root: Some(root),
    })
}
