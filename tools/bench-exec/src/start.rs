//! A fresh machine to the first byte of its first workload, `vmm` and a peer in turn.
//!
//! ```text
//!   A   vmm run -- echo x      ──────────────────────────────────────────> its stdout
//!   B   the peer's monitor; its guest dials out ──> this program tells it its life, hears `ready`,
//!       connects, opens a session, runs `echo x` ────────────────────────> the session's first output
//! ```
//!
//! Both start the same kernel file with the same command line, the same initramfs and the same agent in it, and end
//! when this program holds the byte. Readiness comes by events on both sides.
//!
//! The kernel takes a machine whose monitor was killed apart behind its back, for a tenth of a second of whoever comes
//! next: each start waits until the last machine is gone for good.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};
use serde_json::json;
use vmm_client::{Event, Session};
use vmm_protocol::control::{HostControl, HostEvent};
use vmm_protocol::{AGENT_PORT, CONTROL_PORT, ExecRequest, GenerationId, Life};

use crate::Result;
use crate::sandbox::{DEADLINE, handshake};

/// What both run, and what they say then.
const ARGV: [&str; 2] = ["echo", "x"];
const SAID: &[u8] = b"x\n";
/// Whose agent the peer's guest has: any life will do.
const LIFE: GenerationId = GenerationId {
    counter: 1,
    public_id: 1,
};

/// What to measure, from `cargo xtask bench start`.
#[derive(Deserialize)]
struct Plan {
    vmm: PathBuf,
    kernel: PathBuf,
    /// Without the agent, which `vmm` brings.
    initramfs: PathBuf,
    /// With the agent.
    peer_initramfs: PathBuf,
    peer: Option<PathBuf>,
    memory_mib: u32,
    rounds: u32,
    #[serde(skip, default = "Settled::now")]
    settled: Settled,
}

/// A value a round, in milliseconds.
#[derive(Default, Serialize)]
struct Samples {
    cmdline: String,
    vmm_ms: Vec<f64>,
    peer_ms: Vec<f64>,
    /// Of the peer's: until its agent was ready.
    peer_ready_ms: Vec<f64>,
}

/// Measures by the plan and prints the samples. Whatever fails ends it: there is no sample to skip.
pub fn measure(plan: &Path) -> Result<()> {
    let plan: Plan = serde_json::from_slice(&std::fs::read(plan)?)?;
    let mut samples = Samples {
        // The peer's guest gets what ours has, and the first runs of both warm the caches.
        cmdline: plan.cmdline()?,
        ..Samples::default()
    };
    let peer = match &plan.peer {
        Some(program) => Some(Peer::new(program, &plan, &samples.cmdline)?),
        None => None,
    };
    if let Some(peer) = &peer {
        peer.run()?;
    }
    for round in 0..plan.rounds {
        let theirs = |samples: &mut Samples| -> Result<()> {
            if let Some(peer) = &peer {
                let (ready, first) = peer.run()?;
                samples.peer_ready_ms.push(ms(ready));
                samples.peer_ms.push(ms(first));
            }
            Ok(())
        };
        // Neither is always the one that runs behind the other.
        if round % 2 == 1 {
            theirs(&mut samples)?;
        }
        samples.vmm_ms.push(ms(plan.vmm()?));
        if round % 2 == 0 {
            theirs(&mut samples)?;
        }
    }
    println!("{}", serde_json::to_string(&samples)?);
    Ok(())
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

impl Plan {
    /// `vmm run` of a command, and its spawn.
    fn run(&self, argv: &[&str]) -> Result<(Ended, Instant)> {
        let mut command = Command::new(&self.vmm);
        command.args(["run", "--memory", &format!("{}M", self.memory_mib)]);
        command.arg("--kernel").arg(&self.kernel);
        command.arg("--initramfs").arg(&self.initramfs);
        command.arg("--").args(argv);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        self.settled.wait()?;
        let spawned = Instant::now();
        Ok((Ended(command.spawn()?), spawned))
    }

    /// The command line of a guest of ours.
    fn cmdline(&self) -> Result<String> {
        let (vmm, _) = self.run(&["cat", "/proc/cmdline"])?;
        let (text, _) = vmm.output()?;
        Ok(String::from_utf8(text)?.trim().to_owned())
    }

    /// From the spawn to the first byte.
    fn vmm(&self) -> Result<Duration> {
        let (vmm, spawned) = self.run(&ARGV)?;
        let (text, first) = vmm.output()?;
        if text != SAID {
            return Err(format!("vmm run of {ARGV:?} said {text:?}").into());
        }
        Ok(first - spawned)
    }
}

/// How many machines the kernel had before the first of ours. Each holds on to its module until it is gone.
#[derive(Clone, Copy)]
struct Settled {
    machines: u64,
}

impl Settled {
    fn now() -> Self {
        let modules = ["kvm_amd", "kvm_intel"];
        let count = modules.iter().filter_map(|module| {
            let path = format!("/sys/module/{module}/refcnt");
            std::fs::read_to_string(path)
                .ok()?
                .trim()
                .parse::<u64>()
                .ok()
        });
        Self {
            machines: count.sum(),
        }
    }

    /// The kernel sends no event for this; nothing is timed meanwhile.
    fn wait(self) -> Result<()> {
        let began = Instant::now();
        while Self::now().machines > self.machines {
            if began.elapsed() > DEADLINE {
                return Err(format!("the last machine is still there after {DEADLINE:?}").into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

/// A child that does not outlive its measurement.
struct Ended(Child);

impl Ended {
    /// Its stdout, and when the first of it came. It must end well.
    fn output(mut self) -> Result<(Vec<u8>, Instant)> {
        let mut stdout = self.0.stdout.take().ok_or("no stdout")?;
        let mut text = vec![0; 4096];
        wait_readable(&stdout)?;
        let count = stdout.read(&mut text)?;
        let first = Instant::now();
        text.truncate(count);
        stdout.read_to_end(&mut text)?;
        let status = self.0.wait()?;
        match status.success() {
            true => Ok((text, first)),
            false => Err(format!("vmm run left with {status}").into()),
        }
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The peer, and what it is started with.
struct Peer {
    program: PathBuf,
    settled: Settled,
    folder: tempfile::TempDir,
}

impl Peer {
    fn new(program: &Path, plan: &Plan, cmdline: &str) -> Result<Self> {
        let peer = Self {
            program: program.into(),
            settled: plan.settled,
            // Below /tmp for its length: a socket's path has 107 bytes.
            folder: tempfile::tempdir_in("/tmp")?,
        };
        let config = json!({
            "boot-source": {
                "kernel_image_path": plan.kernel,
                "initrd_path": plan.peer_initramfs,
                "boot_args": cmdline,
            },
            "drives": [],
            "machine-config": { "vcpu_count": 1, "mem_size_mib": plan.memory_mib },
            "vsock": { "guest_cid": 3, "uds_path": peer.socket() },
        });
        std::fs::write(peer.config(), config.to_string())?;
        Ok(peer)
    }

    fn config(&self) -> PathBuf {
        self.folder.path().join("peer.json")
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("peer.sock")
    }

    /// From the spawn until the agent is ready, and to the first byte.
    fn run(&self) -> Result<(Duration, Duration)> {
        let socket = self.socket();
        let control = self.folder.path().join(format!("peer.sock_{CONTROL_PORT}"));
        for trace in [&socket, &control] {
            // The traces that the last one left; it refuses to start over them.
            let _ = std::fs::remove_file(trace);
        }
        let listener = UnixListener::bind(&control)?;
        let mut command = Command::new(&self.program);
        command.args(["--no-api", "--level", "Off", "--config-file"]);
        command.arg(self.config());
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        self.settled.wait()?;
        let spawned = Instant::now();
        let _peer = Ended(command.spawn()?);
        wait_readable(&listener)?;
        let (agent, _) = listener.accept()?;
        bring_to_life(&agent)?;
        let ready = spawned.elapsed();
        let stream = handshake(UnixStream::connect(&socket)?, AGENT_PORT)?;
        let session = Session::over(stream, LIFE, DEADLINE)?;
        let mut exec = session.exec(&ExecRequest::new(ARGV))?;
        loop {
            match exec.next_before(Instant::now() + DEADLINE)? {
                Some(Event::Started { .. }) => {}
                Some(Event::Output { data, .. }) if data[..] == *SAID => break,
                other => return Err(format!("the peer's exec of {ARGV:?} had {other:?}").into()),
            }
        }
        Ok((ready, spawned.elapsed()))
    }
}

/// What a monitor of ours says to an agent that has dialled out, until it is ready.
fn bring_to_life(mut agent: &UnixStream) -> Result<()> {
    let mut machine = HostControl::new(0);
    loop {
        while let Some(event) = machine.next()? {
            match event {
                HostEvent::Hello { .. } => {
                    let mut life = Life::new(LIFE);
                    life.hostname = "peer".into();
                    life.wall_clock_ns =
                        SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() as u64;
                    getrandom(&mut life.entropy, GetRandomFlags::empty())?;
                    machine.live(&life)?;
                }
                HostEvent::Ready => return Ok(()),
                other => return Err(format!("the peer's agent said {other:?}").into()),
            }
        }
        while !machine.outgoing().is_empty() {
            let count = agent.write(machine.outgoing())?;
            machine.wrote(count);
        }
        wait_readable(agent)?;
        match agent.read(machine.space())? {
            0 => return Err("the peer's agent closed its control connection".into()),
            count => machine.filled(count, 0),
        }
    }
}

/// Waits for a guest's next byte.
fn wait_readable(source: &impl std::os::fd::AsFd) -> Result<()> {
    let timeout = Timespec {
        tv_sec: DEADLINE.as_secs() as i64,
        tv_nsec: 0,
    };
    match poll(&mut [PollFd::new(source, PollFlags::IN)], Some(&timeout))? {
        0 => Err(format!("the guest has sent nothing in {DEADLINE:?}").into()),
        _ => Ok(()),
    }
}
