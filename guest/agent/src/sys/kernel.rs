//! Two requests to the kernel that only exist as ioctls.
// ioctl takes untyped memory; each wrapper here passes the type that its request names.
#![allow(unsafe_code)]

use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::ioctl::{self, Updater, opcode};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

/// `struct rand_pool_info` of linux/random.h with a fixed buffer.
#[repr(C)]
struct PoolInfo {
    entropy_count: i32,
    buffer_size: i32,
    buffer: [u8; 64],
}

/// Adds 64 secret random bytes to the kernel's pool, credits them, and makes it reseed at once,
/// so that nothing drawn after this depends on an earlier life alone.
///
/// # Errors
/// What the kernel says.
pub fn add_entropy(random: impl AsFd, bytes: &[u8; 64]) -> Result<(), Errno> {
    // _IOW('R', 3, int[2]) and _IO('R', 7).
    const ADD: ioctl::Opcode = opcode::write::<[i32; 2]>(b'R', 3);
    const RESEED: ioctl::Opcode = opcode::none(b'R', 7);
    let mut info = PoolInfo {
        entropy_count: 512,
        buffer_size: 64,
        buffer: *bytes,
    };
    // SAFETY: RNDADDENTROPY reads a rand_pool_info whose buffer_size bytes follow it.
    unsafe { ioctl::ioctl(random.as_fd(), Updater::<ADD, PoolInfo>::new(&mut info))? };
    // SAFETY: RNDRESEEDCRNG takes no argument.
    unsafe { ioctl::ioctl(random.as_fd(), ioctl::NoArg::<RESEED>::new()) }
}

/// `struct ifreq` of linux/if.h with its flags.
#[repr(C)]
struct Interface {
    name: [u8; 16],
    flags: i16,
    padding: [u8; 22],
}

/// Brings the loopback interface up.
///
/// # Errors
/// What the kernel says.
pub fn loopback_up() -> Result<(), Errno> {
    const SIOCSIFFLAGS: ioctl::Opcode = 0x8914;
    const IFF_UP: i16 = 1;
    const IFF_RUNNING: i16 = 0x40;
    let socket = rustix::net::socket_with(
        AddressFamily::INET,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    let mut interface = Interface {
        name: *b"lo\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
        flags: IFF_UP | IFF_RUNNING,
        padding: [0; 22],
    };
    // SAFETY: SIOCSIFFLAGS reads an ifreq, 40 bytes.
    unsafe {
        ioctl::ioctl(
            &socket,
            Updater::<SIOCSIFFLAGS, Interface>::new(&mut interface),
        )
    }
}
