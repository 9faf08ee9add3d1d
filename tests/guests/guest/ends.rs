//! Ends as the command line says: `end=poweroff|reset|triple|panic|spin`, after `say=` on the console.
#![no_std]
#![no_main]

mod machine;

use core::str;

#[unsafe(no_mangle)]
fn guest(command_line: &'static [u8]) {
    if let Some(Ok(text)) = machine::option(command_line, b"say").map(str::from_utf8) {
        say!("{text}");
    }
    match machine::option(command_line, b"end") {
        Some(b"reset") => machine::reset(),
        // The event of a pvpanic device.
        Some(b"panic") => machine::out8(0x505, 1),
        // Outside every mapping, and no page fault gate: a double fault, then a triple one.
        Some(b"triple") => machine::store(0x6000_0000, 0u8),
        Some(b"spin") => loop {
            core::hint::spin_loop();
        },
        _ => machine::power_off(),
    }
}
