//! The `vmm` program with fast guests: consoles, ends, signals and bad input, as a user meets them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // All of it is test code.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use rustix::process::Signal;
use vmm_tests::{Ended, Running, Vmm, require_kvm};

/// A folder with files for `vmm` to be given.
struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn with(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    }
}

/// `vmm run --no-agent` of a fast guest.
fn console(guest: &[u8], cmdline: &str) -> (Files, Running) {
    require_kvm();
    let files = Files::new();
    let kernel = files.with("guest.elf", guest);
    let vmm = Vmm::new("run")
        .args([
            "--no-agent",
            "--memory",
            "128M",
            "--cmdline",
            cmdline,
            "--kernel",
        ])
        .args([kernel]);
    (files, vmm.start())
}

/// What is wrong, in one line, with status 125 and nothing on stdout.
fn refused(ended: &Ended, words: &[&str]) {
    assert_eq!(ended.status, 125, "{}", ended.stderr);
    assert!(ended.stdout.is_empty(), "{}", ended.text());
    assert_eq!(
        ended.stderr.lines().count(),
        1,
        "one clear error: {}",
        ended.stderr
    );
    for word in words {
        assert!(
            ended.stderr.contains(word),
            "{word:?} is not in: {}",
            ended.stderr
        );
    }
}

#[test]
fn a_console_is_streamed_to_stdout_and_power_off_is_success() {
    let (_files, vmm) = console(vmm_guests::NOISE, "lines=2000");
    let ended = vmm.end();
    assert_eq!(ended.status, 0, "{}", ended.stderr);
    assert_eq!(ended.stderr, "");
    assert_eq!(ended.text().lines().count(), 2001);
    assert!(ended.text().starts_with("line 0\nline 1\n"));
}

#[test]
fn bad_ends_are_told_apart_with_status_125() {
    for (end, word) in [
        ("reset", "reset"),
        ("triple", "triple fault"),
        ("panic", "panic"),
    ] {
        let (_files, vmm) = console(vmm_guests::ENDS, &format!("say=before end={end}"));
        let ended = vmm.end();
        assert_eq!(ended.status, 125, "{end}");
        assert_eq!(ended.text(), "before\n", "{end}");
        assert!(ended.stderr.contains(word), "{end}: {}", ended.stderr);
    }
}

#[test]
fn lc03_ctrl_c_ends_the_guest_with_130() {
    for (signal, status) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let (_files, vmm) = console(vmm_guests::ENDS, "say=up end=spin");
        vmm.stdout.wait_for("up\n");
        vmm.signal(signal);
        let ended = vmm.end();
        assert_eq!(ended.status, status, "{}", ended.stderr);
        assert_eq!(ended.text(), "up\n");
    }
}

#[test]
fn lc03_ctrl_c_breaks_a_console_that_nobody_reads() {
    require_kvm();
    let files = Files::new();
    let kernel = files.with("guest.elf", vmm_guests::NOISE);
    // A pipe that is never read: the guest writes 64 KiB of it full and waits.
    let (reader, writer) = std::io::pipe().unwrap();
    let mut child = std::process::Command::new(Vmm::binary())
        .args(["run", "--no-agent", "--cmdline", "lines=100000", "--kernel"])
        .arg(kernel)
        .stdout(writer)
        .stdin(std::process::Stdio::null())
        .spawn()
        .unwrap();
    // Full when poll says that there is data and the guest has had time to fill it: read one byte, which waits.
    let mut byte = [0];
    std::io::Read::read_exact(&mut (&reader), &mut byte).unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), Signal::INT).unwrap();
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(130));
}

#[test]
fn lc04_kernel_missing_not_one_truncated_or_too_large_is_one_clear_error() {
    let files = Files::new();
    let elf = vmm_guests::VSOCK;
    let missing = files.0.path().join("missing");
    let text = files.with("text", b"#!/bin/sh\necho not a kernel\n");
    let empty = files.with("empty", b"");
    let headless = files.with("headless", &elf[..40]);
    let truncated = files.with("truncated", &elf[..elf.len() / 2]);
    let folder = files.0.path().to_path_buf();
    // A segment that says it is larger than the machine.
    let mut large = elf.to_vec();
    let at = 64 + 40;
    large[at..at + 8].copy_from_slice(&(1u64 << 40).to_le_bytes());
    let large = files.with("large", &large);
    for (path, words) in [
        (missing, &["missing", "No such file"][..]),
        (text, &["text"]),
        (empty, &["empty"]),
        (headless, &["headless"]),
        (truncated, &["truncated"]),
        (folder, &["irectory"]),
        (large, &["large"]),
    ] {
        let name = path.display().to_string();
        let ended = Vmm::new("run")
            .args(["--no-agent", "--kernel", &name])
            .run();
        refused(&ended, words);
        assert!(ended.stderr.contains(&name), "{}", ended.stderr);
        assert!(ended.took < Duration::from_secs(1), "{:?}", ended.took);
    }
}

#[test]
fn lc04_initramfs_missing_not_one_or_too_large_is_one_clear_error() {
    require_kvm();
    let files = Files::new();
    let kernel = files
        .with("guest.elf", vmm_guests::SERIAL)
        .display()
        .to_string();
    let missing = files.0.path().join("missing");
    let text = files.with("text", b"this is no archive of any kind\n");
    let empty = files.with("empty", b"");
    let large = files.with("large", b"070701");
    fs::File::options()
        .write(true)
        .open(&large)
        .unwrap()
        .set_len(200 << 20)
        .unwrap();
    for (path, words) in [
        (missing, &["No such file"][..]),
        (text, &["archive"]),
        (empty, &["empty"]),
        (large, &["initramfs", "209715200", "--memory"]),
    ] {
        let name = path.display().to_string();
        let flags = [
            "--no-agent",
            "--memory",
            "128M",
            "--kernel",
            &kernel,
            "--initramfs",
            &name,
        ];
        let ended = Vmm::new("run").args(flags).run();
        refused(&ended, words);
        assert!(
            ended.stderr.contains(&name) || words.contains(&"--memory"),
            "{}",
            ended.stderr
        );
        assert!(ended.took < Duration::from_secs(1), "{:?}", ended.took);
    }
}

#[test]
fn cl01_options_without_effect_are_still_refused_when_wrong() {
    let files = Files::new();
    let kernel = files
        .with("guest.elf", vmm_guests::SERIAL)
        .display()
        .to_string();
    for (flag, value) in [
        ("--timeout", "-1s"),
        ("--timeout", "NaN"),
        ("--timeout", "0"),
        ("--output-limit", "-5"),
        ("--output-limit", "inf"),
        ("--on-limit", "maybe"),
        ("--user", "nobody:x:y"),
        ("--env", "NOVALUE"),
        ("--env", "=x"),
    ] {
        let word = format!("{flag}={value}");
        let ended = Vmm::new("run")
            .args(["--no-agent", "--kernel", &kernel, &word])
            .run();
        assert_eq!(ended.status, 125, "{word}: {}", ended.stderr);
        assert!(ended.stderr.contains(value), "{word}: {}", ended.stderr);
        assert!(ended.stdout.is_empty(), "{word}");
    }
}

#[test]
fn a_command_for_a_guest_without_agent_is_refused_by_name() {
    let files = Files::new();
    let kernel = files
        .with("guest.elf", vmm_guests::SERIAL)
        .display()
        .to_string();
    let ended = Vmm::new("run")
        .args(["--no-agent", "--kernel", &kernel, "--", "true"])
        .run();
    refused(&ended, &["--no-agent", "true"]);
}
