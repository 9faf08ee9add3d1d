//! Starting a workload: a fork that lands in its cgroup leaf, and the child's way to `execve`.
// clone3 has no safe wrapper, and what runs in its child must be picked by hand: the child is a
// copy of a process that may have other threads, so nothing there may allocate or lock.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use rustix::io::Errno;
use rustix::process::{Pid, RawPid};
use rustix::thread::{CapabilitySet, CapabilitySets, Gid, Uid};
use vmm_protocol::StartStage;

use super::last_errno;

/// A start that failed: nothing of the workload ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("start failed at {stage}: {errno}")]
pub struct Failure {
    /// Where.
    pub stage: StartStage,
    /// Why.
    pub errno: Errno,
}

impl Failure {
    /// For `map_err`: a failure at `stage`.
    pub(crate) fn at(stage: StartStage) -> impl Fn(Errno) -> Self {
        move |errno| Self { stage, errno }
    }
}

/// Who the workload runs as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// User id.
    pub uid: Uid,
    /// Group id.
    pub gid: Gid,
    /// Supplementary groups, and no others.
    pub groups: Vec<Gid>,
}

/// The workload's end of its descriptors 0, 1 and 2.
#[derive(Debug)]
pub enum ChildStdio {
    /// Three pipe ends.
    Pipes {
        /// Read end for 0.
        stdin: OwnedFd,
        /// Write end for 1.
        stdout: OwnedFd,
        /// Write end for 2.
        stderr: OwnedFd,
    },
    /// The terminal end of a PTY, for all three; becomes the controlling terminal.
    Terminal(OwnedFd),
}

/// Everything the child needs, made before the fork.
#[derive(Debug)]
pub struct Plan {
    /// Paths to try in order, as a search of `PATH` yields them.
    pub programs: Vec<CString>,
    /// Arguments, the program's name first.
    pub argv: Vec<CString>,
    /// The whole environment.
    pub env: Vec<CString>,
    /// Where to run, entered as `user`.
    pub directory: CString,
    /// Whom to become; `None` stays what the agent is.
    pub user: Option<User>,
    /// The capabilities to keep at most, with new privileges forbidden; `None` keeps all, which
    /// is for a loopback that has none to drop.
    pub confine: Option<CapabilitySet>,
    /// Descriptors 0, 1 and 2.
    pub stdio: ChildStdio,
}

/// A process that is on its way to its program.
#[derive(Debug)]
pub struct Child {
    /// Its process id; not reused before the agent has waited for it.
    pub pid: Pid,
    /// Names it for signals.
    pub pidfd: OwnedFd,
    /// Yields a [`Failure`], or ends without one once the program runs. Non-blocking.
    pub report: OwnedFd,
}

/// linux/sched.h, in the width of `clone_args`.
const CLONE_PIDFD: u64 = 0x1000;
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Docker's default set less `NET_BIND_SERVICE`: ports below 1024 are the agent's.
pub fn default_capabilities() -> CapabilitySet {
    CapabilitySet::CHOWN
        | CapabilitySet::DAC_OVERRIDE
        | CapabilitySet::FSETID
        | CapabilitySet::FOWNER
        | CapabilitySet::MKNOD
        | CapabilitySet::NET_RAW
        | CapabilitySet::SETGID
        | CapabilitySet::SETUID
        | CapabilitySet::SETFCAP
        | CapabilitySet::SETPCAP
        | CapabilitySet::SYS_CHROOT
        | CapabilitySet::KILL
        | CapabilitySet::AUDIT_WRITE
}

/// Forks a child that becomes the program of `plan`, born in the cgroup `leaf` if there is one.
///
/// # Errors
/// [`StartStage::Pipes`] or [`StartStage::Fork`]; later stages arrive through [`Child::report`].
pub fn spawn(plan: &Plan, leaf: Option<BorrowedFd<'_>>) -> Result<Child, Failure> {
    let (report, report_in) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map_err(Failure::at(StartStage::Pipes))?;
    rustix::io::ioctl_fionbio(&report, true).map_err(Failure::at(StartStage::Pipes))?;
    let pointers = Pointers::of(plan);

    let mut pidfd: RawFd = -1;
    // SAFETY: all fields of clone_args are integers; zero means unset.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = CLONE_PIDFD;
    if let Some(leaf) = leaf {
        args.flags |= CLONE_INTO_CGROUP;
        // A descriptor in use is never negative.
        args.cgroup = leaf.as_raw_fd().unsigned_abs().into();
    }
    args.pidfd = &raw mut pidfd as u64;
    args.exit_signal = libc::SIGCHLD.unsigned_abs().into();

    // SAFETY: the arguments are a valid clone_args of the size given; without CLONE_VM the child
    // gets memory of its own, so that it cannot disturb this process.
    let pid = unsafe {
        libc::syscall(
            libc::SYS_clone3,
            &raw mut args,
            size_of::<libc::clone_args>(),
        )
    };
    if pid == 0 {
        let failure = match run_child(plan, &pointers) {
            Ok(never) => match never {},
            Err(failure) => failure,
        };
        // Best effort: a parent that is gone needs no report.
        let _ = rustix::io::write(&report_in, &failure.to_bytes());
        // SAFETY: ends this process without running anything of the parent's.
        unsafe { libc::_exit(127) }
    }
    let pid = match RawPid::try_from(pid)
        .ok()
        .filter(|pid| *pid > 0)
        .and_then(Pid::from_raw)
    {
        Some(pid) => pid,
        None => {
            return Err(Failure {
                stage: StartStage::Fork,
                errno: last_errno(),
            });
        }
    };
    // SAFETY: the call succeeded with CLONE_PIDFD, so this is a new descriptor, ours alone.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    Ok(Child { pid, pidfd, report })
}

/// Reads what the child had to say.
///
/// # Errors
/// The failure that it reported.
pub fn read_report(report: BorrowedFd<'_>) -> Result<Report, Failure> {
    let mut bytes = [0u8; 8];
    match rustix::io::read(report, &mut bytes) {
        Ok(0) => Ok(Report::Running),
        Ok(8) => Err(Failure::from_bytes(bytes)),
        Err(Errno::AGAIN | Errno::INTR) => Ok(Report::Pending),
        // A pipe moves eight bytes whole or not at all.
        Ok(_) => Err(Failure {
            stage: StartStage::Execute,
            errno: Errno::IO,
        }),
        Err(errno) => Err(Failure {
            stage: StartStage::Execute,
            errno,
        }),
    }
}

/// What is known of a start that has not failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// Nothing yet.
    Pending,
    /// The program runs.
    Running,
}

impl Failure {
    fn to_bytes(self) -> [u8; 8] {
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&(self.stage as u32).to_ne_bytes());
        bytes[4..].copy_from_slice(&self.errno.raw_os_error().to_ne_bytes());
        bytes
    }

    fn from_bytes(bytes: [u8; 8]) -> Self {
        let [a, b, c, d, e, f, g, h] = bytes;
        Self {
            stage: stage_of(u32::from_ne_bytes([a, b, c, d])),
            errno: Errno::from_raw_os_error(i32::from_ne_bytes([e, f, g, h])),
        }
    }
}

fn stage_of(number: u32) -> StartStage {
    let known = StartStage::ALL
        .iter()
        .find(|stage| u32::from(**stage as u8) == number);
    known.copied().unwrap_or(StartStage::Execute)
}

/// The null-terminated arrays that `execve` takes.
struct Pointers {
    argv: Vec<*const libc::c_char>,
    env: Vec<*const libc::c_char>,
}

impl Pointers {
    fn of(plan: &Plan) -> Self {
        let array = |strings: &[CString]| {
            strings
                .iter()
                .map(|string| string.as_ptr())
                .chain([ptr::null()])
                .collect()
        };
        Self {
            argv: array(&plan.argv),
            env: array(&plan.env),
        }
    }
}

enum Never {}

/// The child from the fork to its program. Only system calls on what the parent prepared: no
/// allocation, no lock, no destructor.
fn run_child(plan: &Plan, pointers: &Pointers) -> Result<Never, Failure> {
    reset_signals();
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    // The agent is exempt from the OOM killer and its children inherit that; fails harmlessly
    // where the agent is not exempt.
    if let Ok(file) = rustix::fs::open(
        c"/proc/self/oom_score_adj",
        rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    ) {
        let _ = rustix::io::write(file, b"0");
    }

    rustix::process::setsid().map_err(Failure::at(StartStage::Session))?;
    let (stdin, stdout, stderr) = match &plan.stdio {
        ChildStdio::Pipes {
            stdin,
            stdout,
            stderr,
        } => (stdin, stdout, stderr),
        ChildStdio::Terminal(terminal) => (terminal, terminal, terminal),
    };
    rustix::stdio::dup2_stdin(stdin).map_err(Failure::at(StartStage::Pipes))?;
    rustix::stdio::dup2_stdout(stdout).map_err(Failure::at(StartStage::Pipes))?;
    rustix::stdio::dup2_stderr(stderr).map_err(Failure::at(StartStage::Pipes))?;
    close_others().map_err(Failure::at(StartStage::Pipes))?;
    if let ChildStdio::Terminal(terminal) = &plan.stdio {
        rustix::process::ioctl_tiocsctty(terminal.as_fd())
            .map_err(Failure::at(StartStage::Session))?;
    }

    if let Some(keep) = plan.confine {
        for capability in CapabilitySet::all().difference(keep).iter() {
            match rustix::thread::remove_capability_from_bounding_set(capability) {
                // A capability that this kernel does not know is not there to drop.
                Ok(()) | Err(Errno::INVAL) => {}
                Err(errno) => {
                    return Err(Failure {
                        stage: StartStage::Isolate,
                        errno,
                    });
                }
            }
        }
    }
    if let Some(user) = &plan.user {
        become_user(user).map_err(Failure::at(StartStage::User))?;
    }
    if let Some(keep) = plan.confine {
        // Leaving user 0 has cleared the sets already; nobody gets them back by this.
        let keep = match rustix::thread::capabilities(None) {
            Ok(now) => now.permitted & keep,
            Err(errno) => {
                return Err(Failure {
                    stage: StartStage::Isolate,
                    errno,
                });
            }
        };
        let sets = CapabilitySets {
            effective: keep,
            permitted: keep,
            inheritable: CapabilitySet::empty(),
        };
        rustix::thread::set_capabilities(None, sets).map_err(Failure::at(StartStage::Isolate))?;
        rustix::thread::set_no_new_privs(true).map_err(Failure::at(StartStage::Isolate))?;
    }
    // After the user is set, so that a directory which that user cannot search is refused.
    rustix::process::chdir(plan.directory.as_c_str())
        .map_err(Failure::at(StartStage::Directory))?;
    Err(Failure {
        stage: StartStage::Execute,
        errno: execute(&plan.programs, pointers),
    })
}

fn become_user(user: &User) -> Result<(), Errno> {
    rustix::thread::set_thread_groups(&user.groups)?;
    rustix::thread::set_thread_res_gid(user.gid, user.gid, user.gid)?;
    rustix::thread::set_thread_res_uid(user.uid, user.uid, user.uid)
}

/// Ignored signals and the blocked mask outlive `execve`, and the Rust runtime ignores SIGPIPE.
/// The agent's own handler must not run in the child, whose memory it would not find as it is.
fn reset_signals() {
    // `struct kernel_sigaction`: handler, flags, restorer, mask; all zero is the default action.
    let default = [0u64; 4];
    // By number and past the C library, which keeps two real-time signals to itself.
    for number in 1..=64 {
        // SAFETY: reads a kernel_sigaction with a mask of eight bytes; this process is about to
        // execute another program and needs no handler.
        unsafe {
            let none = ptr::null_mut::<u64>();
            libc::syscall(
                libc::SYS_rt_sigaction,
                number,
                default.as_ptr(),
                none,
                8usize,
            );
        }
    }
    // SAFETY: reads an empty set of eight bytes.
    unsafe {
        let none = ptr::null_mut::<u64>();
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            default.as_ptr(),
            none,
            8usize,
        );
    }
}

/// Everything above 2 closes on exec, whatever opened it and however.
fn close_others() -> Result<(), Errno> {
    // SAFETY: marks descriptors close-on-exec; none is closed under a borrow.
    let result = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            3u32,
            u32::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(last_errno())
    }
}

/// Tries the programs in order, as execvp does; returns only with the reason why none ran.
fn execute(programs: &[CString], pointers: &Pointers) -> Errno {
    let mut reason = Errno::NOENT;
    for program in programs {
        match execve(program, pointers) {
            Errno::NOENT | Errno::NOTDIR => {}
            // Another directory of the path may have one that may be executed.
            Errno::ACCESS => reason = Errno::ACCESS,
            errno => return errno,
        }
    }
    reason
}

fn execve(program: &CStr, pointers: &Pointers) -> Errno {
    // SAFETY: the arrays are null-terminated and point to strings that outlive the call.
    unsafe {
        libc::execve(
            program.as_ptr(),
            pointers.argv.as_ptr(),
            pointers.env.as_ptr(),
        )
    };
    last_errno()
}
