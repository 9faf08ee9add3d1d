//! What this host can do: the kinds of KVM told apart by running a tiny guest.
//!
//! ```text
//! open /dev/kvm --no such file--> none        --refused--> no permission
//!      | opened
//! run 18 bytes of kernel code --powers off--> hardware
//!                             --KVM cannot emulate an instruction--> no hardware
//! ```
//!
//! The guest counts bits and compares 16 bytes (`POPCNT`, `CMPXCHG16B`), as kernels do all the time. With hardware
//! behind it KVM never sees those instructions; a KVM without hardware has to emulate all supervisor code, and the
//! kernel's emulator lacks both (Linux `arch/x86/kvm/emulate.c`).

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use vmm_devices::console::ConsoleLog;

use crate::acpi::SLEEP_TYPE_OFF;
use crate::exits::ExitReason;
use crate::kvm;
use crate::layout::{HIGH_RAM, SLEEP_CONTROL};
use crate::machine::{self, Config, Machine};
use crate::memory;

/// How long the tiny guest may take; it needs a millisecond.
const PATIENCE: Duration = Duration::from_secs(5);

/// What is behind `/dev/kvm`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kvm {
    /// Hardware: stock kernels run.
    Hardware,
    /// A KVM without hardware: only fast guests run.
    NoHardware,
    /// No `/dev/kvm`.
    None,
    /// A `/dev/kvm` for others.
    NoPermission,
    /// It is there and does not work, and says why.
    Unusable(String),
}

impl Kvm {
    /// Its name in `--json`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Hardware => "hardware",
            Self::NoHardware => "no-hardware",
            Self::None => "none",
            Self::NoPermission => "no-permission",
            Self::Unusable(_) => "unusable",
        }
    }

    /// What it means.
    #[must_use]
    pub fn meaning(&self) -> String {
        match self {
            Self::Hardware => "stock kernels run on /dev/kvm".to_owned(),
            Self::NoHardware => "/dev/kvm has no hardware behind it (kvm_pvm): fast guests run, stock kernels do not".to_owned(),
            Self::None => "there is no /dev/kvm".to_owned(),
            Self::NoPermission => "/dev/kvm is there, but not for this user".to_owned(),
            Self::Unusable(why) => format!("/dev/kvm does not work: {why}"),
        }
    }

    /// The command that mends it; none where nothing is to be mended.
    #[must_use]
    pub fn remedy(&self) -> Option<&'static str> {
        match self {
            Self::Hardware => None,
            Self::NoHardware => Some(
                "cargo xtask run -- ARGV (it uses an emulated machine), or use a host with nested virtualization",
            ),
            Self::None => Some("sudo modprobe kvm_amd || sudo modprobe kvm_intel"),
            Self::NoPermission => Some("sudo usermod -aG kvm $USER, then log in again"),
            Self::Unusable(_) => Some("sudo dmesg | grep -i kvm"),
        }
    }
}

/// Finds out, within five seconds.
#[must_use]
pub fn kvm() -> Kvm {
    match kvm::open(Path::new(kvm::DEVICE)) {
        Err(kvm::Error::Missing(_)) => Kvm::None,
        Err(kvm::Error::Permission(_)) => Kvm::NoPermission,
        Err(error) => Kvm::Unusable(error.to_string()),
        Ok(_) => match tiny_guest() {
            Ok(ExitReason::Shutdown) => Kvm::Hardware,
            Ok(ExitReason::Failed(_)) => Kvm::NoHardware,
            Ok(other) => Kvm::Unusable(format!("a tiny guest did not run: {other}")),
            Err(error) => Kvm::Unusable(error.to_string()),
        },
    }
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot set up a tiny guest: {0}")]
    Host(#[from] io::Error),
    #[error(transparent)]
    Machine(#[from] machine::Error),
}

fn tiny_guest() -> Result<ExitReason, Error> {
    let file = rustix::fs::memfd_create("vmm-doctor", rustix::fs::MemfdFlags::CLOEXEC)
        .map_err(io::Error::from)?;
    let mut file = File::from(file);
    file.write_all(&elf(&code()))?;
    let mut config = Config::new(format!("/proc/self/fd/{}", file.as_raw_fd()));
    config.memory = memory::MIN;
    let machine = Machine::build(&config, Box::new(ConsoleLog::new(0)))?;
    let handle = machine.handle();
    let (sender, ended) = channel();
    let thread = thread::Builder::new()
        .name("doctor".to_owned())
        .spawn(move || {
            // Nobody to tell is the case of a guest that took too long.
            let _ = sender.send(machine.run());
        })?;
    let reason = ended.recv_timeout(PATIENCE);
    handle.stop();
    let _ = thread.join();
    match reason {
        Ok(reason) => Ok(reason?),
        Err(_) => Ok(ExitReason::Stopped),
    }
}

/// Runs the two instructions and powers off.
fn code() -> Vec<u8> {
    let [low, high] = SLEEP_CONTROL.to_le_bytes();
    // Type "off" and "go", as `acpi::turns_off` has it.
    let off = (SLEEP_TYPE_OFF << 2) | 0x20;
    [
        &[0xf3, 0x48, 0x0f, 0xb8, 0xc0][..], // popcnt rax, rax
        &[0x48, 0x0f, 0xc7, 0x0c, 0x24],     // cmpxchg16b [rsp]: the boot stack is aligned for it
        &[0x66, 0xba, low, high],            // mov dx, sleep control
        &[0xb0, off],                        // mov al, off
        &[0xee],                             // out dx, al
        &[0xf4],                             // hlt
    ]
    .concat()
}

/// The smallest ELF around `code`: one segment at the start of high memory.
fn elf(code: &[u8]) -> Vec<u8> {
    const HEADERS: u64 = 64 + 56;
    let length = code.len() as u64;
    let mut out = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    // Executable, x86-64, version 1; entry; program headers at 64; no sections.
    out.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    for word in [HIGH_RAM, 64, 0] {
        out.extend(word.to_le_bytes());
    }
    out.extend([0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    // One load segment, readable and executable.
    out.extend([1, 0, 0, 0, 5, 0, 0, 0]);
    for word in [HEADERS, HIGH_RAM, HIGH_RAM, length, length, 4096] {
        out.extend(word.to_le_bytes());
    }
    out.extend(code);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiny_guest_powers_off_at_its_end() {
        let code = code();
        assert_eq!(code.len(), 18);
        assert!(crate::acpi::turns_off(code[code.len() - 3]));
        assert_eq!(crate::layout::BOOT_STACK % 16, 0);
    }

    #[test]
    fn every_kind_but_hardware_has_a_remedy() {
        for kind in [
            Kvm::NoHardware,
            Kvm::None,
            Kvm::NoPermission,
            Kvm::Unusable("x".to_owned()),
        ] {
            assert!(kind.remedy().is_some(), "{}", kind.name());
        }
        assert_eq!(Kvm::Hardware.remedy(), None);
    }

    #[test]
    fn this_host_is_told_apart() {
        let found = kvm();
        let device = Path::new(kvm::DEVICE);
        match &found {
            Kvm::None => assert!(!device.exists()),
            Kvm::Unusable(why) => panic!("{why}"),
            _ => assert!(device.exists()),
        }
    }
}
