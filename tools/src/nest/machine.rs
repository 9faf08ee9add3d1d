//! The QEMU process of one attempt.

use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use nest_init::wire::Port;
use rustix::io::FdFlags;

use super::Options;
use super::boot::Files;
use crate::error::{Error, Naming, Result};
use crate::process;

/// What the console and QEMU may say before the oldest is forgotten.
const TAIL: usize = 4096;

/// What the kernel is told: say only errors, stop rather than hang, and nothing that costs time under emulation.
const COMMAND_LINE: &str = "console=ttyS0 quiet panic=-1 reboot=t mitigations=off nokaslr audit=0 \
    tsc=reliable no_timer_check random.trust_cpu=on cryptomgr.notests rcupdate.rcu_expedited=1";

/// The host's ends of the ports.
pub struct Ports {
    /// Messages.
    pub control: UnixStream,
    /// To the command.
    pub stdin: UnixStream,
    /// From it.
    pub stdout: UnixStream,
    /// From it.
    pub stderr: UnixStream,
}

/// A running emulator; dropping it ends it.
pub struct Machine {
    child: Child,
    /// The ports.
    pub ports: Ports,
    said: Arc<Mutex<Vec<u8>>>,
    listeners: Vec<JoinHandle<()>>,
}

impl Machine {
    /// Starts the emulator.
    pub fn start(files: &Files, options: &Options) -> Result<Self> {
        let mut machine = base(files, options);
        let mut passed = Vec::new();
        let mut port = |name: &str, device: Option<Port>| -> Result<UnixStream> {
            let (ours, theirs) = UnixStream::pair().naming(|| "create a port".into())?;
            let theirs = OwnedFd::from(theirs);
            machine.args([
                "-chardev",
                &format!("socket,id={name},fd={}", theirs.as_raw_fd()),
            ]);
            match device {
                Some(number) => machine.args([
                    "-device",
                    &format!("virtserialport,chardev={name},nr={}", number as u8),
                ]),
                None => machine.args(["-serial", &format!("chardev:{name}")]),
            };
            passed.push(theirs);
            Ok(ours)
        };
        let ports = Ports {
            control: port("control", Some(Port::Control))?,
            stdin: port("stdin", Some(Port::Stdin))?,
            stdout: port("stdout", Some(Port::Stdout))?,
            stderr: port("stderr", Some(Port::Stderr))?,
        };
        let console = port("console", None)?;
        files.qemu.dress(&mut machine);
        machine
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());

        // Only these cross the exec; no other thread starts a program meanwhile.
        let inherit = |flags: FdFlags| -> Result<()> {
            for fd in &passed {
                rustix::io::fcntl_setfd(fd.as_fd(), flags).naming(|| "pass a port on".into())?;
            }
            Ok(())
        };
        inherit(FdFlags::empty())?;
        let started = machine.spawn();
        inherit(FdFlags::CLOEXEC)?;
        let mut child = started.naming(|| format!("start `{}`", process::line(&machine)))?;
        let said = Arc::new(Mutex::new(Vec::new()));
        let mut listeners = vec![listen(console, &said)];
        listeners.extend(child.stderr.take().map(|stream| listen(stream, &said)));
        listeners.extend(child.stdout.take().map(|stream| listen(stream, &said)));
        Ok(Self {
            child,
            ports,
            said,
            listeners,
        })
    }

    /// What the console and QEMU said last, as lines of their own; empty when nothing.
    pub fn tail(&self) -> String {
        let said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let text = String::from_utf8_lossy(&said);
        let text: String = text
            .chars()
            .filter(|c| *c == '\n' || !c.is_control())
            .collect();
        match text.trim() {
            "" => String::new(),
            text => format!("; it said last:\n{text}"),
        }
    }

    /// Why QEMU itself refused to go on, when its ports are closed; `None` when the machine in it just ended.
    pub fn failure(&mut self) -> Option<Error> {
        let status = self.child.wait().ok()?;
        for listener in self.listeners.drain(..) {
            let _ = listener.join();
        }
        (!status.success()).then(|| Error::Command {
            command: "qemu-system-x86_64".into(),
            status: status.to_string(),
            output: self.tail(),
        })
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Nothing in the nest outlives its command, so there is nothing to shut down.
        let _ = self.child.kill();
        let _ = self.child.wait();
        for port in [
            &self.ports.control,
            &self.ports.stdin,
            &self.ports.stdout,
            &self.ports.stderr,
        ] {
            let _ = port.shutdown(std::net::Shutdown::Both);
        }
    }
}

/// The emulator's command line without its ports.
fn base(files: &Files, options: &Options) -> Command {
    // The kernel ends QEMU when we end, in whatever way.
    let mut machine = Command::new("setpriv");
    machine
        .args(["--pdeathsig", "KILL"])
        .arg(&files.qemu.program);
    machine.args([
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-no-reboot",
    ]);
    machine.args([
        "-machine",
        "q35,usb=off,smbus=off,sata=off,pit=on",
        "-accel",
        "tcg",
    ]);
    // One processor: with two, three of seven nests hung. Without ERMS, as QEMU emulates `rep movsb` a byte at a time,
    // and kernels that see the flag copy everything by it.
    machine.args([
        "-smp",
        "1",
        "-cpu",
        "max,+svm,-vmx,-erms,-fsrm",
        "-m",
        &options.memory.to_string(),
    ]);
    machine
        .arg("-kernel")
        .arg(&files.kernel)
        .arg("-initrd")
        .arg(&files.initramfs)
        .args(["-append", COMMAND_LINE]);
    // The first virtio device, hence the 0 in the names of the nodes of its ports.
    machine.args(["-device", "virtio-serial-pci,max_ports=5"]);
    for (id, path, access) in [
        ("host", "/".as_ref(), ",readonly=on"),
        ("out", options.out.as_path(), ""),
    ] {
        let mut share = std::ffi::OsString::from(format!(
            "local,id={id},security_model=none,multidevs=remap{access},path="
        ));
        // A comma in a value is doubled.
        share.push(path.to_string_lossy().replace(',', ",,"));
        machine.arg("-fsdev").arg(share);
        machine.args([
            "-device",
            &format!("virtio-9p-pci,fsdev={id},mount_tag={id}"),
        ]);
    }
    machine
}

/// Keeps the end of what a stream says.
fn listen(mut stream: impl Read + Send + 'static, said: &Arc<Mutex<Vec<u8>>>) -> JoinHandle<()> {
    let said = Arc::clone(said);
    std::thread::spawn(move || {
        let mut block = [0; 1024];
        while let Ok(length @ 1..) = stream.read(&mut block) {
            let mut said = said.lock().unwrap_or_else(PoisonError::into_inner);
            said.extend_from_slice(&block[..length]);
            let surplus = said.len().saturating_sub(TAIL);
            said.drain(..surplus);
        }
    })
}
