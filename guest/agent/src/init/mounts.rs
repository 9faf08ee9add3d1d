//! The guest's file systems.

use std::ffi::CStr;
use std::os::fd::OwnedFd;

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, mount, mount_bind, mount_remount,
};

struct Mount {
    target: &'static CStr,
    kind: &'static CStr,
    flags: MountFlags,
    data: Option<&'static CStr>,
}

const NO: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV);

/// In this order: some lie in others.
const MOUNTS: [Mount; 7] = [
    // hidepid: processes that a reader may not trace are not there for it, init above all; the
    // group that is exempt by default is 0, which every root workload is in, so name another.
    Mount {
        target: c"/proc",
        kind: c"proc",
        flags: NO.union(MountFlags::NOEXEC),
        data: Some(c"hidepid=2,gid=4294967294"),
    },
    Mount {
        target: c"/sys",
        kind: c"sysfs",
        flags: NO.union(MountFlags::NOEXEC).union(MountFlags::RDONLY),
        data: None,
    },
    Mount {
        target: c"/dev",
        kind: c"devtmpfs",
        flags: MountFlags::NOSUID,
        data: Some(c"mode=0755"),
    },
    Mount {
        target: c"/dev/pts",
        kind: c"devpts",
        flags: MountFlags::NOSUID.union(MountFlags::NOEXEC),
        data: Some(c"gid=5,mode=620,ptmxmode=666"),
    },
    Mount {
        target: c"/dev/shm",
        kind: c"tmpfs",
        flags: NO,
        data: Some(c"mode=1777"),
    },
    Mount {
        target: c"/run",
        kind: c"tmpfs",
        flags: NO,
        data: Some(c"mode=0755"),
    },
    Mount {
        target: c"/tmp",
        kind: c"tmpfs",
        flags: NO,
        data: Some(c"mode=1777"),
    },
];

/// Parts of /proc through which user 0 could command the kernel without any capability: run a
/// helper as init would (core_pattern, modprobe), reboot (sysrq-trigger).
const READ_ONLY: [&CStr; 5] = [
    c"/proc/bus",
    c"/proc/fs",
    c"/proc/irq",
    c"/proc/sys",
    c"/proc/sysrq-trigger",
];

/// Mounts everything; what fails is returned in words, and the rest goes on. There is no log yet
/// to write to: its device is in one of these.
pub fn mount_all() -> Vec<String> {
    let mut failures = Vec::new();
    for entry in &MOUNTS {
        let _ = rustix::fs::mkdir(entry.target, Mode::from_raw_mode(0o755));
        match mount(
            entry.kind,
            entry.target,
            entry.kind,
            entry.flags,
            entry.data,
        ) {
            // Busy: mounted already, by the kernel or an earlier init.
            Ok(()) | Err(Errno::BUSY) => {}
            Err(error) => failures.push(format!("cannot mount {:?}: {error}", entry.target)),
        }
    }
    // As docker's seccomp profile does: in a user namespace of its own any workload would have
    // all capabilities over what it makes there, and with them a cgroup tree to write to.
    if let Err(error) = std::fs::write("/proc/sys/user/max_user_namespaces", "0")
        && error.kind() != std::io::ErrorKind::NotFound
    {
        failures.push(format!("cannot forbid user namespaces: {error}"));
    }
    for path in READ_ONLY {
        match read_only(path) {
            // This kernel does not have that part.
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => failures.push(format!("cannot make {path:?} read-only: {error}")),
        }
    }
    failures
}

fn read_only(path: &CStr) -> Result<(), Errno> {
    mount_bind(path, path)?;
    let flags = MountFlags::BIND
        .union(MountFlags::RDONLY)
        .union(NO)
        .union(MountFlags::NOEXEC);
    mount_remount(path, flags, c"")
}

/// The cgroup hierarchy, writable, as a descriptor whose mount lies nowhere in the tree.
///
/// # Errors
/// What the kernel says.
pub fn cgroup_tree() -> Result<OwnedFd, Errno> {
    let context = rustix::mount::fsopen("cgroup2", FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    rustix::mount::fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}

/// Shows the hierarchy at `/sys/fs/cgroup` for workloads to look at, read-only: user 0 without
/// the capability to remount it cannot leave its leaf.
///
/// # Errors
/// What the kernel says.
pub fn show_cgroups() -> Result<(), Errno> {
    let target = c"/sys/fs/cgroup";
    let flags = NO.union(MountFlags::NOEXEC);
    mount(c"cgroup2", target, c"cgroup2", flags, None)?;
    mount_remount(
        target,
        MountFlags::BIND.union(MountFlags::RDONLY).union(flags),
        c"",
    )
}

/// Descriptors 0, 1 and 2, which the kernel leaves closed when there is no console: whatever is
/// opened first would otherwise become some child's stdout.
///
/// # Errors
/// What the kernel says.
pub fn standard_descriptors() -> Result<(), Errno> {
    let flags = rustix::fs::OFlags::RDWR;
    let null = rustix::fs::open(c"/dev/null", flags, Mode::empty())?;
    // `null` may itself be one of the three.
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    if std::os::fd::AsRawFd::as_raw_fd(&null) <= 2 {
        std::mem::forget(null);
    }
    Ok(())
}
