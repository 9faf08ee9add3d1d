//! What each port does.

use super::Peer;
use super::connection::State;
use crate::{machine, say};

/// The behaviour of a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Service {
    Echo,
    Sink,
    Source,
    Half,
    Count,
    Silent,
    Dial,
    Power,
    Reset,
    Forge,
    Starve,
    Drain,
    Flood,
    /// The far end of a dial.
    Relay,
}

impl Service {
    /// The service that listens on a port.
    pub fn of(port: u32) -> Option<Self> {
        Some(match port {
            7 => Self::Echo,
            9 => Self::Sink,
            19 => Self::Source,
            21 => Self::Half,
            23 => Self::Silent,
            25 => Self::Dial,
            27 => Self::Power,
            29 => Self::Reset,
            31 => Self::Forge,
            33 => Self::Starve,
            35 => Self::Count,
            37 => Self::Drain,
            39 => Self::Flood,
            _ => return None,
        })
    }
}

impl Peer {
    /// A connection has been accepted.
    pub(super) fn accepted(&mut self, index: usize) {
        let connection = &mut self.connections[index];
        if connection.service == Service::Half {
            connection.push(b"hello");
            connection.complete = true;
        }
    }

    /// Data has arrived.
    pub(super) fn data(&mut self, index: usize, data: &[u8]) {
        let connection = &mut self.connections[index];
        let length = data.len() as u32;
        match connection.service {
            Service::Echo | Service::Forge | Service::Relay => {
                let target = connection.target;
                self.connections[target].push(data);
            }
            Service::Dial => self.dial_data(index, data),
            Service::Sink | Service::Half | Service::Count => {
                connection.count += data.len() as u64;
                connection.hash = data.iter().fold(connection.hash, |sum, byte| {
                    (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
                });
                connection.consume(length);
            }
            Service::Drain => {
                connection.count += data.len() as u64;
                connection.consume(length);
            }
            Service::Source | Service::Flood => {
                for byte in data {
                    connection.parameter |= u64::from(*byte) << (8 * connection.count);
                    connection.count += 1;
                    if connection.count == 8 {
                        connection.remaining = connection.parameter;
                        connection.complete = connection.parameter == 0;
                        break;
                    }
                }
                connection.consume(length);
            }
            Service::Power => machine::power_off(),
            Service::Reset => connection.owes_reset = true,
            Service::Starve => {
                self.starve |= connection.count == 0;
                connection.count += data.len() as u64;
                connection.consume(length);
            }
            Service::Silent => {}
        }
    }

    /// The port first, then the relayed stream.
    fn dial_data(&mut self, index: usize, data: &[u8]) {
        let mut rest = data;
        while let ([byte, tail @ ..], true) = (rest, self.connections[index].count < 4) {
            let connection = &mut self.connections[index];
            connection.parameter |= u64::from(*byte) << (8 * connection.count);
            connection.count += 1;
            connection.consume(1);
            rest = tail;
            if connection.count == 4 {
                let port = connection.parameter as u32;
                if !self.dial(port, index) {
                    self.connections[index].owes_reset = true;
                    return;
                }
            }
        }
        let target = self.connections[index].target;
        if target != index {
            self.connections[target].push(rest);
        }
    }

    /// The host will send no more on this connection.
    pub(super) fn ended(&mut self, index: usize) {
        let connection = &mut self.connections[index];
        match connection.service {
            Service::Echo | Service::Forge => connection.complete = true,
            Service::Dial | Service::Relay => {
                let target = connection.target;
                self.connections[target].complete = true;
            }
            Service::Sink | Service::Starve if !connection.complete => {
                let mut answer = [0; 16];
                answer[..8].copy_from_slice(&connection.count.to_le_bytes());
                answer[8..].copy_from_slice(&connection.hash.to_le_bytes());
                connection.push(&answer);
                connection.complete = true;
            }
            Service::Drain if !connection.complete => {
                let count = connection.count.to_le_bytes();
                connection.push(&count);
                connection.complete = true;
            }
            Service::Half | Service::Count => {
                say!("half: {} {:#x}", connection.count, connection.hash);
                connection.complete = true;
            }
            _ => connection.complete = true,
        }
    }

    /// The host has reset this connection.
    pub(super) fn gone(&mut self, index: usize) {
        let connection = &mut self.connections[index];
        let (state, target) = (connection.state, connection.target);
        connection.state = State::Free;
        if target != index {
            let other = &mut self.connections[target];
            if state == State::Connecting {
                other.push(b"refused");
            }
            other.target = target;
            other.complete = true;
        }
    }
}
