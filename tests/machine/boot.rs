//! A stock kernel boots, in both of its forms and in machines of several shapes, and finds what it was given.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // All of it is test code.

use vmm_tests::{Vmm, image};

/// Boots and asks the guest for its kernel, processors and memory in KiB.
fn shape(flags: &[&str]) -> (String, u32, u64, String) {
    let ended = Vmm::machine()
        .args(flags)
        .args([
            "--",
            "sh",
            "-c",
            "uname -r; nproc; grep MemTotal /proc/meminfo; cat /proc/iomem",
        ])
        .run();
    assert_eq!(ended.status, 0, "{flags:?}: {}", ended.stderr);
    let text = ended.text();
    let mut lines = text.lines();
    let release = lines.next().unwrap().to_owned();
    let processors = lines.next().unwrap().parse().unwrap();
    let memory = lines
        .next()
        .unwrap()
        .split_whitespace()
        .nth(1)
        .unwrap()
        .parse()
        .unwrap();
    (release, processors, memory, text)
}

fn check(flags: &[&str], processors: u32, mib: u64) {
    let (release, nproc, kib, text) = shape(flags);
    assert!(
        release.contains("cloud"),
        "the guest's kernel, not the host's: {release}"
    );
    assert_eq!(nproc, processors);
    // The kernel keeps a part for itself: its image, page structures, reserved areas.
    assert!(
        kib < mib * 1024 && kib > mib * 1024 * 6 / 10,
        "{kib} KiB of {mib} MiB"
    );
    // Addresses are shown to the mighty only, regions to all: one below 640 KiB, one below the gap, one above it.
    let regions = text
        .lines()
        .filter(|line| line.ends_with(" : System RAM"))
        .count();
    assert_eq!(regions, if mib > 3072 { 3 } else { 2 }, "{text}");
}

#[test]
fn elf_with_1_vcpu_and_128_mib() {
    check(&["--memory", "128M"], 1, 128);
}

#[test]
fn elf_with_4_vcpus_and_4_gib() {
    check(&["--memory", "4G", "--cpus", "4"], 4, 4096);
}

#[test]
fn bzimage_with_1_vcpu_and_4_gib() {
    let (kernel, initramfs) = (image::bzimage(), image::initramfs());
    let (kernel, initramfs) = (kernel.to_str().unwrap(), initramfs.to_str().unwrap());
    check(
        &[
            "--kernel",
            kernel,
            "--initramfs",
            initramfs,
            "--memory",
            "4G",
        ],
        1,
        4096,
    );
}

#[test]
fn bzimage_with_4_vcpus_and_128_mib() {
    let (kernel, initramfs) = (image::bzimage(), image::initramfs());
    let (kernel, initramfs) = (kernel.to_str().unwrap(), initramfs.to_str().unwrap());
    check(
        &[
            "--kernel",
            kernel,
            "--initramfs",
            initramfs,
            "--memory",
            "128M",
            "--cpus",
            "4",
        ],
        4,
        128,
    );
}

#[test]
fn the_guest_has_the_time_the_entropy_and_its_generation_before_the_workload_runs() {
    let before = now();
    let script = "date +%s; cat /run/vmm/generation; echo \"env $VMM_GENERATION\"; hostname; wc -c </etc/machine-id";
    let ended = Vmm::machine().args(["--", "sh", "-c", script]).run();
    assert_eq!(ended.status, 0, "{}", ended.stderr);
    let text = ended.text();
    let guest: u64 = text.lines().next().unwrap().parse().unwrap();
    assert!(
        (before..=now()).contains(&guest),
        "{before} <= {guest}: {text}"
    );
    assert!(text.contains("env 1"), "the first generation: {text}");
    assert!(text.ends_with("33\n"), "a machine-id of 32 digits: {text}");
}

fn now() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_secs()
}
