//! A vsock peer in user mode, polling: one service a port, for every behaviour that a peer can show.
//!
//! Services are listed in `vmm_guests::ports`. Command line: `rxbufs=N rxsize=N rx=split tx=one
//! event_idx=1` lay the rings out; `hold=CYCLES` is how long the starving service posts no RX buffer.
//! Says `vsock: cid N` when it is live.
#![no_std]
#![no_main]

mod machine;
mod mmio;
mod vsock_driver;
mod vsock_peer;

use machine::{cycles, number, option};
use mmio::Device;
use vsock_driver::Vsock;
use vsock_peer::Peer;

#[unsafe(no_mangle)]
fn guest(command_line: &'static [u8]) {
    let mut vsock = Vsock::start(Device::find(command_line), command_line);
    let hold = option(command_line, b"hold").map_or(0, number);
    let mut peer = Peer::new(vsock.cid);
    say!("vsock: cid {}", vsock.cid);
    let mut held = [0u16; 64];
    let mut count = 0;
    let mut until = 0;
    loop {
        while let Some((index, header, data)) = vsock.receive() {
            peer.packet(&header, data);
            if core::mem::take(&mut peer.starve) {
                until = cycles().wrapping_add(hold);
            }
            if until != 0 {
                held[count] = index;
                count += 1;
            } else {
                vsock.give_back(index);
            }
        }
        if until != 0 && cycles() > until {
            until = 0;
            say!("vsock: refilled {count}");
            held[..count]
                .iter()
                .for_each(|index| vsock.give_back(*index));
            count = 0;
        }
        peer.pump(&mut vsock);
        vsock.flush();
    }
}
