//! Starting a workload: a child that is born in its cgroup leaf, and its way to `execve`.
//!
//! The child runs beside the agent in the agent's own memory, on a stack of its own, until it has become its program:
//! copying the memory for a few system calls would cost more than they do. Nobody waits for it: a workload that stops
//! everything it may stop can stop it half-way, and the agent still answers.
// clone3 has no safe wrapper, and what runs in its child must be picked by hand. It shares the agent's memory, and with
// it the thread-local storage of the thread that made it: it may not allocate, lock, or call anything that sets errno.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::OnceLock;

use rustix::io::Errno;
use rustix::process::{Pid, RawPid};
use rustix::thread::{CapabilitySet, CapabilitySets, Gid, Uid};
use vmm_protocol::StartStage;

use super::raw;

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
    /// How far it has come.
    pub report: Report,
}

/// linux/sched.h, in the width of `clone_args`.
const CLONE_VM: u64 = 0x100;
const CLONE_PIDFD: u64 = 0x1000;
const CLONE_CLEAR_SIGHAND: u64 = 0x1_0000_0000;
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// The child's stack: its system calls need a tenth of it.
const STACK: usize = 32 << 10;

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

/// Starts a child that becomes the program of `plan`, born in the cgroup `leaf` if there is one.
///
/// # Errors
/// [`StartStage::Pipes`] or [`StartStage::Fork`]; later stages arrive through [`Child::report`].
pub fn spawn(plan: Plan, leaf: Option<BorrowedFd<'_>>) -> Result<Child, Failure> {
    let (report, report_in) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map_err(Failure::at(StartStage::Pipes))?;
    rustix::io::ioctl_fionbio(&report, true).map_err(Failure::at(StartStage::Pipes))?;
    let mut task = Task::new(plan, report_in);

    let mut pidfd: RawFd = -1;
    // SAFETY: all fields of clone_args are integers; zero means unset.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = CLONE_VM | CLONE_PIDFD | CLONE_CLEAR_SIGHAND;
    if let Some(leaf) = leaf {
        args.flags |= CLONE_INTO_CGROUP;
        // A descriptor in use is never negative.
        args.cgroup = leaf.as_raw_fd().unsigned_abs().into();
    }
    args.pidfd = &raw mut pidfd as u64;
    args.exit_signal = libc::SIGCHLD.unsigned_abs().into();
    args.stack = task.stack.as_mut_ptr() as u64;
    args.stack_size = (task.stack.capacity() * size_of::<u128>()) as u64;

    let pid_or_error: i64;
    // SAFETY: clone3 gets a valid clone_args of the size given. The child starts behind `syscall` on its own stack,
    // which is aligned to 16 bytes at its top, and calls a function that never returns: nothing of this frame runs
    // twice. `task` and the stack stay until the child has left this memory (see `Report`). Registers that the kernel
    // does not keep (rax, rcx, r11) are named as lost.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            // The child: no frame above it, and its one argument.
            "xor ebp, ebp",
            "mov rdi, rdx",
            "call r8",
            "ud2",
            "2:",
            inout("rax") libc::SYS_clone3 => pid_or_error,
            in("rdi") &raw mut args,
            in("rsi") size_of::<libc::clone_args>(),
            in("rdx") &raw const *task,
            in("r8") child as extern "C" fn(&Task) -> !,
            out("rcx") _,
            out("r11") _,
        );
    }
    let pid = raw::checked(pid_or_error)
        .and_then(|pid| RawPid::try_from(pid).map_err(|_| Errno::INVAL))
        .and_then(|pid| Pid::from_raw(pid).ok_or(Errno::INVAL))
        .map_err(Failure::at(StartStage::Fork))?;
    // SAFETY: the call succeeded with CLONE_PIDFD, so this is a new descriptor, ours alone.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    // The child has copies of its own by the same numbers.
    task.owned = None;
    let report = Report {
        pipe: report,
        failure: None,
        task: Some(task),
    };
    Ok(Child { pid, pidfd, report })
}

/// Tells what became of a start, and keeps the memory that the child stands on until it has left it.
#[derive(Debug)]
pub struct Report {
    pipe: OwnedFd,
    failure: Option<Failure>,
    /// `None` once the child has left: its end of the pipe is closed by `execve` and by its death, both of which leave
    /// the memory first.
    task: Option<Box<Task>>,
}

impl AsFd for Report {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }
}

impl Report {
    /// Reads what the child had to say, if the time has come. Does not wait.
    ///
    /// # Errors
    /// The failure that it reported.
    pub fn read(&mut self) -> Result<Progress, Failure> {
        loop {
            let mut bytes = [0u8; 8];
            match rustix::io::read(&self.pipe, &mut bytes) {
                Ok(0) => {
                    self.task = None;
                    return self.failure.map_or(Ok(Progress::Running), Err);
                }
                // Its end follows at once, and only then has it left.
                Ok(8) => self.failure = Some(Failure::from_bytes(bytes)),
                // A pipe moves eight bytes whole or not at all.
                Ok(_) => self.failure = Some(Failure::at(StartStage::Execute)(Errno::IO)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(Progress::Pending),
                Err(errno) => return Err(Failure::at(StartStage::Execute)(errno)),
            }
        }
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        let _ = self.read();
        // Someone may still stand on it, though the agent has given up on them: better lost than used twice.
        std::mem::forget(self.task.take());
    }
}

/// What is known of a start that has not failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
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

/// What the child finds in the memory that it shares: all that it needs, made before it is.
#[derive(Debug)]
struct Task {
    programs: Vec<CString>,
    argv: Strings,
    env: Strings,
    directory: CString,
    user: Option<User>,
    confine: Option<CapabilitySet>,
    stdio: [RawFd; 3],
    terminal: bool,
    report: RawFd,
    ignored: &'static [i32],
    /// The agent's copies of the descriptors, closed as soon as the child has its own.
    owned: Option<(ChildStdio, OwnedFd)>,
    /// Never filled, which would touch all of it; u128 for the alignment.
    stack: Vec<u128>,
}

impl Task {
    fn new(plan: Plan, report: OwnedFd) -> Box<Self> {
        let (stdio, terminal) = match &plan.stdio {
            ChildStdio::Pipes {
                stdin,
                stdout,
                stderr,
            } => ([stdin, stdout, stderr], false),
            ChildStdio::Terminal(terminal) => ([terminal, terminal, terminal], true),
        };
        Box::new(Self {
            programs: plan.programs,
            argv: Strings::new(plan.argv),
            env: Strings::new(plan.env),
            directory: plan.directory,
            user: plan.user,
            confine: plan.confine,
            stdio: stdio.map(AsRawFd::as_raw_fd),
            terminal,
            report: report.as_raw_fd(),
            ignored: ignored_signals(),
            owned: Some((plan.stdio, report)),
            stack: Vec::with_capacity(STACK / size_of::<u128>()),
        })
    }
}

/// Strings with the null-terminated array of them that `execve` takes.
#[derive(Debug)]
struct Strings {
    pointers: Vec<*const u8>,
    _owned: Vec<CString>,
}

impl Strings {
    fn new(strings: Vec<CString>) -> Self {
        // What a CString points to stays where it is when the CString moves.
        let pointers = strings.iter().map(|string| string.as_ptr().cast());
        Self {
            pointers: pointers.chain([ptr::null()]).collect(),
            _owned: strings,
        }
    }
}

enum Never {}

/// The child's first and last function.
extern "C" fn child(task: &Task) -> ! {
    let failure = match run_child(task) {
        Ok(never) => match never {},
        Err(failure) => failure,
    };
    // SAFETY: open in this process, whose descriptors nobody else closes.
    let report = unsafe { BorrowedFd::borrow_raw(task.report) };
    // Best effort: a parent that is gone needs no report.
    let _ = rustix::io::write(report, &failure.to_bytes());
    raw::exit(127)
}

/// The child from its birth to its program. Only system calls on what the parent prepared: no allocation, no lock, no
/// destructor but those that close.
fn run_child(task: &Task) -> Result<Never, Failure> {
    reset_signals(task.ignored);
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    // The agent is exempt from the OOM killer and its children inherit that; fails harmlessly where the agent is not
    // exempt. While memory is shared this is written for everyone who shares it, but never for process 1.
    if let Ok(file) = rustix::fs::open(
        c"/proc/self/oom_score_adj",
        rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    ) {
        let _ = rustix::io::write(file, b"0");
    }

    rustix::process::setsid().map_err(Failure::at(StartStage::Session))?;
    // SAFETY: open in this process, whose descriptors nobody else closes.
    let [stdin, stdout, stderr] = task.stdio.map(|fd| unsafe { BorrowedFd::borrow_raw(fd) });
    rustix::stdio::dup2_stdin(stdin).map_err(Failure::at(StartStage::Pipes))?;
    rustix::stdio::dup2_stdout(stdout).map_err(Failure::at(StartStage::Pipes))?;
    rustix::stdio::dup2_stderr(stderr).map_err(Failure::at(StartStage::Pipes))?;
    close_others().map_err(Failure::at(StartStage::Pipes))?;
    if task.terminal {
        rustix::process::ioctl_tiocsctty(stdin).map_err(Failure::at(StartStage::Session))?;
    }

    if let Some(keep) = task.confine {
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
    if let Some(user) = &task.user {
        become_user(user).map_err(Failure::at(StartStage::User))?;
    }
    if let Some(keep) = task.confine {
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
    rustix::process::chdir(task.directory.as_c_str())
        .map_err(Failure::at(StartStage::Directory))?;
    Err(Failure {
        stage: StartStage::Execute,
        errno: execute(task),
    })
}

fn become_user(user: &User) -> Result<(), Errno> {
    rustix::thread::set_thread_groups(&user.groups)?;
    rustix::thread::set_thread_res_gid(user.gid, user.gid, user.gid)?;
    rustix::thread::set_thread_res_uid(user.uid, user.uid, user.uid)
}

/// What this process ignores, which outlives `execve`: SIGPIPE, by the Rust runtime, and what it was started with. The
/// agent itself changes none of it later.
fn ignored_signals() -> &'static [i32] {
    static IGNORED: OnceLock<Vec<i32>> = OnceLock::new();
    IGNORED.get_or_init(|| {
        // By number and past the C library, which keeps two real-time signals to itself.
        let ignored = |number: &i32| raw::is_ignored(*number);
        (1..=64).filter(ignored).collect()
    })
}

/// Ignored signals and the blocked mask outlive `execve`. The agent's handlers were reset when the child was made.
fn reset_signals(ignored: &[i32]) {
    for number in ignored {
        raw::reset_signal(*number);
    }
    raw::unblock_signals();
}

/// Everything above 2 closes on exec, whatever opened it and however.
fn close_others() -> Result<(), Errno> {
    raw::close_on_exec_from(3)
}

/// Tries the programs in order, as execvp does; returns only with the reason why none ran.
fn execute(task: &Task) -> Errno {
    let mut reason = Errno::NOENT;
    for program in &task.programs {
        let (argv, env) = (&task.argv.pointers, &task.env.pointers);
        // SAFETY: the arrays are null-terminated and point to strings that outlive the call.
        let errno = unsafe { raw::execve(program, argv.as_ptr(), env.as_ptr()) };
        match errno {
            Errno::NOENT | Errno::NOTDIR => {}
            // Another directory of the path may have one that may be executed.
            Errno::ACCESS => reason = Errno::ACCESS,
            errno => return errno,
        }
    }
    reason
}
