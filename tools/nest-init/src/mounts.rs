//! The mounts of the nest: kernel file systems, the host's root, its writable layers and the writable share.

use std::ffi::{CStr, CString, OsStr};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nest_init::wire::Job;
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_move, unmount};

use crate::{Fault, Naming};

/// Folders of the host that a program expects to write to. Each gets a layer in memory over what the host has
/// there, so that a checkout or a cache that lies in one of them stays visible.
const SCRATCH: [&str; 3] = ["/tmp", "/run", "/var/tmp"];

/// Nothing here is slower than a byte over the emulated bus: large messages, and a cache that trusts the host
/// not to change a file while the nest runs.
const SHARE: &CStr = c"trans=virtio,version=9p2000.L,msize=512000,cache=loose";
/// The writable share is written through: what the command has written is on the host when it has ended.
const WRITABLE_SHARE: &CStr = c"trans=virtio,version=9p2000.L,msize=512000,cache=none";

/// `/proc`, `/sys` and `/dev` of the initramfs.
pub fn kernel_file_systems() -> Result<(), Fault> {
    for (kind, target) in [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")] {
        fs::create_dir_all(target).naming(format!("create {target}"))?;
        mount(kind, target, kind, MountFlags::empty(), None::<&CStr>)
            .naming(format!("mount {target}"))?;
    }
    Ok(())
}

/// Makes the host's root this machine's root, with all that a program expects to find.
pub fn host_root(job: &Job) -> Result<(), Fault> {
    let none = MountFlags::empty();
    fs::create_dir_all("/host").naming("create /host")?;
    mount("host", "/host", "9p", MountFlags::RDONLY, SHARE).naming("mount the host's root")?;

    // The layers' own memory, reached by path only until the root moves.
    fs::create_dir_all("/layers").naming("create /layers")?;
    mount("layers", "/layers", "tmpfs", none, c"size=75%,mode=0755")
        .naming("mount the layers' memory")?;
    for folder in SCRATCH {
        layer(folder)?;
    }

    for folder in ["/proc", "/sys", "/dev"] {
        mount_move(folder, format!("/host{folder}")).naming(format!("move {folder}"))?;
    }
    std::env::set_current_dir("/host").naming("enter the host's root")?;
    mount_move(".", "/").naming("move the host's root")?;
    rustix::process::chroot(".").naming("change root")?;
    std::env::set_current_dir("/").naming("enter /")?;

    for (kind, target, data) in [
        ("devpts", "/dev/pts", c"mode=0620,ptmxmode=0666"),
        ("tmpfs", "/dev/shm", c"mode=1777"),
    ] {
        fs::create_dir_all(target).naming(format!("create {target}"))?;
        mount(kind, target, kind, none, data).naming(format!("mount {target}"))?;
    }
    mount("cgroup2", "/sys/fs/cgroup", "cgroup2", none, None::<&CStr>).naming("mount cgroup2")?;
    for (link, to) in [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ] {
        std::os::unix::fs::symlink(to, format!("/dev/{link}"))
            .naming(format!("link /dev/{link}"))?;
    }
    // Absent when this machine's processor has no SVM; a command that needs it says so better than we can.
    let _ = rustix::fs::chmod("/dev/kvm", rustix::fs::Mode::from_raw_mode(0o666));

    if !job.out.is_empty() {
        let out = OsStr::from_bytes(&job.out);
        mount("out", out, "9p", none, WRITABLE_SHARE).naming(format!("mount {}", out.display()))?;
    }
    Ok(())
}

/// Covers `folder` of the host with a writable layer.
fn layer(folder: &str) -> Result<(), Fault> {
    let below = format!("/host{folder}");
    if !Path::new(&below).is_dir() {
        return Ok(());
    }
    let place = format!(
        "/layers/{}",
        folder.trim_start_matches('/').replace('/', "-")
    );
    for part in ["upper", "work"] {
        fs::create_dir_all(format!("{place}/{part}")).naming(format!("create {place}/{part}"))?;
    }
    // The host's own mode and owner would keep an unprivileged program out when the folder is 0755 there.
    rustix::fs::chmod(
        format!("{place}/upper"),
        rustix::fs::Mode::from_raw_mode(if folder == "/run" { 0o755 } else { 0o1777 }),
    )
    .naming(format!("open {place}/upper"))?;
    let data = CString::new(format!(
        "lowerdir={below},upperdir={place}/upper,workdir={place}/work"
    ))
    .map_err(std::io::Error::from)
    .naming("layer's options")?;
    mount(
        "layer",
        &below,
        "overlay",
        MountFlags::empty(),
        data.as_c_str(),
    )
    .naming(format!("mount a layer over {folder}"))
}

/// Brings the writable share home.
pub fn release(job: &Job) -> Result<(), Fault> {
    rustix::fs::sync();
    if !job.out.is_empty() {
        let out = OsStr::from_bytes(&job.out);
        unmount(out, UnmountFlags::DETACH).naming(format!("unmount {}", out.display()))?;
    }
    Ok(())
}
