//! One sandbox without a machine: the real agent loop in a process of its own, over unix sockets,
//! with this test as its monitor.
//!
//! The process is this very test binary, started again to run the "test" [`agent_process`] alone:
//! waiting for children, being the reaper of orphans and resource limits belong to a process, so
//! tests that share one would see each other's.
//!
//! With `VMM_LOOPBACK_CGROUP=1`, as root on a kernel with cgroup2, the tree is the real one.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::thread::CapabilitySet;
use vmm_agent::agent::{self, Limits};
use vmm_agent::cgroup::{Cgroup2, Hierarchy};
use vmm_agent::init::identity::Unready;
use vmm_agent::init::mounts;
use vmm_agent::log::Log;
use vmm_agent::platform::Platform;
use vmm_protocol::{
    AgentCounters, ControlToAgent, ControlToHost, Decoder, GenerationId, Life, VERSIONS,
};

use crate::client::Client;
use crate::fake::FakeHierarchy;

/// Nothing in these tests may take longer; a failure then, not a hang.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub const GENERATION: GenerationId = GenerationId {
    counter: 3,
    public_id: 0x1234_5678 << 96,
};

/// What a test may change about its sandbox.
#[derive(Default)]
pub struct Options {
    pub stubborn: bool,
    pub sessions: Option<usize>,
    pub store_bytes: Option<u64>,
}

/// A running agent, its control connection, and a folder with its sockets.
pub struct Sandbox {
    pub folder: tempfile::TempDir,
    process: Child,
    control: Control,
    controls: UnixListener,
}

impl Sandbox {
    pub fn new() -> Self {
        Self::with(Options::default())
    }

    pub fn with(options: Options) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let controls = UnixListener::bind(folder.path().join("control")).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args([
                "--exact",
                "harness::agent_process",
                "--nocapture",
                "--test-threads=1",
            ])
            .env("VMM_LOOPBACK", folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let mut option = |name: &str, value: Option<String>| {
            if let Some(value) = value {
                command.env(name, value);
            }
        };
        option(
            "VMM_LOOPBACK_STUBBORN",
            options.stubborn.then(|| "1".to_owned()),
        );
        option(
            "VMM_LOOPBACK_SESSIONS",
            options.sessions.map(|n| n.to_string()),
        );
        option(
            "VMM_LOOPBACK_STORE",
            options.store_bytes.map(|n| n.to_string()),
        );
        let process = command.spawn().unwrap();
        let mut control = Control::accept(&controls);
        control.give_life(GENERATION);
        Self {
            folder,
            process,
            control,
            controls,
        }
    }

    /// A new session past its hello.
    pub fn connect(&self) -> Client {
        let mut client = Client::new(self.dial());
        client.hello(GENERATION);
        client
    }

    /// A connection on which nothing was said yet.
    pub fn dial(&self) -> UnixStream {
        UnixStream::connect(self.folder.path().join("agent")).unwrap()
    }

    /// The control connection.
    pub fn control(&mut self) -> &mut Control {
        &mut self.control
    }

    /// Cuts the control connection and takes the one that the agent dials next.
    pub fn redial(&mut self) -> &mut Control {
        self.control
            .stream
            .shutdown(std::net::Shutdown::Both)
            .unwrap();
        self.control = Control::accept(&self.controls);
        &mut self.control
    }

    /// Open descriptors of the agent.
    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.process.id()))
            .unwrap()
            .count()
    }

    /// Children of the agent, dead ones that nobody has collected included.
    pub fn children(&self) -> usize {
        let id = self.process.id();
        let tasks = std::fs::read_dir(format!("/proc/{id}/task")).unwrap();
        tasks
            .map(|task| std::fs::read_to_string(task.unwrap().path().join("children")).unwrap())
            .map(|children| children.split_whitespace().count())
            .sum()
    }

    /// How often the agent has gone to sleep, which is how often it was woken.
    pub fn wakeups(&self) -> u64 {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.process.id())).unwrap();
        tasks
            .map(|task| std::fs::read_to_string(task.unwrap().path().join("status")).unwrap())
            .map(|status| number(&status, "voluntary_ctxt_switches"))
            .sum()
    }

    /// Waits until the agent sleeps: nothing more happens by itself.
    pub fn until_asleep(&self) {
        let mut last = self.wakeups();
        loop {
            // Nothing is ever readable here; this only lets time pass.
            readable_within(&self.control.stream, Duration::from_millis(100));
            let now = self.wakeups();
            if now == last {
                return;
            }
            last = now;
        }
    }

    /// A number from the agent's /proc/self/status.
    pub fn status(&self, field: &str) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        number(&text, field)
    }
}

fn number(text: &str, field: &str) -> u64 {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(field))
        .unwrap();
    line.trim_start_matches(':')
        .split_whitespace()
        .next()
        .unwrap()
        .parse()
        .unwrap()
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        self.control.send(&ControlToAgent::PowerOff { grace_ns: 0 });
        // The agent's end closes the connection: no need to ask again and again.
        while self.control.next().is_some() {}
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The monitor's end of a control connection.
pub struct Control {
    stream: UnixStream,
    decoder: Decoder,
    sequence: u64,
}

impl Control {
    fn accept(listener: &UnixListener) -> Self {
        wait_readable(listener, PATIENCE);
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut control = Self {
            stream,
            decoder: Decoder::new(),
            sequence: 0,
        };
        let hello = control.next();
        assert!(
            matches!(hello, Some(ControlToHost::Hello { versions, .. }) if versions == VERSIONS),
            "{hello:?}"
        );
        control
    }

    /// Tells the life and waits for ready.
    pub fn give_life(&mut self, generation: GenerationId) {
        let mut life = Life::new(generation);
        life.hostname = "loopback".to_owned();
        life.restore_count = generation.counter - 1;
        self.send(&ControlToAgent::Life(Box::new(life)));
        assert_eq!(self.next(), Some(ControlToHost::Ready(generation)));
    }

    /// Asks for the counters and waits for the answer.
    pub fn counters(&mut self, number: u64) -> AgentCounters {
        self.send(&ControlToAgent::AskCounters(number));
        match self.next() {
            Some(ControlToHost::Counters {
                number: answered,
                counters,
            }) if answered == number => counters,
            other => panic!("not counters but {other:?}"),
        }
    }

    /// Waits for the question whether the life is still the same.
    pub fn asked(&mut self) -> u64 {
        match self.next() {
            Some(ControlToHost::Confirm(token)) => token,
            other => panic!("not asked but {other:?}"),
        }
    }

    /// Waits for that question and says yes.
    pub fn confirm(&mut self, generation: GenerationId) {
        let token = self.asked();
        self.send(&ControlToAgent::Confirmed { token, generation });
    }

    pub fn send(&mut self, message: &ControlToAgent) {
        use std::io::Write;
        let mut bytes = Vec::new();
        self.sequence += 1;
        message.encode(self.sequence, &mut bytes).unwrap();
        // The agent may be gone already.
        let _ = self.stream.write_all(&bytes);
    }

    /// The next message, or `None` at the end.
    pub fn next(&mut self) -> Option<ControlToHost> {
        use std::io::Read;
        loop {
            if let Some(frame) = self.decoder.next().unwrap() {
                return Some(ControlToHost::decode(&frame).unwrap());
            }
            match self.stream.read(self.decoder.space()) {
                Ok(0) => return None,
                Ok(count) => self.decoder.filled(count),
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("control connection: {error}"),
            }
        }
    }
}

/// Keeps tests that load the processors and tests that measure apart, until the file is dropped: threads of one process
/// or processes of their own, they lock their program.
pub fn alone() -> std::fs::File {
    use rustix::fs::{FlockOperation, flock};
    let program = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
    flock(&program, FlockOperation::LockExclusive).unwrap();
    program
}

/// Waits until a descriptor is readable; panics when it takes too long.
pub fn wait_readable(fd: impl AsFd, patience: Duration) {
    assert!(
        readable_within(fd, patience),
        "nothing came within {patience:?}"
    );
}

/// Whether a descriptor becomes readable within a time.
pub fn readable_within(fd: impl AsFd, time: Duration) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let until = Instant::now() + time;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec {
            tv_sec: left.as_secs().try_into().unwrap(),
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)) {
            Ok(ready) => return ready > 0,
            Err(Errno::INTR) => {}
            Err(error) => panic!("poll: {error}"),
        }
    }
}

struct Loopback<H> {
    folder: PathBuf,
    hierarchy: H,
}

fn socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

impl<H: Hierarchy> Platform for Loopback<H> {
    type Hierarchy = H;

    fn hierarchy(&mut self) -> &mut H {
        &mut self.hierarchy
    }

    fn listen(&mut self) -> Result<OwnedFd, Errno> {
        let socket = socket()?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(self.folder.join("agent"))?)?;
        rustix::net::listen(&socket, 64)?;
        Ok(socket)
    }

    fn accept(&mut self, listener: &OwnedFd) -> Result<Option<OwnedFd>, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::accept_with(listener, flags).map(Some)
    }

    fn dial(&mut self) -> Result<OwnedFd, Errno> {
        let socket = socket()?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(self.folder.join("control"))?)?;
        Ok(socket)
    }

    fn apply(&mut self, life: &Life) -> Result<(), Unready> {
        match life.hostname.as_str() {
            "unready" => Err(Unready {
                stage: vmm_protocol::ReadyStage::Clock,
                what: "clock_settime",
                errno: Errno::PERM,
            }),
            "panic" => panic!("as a test wants it"),
            _ => Ok(()),
        }
    }

    fn relax(&mut self, _: bool) {}

    fn confine(&self) -> Option<CapabilitySet> {
        None
    }
}

/// No test: what [`Sandbox`] runs in a process of its own.
#[test]
fn agent_process() {
    let Some(folder) = std::env::var_os("VMM_LOOPBACK") else {
        return;
    };
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).unwrap();
    agent::report_panics(Log::none, end);
    let number = |name: &str| -> Option<u64> { std::env::var(name).ok()?.parse().ok() };
    let mut limits = Limits::for_memory(1 << 30);
    if let Some(sessions) = number("VMM_LOOPBACK_SESSIONS") {
        limits.sessions = usize::try_from(sessions).unwrap();
    }
    if let Some(bytes) = number("VMM_LOOPBACK_STORE") {
        limits.store_bytes = bytes;
    }
    let folder = Path::new(OsStr::new(&folder)).to_owned();
    let mut log = Log::to(rustix::io::fcntl_dupfd_cloexec(std::io::stderr(), 3).unwrap());
    if std::env::var_os("VMM_LOOPBACK_CGROUP").is_some() {
        let hierarchy = mounts::cgroup_tree().and_then(Cgroup2::new).unwrap();
        agent::run(Loopback { folder, hierarchy }, limits, &mut log).unwrap();
    } else {
        let stubborn = number("VMM_LOOPBACK_STUBBORN").is_some();
        let hierarchy = FakeHierarchy {
            stubborn,
            ..FakeHierarchy::default()
        };
        agent::run(Loopback { folder, hierarchy }, limits, &mut log).unwrap();
    }
}

/// Instead of a power-off.
fn end() {
    std::process::exit(1);
}
