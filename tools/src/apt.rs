//! Debian's packages without root: package lists and downloads of our own in the cache.
//!
//! Only the system's sources and keys are used, so what is fetched is verified as ever. The system's own lists
//! are left alone: a fresh Debian has none, and an ordinary user may not fetch them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::error::{Error, Naming, Result};
use crate::place::Place;
use crate::process;
use crate::say;

/// Lists older than this are fetched again before anything else is.
const FRESH: Duration = Duration::from_secs(24 * 3600);

/// A private view on the system's package sources.
pub struct Apt {
    root: PathBuf,
}

impl Apt {
    /// Opens it, with lists of today.
    pub fn open(place: &Place) -> Result<Self> {
        if process::find("apt-get").is_none() {
            return Err(Error::Missing {
                what: "apt-get".into(),
                remedy: "these tools need Debian 12 or later".into(),
            });
        }
        let apt = Self {
            root: place.cached("apt")?,
        };
        for folder in ["lists/partial", "cache/archives/partial"] {
            let folder = apt.root.join(folder);
            fs::create_dir_all(&folder).naming(|| format!("create {}", folder.display()))?;
        }
        let stamp = apt.root.join("updated");
        let age = fs::metadata(&stamp)
            .and_then(|data| data.modified())
            .ok()
            .and_then(|time| time.elapsed().ok());
        if age.is_none_or(|age| age > FRESH) {
            say::step("fetching package lists");
            process::capture(apt.command("apt-get").args(["--quiet", "update"]))?;
            fs::write(&stamp, "").naming(|| format!("write {}", stamp.display()))?;
        }
        Ok(apt)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.arg("-o").arg(format!(
            "Dir::State::Lists={}",
            self.root.join("lists").display()
        ));
        command
            .arg("-o")
            .arg(format!("Dir::Cache={}", self.root.join("cache").display()));
        // Root would hand the download to a user who may not write to the cache.
        command.args(["-o", "APT::Sandbox::User=root"]);
        command.env("LC_ALL", "C");
        command
    }

    /// What `package` in its newest version depends on, first alternatives only.
    pub fn depends(&self, package: &str) -> Result<Vec<String>> {
        let text = process::capture(self.command("apt-cache").args([
            "show",
            "--no-all-versions",
            package,
        ]))?;
        Ok(parse_depends(&text))
    }

    /// All packages that `packages` need and the system has not installed, themselves included.
    pub fn closure(&self, packages: &[&str]) -> Result<Vec<String>> {
        let mut command = self.command("apt-get");
        command
            .args([
                "--quiet",
                "--simulate",
                "--no-install-recommends",
                "install",
            ])
            .args(packages);
        let text = process::capture(&mut command)?;
        Ok(parse_simulated(&text))
    }

    /// Fetches package files into the empty `folder` and returns their paths.
    pub fn download(&self, packages: &[impl AsRef<str>], folder: &Path) -> Result<Vec<PathBuf>> {
        let names = packages.iter().map(AsRef::as_ref);
        match packages {
            [package] => say::step(format!("fetching {}", package.as_ref())),
            _ => say::step(format!("fetching {} packages", packages.len())),
        }
        process::capture(
            self.command("apt-get")
                .args(["--quiet", "download"])
                .args(names)
                .current_dir(folder),
        )?;
        let entries = fs::read_dir(folder).naming(|| format!("list {}", folder.display()))?;
        let mut files: Vec<PathBuf> = entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.extension().is_some_and(|kind| kind == "deb"))
            .collect();
        files.sort();
        if files.len() == packages.len() {
            return Ok(files);
        }
        Err(Error::malformed(
            folder,
            format!(
                "apt-get download left {} of {} packages",
                files.len(),
                packages.len()
            ),
        ))
    }

    /// Fetches one package file into the empty `folder` and returns its path.
    pub fn download_one(&self, package: &str, folder: &Path) -> Result<PathBuf> {
        let mut files = self.download(&[package], folder)?;
        files
            .pop()
            .ok_or_else(|| Error::malformed(folder, format!("apt-get download left no {package}")))
    }
}

/// Installs packages on the system, as root; fetches the system's lists first where it has none of these packages.
pub fn install(packages: &[&str]) -> Result<()> {
    let known = |package: &&str| {
        process::capture(Command::new("apt-cache").args(["show", package])).is_ok()
    };
    if !packages.iter().all(known) {
        process::chatter(Command::new("apt-get").args(["--quiet", "update"]))?;
    }
    let mut install = Command::new("apt-get");
    install
        .args(["--quiet", "--yes", "--no-install-recommends", "install"])
        .args(packages);
    process::chatter(install.env("DEBIAN_FRONTEND", "noninteractive"))
}

/// Unpacks the parts of a package that `exclude` does not name, by a `dpkg-deb | tar` of the essential tools.
pub fn unpack(package: &Path, folder: &Path, exclude: &[&str]) -> Result<()> {
    let mut dpkg = Command::new("dpkg-deb");
    dpkg.arg("--fsys-tarfile")
        .arg(package)
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut archive = dpkg
        .spawn()
        .naming(|| format!("start `{}`", process::line(&dpkg)))?;
    let mut tar = Command::new("tar");
    tar.args([
        "--extract",
        "--file=-",
        "--no-same-owner",
        "--wildcards",
        "--directory",
    ])
    .arg(folder);
    tar.args(exclude.iter().map(|pattern| format!("--exclude={pattern}")));
    if let Some(stdout) = archive.stdout.take() {
        tar.stdin(stdout);
    }
    let output = tar
        .output()
        .naming(|| format!("start `{}`", process::line(&tar)))?;
    let status = archive.wait().naming(|| "wait for dpkg-deb".into())?;
    if status.success() && output.status.success() {
        return Ok(());
    }
    Err(Error::malformed(
        package,
        format!(
            "cannot be unpacked: {}",
            String::from_utf8_lossy(&output.stderr).trim_end()
        ),
    ))
}

/// The names in the first `Depends:` field of `apt-cache show`.
fn parse_depends(text: &str) -> Vec<String> {
    let Some(field) = text.lines().find_map(|line| line.strip_prefix("Depends: ")) else {
        return Vec::new();
    };
    let name = |entry: &str| {
        entry
            .split(['|', '(', ':'])
            .next()
            .map(|name| name.trim().to_owned())
    };
    field
        .split(',')
        .filter_map(name)
        .filter(|name| !name.is_empty())
        .collect()
}

/// The packages of the `Inst` lines of `apt-get --simulate install`.
fn parse_simulated(text: &str) -> Vec<String> {
    text.lines()
        .filter_map(|line| {
            line.strip_prefix("Inst ")?
                .split(' ')
                .next()
                .map(str::to_owned)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metapackage_names_its_kernel() {
        let text = "Package: linux-image-cloud-amd64\nVersion: 6.1.192-3\nDepends: linux-image-6.1.0-57-cloud-amd64 (= 6.1.192-3), kmod | other:any\n";
        assert_eq!(
            parse_depends(text),
            ["linux-image-6.1.0-57-cloud-amd64", "kmod"]
        );
        assert!(parse_depends("Package: x\n").is_empty());
    }

    #[test]
    fn a_simulation_names_what_it_would_install() {
        let text = "Reading package lists...\nInst libfdt1 (1.6.1 Debian:12 [amd64])\nInst seabios [1] (1.16 Debian:12 [all])\nConf libfdt1 (1.6.1)\n";
        assert_eq!(parse_simulated(text), ["libfdt1", "seabios"]);
    }
}
