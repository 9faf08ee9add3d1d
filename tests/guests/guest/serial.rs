//! Writes one byte to the serial port and powers off: the least that proves a machine boots.
#![no_std]
#![no_main]

mod machine;

#[unsafe(no_mangle)]
fn guest(_command_line: &'static [u8]) {
    machine::out8(machine::SERIAL, b'!');
}
