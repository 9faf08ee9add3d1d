//! Touches every address that no device claims, in every width, and counts what is not all-ones (HO07).
//!
//! Says `noise: N accesses, M odd` and powers off. `lines=N` adds that many console lines.
#![no_std]
#![no_main]

mod machine;

use machine::{in8, in16, in32, load, number, option, out8, out16, out32, store};

/// Holes of the physical address space: behind 128 MiB of memory, beside the devices, up to the interrupt
/// controllers, between and behind them.
const HOLES: &[(u64, u64, u64)] = &[
    (0x2000_0000, 0x4000_0000, 0x0100_0000),
    (0xc010_0000, 0xfec0_0000, 0x0100_0000),
    (0xfec0_1000, 0xfee0_0000, 0x0002_1000),
    (0xfee0_1000, 0xfff0_0000, 0x0001_1000),
];

#[unsafe(no_mangle)]
fn guest(command_line: &'static [u8]) {
    let mut tally = Tally {
        accesses: 0,
        odd: 0,
    };
    for &(start, end, step) in HOLES {
        let mut address = start;
        while address < end {
            memory(&mut tally, address);
            address += step;
        }
    }
    // Every port once; those of the chipset, which KVM serves itself, and of the monitor are left alone.
    let mut port = 0u32;
    while port < 0xfff8 {
        if !claimed(port as u16) {
            ports(&mut tally, port as u16);
        }
        // All of the low ports, where devices live, and a sample of the rest.
        port += if port < 0x800 { 8 } else { 0xf8 };
    }
    for _ in 0..option(command_line, b"flood").map_or(0, number) {
        store(0xc080_0000, 0u32);
    }
    for line in 0..option(command_line, b"lines").map_or(0, number) {
        say!("line {line}");
    }
    say!("noise: {} accesses, {} odd", tally.accesses, tally.odd);
}

struct Tally {
    accesses: u32,
    odd: u32,
}

impl Tally {
    fn read(&mut self, all_ones: bool) {
        self.accesses += 2;
        self.odd += u32::from(!all_ones);
    }
}

/// Ports that someone answers: interrupt controllers, timer, keyboard controller, serial, ACPI, PCI.
fn claimed(port: u16) -> bool {
    let block = port & !7;
    matches!(
        block,
        0x20 | 0x40 | 0x60 | 0x70 | 0xa0 | 0x3f8 | 0x4d0 | 0x500 | 0x600 | 0x608 | 0xcf8
    )
}

fn memory(tally: &mut Tally, address: u64) {
    store(address, 0x5au8);
    tally.read(load::<u8>(address) == u8::MAX);
    store(address + 2, 0x5a5au16);
    tally.read(load::<u16>(address + 2) == u16::MAX);
    store(address + 4, 0x5a5a_5a5au32);
    tally.read(load::<u32>(address + 4) == u32::MAX);
    store(address + 8, 0x5a5a_5a5a_5a5a_5a5au64);
    tally.read(load::<u64>(address + 8) == u64::MAX);
    // Across the alignment, where one access becomes two.
    store(address + 13, 0x5a5a_5a5au32);
    tally.read(load::<u32>(address + 13) == u32::MAX);
}

fn ports(tally: &mut Tally, port: u16) {
    out8(port, 0x5a);
    tally.read(in8(port) == u8::MAX);
    out16(port + 2, 0x5a5a);
    tally.read(in16(port + 2) == u16::MAX);
    out32(port + 4, 0x5a5a_5a5a);
    tally.read(in32(port + 4) == u32::MAX);
}
