//! Which KVM a command uses: the host's or the nest's.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::error::{Error, Naming, Result};
use crate::process;
use crate::say;

/// What was asked for, by `--kvm` or `$VMM_KVM`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Wish {
    /// The host's where it serves, the nest where no hardware is behind it.
    Auto,
    /// The host's, or a failure.
    Host,
    /// The nest's.
    Nest,
}

/// The KVM in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kvm {
    /// This machine's own.
    Host,
    /// The emulated machine's.
    Nest,
}

impl Kvm {
    /// Its name in messages and in `$VMM_KVM`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Nest => "nest",
        }
    }
}

/// What `vmm doctor --json` says of the host's KVM.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
pub struct Diagnosis {
    /// `hardware`, `no-hardware`, `none`, `no-permission` or `unusable`.
    pub kvm: String,
    /// The same in words.
    #[serde(default)]
    pub meaning: Option<String>,
    /// What mends it, where something does.
    #[serde(default)]
    pub remedy: Option<String>,
}

/// Decides, with `vmm` as the judge of the host; says on stderr what was chosen without being asked for.
pub fn decide(wish: Wish, vmm: &Path) -> Result<Kvm> {
    if wish == Wish::Nest {
        return Ok(Kvm::Nest);
    }
    let diagnosis = diagnose(vmm)?;
    let kvm = choose(wish, &diagnosis)?;
    if wish == Wish::Auto {
        say::step(match kvm {
            Kvm::Host => "using the host's KVM".into(),
            Kvm::Nest => format!("using the nest (the host's KVM: {})", diagnosis.kvm),
        });
    }
    Ok(kvm)
}

fn diagnose(vmm: &Path) -> Result<Diagnosis> {
    let mut command = Command::new(vmm);
    command
        .args(["doctor", "--json"])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit());
    // Its status says whether the host can run guests, which is what the text tells in detail.
    let output = command
        .output()
        .naming(|| format!("start `{}`", process::line(&command)))?;
    serde_json::from_slice(&output.stdout).map_err(|error| Error::Command {
        command: process::line(&command),
        status: output.status.to_string(),
        output: format!("\nnot a diagnosis: {error}"),
    })
}

/// The choice itself.
fn choose(wish: Wish, diagnosis: &Diagnosis) -> Result<Kvm> {
    let refused = |why: &str| {
        let remedy = diagnosis
            .remedy
            .as_deref()
            .unwrap_or("`vmm doctor` tells more; `--kvm nest` does without it");
        Err(Error::Missing {
            what: format!("a KVM of the host that can run guests ({why})"),
            remedy: remedy.into(),
        })
    };
    match (wish, diagnosis.kvm.as_str()) {
        (Wish::Nest, _) => Ok(Kvm::Nest),
        (_, "hardware") => Ok(Kvm::Host),
        // Hidden behind the nest, it would never be mended.
        (_, "no-permission") => refused("no permission to open /dev/kvm"),
        (Wish::Auto, "no-hardware" | "none") => Ok(Kvm::Nest),
        // Refused for auto too: what does not work is to be mended, as what is forbidden.
        (_, state) => refused(diagnosis.meaning.as_deref().unwrap_or(state)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn diagnosis(kvm: &str) -> Diagnosis {
        Diagnosis {
            kvm: kvm.into(),
            meaning: Some("in words".into()),
            remedy: Some("usermod".into()),
        }
    }

    #[test]
    fn auto_takes_the_host_with_hardware_and_the_nest_without() {
        assert_eq!(
            choose(Wish::Auto, &diagnosis("hardware")).unwrap(),
            Kvm::Host
        );
        assert_eq!(
            choose(Wish::Auto, &diagnosis("no-hardware")).unwrap(),
            Kvm::Nest
        );
        assert_eq!(choose(Wish::Auto, &diagnosis("none")).unwrap(), Kvm::Nest);
    }

    #[test]
    fn a_permission_error_is_never_hidden_behind_the_nest() {
        for wish in [Wish::Auto, Wish::Host] {
            let error = choose(wish, &diagnosis("no-permission")).unwrap_err();
            assert!(error.to_string().contains("permission"), "{error}");
            assert!(error.to_string().contains("usermod"), "{error}");
        }
        assert_eq!(
            choose(Wish::Nest, &diagnosis("no-permission")).unwrap(),
            Kvm::Nest
        );
    }

    #[test]
    fn host_fails_where_the_host_cannot() {
        assert_eq!(
            choose(Wish::Host, &diagnosis("hardware")).unwrap(),
            Kvm::Host
        );
        assert!(choose(Wish::Host, &diagnosis("no-hardware")).is_err());
        assert!(choose(Wish::Host, &diagnosis("none")).is_err());
        let error = choose(Wish::Auto, &diagnosis("unusable")).unwrap_err();
        assert!(error.to_string().contains("in words"), "{error}");
    }
}
