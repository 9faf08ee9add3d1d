//! The `vmm` command: see [`vmm::cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(vmm::cli::main(std::env::args_os().collect()))
}
