//! In the guest: an echo, and the bare cost of a process.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::thread;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use vmm_agent::sys::vsock;

use crate::Result;

/// Answers a byte with that byte.
pub const ECHO: u32 = 7001;
/// Answers [`FORK`] or [`VFORK`] with eight bytes: the nanoseconds of a process, little endian.
pub const SPAWN: u32 = 7002;
/// A child with a copy of its parent's page tables, as the agent makes them.
pub const FORK: u8 = b'f';
/// A child that borrows them, as the standard library makes them: the cheapest way there is.
pub const VFORK: u8 = b'v';

/// Serves both ports until it is killed; says `ready` once they can be connected to.
pub fn serve() -> Result<()> {
    let echo = vsock::listen(ECHO, 1)?;
    let spawn = vsock::listen(SPAWN, 1)?;
    println!("ready");
    // One connection each; whichever fails first ends it all, which the host sees as an end of both.
    let (sender, ended) = std::sync::mpsc::channel();
    let other = sender.clone();
    thread::spawn(move || other.send(accept(&echo).and_then(echoes)));
    thread::spawn(move || sender.send(accept(&spawn).and_then(spawns)));
    ended.recv()?
}

/// The first connection, as a stream that waits.
fn accept(listener: &OwnedFd) -> Result<File> {
    poll(&mut [PollFd::new(listener, PollFlags::IN)], None)?;
    let (stream, _) = vsock::accept(listener)?;
    fcntl_setfl(&stream, fcntl_getfl(&stream)? - OFlags::NONBLOCK)?;
    Ok(stream.into())
}

fn echoes(mut stream: File) -> Result<()> {
    let mut byte = [0];
    while stream.read(&mut byte)? == 1 {
        stream.write_all(&byte)?;
    }
    Ok(())
}

fn spawns(mut stream: File) -> Result<()> {
    let mut kind = [0];
    while stream.read(&mut kind)? == 1 {
        // By the same $PATH as an exec's.
        let mut command = Command::new("true");
        if kind == [FORK] {
            // A child that changes its user, be it to the same one, is not borrowed for.
            command.uid(rustix::process::getuid().as_raw());
        }
        let began = Instant::now();
        let status = command.status()?;
        let took = began.elapsed();
        if !status.success() {
            return Err(format!("`true` left with {status}").into());
        }
        stream.write_all(&u64::try_from(took.as_nanos())?.to_le_bytes())?;
    }
    Ok(())
}
