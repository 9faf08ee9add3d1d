//! Init of the peer's guest in `cargo xtask bench stream`.
//!
//! What a user of a monitor without an agent would do: make the machine ready as our agent does, connect to the
//! host's port 52 over vsock, and run `/.vmm/pipeline` in a shell with that connection as its stdout.

use std::error::Error;
use std::process::{Command, ExitCode, Stdio};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::system::RebootCommand;
use vmm_agent::init::{modules, mounts};
use vmm_agent::log::Log;
use vmm_agent::sys::vsock::{self, Address};

const HOST: Address = Address { cid: 2, port: 52 };
const OUR_PORT: u32 = 900;
const PIPELINE: &str = "/.vmm/pipeline";

fn main() -> ExitCode {
    if !rustix::process::getpid().is_init() {
        eprintln!("bench-guest is the init of a guest: it runs as process 1 and nowhere else");
        return ExitCode::from(125);
    }
    let failures = mounts::mount_all();
    let _ = mounts::standard_descriptors();
    let mut log = Log::kernel();
    for failure in failures {
        log.error(failure);
    }
    modules::load_all(&mut log);
    if let Err(error) = stream() {
        log.error(format_args!("cannot stream: {error}"));
    }
    let _ = rustix::system::reboot(RebootCommand::Restart);
    ExitCode::FAILURE
}

fn stream() -> Result<(), Box<dyn Error>> {
    let pipeline = std::fs::read_to_string(PIPELINE)?;
    let socket = vsock::connect(OUR_PORT, HOST)?;
    poll(&mut [PollFd::new(&socket, PollFlags::OUT)], None)?;
    rustix::net::sockopt::socket_error(&socket)??;
    // The shell's programs expect to wait in a write.
    fcntl_setfl(&socket, fcntl_getfl(&socket)? - OFlags::NONBLOCK)?;
    Command::new("/bin/sh")
        .args(["-c", &pipeline])
        .stdout(Stdio::from(socket.try_clone()?))
        .status()?;
    // Rebooting takes along what is still on its way: the host closes when it has all.
    poll(
        &mut [PollFd::new(&socket, PollFlags::IN | PollFlags::RDHUP)],
        None,
    )?;
    Ok(())
}
