//! The ports to the host, and the loopback interface.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};

use nest_init::wire::Port;
use rustix::fs::inotify;
use rustix::net;

use crate::{Fault, Naming};

/// The four ports, open.
pub struct Ports {
    /// Messages.
    pub control: File,
    /// To the command's standard input.
    pub stdin: File,
    /// From its standard output.
    pub stdout: File,
    /// From its standard error.
    pub stderr: File,
}

impl Ports {
    /// Opens all ports; the kernel makes their nodes some time after the driver was loaded.
    pub fn open() -> Result<Self, Fault> {
        let watch = inotify::init(inotify::CreateFlags::CLOEXEC).naming("watch /dev")?;
        inotify::add_watch(&watch, "/dev", inotify::WatchFlags::CREATE).naming("watch /dev")?;
        let mut space = [MaybeUninit::uninit(); 4096];
        let mut changes = inotify::Reader::new(&watch, &mut space);
        let mut open = |port: Port| -> Result<File, Fault> {
            let node = PathBuf::from(format!("/dev/vport0p{}", port as u8));
            while !node.exists() {
                changes
                    .next()
                    .naming(format!("wait for {}", node.display()))?;
            }
            both_ways(&node).naming(format!("open {}", node.display()))
        };
        Ok(Self {
            control: open(Port::Control)?,
            stdin: open(Port::Stdin)?,
            stdout: open(Port::Stdout)?,
            stderr: open(Port::Stderr)?,
        })
    }
}

fn both_ways(node: &Path) -> io::Result<File> {
    File::options().read(true).write(true).open(node)
}

/// Brings the loopback interface up: one RTM_NEWLINK by rtnetlink(7), to the kernel, which is where a netlink
/// socket without a peer sends.
pub fn loopback_up() -> Result<(), Fault> {
    const RTM_NEWLINK: u16 = 16;
    const NLM_F_REQUEST: u16 = 1;
    const IFF_UP: u32 = 1;
    const LOOPBACK: u32 = 1;
    let mut message = Vec::with_capacity(32);
    // struct nlmsghdr: length, type, flags, sequence, port
    message.extend_from_slice(&32u32.to_ne_bytes());
    message.extend_from_slice(&RTM_NEWLINK.to_ne_bytes());
    message.extend_from_slice(&NLM_F_REQUEST.to_ne_bytes());
    message.extend_from_slice(&[0; 8]);
    // struct ifinfomsg: family, pad, type, index, flags, mask of the flags to change
    message.extend_from_slice(&[0; 4]);
    message.extend_from_slice(&LOOPBACK.to_ne_bytes());
    message.extend_from_slice(&IFF_UP.to_ne_bytes());
    message.extend_from_slice(&IFF_UP.to_ne_bytes());

    let socket = net::socket_with(
        net::AddressFamily::NETLINK,
        net::SocketType::RAW,
        net::SocketFlags::CLOEXEC,
        // NETLINK_ROUTE is protocol 0.
        None,
    )
    .naming("open rtnetlink")?;
    net::send(&socket, &message, net::SendFlags::empty()).naming("bring lo up")?;
    Ok(())
}
