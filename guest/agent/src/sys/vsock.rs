//! AF_VSOCK sockets: all non-blocking, all close-on-exec.
// The address family has no safe address type in rustix: one conversion each way.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::addr::{SocketAddrArg, SocketAddrLen, SocketAddrOpaque};
use rustix::net::{AddressFamily, SocketAddrAny, SocketFlags, SocketType};

/// Any context id, for binding.
pub const CID_ANY: u32 = u32::MAX;
/// The host.
pub const CID_HOST: u32 = 2;

/// What a session's socket takes in before it is read, in bytes. Linux since 2026 (6.1.192 has it) has no more
/// than that on its way out either, so this is as large as the window that the host offers.
const BUFFER: u64 = 512 << 10;

/// A vsock address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// Whose.
    pub cid: u32,
    /// Which port there.
    pub port: u32,
}

/// `struct sockaddr_vm` of linux/vm_sockets.h.
#[repr(C)]
struct Raw {
    family: u16,
    reserved: u16,
    port: u32,
    cid: u32,
    flags: u8,
    zero: [u8; 3],
}

// SAFETY: the closure gets a pointer to a whole `sockaddr_vm` that lives through the call, and
// its length.
unsafe impl SocketAddrArg for Address {
    unsafe fn with_sockaddr<R>(
        &self,
        f: impl FnOnce(*const SocketAddrOpaque, SocketAddrLen) -> R,
    ) -> R {
        let raw = Raw {
            family: AddressFamily::VSOCK.as_raw(),
            reserved: 0,
            port: self.port,
            cid: self.cid,
            flags: 0,
            zero: [0; 3],
        };
        // 16 bytes: fits any integer.
        f((&raw const raw).cast(), size_of::<Raw>() as SocketAddrLen)
    }
}

impl Address {
    fn from_any(any: &SocketAddrAny) -> Option<Self> {
        if any.address_family() != AddressFamily::VSOCK
            || (any.addr_len() as usize) < size_of::<Raw>()
        {
            return None;
        }
        // SAFETY: the kernel wrote a `sockaddr_vm` of at least that many bytes; no alignment is
        // assumed.
        let raw = unsafe { any.as_ptr().cast::<Raw>().read_unaligned() };
        Some(Self {
            cid: raw.cid,
            port: raw.port,
        })
    }
}

fn socket() -> Result<OwnedFd, Errno> {
    rustix::net::socket_with(
        AddressFamily::VSOCK,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
}

/// Listens on `port`, for peers of any id: who may stay is decided at [`accept`].
///
/// # Errors
/// What the kernel says; [`Errno::AFNOSUPPORT`] without a vsock driver.
pub fn listen(port: u32, backlog: i32) -> Result<OwnedFd, Errno> {
    let socket = socket()?;
    rustix::net::bind(&socket, &Address { cid: CID_ANY, port })?;
    // What is accepted has its listener's size.
    set_buffer(&socket, BUFFER);
    rustix::net::listen(&socket, backlog)?;
    Ok(socket)
}

/// Asks for a receive buffer of `bytes`. A kernel that gives less costs speed alone.
fn set_buffer(socket: &OwnedFd, bytes: u64) {
    // SO_VM_SOCKETS_BUFFER_MAX_SIZE first: SO_VM_SOCKETS_BUFFER_SIZE is clamped to it.
    for option in [2, 0] {
        // SAFETY: both options read a u64 through the pointer, of the length given.
        unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::AF_VSOCK,
                option,
                (&raw const bytes).cast(),
                size_of::<u64>() as libc::socklen_t,
            );
        }
    }
}

/// Takes the next connection and says whose it is.
///
/// # Errors
/// [`Errno::AGAIN`] when there is none; what else the kernel says.
pub fn accept(listener: &OwnedFd) -> Result<(OwnedFd, Option<Address>), Errno> {
    let (socket, peer) =
        rustix::net::acceptfrom_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    Ok((socket, peer.as_ref().and_then(Address::from_any)))
}

/// Starts to connect to `to` from our `port`. The socket turns writable when it is decided, with
/// the outcome as its error.
///
/// # Errors
/// [`Errno::ADDRINUSE`] when the source port is taken; what else the kernel says at once.
pub fn connect(port: u32, to: Address) -> Result<OwnedFd, Errno> {
    let socket = socket()?;
    rustix::net::bind(&socket, &Address { cid: CID_ANY, port })?;
    match rustix::net::connect(&socket, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_goes_through_the_kernel_form_and_back() {
        let address = Address {
            cid: 3,
            port: 0x1234_5678,
        };
        assert_eq!(Address::from_any(&address.as_any()), Some(address));
    }

    #[test]
    fn an_address_of_another_family_is_none() {
        let any = rustix::net::SocketAddrUnix::new("/x").unwrap().as_any();
        assert_eq!(Address::from_any(&any), None);
    }
}
