//! Connections and services of the vsock guest.
//!
//! What a connection sends comes from its own outbox; where what it receives goes is its `target`: its own
//! outbox makes an echo, another's makes a relay. Replies that are owed are flags, sent when a slot is free.

mod connection;
mod services;

use crate::vsock_driver::{HOST, Header, Vsock, op};
use connection::{Connection, State};
use services::Service;

/// As many as the device has at most.
const CONNECTIONS: usize = 1024;
/// Where they are: too many for the stack, above all outboxes.
const TABLE: u64 = 0x0700_0000;
const STRAYS: usize = 16;

/// Both directions of a shutdown.
const BOTH: u32 = 3;

/// All connections.
pub struct Peer {
    cid: u64,
    connections: &'static mut [Connection],
    /// No connection from here on is in use.
    high: usize,
    /// Packets without a connection that are owed a reset: ports as they will be sent.
    strays: [(u32, u32); STRAYS],
    stray_count: usize,
    next_port: u32,
    /// Set when a service asks that RX buffers be held back.
    pub starve: bool,
}

impl Peer {
    /// No connection. There is one such table.
    pub fn new(cid: u64) -> Self {
        let table = TABLE as *mut Connection;
        for index in 0..CONNECTIONS {
            // SAFETY: this memory holds nothing else.
            unsafe { table.add(index).write(Connection::free(index)) };
        }
        Self {
            cid,
            // SAFETY: all of them have just been written, and nobody else has this memory.
            connections: unsafe { core::slice::from_raw_parts_mut(table, CONNECTIONS) },
            high: 0,
            strays: [(0, 0); STRAYS],
            stray_count: 0,
            next_port: 5000,
            starve: false,
        }
    }

    /// Takes one packet from the host.
    pub fn packet(&mut self, header: &Header, data: &[u8]) {
        let (host, guest) = (header.src_port, header.dst_port);
        let found = self.connections[..self.high]
            .iter()
            .position(|c| c.state != State::Free && c.host_port == host && c.guest_port == guest);
        let Some(index) = found else {
            match header.op {
                op::REQUEST => self.accept(header),
                op::RST => {}
                _ => self.stray(guest, host),
            }
            return;
        };
        let connection = &mut self.connections[index];
        connection.peer_alloc = header.buf_alloc;
        connection.peer_forwarded = header.fwd_cnt;
        match header.op {
            op::RESPONSE => connection.state = State::Open,
            op::RST => self.gone(index),
            op::SHUTDOWN => {
                connection.peer_shutdown |= header.flags;
                if connection.peer_shutdown & 2 != 0 {
                    self.ended(index);
                }
            }
            op::RW => {
                connection.received = connection.received.wrapping_add(data.len() as u32);
                self.data(index, data);
            }
            op::CREDIT_REQUEST => connection.owes_credit = true,
            op::CREDIT_UPDATE => {}
            _ => connection.owes_reset = true,
        }
    }

    /// Sends what is owed and what fits.
    pub fn pump(&mut self, vsock: &mut Vsock) {
        while self.stray_count > 0 && vsock.can_send() {
            self.stray_count -= 1;
            let (source, destination) = self.strays[self.stray_count];
            vsock.send(self.header(source, destination, op::RST), |_| {});
        }
        while self.high > 0 && self.connections[self.high - 1].state == State::Free {
            self.high -= 1;
        }
        for index in 0..self.high {
            while self.connections[index].state != State::Free && vsock.can_send() {
                if !self.pump_one(index, vsock) {
                    break;
                }
            }
        }
    }

    fn accept(&mut self, header: &Header) {
        let (host, guest) = (header.src_port, header.dst_port);
        let Some(service) = Service::of(guest) else {
            return self.stray(guest, host);
        };
        if service == Service::Silent {
            return;
        }
        let Some(index) = self.unused() else {
            return self.stray(guest, host);
        };
        let mut connection = Connection::free(index);
        connection.state = State::Open;
        connection.service = service;
        (connection.host_port, connection.guest_port) = (host, guest);
        connection.peer_alloc = header.buf_alloc;
        connection.peer_forwarded = header.fwd_cnt;
        connection.owes_response = true;
        self.connections[index] = connection;
        self.accepted(index);
    }

    /// The first place without a connection, which is about to have one.
    fn unused(&mut self) -> Option<usize> {
        let index = self
            .connections
            .iter()
            .position(|c| c.state == State::Free)?;
        self.high = self.high.max(index + 1);
        Some(index)
    }

    /// Starts a connection to `port` of the host, joined with `with`. False if there is no room.
    fn dial(&mut self, port: u32, with: usize) -> bool {
        let Some(index) = self.unused() else {
            return false;
        };
        let mut connection = Connection::free(index);
        connection.state = State::Connecting;
        connection.service = Service::Relay;
        (connection.host_port, connection.guest_port) = (port, self.next_port);
        self.next_port += 1;
        connection.target = with;
        connection.owes_request = true;
        self.connections[index] = connection;
        self.connections[with].target = index;
        true
    }

    fn stray(&mut self, source: u32, destination: u32) {
        if self.stray_count < STRAYS {
            self.strays[self.stray_count] = (source, destination);
            self.stray_count += 1;
        }
    }

    fn header(&self, source: u32, destination: u32, op: u16) -> Header {
        Header {
            src_cid: self.cid,
            dst_cid: HOST,
            src_port: source,
            dst_port: destination,
            len: 0,
            kind: 1,
            op,
            flags: 0,
            buf_alloc: 0,
            fwd_cnt: 0,
        }
    }

    /// One packet of one connection; false if it has nothing to send.
    fn pump_one(&mut self, index: usize, vsock: &mut Vsock) -> bool {
        if self.connections[index].service == Service::Forge && self.connections[index].forged < 4 {
            self.forge(index, vsock);
            return true;
        }
        let mut header = self.header(0, 0, 0);
        let connection = &mut self.connections[index];
        (header.src_port, header.dst_port) = (connection.guest_port, connection.host_port);
        (header.buf_alloc, header.fwd_cnt) = (connection.window(), connection.forwarded);
        if connection.owes_reset {
            header.op = op::RST;
            vsock.send(header, |_| {});
            connection.state = State::Free;
            return true;
        }
        let control = [
            (&mut connection.owes_request, op::REQUEST),
            (&mut connection.owes_response, op::RESPONSE),
            (&mut connection.owes_credit, op::CREDIT_UPDATE),
        ];
        for (owed, op) in control {
            if core::mem::take(owed) {
                header.op = op;
                vsock.send(header, |_| {});
                connection.told = connection.forwarded;
                return true;
            }
        }
        if connection.state != State::Open {
            return false;
        }
        let length = connection.sendable();
        if length > 0 {
            (header.op, header.len) = (op::RW, length as u32);
            connection.told = connection.forwarded;
            let taken = length as u32;
            if connection.service == Service::Flood {
                connection.pass(taken);
                vsock.send_prepared(header);
                return true;
            }
            vsock.send(header, |data| connection.fill(data));
            self.credit_feeder(index, taken);
            return true;
        }
        let flags = connection.shutdown_due();
        if flags == 0 {
            return false;
        }
        if flags == BOTH && connection.peer_shutdown == BOTH {
            header.op = op::RST;
            connection.state = State::Free;
        } else {
            (header.op, header.flags) = (op::SHUTDOWN, flags);
            connection.shutdown |= flags;
        }
        vsock.send(header, |_| {});
        true
    }

    /// Packets that no honest peer sends: each must come to nothing.
    fn forge(&mut self, index: usize, vsock: &mut Vsock) {
        let connection = &mut self.connections[index];
        let step = connection.forged;
        connection.forged += 1;
        let (guest, host) = (connection.guest_port, connection.host_port);
        let mut header = self.header(guest, host, op::RST);
        match step {
            0 => header.src_cid = self.cid + 1,
            1 => header.dst_cid = HOST + 1,
            2 => header.kind = 7,
            _ => (header.src_port, header.dst_port) = (guest + 1000, host),
        }
        vsock.send(header, |_| {});
    }

    /// The bytes that left `index`'s outbox came from someone: their credit grows.
    fn credit_feeder(&mut self, index: usize, taken: u32) {
        for connection in &mut self.connections[..self.high] {
            if connection.state != State::Free && connection.target == index && connection.relays()
            {
                connection.consume(taken);
            }
        }
    }
}
