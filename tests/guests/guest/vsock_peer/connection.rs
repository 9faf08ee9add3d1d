//! One connection: credit both ways, its outbox, what it owes.

use super::services::Service;
use crate::vsock_driver::PACKET_MAX;

const OUTBOXES: u64 = 0x0400_0000;
/// Bytes of an outbox, and the window of a connection that fills one.
pub const OUTBOX: usize = 32 * 1024;
/// The window of those that look at what they take, as wide as Linux's own, and of the one that does not.
const WIDE: u32 = 256 * 1024;
const WIDEST: u32 = 1024 * 1024;

/// Where a connection is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Unused.
    Free,
    /// The request is out.
    Connecting,
    /// Data flows.
    Open,
}

/// One connection.
pub struct Connection {
    index: usize,
    pub state: State,
    pub service: Service,
    pub host_port: u32,
    pub guest_port: u32,
    /// Whose outbox receives what arrives here.
    pub target: usize,
    pub peer_alloc: u32,
    pub peer_forwarded: u32,
    pub received: u32,
    pub forwarded: u32,
    /// The value of `forwarded` that the host knows.
    pub told: u32,
    sent: u32,
    pub peer_shutdown: u32,
    pub shutdown: u32,
    /// Nothing more will enter the outbox.
    pub complete: bool,
    pub owes_request: bool,
    pub owes_response: bool,
    pub owes_credit: bool,
    pub owes_reset: bool,
    pub forged: u8,
    /// Bytes that the service has seen, and their hash.
    pub count: u64,
    pub hash: u64,
    /// What a source still has to send, and where it is.
    pub remaining: u64,
    pub offset: u64,
    /// The parameter of a service, as its bytes arrive.
    pub parameter: u64,
    start: usize,
    length: usize,
}

impl Connection {
    /// An unused slot.
    pub fn free(index: usize) -> Self {
        Self {
            index,
            state: State::Free,
            service: Service::Echo,
            host_port: 0,
            guest_port: 0,
            target: index,
            peer_alloc: 0,
            peer_forwarded: 0,
            received: 0,
            forwarded: 0,
            told: 0,
            sent: 0,
            peer_shutdown: 0,
            shutdown: 0,
            complete: false,
            owes_request: false,
            owes_response: false,
            owes_credit: false,
            owes_reset: false,
            forged: 0,
            count: 0,
            hash: 0xcbf2_9ce4_8422_2325,
            remaining: 0,
            offset: 0,
            parameter: 0,
            start: 0,
            length: 0,
        }
    }

    /// Whether what arrives here goes into an outbox.
    pub fn relays(&self) -> bool {
        matches!(
            self.service,
            Service::Echo | Service::Relay | Service::Dial | Service::Forge
        )
    }

    /// The receive window that we advertise.
    pub fn window(&self) -> u32 {
        match self.service {
            Service::Drain => WIDEST,
            _ if self.relays() => OUTBOX as u32,
            _ => WIDE,
        }
    }

    /// `bytes` have left our buffers; tells the host once half the window has.
    pub fn consume(&mut self, bytes: u32) {
        self.forwarded = self.forwarded.wrapping_add(bytes);
        if self.forwarded.wrapping_sub(self.told) >= self.window() / 2 {
            self.owes_credit = true;
        }
    }

    /// Appends to the outbox; what does not fit is lost, and a window never lets that happen.
    pub fn push(&mut self, bytes: &[u8]) {
        let room = bytes.len().min(OUTBOX - self.length);
        let at = (self.start + self.length) % OUTBOX;
        let first = room.min(OUTBOX - at);
        let outbox = self.outbox();
        outbox[at..at + first].copy_from_slice(&bytes[..first]);
        outbox[..room - first].copy_from_slice(&bytes[first..room]);
        self.length += room;
    }

    /// Bytes that can go into a packet now.
    pub fn sendable(&self) -> usize {
        if self.shutdown & 2 != 0 || self.peer_shutdown & 1 != 0 {
            return 0;
        }
        let credit = self
            .peer_alloc
            .wrapping_sub(self.sent.wrapping_sub(self.peer_forwarded)) as i32;
        let room = (credit.max(0) as usize).min(PACKET_MAX);
        if self.remaining > 0 {
            // Whole words of the pattern, but for the last.
            let whole = (self.remaining as usize).min(room);
            return if whole as u64 == self.remaining {
                whole
            } else {
                whole & !7
            };
        }
        self.length.min(room)
    }

    /// Fills a packet and takes the bytes out.
    pub fn fill(&mut self, data: &mut [u8]) {
        self.sent = self.sent.wrapping_add(data.len() as u32);
        if self.remaining > 0 {
            for chunk in data.chunks_mut(8) {
                let word = (self.offset / 8)
                    .wrapping_add(1)
                    .wrapping_mul(0x9e37_79b9_7f4a_7c15);
                chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
                self.offset += chunk.len() as u64;
            }
            self.remaining -= data.len() as u64;
            self.complete = self.remaining == 0;
            return;
        }
        let (start, length) = (self.start, data.len());
        let first = length.min(OUTBOX - start);
        let outbox = self.outbox();
        data[..first].copy_from_slice(&outbox[start..start + first]);
        data[first..].copy_from_slice(&outbox[..length - first]);
        self.start = (start + length) % OUTBOX;
        self.length -= length;
    }

    /// Takes bytes out that are the same wherever the stream is.
    pub fn pass(&mut self, length: u32) {
        self.sent = self.sent.wrapping_add(length);
        self.remaining -= u64::from(length);
        self.complete = self.remaining == 0;
    }

    /// The shutdown flags that are due now, 0 for none.
    pub fn shutdown_due(&self) -> u32 {
        let drained = self.length == 0 && self.remaining == 0 || self.peer_shutdown & 1 != 0;
        if !self.complete || !drained || self.shutdown == 3 {
            return 0;
        }
        if self.peer_shutdown & 2 != 0 {
            return 3;
        }
        if self.shutdown & 2 == 0 { 2 } else { 0 }
    }

    fn outbox(&mut self) -> &'static mut [u8] {
        let address = OUTBOXES + (self.index * OUTBOX) as u64;
        // SAFETY: each connection has an outbox of its own, and one borrow at a time.
        unsafe { core::slice::from_raw_parts_mut(address as *mut u8, OUTBOX) }
    }
}
