//! The main job: a workload, or a shell, where a KVM serves.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};

use crate::error::{Error, Naming, Result};
use crate::image::{self, Image};
use crate::kvm::{self, Kvm, Wish};
use crate::nest;
use crate::place::Place;
use crate::process;
use crate::setup;

/// What every machine command needs: the monitor, an image for it, and which KVM.
pub struct Parts {
    /// The static release build of `vmm`.
    pub vmm: PathBuf,
    /// The image.
    pub image: Image,
    /// Where it runs.
    pub kvm: Kvm,
}

impl Parts {
    /// Builds, fetches and decides.
    pub fn ready(place: &Place, wish: Wish) -> Result<Self> {
        setup::rust_targets(place)?;
        let vmm = process::build_static(place, "vmm", "vmm")?;
        // Before anything is fetched: a host that may not be used is told at once.
        let kvm = kvm::decide(wish, &vmm)?;
        Ok(Self {
            image: image::image(place, false)?,
            vmm,
            kvm,
        })
    }

    /// The environment of whatever runs `vmm`.
    pub fn env(&self) -> Vec<(OsString, OsString)> {
        vec![
            ("VMM_IMAGE".into(), self.image.folder.clone().into()),
            ("VMM_KVM".into(), self.kvm.name().into()),
        ]
    }
}

/// `vmm run FLAGS -- ARGV`; returns its status when it ran in the nest, and not at all when it runs on the host.
pub fn run(place: &Place, wish: Wish, flags: Vec<OsString>, argv: Vec<OsString>) -> Result<u8> {
    let parts = Parts::ready(place, wish)?;
    let words: Vec<OsString> = [parts.vmm.clone().into(), "run".into()]
        .into_iter()
        .chain(flags)
        .chain(["--".into()])
        .chain(argv)
        .collect();
    match parts.kvm {
        Kvm::Host => become_program(&words, parts.env()),
        Kvm::Nest => {
            let mut options = nest::Options::new(place, words);
            options.env = parts.env();
            nest::run(place, &options, nest::own_sinks()?)
        }
    }
}

/// An interactive shell with `vmm` on its `$PATH` and an image in `$VMM_IMAGE`.
pub fn shell(place: &Place, wish: Wish) -> Result<u8> {
    let parts = Parts::ready(place, wish)?;
    let mut env = parts.env();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = parts
        .vmm
        .parent()
        .map(PathBuf::from)
        .into_iter()
        .chain(std::env::split_paths(&path));
    let path = std::env::join_paths(folders)
        .map_err(|_| Error::Invalid("the checkout's path has a colon in it".into()))?;
    env.push(("PATH".into(), path));
    let shell = ["bash", "sh"]
        .into_iter()
        .find_map(process::find)
        .unwrap_or_else(|| "/bin/sh".into());
    let words = [shell.into_os_string()];
    if parts.kvm == Kvm::Host {
        return become_program(&words, env);
    }
    let mut options = nest::Options::new(place, words.into());
    options.env = env;
    options.terminal = nest::terminal_size();
    let _raw = options.terminal.map(|_| Raw::enter()).transpose()?;
    nest::run(place, &options, nest::own_sinks()?)
}

fn become_program(words: &[OsString], env: Vec<(OsString, OsString)>) -> Result<u8> {
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).envs(env);
    Err(command.exec()).naming(|| format!("start `{}`", process::line(&command)))
}

/// Our terminal without its line discipline, until dropped.
struct Raw(Termios);

impl Raw {
    fn enter() -> Result<Self> {
        let stdin = rustix::stdio::stdin();
        let before = tcgetattr(stdin).naming(|| "read the terminal's settings".into())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(stdin, OptionalActions::Flush, &raw)
            .naming(|| "change the terminal's settings".into())?;
        Ok(Self(before))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = tcsetattr(rustix::stdio::stdin(), OptionalActions::Flush, &self.0);
    }
}
