//! The host's end of a connection: a socket, what is queued for it, and what the loop watches it
//! for.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustix::net::sockopt;
use vmm_events::{Interest, Source, TimerId};

use super::connection::Connection;
use super::header::MAX_PAYLOAD;
use super::negative_control;
use super::outbox::{Account, Outbox};

/// First read of a stream: one buffer of a Linux guest.
pub(super) const BURST_START: u32 = 4096;

/// The largest window of a connection, in bytes.
const SEND_BUFFER: usize = 512 << 10;

/// The largest credit window, in bytes, with which nearly all that a guest sends fits the socket of a client
/// that lags: 512 KiB for a process with `CAP_NET_ADMIN`, else what `net.core.wmem_max` allows. A larger one
/// would only move bytes into the device's own buffers, by a copy; a smaller one has guest and client wait
/// for each other more often.
#[must_use]
pub fn socket_window() -> u32 {
    // Without a socket now there will be none for a client either.
    let booked = UnixStream::pair().map_or(0, |(socket, _)| enlarge(&socket, SEND_BUFFER));
    // What the kernel adds to each packet of 64 KiB for its books is less than a quarter.
    let packets = booked / 5 * 4 / MAX_PAYLOAD as usize;
    let window = packets * MAX_PAYLOAD as usize;
    // Fits: at most 512 KiB.
    window.clamp(MAX_PAYLOAD as usize, SEND_BUFFER) as u32
}

/// Asks for a socket's send buffer of this size, and says what the kernel books for it, which is twice as much or the
/// most that it allows.
fn enlarge(socket: impl AsFd, size: usize) -> usize {
    let socket = socket.as_fd();
    if sockopt::set_socket_send_buffer_size_force(socket, size).is_err() {
        let _ = sockopt::set_socket_send_buffer_size(socket, size);
    }
    sockopt::socket_send_buffer_size(socket).unwrap_or(0)
}

/// The host's end of a connection.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) source: Source<OwnedFd>,
    pub(super) outbox: Outbox,
    pub(super) reading: Reading,
    /// How much to read at once: grows while reads are full, so that a trickle costs one buffer and
    /// a flood few system calls.
    pub(super) burst: u32,
    pub(super) greeting: Option<Greeting>,
    /// What the guest may have sent and we not forwarded, in bytes.
    pub(super) window: u32,
}

/// Where a stream stands with its data for the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reading {
    /// None known: the loop watches for some.
    Idle,
    /// In the line of readable ones.
    Ready,
    /// There may be some, but the guest has no room for it.
    NoCredit,
}

/// The answer that a client waits for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Greeting {
    pub(super) tagged: bool,
    pub(super) timer: TimerId,
}

impl Stream {
    pub(super) fn new(
        source: Source<OwnedFd>,
        greeting: Option<Greeting>,
        window: u32,
        account: &Account,
    ) -> Self {
        // So that all that the guest may send goes from its memory straight to the socket, and
        // nothing by way of the outbox; a kernel that allows less costs a copy. More would be the
        // kernel's memory, of which a thousand connections that nobody reads take their share.
        enlarge(source.inner(), window as usize);
        Self {
            source,
            outbox: Outbox::new(window, Arc::clone(account)),
            reading: Reading::Idle,
            burst: BURST_START,
            greeting,
            window,
        }
    }

    /// What can be acted on now, and nothing else: a socket that has hung up reports so for as long
    /// as it is watched for anything, so that one whose data cannot be taken must not be watched at
    /// all (VS01).
    pub(super) fn interest(&self, connection: &Connection) -> Interest {
        if !connection.is_open() {
            return Interest::NONE;
        }
        let reads = connection.reads_host();
        let idle = self.reading == Reading::Idle || negative_control("VS01");
        let interest = Interest::NONE
            .with(Interest::READ, reads && idle)
            .with(Interest::WRITE, !self.outbox.is_empty());
        if interest.is_none() && !reads {
            // Only for the hang-up, which comes unasked with any interest.
            return Interest::PRIORITY;
        }
        interest
    }
}
