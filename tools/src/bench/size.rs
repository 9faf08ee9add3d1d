//! The monitor's own memory beside an idle guest, and the binaries on disk.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::bench::contestant::Ended;
use crate::bench::report::{self, Circumstances};
use crate::bench::{guest, verdict};
use crate::error::{Error, Naming, Result};
use crate::place::Place;
use crate::process::{build_static, line, read};
use crate::say;

const MIB: u64 = 1 << 20;
/// The guest's memory, by which its mapping is known.
const GUEST: u64 = 128 * MIB;

#[derive(serde::Serialize)]
struct Binary {
    name: &'static str,
    bytes: u64,
    limit: u64,
    is_static: bool,
    is_stripped: bool,
}

#[derive(serde::Serialize)]
struct Report {
    circumstances: Circumstances,
    binaries: Vec<Binary>,
    own_rss_bytes: u64,
    own_rss_limit: u64,
    guest_rss_bytes: u64,
}

/// Measures, prints, keeps and judges.
pub fn run(place: &Place) -> Result<()> {
    let folder = tempfile::tempdir().naming(|| "create a folder".into())?;
    let guest = guest(place, folder.path(), "ends")?;
    let vmm = build_static(place, "vmm", "vmm")?;
    let agent = build_static(place, "vmm-agent", "vmm-agent")?;
    let binaries = vec![
        binary("vmm", &vmm, 4 * MIB)?,
        binary("vmm-agent", &agent, MIB)?,
    ];
    let memory = memory(&vmm, &guest)?;
    let report = Report {
        circumstances: Circumstances::now(place, &vmm),
        binaries,
        own_rss_bytes: memory.own,
        own_rss_limit: 4 * MIB,
        guest_rss_bytes: memory.guest,
    };
    let path = report::keep(place, "size", report.circumstances.time, &report)?;
    let mut missed = Vec::new();
    for binary in &report.binaries {
        let Binary {
            name, bytes, limit, ..
        } = binary;
        say::data(format!(
            "{name:<10} {bytes:>9} bytes on disk (at most {limit}){}{}",
            if binary.is_static {
                ", static"
            } else {
                ", NOT STATIC"
            },
            if binary.is_stripped {
                ", stripped"
            } else {
                ", NOT STRIPPED"
            },
        ))?;
        if bytes > limit || !binary.is_static || !binary.is_stripped {
            missed.push(format!(
                "{name} is {bytes} bytes, static {}, stripped {}",
                binary.is_static, binary.is_stripped
            ));
        }
    }
    let (own, limit) = (report.own_rss_bytes, report.own_rss_limit);
    say::data(format!(
        "memory     {own:>9} bytes of its own (at most {limit}), {} of the guest's touched",
        report.guest_rss_bytes
    ))?;
    if own > limit {
        missed.push(format!("the monitor takes {own} bytes of its own"));
    }
    say::step(format!("the report is in {}", path.display()));
    verdict(&missed)
}

/// What its section and program headers tell of an ELF.
fn binary(name: &'static str, path: &Path, limit: u64) -> Result<Binary> {
    const PT_INTERP: u64 = 3;
    const SHT_SYMTAB: u64 = 2;
    let file = read(path)?;
    let number = |at: usize, bytes: usize| {
        file.get(at..at + bytes)
            .map(|bytes| {
                bytes
                    .iter()
                    .rev()
                    .fold(0, |sum, byte| sum << 8 | u64::from(*byte))
            })
            .ok_or_else(|| Error::malformed(path, "is not a whole ELF"))
    };
    // Type of each entry of a table: its offset, the entries' size and count at these places of the file header.
    let types = |offset: usize, size: usize, count: usize, kind: usize| -> Result<Vec<u64>> {
        let (table, size) = (number(offset, 8)? as usize, number(size, 2)? as usize);
        (0..number(count, 2)? as usize)
            .map(|index| number(table + index * size + kind, 4))
            .collect()
    };
    Ok(Binary {
        name,
        bytes: file.len() as u64,
        limit,
        is_static: !types(32, 54, 56, 0)?.contains(&PT_INTERP),
        is_stripped: !types(40, 58, 60, 4)?.contains(&SHT_SYMTAB),
    })
}

struct Memory {
    own: u64,
    guest: u64,
}

/// Rss of the monitor with a guest that has said a word and spins.
fn memory(vmm: &Path, guest: &Path) -> Result<Memory> {
    let mut command = Command::new(vmm);
    command
        .args([
            "run",
            "--no-agent",
            "--memory",
            "128M",
            "--cmdline",
            "say=! end=spin",
            "--kernel",
        ])
        .arg(guest)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit());
    let child = command
        .spawn()
        .naming(|| format!("start `{}`", line(&command)))?;
    let mut child = Ended(child);
    let mut word = [0; 2];
    let stdout = child.0.stdout.as_mut();
    let said = stdout.map(|stdout| stdout.read_exact(&mut word));
    if !matches!(said, Some(Ok(()))) {
        return Err(Error::Check(format!(
            "`{}` did not boot its guest",
            line(&command)
        )));
    }
    let smaps = format!("/proc/{}/smaps", child.0.id());
    let text = std::fs::read_to_string(&smaps).naming(|| format!("read {smaps}"))?;
    Ok(split(&text))
}

/// Rss of the mapping that is the guest's memory, by its size, and of all others.
fn split(smaps: &str) -> Memory {
    let mut memory = Memory { own: 0, guest: 0 };
    let mut is_guest = false;
    for text in smaps.lines() {
        let kib = |name: &str| {
            let value = text.strip_prefix(name)?.trim().strip_suffix(" kB")?;
            value.parse::<u64>().ok().map(|kib| kib * 1024)
        };
        if let Some(size) = kib("Size:") {
            is_guest = size >= GUEST;
        } else if let Some(rss) = kib("Rss:") {
            *(if is_guest {
                &mut memory.guest
            } else {
                &mut memory.own
            }) += rss;
        }
    }
    memory
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_memory_is_told_from_our_own() {
        let memory = split(
            "55d0-55d1 r-xp 0 00:00 0 /bin/vmm\nSize:  900 kB\nRss:  800 kB\nPss: 1 kB\n\
             7f00-7f01 rw-p 0 00:00 0\nSize:  131072 kB\nRss:  64 kB\n\
             7ffd-7ffe rw-p 0 00:00 0 [stack]\nSize:  132 kB\nRss:  16 kB\n",
        );
        assert_eq!((memory.own, memory.guest), (816 * 1024, 64 * 1024));
    }
}
