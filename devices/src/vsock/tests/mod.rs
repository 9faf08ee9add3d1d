//! The device as a whole: a real loop, real sockets, and a guest in the hands of the test.

mod connect;
mod flow;
mod hostile;
mod random;

use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use rustix::process::{Resource, Rlimit};

use crate::testing::Rig;
use crate::vsock::header::{Header, Op};

/// A guest's own connection to a server on the host: the server's end, and the header of its data.
fn dialled(rig: &mut Rig, guest_port: u32, port: u32) -> (UnixStream, Header) {
    let listener = UnixListener::bind(rig.server_path(port)).unwrap();
    let header = Rig::header(guest_port, port, Op::Request);
    rig.send(header, &[]);
    let answer = rig.exchange();
    assert!(
        matches!(&answer[..], [(Op::Response, ..)]),
        "not accepted: {answer:?}"
    );
    let (server, _) = listener.accept().unwrap();
    server.set_nonblocking(true).unwrap();
    (server, header)
}

/// The same header with another operation and flags.
fn with(header: Header, op: Op, flags: u32) -> Header {
    Header {
        op: op.to_wire(),
        flags,
        ..header
    }
}

fn ops(packets: &[(Op, Header, Vec<u8>)]) -> Vec<Op> {
    packets.iter().map(|(op, ..)| *op).collect()
}

/// The data of all packets, one after the other.
fn data(packets: &[(Op, Header, Vec<u8>)]) -> Vec<u8> {
    packets.iter().flat_map(|(.., data)| data.clone()).collect()
}

/// Reproducible noise.
fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    (0..length)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        })
        .collect()
}

/// Lifts the soft limit on open files, which is often 1,024, for tests with that many sockets.
fn allow_many_files() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let lifted = Rlimit {
        current: limit.maximum,
        ..limit
    };
    rustix::process::setrlimit(Resource::Nofile, lifted).unwrap();
}

const WHILE: Duration = Duration::from_millis(200);
