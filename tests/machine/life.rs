//! The life of a machine with a stock kernel: how it ends, by whom, and what a user is told.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // All of it is test code.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use rustix::process::Signal;
use vmm_tests::{Vmm, image};

#[test]
fn lc03_ctrl_c_ends_workload_and_guest_with_130() {
    for (signal, status) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let vmm = Vmm::machine()
            .args(["--", "sh", "-c", "echo up; sleep 1000"])
            .start();
        vmm.stdout.wait_for("up\n");
        vmm.signal(signal);
        let ended = vmm.end();
        assert_eq!(ended.status, status, "{}", ended.stderr);
    }
}

#[test]
fn lc03_a_second_ctrl_c_forces() {
    let script = "trap '' INT TERM; echo up; while :; do sleep 1; done";
    let vmm = Vmm::machine().args(["--", "sh", "-c", script]).start();
    vmm.stdout.wait_for("up\n");
    vmm.signal(Signal::INT);
    vmm.signal(Signal::INT);
    assert_eq!(vmm.end().status, 130);
}

#[test]
fn lc03_ctrl_c_while_the_guest_boots_is_130_too() {
    let vmm = Vmm::machine()
        .args(["--cmdline", "earlyprintk=ttyS0", "--", "true"])
        .start();
    vmm.signal(Signal::INT);
    let status = vmm.end().status;
    // Before the program has its handler the signal itself ends it.
    assert!(status == 130 || status == -2, "{status}");
}

#[test]
fn lc05_a_kernel_that_panics_is_told_with_the_consoles_last_lines() {
    let ended = Vmm::machine()
        .args(["--cmdline", "rdinit=/missing root=/dev/none", "--", "true"])
        .run();
    assert_eq!(ended.status, 125);
    assert!(
        ended.stderr.contains("Unable to mount root fs"),
        "{}",
        ended.stderr
    );
    assert!(ended.stderr.contains("panic"), "{}", ended.stderr);
    assert!(ended.stdout.is_empty());
}

#[test]
fn lc05_an_agent_that_never_says_ready_is_bounded_and_told_with_the_consoles_last_lines() {
    // An archive of nothing: no modules, so no vsock in a stock kernel.
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().join("empty.cpio");
    std::fs::write(&empty, trailer()).unwrap();
    let (kernel, empty) = (image::elf(), empty.display().to_string());
    let flags = ["--initramfs", &empty, "--ready-timeout", "20s", "--kernel"];
    let ended = Vmm::new("run")
        .args(flags)
        .args([kernel])
        .args(["--", "true"])
        .run();
    assert_eq!(ended.status, 125);
    assert!(ended.stderr.contains("ready"), "{}", ended.stderr);
    assert!(
        ended.stderr.lines().count() > 1,
        "with the console's last lines: {}",
        ended.stderr
    );
}

/// A newc archive that holds only its end.
fn trailer() -> Vec<u8> {
    let zero = "00000000";
    let mut archive =
        format!("070701{}0000000b{zero}TRAILER!!!\0", [zero; 11].concat()).into_bytes();
    archive.resize(512, 0);
    archive
}

/// Boots the image's own userland with `program` as init.
fn own_init(program: &str) -> vmm_tests::Ended {
    let cmdline = format!("console=ttyS0 quiet rdinit={program}");
    Vmm::machine()
        .args(["--no-agent", "--cmdline", &cmdline, "--kernel"])
        .args([image::elf()])
        .arg("--initramfs")
        .args([image::initramfs()])
        .run()
}

#[test]
fn power_off_reset_and_panic_of_a_stock_kernel_are_told_apart() {
    let off = own_init("/sbin/poweroff -- -f");
    assert_eq!(off.status, 0, "{}", off.stderr);
    let reset = own_init("/sbin/reboot -- -f");
    assert_eq!(reset.status, 125);
    assert!(reset.stderr.contains("reset"), "{}", reset.stderr);
    let panic = own_init("/bin/false");
    assert_eq!(panic.status, 125);
    assert!(panic.stderr.contains("panic"), "{}", panic.stderr);
    assert!(
        panic.stderr.contains("Attempted to kill init"),
        "{}",
        panic.stderr
    );
}

/// Runs a shell script as root in a mount namespace of its own, with `$VMM` and `$KERNEL`.
fn elsewhere(script: &str) -> (i32, String) {
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-ec", script])
        .env("VMM", Vmm::binary())
        .env("KERNEL", image::elf())
        .env("INITRAMFS", image::initramfs())
        .output()
        .expect("start unshare of util-linux");
    let status = output
        .status
        .code()
        .unwrap_or_else(|| -output.status.signal().unwrap_or(0));
    (status, String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn lc04_no_dev_kvm_and_no_permission_are_told_with_their_remedies() {
    let run = "$VMM run --dir /dev/state --kernel $KERNEL --initramfs $INITRAMFS -- true";
    let (status, stderr) = elsewhere(&format!(
        "mount -t tmpfs none /dev; mknod /dev/null c 1 3; exec {run}"
    ));
    assert_eq!(status, 125, "{stderr}");
    assert!(stderr.contains("/dev/kvm"), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    let (status, stderr) = elsewhere(&format!(
        "mount -t tmpfs none /dev; mknod -m 600 /dev/kvm c 10 232; mknod -m 666 /dev/null c 1 3
         mkdir -m 777 /dev/shm; export VMM_DIR=/dev/shm/state
         cp $VMM /dev/shm/vmm; cp $KERNEL /dev/shm/kernel; cp $INITRAMFS /dev/shm/initramfs
         chmod -R a+rX /dev/shm; VMM=/dev/shm/vmm KERNEL=/dev/shm/kernel INITRAMFS=/dev/shm/initramfs
         exec setpriv --reuid 65534 --regid 65534 --clear-groups {}",
        run.replace("--dir /dev/state", "")
    ));
    assert_eq!(status, 125, "{stderr}");
    assert!(
        stderr.contains("ermission") && stderr.contains("kvm"),
        "{stderr}"
    );
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
}
