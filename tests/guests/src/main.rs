//! Writes one fast guest's ELF to stdout: `cargo run --package vmm-guests -- serial > serial.elf`.
//!
//! For programs that must build where the guests cannot, such as the tool that installs what building them takes.

use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    let names: Vec<String> = std::env::args().skip(1).collect();
    let guest = match names.as_slice() {
        [name] => vmm_guests::ALL.iter().find(|(known, _)| known == name),
        _ => None,
    };
    let Some((_, elf)) = guest else {
        let known: Vec<&str> = vmm_guests::ALL.iter().map(|(name, _)| *name).collect();
        eprintln!("vmm-guests: {names:?} is not one of {}", known.join(", "));
        return ExitCode::from(2);
    };
    match std::io::stdout().write_all(elf) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("vmm-guests: cannot write to stdout: {why}");
            ExitCode::FAILURE
        }
    }
}
