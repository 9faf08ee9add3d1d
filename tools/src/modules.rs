//! Kernel modules: which are needed, and in which order they load.
//!
//! Debian's packages carry no `modules.dep` (it is made at installation), so the dependencies are read from where
//! depmod reads them: the `.modinfo` section of each module.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::error::{Error, Naming, Result};
use crate::process;

/// The modules of one kernel.
pub struct Tree {
    /// Name with underscores -> file.
    files: BTreeMap<String, PathBuf>,
    /// What the kernel has built in.
    builtin: BTreeSet<String>,
}

/// A module to load.
#[derive(Debug, PartialEq, Eq)]
pub struct Module {
    /// Its name with underscores.
    pub name: String,
    /// Its ELF file, unpacked.
    pub image: Vec<u8>,
}

impl Tree {
    /// Lists the modules under `lib/modules/<release>`.
    pub fn open(folder: &Path) -> Result<Self> {
        let mut files = BTreeMap::new();
        list(&folder.join("kernel"), &mut files)?;
        let path = folder.join("modules.builtin");
        let text = fs::read_to_string(&path).naming(|| format!("read {}", path.display()))?;
        let builtin = text
            .lines()
            .filter_map(|line| name_of(Path::new(line)))
            .collect();
        Ok(Self { files, builtin })
    }

    /// The modules that `wanted` need, themselves included, each after what it depends on.
    pub fn resolve(&self, wanted: &[&str]) -> Result<Vec<Module>> {
        let mut images = BTreeMap::new();
        let order = order(wanted, |name| {
            if self.builtin.contains(name) {
                return Ok(None);
            }
            let file = self
                .files
                .get(name)
                .ok_or_else(|| Error::Invalid(format!("this kernel has no module {name}")))?;
            let image = unpack(file)?;
            let depends =
                depends(&image).ok_or_else(|| Error::malformed(file, "not a kernel module"))?;
            images.insert(name.to_owned(), image);
            Ok(Some(depends))
        })?;
        Ok(order
            .into_iter()
            .filter_map(|name| {
                Some(Module {
                    image: images.remove(&name)?,
                    name,
                })
            })
            .collect())
    }
}

fn list(folder: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).naming(|| format!("list {}", folder.display()))? {
        let path = entry
            .naming(|| format!("list {}", folder.display()))?
            .path();
        if path.is_dir() {
            list(&path, files)?;
        } else if let Some(name) = name_of(&path) {
            files.insert(name, path);
        }
    }
    Ok(())
}

/// The name of a module's file: `kvm-amd.ko.xz` is `kvm_amd`.
fn name_of(path: &Path) -> Option<String> {
    let (name, kind) = path.file_name()?.to_str()?.split_once(".ko")?;
    matches!(kind, "" | ".xz").then(|| name.replace('-', "_"))
}

fn unpack(file: &Path) -> Result<Vec<u8>> {
    let bytes = process::read(file)?;
    if file.extension().is_none_or(|kind| kind != "xz") {
        return Ok(bytes);
    }
    let mut image = Vec::new();
    lzma_rust2::XzReader::new(bytes.as_slice(), false)
        .read_to_end(&mut image)
        .naming(|| format!("unpack {}", file.display()))?;
    Ok(image)
}

/// The load order: a depth-first walk, what a module needs before itself; `None` is a module built in.
fn order(
    wanted: &[&str],
    mut depends: impl FnMut(&str) -> Result<Option<Vec<String>>>,
) -> Result<Vec<String>> {
    enum Visit {
        Enter(String),
        Leave(String),
    }
    let mut order = Vec::new();
    let mut seen = BTreeSet::new();
    let mut stack: Vec<Visit> = wanted
        .iter()
        .rev()
        .map(|name| Visit::Enter(name.replace('-', "_")))
        .collect();
    while let Some(visit) = stack.pop() {
        match visit {
            Visit::Leave(name) => order.push(name),
            Visit::Enter(name) if !seen.insert(name.clone()) => {}
            Visit::Enter(name) => {
                let Some(needs) = depends(&name)? else {
                    continue;
                };
                stack.push(Visit::Leave(name));
                stack.extend(needs.into_iter().rev().map(Visit::Enter));
            }
        }
    }
    Ok(order)
}

/// The `depends=` of a module's `.modinfo`; `None` when the file is not a 64-bit ELF object with one.
fn depends(image: &[u8]) -> Option<Vec<String>> {
    let info = section(image, ".modinfo")?;
    let field = info
        .split(|byte| *byte == 0)
        .find_map(|entry| entry.strip_prefix(b"depends="))?;
    let text = std::str::from_utf8(field).ok()?;
    Some(
        text.split(',')
            .filter(|name| !name.is_empty())
            .map(|name| name.replace('-', "_"))
            .collect(),
    )
}

/// A section's bytes, by ELF-64's section header table.
fn section<'a>(image: &'a [u8], name: &str) -> Option<&'a [u8]> {
    let number = |at: usize, width: usize| -> Option<usize> {
        let bytes = image.get(at..at.checked_add(width)?)?;
        Some(
            bytes
                .iter()
                .rev()
                .fold(0, |number, byte| (number << 8) | usize::from(*byte)),
        )
    };
    if image.get(..5)? != b"\x7fELF\x02" {
        return None;
    }
    let (table, size, count, names) = (
        number(0x28, 8)?,
        number(0x3a, 2)?,
        number(0x3c, 2)?,
        number(0x3e, 2)?,
    );
    let header = |index: usize| table.checked_add(index.checked_mul(size)?);
    let content = |header: usize| {
        let start = number(header.checked_add(0x18)?, 8)?;
        image.get(start..start.checked_add(number(header + 0x20, 8)?)?)
    };
    let strings = content(header(names)?)?;
    (0..count).find_map(|index| {
        let header = header(index)?;
        let rest = strings.get(number(header, 4)?..)?;
        (rest.split(|byte| *byte == 0).next()? == name.as_bytes()).then(|| content(header))?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn needs(name: &str) -> Result<Option<Vec<String>>> {
        let needs: &[&str] = match name {
            "vsock" | "virtio" => &[],
            "transport" => &["vsock", "virtio_ring"],
            "virtio_ring" => &["virtio"],
            "virtio_mmio" => &["virtio_ring", "virtio"],
            "loop_a" => &["loop_b"],
            "loop_b" => &["loop_a"],
            "builtin" => return Ok(None),
            _ => return Err(Error::Invalid(format!("no {name}"))),
        };
        Ok(Some(needs.iter().map(|name| (*name).to_owned()).collect()))
    }

    #[test]
    fn dependencies_load_first_and_once() {
        let order = order(&["virtio-mmio", "transport", "builtin"], needs).unwrap();
        assert_eq!(
            order,
            ["virtio", "virtio_ring", "virtio_mmio", "vsock", "transport"]
        );
    }

    #[test]
    fn a_cycle_ends_and_an_unknown_module_is_named() {
        assert_eq!(order(&["loop_a"], needs).unwrap().len(), 2);
        assert!(
            order(&["absent"], needs)
                .unwrap_err()
                .to_string()
                .contains("absent")
        );
    }

    #[test]
    fn file_names_become_module_names() {
        assert_eq!(
            name_of(Path::new("kernel/arch/x86/kvm/kvm-amd.ko")).unwrap(),
            "kvm_amd"
        );
        assert_eq!(name_of(Path::new("9p.ko.xz")).unwrap(), "9p");
        assert_eq!(name_of(Path::new("modules.order")), None);
    }

    #[test]
    fn what_is_not_a_module_is_told() {
        assert_eq!(depends(b""), None);
        assert_eq!(depends(b"\x7fELF\x02"), None);
        let mut image = vec![0xff; 64];
        image[..5].copy_from_slice(b"\x7fELF\x02");
        assert_eq!(depends(&image), None);
    }

    #[test]
    fn modinfo_names_the_dependencies() {
        let names = b"\0.modinfo\0";
        let info = b"license=GPL\0depends=kvm,ccp-x\0name=kvm_amd\0";
        let mut image = vec![0; 64];
        image[..5].copy_from_slice(b"\x7fELF\x02");
        let start = |image: &Vec<u8>| image.len() as u64;
        let names_at = start(&image);
        image.extend_from_slice(names);
        let info_at = start(&image);
        image.extend_from_slice(info);
        let table = start(&image);
        for (name, at, size) in [(0u32, names_at, names.len()), (1, info_at, info.len())] {
            let mut header = [0; 64];
            header[..4].copy_from_slice(&name.to_le_bytes());
            header[0x18..0x20].copy_from_slice(&at.to_le_bytes());
            header[0x20..0x28].copy_from_slice(&(size as u64).to_le_bytes());
            image.extend_from_slice(&header);
        }
        image[0x28..0x30].copy_from_slice(&table.to_le_bytes());
        image[0x3a] = 64;
        image[0x3c] = 2;
        image[0x3e] = 0;
        assert_eq!(depends(&image).unwrap(), ["kvm", "ccp_x"]);
    }
}
